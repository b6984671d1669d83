"""What is measured is written for other programs, completely, and never at the cost of training."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumem_nb.kernel import logs
from gpumem_nb.kernel.history import History
from gpumem_nb.kernel.logs import Logs
from gpumem_nb.report.run_summary import Evaluation
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.messages import Sample
from gpumem_nb.shared.settings import Settings
from tests.ledgers import MIB, ledger, reading, sample, waits


class Measured:
    """A session's history and logs, without ranks."""

    def __init__(self, ranks: int = 2) -> None:
        self.told: list[str] = []
        self.ranks = ranks
        self.logs = Logs(self.told.append)
        self.start()

    def start(self) -> None:
        """Ranks are started, perhaps again."""
        self.history = History(self.ranks, self.logs.take_in)

    def load(self, name: str, steps: int = 0, settings_id: int = 1) -> None:
        self.history.steps = steps
        self.history.begin(settings_id, name, Settings())
        self.history.mark("load", f"loaded {name}")

    def train(self, first: int, last: int, **changed: Any) -> None:
        steps = range(first, last + 1)
        found = [sample(step, rank, loss=step + rank / 2, **changed) for step in steps for rank in range(self.ranks)]
        self.history.add(found, [reading()] * self.ranks)

    def log(self, target: Path, to: str | None = None) -> Any:
        return self.logs.begin(str(target), to, self.history.settings_now())


def lines(path: Path, kind: str = "") -> list[dict[str, Any]]:
    read = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in read if kind in ("", line["type"])]


def evaluation(step: int) -> Evaluation:
    return Evaluation(step, 0.5, {"accuracy": 0.75}, 9, 0.1, MIB, 1, 3.0)


def test_json_lines_hold_everything_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    session = Measured()
    session.load("w")
    log = session.log(path)
    assert repr(log) == f"steps, settings, evaluations and events go to JSON lines in {path}"
    session.train(1, 3)
    session.history.begin(2, "w", Settings(precision="bf16"))
    session.history.mark("flip", "precision fp32 → bf16")
    session.history.add([sample(4, 0, ledger(), loss=math.nan, settings_id=2, times=waits(0.04))], [reading()] * 2)
    session.history.add([sample(4, 0, event="oom", settings_id=2)], [reading()] * 2)
    session.history.evaluated(evaluation(4))
    session.logs.stop()
    steps = lines(path, "step")
    assert [(line["step"], line["rank"], line["loss"]) for line in steps[:6]] == [
        (step, rank, step + rank / 2) for step in (1, 2, 3) for rank in (0, 1)
    ]
    assert steps[0]["live_peak_bytes"] == 40 * MIB
    assert math.isnan(float(steps[6]["loss"]))
    assert steps[6]["at_peak"]["activations"] == 20 * MIB
    assert (steps[6]["forward_s"], steps[6]["reduction_s"], steps[6]["hidden_s"]) == (pytest.approx(0.06), 0.04, 0)
    assert "times" not in steps[6]
    assert steps[7]["event"] == "oom"
    assert [(line["settings_id"], line["precision"]) for line in lines(path, "settings")] == [(1, "fp32"), (2, "bf16")]
    assert [line["text"] for line in lines(path, "event")] == ["precision fp32 → bf16", str(evaluation(4))]
    [found] = lines(path, "eval")
    assert (found["loss"], found["metrics"]) == (0.5, {"accuracy": 0.75})
    assert steps[0]["time"] == pytest.approx(session.history.started_s + 0.1)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in tags}


