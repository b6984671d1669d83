"""Automatic snapshots stay within their space, and nobody else's are taken away."""

from __future__ import annotations

import os
import shutil
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpumem_nb.engine.attach import save_objects
from gpumem_nb.shared import snapshot_folder
from gpumem_nb.shared.cluster_records import this_process
from gpumem_nb.shared.snapshot_folder import (
    Snapshot,
    file_name,
    for_session,
    make,
    make_room,
    newest_first,
    notebook_of,
    of_all_sessions,
    tidy,
)

ME = this_process()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "root" / for_session(1).name
    make(folder)
    return folder


def session(own: Path, pid: int, started: int, number: int = 1, machine: str = "") -> Path:
    """The folder of another kernel's session, on this machine by default."""
    here = "-".join(own.name.split("-")[:3])
    return own.parent / f"{machine or here}-{pid}-{started}-{number}"


def snapshot(folder: Path, steps: int, size: int = 100, generation: int = 1) -> Path:
    """Older than all that are made later."""
    snapshot_folder.make(folder)
    path = folder / snapshot_folder.file_name(generation, steps)
    path.write_bytes(bytes(size))
    snapshot.clock += 1  # type: ignore[attr-defined]
    os.utime(path, ns=(snapshot.clock, snapshot.clock))  # type: ignore[attr-defined]
    return path


snapshot.clock = 10**18  # type: ignore[attr-defined]


def test_a_folder_is_its_owners_alone(own: Path) -> None:
    assert own.stat().st_mode & 0o777 == 0o700


def test_two_snapshots_are_kept_with_the_one_to_come(own: Path) -> None:
    paths = [snapshot(own, steps) for steps in (1, 2, 3)]
    assert make_room(own, 100, 10_000)
    assert newest_first(own) == [paths[2]]


def test_the_space_is_kept_even_if_only_the_new_one_fits(own: Path) -> None:
    snapshot(own, 1)
    assert make_room(own, 100, 150)
    assert newest_first(own) == []


def test_what_does_not_fit_at_all_takes_nothing_away(own: Path) -> None:
    path = snapshot(own, 1)
    assert not make_room(own, 200, 150)
    assert newest_first(own) == [path]


def test_a_session_that_gave_one_file_away_is_still_known_to_be_over(own: Path) -> None:
    other = session(own, ME.pid, ME.started, 2)
    snapshot(other, 1)
    tidy(other)
    os.utime(other / "over", ns=(1, 1))
    snapshot(other, 2)
    (other / "over").touch()
    os.utime(other / "over", ns=(1, 1))  # older than all snapshots
    assert make_room(own, 100, 200)
    assert [path.name for path in newest_first(other)] == [file_name(1, 2)]
    assert make_room(own, 200, 200)
    assert not other.exists()


def test_sessions_that_ended_give_way_oldest_first_and_living_ones_do_not(own: Path) -> None:
    ended, ended_later = session(own, 999999999, 7, 1), session(own, 999999998, 7, 1)
    first, second = snapshot(ended, 1), snapshot(ended_later, 1)
    alive = snapshot(session(own, ME.pid, ME.started, 2), 1)
    reused_pid = snapshot(session(own, ME.pid, 7), 1)
    foreign = own.parent / "someone" / "notes.state"
    foreign.parent.mkdir()
    foreign.write_bytes(bytes(100))
    assert make_room(own, 100, 500)
    assert not first.parent.exists()
    assert [path.exists() for path in (second, alive, reused_pid, foreign)] == [True] * 4
    assert make_room(own, 300, 500)
    assert [path.exists() for path in (second, alive, reused_pid, foreign)] == [False, True, False, True]
    assert not make_room(own, 301, 500)


def test_half_written_files_of_ended_sessions_go_at_once(own: Path) -> None:
    ended = session(own, 999999999, 7, 1)
    ended.mkdir()
    (ended / ".001-000000001.state.7.partial").write_bytes(bytes(100))
    assert make_room(own, 0, 10_000)
    assert not ended.exists()


def test_a_session_on_another_machine_is_left_alone_until_it_is_marked_or_long_untouched(own: Path) -> None:
    host, boot, pids = own.name.split("-")[:3]
    folders = {
        "another host": session(own, 999999999, 7, machine=f"0000000a-{boot}-{pids}"),
        "another container": session(own, 999999998, 7, machine=f"{host}-{boot}-1"),
        "the same pid there": session(own, ME.pid, ME.started, machine=f"0000000b-{boot}-{pids}"),
        "an earlier version": own.parent / "999999997-7-1",
        "much earlier": own.parent / "999999996-1700000000.25-1",
    }
    paths = {name: snapshot(folder, 1, size=10) for name, folder in folders.items()}
    for path in paths.values():
        os.utime(path)
    before_this_boot = snapshot(session(own, 999999999, 7, 2, machine=f"{host}-00000001-{pids}"), 1)
    assert make_room(own, 50, 100)
    assert all(path.exists() for path in paths.values()), "each may train yet"
    assert not before_this_boot.exists()
    assert not make_room(own, 51, 100)
    assert [(one.own, one.over) for one in of_all_sessions(own)] == [(False, False)] * len(paths), "but may be named"
    old = time.time() - (snapshot_folder.UNTOUCHED_DAYS + 1) * 86400
    os.utime(paths.pop("another host"), (old, old))
    (folders["another container"] / "over").touch()
    paths.pop("another container")
    assert sum(one.over for one in of_all_sessions(own)) == 2
    assert make_room(own, 70, 100)
    assert all(path.exists() for path in paths.values())
    assert sum(one.over for one in of_all_sessions(own)) == 0


