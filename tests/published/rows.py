"""The models of the published rows (README.md), as workloads."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpumem_nb import Workload

FOLDER = Path(__file__).parent
TABLES = ("transformers", "cnns")
GROWTH, LAYERS_A_BLOCK = 32, 4  # of dense networks
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "prelu": nn.PReLU,
    "leaky_relu": nn.LeakyReLU,
    "mish": nn.Mish,
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "swish": nn.SiLU,
}
Row = dict[str, str]


def rows(table: str, folder: Path = FOLDER) -> list[Row]:
    """All rows of a table, values as text."""
    with (folder / f"{table}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def workload(row: Row) -> Workload:
    """What a row trains."""
    model = Transformer if "vocab_size" in row else Convolutional
    return Workload(row["row_id"], partial(model, row), partial(samples, row), mean_loss, torch.optim.Adam)


def samples(row: Row) -> list[tuple[Tensor, int]]:
    """Samples of the right shape."""
    if "vocab_size" in row:
        return [(torch.zeros(int(row["seq_length"]), dtype=torch.long), 0)] * 4
    size = int(row["input_size"])
    return [(torch.zeros(int(row["input_channels"]), size, size), 0)] * 4


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of an (inputs, labels) batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Transformer(nn.Module):
    """An embedding with learned positions, encoder layers as torch has them, and a linear head on the mean."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        width, length = int(row["embedding_size"]), int(row["seq_length"])
        self.embedding = nn.Embedding(int(row["vocab_size"]), width)
        self.position = nn.Parameter(torch.zeros(1, length, width))
        heads, inner, dropout = int(row["num_heads"]), int(row["ff_hidden_size"]), float(row["dropout_rate"])
        layer = nn.TransformerEncoderLayer(width, heads, inner, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, int(row["num_layers"]))
        self.head = nn.Linear(width, int(row["num_classes"]))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(tokens) + self.position).mean(1))
        return logits


class Convolutional(nn.Module):
    """What ``conv_out_channels_at_size`` lists, then the mean of each channel, a linear head and a softmax."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        listed = [
            (int(each.split("@")[0]), int(each.split("@")[1])) for each in row["conv_out_channels_at_size"].split()
        ]
        build = {"residual": _residual, "dense": _dense}.get(row["arch"], _chain)
        parts, channels = build(row, listed)
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, int(row["num_classes"])), nn.Softmax(dim=1))
        self.parts = nn.Sequential(*parts, *head)

    def forward(self, images: Tensor) -> Tensor:
        shares: Tensor = self.parts(images)
        return shares


class Residual(nn.Module):
    """Two blocks added to their input, which is projected where the shape changes."""

    def __init__(self, row: Row, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_block(row, inputs, outputs, stride), _block(row, outputs, outputs))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), *_norm(row, outputs))

    def forward(self, images: Tensor) -> Tensor:
        total: Tensor = self.blocks(images) + self.shortcut(images)
        return total


class Dense(nn.Module):
    """Blocks that each see what all before them gave."""

    def __init__(self, row: Row, inputs: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_block(row, inputs + GROWTH * index, GROWTH) for index in range(layers))

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.layers:
            images = torch.cat([images, layer(images)], 1)
        return images


def _norm(row: Row, channels: int) -> Iterator[nn.Module]:
    if row["use_batchnorm"] == "True":
        yield nn.BatchNorm2d(channels)


def _block(row: Row, inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    dropout = [nn.Dropout(float(row["dropout_rate"]))] if row["use_dropout"] == "True" else []
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
    return nn.Sequential(convolution, *_norm(row, outputs), _ACTIVATIONS[row["activation"]](), *dropout)


def _chain(row: Row, listed: list[tuple[int, int]]) -> tuple[list[nn.Module], int]:
    channels, parts = int(row["input_channels"]), list[nn.Module]()
    for outputs, _ in listed:
        parts.append(_block(row, channels, outputs))
        channels = outputs
    return parts, channels


def _residual(row: Row, listed: list[tuple[int, int]]) -> tuple[list[nn.Module], int]:
    """Pairs of blocks; where the shape changes the shortcut is listed before the pair."""
    channels, size, at = int(row["input_channels"]), int(row["input_size"]), 0
    parts = list[nn.Module]()
    while at < len(listed):
        outputs, listed_size = listed[at]
        stride = 1 if listed_size == size else 2
        parts.append(Residual(row, channels, outputs, stride))
        at += 3 if stride != 1 or outputs != channels else 2
        channels, size = outputs, listed_size
    return parts, channels


def _dense(row: Row, listed: list[tuple[int, int]]) -> tuple[list[nn.Module], int]:
    """Blocks of up to four layers, with a transition to half the channels and half the size where one is listed."""
    channels, at, parts = int(row["input_channels"]), 0, list[nn.Module]()
    while at < len(listed):
        size = listed[at][1]
        layers = 0
        while layers < LAYERS_A_BLOCK and at + layers < len(listed) and listed[at + layers] == (GROWTH, size):
            layers += 1
        parts.append(Dense(row, channels, layers))
        channels, at = channels + GROWTH * layers, at + layers
        if at + 1 < len(listed) and listed[at + 1][1] < size:
            outputs = listed[at][0]
            parts += [nn.Conv2d(channels, outputs, 1), *_norm(row, outputs), nn.ReLU(), nn.AvgPool2d(2)]
            channels, at = outputs, at + 1
    return parts, channels
