"""Models of every kind: trained as torch alone trains them, or refused when they are attached, in one sentence."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer, SparseAdam

from gpumem_nb.engine import cells
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.messages import Chunk, ChunkReply
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone
from tests.unit.test_one_rank import loss, rows, stream, tried

OWN = Settings(batch_size=2, optimizer="own", learning_rate=0.1)
ONES = torch.ones(2, 4)


def attached(model: Any, forward: Any = loss, optimizer: Any = None, scheduler: Any = None) -> Trainer:
    own = None if optimizer is None else lambda params: optimizer
    workload = Workload("anybodys", lambda: model, rows, forward, optimizer=own, scheduler=scheduler)
    return Trainer(workload, stream(), opened(), time.time())


def told(reply: ChunkReply) -> str:
    assert reply.failure is not None
    return reply.failure.message


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(make())
    return models[0], models[1]


def plainly(model: nn.Module, steps: int, forward: Any = loss, **options: Any) -> None:
    optimizer = SGD(model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        forward(model, [ONES]).backward()
        optimizer.step()


class Odd(nn.Module):
    """Buffers of types that Horovod and NumPy do not know, a weight without elements, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.level = nn.Parameter(torch.tensor([1, 2], dtype=torch.uint16), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("codes", torch.arange(4, dtype=torch.int32).to(torch.uint16))
        self.register_buffer("scale", torch.ones(4, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("turn", torch.tensor([1 + 1j, 2 - 1j]))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("wide", torch.ones(1, 1).expand(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.cat([self.linear(x), self.empty]) * self.mask * self.scale.float()  # type: ignore[operator]
        return result


class Complex(nn.Module):
    """A weight of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Half(nn.Module):
    """A model in bf16 or fp16 itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x.to(self.linear.weight.dtype))
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "odd types": Odd,
    "complex": Complex,
    "bf16": lambda: Half(torch.bfloat16),
    "fp16": lambda: Half(torch.float16),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2)),
    "lazy, initialised": lambda: initialised(nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyLinear(2))),
}


