"""``compile=blocks``: the same numbers as without, to rounding, beside every other way to compute blocks; no trace."""

from __future__ import annotations

import copy
import gc
import io
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from gpumem_nb.engine.data.handed import as_dataset
from gpumem_nb.engine.data.stream import ShardedStream
from gpumem_nb.engine.replay import compiling
from gpumem_nb.engine.replay.checkpointing import find_blocks
from gpumem_nb.engine.replay.recomputing import Recomputing
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.shared.messages import Chunk, ChunkReply
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.links import Overheard, overheard

WIDTH = 16
ON, OFF = Settings(batch_size=4, compile="blocks"), Settings(batch_size=4)
Loss = Callable[[Any, int], Tensor]


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without kernels, which take a compiler of C++ half a minute; on one thread, as ranks are."""
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def with_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces backward as well, and keeps for it what it chooses."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Overheard:
    return overheard(monkeypatch)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.dropout(self.narrow(functional.gelu(self.wide(x)))))
        return out


class Net(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def tokens(batch_size: int) -> Tensor:
    return torch.randint(0, 50, (batch_size, 12), generator=torch.Generator().manual_seed(batch_size))


def of_rows(model: Any, batch_size: int) -> Tensor:
    rows = torch.randn(batch_size, WIDTH, generator=torch.Generator().manual_seed(batch_size))
    loss: Tensor = model(rows).float().square().mean()
    return loss


def of_words(model: Any, batch_size: int) -> Tensor:
    words = tokens(batch_size)
    loss: Tensor = model(input_ids=words, labels=words).loss
    return loss


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2}
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    return model


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.1}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    return model


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    model: nn.Module = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes | {"decoder_start_token_id": 0, "pad_token_id": 0})
    )
    return model


FULL = pytest.mark.full
MODELS: list[Any] = [(Net, of_rows), *(pytest.param(make, of_words, marks=FULL) for make in (gpt2, llama, t5))]


def parts_of(model: nn.Module, settings: Settings) -> Recomputing:
    def none(*_: Any) -> Any:
        raise AssertionError("nothing is made anew")

    parts = Recomputing(model, Workload("plain", none, none, none))
    parts.set_checkpointing(settings)
    parts.set_compile(settings.compile)
    return parts


def step(model: nn.Module, loss: Loss, batch_size: int, precision: str = "fp32") -> list[Tensor]:
    """Return the loss, all gradients and buffers of one step, which draws the same random numbers each time."""
    torch.manual_seed(5)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with torch.autocast("cpu", dtype=kind) if kind else nullcontext():
        found = loss(model, batch_size)
    found.backward()
    gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    return [found.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]


def steps(model: nn.Module, loss: Loss, settings: Settings, sizes: tuple[int, ...] = (4, 6)) -> list[Tensor]:
    parts, found = parts_of(model, settings), list[Tensor]()
    for size in sizes:
        with parts.on():
            found += step(model, loss, size, settings.precision)
            parts.finished()
    return found


def close(found: list[Tensor], expected: list[Tensor], within: float = 1e-5) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(
        torch.allclose(one.double(), other.double(), rtol=within, atol=within * (1 + other.double().abs().max().item()))
        for one, other in pairs
    )


@pytest.mark.parametrize("mode", ["none", "blocks", "sqrt"])
@pytest.mark.parametrize(("make", "loss"), MODELS)
def test_compiled_blocks_compute_what_they_did(
    make: Callable[[], nn.Module], loss: Loss, mode: str, with_autograd: None
) -> None:
    expected = steps(make(), loss, OFF)
    assert close(steps(make(), loss, ON.replace(checkpointing=mode)), expected)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", "blocks"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_compiled_blocks_compute_in_every_precision(precision: str, mode: str, with_autograd: None) -> None:
    expected = steps(gpt2(), of_words, OFF.replace(precision=precision))
    assert close(steps(gpt2(), of_words, ON.replace(precision=precision, checkpointing=mode)), expected, 2e-2)


@pytest.mark.parametrize(("make", "loss"), MODELS[:2])
def test_they_are_the_blocks_that_torch_compiles_in_a_plain_loop(
    make: Callable[[], nn.Module], loss: Loss, with_autograd: None
) -> None:
    plain, found = make(), list[Tensor]()
    for block in find_blocks(plain):
        block.forward = torch.compile(block.forward, dynamic=True, backend="aot_eager")
    for module in plain.modules():
        if config := getattr(module, "config", None):
            config.use_cache = False
    for size in (4, 6):
        found += step(plain, loss, size)
    assert all(map(torch.equal, steps(make(), loss, ON), found))


def test_other_batch_sizes_are_compiled_once() -> None:
    model = gpt2()
    parts = parts_of(model, ON)
    for size in (4, 6, 9, 4):
        with parts.on():
            step(model, of_words, size)
    assert parts.compiled_s > 0
    [said] = parts.told()
    assert said.startswith("compile=blocks compiled 1 graph of 3 blocks in ")
    assert said.endswith(" s, with 0 recompilations and 0 graph breaks")
    assert not parts.told()
    with parts.on():
        step(model, of_words, 6, "bf16")
    assert "2 graphs of 3 blocks" in (said := parts.told()[0])
    assert "with 1 recompilation and" in said


class Breaking(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x.sin()


def test_graph_breaks_are_told() -> None:
    model = Net(Breaking)
    parts = parts_of(model, ON)
    with parts.on():
        step(model, of_rows, 4)
    assert parts.told()[0].endswith("and 1 graph break")


def test_nothing_is_left_on_the_model_nor_of_what_was_compiled() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict()), [dict(vars(module)) for module in model.modules()]
    parts = parts_of(model, ON)
    with parts.on():
        step(model, of_rows, 4)
        plain = copy.deepcopy(model)
        pickled = io.BytesIO()
        torch.save(model, pickled)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(before[0][name])
    assert [dict(vars(module)) for module in model.modules()] == before[1]
    read = torch.load(io.BytesIO(pickled.getvalue()), weights_only=False)
    for one in (plain, read):  # whose blocks are plain
        assert step(one, of_rows, 4)[0].isfinite()
    [function] = compiling_functions(parts)
    gone = weakref.ref(function)
    del function
    parts.set_compile("off")
    assert parts.compiled is None
    assert gone() is not None  # for settings that were only tried
    parts.settled()
    gc.collect()
    assert gone() is None


def compiling_functions(parts: Recomputing) -> list[Any]:
    """Return the copies of forward that torch compiles."""
    assert parts.compiled
    return [getattr(one, "_torchdynamo_orig_callable") for one in parts.compiled._compiled.values()]  # noqa: B009


def test_what_the_user_compiles_of_the_same_class_is_its_own() -> None:
    seen: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(len(inputs))
        return graph.forward

    mine = Block()
    compiled = torch.compile(mine, backend=backend)
    compiled(torch.ones(4, WIDTH))
    for _ in range(2):
        steps(Net(), of_rows, ON)
        compiled(torch.ones(4, WIDTH))
    assert len(seen) == 1


def refused(model: nn.Module, times: int = 1) -> str:
    with pytest.raises(WorkloadError) as raised:
        steps(model, of_rows, ON, times * (4,))
    return str(raised.value)


def test_blocks_that_cannot_be_compiled_are_refused() -> None:
    assert "compile=blocks needs a model with sub-modules" in refused_at_once(nn.Linear(2, 2))
    net = Net()
    net.blocks[1].compile(backend="eager")
    assert "torch.compile has compiled already, the Block. Use compile=off." in refused_at_once(net)
    assert "torch.compile has compiled already, the Net" in refused_at_once(torch.compile(Net(), backend="eager"))
    net = Net()
    net.blocks[2].forward = net.blocks[0].forward
    assert "takes the place of the Block's forward, and something else has replaced that" in refused(net)
    with torch._dynamo.config.patch(disable=True):
        assert "has no effect: torch.compile compiles nothing of the Block" in refused(Net())


def test_forward_that_calls_no_block_is_refused() -> None:
    class Bypassing(Net):
        def forward(self, x: Tensor) -> Tensor:
            return x * next(self.blocks.parameters())[0].sum()

    assert "forward calls none of the 4 blocks; the first is a Block" in refused(Bypassing())


def refused_at_once(model: Any) -> str:
    with pytest.raises(WorkloadError) as raised:
        parts_of(model, ON)
    return str(raised.value)


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert "compile=blocks needs a C++ compiler, and none is found" in refused_at_once(Net())


def test_selective_checkpointing_and_compiled_blocks_exclude_each_other() -> None:
    with pytest.raises(InvalidInput, match=r"compile=blocks joins them\. Use compile=off"):
        ON.replace(checkpointing="selective").check_together(1)
    ON.replace(checkpointing="selective", activation_budget=1.0).check_together(1)


def trained(trainer: Trainer, settings: Settings, number: int, count: int = 3) -> ChunkReply:
    return trainer.run(Chunk(settings, number, count, ledger_steps=2))


def squares(model: Any, batch: Any) -> Any:
    return model(batch[0]).square().mean()


def a_trainer(kind: Callable[[], nn.Module] = Block, loss: Callable[[Any, Any], Any] = squares) -> Trainer:
    rows = TensorDataset(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)))
    workload = Workload("net", lambda: Net(kind), lambda: rows, loss)
    return Trainer(workload, ShardedStream(*as_dataset(rows), rank=0, size=1), opened(), time.time())


def test_steps_with_and_without_a_ledger_run_the_same_code(alone: Overheard) -> None:
    trainer, plain = a_trainer(), a_trainer()
    reply, expected = trained(trainer, ON, 1, 5), trained(plain, OFF, 1, 5)
    assert reply.failure is None
    [said] = reply.notes
    assert "1 graph of 4 blocks" in said
    assert "0 recompilations and 0 graph breaks" in said
    assert [sample.compile_s > 0 for sample in reply.samples] == [True, False, False, False, False]
    assert [one.loss for one in reply.samples] == pytest.approx([one.loss for one in expected.samples], rel=1e-5)
    assert any(sample.ledger for sample in reply.samples[1:])
    again = trained(trainer, OFF, 2)
    assert not again.notes
    assert not any(sample.compile_s for sample in again.samples)
    assert [one.loss for one in again.samples] == pytest.approx(
        [one.loss for one in trained(plain, OFF, 1).samples], rel=1e-5
    )


def test_a_compilation_that_fails_changes_nothing(alone: Overheard, monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such kernel")

    trainer = a_trainer()
    assert trained(trainer, OFF, 1).failure is None
    before = [param.detach().clone() for param in trainer.live.model.parameters()]
    monkeypatch.setattr(compiling, "BACKEND", backend)
    failure = trained(trainer, ON, 2).failure
    assert failure is not None
    assert (
        "compile=blocks: torch.compile failed: backend='backend' raised: ValueError: no such kernel. Use compile=off."
        in (failure.message)
    )
    assert all(map(torch.equal, trainer.live.model.parameters(), before))
    assert trained(trainer, OFF, 3).failure is None
    assert trainer.live.settings.compile == "off"


def test_what_was_compiled_for_a_question_serves_the_flip(alone: Overheard) -> None:
    trainer = a_trainer()
    trained(trainer, OFF, 1)
    before = {name: tensor.clone() for name, tensor in trainer.live.model.state_dict().items()}
    found = trainer.trials.rehearse(ON)
    after = trainer.live.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert found.steps_s
    assert max(found.steps_s) < trainer.live.recomputing._compiled.seconds  # type: ignore[union-attr]
    trained(trainer, OFF, 1)
    reply = trained(trainer, ON, 2)
    assert not any(sample.compile_s for sample in reply.samples)
    assert "1 graph of 4 blocks" in reply.notes[0]
