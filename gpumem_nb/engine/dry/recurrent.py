"""Recurrent layers as cuDNN computes them: a whole sequence in one kernel, which keeps what its backward needs.

ATen/native/cudnn/RNN.cpp, ``_cudnn_rnn``: for backward it keeps the input, the output and a *reserve*, whose size cuDNN
alone knows and does not document. Under autocast all weights are cast into one buffer (``_cudnn_rnn_cast_reflatten``),
which is kept too. Gradients of all weights lie in one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_WORK = 3
"""Numbers of cuDNN's workspace for each number that a layer puts out in one direction.

With the reserve below, which are the gates, the state, and what dropout leaves of inner layers, it was fitted on two
jobs of an H200 (an LSTM in fp32 and bf16; docs/prediction-cold.md). Layers of other kinds were not measured.
"""
_WEIGHTS_A_DIRECTION = {False: 2, True: 4}  # by whether there are biases


def rules() -> dict[str, Callable[..., Any]]:
    """Return what replaces the operators that take a whole sequence, by their names."""
    return {f"{kind}.input": _rule(kind) for kind in _GATES}


def _rule(kind: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.aten, kind).input

    def layer(
        input: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states, directions = list(hx) if kind == "lstm" else [hx], num_layers * (1 + bidirectional)
        if len(params) != directions * _WEIGHTS_A_DIRECTION[has_biases]:  # projections, which are not foreseen
            with torch.backends.mkldnn.flags(enabled=False):
                return operator.decompose(
                    input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
                )
        reserved = directions * (_GATES[kind] + 1) + (num_layers - 1) * (1 + bidirectional) * (train and dropout > 0)
        is_cast = torch.is_autocast_enabled("cpu") and input.dtype is not torch.float64
        dtype = torch.get_autocast_dtype("cpu") if is_cast else input.dtype
        given = [value.to(dtype) for value in (input, *states)]
        sizes = reserved, _WORK * directions
        return tuple(_Sequence.apply(sizes, batch_first, bidirectional, *given, *params))  # type: ignore[no-untyped-call]

    return layer


class _Sequence(torch.autograd.Function):
    """The tensors of forward and backward, without their numbers."""

    @staticmethod
    def forward(
        ctx: Any, sizes: tuple[int, int], batch_first: bool, bidirectional: bool, input: Tensor, *others: Tensor
    ) -> tuple[Tensor, ...]:
        states = [other for other in others if other.dim() == 3]
        weights = others[len(states) :]
        hidden = states[0].shape[-1]
        turned = input.transpose(0, 1).contiguous() if batch_first else input
        length, rows, width = *turned.shape[:2], hidden * (1 + bidirectional)
        output = input.new_empty_strided((length, rows, width), (rows * width, width, 1))
        if batch_first:  # no view, so that it may be written into
            output = input.new_empty_strided((rows, length, width), (width, rows * width, 1))
        numbers = sum(weight.numel() for weight in weights)
        buffer = None if weights[0].dtype is input.dtype else input.new_empty(numbers)  # as flat as they are
        reserved, ctx.work = (size * length * rows * hidden for size in sizes)
        input.new_empty(ctx.work)  # and given back at once
        ctx.save_for_backward(input, output, input.new_empty(reserved), buffer, *others)
        ctx.batch_first = batch_first
        ended = [torch.empty_like(state) for state in states]
        return (output, *ended)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, _, _, _, *others = ctx.saved_tensors
        states, weights = others[: len(gradients) - 1], others[len(gradients) - 1 :]
        sent = gradients[0].transpose(0, 1) if ctx.batch_first else gradients[0]
        sent = sent.contiguous()
        of_input = torch.empty_like(input) if ctx.needs_input_grad[3] else None
        input.new_empty(ctx.work)
        flat = input.new_zeros(sum(weight.numel() for weight in weights))
        parts = flat.split([weight.numel() for weight in weights])
        of_weights = [part.view(weight.shape).to(weight.dtype) for part, weight in zip(parts, weights, strict=True)]
        of_states = [
            torch.empty_like(state) if needed else None
            for state, needed in zip(states, ctx.needs_input_grad[4:], strict=False)
        ]
        return None, None, None, of_input, *of_states, *of_weights
