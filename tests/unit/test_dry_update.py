"""What an update is foreseen to allocate, against what the real one allocates: to the byte, and nothing changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.optim.sgd as sgd_module
from torch import Tensor, nn, optim
from torch.amp import GradScaler
from torch.optim import Optimizer

from gpumem_nb.engine import cells
from gpumem_nb.engine.step import known_updates, optimizers
from gpumem_nb.engine.step.dry_update import AskedUpdate, CannotBeForeseen, foresee
from gpumem_nb.engine.step.known_updates import KnownUpdates
from gpumem_nb.memory.ledger.events import Foreseen
from gpumem_nb.memory.tensors import tensors_in
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from tests.tiers import every, first_tier

Build = Callable[[list[Tensor]], Optimizer]


class Replacing(Optimizer):
    """An optimizer of the user's that replaces its state and weights in each update and counts updates in Python."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.updates += 1
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            state = self.state[param]
            state["mean"] = param.grad * 0.1 + state["mean"] * 0.9 if "mean" in state else param.grad.clone()
            param.data = param.data - 0.1 * state["mean"]


class Around(Optimizer):
    """An optimizer of the user's that wraps another and shares its groups and state; each third step makes a copy."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.counted = inner, torch.zeros(())
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state
        self.slow: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.counted += 1
        if self.counted.item() % 3 == 0:
            self.slow = [param.clone() for group in self.param_groups for param in group["params"]]


class Deciding(Optimizer):
    """An optimizer of the user's that reads gradients before it decides."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            if param.grad.norm() > 1:
                param.sub_(param.grad * 0.1)


FLAGS = {
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
    "loop": {"foreach": False, "fused": False},
}
FUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, {}),
    "adamw": (optim.AdamW, {}),
    "amsgrad": (optim.AdamW, {"amsgrad": True, "maximize": True}),
    "adagrad": (optim.Adagrad, {}),
}
OTHERS = ["RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD", "Adafactor"]
BUILDS: dict[str, Build] = {
    f"{name} {impl}": partial(FUSED[name][0], **FUSED[name][1], **flags)
    for name in FUSED
    for impl, flags in FLAGS.items()
}
BUILDS |= {f"{name} {way}": partial(getattr(optim, name), foreach=way) for name in OTHERS for way in (False, True)}
BUILDS |= {"replacing": Replacing, "around": lambda params: Around(optim.Adam(params, foreach=True))}
# How many dry runs two models need for seven updates each: RAdam computes with the number of the step, and numbers
# in the state of NAdam differ in each; of the user's own optimizers nothing is known.
KNOWN = [("sgd loop", 1), ("adagrad fused", 1), ("momentum foreach", 2), ("adamw loop", 2), ("Adafactor False", 2)]
KNOWN += [("RAdam False", 7), ("NAdam True", 7), ("replacing", 14), ("around", 14)]
# The CPU's products of 16-bit matrices take memory inside, so such an update is taken and undone instead.
CASES = [(name, torch.float32) for name in BUILDS] + [
    (name, torch.bfloat16) for name in BUILDS if not name.startswith(("Adafactor", "ASGD"))
]


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 40, 5), nn.BatchNorm2d(40), nn.Flatten(), nn.Linear(300, 71), nn.Linear(71, 1)
    ).to(dtype)


def with_gradients(net: nn.Module) -> None:
    for number, param in enumerate(net.parameters()):
        param.grad = torch.randn_like(param) if number != 1 else None  # one weight takes no part


def everything(net: nn.Module, optimizer: Optimizer) -> list[Any]:
    """What an update could change: values, where they lie, and plain attributes."""
    tensors = [*net.parameters(), *(param.grad for param in net.parameters() if param.grad is not None)]
    state = [value for values in optimizer.state.values() if values != 3 for value in values.values()]
    lying = [(one.data_ptr(), one._version, one.stride()) for one in [*tensors, *state] if isinstance(one, Tensor)]
    values = [one.clone() for one in [*tensors, *state] if isinstance(one, Tensor)]
    return [lying, [one.tolist() for one in values], repr(optimizer.param_groups), getattr(optimizer, "updates", 0)]


