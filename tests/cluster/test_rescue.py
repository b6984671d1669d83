"""A step that one rank cannot finish is undone on all of them, bit for bit, whatever failed and wherever."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpumem_nb.cluster.calls import Call
from gpumem_nb.kernel.loading import LATE_S
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import GpumemError, TrainingFailed, WorkloadError
from tests.cluster.stop_button import PROMPT_S, Stop
from tests.cluster.trouble import CODE, everything, prepared, same_as
from tests.conftest import about, weights
from tests.internals import LIVE
from tests.tiers import every, first_tier
from tests.timing import in_time

pytestmark = pytest.mark.cluster

CASES = [
    ("error", "data", "data", {}),
    ("error", "collate", "data", {}),
    ("oom", "collate", "data", {}),
    ("error", "forward", "forward", {}),
    ("oom", "forward", "forward", {}),
    ("error", "backward", "backward", {}),
    ("oom", "backward", "backward", {}),
    ("oom", "second micro-batch", "forward", {"accumulation_steps": 2}),
    ("error", "backward", "backward", {"accumulation_steps": 2}),
    ("oom", "recomputation", "recomputation", {"checkpointing": "blocks"}),
    ("error", "recomputation", "recomputation", {"checkpointing": "sqrt"}),
    ("oom", "forward", "forward", {"precision": "bf16"}),
    ("oom", "backward", "backward", {"precision": "fp16", "clip_norm": 1.0}),
    ("error", "update", "update", {"optimizer": "own"}),
    ("oom", "update", "update", {"optimizer": "own"}),
    ("oom", "update", "update", {"optimizer": "own", "precision": "fp16"}),
]


@pytest.mark.parametrize(
    ("kind", "where", "phase", "knobs"), first_tier(CASES, every(4)), ids=lambda value: str(value).replace(" ", "")
)
def test_a_failed_step_leaves_no_trace(
    two_ranks: Session, kind: str, where: str, phase: str, knobs: dict[str, object]
) -> None:
    session = prepared(two_ranks, **knobs)
    undisturbed = losses(session, 6)

    session = prepared(two_ranks, **knobs)
    session.train(3)
    before = everything(session)
    session.run(f"plant({where!r}, {kind!r})")
    with pytest.raises(TrainingFailed, match=rf"rank 1 .* in the {phase} part of the step") as caught:
        session.train(3)
    assert ("Tried to allocate 1.0 GiB" if kind == "oom" else "planted") in str(caught.value)
    same_as(before, session)
    assert len(weights(session)) == 1
    assert losses(session, 3) == undisturbed[3 * 2 :], "as if nothing had happened"


def test_an_optimizer_that_does_not_fit_leaves_the_one_before_with_its_state(two_ranks: Session) -> None:
    session = two_ranks

    def momentum() -> None:
        session.run("torch.manual_seed(3); net = nn.Linear(1600, 1600)")
        session.run("rows = torch.utils.data.TensorDataset(torch.randn(64, 1600))")
        session.run("def first(model, batch):\n    return model(batch[0]).square().mean()")
        session.attach(model="net", data="rows", loss="first")
        knobs = {"optimizer": "momentum", "batch_size": 4, "accumulation_steps": 1, "checkpointing": "none"}
        session.set(**knobs, precision="fp32", clip_norm=None, learning_rate=0.01, optimizer_impl="default")

    momentum()
    undisturbed = losses(session, 4)
    momentum()
    session.train(2)
    session.run("hog = torch.empty(34 * 2**20, dtype=torch.uint8) if rank == 1 else None")
    session.set(optimizer="adamw")
    run = session.train(2)
    session.run("hog = None")
    assert "rank 1 ran out of memory in the update part" in str(run)
    assert "would have fit: " in str(run)
    assert "optimizer=sgd (live peak " in str(run)
    assert session.settings.optimizer == "momentum"
    assert len(weights(session)) == 1
    done = run.frame()
    done = done[done.event.isin(["", "flip"])].sort_values(["step", "rank"])
    assert list(done.loss) == undisturbed[2 * 2 :]


@pytest.mark.parametrize("precision", first_tier(["fp16", "fp32", "bf16"], every(3)))
def test_a_loss_that_is_not_a_number_changes_nothing(two_ranks: Session, precision: str) -> None:
    session = prepared(two_ranks, precision=precision)
    session.train(2)
    before = everything(session)
    session.run("plant('nan', 'nan')")
    with pytest.raises(TrainingFailed, match=r"rank 1 failed .* the loss became nan"):
        session.train(1)
    same_as(before, session)
    assert session.train(1).steps == 1


EXIT = "def leave():\n    raise SystemExit(3)\nstrike = lambda where: leave() if (where, rank) == ({!r}, 1) else False"
SPARSE = "torch.eye(2).to_sparse()"
BROKEN = [
    ("exit in the data", EXIT.format("data"), "data", "SystemExit: 3"),
    ("exit in the model", EXIT.format("forward"), "forward", "SystemExit: 3"),
    ("exit in the update", EXIT.format("update"), "update", "SystemExit: 3"),
    (
        "optimizer state that cannot be kept",
        f"if rank == 1:\n    own.state[net[0].weight]['odd'] = {SPARSE}",
        "update",
        "sparse",
    ),
]


@pytest.mark.parametrize(("code", "phase", "says"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_whatever_ends_a_step_on_one_rank_is_its_vote(two_ranks: Session, code: str, phase: str, says: str) -> None:
    session = prepared(two_ranks, optimizer="own")
    session.run(code)
    began_s = session.history.now_s()
    with pytest.raises(TrainingFailed, match=rf"(?is)rank 1 failed in the {phase} part of the step.*{says}"):
        session.train(2)
    events = [event.kind for event in session.history.events if event.time_s >= began_s]
    assert "stall" not in events, "nobody waited for the stall limit"
    assert prepared(session).train(1).steps == 1


def test_buffers_that_a_forward_binds_anew_are_put_back(two_ranks: Session) -> None:
    session = prepared(two_ranks)
    session.run(
        """
