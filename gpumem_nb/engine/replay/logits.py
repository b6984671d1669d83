"""Logits that are never whole: the cross-entropy of a last linear layer, a part of the rows at a time.

Logits take a number for each row (a token) and each class (a word of the vocabulary), and so do their logarithms and
their gradients. A row's loss needs that row alone, so each part is computed, its losses are kept, and backward computes
the part again (Chen et al. 2016, arXiv 1604.06174, for one layer). Rows stay what they are; the weight's gradient is
the sum of the parts', so it differs by rounding.

Exported scripts hold this file as it is, so it knows torch alone.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PARTS = 16
"""Equal ones, whatever the size of the micro-batch: all operators are the same then, and grow with it."""


class WholeLogitsNeeded(RuntimeError):
    """Something asks for logits in a way that rows by themselves cannot answer."""


class Logits:
    """Stands for the result of a linear layer, of which it holds the input; what changes single rows changes that.

    Attributes:
        shape: of the logits, classes last, or second where they were transposed for the loss.
        dtype, device: of the logits.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast: torch.dtype | None,
        dtype: torch.dtype,
        then: tuple[Callable[[Tensor], Tensor], ...] = (),
        classes_second: bool = False,
    ) -> None:
        """Keep what the layer was called with; no gradient goes through what is made under ``no_grad``.

        Args:
            hidden, weight, bias: of the layer.
            cast: what autocast made of these three where the layer was called; ``None`` without it.
            dtype: see above.
            then: what is done to the logits before the loss, one function of a part after the other.
            classes_second: see above.
        """
        self._given, self._version = hidden, _version(hidden)
        self._weight, self._bias, self._cast = weight, bias, cast
        self._then, self._classes_second = then, classes_second
        self._with_gradient = torch.is_grad_enabled()
        self.dtype, self.device = dtype, hidden.device
        rows, classes = hidden.shape[:-1], weight.shape[0]
        self.shape = torch.Size((rows[0], classes, *rows[1:]) if classes_second else (*rows, classes))
        self.ndim = len(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a function of torch that is given logits first, if rows by themselves can answer it."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        logits, rest = (args[0], args[1:]) if args else (kwargs.pop("input", None), ())
        others = [one for one in (*rest, *kwargs.values()) if isinstance(one, Logits)]
        if isinstance(logits, Logits) and not others and name in _FUNCTIONS:
            return getattr(logits, name)(*rest, **kwargs)
        raise WholeLogitsNeeded(name)

    @property
    def _hidden(self) -> Tensor:
        if torch.is_grad_enabled() and not self._with_gradient:
            raise WholeLogitsNeeded("values without a gradient, as they are under no_grad")
        if _version(self._given) != self._version:
            raise WholeLogitsNeeded("values from before the input of the layer was changed in place")
        return self._given

    def _refuse(self, *args: Any) -> Any:
        raise WholeLogitsNeeded("arithmetic")

    __sub__ = __rsub__ = __rtruediv__ = __neg__ = __pow__ = __rpow__ = __matmul__ = __abs__ = _refuse
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __setitem__ = _refuse  # other names may stand for the same logits
    __lt__ = __gt__ = __le__ = __ge__ = __eq__ = __ne__ = __bool__ = _refuse
    __hash__ = object.__hash__

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        whole = hasattr(Tensor, name) and not name.startswith("__")
        raise WholeLogitsNeeded(name) if whole else AttributeError(name)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one number of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return how many dimensions they have."""
        return self.ndim

    def numel(self) -> int:
        """Return how many numbers they would be."""
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        """Return ``True``, as a tensor of logits does."""
        return True

    def contiguous(self) -> "Logits":
        """Return them as they are: each part is made when it is needed."""
        return self

    def float(self) -> "Logits":
        """Return them in fp32."""
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> "Logits":
        """Return them in another type; they are on their device already."""
        asked = [*args, *kwargs.values()]
        types = [one for one in asked if isinstance(one, torch.dtype)]
        places = [one for one in asked if isinstance(one, str | torch.device)]
        if len(types) + len(places) < len(asked) or any(torch.device(one).type != self.device.type for one in places):
            raise WholeLogitsNeeded("to")
        return self._after(lambda part: part.to(types[0]), types[0]) if types else self

    def tanh(self) -> "Logits":
        """Return the hyperbolic tangent of each, as models have it that cap their logits."""
        return self._after(torch.tanh)

    def mul(self, other: Any) -> "Logits":
        """Return them multiplied by a number, or by one for each class."""
        other, dtype = self._for_rows("mul", other)
        return self._after(lambda part: part * other, dtype)

    def div(self, other: Any) -> "Logits":
        """Return them divided by a number, or by one for each class."""
        other, dtype = self._for_rows("div", other)
        return self._after(lambda part: part / other, dtype)

    def add(self, other: Any) -> "Logits":
        """Return them with a number added, or one for each class."""
        other, dtype = self._for_rows("add", other)
        return self._after(lambda part: part + other, dtype)

    __mul__ = __rmul__ = mul
    __truediv__ = div
    __add__ = __radd__ = add

    def reshape(self, *shape: Any) -> "Logits":
        """Return the rows in another shape, each with all of its classes."""
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
        rows, classes = shape[:-1], self._weight.shape[0]
        if self._classes_second or not rows or shape[-1] not in (-1, classes):
            raise WholeLogitsNeeded("reshape")
        if shape[-1] == -1 and (-1 in rows or math.prod(rows) != math.prod(self.shape[:-1])):
            raise WholeLogitsNeeded("reshape")
        return self._rows(self._hidden.reshape(*rows, self._hidden.shape[-1]))

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "Logits":
        """Return the rows with some of their dimensions as one."""
        if self._classes_second or end_dim % self.ndim == self.ndim - 1:
            raise WholeLogitsNeeded("flatten")
        return self._rows(self._hidden.flatten(start_dim, end_dim))

    def transpose(self, dim0: int, dim1: int) -> "Logits":
        """Return them with two dimensions exchanged; classes may become the second, where a loss looks for them."""
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.permute(*order)

    def permute(self, *dims: Any) -> "Logits":
        """Return them with their dimensions in another order; classes may become the second."""
        order = [dim % self.ndim for dim in (dims[0] if len(dims) == 1 else dims)]
        if self._classes_second:
            raise WholeLogitsNeeded("permute")
        if order[-1] == self.ndim - 1:
            return self._rows(self._hidden.permute(*order))
        if len(order) < 3 or order[1] != self.ndim - 1:  # which is where a loss looks for classes
            raise WholeLogitsNeeded("permute")
        rows = self._hidden.permute(order[0], *order[2:], self.ndim - 1)
        return Logits(rows, self._weight, self._bias, self._cast, self.dtype, self._then, classes_second=True)

    def __getitem__(self, index: Any) -> "Logits":
        """Return some of the rows, with all of their classes."""
        parts = index if isinstance(index, tuple) else (index,)
        taken = sum(one.dim() if getattr(one, "dtype", None) is torch.bool else 1 for one in parts if one is not None)
        if any(one is Ellipsis for one in parts):
            whole = isinstance(parts[-1], slice) and parts[-1] == slice(None)
        else:
            whole = taken < self.ndim or (isinstance(parts[-1], slice) and parts[-1] == slice(None))
        if self._classes_second or not whole:
            raise WholeLogitsNeeded("index")
        return self._rows(self._hidden[index])

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: Any = 0.0,
    ) -> Any:
        """Return what ``torch.nn.functional.cross_entropy`` returns of the logits; the same arguments."""
        if target.is_floating_point():
            raise WholeLogitsNeeded("cross_entropy of probabilities")
        classes_last = self.ndim > 2 and not self._classes_second
        per_row = self.shape[:1] + self.shape[2:]
        other_ways = size_average is not None or reduce is not None or reduction not in ("none", "mean", "sum")
        if other_ways or classes_last or target.shape != per_row:
            raise WholeLogitsNeeded("cross_entropy with these arguments")
        hidden, target = self._hidden.reshape(-1, self._hidden.shape[-1]), target.reshape(-1)
        todo = _Rows(self._cast, self._then, ignore_index, label_smoothing, hidden.device.type)
        given = hidden, self._weight, self._bias, target, weight
        losses: Tensor = _Losses.apply(*given, todo)  # type: ignore[no-untyped-call]
        if reduction == "none":
            return losses.reshape(per_row)
        total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
        if reduction == "mean":
            counts = target != ignore_index
            of_each = 1 if weight is None else weight[target.where(counts, 0).long()]
            total = total / (counts * of_each).sum()
        return total.to(losses.dtype)

    def _rows(self, hidden: Tensor) -> "Logits":
        return Logits(hidden, self._weight, self._bias, self._cast, self.dtype, self._then)

    def _after(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "Logits":
        then = (*self._then, function)
        kept = self._hidden, self._weight, self._bias, self._cast
        return Logits(*kept, dtype or self.dtype, then, self._classes_second)

    def _for_rows(self, name: str, other: Any) -> tuple[Any, torch.dtype]:
        """Return what parts of the rows may be added to or multiplied by, a number or one for each class, and as what.

        A tensor is copied: it may be changed in place before backward needs it again.
        """
        if isinstance(other, int | float):
            return other, self.dtype
        one = isinstance(other, Tensor) and other.numel() == 1
        for_each = isinstance(other, Tensor) and not self._classes_second and other.shape[-1:] == self.shape[-1:]
        if not one and not (for_each and other.numel() == self.shape[-1]):
            raise WholeLogitsNeeded(name)
        if other.requires_grad or other.dim() > self.ndim:
            raise WholeLogitsNeeded(name)
        dtype = torch.promote_types(self.dtype, other.dtype) if other.dim() else self.dtype
        return (other.flatten() if other.dim() > 1 else other).clone(), dtype


_FUNCTIONS = ("cross_entropy", "reshape", "flatten", "transpose", "permute", "tanh", "mul", "div", "add")


class _Rows:
    """What is done to a part of the rows: the linear layer, what comes after it, the loss as autocast has that now."""

    def __init__(
        self,
        cast: torch.dtype | None,
        then: tuple[Callable[[Tensor], Tensor], ...],
        ignore_index: int,
        label_smoothing: float,
        device_type: str,
    ) -> None:
        self._cast, self._then, self._device_type = cast, then, device_type
        self._loss: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        self._enabled = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)

    def cast(self, *tensors: Tensor | None) -> list[Any]:
        """Return tensors as the linear layer takes them; autocast would cast its weight anew for each part."""
        return [one if one is None or self._cast is None else one.to(self._cast) for one in tensors]

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of rows; all three were cast."""
        with torch.autocast(self._device_type, enabled=False):
            return functional.linear(rows, weight, bias)

    def losses(self, logits: Tensor, target: Tensor, of_classes: Tensor | None) -> Tensor:
        """Return the loss of each row."""
        with torch.autocast(self._device_type, dtype=self._dtype, enabled=self._enabled):
            for function in self._then:
                logits = function(logits)
            return functional.cross_entropy(logits, target, of_classes, reduction="none", **self._loss)


class _Losses(torch.autograd.Function):
    """The loss of each row: of ``hidden`` [rows, features] and ``target`` [rows], by ``weight`` [classes, features]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        of_classes: Tensor | None,
        todo: _Rows,
    ) -> Tensor:
        """Keep the loss of each row, and of what made it the input alone."""
        ctx.save_for_backward(hidden, weight, bias, target, of_classes)
        ctx.todo = todo
        layer = todo.cast(weight, bias)
        return torch.cat(
            [
                todo.losses(todo.linear(*todo.cast(rows), *layer), some, of_classes)
                for rows, some in _parts(hidden, target)
            ]
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Make each part of the logits again, and go on from its gradient."""
        if torch.is_grad_enabled():  # create_graph=True: what comes out here would count as constant
            raise WholeLogitsNeeded("gradient in a form that has a gradient itself")
        hidden, weight, bias, target, of_classes = ctx.saved_tensors
        todo, (of_hidden, of_weight, of_bias, *_) = ctx.todo, ctx.needs_input_grad
        with torch.autocast(hidden.device.type, enabled=False):
            layer = todo.cast(weight, bias)
            for_hidden = torch.empty_like(hidden) if of_hidden else None
            for_weight = _sum_for(weight) if of_weight else None
            for_bias = _sum_for(bias) if of_bias else None
            to = (gradient, hidden if for_hidden is None else for_hidden)
            for part, some, given, place in _parts(hidden, target, *to):
                (rows,) = todo.cast(part)
                logits = todo.linear(rows, *layer).requires_grad_()
                with torch.enable_grad():
                    losses = todo.losses(logits, some, of_classes)
                (given,) = torch.autograd.grad(losses, logits, given)
                del logits, losses
                if for_hidden is not None:
                    place.copy_(given @ layer[0])
                if for_weight is not None:
                    _add_product(for_weight, given.T, rows)
                if for_bias is not None:
                    for_bias += given.sum(0)
        of_weights = [None if one is None else one.to(weight.dtype) for one in (for_weight, for_bias)]
        return for_hidden, *of_weights, None, None, None


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(one.tensor_split(min(PARTS, max(1, len(one)))) for one in tensors), strict=True)


def _sum_for(weight: Tensor) -> Tensor:
    """Return where the parts of a gradient are added up: in 16 bits each would be rounded to them."""
    return torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype is left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no other name for it


def logits_of(head: Any, input: Tensor) -> Logits:
    """Return what stands for a linear layer's result; takes the place of its ``forward``."""
    kind = input.device.type
    weight = head.weight  # once: a parametrization computes it
    casts = torch.is_autocast_enabled(kind) and torch.float64 not in (input.dtype, weight.dtype)
    cast = torch.get_autocast_dtype(kind) if casts else None
    return Logits(input, weight, head.bias, cast, cast or weight.dtype)
