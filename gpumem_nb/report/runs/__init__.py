"""The record of a tuning session: every configuration with what it measured, side by side, compared, kept in files."""

from .record import Runs
from .row import Row

__all__ = ["Row", "Runs"]
