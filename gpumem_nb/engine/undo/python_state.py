"""The Python state of a model beside its weights: attributes, containers' contents, buffers' names, random numbers."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from operator import is_, setitem
from typing import Any

import numpy as np
from torch import Tensor

from ..copies import same
from .changing import Key, can_be_filled
from .places import GONE, Holding, Items, Names, elements_of
from .reachable import RAW, SCALARS, Reachable

Hold = Callable[[Any], Any]
"""What to hold of a tensor or a tuple: itself, or a :class:`Holding`."""


class PythonState:
    """The places where some modules and functions keep state. They are looked for once, and again when they changed.

    Args:
        roots: gives the modules and functions; asked again whenever the places are looked for.
    """

    def __init__(self, roots: Callable[[], Iterable[Any]]) -> None:
        self._roots = roots
        self.found = Reachable(())
        self._followed: list[Any] = [None]  # which nothing fits
        self._linked: list[Any] = []

    def take(self, hold: Hold | None = None) -> PythonSnapshot:
        """Note the state as it is now; with ``hold``, of each tensor and tuple what that gives."""
        taken: PythonSnapshot | None = None
        with suppress(*GONE):
            taken = PythonSnapshot(self.found)
        if taken is None or not (_same(taken.followed, self._followed) and _same(taken.linked, self._linked)):
            self.found = Reachable(self._roots())
            taken = PythonSnapshot(self.found)
        self._followed, self._linked = taken.followed, taken.linked
        if hold:
            taken.hold(hold)
        return taken

    def buffers(self) -> list[tuple[Key, Tensor]]:
        """Return the buffers that were found last, each once, with the place of one of its names."""
        return _each_once(self.found.buffers)

    def weights(self) -> list[tuple[Key, Tensor]]:
        """Return all parameters of the latest look, each once, with the place of one of its names."""
        return _each_once(self.found.weights)

    def let_go(self) -> None:
        """Hold nothing until the state is taken again, for which it is looked for anew."""
        self.found, self._followed, self._linked = Reachable(()), [None], []


class PythonSnapshot:
    """State at one moment.

    Attributes:
        tensors: those that are bound to a name or lie in a container, with their places, without buffers; and large
            arrays as such.
        followed, linked: the values in which more places are found.
    """

    def __init__(self, found: Reachable) -> None:
        """Take it.

        Raises:
            KeyError: the places must be looked for anew. So do the other errors of ``GONE``.
        """
        if any(found.empty) or list(map(len, found.held)) != found.sizes:
            raise KeyError
        if list(chain.from_iterable(found.held)) != found.keys:
            raise KeyError
        self._found = found
        self.linked = list(chain.from_iterable(map(dict.values, found.linking)))
        self.tensors: list[tuple[Key, Tensor]] = [*found.large_arrays]
        self.followed: list[Any] = []
        self._alike = [group.read() for group in found.alike]
        self._contents: list[Any] = [place.read() for place in found.alone]
        for group, columns in zip(found.alike, self._alike, strict=True):
            for name, values in zip(group.names, columns, strict=True):
                if not SCALARS.issuperset(map(type, values)):
                    for place, value in zip(group.places, values, strict=True):
                        self._sort(place.key, name, value)
        for one, content in zip(found.alone, self._contents, strict=True):
            if not SCALARS.issuperset(map(type, elements_of(content))):
                for name, value in zip(one.names, elements_of(content), strict=False):
                    self._sort(one.key, name, value)
        # In one list: a copy of each dict would be a thing that Python's collector of garbage goes through.
        self._in_modules: list[Any] = list(chain.from_iterable(named.values() for named in found.held))
        self._hooked = list(map(dict, found.hooked))  # by other numbers, perhaps, than when they were looked for
        self._arrays = [one[:] if isinstance(one, RAW) else one.copy() for one in found.arrays]
        self._drawn = list(map(_drawn, found.generators))

    def _sort(self, key: Key, name: Any, value: Any) -> None:
        """Find tensors in a value, and whether it is one in which there may be other places."""
        if type(value) in SCALARS:
            return
        inner = key[0], f"{key[1]}.{name}" if key[1] else str(name)
        if isinstance(value, Tensor):
            self.tensors.append((inner, value))
        elif isinstance(value, tuple):
            for place, one in enumerate(value):
                self._sort(inner, place, one)
        else:
            self.followed.append(value)

    def hold(self, hold: Hold) -> None:
        """Hold of each tensor and tuple what ``hold`` gives."""

        def mapped(content: Any) -> Any:
            if isinstance(content, dict):
                return {name: hold(value) for name, value in content.items()}
            return [hold(value) for value in content]

        self._alike = [[mapped(values) for values in columns] for columns in self._alike]
        self._contents = list(map(mapped, self._contents))
        self._in_modules = mapped(self._in_modules)

    def differing(self, later: PythonSnapshot) -> set[str]:
        """Return the names of what is otherwise by then: plain values, also in containers, buffers, arrays, generators.

        What is bound anew to a tensor is left out: most often it is kept for someone to look at.
        """
        now = dict(later._plain())
        found = {name for (key, name), value in self._plain() if not _is_alike(value, now.get((key, name), value))}
        held = {id(named): then for named, then in later._dicts()}
        for named, before in self._dicts():
            after = held.get(id(named), before)
            other = (name for name, value in before.items() if not _is_alike(value, after.get(name)))
            found |= {name if isinstance(name, str) else "a hook" for name in other}
        if not all(map(_holds_same, self._arrays, later._arrays)):
            found.add("an array")
        if not all(map(_stands_alike, self._drawn, later._drawn)):
            found.add("random numbers of its own")
        return found

    def _plain(self) -> Iterator[tuple[tuple[Key, str], Any]]:
        for place, content in self._of_places():
            if isinstance(place, Names):
                named = zip(place.names, content, strict=True)
                yield from (((place.key, name), value) for name, value in named if _is_plain(value))
            else:
                yield (place.key, place.key[1] or "a container"), content

    def _of_places(self) -> Iterator[tuple[Names | Items, Any]]:
        """Give all places with what was in them."""
        yield from zip(self._found.alone, self._contents, strict=True)
        for group, columns in zip(self._found.alike, self._alike, strict=True):
            yield from group.of_each(columns)

    def _dicts(self) -> Iterator[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Give the dicts of modules with what was in them, but for those that were and are empty."""
        names, values = iter(self._found.keys), iter(self._in_modules)
        for named, size in zip(self._found.held, self._found.sizes, strict=True):
            yield named, dict(zip(islice(names, size), islice(values, size), strict=True))
        yield from zip(self._found.hooked, self._hooked, strict=True)
        yield from ((named, {}) for named in self._found.empty if named)

    def put_back(self) -> None:
        """Bind every name that is bound to something else as it was, and fill every container that has changed."""
        each(self.parts())

    def parts(self) -> Iterator[Callable[[], Any]]:
        """Yield what :meth:`put_back` does, one thing after the other."""
        for place, content in self._of_places():
            yield from place.put_back(content)
        for named, before in self._dicts():
            yield from Items(named, (0, "")).put_back(before)
        for array, content in zip(self._found.arrays, self._arrays, strict=True):
            whole = slice(None) if isinstance(array, RAW) else ...
            yield partial(setitem, array, whole, content)  # with its mask, if it has one
        for generator, drawn in zip(self._found.generators, self._drawn, strict=True):
            yield partial(_go_on, generator, drawn)


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


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _each_once(dicts: Iterable[dict[str, Tensor | None]]) -> list[tuple[Key, Tensor]]:
    found: dict[int, tuple[Key, Tensor]] = {}
    for named in dicts:
        for name, tensor in named.items():
            if tensor is not None:
                found.setdefault(id(tensor), ((id(named), name), tensor))
    return list(found.values())


