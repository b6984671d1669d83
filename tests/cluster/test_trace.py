"""One trace of all ranks: torch's profiler and Horovod's timeline on one clock, in steps that count like any others."""

from __future__ import annotations

import gzip
import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import Interrupted, InvalidInput, TrainingFailed, WorkloadError
from gpumem_nb.shared.step_times import BACKWARD, DATA, FORWARD, REDUCTION, UPDATE
from tests.cluster.stop_button import PROMPT_S, Stop
from tests.conftest import weights
from tests.timing import in_time, until

pytestmark = pytest.mark.cluster

LEFT = """
import os, torch
len(os.listdir("/proc/self/task")), torch.autograd.profiler._is_profiler_enabled, os.environ.get("HOROVOD_TIMELINE"), [
    name for name in os.listdir(os.environ["IPP_PROFILE_DIR"]) if name.startswith("trace")
]
"""
OWN = """
import time
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
rows = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
trouble, seen = None, 0
def loss(model, batch):
    global seen
    seen += 1
    if trouble and rank == 0 and seen == 2:
        open(reached, "w").close()
        if trouble == "raises":
            raise ValueError("not this one")
        time.sleep(1000)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
CLOCKS_US = 500  # by which torch's, Horovod's and the step's clock may differ
Events = list[dict[str, Any]]


@pytest.fixture
def reached(tmp_path: Path) -> Path:
    """A file that is there once a rank has come to its trouble."""
    return tmp_path / "reached"


@pytest.fixture
def own(two_ranks: Session, reached: Path) -> Session:
    """A model of somebody's own, whose loss can be made to fail, or to sleep, when it is called for the second time."""
    two_ranks.run(f"{OWN}\nreached = {str(reached)!r}")
    two_ranks.attach(model="net", loss="loss", data="rows")
    return two_ranks


def written(path: Path) -> Events:
    """The events of a trace."""
    whole = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    events: Events = whole["traceEvents"]
    return events


def named(events: Events, what: str) -> dict[str, int]:
    """Numbers of processes by what they are called."""
    return {one["args"]["name"].split(" (")[0]: one["pid"] for one in events if one["name"] == what}


def of(events: Events, process: int, category: str, forms: str = "X") -> Events:
    """Slices of a kind, in their order; with ``Xi`` those that took less than a microsecond, too."""
    found = [one for one in events if one["pid"] == process and one.get("cat") == category and one["ph"] in forms]
    return sorted(found, key=lambda one: float(one["ts"]))


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event.get("dur", 0.0))


