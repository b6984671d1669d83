"""What models, losses and settings cold predictions take, and which kernels they reckon with."""

from __future__ import annotations

import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import gpumem_nb as gm
from gpumem_nb.engine.dry import kernels
from gpumem_nb.engine.dry.batches import Batches
from gpumem_nb.engine.dry.run import Run
from gpumem_nb.engine.dry.step import DryStep, refused
from gpumem_nb.internals.fake_internals import fake_mode
from gpumem_nb.planning import dry_process
from gpumem_nb.planning.prediction import Prediction
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.shared.forecast import SEGMENT_BYTES, Kernels, Target
from gpumem_nb.shared.knobs import KNOBS, Knob, register
from gpumem_nb.shared.settings import Settings
from tests.timing import HANG_S, until
from tests.unit.dry_runs import apart

pytestmark = pytest.mark.usefixtures("dry_runs_forked")
WIDTH, BATCH = 256, 64


def workload(model: Callable[[], nn.Module], loss: Any = None, data: Any = None, **more: Any) -> gm.Workload:
    return gm.Workload("mine", model, data or rows, loss or mean_loss, **more)


def predict(given: gm.Workload, **arguments: Any) -> Prediction:
    predicted = gm.predict(given, **{"batch_size": BATCH, **arguments})
    assert isinstance(predicted, Prediction)
    return predicted


def rows() -> list[tuple[Tensor, int]]:
    return [(torch.zeros(WIDTH), index % 4) for index in range(8)]


def perceptron() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@contextmanager
def keeping(ampere: bool) -> Iterator[list[int]]:
    """Inside, tensors have no memory and kernels are a GPU's; gives the elements of each tensor kept for backward."""
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    installed = kernels.install(Kernels(ampere, 0), fake=True)
    try:
        with fake_mode(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield kept
    finally:
        del installed


def kept_by_attention(dtype: torch.dtype, head: int, ampere: bool, mask: bool = False) -> int:
    """Elements of the largest tensor that attention over 64 places keeps for backward."""
    with keeping(ampere) as kept:
        query = torch.zeros(1, 2, 64, head, dtype=dtype, requires_grad=True)
        given = torch.ones(64, 64, dtype=torch.bool) if mask else None
        nn.functional.scaled_dot_product_attention(query, query, query, given)
    return max(kept)


@pytest.mark.parametrize(
    ("dtype", "head", "ampere", "by_hand"),
    [
        (torch.float16, 16, False, False),
        (torch.bfloat16, 16, True, False),
        (torch.bfloat16, 16, False, True),  # bf16 is fused from compute capability 8.0 on
        (torch.float32, 12, True, False),
        (torch.float32, 10, True, True),  # no whole words for tensor cores
        (torch.float32, 10, False, False),
        (torch.float16, 12, False, True),
        (torch.float64, 16, True, True),
    ],
)
def test_attention_keeps_its_scores_where_no_kernel_takes_it(
    dtype: torch.dtype, head: int, ampere: bool, by_hand: bool
) -> None:
    scores = 2 * 64 * 64
    assert (kept_by_attention(dtype, head, ampere) >= scores) == by_hand
    masked = kept_by_attention(dtype, head, ampere, mask=True)
    assert masked >= scores or not by_hand


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.inside(inputs.unsqueeze(1).expand(-1, 16, -1))[0][:, -1])
        return outputs


def test_recurrent_layers_keep_their_gates_and_are_predicted_roughly() -> None:
    predicted = predict(workload(Recurrent), gpu="T4-16GB", batch_size=1024)
    gates = 2 * 1024 * 16 * 4 * WIDTH * 4
    assert predicted.live_peak_bytes > gates
    assert "what cuDNN keeps of recurrent layers is not documented" in predicted.basis
    assert predicted.high_bytes >= 1.5 * predicted.reserved_peak_bytes


