"""What can be set of torch's caching allocator, as the environment variable PYTORCH_CUDA_ALLOC_CONF says it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import InvalidInput, nearest

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch looks, the one that goes first first; torch before 2.9 knows the second only."""
LARGE_SEGMENT_MIB = 20


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _mebibytes(text: str) -> int:
    size = int(text)
    if size <= LARGE_SEGMENT_MIB:
        raise ValueError
    return size


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise ValueError
    return share


def _power_of_two(text: str) -> int:
    divisions = int(text)
    if divisions < 1 or divisions & (divisions - 1):
        raise ValueError
    return divisions


@dataclass(frozen=True, slots=True)
class _Option:
    """How a setting is read, what it may be, and what it is for whoever names it only."""

    parse: Callable[[str], Any]
    allowed: str
    usual: str


_OPTIONS: Mapping[str, _Option] = {
    "expandable_segments": _Option(_switch, "True or False", "True"),
    "max_split_size_mb": _Option(_mebibytes, f"a whole number of MiB above {LARGE_SEGMENT_MIB}", "128"),
    "garbage_collection_threshold": _Option(_share, "a number between 0 and 1", "0.8"),
    "roundup_power2_divisions": _Option(_power_of_two, "a power of two, such as 4", "4"),
}
_WITHOUT_EFFECT = ("backend:native", "pinned_", "release_lock_on_cudamalloc:")
"""How entries begin that do not change what is reserved on a device."""


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
        for entry in filter(None, text.replace(" ", "").replace("=", ":").split(",")):
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

    def __str__(self) -> str:
        """As torch reads it; empty for its default."""
        changed = {field.name: getattr(self, field.name) for field in fields(self)}
        return ",".join(f"{name}:{value}" for name, value in changed.items() if value != getattr(DEFAULT, name))


NAMES = tuple(_OPTIONS)
DEFAULT = AllocatorSettings()
USUAL = tuple(AllocatorSettings.parse(name) for name in NAMES)
"""Each setting alone, at its usual value."""


def in_force() -> tuple[AllocatorSettings, str]:
    """What this process's environment says, and a sentence on what of it is not modelled, or nothing."""
    for variable in VARIABLES:
        if text := os.environ.get(variable):
            try:
                return AllocatorSettings.parse(text), ""
            except InvalidInput as error:
                return DEFAULT, f"{variable}={text} is left out where reserved memory is modelled. {error}"
    return DEFAULT, ""