def test_event_files_have_the_mean_and_each_rank(tmp_path: Path) -> None:
    session = Measured()
    session.load("w")
    log = session.log(tmp_path / "a")
    assert f"tensorboard --logdir {tmp_path}" in repr(log)
    session.train(1, 3)
    session.history.add([sample(3, rank, event="oom") for rank in range(2)], [reading()] * 2)
    session.history.mark("note", "something")
    session.history.evaluated(evaluation(3))
    session.logs.stop()
    found = scalars(tmp_path / "a")
    assert found["loss/mean"] == [(1, 1.25), (2, 2.25), (3, 3.25)]
    assert found["loss/rank1"] == [(1, 1.5), (2, 2.5), (3, 3.5)]
    assert found["samples_per_s/all"][0] == (1, 640.0)
    assert found["memory/live_peak_gib/rank0"][0] == (1, 40 / 1024)
    assert found["settings/batch_size"] == [(0, Settings().batch_size)]
    assert found["eval/accuracy"] == [(3, 0.75)]
    assert not torch.cuda.is_initialized()


def test_a_restart_goes_on_in_the_same_run_and_undone_steps_are_replaced(tmp_path: Path) -> None:
    session = Measured()
    session.load("w")
    session.log(tmp_path / "a")
    session.train(1, 6)
    session.start()
    session.load("w")
    session.load("w", steps=4, settings_id=2)
    session.train(5, 6, settings_id=2)
    session.logs.stop()
    assert [step for step, _ in scalars(tmp_path / "a")["loss/mean"]] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "a-2").exists()


def test_what_is_loaded_afresh_is_another_run(tmp_path: Path) -> None:
    session = Measured()
    session.load("w")
    session.log(tmp_path / "a")
    session.log(tmp_path / "log.jsonl")
    session.train(1, 3)
    session.load("other", settings_id=2)
    session.train(1, 2, settings_id=2)
    session.load("w", steps=3, settings_id=3)  # resumed from a file
    session.train(4, 5, settings_id=3)
    session.logs.stop()
    steps = [[step for step, _ in scalars(tmp_path / name)["loss/mean"]] for name in ("a", "a-2", "a-3")]
    assert steps == [[1, 2, 3], [1, 2], [4, 5]]
    assert [line["run"] for line in lines(tmp_path / "log.jsonl", "step")] == [1] * 6 + [2] * 4 + [3] * 4


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    full = tmp_path / "log.jsonl"
    full.symlink_to("/dev/full")
    session = Measured()
    session.load("w")
    log = session.log(full)
    session.train(1, 500)
    log.stop()
    for step in range(501, 510):
        session.train(step, step)
    assert session.history.steps == 509
    [told] = session.told
    assert told == log.problem == repr(log)
    assert "No space left" in told
    assert "training goes on" in told
    assert session.logs.problems == [told]
    session.log(tmp_path / "other.jsonl")
    assert session.logs.problems == [], "a new log is a new attempt"
    session.logs.stop()


class Slow:
    """A target that writes nothing until it may."""

    about = "nowhere"

    def __init__(self) -> None:
        self.may = threading.Event()
        self.steps = 0

    def step(self, time_s: float, samples: Sequence[Sample]) -> None:
        self.may.wait()
        self.steps += 1

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def test_nobody_waits_for_a_slow_target_and_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setitem(logs.TARGETS, "slow", lambda target: slow)
    monkeypatch.setattr(logs, "MOST_WAITING", 10)
    session = Measured()
    session.load("w")
    log = session.log(Path("x"), "slow")
    for step in range(1, 101):
        session.train(step, step)
    assert slow.steps == 0
    slow.may.set()
    session.logs.stop()
    assert 3 <= slow.steps <= 8
    assert f"; {2 * (100 - slow.steps)} samples were left out" in repr(log)


AT_EXIT = """
from gpumem_nb.shared.settings import Settings
from tests.unit.test_logging import Measured
from pathlib import Path
session = Measured()
session.load("w")
session.log(Path({path!r}), {to!r})
session.train(1, 50)
"""


