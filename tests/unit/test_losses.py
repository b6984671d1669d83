"""What people hand over as a loss, whatever they call its parameters, against what they mean by it."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gpumem_nb.engine import building
from gpumem_nb.engine.attach import as_loss, attached
from gpumem_nb.engine.step.checks import checked_loss
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from tests.unit.test_one_rank import alone as alone

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 1, 0])


class Scaled(nn.Module):
    """A criterion with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(a / self.temperature, b)


class OfModel(nn.Module):
    """A loss of model and batch that happens to be a module."""

    def forward(self, net: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])


def of_net(net: nn.Module, data: list[Tensor]) -> Tensor:
    inputs, targets = data
    return F.cross_entropy(net(inputs), targets)


def of_parts(x: Any, y: list[Tensor]) -> Tensor:
    return F.cross_entropy(x.head(y[0]), y[1])


def of_outputs(prediction: Tensor, truth: Tensor) -> Tensor:
    return -prediction.log_softmax(-1)[torch.arange(len(truth)), truth].mean()


LOSSES: dict[str, Callable[..., Any]] = {
    "loss(net, data)": of_net,
    "loss(x, y) of a part": of_parts,
    "loss(model, batch)": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    "lambda m, b": lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    "functional": F.cross_entropy,
    "module": nn.CrossEntropyLoss(),
    "own criterion": of_outputs,
    "lambda a, b": lambda a, b: F.cross_entropy(a, b),
    "module with weights": Scaled(),
    "module of a model": OfModel(),
}


