"""A GPU for ranks without one: torch's CPU allocator, counted and limited as a GPU's."""