def nothing_overlaps(events: Events) -> None:
    """Slices of a lane enclose each other, or come one after the other: viewers leave out what does not."""
    lanes: dict[int, Events] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault(event["tid"], []).append(event)
    assert len(lanes) == 5, "steps and the main thread of both ranks, and a collective"
    for lane in lanes.values():
        open_until: list[float] = []
        for event in sorted(lane, key=lambda one: (one["ts"], -one["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or round(end(event), 3) <= open_until[-1], event
            open_until.append(round(end(event), 3))


def test_all_ranks_lie_on_one_clock_in_one_file(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.train(2)
    told: list[str] = []
    trace = session.trace(tmp_path / "trace.json", 3, lambda what, done: told.append(what))
    assert (trace.steps, trace.ranks) == ((3, 4, 5), 2)
    assert session.history.steps == 5
    assert str(trace.path) in str(trace)
    assert "steps 3 to 5 of 2 ranks" in str(trace)
    assert "https://ui.perfetto.dev" in str(trace)
    assert told[0] == "recording 3 steps of 2 ranks"
    assert told[-1] == "gathering the part of rank 1"
    events = written(trace.path)
    assert len(events) == trace.events
    nothing_overlaps(events)
    processes = named(events, "process_name")
    assert list(processes) == ["rank 0", "Horovod's timeline, as rank 0 sees it", "rank 1"]
    ranks, horovod = [processes["rank 0"], processes["rank 1"]], processes["Horovod's timeline, as rank 0 sees it"]
    steps = [of(events, rank, "step") for rank in ranks]
    for own_steps, rank in zip(steps, ranks, strict=True):
        assert [one["name"] for one in own_steps] == ["step 3", "step 4", "step 5"]
        for step in own_steps:
            inside = [one for one in of(events, rank, "part") if step["ts"] <= one["ts"] < end(step)]
            assert {DATA, FORWARD, BACKWARD, REDUCTION, UPDATE} <= {one["name"] for one in inside}
            forward = next(one for one in inside if one["name"] == FORWARD)
            backward = next(one for one in inside if one["name"] == BACKWARD)
            convolutions = [one for one in of(events, rank, "cpu_op") if one["name"] == "aten::convolution"]
            within = [one for one in convolutions if step["ts"] <= one["ts"] < end(step)]
            assert within
            assert all(forward["ts"] <= one["ts"] <= end(one) <= end(forward) for one in within), "one clock"
            grads = [one for one in of(events, rank, "cpu_op") if one["name"] == "aten::convolution_backward"]
            assert [one for one in grads if backward["ts"] <= one["ts"] <= end(one) <= end(backward)]
    for one, other in zip(*steps, strict=True):
        assert max(one["ts"], other["ts"]) < min(end(one), end(other)), "both took it at the same time"
    for name in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "MPI_ALLREDUCE"):
        # What all ranks have sent before one cycle of Horovod's is negotiated at once, within a microsecond.
        found = [one for one in of(events, horovod, "horovod", "Xi") if one["name"] == name]
        for both in zip(*steps, strict=True):
            began, ended = min(one["ts"] for one in both), max(end(one) for one in both)
            assert [one for one in found if began <= one["ts"] <= end(one) <= ended], f"{name} of {both[0]['name']}"
    flights = [[one for one in events if one["pid"] == rank and one.get("cat") == "gradients"] for rank in ranks]
    assert [len(own_flights) for own_flights in flights] == [6, 6], "the only bucket of each step, from when to when"
    reduced = [one for one in of(events, horovod, "horovod") if one["name"] == "ALLREDUCE"]
    for place in (0, 2, 4):
        sent, arrived = max(one[place]["ts"] for one in flights), [one[place + 1]["ts"] for one in flights]
        assert sent < min(arrived), "the same gradients are on their way on both ranks"
        inside = [one for one in reduced if sent - CLOCKS_US < one["ts"] and end(one) < arrived[0] + CLOCKS_US]
        assert len(inside) == 1, "once both had sent them, and before rank 0 noticed that they had arrived"


@pytest.mark.full
def test_steps_are_those_without_a_trace_and_nothing_stays_on(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    plain = fresh(two_ranks).train(7).frame().loss.tolist()
    before = weights(two_ranks)
    session = fresh(two_ranks)
    first = session.train(2).frame().loss.tolist()
    session.run("bytes(2**20)")  # pyzmq begins a thread for the first large answer
    quiet = session.run(LEFT)
    trace = session.trace(str(tmp_path / "trace.json.gz"), steps=3)
    assert written(trace.path)
    assert trace.size_bytes == trace.path.stat().st_size
    until(lambda: all(not left[3] for left in session.run(LEFT)))
    for was, left in zip(quiet, session.run(LEFT), strict=True):
        assert left[1:] == (was[1], None, []), "no profiler, no timeline, no files"
        assert left[0] <= was[0] + 1, "no thread of Horovod's; torch's profiler keeps one that sleeps"
    traced = [sample.loss for samples in session.history.of_loaded() for sample in samples if sample.step in (3, 4, 5)]
    last = session.train(2).frame().loss.tolist()
    assert sorted(first + traced + last) == sorted(plain)
    assert weights(session) == before
    cpu_s = session.run("import time\nbefore_s = time.process_time()\ntime.sleep(0.5)\ntime.process_time() - before_s")
    assert max(cpu_s) < 0.25, "a timeline's thread would take a core"


@pytest.mark.full
def test_workers_that_begin_in_it_do_not_keep_the_profiler(own: Session, tmp_path: Path) -> None:
    own.run(
        "class Told(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n"
        "        return 256\n"
        "    def __getitem__(self, index):\n"
        "        return torch.full((4,), float(torch.autograd.profiler._is_profiler_enabled))\n"
        "told = Told()\n"
        "def told_loss(model, batch):\n"
        "    return batch.mean() + 0 * model(batch).mean()"
    )
    own.attach(model="net", loss="told_loss", data="told")
    own.set(batch_size=4, num_workers=1)
    own.train(1)
    own.trace(tmp_path / "trace.json")
    assert (own.train(3).frame().loss == 0).all()
    own.set(num_workers=0)


@pytest.mark.full
def test_training_in_the_background_goes_on(two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path) -> None:
    session = fresh(two_ranks)
    session.play()
    until(lambda: session.history.steps > 3)
    trace = session.trace(tmp_path / "trace.json", 4)
    first, *_, last = trace.steps
    assert (trace.steps, last) == (tuple(range(first, first + 4)), first + 3), "no nudge ends it"
    assert session.playing
    until(lambda: session.history.steps > last + 1)
    session.pause()
    again = session.trace(trace.path, 1)
    assert again.steps == (session.history.steps,)
    assert len(weights(session)) == 1


@pytest.mark.full
def test_an_evaluation_ends_it_and_that_is_said(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.set(eval_every=2)
    trace = session.trace(tmp_path / "trace.json", 3)
    session.set(eval_every="never")
    assert trace.steps == (1, 2)
    assert "3 were asked for: an evaluation came" in str(trace)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere/trace.json", "no such folder"),
        ("", "this is a folder"),
        ("demo.ipynb", "already exists and is not a trace of gpumem_nb. Choose another file name"),
    ],
)
def test_a_file_that_cannot_be_written_is_said_before_a_step(
    own: Session, tmp_path: Path, name: str, sentence: str
) -> None:
    (tmp_path / "demo.ipynb").write_text("{}")
    with pytest.raises(InvalidInput, match=sentence):
        own.trace(tmp_path / name)
    assert own.history.steps == 0
    assert (tmp_path / "demo.ipynb").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["demo.ipynb"]


@pytest.mark.full
def test_what_cannot_be_traced_is_said(own: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in (0, -1, 101, True, 1.5):
        with pytest.raises(InvalidInput, match="whole number from 1 to 100"):
            own.trace(tmp_path / "trace.json", steps)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setenv("HOROVOD_TIMELINE", "mine.json")
        with pytest.raises(InvalidInput, match=r"HOROVOD_TIMELINE=mine\.json"):
            own.trace(tmp_path / "trace.json")
    own.run("from torch.profiler import profile\nmine = profile()\nmine.start()", ranks=[1])
    try:
        with pytest.raises(
            WorkloadError, match=r"Rank 1: torch's profiler is on .*: prof\.stop\(\)\. The steps were trained"
        ):
            own.trace(tmp_path / "trace.json")
    finally:
        own.run("mine.stop()", ranks=[1])
    assert own.history.steps == 3
    assert not list(tmp_path.glob("*trace*"))
    assert own.trace(tmp_path / "trace.json").steps == (4, 5, 6)


def test_the_magic_shows_what_it_does_and_says_what_was_written(
    own: Session, shell: InteractiveShell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my trace.json.gz"
    found = shell.run_line_magic("hvd_trace", f'"{path}" --steps 2')
    assert (found.path, found.steps) == (path, (1, 2))
    assert "Tracing: done in" in capsys.readouterr().err
    assert written(path)


@pytest.mark.full
def test_a_file_that_cannot_grow_is_told_and_leaves_nothing(own: Session, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, limits[1]))
    try:
        with pytest.raises(InvalidInput, match="larger than this process may write"):
            own.trace(tmp_path / "trace.json", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not list(tmp_path.glob("*trace*"))
    until(lambda: all(not left[3] for left in own.run(LEFT)))
    assert own.train(1).steps == 1


@pytest.mark.full
def test_a_step_that_fails_in_it_is_told_and_leaves_nothing(own: Session, reached: Path, tmp_path: Path) -> None:
    own.run("trouble, seen = 'raises', 0")
    with pytest.raises(TrainingFailed, match="not this one"):
        own.trace(tmp_path / "trace.json", 3)
    own.run("trouble = None")
    assert reached.exists()
    assert not list(tmp_path.glob("*trace*"))
    assert own.history.steps == 1
    assert [left[1:] for left in own.run(LEFT)] == [(False, None, [])] * 2
    assert own.train(2).steps == 2
    assert own.trace(tmp_path / "trace.json", 2).steps == (4, 5)
    assert len(weights(own)) == 1


def test_the_stop_button_ends_it_and_nothing_stays_on(own: Session, reached: Path, tmp_path: Path) -> None:
    own.run("trouble, seen = 'sleeps', 0")
    stop = Stop(reached.exists)
    with pytest.raises(Interrupted, match="are ready"):
        own.trace(tmp_path / "trace.json", 3)
    assert in_time(stop.took_s(), PROMPT_S)
    own.run("trouble = None")
    assert not list(tmp_path.glob("*trace*"))
    assert [left[1:] for left in own.run(LEFT)] == [(False, None, [])] * 2
    assert own.train(1).steps == 1
    assert len(weights(own)) == 1


@pytest.mark.full
@pytest.mark.parametrize("at", ["recording", "ranks write", "gathering"])
def test_the_stop_button_leaves_nothing_whenever_it_is_pressed(own: Session, tmp_path: Path, at: str) -> None:
    def press(what: str, done: float) -> None:
        if what.startswith(at):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        own.trace(tmp_path / "trace.json", 2, press)
    assert not list(tmp_path.iterdir())
    until(lambda: all(left[1:] == (False, None, []) for left in own.run(LEFT)))
    assert own.trace(tmp_path / "trace.json", 1).steps == (own.history.steps,)


@pytest.mark.full
def test_a_step_that_runs_out_of_memory_in_it_is_told_with_what_became_of_it(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.train(1)
    session.run("model.register_forward_pre_hook(lambda *_: torch.empty(2**28))")
    with pytest.raises(TrainingFailed, match=r"ran out of memory in the forward part .*\n.*discarded on all ranks"):
        session.trace(tmp_path / "trace.json", 2)
    assert not list(tmp_path.iterdir())
    assert session.history.steps == 1


@pytest.mark.full
def test_a_rank_that_hangs_in_it_is_freed_and_named(own: Session, tmp_path: Path) -> None:
    own.set(stall_limit_s=2)
    own.run("trouble, seen = 'sleeps', 0")
    with pytest.raises(TrainingFailed, match="rank 1 waited"):
        own.trace(tmp_path / "trace.json", 3)
    own.run("trouble = None")
    own.set(stall_limit_s=30)
    assert [left[1:] for left in own.run(LEFT)] == [(False, None, [])] * 2
    assert own.train(1).steps == 1
    assert own.trace(tmp_path / "trace.json", 1).steps == (own.history.steps,)
    assert len(weights(own)) == 1
