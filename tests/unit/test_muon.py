"""``optimizer=muon``: torch's Muon for the matrices of hidden layers, AdamW for all other weights, one optimizer."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gpumem_nb.engine.data.handed import as_dataset
from gpumem_nb.engine.data.stream import ShardedStream
from gpumem_nb.engine.replay.loss_head import find_head
from gpumem_nb.engine.step import optimizers
from gpumem_nb.engine.step.dry_update import AskedUpdate, foresee
from gpumem_nb.engine.step.live_model import LiveModel
from gpumem_nb.engine.step.muon import MuonAndAdamW
from gpumem_nb.engine.step.optimizer_state import Replicas
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.engine.undo.step_undo import UpdateUndo
from gpumem_nb.memory.device import opened
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from gpumem_nb.shared.categories import OPTIMIZER_STATE
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from gpumem_nb.workloads import catalog
from tests.links import Overheard
from tests.unit.test_one_rank import alone as alone  # a fixture

pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on"),
]
MUON = Settings(optimizer="muon")
_WORDS, _LENGTH = 96, 8


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 48, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    certain: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(vocab_size=_WORDS, n_positions=_LENGTH, **sizes, **certain))


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(vocab_size=_WORDS, use_cache=False, **sizes, **heads))


class Tied(nn.Module):
    """Its output layer has the weight of its embedding, and its positions are a bare table."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(_WORDS, 40), nn.Parameter(torch.zeros(_LENGTH, 40))
        self.block = nn.TransformerEncoderLayer(40, 2, 80, dropout=0.0, batch_first=True)
        self.up, self.head = nn.Linear(40, 40, bias=False), nn.Linear(40, _WORDS, bias=False)
        self.head.weight = self.token.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.up(self.block(self.token(input_ids) + self.position)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Convolving(nn.Module):
    """A net whose convolutions have four dimensions, with a hidden layer behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)
        self.hidden, self.gate, self.head = nn.Linear(216, 50), nn.Linear(50, 1), nn.Linear(50, 10)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        pixels = input_ids.float().repeat(1, 8).view(-1, 1, 8, 8)
        features = self.hidden(self.norm(self.first(pixels)).flatten(1)).relu()
        return self.head(features * self.gate(features)).square().mean()


def seeded(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return kind()

    return made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "tied": seeded(Tied),
    "convolving": seeded(Convolving),
}
OTHERS = {
    "gpt2": ["transformer.wte.weight", "transformer.wpe.weight"],
    "llama": ["model.embed_tokens.weight", "lm_head.weight"],
    "tied": ["position", "token.weight"],
    "convolving": ["gate.weight", "head.weight"],
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    said = model(**batch)
    found: Tensor = said if isinstance(said, Tensor) else said.loss
    return found


def rows() -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(0, _WORDS, (32, _LENGTH), generator=numbers)
    return [{"input_ids": one, "labels": one} for one in ids]


def batch(first: int) -> dict[str, Tensor]:
    chosen = rows()[first : first + 4]
    return {name: torch.stack([one[name] for one in chosen]) for name in chosen[0]}


def workload(model: Callable[[], nn.Module]) -> Workload:
    return Workload("net", model, rows, loss)


def live(model: Callable[[], nn.Module] = gpt2) -> LiveModel:
    return LiveModel(workload(model), opened())


def trained(model: LiveModel, steps: int) -> list[float]:
    losses = []
    for number in range(steps):
        found = loss(model.model, batch(4 * number))
        found.backward()
        model.optimizer.step()
        model.step_counted(False)
        model.zero_grad()
        losses.append(found.item())
    return losses


def matrices(net: nn.Module) -> list[Tensor]:
    """The weights of two dimensions that are not named above."""
    (name,) = [name for name, made in MODELS.items() if type(made()) is type(net)]
    return [weight for key, weight in net.named_parameters() if weight.dim() == 2 and key not in OTHERS[name]]


def plainly(make: Callable[[], nn.Module], steps: int, lr: float = 1e-3) -> Any:
    """Losses and weights of an ordinary loop with both optimizers."""
    net = make()
    net.train()
    ours = matrices(net)
    rest = [weight for weight in net.parameters() if not any(weight is one for one in ours)]
    muon = torch.optim.Muon(ours, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=lr, weight_decay=0.01)
    losses = []
    for number in range(steps):
        found = loss(net, batch(4 * number))
        found.backward()
        muon.step()
        adamw.step()
        muon.zero_grad()
        adamw.zero_grad()
        losses.append(found.item())
    return losses, dict(net.named_parameters())


@pytest.mark.parametrize("name", MODELS)
def test_hidden_matrices_are_neither_embeddings_nor_the_output_nor_bare_tables(name: str) -> None:
    net = MODELS[name]()
    found = optimizers.hidden_matrices(net, find_head(net))
    assert list(map(id, found)) == list(map(id, matrices(net)))
    assert found


def test_of_the_ready_made_workloads_the_transformer_has_matrices_and_the_convolutions_have_none() -> None:
    text = catalog.make("text-gpt", width=16, depth=1, heads=2, sequence_length=4).model()
    found = set(map(id, optimizers.hidden_matrices(text, find_head(text))))
    names = [key for key, weight in text.named_parameters() if id(weight) in found]
    assert names
    assert all(key.startswith("blocks.0.") for key in names)
    digits = catalog.make("digits-resnet").model()
    assert not optimizers.hidden_matrices(digits, find_head(digits))


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_both_optimizers_in_a_plain_loop_to_the_bit(name: str) -> None:
    model = live(MODELS[name])
    model.apply(MUON)
    losses, weights = plainly(MODELS[name], 4)
    assert trained(model, 4) == losses
    for key, weight in model.model.named_parameters():
        assert torch.equal(weight, weights[key]), key


def trainer(gpu: VirtualGPU, name: str) -> Trainer:
    stream = ShardedStream(*as_dataset(rows()), rank=0, size=1)
    return Trainer(workload(MODELS[name]), stream, gpu, time.time())


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_after_a_flip_is_the_one_that_was_predicted(gpu: VirtualGPU, alone: Overheard, name: str) -> None:
    gc.collect()
    alone.keeps = False
    one, adamw = trainer(gpu, name), Settings(batch_size=2)
    settings = adamw.replace(optimizer="muon")
    assert one.run(Chunk(adamw, 1, 3)).failure is None
    lying = [weight.clone() for weight in one.live.model.parameters()]
    for number, now in enumerate((settings, settings.replace(optimizer_impl="foreach", clip_norm=1.0)), start=2):
        found = one.trials.forecast(now, [2], [2], 0)
        assert found.failure is None
        if number == 2:
            assert all(map(torch.equal, lying, one.live.model.parameters()))
            assert one.live.settings.optimizer == "adamw"
        reply = one.run(Chunk(now, number, 3, ledger_steps=1))
        assert reply.failure is None
        assert reply.samples[-1].live_peak_bytes == pytest.approx(found.of[0].live_peak_bytes, abs=64)
        held = sum(value.nbytes for kept in one.live.optimizer.state.values() for value in kept.values())
        assert found.of[0].at_peak.get(OPTIMIZER_STATE, 0) == held
    ours = sum(weight.nbytes for weight in matrices(one.live.model))
    whole = sum(weight.nbytes for weight in one.live.model.parameters())
    assert held == pytest.approx(2 * whole - ours, abs=4 * len(list(one.live.model.parameters())))


def test_an_update_that_runs_out_of_memory_leaves_nothing_behind(gpu: VirtualGPU, alone: Overheard) -> None:
    gc.collect()
    alone.keeps = False
    data = TensorDataset(torch.ones(32, 8))

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 1500), nn.Linear(1500, 1500), nn.Linear(1500, 8))

    mean = Workload("wide", wide, lambda: data, lambda net, rows: net(rows[0]).square().mean())
    one = Trainer(mean, ShardedStream(*as_dataset(data), rank=0, size=1), gpu, time.time())
    settings = Settings(batch_size=2, optimizer="muon")
    needs = one.trials.forecast(settings, [2], [2], 0).of[0]
    assert needs.phase == "update"
    before = [weight.clone() for weight in one.live.model.parameters()]
    gpu.empty_cache()
    gpu.set_limit(needs.reserved_peak_bytes - 4 * 2**20)
    try:
        failure = one.run(Chunk(settings, 1, 2)).failure
    finally:
        gpu.set_limit(None)
    assert failure is not None
    assert failure.phase == "update"
    assert not one.live.optimizer.state
    assert all(map(torch.equal, before, one.live.model.parameters()))


def test_where_products_of_16_bits_are_foreseen_no_update_is_taken() -> None:
    net = gpt2()
    device = torch.device("meta")  # on which, as on a GPU, products take nothing inside
    moved = net.to(device)
    optimizer = MuonAndAdamW([{"params": list(moved.parameters()), "matrices": ()}])
    optimizers.tell_matrices(optimizer, optimizers.hidden_matrices(moved, find_head(moved)))
    for weight in moved.parameters():
        weight.grad = torch.zeros_like(weight)
    found = foresee(AskedUpdate(optimizer), device, lambda tensor: 0)
    assert sum(nbytes for _, nbytes, _ in found.owned) >= sum(one.nbytes for one in moved.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_update_needs_no_more_room_than_it_is_given(gpu: VirtualGPU, dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((400, 400), (400, 9), (400,))]
    optimizer = MuonAndAdamW([{"params": weights, "matrices": (0,)}])
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        log = gpu.event_log()
        log.begin([])
        optimizer.step()
        most = int(log.end().bytes.cumsum().max())
    assert most < optimizers.update_bytes(optimizer, sum(weight.nbytes for weight in weights))


def test_flips_begin_anew_and_come_back_to_the_bit_before_a_step() -> None:
    model = live()
    trained(model, 2)
    kept = {weight: {name: one.clone() for name, one in of.items()} for weight, of in model.optimizer.state.items()}
    order = list(map(id, model.parameters))
    model.apply(MUON)
    assert not model.optimizer.state
    assert not model.relisted()
    model.apply(Settings())
    for weight, of in model.optimizer.state.items():
        assert all(torch.equal(one, kept[weight][name]) for name, one in of.items())
    model.apply(MUON)
    trained(model, 1)
    names = {frozenset(of) for of in model.optimizer.state.values()}
    assert names == {frozenset({"momentum_buffer"}), frozenset({"step", "exp_avg", "exp_avg_sq"})}
    model.apply(Settings())
    assert not model.optimizer.state
    assert list(map(id, model.parameters)) == order, "a file names what each number belongs to by its place"


def test_its_state_is_stored_put_aside_and_undone_like_any_other() -> None:
    one, other = live(), live()
    for model in (one, other):
        model.apply(MUON)
    trained(one, 2)
    whole = Replicas(one.optimizer).gather()
    assert whole
    with torch.no_grad():
        for weight, source in zip(other.model.parameters(), one.model.parameters(), strict=True):
            weight.copy_(source)
    Replicas(other.optimizer).scatter(whole)()
    parked = Replicas(other.optimizer).keep()
    assert not other.optimizer.state
    parked.restore()

    weights = [weight.clone() for weight in other.model.parameters()]
    undo = UpdateUndo(other.parameters, other.optimizer)
    trained(other, 2)
    undo.undo()
    assert all(map(torch.equal, weights, other.model.parameters()))
    assert trained(other, 3) == trained(one, 3)


def test_the_rate_and_how_the_update_is_computed_reach_both() -> None:
    for name in ("foreach", "fused", "loop"):
        model = live()
        model.apply(MUON.replace(learning_rate=1e-2, optimizer_impl=name))
        losses, _ = plainly(gpt2, 3, lr=1e-2)
        assert trained(model, 3) == pytest.approx(losses, rel=1e-5)
    model.apply(MUON.replace(learning_rate=0.0, optimizer_impl="default"))
    before = [weight.clone() for weight in model.model.parameters()]
    trained(model, 1)
    assert all(map(torch.equal, before, model.model.parameters()))


def test_a_layer_that_a_cell_adds_or_takes_away_moves_no_weight_to_the_other_optimizer() -> None:
    model = live(seeded(Convolving))
    model.apply(MUON)
    group, extra = model.optimizer.param_groups[0], nn.Linear(50, 50)
    del model.model.head
    model.model.extra, model.model.head = extra, nn.Linear(50, 10)
    group["params"][:] = [
        *(one for one in group["params"] if one is not model.model.get_parameter("first.bias")),
        *extra.parameters(),
        *model.model.head.parameters(),  # the last layer again
    ]
    assert model.relisted()
    model.relist()
    wanted = {id(model.model.get_parameter("hidden.weight")), id(extra.weight)}
    assert {id(group["params"][place]) for place in group["matrices"]} == wanted

    trained(model, 1)
    model.apply(Settings())
    model.model.head = nn.Sequential(another := nn.Linear(50, 50), nn.Linear(50, 10))
    model.optimizer.param_groups[0]["params"] += model.model.head.parameters()
    model.relist()
    model.apply(MUON)  # the one from before
    assert {id(group["params"][place]) for place in group["matrices"]} == wanted | {id(another.weight)}