def initialised(model: nn.Module) -> nn.Module:
    model(ONES)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_any_type_is_trained_as_torch_alone_trains_it(kind: str) -> None:
    ours, plain = twins(MODELS[kind])
    trainer = attached(ours, optimizer=SGD(ours.parameters(), lr=0.1, momentum=0.9))
    trainer.run(Chunk(OWN, 1, 1))
    assert tried(trainer, OWN.replace(batch_size=4)) is None
    assert trainer.run(Chunk(OWN, 1, 2)).failure is None
    plainly(plain, 3, momentum=0.9)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def squeezed(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return loss(model, batch).reshape(1)


def test_a_loss_of_shape_1_is_one_number() -> None:
    ours, plain = twins(lambda: nn.Linear(4, 2))
    trainer = attached(ours, squeezed, SGD(ours.parameters(), lr=0.1))
    (sample,) = trainer.run(Chunk(OWN, 1, 1)).samples
    assert sample.loss is not None
    plainly(plain, 1)
    assert torch.equal(ours.weight, plain.weight)  # type: ignore[arg-type]


def test_a_loss_that_is_a_weight_itself_can_be_trained() -> None:
    model = nn.ParameterDict({"x": torch.ones(())})
    trainer = attached(model, lambda model, batch: model["x"], SGD(model.parameters(), lr=0.1))
    assert trainer.run(Chunk(OWN, 1, 1)).failure is None
    assert model["x"].item() == pytest.approx(0.9)


class Averaging(SGD):
    """As ``hvd.DistributedOptimizer`` makes them."""

    def skip_synchronize(self) -> None: ...


class Lookahead(Optimizer):
    """Around another optimizer, in the way that most implementations of it take."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {"lr": inner.defaults["lr"]})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


class Wrapper(Optimizer):
    """Around another optimizer, whose state is its own too, as accelerate's."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def of_another(kind: Any = SGD) -> Optimizer:
    optimizer: Optimizer = kind(linear().parameters(), lr=0.1)
    return optimizer


LAZY = "0.weight belongs to a lazy layer and has no shape yet. Run one batch through the model first"
REFUSED: list[tuple[str, Callable[[], Any], Callable[[Any], Any], str]] = [
    ("lazy", lambda: nn.Sequential(nn.LazyLinear(2)), lambda model: None, LAZY),
    (
        "lazy statistics",
        lambda: nn.Sequential(nn.Linear(4, 2), nn.LazyBatchNorm1d()),
        lambda model: None,
        "1.weight be",
    ),
    ("meta", lambda: nn.Linear(4, 2, device="meta"), lambda model: None, "weight is on the meta device"),
    ("sync", lambda: nn.Sequential(linear(), nn.SyncBatchNorm(2)), lambda m: None, "SyncBatchNorm .1. averages over"),
    ("several models", lambda: (linear(), linear()), lambda model: None, "this is a tuple. Put its members into one"),
    ("several", linear, lambda model: [of_another(), of_another()], "One optimizer trains here; this is a list of 2"),
    ("no optimizer", linear, lambda model: "sgd", "The optimizer must be a torch.optim.Optimizer; this is a str"),
    ("LBFGS", linear, lambda m: LBFGS(m.parameters()), "LBFGS computes the loss several times in one update"),
    ("averaging", linear, lambda m: Averaging(m.parameters(), lr=0.1), "so does every step here"),
    ("SparseAdam", linear, lambda m: SparseAdam(m.parameters()), "SparseAdam takes sparse gradients"),
    ("Lookahead", linear, lambda m: Lookahead(SGD(m.parameters(), lr=0.1)), "a state of its own .* Attach the SGD"),
    ("another instance", linear, lambda m: of_another(Adam), "The optimizer Adam holds none of this model's weights"),
]


@pytest.mark.parametrize(("kind", "model", "optimizer", "sentence"), REFUSED, ids=[kind for kind, *_ in REFUSED])
def test_what_cannot_be_trained_is_refused_when_it_is_attached(
    kind: str, model: Callable[[], Any], optimizer: Callable[[Any], Any], sentence: str
) -> None:
    made = model()
    with pytest.raises(WorkloadError, match=sentence):
        attached(made, optimizer=optimizer(made))


@pytest.mark.parametrize("trials", [1, 3])
def test_trials_leave_no_trace_in_the_state_that_an_optimizer_shares_with_the_one_in_it(trials: int) -> None:
    ours, plain = twins(linear)
    wrapper = Wrapper(Adam(ours.parameters(), lr=0.1))
    trainer = attached(ours, lambda model, batch: loss(model, [ONES]), wrapper)
    for _ in range(trials):
        assert tried(trainer, OWN) is None
    assert not wrapper.inner.state
    trainer.run(Chunk(OWN, 1, 3))
    optimizer = Adam(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss(plain, [ONES]).backward()
        optimizer.step()
    assert torch.equal(ours.weight, plain.weight)  # type: ignore[arg-type]


class Remembering(SGD):
    """Keeps gradients where nobody looks for them."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.seen: list[Tensor] = []
        self.steps = 0


def test_what_an_optimizer_keeps_beside_its_state_is_told_of_once() -> None:
    model = linear()
    said = " ".join(attached(model, optimizer=Remembering(model.parameters(), 0.1)).info().notes)
    assert "The optimizer keeps values outside of its state (seen)" in said
    plain = linear()
    assert "outside of its state" not in " ".join(attached(plain, optimizer=Adam(plain.parameters())).info().notes)


def test_an_optimizer_around_another_one_trains_if_it_keeps_nothing_of_its_own() -> None:
    ours, plain = twins(lambda: nn.Linear(4, 2))
    trainer = attached(ours, optimizer=Wrapper(SGD(ours.parameters(), lr=0.1)))
    assert trainer.run(Chunk(OWN, 1, 1)).failure is None
    plainly(plain, 1)
    assert torch.equal(ours.weight, plain.weight)  # type: ignore[arg-type]


def test_a_sparse_buffer_is_refused_by_name() -> None:
    model = linear()
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    with pytest.raises(WorkloadError, match="adjacency is a sparse tensor"):
        attached(model)


def test_loss_scaling_is_refused_for_weights_in_fp16() -> None:
    model = Half(torch.float16)
    trainer = attached(model, optimizer=SGD(model.parameters(), lr=0.1))
    reply = trainer.run(Chunk(OWN.replace(precision="fp16"), 1, 1))
    assert "linear.weight is in fp16 itself. Use precision=fp32" in told(reply)


class RootOfZero(nn.Module):
    """Its loss is finite, the gradient of ``slope`` is not once ``slope`` is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.slope = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) + (self.slope * 0).norm(dim=0).sqrt()
        return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("proven", [True, False])
def test_a_gradient_that_is_not_finite_is_found_before_the_update(precision: str, proven: bool) -> None:
    def forward(model: RootOfZero, batch: list[Tensor]) -> Tensor:
        bad: Tensor = model(batch[0]).square().mean()
        return bad if broken else model.linear(batch[0]).square().mean() + 0 * model.slope.sum()

    broken = not proven
    model = RootOfZero()
    trainer = attached(model, forward, SGD(model.parameters(), lr=0.1, momentum=0.9))
    settings = OWN.replace(precision=precision)
    if proven:
        assert trainer.run(Chunk(settings, 1, 1)).failure is None
    broken = True
    before = [param.detach().clone() for param in model.parameters()]
    reply = trainer.run(Chunk(settings, 1, 1))
    assert told(reply).startswith("the gradient of slope became nan, though the loss is finite")
    assert [sample.event for sample in reply.samples] == ["error"]
    assert all(map(torch.equal, model.parameters(), before))


def test_under_fp16_it_is_found_once_the_scale_cannot_be_the_reason() -> None:
    model = RootOfZero()
    trainer = attached(model, optimizer=SGD(model.parameters(), lr=0.1))
    before = [param.detach().clone() for param in model.parameters()]
    reply = trainer.run(Chunk(OWN.replace(precision="fp16"), 1, 40))
    assert told(reply).startswith("the gradient of slope became nan")
    assert len(reply.samples) == 1 + 17, "the scaler's first scale is 2**16"
    assert all(map(torch.equal, model.parameters(), before))


def frozen_norm() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(), nn.Linear(4, 2)))
    model[1].eval()
    return model


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_a_model_in_evaluation_mode_is_trained_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    attached(model)
    assert modes(model) == [True] * 3


