"""``loss_head=chunked``: losses and gradients are those of whole logits, for every way in which people write a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from gpumem_nb.engine.replay.recomputing import Recomputing
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload

WORDS, WIDTH = 101, 24
PER_WORD = torch.linspace(0.5, 2, WORDS)
Loss = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """Words [N, L] become logits [N, L, WORDS]."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)

    def forward(self, words: Tensor) -> Any:
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def recomputing(model: nn.Module, head: Callable[[Any], nn.Module] | None = None) -> Recomputing:
    def none(*_: Any) -> Any:
        raise AssertionError("nothing is made anew")

    return Recomputing(model, Workload("plain", none, none, none, head=head))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    words, targets = torch.randint(0, WORDS, (2, 5, 13)).unbind()
    targets[0, :4] = -100
    return words, targets


def taken(model: nn.Module, loss: Loss, how: str, dtype: torch.dtype | None = None, mode: str = "none") -> list[Tensor]:
    """Return the loss and all gradients; the model is a copy."""
    model = copy.deepcopy(model)
    parts = recomputing(model)
    parts.set_loss_head(how)
    parts.set_checkpointing(Settings(checkpointing=mode))
    words, targets = batch()
    with parts.on():
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            found = loss(model(words), targets)
        weights = torch.linspace(1, 2, found.numel()).reshape(found.shape)  # of each row where it gives several
        (found * weights).sum().backward()
        parts.finished()
    return [found.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


def alike(one: list[Tensor], other: list[Tensor], rtol: float = 1e-5) -> None:
    assert len(one) == len(other)
    rounding = 1e-7 * max(float(theirs.abs().max()) for theirs in other)  # some gradients are nothing else
    for mine, theirs in zip(one, other, strict=True):
        assert mine.dtype is theirs.dtype
        assert (mine - theirs).abs().max() <= rtol * theirs.abs().max() + rounding


def of_next(logits: Any, targets: Tensor) -> Tensor:
    """As Hugging Face's causal models had it for years."""
    shifted = logits[..., :-1, :].contiguous().float().view(-1, logits.size(-1))
    return cross_entropy(shifted, targets[..., 1:].reshape(-1), reduction="sum") / 7


def with_a_bias_that_moves(logits: Any, targets: Tensor) -> Tensor:
    """As models balance classes by a buffer, which forward changes after it was used."""
    bias = PER_WORD.clone()
    moved = logits + bias
    bias.mul_(-3)
    return cross_entropy(moved.flatten(0, 1), targets.flatten())


LOSSES: dict[str, Loss] = {
    "flat": lambda logits, targets: cross_entropy(logits.view(-1, WORDS), targets.view(-1)),
    "last unknown": lambda logits, targets: cross_entropy(logits.reshape(5 * 13, -1), targets.view(-1)),
    "transposed": lambda logits, targets: cross_entropy(logits.transpose(1, 2), targets),
    "permuted": lambda logits, targets: nn.CrossEntropyLoss(label_smoothing=0.1)(logits.permute(0, 2, 1), targets),
    "of the next": of_next,
    "each": lambda logits, targets: cross_entropy(
        logits.flatten(0, 1), targets.flatten(), PER_WORD, reduction="none", label_smoothing=0.2
    ),
    "each of two dimensions": lambda logits, targets: cross_entropy(
        logits.mT if isinstance(logits, Tensor) else logits.transpose(-1, -2), targets, reduction="none"
    ),
    "weighted": lambda logits, targets: cross_entropy(
        input=torch.flatten(logits, 0, 1), target=targets.flatten(), weight=PER_WORD
    ),
    "capped": lambda logits, targets: cross_entropy(30 * torch.tanh(logits / 30.0).flatten(0, 1), targets.flatten()),
    "with a bias": lambda logits, targets: cross_entropy((logits + PER_WORD[None]).flatten(0, 1), targets.flatten()),
    "some": lambda logits, targets: cross_entropy(logits[targets != -100], targets[targets != -100]),
    "the last": lambda logits, targets: cross_entropy(logits[:, -1], targets[:, -1]),
    "one by one": lambda logits, targets: (
        torch.stack([cross_entropy(*one) for one in zip(logits, targets, strict=True)]).sum() / len(logits)
    ),
    "of what has no logits": lambda logits, targets: cross_entropy(
        (logits.logits if hasattr(logits, "logits") else logits).flatten(0, 1), targets.flatten()
    ),
    "bytes": lambda logits, targets: cross_entropy(
        logits.flatten(0, 1), targets.clamp(min=0).byte().flatten(), PER_WORD
    ),
    "with a bias that moves": with_a_bias_that_moves,
    "another ignored": lambda logits, targets: cross_entropy(
        logits.flatten(0, 1), targets.clamp(min=0).flatten(), ignore_index=0
    ),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_whole_logits(name: str, bias: bool) -> None:
    model = Model(bias)
    alike(taken(model, LOSSES[name], "chunked"), taken(model, LOSSES[name], "full"))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
@pytest.mark.parametrize("name", ["flat", "of the next", "capped", "weighted"])
def test_under_autocast_they_differ_by_its_rounding(name: str, dtype: torch.dtype, rtol: float) -> None:
    model = Model()
    alike(taken(model, LOSSES[name], "chunked", dtype), taken(model, LOSSES[name], "full", dtype), rtol)


def test_a_model_in_16_or_64_bit_stays_in_it() -> None:
    for dtype, rtol in ((torch.float64, 1e-12), (torch.bfloat16, 2**-7)):
        model = Model().to(dtype)
        alike(taken(model, LOSSES["flat"], "chunked"), taken(model, LOSSES["flat"], "full"), rtol)


def test_checkpointed_blocks_and_a_head_among_them() -> None:
    model = Model()
    for mode in ("blocks", "sqrt"):
        alike(taken(model, LOSSES["flat"], "chunked", mode=mode), taken(model, LOSSES["flat"], "full"))
    loose = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))  # whose head is a block
    alike(taken(loose, LOSSES["flat"], "chunked", mode="blocks"), taken(loose, LOSSES["flat"], "full"))


