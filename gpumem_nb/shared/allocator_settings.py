"""The settings of torch's caching allocator, as the environment variable PYTORCH_CUDA_ALLOC_CONF states them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from .errors import InvalidInput, nearest
from .version import torch_version

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch looks: in the second only if the first is not set, even to nothing (torch 2.13); before 2.9 never."""
LEAST_SPLIT_MIB = 21
"""Torch takes more than the size of a large segment, 20 MiB (2.8); later ones take 20 as well."""
_MOST_MIB, _MOST_DIVISIONS = 2**24, 1024


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _mebibytes(text: str) -> int:
    size = int(text)
    if not LEAST_SPLIT_MIB <= size <= _MOST_MIB:
        raise ValueError
    return size


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise ValueError
    return share


def _power_of_two(text: str) -> int:
    divisions = int(text)
    if not 1 <= divisions <= _MOST_DIVISIONS or divisions & (divisions - 1):
        raise ValueError
    return divisions


@dataclass(frozen=True, slots=True)
class _Option:
    """For each setting: how to read it, what is allowed, and its value when only the name is given."""

    parse: Callable[[str], Any]
    allowed: str
    usual: str


_OPTIONS: Mapping[str, _Option] = {
    "expandable_segments": _Option(_switch, "True or False", "True"),
    "max_split_size_mb": _Option(_mebibytes, f"a whole number of MiB from {LEAST_SPLIT_MIB} on", "128"),
    "garbage_collection_threshold": _Option(_share, "a number between 0 and 1", "0.8"),
    "roundup_power2_divisions": _Option(_power_of_two, f"a power of two up to {_MOST_DIVISIONS}", "4"),
}
_WITHOUT_EFFECT = ("backend:native", "pinned_", "release_lock_on_cudamalloc:")
"""How entries begin that do not change what is reserved on a device."""


def _entries(text: str) -> list[str]:
    """Return the settings of a line, with what stands in brackets."""
    return re.findall(r"[^,\[]+(?:\[[^\]]*\]?)?", text.replace(" ", "").replace("=", ":"))


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Settings of the caching allocator that change what it reserves; see torch's notes on CUDA memory management.

    Attributes:
        expandable_segments: one segment that grows in pages, in place of many.
        max_split_size_mb: MiB from which on free blocks are not split; ``None`` for all may be.
        garbage_collection_threshold: the share of the memory limit above which free segments go, oldest first; ``None``
            for never.
        roundup_power2_divisions: into how many parts the way from one power of two to the next is divided, to which
            sizes are rounded up; 1 for none.
    """

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    garbage_collection_threshold: float | None = None
    roundup_power2_divisions: int = 1

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Settings as torch writes them: ``expandable_segments:True,max_split_size_mb:128``.

        A name without a value stands for its usual value; ``=`` is read as ``:``.

        Raises:
            InvalidInput: a name or a value that is not known.
        """
        found: dict[str, Any] = {}
        for entry in _entries(text):
            if entry.startswith(_WITHOUT_EFFECT):
                continue
            name, colon, value = entry.partition(":")
            option = _OPTIONS.get(name)
            if option is None:
                raise InvalidInput(
                    f"The caching allocator's setting {name!r} is not known here: {nearest(name, NAMES)}."
                )
            try:
                found[name] = option.parse(value if colon else option.usual)
            except ValueError:
                raise InvalidInput(
                    f"{name}:{value} cannot be used: it must be {option.allowed}, such as {name}:{option.usual}."
                ) from None
        return cls(**found)

    def rounded(self, nbytes: Any) -> int:
        """Return what blocks of these sizes take together, given an array of whole numbers, each a multiple of 512."""
        parts = self.roundup_power2_divisions
        sizes = [int(size) for size in nbytes]
        steps = [(1 << size.bit_length() - 1) // parts if parts > 1 and size > 512 * parts else 512 for size in sizes]
        return sum(-(-size // step) * step for size, step in zip(sizes, steps, strict=True))

    def __str__(self) -> str:
        """As torch reads it; empty for its default."""
        changed = {field.name: getattr(self, field.name) for field in fields(self)}
        return ",".join(f"{name}:{value}" for name, value in changed.items() if value != getattr(DEFAULT, name))


NAMES = tuple(_OPTIONS)
DEFAULT = AllocatorSettings()
USUAL = tuple(AllocatorSettings.parse(name) for name in NAMES)
"""Each setting alone, at its usual value."""


def variable() -> str:
    """Return the variable that this torch reads, of those that are set; if none is, the one that every torch reads."""
    known = VARIABLES if torch_version() >= (2, 9) else VARIABLES[:1]
    return next((name for name in known if name in os.environ), VARIABLES[0])


def in_force() -> tuple[AllocatorSettings, str]:
    """Return what this process's environment says, and a sentence on what of it is not modelled, or nothing."""
    name = variable()
    understood, lacking = list[str](), list[str]()
    for entry in _entries(os.environ.get(name, "")):
        with suppress(InvalidInput):
            AllocatorSettings.parse(entry)
            understood.append(entry)
            continue
        lacking.append(entry)
    note = f"Of {name}, {', '.join(lacking)} is left out where reserved memory is modelled." if lacking else ""
    return AllocatorSettings.parse(",".join(understood)), note
