"""The callback that reports what the kernel is waiting for."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Told what is being waited for, and how much of it is done (0 to 1)."""
