"""Plain values and words that the notebook's process and the ranks both use. Without torch."""
