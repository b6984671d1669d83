"""Activation checkpointing: blocks that run once more in backward, from the state that they saw."""
