"""English text that ships with Python: the topics of its interactive help, character by character."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
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
