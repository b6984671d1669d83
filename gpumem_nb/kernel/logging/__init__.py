"""Writing what is measured where other programs read it: each target in a file of its own, listed in ``targets``."""

from .logs import Log, Logs

__all__ = ["Log", "Logs"]
