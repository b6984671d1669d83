"""The script of everything that needs a GPU: its parts, their order and their time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.gpu.run import CUT, FAILED, NOT_RUN, OK, SKIPPED, Part, Result, Results, Running, chosen, run, slower, stages
from tests.timing import HANG_S, until

SLEEPS = "import os, time\nprint(os.getpid(), flush=True)\nwhile True:\n    time.sleep(0.05)"
DEAF = f"""
import signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
{SLEEPS}
"""
MEETS = """
import pathlib, time
pathlib.Path({!r}).touch()
while not pathlib.Path({!r}).exists():
    time.sleep(0.01)
"""


def part(name: str, code: str, most_s: float = HANG_S, open_end: bool = False) -> Part:
    return Part(name, ("-c", code), most_s, open_end=open_end)


def outcomes(folder: Path) -> dict[str, str]:
    return {one["name"]: one["outcome"] for one in json.loads((folder / "results.json").read_text())}


def test_a_part_that_fails_stops_no_other_and_each_is_written_when_it_ends(tmp_path: Path) -> None:
    looks = f"import json; print([one['name'] for one in json.load(open({str(tmp_path / 'results.json')!r}))])"
    parts = [[part("bad", "raise SystemExit('it is broken')")], [part("good", looks)]]
    assert run(parts, Results(tmp_path), HANG_S) == 1
    assert outcomes(tmp_path) == {"bad": FAILED, "good": OK}
    bad, good = json.loads((tmp_path / "results.json").read_text())
    assert "it is broken" in bad["tail"]
    assert "['bad']" in good["tail"], "it was written before the next began"
    assert (tmp_path / "good.log").read_text() == good["tail"]


def test_parts_of_a_stage_run_beside_each_other(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    both = [part("a", MEETS.format(one, other)), part("b", MEETS.format(other, one))]
    assert run([both], Results(tmp_path), HANG_S) == 0
    assert set(outcomes(tmp_path).values()) == {OK}


@pytest.mark.parametrize("code", [SLEEPS, DEAF], ids=["listens", "does not listen"])
def test_what_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr("tests.gpu.run._GRACE_S", 0.3)
    running = Running(part("long", code), tmp_path)
    pid = until(lambda: (tmp_path / "long.log").read_text().split())[0]
    assert running.result(until_s=time.monotonic()).outcome == CUT
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_an_interrupt_ends_what_runs(tmp_path: Path) -> None:
    found: list[int] = []

    class Interrupted(Results):
        def add(self, result: Result) -> None:
            found.append(int(until(lambda: (tmp_path / "long.log").read_text().split())[0]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([[part("short", ""), part("long", SLEEPS)]], Interrupted(tmp_path), HANG_S)
    with pytest.raises(ProcessLookupError):
        os.kill(found[0], 0)


def test_what_there_is_no_time_for_is_told(tmp_path: Path) -> None:
    assert run([[part("late", ""), part("later", "")]], Results(tmp_path), 0.0) == 1
    assert outcomes(tmp_path) == {"late": NOT_RUN, "later": NOT_RUN}


def test_records_are_made_for_as_long_as_there_is_time(tmp_path: Path) -> None:
    parts = [[part(name, SLEEPS, open_end=True)] for name in ("records", "more")]
    assert run(parts, Results(tmp_path), 4.0) == 0
    assert outcomes(tmp_path) == {"records": CUT, "more": NOT_RUN}


def test_tests_that_were_all_left_out_are_told_so(tmp_path: Path) -> None:
    parts = [[part("panel", "print('=== 1 skipped in 0.1s ===')")]]
    assert run(parts, Results(tmp_path), HANG_S) == 0
    assert outcomes(tmp_path) == {"panel": SKIPPED}


def test_every_test_and_figure_has_its_part(tmp_path: Path) -> None:
    parts = stages("cuda", False, tmp_path, "/nccl/python", gpus=2)
    commands = [" ".join(part.command) for stage in parts for part in stage]
    for file in Path("tests/gpu").glob("test_*.py"):
        assert sum(str(file) in command for command in commands) == 1, file
    assert parts[0][0].name == "speed"
    names = [part.name for stage in parts for part in stage]
    assert len(set(names)) == len(names), "each has a log of its own"
    longer = slower(parts, 2.0)
    assert [part.most_s for part in longer[0]] == [2 * part.most_s for part in parts[0]]
    usual = stages("cuda", False, tmp_path, "", gpus=1)
    assert not {"several", "nccl"} & {part.name for stage in usual for part in stage}
    assert [part.name for part in next(chosen(usual, ["limits"]))] == ["limits"]
    with pytest.raises(SystemExit, match="There is no part limit: name some of speed, "):
        list(chosen(usual, ["limit"]))
