"""Which settings are fastest among those that fit: what can be tried, in which order, and what came of it."""
