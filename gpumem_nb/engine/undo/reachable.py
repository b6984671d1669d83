"""The places where Python keeps what a forward pass can change: a walk from modules and functions."""

from __future__ import annotations

import dis
import functools
import inspect
import random
import sys
import sysconfig
import threading
import weakref
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from queue import LifoQueue, PriorityQueue, Queue
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

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
from .changing import SMALL_BYTES, Key
from .places import CONTAINERS, Alike, Items, Names, elements_of

RAW = (bytearray, array)
"""Python's own arrays."""
GENERATORS = (random.Random, np.random.BitGenerator, np.random.RandomState, torch.Generator)


class _Missing:
    """Stands in a slot that holds nothing."""


_MISSING = _Missing()
_VALUES = (bool, int, float, complex, str, bytes, frozenset, range, slice, type(None))
_THINGS = (_Missing, ModuleType, BuiltinFunctionType, torch.Size, torch.dtype, torch.device, torch.layout)
_WEAK = (weakref.ProxyType, weakref.CallableProxyType)  # whatever they stand for is gone, perhaps
SCALARS = frozenset({*_VALUES, *_THINGS, *_WEAK, *np.sctypeDict.values()})
"""Types of values in which there is nothing to look for: they are bound anew, not changed."""
PLAIN = SCALARS | {Tensor, nn.Parameter}
_OTHERS_CARE = (Optimizer, LRScheduler, Dataset, DataLoader, random.SystemRandom)
_DEPTH, _OBJECT, _CONTAINER = 27, 7, 1  # so three objects deep, and six containers in each place
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
_OPEN = (SimpleNamespace, Namespace, UserDict, UserList, ChainMap, Queue, LifoQueue, PriorityQueue, threading.local)
_CLOSED = frozenset({"torch", "numpy", "horovod", "IPython", "ipykernel", "gpumem_nb"}) | sys.stdlib_module_names
_OF_GLOBALS, _STORING = ("LOAD_GLOBAL", "STORE_GLOBAL"), ("STORE_GLOBAL", "STORE_ATTR")


