"""The ready-made workloads: what they accept, what they are made of, and how they are scored."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import cloudpickle
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.workload import Workload
from gpumem_nb.workloads.catalog import CATALOG, make
from gpumem_nb.workloads.digits import TEST_SAMPLES, Digits
from gpumem_nb.workloads.evaluate import accuracy, score, unigram_entropy
from gpumem_nb.workloads.text import Text, held_out_text, topics_text

NAMES = sorted(CATALOG)
SMALL = {
    "digits-resnet": {"width": 8, "depth": 1, "resolution": 8},
    "digits-separable": {"width": 8, "depth": 1, "resolution": 8},
    "text-gpt": {"width": 16, "depth": 2, "heads": 2, "sequence_length": 16},
}


def first_batch(workload: Workload, size: int) -> Any:
    data = workload.data()
    return default_collate([data[i] for i in range(size)])


def parameters(name: str, **options: Any) -> int:
    return sum(p.numel() for p in make(name, **options).model().parameters())


def saved_bytes(name: str, **options: Any) -> int:
    """Bytes that autograd keeps for the backward pass of four samples, parameters not counted."""
    workload = make(name, **options)
    model = workload.model()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        workload.loss(model, first_batch(workload, 4))
    return sum(size for pointer, size in kept.items() if pointer not in own)


# how they are scored; that they learn is a test on real ranks


def test_an_untrained_model_scores_as_chance_does() -> None:
    torch.manual_seed(0)
    gpt = make("text-gpt", **SMALL["text-gpt"])
    chance = math.log(len(set(topics_text())))
    scores = score("text-gpt", gpt.model(), **SMALL["text-gpt"])
    assert scores["nats_per_character"] == pytest.approx(chance, rel=0.1)
    assert scores["bits_per_character"] == pytest.approx(scores["nats_per_character"] / math.log(2))
    resnet = make("digits-resnet", **SMALL["digits-resnet"])
    assert score("digits-resnet", resnet.model(), **SMALL["digits-resnet"])["accuracy"] < 0.5


def test_scoring_leaves_each_part_of_the_model_in_the_mode_it_had() -> None:
    model: Any = make("digits-resnet", **SMALL["digits-resnet"]).model()
    model.stem.eval()  # a frozen part
    modes = [module.training for module in model.modules()]
    accuracy(model, Digits(8, train=False))
    assert [module.training for module in model.modules()] == modes


def test_unigram_entropy_of_known_texts() -> None:
    assert unigram_entropy("aaaa") == 0
    assert unigram_entropy("abcd" * 5) == pytest.approx(math.log(4))


# the data


def test_digits_are_split_the_same_way_each_time_and_by_class() -> None:
    train_part, test_part = Digits(8), Digits(8, train=False)
    assert (len(train_part), len(test_part)) == (1500, TEST_SAMPLES)
    assert all(torch.equal(Digits(8)[i][0], train_part[i][0]) for i in (0, 700, 1499))
    images = {train_part[i][0].numpy().tobytes() for i in range(1500)}
    assert not any(test_part[i][0].numpy().tobytes() in images for i in range(TEST_SAMPLES))
    labels = torch.tensor([test_part[i][1] for i in range(TEST_SAMPLES)])
    assert labels.bincount().min() >= 28


def test_digits_are_those_of_scikit_learn() -> None:
    pixels, labels = load_digits(return_X_y=True)
    expected = Counter((tuple(row / 8 - 1), label) for row, label in zip(pixels, labels, strict=True))
    parts = (Digits(8), Digits(8, train=False))
    samples = [part[i] for part in parts for i in range(len(part))]
    assert Counter((tuple(image.flatten().tolist()), label) for image, label in samples) == expected


def test_digits_are_enlarged_as_torch_enlarges() -> None:
    small, large = Digits(8)[3][0], Digits(20)[3][0]
    assert large.shape == (1, 20, 20)
    assert large.dtype == torch.float32
    expected = nn.functional.interpolate(small[None], size=20, mode="bilinear")[0]
    assert torch.allclose(large, expected, atol=1e-5)
    assert small.min() >= -1
    assert small.max() <= 1


def test_text_windows_cover_the_training_part_once_and_targets_are_the_next_characters() -> None:
    data = Text(50)
    inputs = torch.cat([data[i][0] for i in range(len(data))])
    targets = torch.cat([data[i][1] for i in range(len(data))])
    assert torch.equal(inputs[1:], targets[:-1])
    text = topics_text()
    boundary = len(text) - len(held_out_text())
    vocabulary = sorted(set(text))
    decoded = "".join(vocabulary[token] for token in inputs.tolist())
    assert decoded == text[: len(decoded)]
    assert boundary - 51 <= len(decoded) < boundary
    with pytest.raises(IndexError):
        data[len(data)]


def test_held_out_text_is_a_tenth_and_starts_where_training_ends() -> None:
    assert len(held_out_text()) / len(topics_text()) == pytest.approx(0.1, abs=0.001)
    vocabulary = sorted(set(topics_text()))
    first = Text(20, train=False)[0][0]
    assert "".join(vocabulary[token] for token in first.tolist()) == held_out_text()[:20]


# the models


@pytest.mark.parametrize("name", NAMES)
def test_at_the_defaults_activations_outweigh_the_optimizer_state_and_all_else(name: str) -> None:
    adam_bytes = 16 * parameters(name)
    assert saved_bytes(name) * 32 / 4 > 1.5 * adam_bytes


@pytest.mark.parametrize("name", NAMES)
def test_width_and_depth_enlarge_the_model(name: str) -> None:
    small = SMALL[name]
    assert parameters(name, **{**small, "width": 2 * small["width"]}) > 1.5 * parameters(name, **small)
    assert parameters(name, **{**small, "depth": small["depth"] + 1}) > parameters(name, **small)


@pytest.mark.parametrize(
    ("name", "option"),
    [("digits-resnet", "resolution"), ("digits-separable", "resolution"), ("text-gpt", "sequence_length")],
)
def test_the_sample_size_enlarges_activations_but_hardly_the_model(name: str, option: str) -> None:
    small = SMALL[name]
    large = {**small, option: 2 * small[option]}
    assert saved_bytes(name, **large) > 1.8 * saved_bytes(name, **small)
    assert parameters(name, **large) < 1.1 * parameters(name, **small)


def test_the_separable_network_trades_parameters_for_activations() -> None:
    assert parameters("digits-separable") < parameters("digits-resnet") / 3
    assert saved_bytes("digits-separable") > saved_bytes("digits-resnet")


def test_heads_change_how_the_gpt_attends() -> None:
    outputs = []
    for heads in (1, 4):
        torch.manual_seed(0)
        workload = make("text-gpt", **{**SMALL["text-gpt"], "heads": heads})
        outputs.append(workload.model()(first_batch(workload, 2)[0]))
    assert not torch.equal(*outputs)


def test_the_gpt_does_not_see_what_follows() -> None:
    workload = make("text-gpt", **SMALL["text-gpt"])
    model, tokens = workload.model(), first_batch(workload, 1)[0]
    changed = tokens.clone()
    changed[0, 8] = (tokens[0, 8] + 1) % 50
    assert torch.allclose(model(tokens)[0, :8], model(changed)[0, :8], atol=1e-6)
    assert not torch.allclose(model(tokens)[0, 8:], model(changed)[0, 8:], atol=1e-6)


def test_dropout_acts_in_training_only() -> None:
    workload = make("text-gpt", dropout="0.5", **SMALL["text-gpt"])
    model, batch = workload.model(), first_batch(workload, 2)
    assert not torch.equal(workload.loss(model, batch), workload.loss(model, batch))
    model.eval()
    assert torch.equal(workload.loss(model, batch), workload.loss(model, batch))


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_does_not_depend_on_the_split_into_micro_batches(name: str) -> None:
    workload = make(name, **SMALL[name])
    model, (inputs, labels) = workload.model(), first_batch(workload, 8)
    halves = [workload.loss(model, (inputs[part], labels[part])) for part in (slice(0, 4), slice(4, 8))]
    assert torch.allclose(workload.loss(model, (inputs, labels)), torch.stack(halves).mean(), atol=1e-6)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_checkpointed_blocks_give_the_same_gradients_under_autocast(name: str, precision: torch.dtype) -> None:
    workload = make(name, **SMALL[name])
    model, batch = workload.model(), first_batch(workload, 4)
    assert workload.blocks is not None

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
            loss = workload.loss(model, batch)
        assert loss.dtype == torch.float32
        assert loss.ndim == 0
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    for block in workload.blocks(model):
        block.forward = lambda *args, forward=block.forward: checkpoint(forward, *args, use_reentrant=False)
    checkpointed = gradients()
    assert len(plain) == len(list(model.parameters()))
    assert all(torch.isfinite(grad).all() for grad in plain)
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_defaults_have_blocks_enough_to_checkpoint(name: str) -> None:
    workload = make(name)
    assert workload.blocks is not None
    assert len(workload.blocks(workload.model())) >= 6


# the catalog


def test_text_as_a_magic_passes_it_is_accepted() -> None:
    assert CATALOG["text-gpt"].values({"width": "128", "dropout": "0.1"}) == {
        "width": 128,
        "depth": 6,
        "heads": 4,
        "sequence_length": 64,
        "dropout": 0.1,
    }


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit-resnet", {}, "did you mean 'digits-resnet'? Allowed: digits-resnet, digits-separable, text-gpt"),
        ("mnist", {}, "allowed: digits-resnet, digits-separable, text-gpt"),
        ("digits-resnet", {"widht": 3}, "did you mean 'width'? Allowed: width, depth, resolution"),
        ("text-gpt", {"resolution": 8}, "text-gpt has no option 'resolution'"),
        ("digits-resnet", {"width": 0}, "width=0 cannot be used: it must be a whole number from 1 to 4096"),
        ("digits-resnet", {"width": "wide"}, "width='wide' cannot be used"),
        ("digits-resnet", {"depth": 1.5}, "depth=1.5 cannot be used"),
        ("digits-resnet", {"depth": True}, "depth=True cannot be used"),
        ("digits-resnet", {"depth": None}, "depth=None cannot be used"),
        ("digits-resnet", {"resolution": 10**9}, "a whole number from 8 to 1024"),
        ("digits-resnet", {"resolution": float("inf")}, "resolution=inf cannot be used"),
        ("text-gpt", {"dropout": "nan"}, "a number from 0.0 to 0.9"),
        ("text-gpt", {"width": 30}, "make width a multiple of heads, such as 32"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_can(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as failure:
        make(name, **options)
    assert message in str(failure.value)


def test_scoring_checks_names_and_options_too() -> None:
    model = make("digits-resnet", **SMALL["digits-resnet"]).model()
    with pytest.raises(InvalidInput, match="did you mean 'digits-resnet'"):
        score("digits-resne", model)
    with pytest.raises(InvalidInput, match="has no option"):
        score("digits-resnet", model, heads=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_survives_the_way_to_a_rank(name: str) -> None:
    workload = cloudpickle.loads(cloudpickle.dumps(make(name, **SMALL[name])))
    model = workload.model()
    workload.loss(model, first_batch(workload, 4)).backward()
    assert workload.name == name
    assert len(workload.blocks(model)) == 2


def test_the_catalog_imports_no_torch_and_neither_does_making_a_workload() -> None:
    code = (
        "import sys; from gpumem_nb.workloads.catalog import CATALOG, make\n"
        "for name, entry in CATALOG.items():\n"
        "    assert entry.help and all(option.help for option in entry.options.values())\n"
        "    make(name)\n"
        "heavy = {'torch', 'numpy', 'sklearn'} & set(sys.modules); assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