class Net(nn.Module):
    """Counts its calls, which draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(F.dropout(x, 0.1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_is_understood_whatever_its_parameters_are_called(kind: str) -> None:
    loss, net = as_loss(LOSSES[kind]), Net()
    torch.manual_seed(7)
    ours = [loss(net, [X, Y]).item() for _ in range(2)]
    calls, net.calls = net.calls, 0
    torch.manual_seed(7)
    if kind == "loss(x, y) of a part":
        plain = [F.cross_entropy(net.head(X), Y).item() for _ in range(2)]
    else:
        scale = 2.0 if kind == "module with weights" else 1.0
        plain = [F.cross_entropy(net(X) / scale, Y).item() for _ in range(2)]
    assert ours == pytest.approx(plain)
    assert calls == net.calls, "nothing is called once more to find out"


def test_what_goes_wrong_in_a_loss_of_model_and_batch_comes_as_it_is() -> None:
    def wrong(net: Any, data: Any) -> Any:
        return net(data[0]) + undefined  # type: ignore[name-defined]  # noqa: F821

    net = Net()
    with pytest.raises(NameError, match="undefined"):
        as_loss(wrong)(net, [X, Y])
    assert net.calls == 1


def misspelt(m: Any, batch: Any) -> Any:
    x, y = batch
    out = m.forwrd(x)
    return F.cross_entropy(out, y)


def missing_name(m: Any, batch: Any) -> Any:
    x, y = batch
    return F.cross_entropy(modle(x), y)  # type: ignore[name-defined]  # noqa: F821


def wrong_type(m: Any, batch: Any) -> Any:
    inputs, targets = batch
    return F.cross_entropy(m(inputs + "x"), targets)


def misspelt_weight(f: Any, batch: Any) -> Any:
    x, y = batch
    w = f.wieght.norm()
    return F.cross_entropy(f(x), y) + w


def misspelt_criterion(outputs: Any, targets: Any) -> Any:
    return (outputs[:, 0] - targets).square().meen()


WRONG: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "a method of the model": (misspelt, AttributeError, "'Net' object has no attribute 'forwrd'"),
    "a model by another name": (misspelt_weight, AttributeError, "'Net' object has no attribute 'wieght'"),
    "in one line": (lambda m, b: F.cross_entropy(m.forwrd(b[0]), b[1]), AttributeError, "'Net' .* 'forwrd'"),
    "a name": (missing_name, NameError, "modle"),
    "a type": (wrong_type, TypeError, "must be Tensor, not str|unsupported operand"),
    "a criterion": (misspelt_criterion, AttributeError, "'Tensor' object has no attribute 'meen'"),
    "a criterion's name": (lambda a, b: F.cross_entropy(a, c), NameError, "c"),  # type: ignore[name-defined]  # noqa: F821
}


@pytest.mark.parametrize("what", WRONG)
def test_an_error_of_the_loss_itself_is_the_one_that_is_shown(what: str) -> None:
    loss, kind, words = WRONG[what]
    with pytest.raises(kind, match=words) as caught:
        as_loss(loss)(Net(), [X, Y])
    assert caught.value.__context__ is None


def test_an_error_of_the_model_is_not_hidden_by_the_search_for_the_form_of_the_loss() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        as_loss(lambda a, b: F.cross_entropy(a, b))(Net(), [X[:, :2], Y])


def test_a_criterion_without_pairs_says_what_to_write() -> None:
    with pytest.raises(WorkloadError, match="A criterion needs samples of"):
        as_loss(F.cross_entropy)(Net(), X)
    with pytest.raises(WorkloadError, match="must be callable; this is a str"):
        as_loss("mse")


def gpt2() -> Any:
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8, resid_pdrop=0, embd_pdrop=0)
    config.attn_pdrop = 0
    return GPT2LMHeadModel(config)


def llama() -> Any:
    sizes: Any = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))


class Lines(Dataset[dict[str, Tensor]]):
    """Token sequences of which different numbers of labels count."""

    def __init__(self, size: int) -> None:
        tokens = torch.randint(0, 16, (size, 8), generator=torch.Generator().manual_seed(1))
        labels = tokens.clone()
        for index, line in enumerate(labels):
            line[: index % 7] = -100
        self.lines = [{"input_ids": t, "labels": one} for t, one in zip(tokens, labels, strict=True)]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.lines[index]


@pytest.mark.parametrize("make", [gpt2, llama])
def test_tokens_are_averaged_over_a_whole_step_however_it_is_split(make: Callable[[], Any]) -> None:
    trained = []
    for batch_size, accumulation_steps in ((8, 1), (4, 2), (1, 8)):
        torch.manual_seed(0)
        model = make()
        objects = {"net": model, "data": Lines(8), "own": torch.optim.SGD(model.parameters(), lr=0.5)}
        trainer = lone({"model": "net", "data": "data", "optimizer": "own"}, objects)
        settings = Settings(optimizer="own", learning_rate=0.5, batch_size=batch_size)
        reply = trainer.run(Chunk(settings.replace(accumulation_steps=accumulation_steps), 1, 3))
        assert reply.failure is None
        trained.append(
            ([sample.loss for sample in reply.samples], torch.cat([p.flatten() for p in model.parameters()]))
        )
    torch.manual_seed(0)
    model = make()
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    everything = {name: torch.stack([line[name] for line in Lines(8).lines]) for name in ("input_ids", "labels")}
    losses = []
    for _ in range(3):
        plain.zero_grad()
        loss = model(**everything).loss
        loss.backward()
        plain.step()
        losses.append(loss.item())
    weights = torch.cat([p.flatten() for p in model.parameters()])
    for ours, after in trained:
        assert ours == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(after, weights, rtol=1e-4, atol=1e-6)


def lone(names: dict[str, str | None], objects: dict[str, Any]) -> Trainer:
    prepared = building.prepare(lambda: attached(names, objects))
    assert prepared is not None
    workload, stream, _ = prepared
    return Trainer(workload, stream, opened(), time.time())


def test_the_first_batch_is_let_go_of_without_the_collector() -> None:
    def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets)

    batch = [torch.ones(2, 4), torch.ones(2, 2)]
    alive = weakref.ref(batch[0])
    loss = as_loss(criterion)
    gc.disable()
    try:
        loss(nn.Linear(4, 2), batch)
        del batch
        assert alive() is None
    finally:
        gc.enable()


def test_a_criterion_that_counts_is_counted_once_when_it_is_found_out_to_be_one() -> None:
    class Counting(nn.Module):
        seen = 0
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.seen += 1
            self.calls.add_(1)
            self.noise = torch.rand(())
            return F.cross_entropy(outputs, targets)

    criterion = Counting()
    torch.manual_seed(3)
    as_loss(criterion)(Net(), [X, Y])
    assert criterion.seen == criterion.calls == 1


def test_gradients_that_a_cell_has_switched_off_are_named() -> None:
    with torch.no_grad(), pytest.raises(WorkloadError, match=r"^Gradients are switched off.*set_grad_enabled\(True\)"):
        checked_loss(Scaled()(X, Y))
    with pytest.raises(WorkloadError, match="does not depend on the model's weights"):
        checked_loss(torch.zeros(()))


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (nn.MSELoss, r"^The loss is the class MSELoss and not an object of it: loss = MSELoss\(\)$"),
        (
            lambda batch, model: model(batch[0]).sum(),
            r"^The loss takes the model second. Write it as loss\(model, batch\)",
        ),
    ],
)
def test_slips_that_any_call_would_fail_at_are_named(loss: Any, sentence: str) -> None:
    with pytest.raises(WorkloadError, match=sentence):
        as_loss(loss)