class Reachable:
    """The objects found from ``roots``: modules with all that is below them, functions, optimizers, any other objects.

    Attributes:
        places: where values may be bound anew, or be added: those of which many are ``alike``, and all the others.
        buffers, weights, children: the dicts in which modules keep those; of buffers, the ones with any.
        hooks: those in which modules keep what is called around their forward and backward.
        held, empty: of the dicts of buffers, weights and children those with something in them; of all those without.
        keys, sizes: the names in the dicts that are held, all in a row, and how many there are in each.
        hooked, linking: those of hooks, and of hooks and children, in which something is found.
        generators: of random numbers, outside the global ones.
        arrays: NumPy's, of those that are small, and Python's own.
        large_arrays: the others, as tensors of the same memory, with their places.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.places: list[Names | Items] = []
        self.buffers: list[dict[str, Tensor | None]] = []
        self.weights: list[dict[str, Tensor | None]] = []
        self.children: list[dict[str, nn.Module | None]] = []
        self.hooks: list[dict[Any, Any]] = []
        self.generators: list[Any] = []
        self.arrays: list[Any] = []
        self.large_arrays: list[tuple[Key, Tensor]] = []
        self._seen: dict[Any, Any] = {}  # with the things themselves: an id says something only while they live
        for root in roots:
            if isinstance(root, type):
                self._class(root)
            elif isinstance(root, Optimizer):
                self._optimizer(root)
            else:
                self._follow(root, _DEPTH, (id(root), ""))
        self._seen.clear()
        self._sort()

    def _sort(self) -> None:
        """Tell apart what is read in the same way in each step; most modules keep nothing in most of their dicts."""
        in_modules: list[dict[Any, Any]] = [*self.buffers, *self.weights, *self.children]
        self.held, self.hooked = [one for one in in_modules if one], [one for one in self.hooks if one]
        self.empty = [one for one in (*in_modules, *self.hooks) if not one]
        self.keys, self.sizes = list(chain.from_iterable(self.held)), list(map(len, self.held))
        self.buffers = [one for one in self.buffers if one]
        self.linking = [*(one for one in self.children if one), *self.hooked]
        grouped: dict[Any, list[Names]] = defaultdict(list)
        self.alone: list[Names | Items] = []
        for place in self.places:
            if isinstance(place, Names) and type(place.mapping) is dict:
                grouped[place.names, place.is_whole].append(place)
            else:
                self.alone.append(place)
        self.alike = list(map(Alike, grouped.values()))

    def _follow(self, value: Any, depth: int, key: Key) -> None:
        """Look into one value, which is bound or lies where ``key`` says."""
        if type(value) in PLAIN or id(value) in self._seen or depth <= 0 or isinstance(value, _OTHERS_CARE):
            return
        if isinstance(value, type):
            self._class(value)
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._module(value, depth)
        elif issubclass(type(value), CONTAINERS):  # and no proxy of one
            self.places.append(Items(value, key))
            self._elements(value, depth - _CONTAINER, key)
            self._attributes(value, depth)
        elif isinstance(value, tuple):
            self._elements(value, depth, key)
        elif isinstance(value, np.random.Generator):
            self._follow(value.bit_generator, depth, key)
        elif isinstance(value, GENERATORS):
            self.generators.append(value)
        elif isinstance(value, np.ndarray):
            self._array(value, key)
        elif isinstance(value, RAW):
            self.arrays.append(value)
        else:
            self._object(value, depth, key)

    def _array(self, value: Any, key: Key) -> None:
        if value.flags.writeable and value.nbytes <= SMALL_BYTES:
            self.arrays.append(value)
        elif value.flags.writeable:
            with suppress(TypeError, ValueError):  # of types and layouts that torch does not know
                self.large_arrays.append((key, torch.from_numpy(value)))

    def _object(self, value: Any, depth: int, key: Key) -> None:
        if isinstance(value, FunctionType):
            self._function(value, depth - _OBJECT)
        elif isinstance(value, MethodType):
            self._elements((value.__func__, value.__self__), depth, key)
        elif isinstance(value, functools.partial):
            self._elements((value.func, *value.args, *value.keywords.values()), depth, key)
        else:
            self._attributes(value, depth)

    def _attributes(self, value: Any, depth: int) -> None:
        """Look into what an object holds, which may be a container of the user's own class."""
        if _is_open(type(value)):
            self._class(type(value))
            of_thread = isinstance(value, threading.local)  # has a dict for each thread
            if isinstance(names := vars(value) if of_thread else _Attributes(value)["__dict__"], dict):
                self._names(names, names, depth - _OBJECT, id(value), frozenset())
            self._names(_Attributes(value), _slots(type(value)), depth - _OBJECT, id(value))

    def _module(self, top: nn.Module, depth: int) -> None:
        modules = [one for one in top.modules() if one is top or id(one) not in self._seen]
        self._seen.update((id(module), module) for module in modules)
        for module in modules:
            own_hooks = hooks_of(module)
            self.buffers.append(buffers_by_name(module))
            self.weights.append(weights_by_name(module))
            self.children.append(children_by_name(module))
            self.hooks += own_hooks
            self._class(type(module))
            left = MODULES_OWN | made_anew(module)
            names = [name for name in vars(module) if name not in left]
            self._names(vars(module), names, depth, id(module), left)
            self._names(_Attributes(module), _slots(type(module)), depth, id(module))
            for hooks in own_hooks:
                self._elements(hooks, depth, (id(hooks), ""))

    def _optimizer(self, optimizer: Optimizer) -> None:
        """Look into one that is itself asked about, and into those in it: its state, groups and attributes."""
        if id(optimizer) in self._seen:
            return
        self._seen[id(optimizer)] = optimizer
        self._class(type(optimizer))
        names = vars(optimizer)
        self.places.append(Names(names, names, id(optimizer), frozenset()))
        self._names(_Attributes(optimizer), _slots(type(optimizer)), _DEPTH, id(optimizer))
        for name, value in list(names.items()):
            if isinstance(value, Optimizer):
                self._optimizer(value)
            elif not name.startswith("_optimizer_"):  # which others have put around it
                self._follow(value, _DEPTH, (id(optimizer), name))

    def _names(
        self, mapping: Any, names: Iterable[str], depth: int, of: int, left: frozenset[str] | None = None
    ) -> None:
        if (found := Names(mapping, names, of, left)).names or left is not None:
            self.places.append(found)
            for name in found.names:
                self._follow(mapping[name], depth, (of, name))

    def _elements(self, container: Any, depth: int, key: Key) -> None:
        elements = elements_of(container)
        if not PLAIN.issuperset(map(type, elements)):
            for place, element in enumerate(list(elements)):
                self._follow(element, depth, (key[0], f"{key[1]}.{place}"))

    def _function(self, function: FunctionType, depth: int) -> None:
        """Look into closure, defaults and attributes of a function; if it is the user's, also into its globals."""
        if _package(function) in _CLOSED and not hasattr(function, "criterion"):  # attach wraps a person's loss
            return
        for cell in function.__closure__ or ():
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._names(_Attributes(cell), ("cell_contents",), depth, id(cell))
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._elements(defaults, depth, (id(function), "defaults"))
        self._names(vars(function), vars(function), depth, id(function), frozenset())
        if function.__code__.co_filename.startswith(_INSTALLED):
            return
        used = _used(function.__code__)
        self._globals(function.__globals__, used, used.variables, depth)

    def _globals(self, known: dict[str, Any], used: _Used, names: Iterable[str], depth: int) -> None:
        """Look into variables of a module, also those that may come, and of modules of the user's own among these."""
        there = (name for name in names if name in known or name in used.stored)
        new = sorted(name for name in there if (id(known), name) not in self._seen)
        self._seen.update(((id(known), name), None) for name in new)
        self._names(_Variables(known), new, depth, id(known))
        for module in (known[name] for name in new if isinstance(known.get(name), ModuleType)):
            if module.__name__.partition(".")[0] not in _CLOSED and _is_own(module):
                self._globals(vars(module), used, used.names, depth)

    def _class(self, kind: type) -> None:
        """Look into what instances share, such as a counter on the class, and into what its forward reaches."""
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = kind
        for base in kind.__bases__:  # of a closed one too: parametrizations make a class of torch's from the user's own
            self._class(base)
        if _package(kind) in _CLOSED or not _is_own(kind):
            return
        shared = []
        for name, value in list(vars(kind).items()):
            if hasattr(type(value), "__get__"):
                self._elements(_behind(value), _DEPTH - _CONTAINER, (id(kind), name))
            elif not name.startswith("__"):
                shared.append(name)
        self._names(_OfClass(kind), shared, _OBJECT - 1, id(kind), frozenset(vars(kind).keys() - set(shared)))


