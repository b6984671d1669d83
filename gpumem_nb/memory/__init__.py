"""Accounting of memory: ledger, virtual GPU, device readings, leaks and the report. Pure torch.

``with gpumem_nb.memory.track() as report:`` on a rank reports what the code inside does to the memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tracking import track

__all__ = ["track"]


def __getattr__(name: str) -> Any:  # importing torch takes a second, and the notebook's kernel needs none of it
    if name == "track":
        from .tracking import track

        return track
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
