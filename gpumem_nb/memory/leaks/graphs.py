"""Objects that autograd's graphs hold: Python's garbage collector cannot see into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from ...internals.torch_internals import address, saved_raw

NODES_SEEN = 50_000  # at most: a graph that grew for thousands of steps would take too long


def saved_in(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield what the graphs of these tensors have saved for their backward pass, as it lies there."""
    waiting, seen = [tensor.grad_fn for tensor in tensors], dict[int, Any]()
    while waiting and len(seen) < NODES_SEEN:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node  # kept, so that an id stays one node's
        yield from (saved.data for saved in saved_raw(node) if isinstance(saved.data, Tensor))
        waiting += [following for following, _ in node.next_functions]


class Graphs:
    """The graphs that hang on Python's tensors, and which of these tensors keeps a storage or a Python object alive.

    A tensor that lies in another one's graph is not to blame for it: only the outermost ones are named.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._nodes: dict[int, Any] = {}  # kept, so that an id stays one node's
        self._owner: dict[int, int] = {}  # of a node: the number of the root from which it was seen
        self._inside: dict[int, int] = {}  # of a root: the root whose graph it lies in
        self._starts: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._objects: dict[int, int] = {}
        self._roots = [tensor for tensor in tensors if tensor.grad_fn is not None]
        for number, root in enumerate(self._roots):
            self._walk(number, root.grad_fn)

    def root_of_storage(self, place: int) -> Tensor | None:
        """Return the tensor in whose graph the storage is saved."""
        return self._root(self._storages.get(place))

    def root_of_object(self, thing: object) -> Tensor | None:
        """Return the tensor whose graph has the object: a Python node, or what was saved in a tensor's place."""
        return self._root(self._objects.get(id(thing)))

    def _root(self, number: int | None) -> Tensor | None:
        if number is None:
            return None
        while number in self._inside:
            number = self._inside[number]
        return self._roots[number]

    def _walk(self, number: int, start: Any) -> None:
        if id(start) in self._owner:
            if self._owner[id(start)] != number and id(start) not in self._starts:
                self._inside[number] = self._owner[id(start)]
            return
        self._starts[id(start)] = number
        waiting = [start]
        while waiting and len(self._nodes) < NODES_SEEN:
            node = waiting.pop()
            if id(node) in self._owner:
                inner = self._starts.get(id(node), number)
                if inner != number and self._outermost(inner) != self._outermost(number):
                    self._inside[self._outermost(inner)] = number
                continue
            self._nodes[id(node)], self._owner[id(node)] = node, number
            self._walk_from(node, number)
            waiting += [following for following, _ in node.next_functions if following is not None]

    def _outermost(self, number: int) -> int:
        while number in self._inside:
            number = self._inside[number]
        return number

    def _walk_from(self, node: Any, number: int) -> None:
        self._objects[id(node)] = number
        for saved in saved_raw(node):
            held = saved.data  # as it lies there: unpacking could run the model again
            if isinstance(held, Tensor):
                self._storages.setdefault(address(held.untyped_storage()), number)
            elif held is not None:
                self._objects[id(held)] = number
            if saved.unpack_hook is not None:
                self._objects[id(saved.unpack_hook)] = number
