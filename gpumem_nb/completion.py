"""Completion behind ``%hvd_*``: names of workloads and options, knobs and their values."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from .cluster.launchers import LAUNCHERS
from .kernel.policy import RULES
from .shared.settings import KNOBS
from .workloads.catalog import CATALOG

_FLAGS = {
    "hvd_start": ["--device", "--memory-limit", "--hosts", "--launcher", "--threads", "--timeout"],
    "hvd": ["--ranks", "--out", "--quiet"],
    "hvd_status": ["--json"],
    "hvd_pull": ["--ranks"],
    "hvd_panel": ["--dock"],
    "hvd_memory": ["--by", "--timeline", "--snapshot"],
}
_VALUES: dict[str, Collection[str]] = {
    "--device": ["auto", "cuda", "cpu"],
    "--launcher": LAUNCHERS,
    "--by": ["category", "module"],
}


def complete_hvd(_: Any, event: Any) -> list[str]:
    """What can stand at the end of ``event.line``, as IPython's ``complete_command`` hook wants it."""
    words = event.line.split(" ")
    magic, before, word = words[0].lstrip("%"), words[1:-1], words[-1]
    if len(words) < 2:
        return []
    return [_rest(candidate, word) for candidate in _candidates(magic, before, word) if candidate.startswith(word)]


def _rest(candidate: str, word: str) -> str:
    """IPython replaces only what follows the last ``=``."""
    return candidate.rpartition("=")[2] if "=" in word else candidate


def _candidates(magic: str, before: list[str], word: str) -> list[str]:
    if before and before[-1] in _VALUES:
        return list(_VALUES[before[-1]])
    if magic == "hvd_set":
        name = word.partition("=")[0]
        if "=" in word:
            known = KNOBS | RULES
            choices = known[name].choices if name in known else ()
            return [f"{name}={choice}" for choice in (*choices, *(["none"] if name == "clip_norm" else []))]
        return [f"{name}=" for name in (*KNOBS, *RULES)]
    if magic == "hvd_load":
        loaded = next((entry for entry in before if entry in CATALOG), None)
        return [f"{option}=" for option in CATALOG[loaded].options] if loaded else list(CATALOG)
    if magic == "hvd_attach":
        return ["model=", "loss=", "data=", "optimizer="]
    return _FLAGS.get(magic, [])
