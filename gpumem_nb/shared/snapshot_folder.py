"""The folders of automatic snapshots: one per session in the user's cache, together never larger than the stated space.

A folder is named after the machine and the kernel that made it, so that snapshots survive their kernel, and those of a
session that still runs, here or on another machine with the same home folder, are never taken away.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from .cluster_records import this_process
from .processes import HOSTS_OWN, identify

SUFFIX = ".state"
KEPT = 2
"""Snapshots of one session: the newest, and the one before it in case the newest cannot be read."""
UNTOUCHED_DAYS = 7
"""After so long a session on another machine, whose processes cannot be looked up here, is taken to be over."""
_OVER = "over"  # a file of this name marks a stopped session whose kernel still runs
_NOTEBOOK = "notebook"  # one of this name says whose notebook's session it is
_MARKS = (_OVER, _NOTEBOOK)
# Host, boot, process namespace, pid and start; earlier versions wrote pid and start only, which may be of any machine.
_NAME = re.compile(r"(?:([0-9a-f]{8})-([0-9a-f]{8})-(\d+)-)?(\d+)-([\d.]+)-\d+")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An automatic snapshot of any session of this user.

    Attributes:
        path: its file.
        own: whether it is of this session, or of an earlier one of this notebook.
        over: whether its session is known to be over.
    """

    path: Path
    own: bool
    over: bool


def root() -> Path:
    """Return the folder of all sessions' folders."""
    return platformdirs.user_cache_path("gpumem_nb") / "snapshots"


def for_session(number: int) -> Path:
    """Return the folder of this kernel's ``number``-th session; not made yet."""
    me = this_process()
    return root() / f"{'-'.join(_machine())}-{me.pid}-{me.started}-{number}"


def make(folder: Path, notebook: str = "") -> None:
    """Make a session's folder, readable by its owner only; ``notebook`` names where its cells are, if that is known."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / _OVER).unlink(missing_ok=True)
    if notebook and notebook != notebook_of(folder):
        (folder / _NOTEBOOK).write_text(notebook)


def notebook_of(folder: Path) -> str:
    """Return the notebook of the session whose folder it is; empty where that is not known."""
    try:
        return (folder / _NOTEBOOK).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def file_name(generation: int, steps: int) -> str:
    """Return what the snapshot of the ``generation``-th workload of a session is called."""
    return f"{generation:03d}-{steps:09d}{SUFFIX}"


def newest_first(folder: Path, generation: int | None = None) -> list[Path]:
    """Return a session's snapshots, those of one generation or all."""
    prefix = "" if generation is None else f"{generation:03d}-"
    return sorted(folder.glob(f"{prefix}*{SUFFIX}"), key=_age_key, reverse=True)


def of_all_sessions(own: Path, notebook: str = "") -> list[Snapshot]:
    """Return the snapshots of all sessions of this user, those of this notebook first, and of these the newest first.

    Those of another session that runs are not among them: what that trains is its own business.
    """
    kernel = own.name.rpartition("-")[0]
    found = [Snapshot(path, own=True, over=False) for path in newest_first(own)]
    for folder in _sessions(own):
        over = _is_over(folder)
        ours = folder.name.rpartition("-")[0] == kernel or (notebook != "" and notebook_of(folder) == notebook)
        if over or _machine_of(folder) != _machine():
            found += [Snapshot(path, ours and over, over) for path in newest_first(folder)]
    return sorted(found, key=lambda one: (one.path.parent == own, one.own, _age_key(one.path)), reverse=True)


def make_room(own: Path, needed: int, space: int) -> bool:
    """Delete what is old until ``needed`` more bytes keep all sessions together within ``space``; return if they do.

    Half-written files of sessions that ended go first, then their snapshots, oldest first, and then this session's own.
    When the bytes cannot fit even so, nothing of this session is touched.
    """
    for folder in _ended(own):
        for partial in folder.glob(".*.partial"):
            partial.unlink(missing_ok=True)
    # The marks of a session go last, with its folder.
    old = sorted((path for folder in _ended(own) for path in _files(folder) if path.name not in _MARKS), key=_age_key)
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
        if path not in newest and path.name != _NOTEBOOK:
            path.unlink(missing_ok=True)
    if newest:
        (own / _OVER).touch()
    else:
        shutil.rmtree(own, ignore_errors=True)


def _ended(own: Path) -> Iterator[Path]:
    """Folders of sessions that are over."""
    return filter(_is_over, _sessions(own))


def _sessions(own: Path) -> Iterator[Path]:
    """Folders of other sessions. What was not made here, by its name, or is another user's is left alone."""
    named = (folder for folder in own.parent.glob("*") if folder != own and _NAME.fullmatch(folder.name))
    return (folder for folder in named if os.access(folder, os.R_OK | os.W_OK | os.X_OK))


def _is_over(folder: Path) -> bool:
    """Return whether a session is known to be over; on another machine only its mark or its age tells."""
    if (folder / _OVER).exists():
        return True
    name, (host, boot, pids) = _NAME.fullmatch(folder.name), _machine()
    assert name
    if (name[1], name[2], name[3]) == (host, boot, pids):
        who = identify(int(name[4]))
        return who is None or str(who.started) != name[5]
    if name[1] == host and name[2] != boot:
        return True
    touched = [_age_key(path)[0] for path in _files(folder)] or [_age_key(folder)[0]]
    return time.time_ns() - max(touched) > UNTOUCHED_DAYS * 24 * 3600 * 10**9


def _machine() -> tuple[str, str, str]:
    """This host, its boot, and the process namespace (a container's is its own), each in a form that names can have."""
    boot, pids = Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat("/proc/self/ns/pid").st_ino
    host = ""
    with suppress(OSError):
        host = Path("/etc/machine-id").read_text()
    if not host or pids != HOSTS_OWN:  # containers of one image may have one number and one name
        host = boot
    return _hashed(socket.gethostname() + host), _hashed(boot), str(pids)


def _machine_of(folder: Path) -> tuple[str, str, str] | None:
    name = _NAME.fullmatch(folder.name)
    return (name[1], name[2], name[3]) if name and name[1] else None


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _files(folder: Path) -> list[Path]:
    # rglob fails where another session's folder goes meanwhile
    found = (Path(place) / name for place, _, names in os.walk(folder) for name in names)
    return [path for path in found if path.is_file()]


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _age_key(path: Path) -> tuple[int, str]:
    with suppress(OSError):
        return path.stat().st_mtime_ns, path.name
    return 0, path.name
