"""The Python state of a model beside its weights: attributes, containers' contents, buffers' names, random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor

from ...internals.torch_internals import MODULES_OWN
from .changing import Key
from .reachable import CONTAINERS, PLAIN, Reachable

_COUNTED = (int, float, str, bool, type(None))
_LONG = 1_000  # elements
_DEPTH = 6  # of containers in containers
_FOLLOWED = (Tensor, tuple, *CONTAINERS)  # in containers


class Holding:
    """Stands for a value that is held in another form."""

    __slots__ = ()

    def get(self) -> Any:
        """Give the value."""
        raise NotImplementedError


Hold = Callable[[Any], Any]
"""What to hold of a value: itself, or a :class:`Holding`."""


class PythonState:
    """The places where some modules and functions keep state. They are looked for once, and again when they changed.

    Args:
        roots: gives the modules and functions; asked again whenever the places are looked for.
    """

    def __init__(self, roots: Callable[[], Iterable[Any]]) -> None:
        self._roots = roots
        self._tuples_seen: list[Any] = []
        self._look()

    def take(self, hold: Hold | None = None) -> PythonSnapshot:
        """Note the state as it is now; with ``hold``, of each value what that gives."""
        try:
            values = self._values()
        except (KeyError, ValueError, AttributeError):  # a name is gone
            values = None
        if values is None or not self._fits(values):
            self._look()
            values = self._values()
        tuples = [values[index] for index in self._tuples]
        if not all(map(is_, tuples, self._tuples_seen)):
            self._note_tuples(values)
        filled = [(self._key(index), values[index]) for index in (*self._containers, *self._filled_tuples)]
        tensors = [(self._key(index), values[index]) for index in self._tensors]
        return PythonSnapshot(self.found, values, tensors, filled, hold, _Seen(self._long))

    def buffers(self) -> list[tuple[Key, Tensor]]:
        """Tensors that modules registered as buffers, each once, with the place of one of its names."""
        return _each_once(self.found.buffers)

    def weights(self) -> list[tuple[Key, Tensor]]:
        """Return all parameters, each once, with the place of one of its names."""
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
        self._long: dict[int, tuple[int, bool]] = {}
        self._children = list(chain.from_iterable(map(dict.values, found.children)))
        self._hooks = list(chain.from_iterable(map(dict.values, found.hooks)))
        self._lengths = [len(names) for names, _ in found.wholes]
        self._sort_by_type(self._values())

    def _sort_by_type(self, values: list[Any]) -> None:
        self._types = list(map(type, values))
        self._tensors = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
        self._containers = [index for index, value in enumerate(values) if isinstance(value, CONTAINERS)]
        self._tuples = [index for index, value in enumerate(values) if isinstance(value, tuple)]
        self._note_tuples(values)

    def _note_tuples(self, values: list[Any]) -> None:
        self._tuples_seen = [values[index] for index in self._tuples]
        self._filled_tuples = [index for index in self._tuples if _is_filled(values[index])]

    def _key(self, index: int) -> Key:
        mapping, name = self.found.places[index]
        return id(mapping), name

    def _fits(self, values: list[Any]) -> bool:
        """Return whether the places that were found are all that there are."""
        found = self.found
        types = list(map(type, values))
        if types != self._types:
            if any(new is not old and new not in PLAIN for new, old in zip(types, self._types, strict=True)):
                return False
            self._sort_by_type(values)
        return (
            [len(names) for names, _ in found.wholes] == self._lengths
            and list(chain.from_iterable(map(dict.values, found.children))) == self._children
            and list(chain.from_iterable(map(dict.values, found.hooks))) == self._hooks
            and all(values[index] is value for index, value in found.followed)
        )


class PythonSnapshot:
    """State at one moment.

    Attributes:
        tensors: those that are bound to a name or lie in a container, with their places, without buffers.
    """

    def __init__(
        self,
        found: Reachable,
        values: list[Any],
        tensors: list[tuple[Key, Tensor]],
        filled: list[tuple[Key, Any]],
        hold: Hold | None,
        seen: _Seen,
    ) -> None:
        self._found, self.tensors = found, tensors
        loose = (((id(container), ""), container) for container in found.containers)
        self._contents = [_Contents(*one, hold, seen, _DEPTH) for one in chain(filled, loose)]
        for contents in self._contents:
            self.tensors += contents.tensors()
        self._generators = [(generator, _drawn(generator)) for generator in found.generators]
        self._arrays = [(array, array.copy()) for array in found.arrays]
        self._buffers = [(named, dict(named)) for named in found.buffers]
        self._values = values
        if hold:
            self._values = list(map(hold, values))
            self._buffers = [(named, {name: hold(b) for name, b in before.items()}) for named, before in self._buffers]

    def differing(self, later: PythonSnapshot) -> set[str]:
        """Names of plain values that are others by then, where the same places are there; a container by its length."""
        if later._found is not self._found:
            return set()
        values = zip(self._found.places, self._values, later._values, strict=True)
        found = {name for (_, name), old, new in values if type(old) in _COUNTED and old != new}
        filled = zip(self._contents, later._contents, strict=False)
        return found | {"a container" for old, new in filled if old.length != new.length}

    def put_back(self) -> None:
        """Bind every name that is bound to something else as it was, and fill every container that has changed."""
        each(self.parts())

    def parts(self) -> Iterator[Callable[[], None]]:
        """Yield what :meth:`put_back` does, one thing after the other."""
        for names, known in self._found.wholes:
            yield from (partial(names.pop, name, None) for name in names.keys() - known - MODULES_OWN)
        for (mapping, name), value in zip(self._found.places, self._values, strict=True):
            if not _is_bound(mapping, name, value):
                yield partial(_bind, mapping, name, value)
        yield from (contents.put_back for contents in self._contents)
        yield from (partial(_fill, named, before) for named, before in self._buffers if not _same_dict(named, before))
        yield from (partial(np.copyto, array, content) for array, content in self._arrays)
        yield from (partial(_go_on, generator, drawn) for generator, drawn in self._generators)


class _Seen:
    """The containers that were seen while state is taken.

    ``inner``: those in others, by their ids. ``long``: for those that take long to look through, at which length it was
    done and whether there is anything in them that can be changed in place.
    """

    def __init__(self, long: dict[int, tuple[int, bool]]) -> None:
        self.inner: set[int] = set()
        self._long = long

    def holds_more(self, container: Any, items: Any) -> bool:
        if len(items) <= _LONG:
            return _holds_more(items)
        length, found = self._long.get(id(container), (-1, False))
        if length != len(items):
            if len(self._long) > _LONG:  # of containers that are made anew in each step
                self._long.clear()
            found = _holds_more(items)
            self._long[id(container)] = len(items), found
        return found


class _Contents:
    """The items that one container or tuple held, and the containers in it."""

    def __init__(self, key: Key, container: Any, hold: Hold | None, seen: _Seen, depth: int) -> None:
        self._container = container
        self.length = len(container)
        self._items = dict(container) if isinstance(container, dict) else list(container)
        self._inner: list[_Contents] = []
        self._tensors: list[tuple[Key, Tensor]] = []
        if seen.holds_more(container, self._items):
            for place, one in enumerate(_elements(self._items)):
                # By the way there, not by the container, which may be another one in each step.
                inner = key[0], f"{key[1]}.{place}"
                if isinstance(one, Tensor):
                    self._tensors.append((inner, one))
                elif isinstance(one, _FOLLOWED) and depth and id(one) not in seen.inner:
                    seen.inner.add(id(one))
                    self._inner.append(_Contents(inner, one, hold, seen, depth - 1))
            if hold and isinstance(self._items, dict):
                self._items = {key: hold(value) for key, value in self._items.items()}
            elif hold:
                self._items = list(map(hold, self._items))

    def tensors(self) -> list[tuple[Key, Tensor]]:
        return [*self._tensors, *chain.from_iterable(contents.tensors() for contents in self._inner)]

    def put_back(self) -> None:
        own = () if isinstance(self._container, tuple) else (partial(_fill, self._container, self._items),)
        each((*own, *(contents.put_back for contents in self._inner)))


def _holds_more(items: Any) -> bool:
    return any(issubclass(kind, _FOLLOWED) for kind in set(map(type, _elements(items))))


def each(parts: Iterable[Callable[[], Any]]) -> None:
    """Call all of these, whatever one of them raises; afterwards raise the first error, with the others as notes."""
    first: BaseException | None = None
    for part in parts:
        try:
            part()
        except BaseException as error:
            if first is None:
                first = error
            else:
                first.add_note(f"besides: {type(error).__name__}: {error}")
    if first is not None:
        raise first


def _elements(items: Any) -> Any:
    return items.values() if isinstance(items, dict) else items


def _is_filled(value: tuple[Any, ...]) -> bool:
    """Return whether a tuple has something in it that can be changed in place."""
    return any(_is_filled(one) if isinstance(one, tuple) else isinstance(one, _FOLLOWED) for one in value)


def _is_bound(mapping: Any, name: str, value: Any) -> bool:
    try:
        return mapping[name] is value
    except (LookupError, AttributeError, ValueError):
        return False


def _bind(mapping: Any, name: str, value: Any) -> None:
    mapping[name] = given(value)


def given(value: Any) -> Any:
    """Give the value of which that was held."""
    return value.get() if isinstance(value, Holding) else value


def _each_once(dicts: Iterable[dict[str, Tensor | None]]) -> list[tuple[Key, Tensor]]:
    found: dict[int, tuple[Key, Tensor]] = {}
    for named in dicts:
        for name, tensor in named.items():
            if tensor is not None:
                found.setdefault(id(tensor), ((id(named), name), tensor))
    return list(found.values())


def _same_dict(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other)) and all(map(is_, one.values(), other.values()))


def _fill(container: Any, items: Any) -> None:
    """Let a container hold these again, if it does not."""
    if isinstance(container, dict):
        if not _same_dict(container, items):
            container.clear()
            for key, value in items.items():
                container[key] = given(value)
    elif isinstance(container, set):
        if container != set(items):
            container.clear()
            container.update(map(given, items))
    elif len(container) != len(items) or not all(map(is_, container, items)):
        container.clear()
        container.extend(map(given, items))


def _drawn(generator: Any) -> Any:
    """Return where a generator of random numbers stands."""
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
