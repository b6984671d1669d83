"""The ledger of one step: to whom each allocation belonged, from when to when."""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..sample import Ledger, Span, Timeline
from .categories import (
    ACTIVATIONS,
    CASTS,
    CATEGORIES,
    COMMUNICATION,
    GRADIENTS,
    INPUTS,
    INSIDE_OPERATORS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
)
from .device import Device
from .events import Events
from .tensors import tensors_in

MOST_MODULES = 40  # in a ledger; the rest is summed up
MOST_POINTS = 600  # in a timeline
REST = "…"
OUTSIDE_BACKWARD = -1  # torch's number of the backward pass under way
_CODE = {category: code for code, category in enumerate(CATEGORIES)}
# Whom a storage belongs to when several claim it: the first one.
_CLAIMS = (PARAMETERS, OPTIMIZER_STATE, GRADIENTS, COMMUNICATION, INPUTS, CASTS, ACTIVATIONS)
_LASTING = (PARAMETERS, OPTIMIZER_STATE, GRADIENTS, COMMUNICATION, INPUTS)
_NOBODY = len(_CLAIMS), ""
_CAST = _CLAIMS.index(CASTS)
_Array = NDArray[np.int64]
_Pack = Callable[[Tensor], Any]
_Unpack = Callable[[Any], Tensor]


class Recorder:
    """Records the events of one step from construction to :meth:`end`, and who claims which allocation.

    Attributes:
        current: the one that records now, for code that cannot be handed it.
    """

    current: Recorder | None = None

    def __init__(self, device: Device, *models: nn.Module) -> None:
        self._names = {id(module): name for model in models for name, module in model.named_modules()}
        params = [named for model in models for named in model.named_parameters()]
        self._homes = [name.rpartition(".")[0] for name, _ in params]  # the modules that parameters lie in
        self._home_of = {id(param): home for (_, param), home in zip(params, self._homes, strict=True)}
        self._virtual = device.kind == "virtual"
        self._claims: dict[int, tuple[int, str]] = {}  # allocation → index in _CLAIMS, module
        self._sizes: dict[int, int] = {}
        self._running: list[str] = []
        self._marks: list[tuple[int, str, str]] = []
        self._log = device.event_log()
        self._began_ns = time.perf_counter_ns()
        self._base = self._log.begin([param for _, param in params])
        self.mark("data")

    def claim(self, category: str, tensors: Iterable[Tensor], module: str = "") -> None:
        """Say what the storages of these tensors are."""
        rank = _CLAIMS.index(category)
        for tensor in tensors:
            number = self._log.allocation(tensor)
            if number and rank < self._claims.get(number, _NOBODY)[0]:
                self._claims[number] = rank, module or self._here
                self._sizes[number] = tensor.untyped_storage().nbytes()

    def claim_model(self, params: Iterable[Tensor], state: dict[Any, dict[str, Any]]) -> None:
        """Claim what lives from step to step: weights, their gradients and the optimizer's state of them."""
        for param in params:
            module = self._home_of.get(id(param), "")
            self.claim(PARAMETERS, [param], module)
            if param.grad is not None:
                self.claim(GRADIENTS, [param.grad], module)
            values = state.get(param, {}).values()
            self.claim(OPTIMIZER_STATE, (value for value in values if isinstance(value, Tensor)), module)

    def saved(self, tensor: Tensor) -> None:
        """A tensor is kept for backward."""
        self.claim(ACTIVATIONS, [tensor])

    def mark(self, phase: str, module: str = "") -> None:
        """From now on this part of the step runs, in this module."""
        if not self._marks or self._marks[-1][1:] != (phase, module):
            self._marks.append((time.perf_counter_ns(), phase, module))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, see every operator's tensors, what is saved for backward, and which module runs."""
        with ExitStack() as stack:
            stack.callback(self._stop)
            Recorder.current = self
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(saved_tensors_hooks(*self._telling(Tensor.detach, lambda tensor: tensor)))
            stack.enter_context(self._inner_hooks_told())
            stack.enter_context(self._log.watching())
            yield

    def end(self) -> Record:
        """Stop recording and work out where the bytes were."""
        return Record(self)

    def _stop(self) -> None:
        Recorder.current = None
        self._log.end()  # a step that could not be finished has not done it

    @property
    def _here(self) -> str:
        return self._running[-1] if self._running else ""

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names.get(id(module), type(module).__name__))
        self.mark(self._marks[-1][1], self._here)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()
        self.mark(self._marks[-1][1], self._here)

    def _telling(self, pack: _Pack, unpack: _Unpack) -> tuple[_Pack, _Unpack]:
        """Saved-tensor hooks that do what these two do, and tell this recorder.

        What ``pack`` returns must not be the tensor itself: a result that a node saves refers to the node, and together
        they would outlive a step that is given up.
        """

        def told_pack(tensor: Tensor) -> tuple[Any, str]:
            try:
                packed = pack(tensor)
            except Exception:  # torch.utils.checkpoint ends a recomputation so, having kept the last tensor
                self.saved(tensor)
                raise
            self.claim(ACTIVATIONS, tensors_in(packed))
            return packed, self._here

        def told_unpack(saved: tuple[Any, str]) -> Tensor:
            packed, module = saved
            tensor = unpack(packed)
            self.mark("backward", module)
            return tensor

        return told_pack, told_unpack

    @contextmanager
    def _inner_hooks_told(self) -> Iterator[None]:
        """Autograd asks the innermost hooks only: those of any checkpointing or offloading inside tell as well."""
        enter = saved_tensors_hooks.__enter__

        def told_enter(hooks: saved_tensors_hooks) -> None:
            if torch._C._current_graph_task_id() != OUTSIDE_BACKWARD:
                self.mark("recomputation")
            enter(saved_tensors_hooks(*self._telling(hooks.pack_hook, hooks.unpack_hook)))

        saved_tensors_hooks.__enter__ = told_enter  # type: ignore[method-assign]
        try:
            yield
        finally:
            saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