def image_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0].view(-1, 1, 16, 16)).mean()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize(
    ("model", "loss", "knobs", "error", "of_live"),
    [
        (perceptron, mean_loss, {}, 0.18, 0.04),
        (perceptron, mean_loss, {"precision": "bf16", "checkpointing": "blocks"}, 0.18, 0.04),
        (lambda: nn.Conv2d(1, 4, 3), image_loss, {"compression": "fp16"}, 0.3, 0.16),
        (lambda: nn.Conv2d(1, 4, 3), image_loss, {"precision": "fp16"}, 0.3, 0.05),
    ],
)
def test_the_error_is_wider_where_convolutions_are_computed(
    model: Callable[[], nn.Module], loss: Any, knobs: dict[str, Any], error: float, of_live: float
) -> None:
    settings, used = Settings(batch_size=8, **knobs), Kernels(True, 0)
    with Run(workload(model, loss), Batches(rows()), settings, used, ranks=2) as run:
        run.take()
        found = run.found(Target(used, (), None, 0, 0)).forecast
    assert found.error == error
    assert found.deciding_bytes == pytest.approx(
        [found.live_peak_bytes * (1 + way * of_live) for way in (-1, 1)], abs=1
    )


def in_16_bits() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.LayerNorm(WIDTH), layer).to(torch.bfloat16)  # one weight under two names


def test_a_model_that_is_converted_takes_a_step_without_memory() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0].bfloat16()).float().mean()  # type: ignore[no-any-return]

    predicted = predict(workload(in_16_bits, loss))
    assert "a step on fake tensors" in predicted.basis
    assert predicted.categories["parameters"] == sum(param.nbytes for param in in_16_bits().parameters())


def test_autocast_for_cuda_in_a_loss_is_autocast() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            return mean_loss(model, batch)

    own = predict(workload(perceptron, loss), batch_size=2**14)
    knob = predict(workload(perceptron), batch_size=2**14, precision="fp16")
    assert own.categories["activations"] == knob.categories["activations"]