def test_frozen_weights_get_no_gradient_and_tied_ones_get_both() -> None:
    frozen, tied = Model(), Model(bias=False)
    frozen.head.requires_grad_(False)
    tied.head.weight = tied.words.weight
    for model in (frozen, tied):
        alike(taken(model, LOSSES["flat"], "chunked"), taken(model, LOSSES["flat"], "full"))


_SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
_DECODER: dict[str, Any] = {**_SIZES, "intermediate_size": 32, "num_key_value_heads": 1, "pad_token_id": 0}
_STARTS: dict[str, Any] = {"decoder_start_token_id": 0}
_BART: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}


def hugging_face(name: str) -> Any:
    """Return a small model, from its configuration."""
    configs: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: transformers.GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=16),
        "llama": lambda: transformers.LlamaConfig(**_DECODER),
        "gemma2": lambda: transformers.Gemma2Config(**_DECODER, head_dim=8, final_logit_softcapping=30.0),
        "cohere": lambda: transformers.CohereConfig(**_DECODER, logit_scale=0.25),
        "bert": lambda: transformers.BertConfig(**_SIZES, intermediate_size=32),
        "roberta": lambda: transformers.RobertaConfig(**_SIZES, intermediate_size=32),
        "t5": lambda: transformers.T5Config(
            vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=1, num_heads=2, **_STARTS
        ),
        "bart": lambda: transformers.BartConfig(
            vocab_size=WORDS, d_model=WIDTH, encoder_attention_heads=2, decoder_attention_heads=2, **_BART
        ),
    }
    kinds: list[Any] = [
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForSeq2SeqLM,
    ]
    kind = kinds[1 if name in ("bert", "roberta") else 2 if name in ("t5", "bart") else 0]
    return kind.from_config(configs[name]()).train()