def _drawn(generator: Any) -> Any:
    """Return where a generator of random numbers stands."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    return generator.get_state()


def _is_alike(one: Any, other: Any) -> bool:
    """Compare plain values, tensors, and containers by what they hold of these; others are looked after themselves."""
    if one is other or isinstance(one, Holding):
        return True
    if isinstance(one, (dict, list)) and isinstance(other, (dict, list)):
        pairs = (one, other), (elements_of(one), elements_of(other))
        if len(one) != len(other) or all(all(map(is_, *pair)) for pair in pairs):  # most are, and may be long
            return len(one) == len(other)
        return all(all(map(_is_alike_inside, *pair)) for pair in pairs)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        known = type(one) is type(other) and can_be_filled(one) and can_be_filled(other)
        return known and one.device == other.device and same(one, other)
    return bool(one == other or (one != one and other != other))


def _is_alike_inside(one: Any, other: Any) -> bool:
    return not (_is_plain(one) and _is_plain(other)) or _is_alike(one, other)


def _is_plain(value: Any) -> bool:
    return type(value) in SCALARS or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _holds_same(one: Any, other: Any) -> bool:
    if isinstance(one, RAW):
        return bool(one == other)
    return (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())


def _stands_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.equal(other)
    return pickle.dumps(one) == pickle.dumps(other)


def _go_on(generator: Any, drawn: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(drawn)
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = drawn
    else:
        generator.set_state(drawn)