@pytest.mark.parametrize("to", ["jsonl", "tensorboard"])
def test_the_end_of_the_interpreter_loses_nothing(to: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    subprocess.run([sys.executable, "-c", textwrap.dedent(AT_EXIT.format(path=str(path), to=to))], check=True)
    if to == "jsonl":
        assert len(lines(path, "step")) == 100
    else:
        assert len(scalars(path)["loss/mean"]) == 50


def test_what_cannot_be_logged_to_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Measured()
    notebook = tmp_path / "work.jsonl"
    notebook.write_text('{"cells": []}\n')
    with pytest.raises(InvalidInput, match="holds something else than a log"):
        session.log(notebook)
    assert notebook.read_text() == '{"cells": []}\n'
    with pytest.raises(InvalidInput, match=r"cannot be written: .*Not a directory.*Give another folder"):
        session.log(notebook / "a")
    with pytest.raises(InvalidInput, match="did you mean 'tensorboard'"):
        session.log(tmp_path / "a", "tensorbord")
    path = tmp_path / "log.jsonl"
    session.log(path)
    with pytest.raises(InvalidInput, match="is logged to already"):
        session.log(path)
    with pytest.raises(InvalidInput, match="Nothing is logged to elsewhere"):
        session.logs.stop("elsewhere")
    session.logs.stop(str(path))
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    monkeypatch.setitem(sys.modules, "trackio", None)
    for to in ("tensorboard", "trackio"):
        with pytest.raises(InvalidInput, match=f"pip install {to}$"):
            session.log(tmp_path / "a", to)
    assert not list(session.logs)


@pytest.mark.parametrize("name", ["run.jsonl", "runs/a"])
def test_a_place_is_logged_to_once_however_it_is_spelled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path)
    session = Measured()
    session.logs.begin(name, None, None)
    for same in (f"./{name}", str(tmp_path / name), f"~/{name}", f"link/{name}", f"other/../{name}"):
        with pytest.raises(InvalidInput, match="is logged to already"):
            session.logs.begin(same, None, None)
    assert len(session.logs.stop(f"./{name}")) == 1


def test_a_log_goes_on_in_its_file(tmp_path: Path) -> None:
    for _ in range(2):
        session = Measured()
        session.load("w")
        session.log(tmp_path / "log.jsonl")
        session.train(1, 2)
        session.logs.stop()
    assert [line["step"] for line in lines(tmp_path / "log.jsonl", "step")] == [1, 1, 2, 2] * 2
    assert [line["run"] for line in lines(tmp_path / "log.jsonl", "step")] == [1] * 4 + [2] * 4


def test_a_log_whose_end_was_cut_short_has_no_number_of_a_run_twice_and_loses_no_other_line(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"type": "event", "run": 2}\n{"type": "ev')
    session = Measured()
    session.load("w")
    session.log(tmp_path / "log.jsonl")
    session.train(1, 2)
    session.logs.stop()
    first, cut, *later = (tmp_path / "log.jsonl").read_text().splitlines()
    assert (first, cut) == ('{"type": "event", "run": 2}', '{"type": "ev')
    assert {json.loads(line)["run"] for line in later} == {3}
    assert "settings" in [json.loads(line)["type"] for line in later]


def test_trackio_keeps_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    script = f"""
    import os
    os.environ["TRACKIO_DIR"] = {str(tmp_path)!r}
    from tests.unit.test_logging import Measured, evaluation
    from pathlib import Path
    import trackio
    own = trackio.init("own", auto_log_cpu=False)
    session = Measured()
    session.load("w")
    session.log(Path("project/a"), "trackio")
    trackio.log({{"mine": 1}})
    session.train(1, 3)
    session.history.mark("note", "something")
    session.history.evaluated(evaluation(3))
    session.logs.stop()
    from trackio.sqlite_storage import SQLiteStorage
    trackio.finish()
    print([[line["step"], line["loss/mean"]] for line in SQLiteStorage.get_logs("project", "a") if "loss/mean" in line])
    print([line["mine"] for line in SQLiteStorage.get_logs("own", own.name)])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-2]) == [[1, 1.25], [2, 2.25], [3, 3.25]]
    assert json.loads(done.stdout.splitlines()[-1]) == [1], "a run of somebody's own is left alone"
