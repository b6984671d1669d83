"""What Python keeps of a model beside its weights: attributes, containers' contents, buffers' names, random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor

from ...internals.torch_internals import MODULES_OWN
from .changing import Key
from .held import given, without_graph
from .reachable import CONTAINERS, PLAIN, Reachable

_LARGEST = 10_000  # elements of a container that are copied: of a longer one only what was added is taken off again
_LARGEST_SEARCHED = 1_000  # elements of one in which containers and tensors are looked for
_COUNTED = (int, float, str, bool, type(None))
_DEPTH = 3  # of containers in containers


class PythonState:
    """The places where some modules and functions keep state. They are looked for once, and again when they changed.

    Args:
        roots: gives the modules and functions; asked again whenever the places are looked for.
    """

    def __init__(self, roots: Callable[[], Iterable[Any]]) -> None:
        self._roots = roots
        self._look()

    def take(self, detached: bool = False) -> Taken:
        """The state as it is now; with ``detached``, of tensors that belong to a graph without the graph."""
        try:
            values = self._values()
        except (KeyError, ValueError, AttributeError):  # a name is gone
            values = None
        if values is None or not self._fits(values):
            self._look()
            values = self._values()
        return Taken(self.found, values, self._tensors, self._containers, detached)

    def buffers(self) -> list[tuple[Key, Tensor]]:
        """Tensors that modules registered as buffers, each once, with the place of one of its names."""
        return _each_once(self.found.buffers)

    def weights(self) -> list[tuple[Key, Tensor]]:
        """All parameters, each once, with the place of one of its names."""
        return _each_once(self.found.weights)

    def let_go(self) -> None:
        """Hold nothing until the state is taken again, for which it is looked for anew."""
        self._found(Reachable(()))
        self._lengths = [-1]  # which nothing fits

    def _values(self) -> list[Any]:
        return [mapping[name] for mapping, name in self.found.places]

    def _look(self) -> None:
        self._found(Reachable(self._roots()))

    def _found(self, found: Reachable) -> None:
        self.found = found
        self._children = list(chain.from_iterable(map(dict.values, found.children)))
        self._hooks = list(chain.from_iterable(found.hooks))
        self._lengths = [len(names) for names, _ in found.wholes]
        self._sort_by_type(self._values())

    def _sort_by_type(self, values: list[Any]) -> None:
        self._types = list(map(type, values))
        self._tensors = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
        self._containers = [index for index, value in enumerate(values) if isinstance(value, CONTAINERS)]

    def _fits(self, values: list[Any]) -> bool:
        """Whether the places that were found are all that there are."""
        found = self.found
        types = list(map(type, values))
        if types != self._types:
            if any(new is not old and new not in PLAIN for new, old in zip(types, self._types, strict=True)):
                return False
            self._sort_by_type(values)
        return (
            [len(names) for names, _ in found.wholes] == self._lengths
            and list(chain.from_iterable(map(dict.values, found.children))) == self._children
            and list(chain.from_iterable(found.hooks)) == self._hooks
            and all(values[index] is value for index, value in found.followed)
        )


class Taken:
    """State at one moment.

    Attributes:
        tensors: those that are bound to a name or lie in a container, with their places, without buffers.
    """

    def __init__(
        self, found: Reachable, values: list[Any], tensors: list[int], containers: list[int], detached: bool
    ) -> None:
        self._found = found
        filled = chain((values[index] for index in containers), found.containers)
        self._contents = [_Contents(container, detached) for container in filled]
        self.tensors: list[tuple[Key, Tensor]] = [
            ((id(found.places[index][0]), found.places[index][1]), values[index]) for index in tensors
        ]
        for contents in self._contents:
            self.tensors += contents.tensors()
        self._generators = [(generator, _drawn(generator)) for generator in found.generators]
        self._buffers = [(named, dict(named)) for named in found.buffers]
        self._values = values
        if detached:
            self._values = list(map(without_graph, values))
            self._buffers = [
                (named, {name: without_graph(b) for name, b in before.items()}) for named, before in self._buffers
            ]

    def differing(self, later: Taken) -> set[str]:
        """Names of plain values that are others by then, where the same places are there; a container by its length."""
        if later._found is not self._found:
            return set()
        values = zip(self._found.places, self._values, later._values, strict=True)
        found = {name for (_, name), old, new in values if type(old) in _COUNTED and old != new}
        filled = zip(self._contents, later._contents, strict=False)
        return found | {"a container" for old, new in filled if old.length != new.length}

    def put_back(self) -> None:
        """Bind every name anew and fill every container as it was."""
        for names, known in self._found.wholes:
            for name in names.keys() - known - MODULES_OWN:
                del names[name]
        for (mapping, name), value in zip(self._found.places, self._values, strict=True):
            mapping[name] = given(value)
        for contents in self._contents:
            contents.put_back()
        for named, before in self._buffers:
            named.clear()
            named.update((name, given(buffer)) for name, buffer in before.items())
        for generator, drawn in self._generators:
            _go_on(generator, drawn)


class _Contents:
    """What one container held, and the containers in it."""

    def __init__(self, container: Any, detached: bool, depth: int = _DEPTH) -> None:
        self._container = container
        self.length = len(container)
        self._items = _items(container) if self.length <= _LARGEST else None
        self._inner: list[_Contents] = []
        self._tensors: list[tuple[Key, Tensor]] = []
        if self._items and self.length <= _LARGEST_SEARCHED:
            elements = [item[-1] for item in self._items]
            self._tensors = [
                ((id(container), str(place)), one) for place, one in enumerate(elements) if isinstance(one, Tensor)
            ]
            if depth > 1:
                self._inner = [_Contents(one, detached, depth - 1) for one in elements if isinstance(one, CONTAINERS)]
            if detached:
                self._items = [(*item[:-1], without_graph(item[-1])) for item in self._items]

    def tensors(self) -> list[tuple[Key, Tensor]]:
        return [*self._tensors, *chain.from_iterable(contents.tensors() for contents in self._inner)]

    def put_back(self) -> None:
        if self._items is None:
            _shorten(self._container, self.length)
        elif not _are_same(self._items, _items(self._container)):
            _fill(self._container, [(*item[:-1], given(item[-1])) for item in self._items])
        for contents in self._inner:
            contents.put_back()


def _each_once(dicts: Iterable[dict[str, Tensor | None]]) -> list[tuple[Key, Tensor]]:
    found: dict[int, tuple[Key, Tensor]] = {}
    for named in dicts:
        for name, tensor in named.items():
            if tensor is not None:
                found.setdefault(id(tensor), ((id(named), name), tensor))
    return list(found.values())


def _items(container: Any) -> list[tuple[Any, ...]]:
    """The elements: of a dict with their keys, else by themselves."""
    return list(container.items() if isinstance(container, dict) else zip(container))


def _are_same(items: list[tuple[Any, ...]], others: list[tuple[Any, ...]]) -> bool:
    return len(items) == len(others) and all(map(is_, chain.from_iterable(items), chain.from_iterable(others)))


def _fill(container: Any, items: list[tuple[Any, ...]]) -> None:
    container.clear()
    if isinstance(container, dict):
        for key, value in items:
            container[key] = value
    elif isinstance(container, set):
        container.update(item for (item,) in items)
    else:
        container.extend(item for (item,) in items)


def _shorten(container: Any, length: int) -> None:
    """Take off what was added at the end."""
    if isinstance(container, dict):
        while len(container) > length:
            container.popitem()
    elif isinstance(container, list):
        del container[length:]


def _drawn(generator: Any) -> Any:
    """Where a generator of random numbers stands."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _go_on(generator: Any, drawn: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(drawn)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = drawn
    else:
        generator.set_state(drawn)
