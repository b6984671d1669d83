"""Undocumented parts of torch's profiler. Only for ranks.

- ``torch.autograd.profiler._is_profiler_enabled``: a second profiler that begins ends the first without a word.
- What its file says about its clock: times count from ``baseTimeNanoseconds``.
"""

from __future__ import annotations

import json
from typing import Any

from torch.autograd import profiler as _profiler

CHECKED_WITH = ("2.13.0",)  # of torch


def profiles() -> bool:
    """Return whether a profiler is on."""
    return bool(_profiler._is_profiler_enabled)


def read_profile(text: str, zero_ns: int) -> list[dict[str, Any]]:
    """Return the events of a profile that was exported; ``ts`` is then in microseconds since the zero of a clock.

    Args:
        text: of the file.
        zero_ns: where that zero lies, in nanoseconds since 1970.
    """
    profile = json.loads(text)
    later_us = (profile.get("baseTimeNanoseconds", 0) - zero_ns) / 1000
    events: list[dict[str, Any]] = profile["traceEvents"]
    return [event | {"ts": round(event["ts"] + later_us, 3)} for event in events]