class Summing(torch.optim.SGD):
    """Makes its state when it is built and at no other time, as torch's Adagrad did."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, lr=0.1, momentum=0.9)
        for weight in self.param_groups[0]["params"]:
            self.state[weight] = {"momentum_buffer": torch.zeros_like(weight), "sums": [torch.zeros_like(weight)]}

    def step(self, closure: Any = None) -> Any:
        for state in self.state.values():
            state["sums"][0].add_(state["momentum_buffer"])
        assert self.state
        return super().step(closure)


def test_an_optimizer_that_makes_its_state_when_it_is_built_has_it_in_each_step() -> None:
    found: Any = gm.predict(workload(perceptron, optimizer=Summing), gpu=["T4-16GB", "A100-40GB"], batch_size=BATCH)
    later = predict(workload(perceptron), gpu="T4-16GB", optimizer="momentum")
    assert "a step on fake tensors" in found["A100-40GB"].basis
    assert found.largest["T4-16GB"] > BATCH
    state_bytes = later.categories["optimizer state"]
    assert found["T4-16GB"].categories["optimizer state"] == state_bytes
    assert found["T4-16GB"].live_peak_bytes == pytest.approx(later.live_peak_bytes + state_bytes, rel=0.01)


class CallsForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block.forward(inputs)
        return inputs


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.LazyLinear(4)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return self.inside(model(batch[0])).mean()  # type: ignore[no-any-return]


def table() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))


def index_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[1]), batch[1])


def test_what_ranks_refuse_is_refused() -> None:
    with pytest.raises(WorkloadError, match="checkpointing=blocks has no effect: forward calls none of the 3 blocks"):
        predict(workload(CallsForward), checkpointing="blocks")
    with pytest.raises(WorkloadError, match=r"loss\.inside.*belongs to a lazy layer|inside\.weight belongs to a lazy"):
        predict(workload(perceptron, Lazy()))
    with pytest.raises(WorkloadError, match="clip_norm needs dense gradients"):
        predict(workload(table, index_loss), optimizer="sgd", clip_norm=1.0)


def test_a_registered_knob_is_refused() -> None:
    register(Knob("noise", 0.0, "added to inputs", parse=float, allowed="a number"))
    try:
        with pytest.raises(InvalidInput, match=r"noise=0\.5 cannot be predicted without ranks"):
            predict(workload(perceptron), noise=0.5)
    finally:
        del KNOBS["noise"]


def test_real_tensors_in_a_loss_change_nothing() -> None:
    weights = torch.ones(4)

    def weighted(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], weights)

    plain, with_weights = predict(workload(perceptron)), predict(workload(perceptron, weighted))
    assert "a step on fake tensors" in with_weights.basis
    assert with_weights.live_peak_bytes == pytest.approx(plain.live_peak_bytes, abs=4096)


def test_a_model_that_is_there_already_is_predicted_as_one_that_is_made() -> None:
    net = perceptron()
    made, there = predict(workload(perceptron)), predict(workload(lambda: net))
    assert "a step on fake tensors" in there.basis
    assert there.live_peak_bytes == made.live_peak_bytes
    assert there.reserved_peak_bytes == pytest.approx(made.reserved_peak_bytes, abs=SEGMENT_BYTES)


def test_many_micro_batches_take_no_longer_than_two() -> None:
    two, many = (predict(workload(perceptron), accumulation_steps=steps) for steps in (2, 20_000))
    assert many.live_peak_bytes == two.live_peak_bytes
    assert many.settings.accumulation_steps == 20_000


def test_a_model_that_ends_the_process_is_a_sentence() -> None:
    with pytest.raises(WorkloadError, match="The model cannot be run without memory: SystemExit: 0"):
        predict(workload(lambda: sys.exit(0)))


@pytest.mark.full
def test_an_answer_that_did_not_come_is_a_sentence() -> None:
    with apart(), pytest.raises(WorkloadError, match="The process that predicts ended with 0"):
        predict(workload(lambda: os._exit(0)))


def test_a_lack_of_memory_says_how_much_there_may_be() -> None:
    said = dry_process._ended(1, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate")
    assert "It may have at most 4.0 GiB of data." in said


def test_an_interrupt_ends_what_the_model_has_started(tmp_path: Path) -> None:
    noted = tmp_path / "pid"

    def model() -> nn.Module:
        noted.write_text(f"{subprocess.Popen(['sleep', str(10 * HANG_S)]).pid} ")
        time.sleep(10 * HANG_S)
        raise AssertionError

    def interrupt() -> None:
        until(lambda: noted.exists() and noted.read_text().endswith(" "))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with apart(), pytest.raises(KeyboardInterrupt):
        predict(workload(model))
    with suppress(psutil.NoSuchProcess):
        until(lambda: psutil.Process(int(noted.read_text())).status() == psutil.STATUS_ZOMBIE)


def test_a_child_whose_parent_is_gone_ends() -> None:
    command = [sys.executable, "-m", "gpumem_nb.engine.dry", str(2**32), "1"]
    ended = subprocess.run(command, input=b"", capture_output=True)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_a_line_of_a_package_with_a_name_like_torch_is_named() -> None:
    like_torch = Path(torch.__file__).parent.with_name("torchvision") / "ops.py"
    code = compile("def boxes(model, batch):\n    raise ValueError('no boxes')\n", str(like_torch), "exec")
    found: dict[str, Any] = {}
    exec(code, found)
    step = DryStep(workload(perceptron, found["boxes"]), Batches(rows()), Settings(), Kernels(True, 0))
    with pytest.raises(ValueError, match="no boxes") as caught:
        step.trace(2)
    assert "(ops.py, line 2, in boxes)" in str(refused(caught.value, "forward"))


def test_the_line_of_a_cell_is_shown() -> None:
    source = "def loss(model, batch):\n    return batch[0].sum().item() + missing\n"
    found: dict[str, Any] = {}
    exec(compile(source, "cell 7", "exec"), found)
    linecache.cache["cell 7"] = (len(source), None, source.splitlines(keepends=True), "cell 7")
    try:
        with pytest.raises(WorkloadError, match=r"\(cell 7, line 2, in loss: return batch\[0\]\.sum\(\)\.item\(\)"):
            predict(workload(perceptron, found["loss"]))
    finally:
        del linecache.cache["cell 7"]


def test_the_fusion_buffer_is_as_large_as_its_knob_says() -> None:
    kept = [
        predict(workload(perceptron), ranks=2, **knobs).categories["communication"] / 2**20
        for knobs in ({}, {"fusion_threshold_mib": 16})
    ]
    assert kept == [pytest.approx(128, abs=1), pytest.approx(16, abs=1)]