def _behind(attribute: Any) -> tuple[Any, ...]:
    """Return the functions by which a class computes an attribute, or what else stands there."""
    if isinstance(attribute, property):
        return attribute.fget, attribute.fset
    if isinstance(attribute, staticmethod | classmethod):
        return (attribute.__func__,)
    computed = isinstance(attribute, functools.cached_property | functools.partialmethod)
    return (attribute.func,) if computed else (attribute,)


class _Used(NamedTuple):
    """The names that code uses, and functions and comprehensions in it.

    Attributes:
        variables: those of globals.
        names: all.
        stored: those of globals and attributes that it sets.
    """

    variables: frozenset[str]
    names: frozenset[str]
    stored: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _used(code: CodeType) -> _Used:
    steps = [(step.opname, str(step.argval)) for step in dis.get_instructions(code)]
    variables = frozenset(name for how, name in steps if how in _OF_GLOBALS)
    stored = frozenset(name for how, name in steps if how in _STORING)
    inner = [_used(one) for one in code.co_consts if isinstance(one, CodeType)]
    all_of = zip(*((variables, frozenset(code.co_names), stored), *inner), strict=True)
    return _Used(*(frozenset().union(*of_each) for of_each in all_of))


class _Attributes:
    """The attributes of a class, the slots of an object or a closure's variable; whatever a class says of that."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing
        self._kind: Any = type if isinstance(thing, type) else object

    def __getitem__(self, name: str) -> Any:
        try:
            return self._kind.__getattribute__(self._thing, name)
        except (AttributeError, ValueError):
            return _MISSING

    def __setitem__(self, name: str, value: Any) -> None:
        if value is _MISSING:
            self.pop(name)
        else:
            self._kind.__setattr__(self._thing, name, value)

    def pop(self, name: str) -> None:
        """Leave nothing under this name."""
        self._kind.__delattr__(self._thing, name)


class _OfClass(_Attributes):
    """The attributes of a class itself."""

    def __len__(self) -> int:
        return len(vars(self._thing))

    def keys(self) -> set[str]:
        """Return their names, without Python's own."""
        return {name for name in vars(self._thing) if not name.startswith("__")}


class _Variables:
    """Variables of a module, some of which may not be there yet."""

    def __init__(self, known: dict[str, Any]) -> None:
        self._known = known

    def __getitem__(self, name: str) -> Any:
        return self._known.get(name, _MISSING)

    def __setitem__(self, name: str, value: Any) -> None:
        if value is _MISSING:
            del self._known[name]
        else:
            self._known[name] = value


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


def _is_own(thing: type | ModuleType) -> bool:
    """Return whether this class or module is the user's own, and not of an installed package."""
    try:
        return not inspect.getfile(thing).startswith(_INSTALLED)
    except (OSError, TypeError):  # of a notebook's cell
        return True


def _is_open(kind: type) -> bool:
    """Return whether attributes of such an object are looked after."""
    if kind in _OPEN:
        return True
    # Hugging Face's configurations, known by ``model_type``: a hundred attributes that forward only reads.
    return _package(kind) not in _CLOSED and not hasattr(kind, "model_type")
