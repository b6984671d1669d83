"""Sees in a step what attention and the loss hold: a score for every pair of tokens, and logits.

Attention that a model computes by itself is a product of matrices, a softmax over it, and another product. torch's
``scaled_dot_product_attention`` never comes to ``aten::_softmax``: its kernels need none, and its plain implementation
has ``aten::_safe_softmax``. A cross-entropy, however it is called, comes to ``aten::_log_softmax``.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from torch import Tensor

from ..internals.torch_dispatch_internals import TorchDispatchMode
from ..internals.torch_internals import in_backward

_PRODUCTS = ("aten::bmm", "aten::baddbmm")
_SCORES, _LOGITS = "aten::_softmax", "aten::_log_softmax"
_FEWEST = 16  # queries and keys: with fewer there is nothing to gain


class SeenShapes(TorchDispatchMode):
    """Inside, operators of this thread's forwards are looked at; they compute as they would.

    Attributes:
        scores: of each softmax of attention, its result in bytes.
        logits: the shape of the largest tensor that a loss took the logarithm of the softmax of; empty without any.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scores: list[int] = []
        self.logits: tuple[int, ...] = ()
        self._products: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute what is asked for, and look at it."""
        result = func(*args, **(kwargs or {}))
        with suppress(Exception):  # a look may not fail a step
            self._see(str(func.name()).partition(".")[0], args, result)
        return result

    def _see(self, name: str, args: Any, result: Any) -> None:
        if name in _PRODUCTS:
            rows, columns = result.shape[-2:]
            self._products |= {(rows, columns), (columns, rows)}  # it may be transposed before the softmax
        elif name in (_SCORES, _LOGITS) and isinstance(result, Tensor) and not in_backward():
            if name == _LOGITS:
                self.logits = max(self.logits, tuple(args[0].shape), key=lambda shape: math.prod(shape) if shape else 0)
            elif self._of_pairs(result, args[1]):
                self.scores.append(result.nbytes)

    def _of_pairs(self, scores: Tensor, dim: int) -> bool:
        """Return whether a softmax is that of attention: over the last dimension of a product of matrices."""
        pairs = tuple(scores.shape[-2:])
        last = dim in (-1, scores.dim() - 1)
        return last and scores.dim() >= 3 and min(pairs) >= _FEWEST and pairs in self._products