class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x + 0.1 * self.mean
class Fails(nn.Module):
    def forward(self, x):
        if plan.fault == "forward":
            self.register_buffer("late", torch.ones(3))
        strike("forward")
        return x
net = nn.Sequential(nn.Linear(8, 8), Running(), Fails())
"""
    )
    session.attach(model="net", loss="size", data="rows")
    session.train(2)
    session.run("import gc; gc.collect()")  # the workload before it hangs together in circles
    before = everything(session)
    means = session.run("net[1].mean.tolist()")
    session.run("plant('forward', 'error')")
    with pytest.raises(TrainingFailed, match="planted"):
        session.train(1)
    assert session.run("net[1].mean.tolist()") == means
    assert session.run("[name for name, _ in net.named_buffers()]") == [["1.mean"]] * 2
    same_as(before, session)


def test_memory_that_ran_out_behind_another_exception_is_told_as_such(two_ranks: Session) -> None:
    session = prepared(two_ranks)
    session.run(
        """
class Wraps(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        try:
            return self.inner(x)
        except RuntimeError as error:
            raise ValueError("layer failed") from error
net = nn.Sequential(nn.Linear(8, 8), Wraps(Block()))
"""
    )
    session.attach(model="net", loss="size", data="rows")
    session.set(batch_size=16)
    session.train(1)
    session.run("import gc; gc.collect()")  # the workload before it hangs together in circles
    before = everything(session)
    session.run("plant('forward', 'oom')")
    says = r"(?s)rank 1 ran out of memory in the forward part .*1\.inner \(Block\).*Tried to allocate 1\.0 GiB"
    with pytest.raises(TrainingFailed, match=says):
        session.train(1)
    same_as(before, session)


def test_fewer_samples_than_ranks_leave_what_was_loaded(two_ranks: Session) -> None:
    session = prepared(two_ranks)
    session.train(1)
    session.run("single = torch.utils.data.TensorDataset(torch.zeros(1, 8))")
    with pytest.raises(WorkloadError, match=r"^The dataset has 1 samples, fewer than the 2 ranks\.$"):
        session.attach(model="net", loss="size", data="single")
    assert session.train(1).steps == 1
    assert session.history.steps == 2


@contextmanager
def answering_late(session: Session) -> Iterator[None]:
    """Inside, rank 1 waits a moment before each answer, more than once."""
    session.run("import sys, time\nflush = sys.stdout.flush")
    session.run("sys.stdout.flush = lambda: time.sleep(0.5)", ranks=1)
    try:
        yield
    finally:
        session.run("sys.stdout.flush = flush", ranks=1)


TOO_FEW = "single = torch.utils.data.TensorDataset(torch.zeros(1, 8))"


@pytest.mark.full
def test_a_rank_that_refuses_later_leaves_what_was_loaded_too(two_ranks: Session) -> None:
    session = prepared(two_ranks)
    session.run(TOO_FEW)
    with answering_late(session), pytest.raises(WorkloadError, match="fewer than the 2 ranks"):
        session.attach(model="net", loss="size", data="single")
    assert session.train(1).steps == 1


@pytest.mark.full
def test_who_stops_waiting_for_a_rank_that_refuses_later_is_told_what_the_first_one_said(
    two_ranks: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, waited_for, finished = prepared(two_ranks), threading.Event(), Call.finished

    def told_of_waiting(call: Call, timeout: float) -> bool:
        if timeout == LATE_S:
            waited_for.set()
        return finished(call, timeout)

    monkeypatch.setattr(Call, "finished", told_of_waiting)
    session.run(TOO_FEW)
    with answering_late(session):
        stop = Stop(waited_for.is_set)
        with pytest.raises(WorkloadError, match="fewer than the 2 ranks"):
            session.attach(model="net", loss="size", data="single")
        assert in_time(stop.took_s(), PROMPT_S)
    assert session.train(1).steps == 1


def test_ranks_that_cannot_say_what_they_hold_after_a_refusal_hold_nothing(two_ranks: Session) -> None:
    session = prepared(two_ranks)
    session.run(f"{TOO_FEW}\nfrom gpumem_nb.engine import rank as of_ranks\nloaded = of_ranks.loaded")
    session.run("of_ranks.loaded = lambda: 1 / 0", ranks=1)
    try:
        with pytest.raises(WorkloadError, match="fewer than the 2 ranks"):
            session.attach(model="net", loss="size", data="single")
        with pytest.raises(WorkloadError, match="Nothing is loaded"):
            session.train(1)
    finally:
        session.run("of_ranks.loaded = loaded", ranks=1)


def test_an_exit_while_loading_leaves_what_was_loaded(two_ranks: Session) -> None:
    session = prepared(two_ranks)
    session.run("class Leaves:\n    def __len__(self):\n        return 64 // (rank != 1 or leave())")
    session.run("def leave():\n    raise SystemExit(3)")
    session.run("Leaves.__getitem__ = lambda self, index: 0\nleaving = Leaves()")
    with pytest.raises(GpumemError, match="SystemExit"):
        session.attach(model="net", loss="size", data="leaving")
    assert session.train(1).steps == 1


@pytest.mark.full
def test_an_own_fused_optimizer_trains_under_every_precision(two_ranks: Session) -> None:
    session = prepared(two_ranks)
    session.run("fused = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)")
    session.attach(model="net", loss="size", data="rows", optimizer="fused")
    session.set(batch_size=16)
    for precision, implementation in (("fp16", "default"), ("fp16", "loop"), ("fp32", "default")):
        session.set(precision=precision, optimizer_impl=implementation)
        assert session.train(2).steps == 2
    assert session.run("fused.param_groups[0]['fused']") == [True, True]


def test_shrink_keeps_the_global_batch(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "digits-resnet", width=16, depth=6, resolution=16)
    session.set(on_oom="shrink", batch_size=128)
    try:
        run = session.train(2)
    finally:
        session.set(on_oom="revert")
    assert run.steps == 2
    assert "goes on with batch_size=" in str(run)
    assert "With it the step fits (live peak " in str(run)
    assert session.settings.batch_size < 128
    assert session.settings.samples_per_rank == 128


@pytest.mark.full
def test_stop_changes_no_setting(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "digits-resnet", width=16, depth=6, resolution=16)
    session.train(1)
    session.set(on_oom="stop", batch_size=128)
    try:
        with pytest.raises(TrainingFailed, match="training stopped"):
            session.train(1)
    finally:
        session.set(on_oom="revert")
    assert session.settings.batch_size == 128


@pytest.mark.full
def test_what_would_have_fit_really_fits(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "digits-resnet", width=16, depth=6, resolution=16)
    session.train(1)
    session.set(batch_size=128)
    session.train(1)
    rescue = session.history.rescue
    assert rescue is not None
    assert rescue.failure.module.startswith("blocks.")
    assert rescue.fits
    assert rescue.instead
    for trial in rescue.instead.tried:
        session.set(**trial.settings.changed_from(session.settings))
        if trial.peak_bytes is None:
            session.train(1)
            assert session.settings != trial.settings, "it did not fit and was taken back"
        else:
            assert session.train(1).frame().live_peak_bytes.max() == pytest.approx(trial.peak_bytes, rel=0.02)


@pytest.mark.full
def test_far_too_much_is_tried_in_ever_smaller_micro_batches(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "digits-resnet", width=16, depth=6, resolution=16)
    session.train(2)
    session.set(on_oom="stop", batch_size=512)
    told: list[str] = []
    try:
        with pytest.raises(TrainingFailed, match=r"Tried out on the ranks, th\w+ would have fit") as failed:
            session.train(1, progress=lambda what, done: told.append(what))
    finally:
        session.set(on_oom="revert")
    assert "memory ran out: what would have fit is being tried out" in told
    advice = re.search(r"%hvd_set (.*)", str(failed.value))
    assert advice
    session.set(**dict(flip.split("=") for flip in advice[1].split()))
    assert session.settings.samples_per_rank == 512
    assert session.train(1).steps == 1


def test_loading_that_fails_on_one_rank_fails_on_all(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.run(CODE)
    session.run("net = None if rank == 1 else net")
    with pytest.raises(Exception, match=r"model must be a torch\.nn\.Module"):
        session.attach(model="net", loss="size", data="rows")
    session.run("net = nn.Linear(8, 1 + rank)")
    with pytest.raises(Exception, match="ranks hold different models"):
        session.attach(model="net", loss="size", data="rows")
    assert fresh(session).train(1).steps == 1


def test_memory_runs_out_in_a_cell_and_is_free_again(two_ranks: Session) -> None:
    session = prepared(two_ranks)
    before = session.run(LIVE)
    with pytest.raises(Exception, match="OutOfMemoryError"):
        session.run("def deep():\n    a = torch.empty(50 * 2**20, dtype=torch.uint8)\n    torch.empty(2**30)\ndeep()")
    assert session.run(LIVE) == about(before)
    kept = "import sys; [name for name in ('last_exc', 'last_value', 'last_traceback') if getattr(sys, name, None)]"
    assert session.run(kept) == [[], []], "what Python keeps of the last exception would keep its frames' tensors"


def test_a_rescue_leaves_no_room_beyond_the_limit(two_ranks: Session) -> None:
    two_ranks.run("""
import torch
from torch import nn
wide = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
rows = torch.utils.data.TensorDataset(torch.ones(64, 1024))
def loss(model, batch): return model(batch[0]).square().mean()
""")
    two_ranks.attach(model="wide", loss="loss", data="rows")
    two_ranks.set(on_oom="stop", optimizer="sgd")
    for _ in range(2):  # the second finds what the first has cached
        with pytest.raises(TrainingFailed, match="ran out of memory"):
            two_ranks.train(1)
        for rank in two_ranks.memory().ranks:
            assert rank.reading.reserved_bytes <= (rank.reading.limit_bytes or 0)
    two_ranks.set(on_oom="revert", optimizer="adamw")


def losses(session: Session, steps: int) -> list[float]:
    frame = session.train(steps).frame()
    return [float(loss) for loss in frame.sort_values(["step", "rank"]).loss]
