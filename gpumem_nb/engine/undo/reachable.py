"""The places where Python keeps what a forward pass can change: a walk from modules and functions."""

from __future__ import annotations

import dis
import functools
import inspect
import random
import sys
import sysconfig
from collections import UserDict, UserList, deque
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from ...internals.torch_internals import (
    MODULES_OWN,
    buffers_by_name,
    children_by_name,
    hooks_of,
    made_anew,
    weights_by_name,
)
from .changing import SMALL_BYTES

CONTAINERS = (dict, list, set, deque)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class _Missing:
    """Stands in a slot that holds nothing."""


_MISSING = _Missing()
_VALUES = (bool, int, float, complex, str, bytes, tuple, frozenset, range, slice, type(None), Tensor, nn.Parameter)
_THINGS = (_Missing, type, ModuleType, BuiltinFunctionType, torch.Size, torch.dtype, torch.device, torch.layout)
PLAIN = frozenset({*_VALUES, *_THINGS})
"""Types of values that may be bound to a name without more being looked for: they are bound anew, not changed."""
_SIMPLE = PLAIN - {tuple}

_OTHERS_CARE = (Optimizer, LRScheduler, Dataset, DataLoader, random.SystemRandom)
_DEPTH = 4  # from a hook to its object, to a dict in it, to an object in that, to a list in that
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
_CLOSED = frozenset({"torch", "numpy", "horovod", "IPython", "ipykernel", "gpumem_nb"}) | sys.stdlib_module_names


class Reachable:
    """The objects found from ``roots``: modules with all that is below them, functions, and any other objects.

    Attributes:
        places: a mapping and a name in it, for each value that may be bound anew.
        wholes: mappings of which every name counts, with the names that they have.
        buffers: the dicts in which modules keep their buffers.
        weights: those in which they keep their parameters.
        children: those in which modules keep each other.
        hooks: those in which modules keep their hooks.
        containers: those that are reached otherwise than through a place, such as defaults of functions.
        generators: of random numbers, outside the global ones.
        arrays: NumPy's, of those that are small.
        followed: by the index of its place, a value in which more was found.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.places: list[tuple[Any, str]] = []
        self.wholes: list[tuple[dict[str, Any], frozenset[str]]] = []
        self.buffers: list[dict[str, Tensor | None]] = []
        self.weights: list[dict[str, Tensor | None]] = []
        self.children: list[dict[str, nn.Module | None]] = []
        self.hooks: list[dict[int, Any]] = []
        self.containers: list[Any] = []
        self.generators: list[Any] = []
        self.arrays: list[Any] = []
        self.followed: list[tuple[int, Any]] = []
        self._seen: dict[Any, Any] = {}  # with the things themselves: an id says something only while they live
        for root in roots:
            self._class(root) if isinstance(root, type) else self._follow(root, _DEPTH)

    def _follow(self, value: Any, depth: int) -> bool:
        """Look into one value; whether it is one in which there may be something."""
        if type(value) in _SIMPLE or id(value) in self._seen or depth == 0 or isinstance(value, _OTHERS_CARE):
            return False
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._module(value, depth)
        elif isinstance(value, CONTAINERS):
            self._elements(value, depth)
        elif isinstance(value, tuple):
            self._elements(value, depth + 1)  # which costs no step on the way
            return False
        elif isinstance(value, GENERATORS):
            self.generators.append(value)
        elif isinstance(value, np.ndarray):
            self.arrays += [value] if value.nbytes <= SMALL_BYTES else []
            return False
        elif isinstance(value, FunctionType):
            self._function(value, depth)
        elif isinstance(value, MethodType):
            self._follow(value.__func__, depth)
            self._follow(value.__self__, depth)
        elif isinstance(value, functools.partial):
            self._elements([value.func, *value.args, *value.keywords.values()], depth)
        elif _is_open(type(value)):
            self._object(value, depth)
        else:
            return False
        return True

    def _object(self, thing: Any, depth: int) -> None:
        self._class(type(thing))
        if isinstance(names := getattr(thing, "__dict__", None), dict):
            self._whole(names, names, depth)
        for name in _slots(type(thing)):
            self._place(_Attributes(thing), name, depth)

    def _module(self, top: nn.Module, depth: int) -> None:
        for module in top.modules():
            self._seen[id(module)] = module
            names = vars(module)
            self.buffers.append(buffers_by_name(module))
            self.weights.append(weights_by_name(module))
            self.children.append(children_by_name(module))
            own_hooks = hooks_of(module)
            self.hooks.extend(own_hooks)
            self._class(type(module))
            self._whole(names, names.keys() - MODULES_OWN - made_anew(module), depth)
            for hooks in own_hooks:
                self._elements(hooks, depth)

    def _whole(self, names: dict[str, Any], looked_after: Iterable[str], depth: int) -> None:
        """All names of a mapping."""
        self.wholes.append((names, frozenset(names)))
        for name in looked_after:
            self._place(names, name, depth)

    def _place(self, mapping: Any, name: str, depth: int) -> None:
        value = mapping[name]
        index = len(self.places)
        self.places.append((mapping, name))
        if self._follow(value, depth - 1) and not isinstance(value, CONTAINERS):
            self.followed.append((index, value))

    def _elements(self, container: Any, depth: int) -> None:
        elements = list(container.values() if isinstance(container, Mapping) else container)
        if not set(map(type, elements)) <= _SIMPLE:
            for element in elements:
                self._follow(element, depth - 1)

    def _loose(self, value: Any, depth: int) -> None:
        """A value that its owner never binds anew."""
        if self._follow(value, depth) and isinstance(value, CONTAINERS):
            self.containers.append(value)

    def _function(self, function: FunctionType, depth: int) -> None:
        """Return what a function remembers: closure, defaults, attributes; if it is the user's, also its globals."""
        if _package(function) in _CLOSED and not hasattr(function, "criterion"):  # attach wraps a person's loss
            return
        for cell in function.__closure__ or ():
            names = _Cell(cell)
            if names.filled and id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._place(names, "cell_contents", depth)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._loose(default, depth)
        if vars(function):
            self._whole(vars(function), vars(function), depth)
        if function.__code__.co_filename.startswith(_INSTALLED):
            return
        used = {str(step.argval) for step in dis.get_instructions(function) if step.opname in _OF_GLOBALS}
        for name in sorted(used & function.__globals__.keys()):
            if (id(function.__globals__), name) not in self._seen:
                self._seen[(id(function.__globals__), name)] = None
                self._place(function.__globals__, name, depth)

    def _class(self, kind: type) -> None:
        """Return what instances share, such as a counter on the class, and what its forward reaches."""
        if id(kind) in self._seen or _package(kind) in _CLOSED or not _is_own(kind):
            return
        self._seen[id(kind)] = kind
        for name, value in list(vars(kind).items()):
            if isinstance(value, FunctionType):
                self._follow(value, _DEPTH - 1)
            elif not name.startswith("__") and (type(value) in _COUNTED or isinstance(value, CONTAINERS + GENERATORS)):
                self._place(_Attributes(kind), name, 2)