class Record:
    """What one recorder found out: live bytes by category after each event, and who owned what at the peak."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._events = events = recorder._log.end()
        self._ended_ns = time.perf_counter_ns()
        for number, param in events.casts.items():
            if recorder._claims.get(number, _NOBODY)[0] > _CAST:
                recorder._claims[number] = _CAST, recorder._homes[param]
        for number, module in self._kept_for_backward():
            recorder._claims.setdefault(number, (_CLAIMS.index(ACTIVATIONS), module))
        self._numbers, self._which = np.unique(events.allocation, return_inverse=True)
        self._categories = self._categorise(events)
        # One row a category, one column before the first event and after each.
        self._live = np.zeros((len(CATEGORIES), len(events.bytes) + 1), dtype=np.int64)
        self._live[self._categories[self._which], np.arange(1, len(events.bytes) + 1)] = events.bytes
        self._live[:, 0] = self._base()
        np.cumsum(self._live, axis=1, out=self._live)
        self._peak = int(self._live.sum(axis=0).argmax())

    def ledger(self, live_peak: int) -> Ledger:
        """Where the bytes were at the peak, and in the end.

        Args:
            live_peak: the allocator's own peak of live bytes; what tensors do not explain of it is inside operators.
        """
        exact = self._recorder._log.exact
        at_peak = self._by_category(self._live[:, self._peak])
        missing = 0 if exact else max(0, live_peak - sum(at_peak.values()))
        if missing:
            at_peak[INSIDE_OPERATORS] = at_peak.get(INSIDE_OPERATORS, 0) + missing
        _, phase, module = self._at(self._time_ns(self._peak))
        return Ledger(
            peak=sum(at_peak.values()),
            phase=phase,
            module=module,
            at_peak=at_peak,
            at_rest=self._by_category(self._live[:, -1]),
            modules=self._modules(),
            virtual=self._recorder._virtual,
            exact=exact,
        )

    def timeline(self, rank: int, step: int, ledger: Ledger) -> Timeline:
        """The whole step; the bytes are thinned out so that every peak between two points stays."""
        total, began_ns = self._live.sum(axis=0), self._recorder._began_ns
        shown = np.unique([0, *_highest(total, MOST_POINTS), self._peak, len(total) - 1])
        times = [(self._time_ns(index) - began_ns) / 1e6 for index in shown]
        live = {name: tuple(self._live[code, shown].tolist()) for name, code in _CODE.items()}
        return Timeline(
            rank=rank,
            step=step,
            step_s=(self._ended_ns - began_ns) / 1e9,
            time_ms=tuple(times),
            live={name: values for name, values in live.items() if any(values)},
            spans=tuple(self._spans()),
            ledger=ledger,
        )

    def _kept_for_backward(self) -> Iterator[tuple[int, str]]:
        """What forward made and backward freed, and in which module: kept, whether autograd's hooks saw it or not.

        The inputs of ``torch.utils.checkpoint`` are such, and what an autograd function keeps as its own attribute.
        """
        events, marks = self._events, self._recorder._marks
        mark = np.searchsorted([time_ns for time_ns, _, _ in marks], events.time_ns, side="right") - 1
        forward = np.array([phase == "forward" for _, phase, _ in marks])[mark]
        backward = np.array([phase in ("backward", "recomputation") for _, phase, _ in marks])[mark]
        freed = set(events.allocation[backward & (events.bytes < 0)].tolist())
        for index in np.flatnonzero(forward & (events.bytes > 0) & ~events.foreign):
            if (number := int(events.allocation[index])) in freed:
                yield number, marks[mark[index]][2]

    def _categorise(self, events: Events) -> _Array:
        """The code of the category of each allocation that came or went."""
        recorder = self._recorder
        born = np.zeros(len(self._numbers), dtype=np.bool_)
        born[self._which[events.bytes > 0]] = True
        gone = np.zeros(len(self._numbers), dtype=np.bool_)
        gone[self._which[events.bytes < 0]] = True
        foreign = np.zeros(len(self._numbers), dtype=np.bool_)
        foreign[self._which[events.foreign]] = True
        call = np.zeros((2, len(self._numbers)), dtype=np.int64)  # in which it was asked for, and released
        call[(events.bytes < 0).astype(np.int64), self._which] = events.call
        inside = (call[0] == call[1]) & (call[0] > 0)

        def category(index: int) -> str:
            number = int(self._numbers[index])
            claim = _CLAIMS[recorder._claims[number][0]] if number in recorder._claims else ""
            if claim and (born[index] or claim in _LASTING):
                return claim
            if foreign[index]:
                return COMMUNICATION
            if not (born[index] and gone[index]):  # it was there before, or stays
                return OTHER
            return INSIDE_OPERATORS if inside[index] else TEMPORARIES

        return np.array([_CODE[category(index)] for index in range(len(self._numbers))], dtype=np.int64)

    def _base(self) -> _Array:
        """Live bytes by category before the first event."""
        recorder, base = self._recorder, np.zeros(len(CATEGORIES), dtype=np.int64)
        born = set(self._events.allocation[self._events.bytes > 0].tolist())
        for number, (claim, _) in recorder._claims.items():
            if number not in born and _CLAIMS[claim] in _LASTING:
                base[_CODE[_CLAIMS[claim]]] += recorder._sizes[number]
        base[_CODE[COMMUNICATION]] += recorder._base.foreign
        base[_CODE[OTHER]] = recorder._base.live - base.sum()
        return base

    def _modules(self) -> tuple[tuple[str, str, int], ...]:
        """Who owned the bytes at the peak, largest first."""
        recorder, events, found = self._recorder, self._events, defaultdict[tuple[str, str], int](int)
        change = np.bincount(self._which[: self._peak], events.bytes[: self._peak], minlength=len(self._numbers))
        born = set(events.allocation[events.bytes > 0].tolist())
        held = {int(number): int(bytes_) for number, bytes_ in zip(self._numbers, change, strict=True) if bytes_}
        for number, (claim, _) in recorder._claims.items():
            if number not in born and _CLAIMS[claim] in _LASTING:
                held[number] = held.get(number, 0) + recorder._sizes[number]
        for number, (claim, module) in recorder._claims.items():
            if held.get(number, 0) > 0:
                found[module, _CLAIMS[claim]] += held[number]
        rows = sorted(((*key, size) for key, size in found.items()), key=lambda row: -row[2])
        rest = defaultdict[str, int](int)
        for _, category, size in rows[MOST_MODULES:]:
            rest[category] += size
        return (*rows[:MOST_MODULES], *((REST, category, size) for category, size in rest.items()))

    def _by_category(self, values: _Array) -> dict[str, int]:
        return {category: int(value) for category, value in zip(CATEGORIES, values, strict=True) if value}

    def _time_ns(self, index: int) -> int:
        return int(self._events.time_ns[index - 1]) if index else self._recorder._began_ns

    def _at(self, time_ns: int) -> tuple[int, str, str]:
        marks = self._recorder._marks
        return marks[max(0, bisect.bisect_right(marks, time_ns, key=lambda mark: mark[0]) - 1)]

    def _spans(self) -> Iterator[Span]:
        marks, began_ns = self._recorder._marks, self._recorder._began_ns
        ends = [mark[0] for mark in marks[1:]] + [self._ended_ns]
        for (start_ns, phase, module), end_ns in zip(marks, ends, strict=True):
            yield Span((start_ns - began_ns) / 1e6, (end_ns - began_ns) / 1e6, phase, module)


def _highest(values: _Array, most: int) -> list[int]:
    """The index of the highest value in each of at most so many stretches of equal length."""
    stretches = np.array_split(np.arange(len(values)), min(most, len(values)))
    return [int(stretch[values[stretch].argmax()]) for stretch in stretches]
