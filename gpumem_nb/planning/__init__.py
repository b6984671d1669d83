"""Predictions and advice: decide what to ask the ranks, and interpret their answers."""
