"""Policy: what the session does by itself, and when. Changes no mathematics, so it is not part of the settings."""

from __future__ import annotations

from typing import Any

from ..shared.units import parse_size, typed_size
from ..shared.values import Option, Values, only_words, positive, whole


def _seconds(value: Any) -> float:
    seconds = positive(value)
    if seconds < 1:
        raise ValueError(value)
    return seconds


_OPTIONS = (
    Option(
        "on_oom",
        "revert",
        "after an out-of-memory error: revert to the settings that worked, shrink the micro-batch and keep the global "
        "batch, or stop",
        choices=("revert", "shrink", "stop"),
    ),
    Option(
        "stall_limit_s",
        30.0,
        "seconds that ranks wait for one another before they are freed",
        parse=_seconds,
        allowed="a number of seconds of at least 1, such as 30",
    ),
    Option(
        "idle_minutes",
        60.0,
        "minutes without any work after which the session stops itself, or never",
        parse=positive,
        allowed="a number of minutes above 0, such as 60, or never",
        words={"never": None},
    ),
    Option(
        "snapshot_steps",
        "auto",
        "steps between automatic snapshots; auto takes them as often as costs less than 1 % of the time",
        parse=whole,
        allowed="a whole number of at least 1, such as 100, or auto, or never",
        words={"auto": "auto", "never": "never"},
    ),
    Option(
        "snapshot_space",
        4 * 2**30,
        "disk space for automatic snapshots",
        parse=parse_size,
        allowed="a size, such as 4GiB",
        write=typed_size,
    ),
    Option(
        "ledger_steps",
        "auto",
        "how often the memory of a step is recorded by category: one step in this many; auto records one in 20, or "
        "fewer where that would take more than half a percent of the time",
        parse=whole,
        allowed="a whole number of at least 1, such as 20, or auto, or never",
        words={"auto": "auto", "never": "never"},
    ),
    Option(
        "eval_every",
        "never",
        "how often the model is evaluated on the validation data: after each step that this number divides, or never",
        parse=whole,
        allowed="a whole number of at least 1, such as 100, or never",
        words={"never": "never"},
    ),
    Option(
        "autotune",
        False,
        "look for the fastest bucket_mib, cycle_time_ms, fusion_threshold_mib and compression while training goes on; "
        "off by itself once they are found",
        parse=only_words,
        allowed="on or off",
        words={"on": True, "off": False},
    ),
)
RULES = {option.name: option for option in _OPTIONS}


class Policy(Values):
    """The rules by which the session acts on its own.

    ``stall_limit_s`` in seconds, ``idle_minutes`` in minutes (``None``: never), ``snapshot_steps`` a number, ``auto``
    or ``never``, ``snapshot_space`` in bytes, ``ledger_steps`` a number, ``auto`` or ``never``, ``eval_every`` a number
    or ``never``, ``autotune`` whether it is on.
    """

    __slots__ = ()
    table = RULES
