"""Driving the ranks: chunks in flight, settings that change between them, stalls and failures that are survived."""

from .training import Training

__all__ = ["Training"]