def highest_and_left(changes: Iterable[int]) -> tuple[int, int]:
    live = np.cumsum([0, *changes])
    return int(live.max()), int(live[-1])


def compared(
    gpu: VirtualGPU,
    net: nn.Module,
    optimizer: Optimizer,
    fp16: bool,
    clip_norm: float | None,
    foresee: Callable[..., Foreseen] = foresee,
) -> None:
    """One update foreseen, and taken."""
    scaler = GradScaler("cpu") if fp16 else None
    if scaler:
        scaler.scale(torch.ones(()))
    before = everything(net, optimizer)
    log = gpu.event_log()
    log.begin([])
    foreseen = foresee(AskedUpdate(optimizer, "default", scaler, clip_norm), gpu.torch_device, log.allocation)
    log.end()
    assert everything(net, optimizer) == before
    log = gpu.event_log()
    log.begin([])
    optimizers.update(optimizer, scaler, clip_norm, (lambda: scaler.step(optimizer)) if scaler else optimizer.step)
    real = log.end()
    assert highest_and_left(row[1] for row in foreseen.rows) == highest_and_left(real.bytes.tolist())
    owned = sum(nbytes for _, nbytes, _ in foreseen.owned)
    weights = {id(param) for group in optimizer.param_groups for param in group["params"]}
    inside = [tensors_in(list(vars(one).values())) for one in optimizers.with_inner(optimizer)]
    held = {id(one): one.untyped_storage().nbytes() for one in chain.from_iterable(inside) if id(one) not in weights}
    assert owned == sum(held.values())


@pytest.mark.parametrize(("name", "dtype"), first_tier(CASES, every(5)))
def test_an_update_is_foreseen_to_the_byte_state_there_or_not(gpu: VirtualGPU, name: str, dtype: torch.dtype) -> None:
    for fp16, clip_norm in ((False, None), (True, 1.0)):
        net = network(dtype)
        optimizer = BUILDS[name](list(net.parameters()))
        optimizers.set_implementation(optimizer, "default")  # as for whatever is trained
        for _ in range(3 if name == "around" else 2):
            with_gradients(net)
            compared(gpu, net, optimizer, fp16 and dtype is torch.float32, clip_norm)


def test_what_the_cpus_products_of_16_bit_matrices_take_inside_is_not_guessed(gpu: VirtualGPU) -> None:
    net = network(torch.bfloat16)
    optimizer = optim.Adafactor(net.parameters())
    with_gradients(net)
    with pytest.raises(CannotBeForeseen, match="products of 16-bit matrices"):
        foresee(AskedUpdate(optimizer), gpu.torch_device, lambda tensor: 0)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.NAdam, optim.Adafactor])
def test_where_torch_defaults_to_foreach_its_temporaries_are_foreseen(
    gpu: VirtualGPU, kind: type[Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])  # as CUDA is
    net = network(torch.float32)
    optimizer = kind(net.parameters(), lr=0.01)  # type: ignore[call-arg]
    optimizers.set_implementation(optimizer, "default")
    for _ in range(2):
        with_gradients(net)
        compared(gpu, net, optimizer, False, 1.0)


def test_a_schedulers_counter_and_hooks_are_not_called(gpu: VirtualGPU) -> None:
    net = network(torch.float32)
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optim.lr_scheduler.StepLR(optimizer, 1)
    called: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    with_gradients(net)
    foreseen = foresee(AskedUpdate(optimizer, "foreach"), gpu.torch_device, lambda _: 0)
    assert foreseen.highest_bytes > 0
    assert not called
    assert not getattr(optimizer, "_opt_called", False)
    assert not optimizer.state
    assert optimizer.param_groups[0]["foreach"] is None, "the implementation was the copy's"


def test_what_decides_by_values_or_was_replaced_cannot_be_foreseen(gpu: VirtualGPU) -> None:
    net = network(torch.float32)
    deciding, replaced = Deciding(net.parameters()), optim.SGD(net.parameters(), lr=0.1)
    with_gradients(net)
    before = everything(net, deciding)
    replaced.step = lambda closure=None: None  # type: ignore[method-assign]
    for optimizer in (deciding, replaced):
        with pytest.raises(CannotBeForeseen):
            foresee(AskedUpdate(optimizer), gpu.torch_device, lambda _: 0)
    assert everything(net, deciding) == before
    assert torch.zeros(2).sum().item() == 0, "no mode of the dry run is left"


