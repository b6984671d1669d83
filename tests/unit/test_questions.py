"""What is asked changes nothing: no weight, no state, no optimizer; and tells what the step after it takes."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.kernel.history import History
from gpumem_nb.kernel.questions.predicting import Predicting
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from gpumem_nb.planning.prediction import DOES_NOT_FIT
from gpumem_nb.shared.categories import ACTIVATIONS, OPTIMIZER_STATE
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.forecast import RECORDED, Forecast, Forecasts, Rehearsal
from gpumem_nb.shared.knobs import KNOBS
from gpumem_nb.shared.messages import Chunk, Failure, Reading
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload, WorkloadInfo
from tests.links import Overheard
from tests.tiers import every, first_tier
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.test_one_rank import loss, rows, stream, tried

pytestmark = pytest.mark.usefixtures("alone")
MIB = 2**20
FEW = 64  # bytes: single numbers


class Deciding(SGD):
    """An optimizer of the user's that reads gradients before it decides."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"]):
            self.state[param].setdefault("mean", torch.zeros_like(param))
            if param.grad.norm() >= 0:
                param.sub_(param.grad * 0.1)


class Counting(SGD):
    """An optimizer of the user's that counts updates in itself and on its class, and draws noise."""

    updates, decides = 0, False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        Counting.updates += 1
        for param in (param for group in self.param_groups for param in group["params"]):
            if not self.decides or param.grad.norm() >= 0:
                param.sub_(param.grad * 0.1 + 0.01 * torch.randn_like(param))


@pytest.fixture(autouse=True)
def nothing_left_of_the_test_before(alone: Overheard) -> None:
    gc.collect()
    alone.keeps = False  # what was sent counts as live


def trainer(gpu: VirtualGPU, optimizer: Any = None, width: int = 300) -> Trainer:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 4))

    return Trainer(Workload("asked", network, rows, loss, optimizer=optimizer), stream(), gpu, time.time())


def everything(trained: Trainer) -> list[Any]:
    """What a question could change."""
    live = trained.live
    state = [value for values in live.optimizer.state.values() for value in values.values()]
    tensors = [*live.model.parameters(), *(value for value in state if isinstance(value, Tensor))]
    lying = [(one.data_ptr(), one.stride()) for one in tensors]
    return [lying, [one.tolist() for one in tensors], id(live.optimizer), repr(live.optimizer), live.settings]


def asked(trained: Trainer, settings: Settings) -> Forecasts:
    """Two small steps, undone; nothing is changed."""
    before = everything(trained)
    found = trained.trials.forecast(settings, [settings.batch_size], [settings.batch_size], 0)
    assert found.failure is None
    assert everything(trained) == before
    return found


SETTINGS = [
    Settings(batch_size=2, optimizer=name, optimizer_impl=impl, precision=precision, clip_norm=clip_norm)
    for name in ("sgd", "momentum", "adam", "adamw", "adafactor", *["muon"] * hasattr(torch.optim, "Muon"))
    for impl in KNOBS["optimizer_impl"].choices
    for precision, clip_norm in (("fp32", None), ("fp16", 1.0))
    if (name, impl) != ("adafactor", "fused")
]


def named(settings: Settings) -> str:
    return f"{settings.optimizer}-{settings.optimizer_impl}-{settings.precision}"


@pytest.mark.parametrize("settings", first_tier(SETTINGS, every(3)), ids=named)
def test_the_live_peak_that_is_predicted_is_that_of_the_step_after_next(gpu: VirtualGPU, settings: Settings) -> None:
    trained = trainer(gpu)
    before_the_first = asked(trained, settings).of[0].live_peak_bytes
    assert trained.run(Chunk(settings, 1, 2)).failure is None
    with_state = asked(trained, settings).of[0]
    reply = trained.run(Chunk(settings, 1, 2))
    assert reply.failure is None
    came = reply.samples[1].live_peak_bytes  # with the losses of two steps, which a chunk holds
    assert (before_the_first, with_state.live_peak_bytes) == pytest.approx((came, came), abs=FEW)
    held = sum(v.nbytes for values in trained.live.optimizer.state.values() for v in values.values() if v is not None)
    assert with_state.at_peak.get(OPTIMIZER_STATE, 0) == held


