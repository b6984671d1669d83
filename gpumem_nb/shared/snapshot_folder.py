"""Where automatic snapshots lie: one folder a session in the user's cache, together never larger than the stated space.

A folder is named after the kernel that made it, by pid and start, so that snapshots survive their kernel and those of a
session that still runs are never taken away.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import platformdirs

from .cluster_records import this_process
from .processes import identify

SUFFIX = ".state"
KEPT = 2
"""Snapshots of one session: the newest, and the one before it in case the newest cannot be read."""
_OVER = "over"  # a file of this name marks a session that was stopped while its kernel lives on
_NAME = re.compile(r"(\d+)-([\d.]+)-\d+")  # earlier versions wrote seconds with a point instead of clock ticks


def root() -> Path:
    """The folder of all sessions' folders."""
    return platformdirs.user_cache_path("gpumem_nb") / "snapshots"


def for_session(number: int) -> Path:
    """The folder of this kernel's ``number``-th session; not made yet."""
    me = this_process()
    return root() / f"{me.pid}-{me.started}-{number}"


def make(folder: Path) -> None:
    """Make a session's folder, readable by its owner only."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / _OVER).unlink(missing_ok=True)


def file_name(generation: int, steps: int) -> str:
    """What the snapshot of the ``generation``-th workload of a session is called."""
    return f"{generation:03d}-{steps:09d}{SUFFIX}"


def newest_first(folder: Path, generation: int | None = None) -> list[Path]:
    """A session's snapshots, those of one generation or all."""
    prefix = "" if generation is None else f"{generation:03d}-"
    return sorted(folder.glob(f"{prefix}*{SUFFIX}"), key=_age_key, reverse=True)


def newest_of_all(own: Path) -> Path | None:
    """The newest snapshot of this session, or else of those that ended: what another one trains is its own business."""
    ended = (path for folder in _ended(own) for path in newest_first(folder))
    return next(iter(newest_first(own)), None) or max(ended, key=_age_key, default=None)


def make_room(own: Path, needed: int, space: int) -> bool:
    """Delete what is old until ``needed`` more bytes keep all sessions together within ``space``; says whether they do.

    Half-written files of sessions that ended go first, then their snapshots, oldest first, and then this session's own.
    When the bytes cannot fit even so, nothing of this session is touched.
    """
    for folder in _ended(own):
        for partial in folder.glob(".*.partial"):
            partial.unlink(missing_ok=True)
    # The mark that a session is over goes last, with its folder.
    old = sorted((path for folder in _ended(own) for path in _files(folder) if path.name != _OVER), key=_age_key)
    mine = sorted(own.glob(f"*{SUFFIX}"), key=_age_key)
    taken = sum(_size(path) for path in _files(own.parent))
    if taken - sum(map(_size, old + mine)) + needed > space:
        return False
    surplus = mine[: max(0, len(mine) - KEPT + 1)] if needed else []
    for path in [*surplus, *old, *(path for path in mine if path not in surplus)]:
        if path not in surplus and taken + needed <= space:
            break
        taken -= _size(path)
        path.unlink(missing_ok=True)
    for folder in _ended(own):
        if not newest_first(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return True


def tidy(own: Path) -> None:
    """At an orderly end: keep the newest snapshot, for a session to come."""
    newest = newest_first(own)[:1]
    for path in _files(own):
        if path not in newest:
            path.unlink(missing_ok=True)
    if newest:
        (own / _OVER).touch()
    else:
        shutil.rmtree(own, ignore_errors=True)


def _ended(own: Path) -> Iterator[Path]:
    """Folders of sessions that are over. What was not made here, by its name, is nobody's business."""
    for folder in own.parent.glob("*"):
        name = _NAME.fullmatch(folder.name)
        if name and folder != own and ((folder / _OVER).exists() or not _runs(int(name[1]), name[2])):
            yield folder


def _runs(pid: int, started: str) -> bool:
    who = identify(pid)
    return who is not None and ("." in started or str(who.started) == started)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _age_key(path: Path) -> tuple[int, str]:
    with suppress(OSError):
        return path.stat().st_mtime_ns, path.name
    return 0, path.name
