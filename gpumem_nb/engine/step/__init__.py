"""Rank side: one optimizer step of a live model, and how it is undone."""