def test_another_optimizer_is_asked_about_with_the_state_of_the_present_one_gone(gpu: VirtualGPU) -> None:
    trained, adam = trainer(gpu), Settings(batch_size=2, optimizer="adam", optimizer_impl="fused")
    assert trained.run(Chunk(adam, 1, 3)).failure is None
    others = [adam.replace(optimizer=name) for name in ("sgd", "momentum", "adamw")]
    others.append(adam.replace(optimizer="adafactor", optimizer_impl="default"))  # which has no fused kernels
    predicted = [(other, asked(trained, other).of[0]) for other in others]
    for number, (other, one) in enumerate(predicted, start=2):
        sample = trained.run(Chunk(other, number, 3)).samples[-1]
        assert sample.live_peak_bytes == pytest.approx(one.live_peak_bytes, abs=FEW)
        gpu.empty_cache()


def test_the_workloads_own_optimizer_keeps_its_state_beside_another(gpu: VirtualGPU) -> None:
    trained = trainer(gpu, lambda params: Adam(params, lr=0.1))
    own = Settings(batch_size=2, optimizer="own", learning_rate=0.1)
    assert trained.run(Chunk(own, 1, 3)).failure is None
    sgd = asked(trained, own.replace(optimizer="sgd")).of[0]
    sample = trained.run(Chunk(own.replace(optimizer="sgd"), 2, 2)).samples[-1]
    assert sample.live_peak_bytes == pytest.approx(sgd.live_peak_bytes, abs=FEW)


