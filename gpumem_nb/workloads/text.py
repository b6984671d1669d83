"""English text that ships with Python (its interactive help), character by character, and a small GPT for it."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.data import Dataset

_TRAIN_SHARE = 0.9


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of ``sequence_length`` characters that do not overlap, each with the characters that follow.

    A sample is (inputs, targets), both int64 of shape [sequence_length]; a target is the character after its input.
    The first 90 % of the text are for training, the last 10 % are held out. The text is kept as a numpy array, so
    that the dataset itself takes no (virtual) GPU memory.
    """

    def __init__(self, sequence_length: int, train: bool = True) -> None:
        tokens = _encoded()[1]
        boundary = _boundary(len(tokens))
        self._tokens = tokens[:boundary] if train else tokens[boundary:]
        self._length = sequence_length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self._length
        window = torch.from_numpy(self._tokens[start : start + self._length + 1].astype(np.int64))
        return window[:-1], window[1:]


@cache
def topics_text() -> str:
    """Return the whole text, topics in alphabetical order. It differs a little between versions of Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def held_out_text() -> str:
    """Return the last 10 % of the text, which no training window touches."""
    text = topics_text()
    return text[_boundary(len(text)) :]


def vocabulary_size() -> int:
    """Return how many different characters the whole text has; character ``i`` of the vocabulary is token ``i``."""
    return len(_encoded()[0])


def _boundary(characters: int) -> int:
    return int(characters * _TRAIN_SHARE)


@cache
def _encoded() -> tuple[np.ndarray, np.ndarray]:
    """Return the vocabulary as code points, and the text as indices into it."""
    code_points = np.frombuffer(topics_text().encode("utf-32-le"), dtype=np.uint32)
    vocabulary, tokens = np.unique(code_points, return_inverse=True)
    return vocabulary, tokens.astype(np.uint16)


_POSITION_STD = 0.02  # as GPT-2: positions start as a small change to the characters


class GPT(nn.Module):
    """A decoder-only transformer: tokens [N, L] become logits [N, L, vocabulary], L at most ``sequence_length``.

    The blocks normalise their input, not their output (GPT-2's order), and each takes and returns [N, L, width].
    """

    def __init__(
        self, vocabulary: int, width: int, depth: int, heads: int, sequence_length: int, dropout: float
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(sequence_length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.position, std=_POSITION_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the character after each of ``tokens``."""
        features = self.dropout(self.token(tokens) + self.position[: tokens.shape[1]])
        logits: Tensor = self.head(self.norm(self.blocks(features)))
        return logits


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """``features`` [N, L, width] with what this block adds."""
        features = features + self.dropout(self.attention(self.attention_norm(features)))
        change: Tensor = self.dropout(self.down(gelu(self.up(self.mlp_norm(features)))))
        return features + change


class Attention(nn.Module):
    """Causal self-attention: a character sees itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """Return what each character gathers from itself and those before it, [N, L, width]."""
        query, key, value = self.project(features).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        attended: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended
