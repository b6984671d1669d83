"""Copies of what a step changes, kept so that a step which one rank cannot finish leaves no trace on any of them."""