@pytest.mark.parametrize("ask", ["predict", "rehearse", "timeline", "look", "trial"])
def test_no_question_copies_weights_or_state(gpu: VirtualGPU, ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, settings = trainer(gpu), Settings(batch_size=2, optimizer="adamw")
    assert trained.run(Chunk(settings, 1, 2)).failure is None
    before = everything(trained)
    for name in ("undo.step_undo.UpdateUndo", "step.optimizer_state.Parked"):
        monkeypatch.setattr(f"gpumem_nb.engine.{name}.__init__", _refused)
    other = settings.replace(optimizer="sgd", optimizer_impl="fused", learning_rate=7.0)
    if ask == "predict":
        assert trained.trials.forecast(other, [1, 2], [4], 0).failure is None
    elif ask == "rehearse":
        assert trained.trials.rehearse(other).forecasts.failure is None
    elif ask == "timeline":
        timeline = trained.record()
        assert timeline is not None
        assert timeline.spans[-1].phase == "update"
    elif ask == "look":
        from gpumem_nb.engine.step.samples import Looks

        assert trained.look_into_step(Looks(), trained.live.settings) is None
    else:
        assert tried(trained, other) is None
    assert everything(trained) == before


def _refused(*_: object, **__: object) -> None:
    raise AssertionError("a question put something aside")


def test_an_update_that_cannot_be_foreseen_is_taken_and_undone_and_that_is_said(gpu: VirtualGPU) -> None:
    trained = trainer(gpu, lambda params: Deciding(params, lr=0.1))
    settings = Settings(batch_size=2, optimizer="own", learning_rate=0.1)
    before = everything(trained)
    found = trained.trials.forecast(settings, [2], [2], 0)
    assert found.failure is None
    assert found.update_undone
    assert everything(trained) == before
    sample = trained.run(Chunk(settings, 1, 2)).samples[-1]
    assert sample.live_peak_bytes == pytest.approx(found.of[0].live_peak_bytes, abs=FEW)
    assert not trainer(gpu).trials.forecast(Settings(batch_size=2), [2], [2], 0).update_undone


class Closing(SGD):
    """An optimizer of the user's that holds a function which refers to the optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.kept_for: Any = lambda param: self.state[param]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"]):
            param.sub_(self.kept_for(param).setdefault("mean", torch.zeros_like(param)).add_(param.grad))


def test_an_optimizers_function_that_refers_to_it_reaches_it_from_no_copy(gpu: VirtualGPU) -> None:
    trained = trainer(gpu, lambda params: Closing(params, lr=0.1))
    settings = Settings(batch_size=2, optimizer="own", learning_rate=0.1)
    found = trained.trials.forecast(settings, [2], [2], 0)
    assert "by way of a variable or a function of its own" in found.update_undone
    assert trained.trials.rehearse(settings).forecasts.failure is None
    assert not trained.live.optimizer.state


@pytest.mark.parametrize("decides", [False, True])
def test_what_an_optimizer_counts_and_draws_is_as_before_any_question(gpu: VirtualGPU, decides: bool) -> None:
    trained = trainer(gpu, lambda params: Counting(params, lr=0.1))
    trained.live.optimizer.decides = decides  # type: ignore[attr-defined]
    settings = Settings(batch_size=2, optimizer="own", learning_rate=0.1)
    for steps in (0, 2):
        if steps:
            assert trained.run(Chunk(settings, 1, steps)).failure is None
        before = set(vars(trained.live.optimizer)), Counting.updates, trained.random.state.torch.tolist()
        assert trained.trials.forecast(settings, [2], [2], 0).failure is None
        assert trained.trials.rehearse(settings).forecasts.failure is None
        assert (set(vars(trained.live.optimizer)), Counting.updates, trained.random.state.torch.tolist()) == before


def test_a_trial_before_the_first_step_counts_the_state_that_is_not_there(gpu: VirtualGPU) -> None:
    gc.collect()  # what earlier tests left must not go in the middle
    trained, settings = trainer(gpu, width=1200), Settings(batch_size=2, optimizer="adam", optimizer_impl="fused")
    needed = asked(trained, settings).of[0].reserved_peak_bytes
    try:
        gpu.empty_cache()
        gpu.set_limit(needed)
        assert asked(trained, settings).of[0].fits
        gpu.empty_cache()
        gpu.set_limit(needed - 4 * MIB)
        assert not asked(trained, settings).of[0].fits, "forward and backward alone would fit"
    finally:
        gpu.set_limit(None)


def test_the_time_of_updates_comes_from_training_else_from_scratch_tensors(gpu: VirtualGPU) -> None:
    trained, settings = trainer(gpu), Settings(batch_size=2, optimizer="adam")
    assert trained.trials.rehearse(settings).update == "updates timed on scratch tensors"
    assert trained.run(Chunk(settings, 1, 4)).failure is None
    assert trained.trials.rehearse(settings).update == "updates as in training"
    gpu.set_limit(gpu.reading().reserved_bytes + 4 * MIB)
    try:
        found = trained.trials.rehearse(settings.replace(optimizer="sgd"))
    finally:
        gpu.set_limit(None)
    assert found.update in ("updates scaled from those of training", "updates timed on scratch tensors")
    assert min(found.steps_s) > 0


class Writing(nn.Module):
    """Writes weights in forward in every way: by their data, bound anew, in place, and those that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.teacher, self.student = (nn.Linear(4, 4) for _ in range(4))
        for frozen in (self.key, self.teacher):
            frozen.requires_grad_(False)

    def forward(self, batch: Tensor) -> Tensor:
        for query, key, teacher in zip(
            self.query.parameters(), self.key.parameters(), self.teacher.parameters(), strict=True
        ):
            key.data = key.data * 0.9 + query.data * 0.1
            with torch.no_grad():
                teacher.mul_(0.9).add_(query, alpha=0.1)
        self.student.weight.data.mul_(0.99)
        torch._foreach_mul_([self.student.bias.data], 0.99)
        out: Tensor = self.query(batch) + self.student(batch) - self.key(batch) + self.teacher(batch)
        return out


@pytest.mark.parametrize("after", [0, 2])
def test_weights_that_forward_writes_are_put_back(gpu: VirtualGPU, after: int) -> None:
    def written() -> Writing:
        torch.manual_seed(3)
        return Writing()

    settings = Settings(batch_size=2, optimizer="adamw")
    plain, questioned = (
        Trainer(Workload("writing", written, rows, loss), stream(), gpu, time.time()) for _ in range(2)
    )
    for one in (plain, questioned):
        if after:
            assert one.run(Chunk(settings, 1, after)).failure is None
    before = everything(questioned)[1]
    for _ in range(2):
        assert questioned.trials.forecast(settings, [1, 2], [8], 0).failure is None
        assert questioned.trials.rehearse(settings).forecasts.failure is None
        assert everything(questioned)[1] == before
    losses = [[sample.loss for sample in one.run(Chunk(settings, 2, 3)).samples] for one in (plain, questioned)]
    assert losses[0] == losses[1]


def predicting(**answers: Any) -> Predicting:
    """With a rank that gives these answers."""
    ranks = SimpleNamespace(
        infos=[None],
        settings=Settings(),
        workload=WorkloadInfo("asked", 0, 0, 64, 0),
        check_loaded=lambda: None,
        busy=False,
        call_alone=lambda function, *arguments, undone: [answers[function](*arguments)],
    )
    cluster = SimpleNamespace(ranks=ranks, history=History(1), training=ranks, foreground=ranks)
    cluster.policy = cluster.origin = cluster.record = cluster.snapshots = None
    return Predicting(cast(Any, cluster))


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, [1, 2, 4, 8]), (2, [1, 2, 4, 8, 16])])
def test_what_several_small_micro_batches_need_follows_from_two_steps(
    gpu: VirtualGPU, batch_size: int, sizes: list[int]
) -> None:
    peaks = predicting(forecast=trainer(gpu).trials.forecast).peaks_by_batch({"batch_size": batch_size})
    assert list(peaks) == sizes
    assert peaks[sizes[-1]] >= peaks[1] > 0


