"""Automatic snapshots stay within their space, and nobody else's are taken away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpumem_nb.engine.storing.attached_objects import save
from gpumem_nb.shared import snapshot_folder
from gpumem_nb.shared.cluster_records import this_process
from gpumem_nb.shared.snapshot_folder import file_name, make, make_room, newest_first, newest_of_all, tidy

ME = this_process()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "root" / f"{ME.pid}-{ME.started}-1"
    make(folder)
    return folder


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
    other = own.with_name(f"{ME.pid}-{ME.started}-2")
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
    ended, ended_later = own.parent / "999999999-7-1", own.parent / "999999998-7-1"
    first, second = snapshot(ended, 1), snapshot(ended_later, 1)
    alive = snapshot(own.parent / f"{ME.pid}-{ME.started}-2", 1)
    reused_pid = snapshot(own.parent / f"{ME.pid}-7-1", 1)
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
    ended = own.parent / "999999999-7-1"
    ended.mkdir()
    (ended / ".001-000000001.state.7.partial").write_bytes(bytes(100))
    assert make_room(own, 0, 10_000)
    assert not ended.exists()


def test_folders_named_by_earlier_versions_belong_to_whoever_has_the_pid(own: Path) -> None:
    ended = snapshot(own.parent / "999999999-1700000000.25-1", 1)
    alive = snapshot(own.parent / f"{ME.pid}-1700000000.25-1", 1)
    assert make_room(own, 100, 200)
    assert [path.exists() for path in (ended, alive)] == [False, True]


def test_the_newest_stays_after_an_orderly_end_and_gives_way_to_later_sessions(own: Path) -> None:
    snapshot(own, 1)
    newest = snapshot(own, 2)
    (own / "attached.pickle").write_bytes(b"x")
    tidy(own)
    later = own.with_name(own.name[:-1] + "2")
    assert newest_of_all(later) == newest
    assert not (own / "attached.pickle").exists()
    assert make_room(later, 10_000, 10_000), "the kernel lives, the session does not"
    assert not newest.exists()


def test_the_sessions_own_snapshot_comes_first_and_those_of_living_sessions_never(own: Path) -> None:
    ended = snapshot(own.parent / "999999999-7-1", 1)
    mine = snapshot(own, 2)
    snapshot(own.parent / f"{ME.pid}-{ME.started}-2", 3)
    snapshot(own.parent / "999999999-7-2", 4)
    assert newest_of_all(own) == mine
    mine.unlink()
    (own.parent / "999999999-7-2" / file_name(1, 4)).unlink()
    assert newest_of_all(own) == ended
    ended.unlink()
    assert newest_of_all(own) is None


def test_attached_objects_make_room_among_snapshots(own: Path) -> None:
    old = snapshot(own.parent / "999999999-7-1", 1, size=5000)
    assert not save({"x": bytes(4000)}, own / "attached.pickle", 8000)
    assert not old.exists()
    assert not save({"x": bytes(5000)}, own / "attached.pickle", 8000), "it replaces what was attached before"
    snapshot(own.parent / f"{ME.pid}-{ME.started}-2", 1, size=6000)
    assert "more than is left of the 7.8 KiB" in save({"x": bytes(5000)}, own / "attached.pickle", 8000)
    assert list(own.iterdir()) == []


def test_a_session_without_snapshots_leaves_no_folder(own: Path) -> None:
    tidy(own)
    assert not own.exists()


def test_generations_are_told_apart(own: Path) -> None:
    snapshot(own, 500, generation=1)
    new = snapshot(own, 3, generation=2)
    assert newest_first(own, 2) == [new]
    assert newest_first(own, 3) == []
