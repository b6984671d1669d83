"""A small GPT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

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
