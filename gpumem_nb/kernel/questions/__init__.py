"""Questions to the ranks of one cluster."""