_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL")
_COUNTED = (bool, int, float, type(None), Tensor)


class _Cell:
    """A variable of a closure, as a mapping of one name."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    @property
    def filled(self) -> bool:
        try:
            self._cell.cell_contents  # noqa: B018
        except ValueError:
            return False
        return True

    def __getitem__(self, name: str) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value


class _Attributes:
    """The attributes of a class, or the slots of an object, as a mapping; whatever a class says of setting them."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing
        self._kind: Any = type if isinstance(thing, type) else object

    def __getitem__(self, name: str) -> Any:
        return getattr(self._thing, name, _MISSING)

    def __setitem__(self, name: str, value: Any) -> None:
        if value is _MISSING:
            self._kind.__delattr__(self._thing, name)
        else:
            self._kind.__setattr__(self._thing, name, value)


def _slots(kind: type) -> Iterator[str]:
    """Yield the names of all slots, private ones as they are bound."""
    for one in kind.__mro__:
        names = vars(one).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name.startswith("__") and not name.endswith("__"):
                yield f"_{one.__name__.lstrip('_')}{name}"
            elif name not in ("__dict__", "__weakref__"):
                yield name


def _package(thing: Any) -> str:
    return str(thing.__module__).partition(".")[0]


def _is_own(kind: type) -> bool:
    """Return whether this class is the user's own, and not of an installed package."""
    try:
        return not inspect.getfile(kind).startswith(_INSTALLED)
    except (OSError, TypeError):  # of a notebook's cell
        return True


def _is_open(kind: type) -> bool:
    """Return whether attributes of such an object are looked after."""
    if kind in (SimpleNamespace, UserDict, UserList):
        return True
    # Hugging Face's configurations, known by ``model_type``: a hundred attributes that forward only reads.
    return _package(kind) not in _CLOSED and not hasattr(kind, "model_type")
