"""The way to an object, from a variable, a model, a function or a class, as people would write it in Python.

Python's garbage collector cannot see into autograd's graphs: what these hold is looked up here, too.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

from torch import Tensor, nn

from ...internals.torch_internals import address, saved_raw
from ..tensors import storage_of

LEVELS = 16  # of containers in containers; an attribute or a closure takes two
OBJECTS_AT_A_LEVEL = 100
LONGEST_SEARCH_S = 2.0  # the other ranks wait for this one meanwhile
LONGEST_KEY = 40
NOTEBOOK = " in the notebook's variables on the rank"


@dataclass(frozen=True, slots=True)
class Way:
    """From something with a name (the first object) to what was looked for (the last); each refers to the next.

    ``place`` says where the name is to be found; empty when that goes without saying.
    """

    name: str
    place: str
    objects: tuple[Any, ...]


class Holders:
    """Asks Python's garbage collector who refers to something, level by level, until something has a name.

    Args:
        known: names that a way may start from, besides the variables of modules; where it is a ``torch.nn.Module``, its
            sub-modules, parameters and buffers have names too.
    """

    def __init__(self, known: Mapping[str, object]) -> None:
        self._known = {id(value): name for name, value in known.items()}
        for name, value in known.items():
            if isinstance(value, nn.Module):
                parts = [*value.named_modules(), *value.named_parameters(), *value.named_buffers()]
                self._known |= {id(part): f"{name}{_dotted(path)}" for path, part in parts}
        # The notebook's variables last: other names of the same module give way.
        modules = [*sys.modules.items(), ("__main__", sys.modules["__main__"])]
        self._modules = {id(vars(module)): name for name, module in modules if module is not None}
        self._above: dict[int, list[Any]] = {}
        self._ignored: set[int] = set()

    def ignore(self, *containers: object) -> None:
        """These hold things for the search's own sake."""
        self._ignored |= {id(container) for container in containers}

    def ways(self, things: Sequence[object]) -> list[Way | None]:
        """Return a shortest way to each of them; ``None`` where there is none that Python can see."""
        self._climb(things)
        return [self._way(thing, anonymous=True) for thing in things]

    def ends(self, thing: object) -> Iterator[object]:
        """Yield where the search for a way ended: objects that nothing in Python refers to."""
        seen, waiting = {id(thing)}, [thing]
        while waiting:
            item = waiting.pop()
            above = self._above.get(id(item), [])
            if not above:
                yield item
            fresh = [holder for holder in above if id(holder) not in seen]
            seen.update(id(holder) for holder in fresh)
            waiting += fresh

    def _climb(self, things: Sequence[object]) -> None:
        # Frames that run, this one among them, hold what is looked at right now.
        ignored = self._ignored | {id(things), *_running_frames()}
        level = [thing for thing in {id(thing): thing for thing in things}.values() if id(thing) not in self._above]
        deadline = time.monotonic() + LONGEST_SEARCH_S
        for _ in range(LEVELS):
            level = level[:OBJECTS_AT_A_LEVEL]
            if not level or time.monotonic() > deadline:
                return
            referrers = gc.get_referrers(*level)
            ignored |= {id(level), id(referrers), *(id(holders) for holders in self._above.values())}
            self._above |= {id(item): [] for item in level}
            following: list[Any] = []
            ignored.add(id(following))
            for holder in referrers:
                if id(holder) in ignored:
                    continue
                held = {id(item) for item in gc.get_referents(holder)}
                for item in level:
                    if id(item) in held:
                        self._above[id(item)].append(holder)
                if id(holder) not in self._above and not self._is_start(holder):
                    following.append(holder)
            if all(self._way(thing) for thing in things):
                return
            level = following

    def _is_start(self, holder: object) -> bool:
        return id(holder) in self._modules or id(holder) in self._known or isinstance(holder, type)

    def _way(self, thing: object, anonymous: bool = False) -> Way | None:
        """From a name; with ``anonymous``, where there is none, from a function."""
        below: dict[int, Any] = {id(thing): None}
        waiting, function = deque([thing]), None
        while waiting:
            for holder in self._above.get(id(item := waiting.popleft()), []):
                if id(holder) in below:
                    continue
                below[id(holder)] = item
                objects = _down(holder, below)
                if way := self._start(objects):
                    return way
                if isinstance(holder, FunctionType) and function is None:
                    function = Way(holder.__qualname__, "", objects)
                waiting.append(holder)
        return function if anonymous else None

    def _start(self, objects: tuple[Any, ...]) -> Way | None:
        first = objects[0]
        if id(first) in self._known:
            return Way(self._known[id(first)], "", objects)
        if isinstance(first, type):
            return Way(first.__qualname__, ", an attribute of the class", objects)
        if id(first) in self._modules:
            module = self._modules[id(first)]
            name = next((name for name, value in list(first.items()) if value is objects[1]), "?")
            return (
                Way(name, NOTEBOOK, objects[1:]) if module == "__main__" else Way(f"{module}.{name}", "", objects[1:])
            )
        return None


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a leak: an expression for it, and in words what it is.

    ``kind`` is ``hooks``, ``traceback``, ``default``, ``dict``, ``container``, ``variable`` or ``unseen``; ``bounded``
    says that it throws its oldest element away by itself.
    """

    kind: str
    name: str
    text: str
    bounded: bool = False


UNSEEN = Holder("unseen", "", "something that Python's garbage collector cannot see into, such as a library in C++")


def holder_on(way: Way, index: int) -> Holder:
    """Return the object at ``index`` of a way, as the holder of those behind it."""
    last = way.objects[index]
    name, place, kind = _expression(way, index)
    count = f", {len(last):,} elements" if isinstance(last, list | dict | set | deque | tuple) else ""
    text = f"{type(last).__name__} `{name}`{place}{count}"
    local = next((thing for thing in way.objects[index:] if isinstance(thing, FrameType)), None)
    if name.endswith("_hooks"):
        kind, text = "hooks", f"`{name}`, {len(last):,} hooks"
    elif local is not None:
        kind = "traceback"
        text += f", whose exceptions keep the variables of {local.f_code.co_qualname}() in their tracebacks"
    elif not kind:
        places = isinstance(last, list) and any(item is None for item in last)  # filled by number, as a dict is by key
        kind = "dict" if isinstance(last, dict) or places else "container" if count else "variable"
    bounded = any(isinstance(thing, deque) and thing.maxlen is not None for thing in way.objects)
    return Holder(kind, name, text, bounded)


def _expression(way: Way, index: int) -> tuple[str, str, str]:
    """Return an expression for the object at ``index``, its place, and ``default`` if it is one."""
    name, place, kind = way.name, way.place, ""
    for number in range(index):
        above, holder, item = (way.objects[number - 1] if number else None), *way.objects[number : number + 2]
        if not isinstance(holder, FunctionType):
            name += _link(above, holder, item)
        elif variable := _captured(holder, way.objects[number + 2]) if number + 2 < len(way.objects) else "":
            name, place, kind = variable, f", a closure variable of {holder.__qualname__}()", ""
        elif variable := _default(holder, way.objects[number + 2]) if number + 2 < len(way.objects) else "":
            name, place, kind = variable, f", a default argument of {holder.__qualname__}()", "default"
    return name, place, kind


def _down(holder: Any, below: Mapping[int, Any]) -> tuple[Any, ...]:
    objects = [holder]
    while (item := below[id(objects[-1])]) is not None:
        objects.append(item)
    return tuple(objects)


def _link(above: Any, holder: Any, item: Any) -> str:
    """Return what to write behind an expression for ``holder`` to get ``item``; ``above`` refers to ``holder``."""
    if isinstance(above, FunctionType):
        return ""  # its closure or defaults, which have been named
    if isinstance(holder, dict):
        key = next((key for key, value in list(holder.items()) if value is item), "?")
        of_object = isinstance(above, type) or getattr(above, "__dict__", None) is holder
        return f".{key}" if of_object else f"[{_short(repr(key))}]"
    if isinstance(holder, list | tuple | deque):
        return f"[{next((number for number, value in enumerate(holder) if value is item), '?')}]"
    if isinstance(holder, type):
        return ""
    attributes = dict(getattr(holder, "__dict__", {}))
    slots = [slot for base in type(holder).__mro__ for slot in getattr(base, "__slots__", ())]
    for name in (*slots, "__self__", "func", "args", "_backward_hooks", "_post_accumulate_grad_hooks"):
        attributes[name] = getattr(holder, name, None)
    return next((f".{name}" for name, value in attributes.items() if value is item), "")


def _captured(function: FunctionType, cell: Any) -> str:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return next((name for name, captured in cells if captured is cell), "")


def _default(function: FunctionType, value: Any) -> str:
    code = function.__code__
    positional = code.co_varnames[: code.co_argcount]
    defaults = dict(zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False))
    return next((name for name, item in (defaults | (function.__kwdefaults__ or {})).items() if item is value), "")


def _running_frames() -> Iterable[int]:
    for frame in sys._current_frames().values():
        running: FrameType | None = frame
        while running is not None:
            yield id(running)
            running = running.f_back


def _dotted(path: str) -> str:
    """``0.norm`` as Python writes it behind a model's name."""
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split(".") if part)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_KEY else f"{text[: LONGEST_KEY - 1]}…"


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

    def root_of_ends(self, tensors: Sequence[Tensor], holders: Holders) -> Tensor | None:
        """Return the tensor whose graph alone holds what leads to these: saved by a Python node, or beside it."""
        ends = (end for tensor in tensors for end in holders.ends(tensor))
        return next((root for end in ends if (root := self.root_of_object(end)) is not None), None)

    def _root(self, number: int | None) -> Tensor | None:
        return None if number is None else self._roots[self._outermost(number)]

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
                if (storage := storage_of(held)) is not None:
                    self._storages.setdefault(address(storage), number)
            elif held is not None:
                self._objects[id(held)] = number
            if saved.unpack_hook is not None:
                self._objects[id(saved.unpack_hook)] = number