@pytest.mark.parametrize("items", [None, 40])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "cohere", "bert", "roberta", "t5", "bart"])
def test_hugging_face_models_with_their_own_loss(name: str, items: int | None) -> None:
    torch.manual_seed(0)
    model = hugging_face(name)
    torch.manual_seed(1)
    words = torch.randint(3, WORDS, (2, 9))
    labels = words.masked_fill(torch.rand(words.shape) < 0.3, -100)
    given = {"num_items_in_batch": items} if items and model.config.model_type != "bert" else {}

    def run(how: str) -> list[Tensor]:
        used = copy.deepcopy(model)
        parts = recomputing(used)
        parts.set_loss_head(how)
        torch.manual_seed(2)
        with parts.on():
            loss = used(input_ids=words, labels=labels, **given).loss
            loss.backward()
            parts.finished()
        return [loss.detach(), *(param.grad for param in used.parameters() if param.grad is not None)]

    alike(run("chunked"), run("full"), 2e-5)


def without_gradient(logits: Any, targets: Tensor) -> Tensor:
    with torch.no_grad():
        rows = logits.flatten(0, 1)
    return cross_entropy(rows, targets.flatten())


REFUSED: dict[str, Loss] = {
    "values without a gradient": without_gradient,
    "cross_entropy with these arguments": lambda logits, targets: cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="average"
    ),
    "reshape": lambda logits, targets: cross_entropy(logits.view(torch.int32).float().flatten(0, 1), targets.flatten()),
    "log_softmax": lambda logits, targets: functional.nll_loss(
        functional.log_softmax(logits, -1).flatten(0, 1), targets.flatten()
    ),
    "argmax": lambda logits, targets: (
        cross_entropy(logits.flatten(0, 1), targets.flatten()) + (logits.argmax(-1) == targets).float().mean()
    ),
    "cross_entropy of probabilities": lambda logits, targets: cross_entropy(
        logits.flatten(0, 1), functional.one_hot(targets.clamp(min=0), WORDS).float().flatten(0, 1)
    ),
    "index": lambda logits, targets: cross_entropy(logits[..., :50].flatten(0, 1), targets.flatten() % 50),
    "arithmetic": lambda logits, targets: cross_entropy((logits - 1).flatten(0, 1), targets.flatten()),
    "mul": lambda logits, targets: cross_entropy((logits * torch.ones(5, 13, 1)).flatten(0, 1), targets.flatten()),
    "square": lambda logits, targets: logits.square().mean(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_needs_logits_is_refused_and_leaves_a_plain_model(name: str) -> None:
    model = Model()
    parts = recomputing(model)
    parts.set_loss_head("chunked")
    words, targets = batch()
    with pytest.raises(WorkloadError, match=rf"asks for their {name}.*Use loss_head=full"), parts.on():
        REFUSED[name](model(words), targets)
    assert isinstance(model(words), Tensor)
    assert "forward" not in vars(model.head)


def test_what_has_no_such_head_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    for head, kind in ((nn.Conv1d(4, 4, 1), "model without one"), (Scaled(4, 8), f"Scaled of {__name__}")):
        with pytest.raises(WorkloadError, match=f"this is a {kind}. Use loss_head=full, or name"):
            recomputing(nn.Sequential(head)).set_loss_head("chunked")
    unused = recomputing(model := Model(), lambda one: nn.Linear(4, 8))
    unused.set_loss_head("chunked")
    with unused.on():
        model(batch()[0]).sum().backward()
    with pytest.raises(WorkloadError, match="no effect: forward does not call"):
        unused.finished()
    module: Any = torch.compile(Model())
    compiled = recomputing(nn.Sequential(module))
    with pytest.raises(WorkloadError, match="compiled as a whole"):
        compiled.set_loss_head("chunked")


def test_workloads_that_are_made_by_position_mean_what_they_meant() -> None:
    parts: list[Any] = [
        lambda *_, part=part: part for part in ("model", "data", "loss", "optimizer", "blocks", "scheduler")
    ]
    workload: Any = Workload
    made = workload("mine", *parts)
    assert (made.blocks(None), made.scheduler(None), made.head) == ("blocks", "scheduler", None)


def test_a_named_head_is_taken_and_small_logits_are_not_worth_it() -> None:
    model = nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 4))
    assert recomputing(model).wide_head is None
    named = recomputing(model, lambda one: one[0])
    assert named.wide_head is model[0]
    named.set_loss_head("chunked")
    assert named.applied["loss_head"] == "chunked"
    named.set_loss_head("full")
    assert named.applied["loss_head"] == "full"
