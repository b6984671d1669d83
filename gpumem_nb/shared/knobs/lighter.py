"""Changes of knobs that may make a category of memory smaller, and are not in use yet."""

from __future__ import annotations

from collections.abc import Callable

from ..settings import Settings
from .knob import Changes, Knob, Need
from .table import KNOBS


def strongest_first(need: Need) -> list[Changes]:
    """Those of the knobs that move most of the category come first."""
    return _changes(need, lambda knob: -knob.moves[need.category])


def mildest_first(need: Need) -> list[Settings]:
    """Return the settings after each change: first those that keep the mathematics, then those that move little."""
    changed = [need.settings.replace(**changes) for changes in _changes(need, lambda knob: knob.moves[need.category])]
    return sorted(changed, key=lambda after: not after.same_mathematics(need.settings))


def _changes(need: Need, order: Callable[[Knob], int]) -> list[Changes]:
    able = [knob for knob in KNOBS.values() if need.category in knob.moves]
    return [changes for knob in sorted(able, key=order) if knob.lighter for changes in knob.lighter(need)]