@pytest.fixture
def dry_runs(monkeypatch: pytest.MonkeyPatch) -> list[Optimizer]:
    """The optimizers of dry runs, one for each."""
    found: list[Optimizer] = []

    def counted(update: AskedUpdate, *how: Any) -> Foreseen:
        found.append(update.optimizer)
        return foresee(update, *how)

    monkeypatch.setattr(known_updates, "foresee", counted)
    return found


@pytest.mark.parametrize(("name", "runs"), KNOWN)
def test_an_update_like_an_earlier_one_needs_no_dry_run(
    gpu: VirtualGPU, name: str, runs: int, dry_runs: list[Optimizer]
) -> None:
    """Of two models alike the first update makes the state, and the second is like all later ones."""
    known = KnownUpdates()
    for net in (network(torch.float32), network(torch.float32)):
        optimizer = BUILDS[name](list(net.parameters()))
        optimizers.set_implementation(optimizer, "default")
        for _ in range(7):
            with_gradients(net)
            optimizer.param_groups[0]["lr"] *= 0.9
            compared(gpu, net, optimizer, False, 1.0, known.foresee)
    assert len(dry_runs) == runs


def test_whatever_decides_how_an_update_is_computed_asks_for_another_dry_run(
    gpu: VirtualGPU, dry_runs: list[Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, net = KnownUpdates(), network(torch.float32)
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    usual = sgd_module.sgd
    monkeypatch.setattr(sgd_module, "sgd", usual)  # and back
    changes: list[Callable[[], object]] = [
        lambda: with_gradients(net),
        lambda: None,
        cells.one_more,
        lambda: optimizer.param_groups[0].update(weight_decay=0.1),
        lambda: optimizer.param_groups[0].update(nesterov=True),
        lambda: setattr(next(net.parameters()), "grad", None),
        lambda: optimizer.state.clear(),
        lambda: vars(optimizer)["state"].update(mine=3),
        lambda: setattr(sgd_module, "sgd", lambda *args, **kwargs: usual(*args, **kwargs)),
    ]
    for change in changes:
        change()
        compared(gpu, net, optimizer, False, None, known.foresee)
    assert len(dry_runs) == 8
    compared(gpu, net, optimizer, False, None, known.foresee)
    assert len(dry_runs) == 8


def test_it_counts_which_of_two_weights_alike_has_its_state(gpu: VirtualGPU) -> None:
    known, net = KnownUpdates(), nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    optimizer = optim.Adam(net.parameters())
    optimizers.set_implementation(optimizer, "default")
    for with_state in (0, 1):
        optimizer.state.clear()
        for trained in (with_state, 0):
            for place, param in enumerate(net.parameters()):
                param.grad = torch.ones_like(param) if place == trained else None
            compared(gpu, net, optimizer, False, None, known.foresee)


class Smoothing(optim.SGD):
    """An optimizer of the user's, by the name of one that makes nothing of sparse gradients."""


SPARSE = [partial(optim.SGD, momentum=0.9), partial(optim.SGD, maximize=True), Smoothing, optim.Adagrad]


@pytest.mark.parametrize("build", [*SPARSE, optim.SparseAdam])
def test_what_is_made_of_sparse_gradients_cannot_be_foreseen(gpu: VirtualGPU, build: Any) -> None:
    table = nn.Embedding(1000, 16, sparse=True)
    plain, optimizer = optim.SGD(table.parameters(), lr=0.1), build(table.parameters(), lr=0.1)
    table(torch.arange(10)).sum().backward()
    for ask in (foresee, KnownUpdates().foresee):
        assert ask(AskedUpdate(plain), gpu.torch_device, lambda _: 0).highest_bytes == 0
        with pytest.raises(CannotBeForeseen, match="sparse"):
            ask(AskedUpdate(optimizer), gpu.torch_device, lambda _: 0)
