"""Where Python keeps what is bound and held: places that are read, and put back as they were."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from operator import is_, itemgetter
from typing import Any

from .changing import Key

CONTAINERS = (dict, list, set, deque)
GONE = (LookupError, ValueError, AttributeError)
"""Raised when a place is not there any more."""


class Holding:
    """Stands for a value that is held in another form."""

    __slots__ = ()

    def get(self) -> Any:
        """Give the value."""
        raise NotImplementedError


class Names:
    """Some names of a mapping; of a whole one others that come are dropped, but for those that are ``left``."""

    def __init__(self, mapping: Any, names: Iterable[str], of: int, left: frozenset[str] | None = None) -> None:
        self.names, self.key = tuple(names), (of, "")
        self.mapping, self._left = mapping, left
        self.is_whole, self.size = left is not None, 0 if left is None else len(mapping)

    def read(self) -> tuple[Any, ...]:
        """Return what the names are bound to; raise one of ``GONE`` if there are others."""
        if self.is_whole and len(self.mapping) != self.size:
            raise KeyError
        return tuple(map(self.mapping.__getitem__, self.names))

    def put_back(self, values: tuple[Any, ...]) -> Iterator[Callable[[], Any]]:
        """Yield what binds them as they were, one after the other."""
        try:
            if all(map(is_, self.read(), values)):
                return
        except GONE:
            pass
        for name, value in zip(self.names, values, strict=True):
            if not self._is_bound(name, value):
                yield partial(self._bind, name, value)
        if self._left is not None:
            new = self.mapping.keys() - set(self.names) - self._left
            yield from (partial(self.mapping.pop, name) for name in new)

    def _is_bound(self, name: str, value: Any) -> bool:
        try:
            return self.mapping[name] is value
        except GONE:
            return False

    def _bind(self, name: str, value: Any) -> None:
        self.mapping[name] = given(value)


class Alike:
    """Names of many dicts, the same in each, as modules of one class have them: read without Python code for each dict.

    Attributes:
        places: one for each dict.
        names: that they have in common.
    """

    def __init__(self, places: list[Names]) -> None:
        self.places, self.names = places, places[0].names
        self._mappings, self._sizes = [one.mapping for one in places], [one.size for one in places]
        self._getters = list(map(itemgetter, self.names))

    def read(self) -> list[list[Any]]:
        """Return for each name what it is bound to in all places; raise one of ``GONE`` where a place would."""
        if self.places[0].is_whole and list(map(len, self._mappings)) != self._sizes:
            raise KeyError
        return [list(map(getter, self._mappings)) for getter in self._getters]

    def of_each(self, columns: list[list[Any]]) -> Iterator[tuple[Names, tuple[Any, ...]]]:
        """Give each place with what :meth:`Names.read` would have returned for it, when ``columns`` were read."""
        return zip(self.places, zip(*columns, strict=True) if columns else repeat(()), strict=bool(columns))


class Items:
    """What one container holds; ``names`` of its elements are their places."""

    names: Iterable[Any] = range(sys.maxsize)

    def __init__(self, container: Any, key: Key) -> None:
        self.key, self._container = key, container

    def read(self) -> Any:
        """Return a copy of it, as a dict or a list."""
        return _held_by(self._container)

    def put_back(self, items: Any) -> Iterator[Callable[[], Any]]:
        """Yield what fills it as it was, if it is not."""
        yield partial(self._fill, items)

    def _fill(self, items: Any) -> None:
        now = self.read()
        kind = _kind(self._container)
        if kind is set:
            same = set(now) == set(items)
        else:
            same = len(now) == len(items) and all(map(is_, _flat(now), _flat(items)))
        if same:
            return
        kind.clear(self._container)
        if isinstance(items, dict):
            for key, value in items.items():
                kind.__setitem__(self._container, key, given(value))
        elif kind is set:
            set.update(self._container, map(given, items))
        else:
            kind.extend(self._container, map(given, items))


def elements_of(container: Any) -> Any:
    """Return the values of a dict, or what else a container holds."""
    if type(container) not in CONTAINERS and issubclass(type(container), CONTAINERS):
        container = _held_by(container)
    return container.values() if isinstance(container, dict) else container


def _held_by(container: Any) -> Any:
    """Return a copy as a dict or a list; of what it holds, not of what a class of the user's gives for it."""
    kind = _kind(container)
    if kind is OrderedDict:
        return dict(OrderedDict.items(container))
    return dict.copy(container) if kind is dict else list(kind.__iter__(container))


def _kind(container: Any) -> Any:
    """Return the class of Python's own that a container is of, or extends."""
    kind = type(container)
    return kind if kind in CONTAINERS else next(one for one in (OrderedDict, *CONTAINERS) if issubclass(kind, one))


def _flat(items: Any) -> Any:
    return (*items, *items.values()) if isinstance(items, dict) else items


def given(value: Any) -> Any:
    """Give the value of which that was held."""
    return value.get() if isinstance(value, Holding) else value
