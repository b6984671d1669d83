"""Search for the fastest settings that fit: what can be tried, in which order, and the result."""