def test_modes_that_a_part_was_given_stay_and_an_eval_of_the_whole_is_taken_back() -> None:
    model = frozen_norm()
    trainer = attached(model)
    frozen = [True, True, False, True, True, True]
    assert modes(model) == frozen
    model.eval()
    trainer.run(Chunk(Settings(batch_size=2), 1, 1))
    assert modes(model) == frozen
    model[2].eval()
    trainer.run(Chunk(Settings(batch_size=2), 1, 1))
    assert modes(model) == [True, True, False, False, False, False]
    model.append(nn.Dropout())
    model.eval()
    assert trainer.record() is not None
    assert modes(model) == [False] * 7, "a step that is undone leaves them as a cell has made them"
    trainer.run(Chunk(Settings(batch_size=2), 1, 1))
    assert modes(model) == [True, True, False, False, False, False, True]


def test_what_works_but_not_as_one_may_think_is_said_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    trainer = attached(model, optimizer=SGD(model[0].parameters(), lr=0.1))
    assert trainer.info().notes == (
        "The optimizer does not hold 1.weight and 1 more: what it does not hold is not trained.",
    )
    trainer.stream.size = 2
    trainer.live.own_optimizer.register_step_post_hook(lambda *_: None)  # type: ignore[union-attr]
    assert "The optimizer has step hooks: they run for updates that count" in trainer.info().notes[2]
    assert trainer.info().notes[0].startswith("Batch norm takes its statistics from each rank's own micro-batches")


def test_weights_that_only_the_loss_knows_are_told_of_once() -> None:
    head = nn.Linear(4, 1)

    def forward(model: Any, batch: Any) -> Any:
        return head(model(batch[0])).mean()

    assert "uses weights that nothing trains here (2, the first of shape (1, 4))" in " ".join(
        attached(nn.Linear(4, 4), forward).info().notes
    )
    net = nn.Linear(4, 4)
    own = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
    assert "nothing trains" not in " ".join(attached(net, forward, own).info().notes)
    head.requires_grad_(False)
    assert "nothing trains" not in " ".join(attached(nn.Linear(4, 4), forward).info().notes)


def test_batch_norm_that_a_cell_synchronises_is_refused() -> None:
    one = attached(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert one.run(Chunk(Settings(batch_size=4), 1, 1)).failure is None
    one.live.model[1] = nn.SyncBatchNorm.convert_sync_batchnorm(one.live.model[1])  # type: ignore[index, operator]
    cells.one_more()
    assert "SyncBatchNorm (1) averages over torch.distributed" in told(one.run(Chunk(Settings(batch_size=4), 1, 1)))


def test_a_trial_is_of_its_own_settings_whatever_was_half_applied_before() -> None:
    sizes = SimpleQueue[int]()  # a list would be put back

    def seen(model: Any, batch: Any) -> Any:
        sizes.put(len(batch[0]))
        return model(batch[0]).mean()

    one = attached(nn.Linear(4, 1), seen)
    assert one.run(Chunk(Settings(batch_size=4), 1, 1)).failure is None
    assert one.run(Chunk(Settings(batch_size=4, checkpointing="blocks"), 2, 1)).failure  # it has no blocks
    assert tried(one, Settings(batch_size=2)) is None
    assert one.run(Chunk(Settings(batch_size=4), 3, 1)).failure is None
    assert [sizes.get_nowait() for _ in range(sizes.qsize())] == [4, 2, 4]
    assert one.live.settings == Settings(batch_size=4)