@pytest.mark.parametrize(("fewest", "batch_size", "told"), [(1, 2, [1, 2]), (2, 2, [2]), (2, 8, [2]), (3, 2, [])])
def test_peaks_are_found_by_the_smallest_steps_where_others_run_out_of_memory(
    gpu: VirtualGPU, fewest: int, batch_size: int, told: list[int]
) -> None:
    """Batch norm, say, needs two samples."""
    forecast = trainer(gpu).trials.forecast

    def limited(settings: Settings, small: list[int], sizes: list[int], most: int) -> Forecasts:
        if not (failed := [size for size in small if not fewest <= size <= 2]):
            return forecast(settings, small, sizes, most)
        failure = Failure(0, "oom" if failed[0] > 2 else "error", "forward", "too many or too few")
        return Forecasts(3, Reading(0, 0, 0, 0, None, 1000 * MIB), 0.1, MIB, failure=failure, failed_batch=failed[0])

    with nullcontext() if told else pytest.raises(WorkloadError, match=r"batch_size=\d.*too many or too few"):
        assert list(predicting(forecast=limited).peaks_by_batch({"batch_size": batch_size})) == told


def test_steps_whose_compiling_took_long_are_timed_where_plain_ones_are_known_to_be_quick() -> None:
    reading, peak = Reading(0, 0, 0, 0, None, 1000 * MIB), {ACTIVATIONS: MIB}

    def forecast(settings: Settings, small: list[int], sizes: list[int], most: int) -> Forecasts:
        of = (Forecast(MIB, MIB, True, peak, "forward", "", RECORDED),)
        return Forecasts(0, reading, 0.1 if settings.compile == "off" else 30.0, 1000 * MIB, of)

    def rehearse(settings: Settings) -> Rehearsal:
        return Rehearsal(forecast(settings, [], [], 0), (0.5,))

    asks = predicting(forecast=forecast, rehearse=rehearse)
    found = [asks.predict({"batch_size": 16, "compile": value}) for value in ("off", "blocks")]
    assert [one.step_s for one in found] == [0.5, 0.5]


def test_what_passed_the_limit_needs_more_than_that_whatever_the_budget() -> None:
    failure = Failure(0, "oom", "forward", "out of memory", asked_bytes=30 * MIB, free_bytes=10 * MIB)
    out = Forecasts(3, Reading(0, 0, 0, 0, None, 1000 * MIB), 0.1, 1000 * MIB, failure=failure, failed_batch=32)
    said = predicting(rehearse=lambda settings: Rehearsal(out)).by_whole_steps(Settings(), 100 * MIB)
    assert (said.verdict, said.lower_bound, said.low_bytes) == (DOES_NOT_FIT, True, 1020 * MIB)


def test_what_the_users_code_froze_stays_frozen(gpu: VirtualGPU) -> None:
    trained, settings = trainer(gpu), Settings(batch_size=2)
    gc.unfreeze()
    asked(trained, settings)
    assert not gc.get_freeze_count()
    gc.freeze()
    asked(trained, settings)
    assert gc.get_freeze_count()
