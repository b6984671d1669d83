"""Steps that are recorded on a rank for a trace: what was going on, as events for a viewer."""