def test_those_of_this_notebook_come_first_and_the_newest_of_them(own: Path) -> None:
    make(own, "a.ipynb")
    mine = snapshot(own, 1)
    before = session(own, 999999999, 7)
    make(before, "a.ipynb")
    earlier = snapshot(before, 2)
    others = session(own, 999999998, 7)
    make(others, "b.ipynb")
    theirs = snapshot(others, 3)
    nameless = snapshot(session(own, 999999997, 7), 4)
    found = of_all_sessions(own, "a.ipynb")
    assert [one.path for one in found] == [mine, earlier, nameless, theirs]
    assert [one.own for one in found] == [True, True, False, False]
    assert [one.own for one in of_all_sessions(own)] == [True, False, False, False]
    assert notebook_of(others) == "b.ipynb"
    tidy(others)
    assert notebook_of(others) == "b.ipynb", "also after an orderly end"


def test_a_folder_of_another_user_in_the_same_cache_is_left_alone(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, foreign = snapshot(session(own, 999999998, 7), 1), snapshot(session(own, 999999999, 7), 2)
    exists = Path.exists

    def may_look(path: Path) -> bool:
        if path.parent == foreign.parent:
            raise PermissionError(path)
        return exists(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", may_look)
        patch.setattr(os, "access", lambda path, mode: path != foreign.parent)
        assert [one.path for one in of_all_sessions(own)] == [ended]
        assert make_room(own, 50, 150)
    assert (ended.exists(), foreign.exists()) == (False, True)


def test_the_newest_stays_after_an_orderly_end_and_gives_way_to_later_sessions(own: Path) -> None:
    snapshot(own, 1)
    newest = snapshot(own, 2)
    (own / "attached.pickle").write_bytes(b"x")
    tidy(own)
    later = own.with_name(own.name[:-1] + "2")
    assert of_all_sessions(later) == [Snapshot(newest, own=True, over=True)]
    assert not (own / "attached.pickle").exists()
    assert make_room(later, 10_000, 10_000), "the kernel lives, the session does not"
    assert not newest.exists()


def test_the_sessions_own_snapshot_comes_first_and_those_of_living_sessions_never(own: Path) -> None:
    ended = snapshot(session(own, 999999999, 7, 1), 1)
    mine = snapshot(own, 2)
    snapshot(session(own, ME.pid, ME.started, 2), 3)
    snapshot(session(own, 999999999, 7, 2), 4)
    assert next(iter(of_all_sessions(own))).path == mine
    mine.unlink()
    (session(own, 999999999, 7, 2) / file_name(1, 4)).unlink()
    assert of_all_sessions(own) == [Snapshot(ended, own=False, over=True)]
    ended.unlink()
    assert of_all_sessions(own) == []


@pytest.mark.parametrize("kind", [np.zeros, torch.zeros])
def test_attached_objects_larger_than_the_room_for_snapshots_are_not_copied(own: Path, kind: Any) -> None:
    held = kind(2**20)
    tracemalloc.start()
    try:
        why = save_objects({"x": held}, own / "attached.pickle", 2**20)
        assert why == "they take more than the 1.0 MiB for snapshots"
        assert tracemalloc.get_traced_memory()[1] < held.nbytes / 2
    finally:
        tracemalloc.stop()
    assert list(own.iterdir()) == []


def test_attached_objects_make_room_among_snapshots(own: Path) -> None:
    old = snapshot(session(own, 999999999, 7, 1), 1, size=5000)
    assert not save_objects({"x": bytes(4000)}, own / "attached.pickle", 8000)
    assert not old.exists()
    assert not save_objects({"x": bytes(5000)}, own / "attached.pickle", 8000), "it replaces what was attached before"
    snapshot(session(own, ME.pid, ME.started, 2), 1, size=6000)
    assert "more than is left of the 7.8 KiB" in save_objects({"x": bytes(5000)}, own / "attached.pickle", 8000)
    assert list(own.iterdir()) == []


def test_a_session_without_snapshots_leaves_no_folder(own: Path) -> None:
    tidy(own)
    assert not own.exists()


def test_generations_are_told_apart(own: Path) -> None:
    snapshot(own, 500, generation=1)
    new = snapshot(own, 3, generation=2)
    assert newest_first(own, 2) == [new]
    assert newest_first(own, 3) == []


def test_folders_of_sessions_that_end_meanwhile_stop_no_listing(own: Path) -> None:
    ended = threading.Event()
    others = [own.parent / f"session-{number}" for number in range(20)]

    def sessions_come_and_go() -> None:
        while not ended.is_set():
            for folder in others:
                (folder / "inside").mkdir(parents=True, exist_ok=True)
            for folder in others:
                shutil.rmtree(folder, ignore_errors=True)

    thread = threading.Thread(target=sessions_come_and_go)
    thread.start()
    try:
        assert all(make_room(own, needed=1, space=2**30) for _ in range(300))
    finally:
        ended.set()
        thread.join()
