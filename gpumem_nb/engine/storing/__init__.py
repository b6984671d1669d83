"""Rank side: what is trained, in files."""
