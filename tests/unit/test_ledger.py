"""The ledger against independent counts: the profiler's peak, the storages of tensors, what autograd saves."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gpumem_nb.memory.ledger.recorder import Recorder
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from gpumem_nb.shared.categories import (
    ACTIVATIONS,
    CASTS,
    GRADIENTS,
    INPUTS,
    LOGITS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
)
from tests.models import MODELS, SETTINGS, Training, ledger_of, profiled, recorded
from tests.tiers import every, first_tier
from tests.unit.test_offload import recomputing

WIDTH = 512


CASES = [(name, *setting) for name in MODELS for setting in SETTINGS]


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize(("name", "precision", "checkpointing"), first_tier(CASES, every(3)))
def test_the_peak_is_the_profilers_and_categories_are_what_the_tensors_hold(
    gpu: VirtualGPU, name: str, precision: str, checkpointing: str
) -> None:
    step = profiled(gpu, name, precision, checkpointing)
    ledger, training = step.ledger, step.training
    assert ledger.peak_bytes == gpu.reading().live_peak_bytes
    assert ledger.peak_bytes - step.before_bytes == pytest.approx(step.profiler_bytes, rel=1e-3)
    assert sum(ledger.at_peak.values()) == ledger.peak_bytes
    assert sum(ledger.at_rest.values()) == gpu.reading().live_bytes
    params = list(training.model.parameters())
    state = [value for values in training.optimizer.state.values() for value in values.values()]
    assert ledger.at_rest[PARAMETERS] == ledger.at_peak[PARAMETERS] == sum(storages(params).values())
    assert ledger.at_rest[OPTIMIZER_STATE] == ledger.at_peak[OPTIMIZER_STATE] == sum(storages(state).values())
    assert GRADIENTS not in ledger.at_rest
    assert ACTIVATIONS not in ledger.at_rest


def forward(training: Training, precision: str, batch: dict[Any, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        return training.loss(training.model, batch)


@pytest.mark.parametrize(("name", "precision"), first_tier(product(MODELS, ["fp32", "bf16"]), every(3)))
def test_activations_are_what_autograd_saves(gpu: VirtualGPU, name: str, precision: str) -> None:
    training = MODELS[name]()
    training.step(precision)
    batch = {key: value.clone() for key, value in training.batch.items()}

    recorder = Recorder(gpu, training.model)
    with recorder.watching():
        recorder.claim(INPUTS, batch.values())
        loss = forward(training, precision, batch)
        recorder.claim_model(training.model.parameters(), training.optimizer.state)
        after_forward = recorder.end().ledger().at_rest
    del loss

    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward(training, precision, batch)
    expected = storages(saved)
    for lasting in storages([*training.model.parameters(), *training.model.buffers(), *batch.values()]):
        expected.pop(lasting, None)
    casts = after_forward.get(CASTS, 0)
    assert after_forward[ACTIVATIONS] + casts == sum(expected.values())
    assert (casts > 0) == (precision == "bf16")
    del loss


@pytest.mark.parametrize(("precision", "offload"), [("fp32", "off"), ("bf16", "off"), ("fp32", "on"), ("bf16", "on")])
def test_logits_what_the_loss_keeps_of_them_and_their_gradient_are_a_category(
    gpu: VirtualGPU, precision: str, offload: str
) -> None:
    tokens, features, classes = 64, 16, 1000
    head = nn.Linear(features, classes)
    model = nn.Sequential(nn.Embedding(classes, features), nn.Linear(features, features), head)
    words = torch.randint(classes, (tokens,))
    recorder = Recorder(gpu, model, head=head)
    with recorder.watching(), recomputing(model, offload).on():
        recorder.mark("forward")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            logits = model(words)
            loss = nn.functional.cross_entropy(logits, words)
        recorder.mark("backward")
        loss.backward()
        size = logits.untyped_storage().nbytes()
        recorder.claim_model(model.parameters(), {})
        ledger = recorder.end().ledger()
    logarithms = tokens * classes * 4
    assert size == tokens * classes * (2 if precision == "bf16" else 4)
    assert ledger.at_rest[LOGITS] == size  # a variable holds them
    # Where the step needs most the gradient is there, too; in bf16 it is made in fp32, for a moment.
    assert ledger.at_peak[LOGITS] == size + logarithms + (0 if precision == "bf16" else size)
    del logits, loss


def test_what_code_holds_is_other_and_stays_visible(gpu: VirtualGPU) -> None:
    training = MODELS["text-gpt"]()
    training.step("fp32")
    without = ledger_of(gpu, training, "fp32").at_rest.get(OTHER, 0)
    held = torch.empty(12345, dtype=torch.uint8)
    assert ledger_of(gpu, training, "fp32").at_rest[OTHER] == without + held.nbytes


def test_accumulated_gradients_are_there_during_forward(gpu: VirtualGPU) -> None:
    training = MODELS["text-gpt"]()
    training.step("fp32")
    params = list(training.model.parameters())
    recorder = Recorder(gpu, training.model)
    with recorder.watching():
        for _ in range(2):
            training.loss(training.model, training.batch).backward()
        recorder.claim_model(params, training.optimizer.state)
        ledger = recorder.end().ledger()
    training.optimizer.zero_grad()
    assert ledger.at_peak[GRADIENTS] == sum(storages(params).values())
    assert ledger.at_peak[ACTIVATIONS] > 0


def test_the_timeline_covers_the_step_and_keeps_its_peak(gpu: VirtualGPU) -> None:
    training = MODELS["text-gpt"]()
    training.step("fp32")
    record = recorded(gpu, training, "fp32")
    ledger = record.ledger()
    timeline = record.timeline(rank=3, step=7, ledger=ledger)
    totals = [sum(at_once) for at_once in zip(*timeline.live_bytes.values(), strict=True)]
    assert max(totals) == ledger.peak_bytes == gpu.reading().live_peak_bytes
    assert totals[-1] == gpu.reading().live_bytes
    assert list(timeline.time_ms) == sorted(timeline.time_ms)
    assert len(timeline.time_ms) == len(totals) <= 605
    ends = [span.end_ms for span in timeline.spans]
    assert [span.begin_ms for span in timeline.spans][1:] == ends[:-1]
    assert {span.phase for span in timeline.spans} >= {"data", "forward", "backward"}
    assert any(span.module.startswith("blocks.1") for span in timeline.spans if span.phase == "backward")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_the_allocator_tensors_tell_nearly_the_same(gpu: VirtualGPU, precision: str) -> None:
    from gpumem_nb.memory.ledger.events import TensorLog

    class TensorsOnly:
        kind = "virtual"
        reading, reset_peak = gpu.reading, gpu.reset_peak

        def event_log(self) -> TensorLog:
            return TensorLog(gpu.torch_device, requested)

    def requested() -> tuple[int, int]:
        return gpu.reading().live_bytes, gpu.reading().live_peak_bytes

    training = MODELS["text-gpt"]()
    training.step(precision)
    exact = ledger_of(gpu, training, precision)
    recorder = Recorder(TensorsOnly(), training.model)  # type: ignore[arg-type]
    with recorder.watching():
        training.step(precision, recorder)
        ledger = recorder.end().ledger()
    assert not ledger.exact
    assert sum(ledger.at_peak.values()) == ledger.peak_bytes == exact.peak_bytes
    for category in (PARAMETERS, OPTIMIZER_STATE, ACTIVATIONS):
        assert ledger.at_peak[category] == exact.at_peak[category]


def test_a_step_that_is_given_up_leaves_nothing(gpu: VirtualGPU) -> None:
    training = MODELS["text-gpt"]()
    training.step("fp32")
    gc.collect()
    before = gpu.reading().live_bytes
    recorder = Recorder(gpu, training.model)
    with recorder.watching():
        training.loss(training.model, training.batch)
    assert gpu.reading().live_bytes == before


class Wide(nn.Module):
    """Three blocks, narrow between them and wide inside, the last one most, which torch itself checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        widths = (WIDTH // 2, WIDTH // 2, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.ReLU(), nn.Linear(w, 8)) for w in widths)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_own_checkpointing_shows_as_activations_too(gpu: VirtualGPU, reentrant: bool) -> None:
    rows = 100
    batch = {0: torch.randn(rows, 8)}
    training = Training(Wide(reentrant), batch, lambda model, batch: model(batch[0].requires_grad_()).sum())
    training.step("fp32")
    record = recorded(gpu, training, "fp32")
    ledger = record.ledger()
    assert ledger.module.startswith("blocks.2")
    inputs, result_of_relu, loss = 2 * rows * 8 * 4, rows * WIDTH * 4, 4
    assert ledger.at_peak[ACTIVATIONS] == inputs + result_of_relu + loss
    spans = record.timeline(0, 1, ledger).spans
    again = {span.module[: len("blocks.0")] for span in spans if span.phase == "recomputation"}
    assert again >= {"blocks.0", "blocks.1", "blocks.2"} or reentrant


def test_what_is_offloaded_is_held_where_it_went(gpu: VirtualGPU) -> None:
    """A hook that keeps something else than the tensor: half of its bytes, in another type."""
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
    x = torch.randn(50, 8)
    recorder = Recorder(gpu, model)
    with recorder.watching(), saved_tensors_hooks(lambda tensor: tensor.bfloat16(), lambda kept: kept.float()):
        loss = model(x).sum()
        recorder.claim_model(model.parameters(), {})
        ledger = recorder.end().ledger()
    saved = 50 * 8 + 2 * 50 * WIDTH + 8 * WIDTH  # the input, ReLU's result for both its users, and the second weight
    assert ledger.at_rest[ACTIVATIONS] == 2 * saved
    loss.backward()


def test_results_written_into_tensors_of_before_are_not_new_ones() -> None:
    from gpumem_nb.memory.ledger.events import TensorLog

    buffer, resized = torch.empty(100, 100), torch.empty(10)
    log = TensorLog(torch.device("cpu"), lambda: (0, 0))
    log.begin([])
    with log.watching():
        torch.mm(torch.ones(100, 100), torch.ones(100, 100), out=buffer)
        resized.zero_().resize_(1000)
    made = log.end().bytes.tolist()
    assert sorted(made) == [-40_000, -40_000, 3960, 40_000, 40_000]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_gradient_of_logits_is_the_losss_and_casts_are_their_modules(gpu: VirtualGPU, precision: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 20_000))
    batch = {"x": torch.randn(256, 8), "y": torch.randint(20_000, (256,))}
    training = Training(model, batch, lambda net, of: nn.functional.cross_entropy(net(of["x"]).float(), of["y"]))
    training.step(precision)
    ledger = ledger_of(gpu, training, precision)
    owned = {(module, category): size for module, category, size in ledger.modules}
    logits = 256 * 20_000 * 4
    assert owned["", TEMPORARIES] >= 2 * logits
    assert owned["", ACTIVATIONS] >= logits
    assert (("2", CASTS) in owned) == (precision == "bf16")
    for category, size in ledger.at_peak.items():
        assert sum(of for (_, name), of in owned.items() if name == category) <= size


def test_what_the_allocator_counts_beyond_is_in_no_category(gpu: VirtualGPU) -> None:
    from gpumem_nb.memory.ledger.events import TensorLog
    from gpumem_nb.report.breakdown import not_explained

    class Rounding:
        """A GPU whose allocator rounds up: 4 KiB more than was asked for at the peak."""

        kind = "cuda"

        def reset_peak(self) -> None:
            gpu.reset_peak()

        def reading(self) -> Any:
            now = gpu.reading()
            return dataclasses.replace(now, live_peak_bytes=now.live_peak_bytes + 4096)

        def event_log(self) -> TensorLog:
            return TensorLog(gpu.torch_device, lambda: (gpu.reading().live_bytes, gpu.reading().live_peak_bytes))

    training = MODELS["text-gpt"]()
    training.step("fp32")
    recorder = Recorder(Rounding(), training.model)  # type: ignore[arg-type]
    with recorder.watching():
        training.step("fp32", recorder)
        ledger = recorder.end().ledger()
    assert not_explained(ledger) == 4096
    assert sum(ledger.at_peak.values()) == gpu.reading().live_peak_bytes
