"""Words and tables for terminal and notebook, from plain values; without widgets."""
