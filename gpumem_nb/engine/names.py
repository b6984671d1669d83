"""Variables of cells: those under which they find what is trained, and those of which it was attached."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

# Whether a variable still stands for what was attached by it: a cell may use the name for something else.
_PASSES_FOR: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: hasattr(value, "named_parameters"),
    "optimizer": lambda value: hasattr(value, "step"),
    "scheduler": lambda value: hasattr(value, "step"),
    "loss": callable,
    "metric": callable,
}


class OfferedNames:
    """The toolkit's objects by their names of ``variables``. A name that holds anything else is not its own."""

    def __init__(self, variables: MutableMapping[str, Any]) -> None:
        self._variables = variables
        self._put: dict[str, weakref.ref[Any]] = {}  # weak: a name that was taken over keeps nothing alive

    def offer(self, objects: Mapping[str, Any]) -> list[str]:
        """Put each under its name if that is free or still holds what was put there.

        Returns:
            The names that hold something else.
        """
        for name, value in objects.items():
            if name not in self._variables or self._is_ours(name):
                self._variables[name], self._put[name] = value, weakref.ref(value)
        return [name for name, value in objects.items() if self._variables[name] is not value]

    def withdraw(self) -> None:
        """Take away again what is still where it was put."""
        for name in self._put:
            if self._is_ours(name):
                del self._variables[name]
        self._put.clear()

    def _is_ours(self, name: str) -> bool:
        put = self._put[name]() if name in self._put else None
        return put is not None and self._variables.get(name) is put


class AttachedNames:
    """The variables of cells that were attached, and what they held then."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, Any]] = {}  # by role: the name and its object
        self._said: dict[str, int] = {}  # by role: the id of the object of which it was said that it is another one

    def attached(self, names: Mapping[str, str | None], variables: Mapping[str, Any]) -> None:
        """These are trained from now on, by their roles; none after anything else was loaded."""
        self._held = {role: (name, variables[name]) for role, name in names.items() if name is not None}
        self._said.clear()

    def replaced(self, variables: Mapping[str, Any]) -> str:
        """Say once that variables hold other objects than those attached; empty when there is nothing new to say."""
        other = dict[str, Any]()
        for role, (name, held) in self._held.items():
            value = variables.get(name)
            passes = role not in _PASSES_FOR or _PASSES_FOR[role](value)
            if value is not None and value is not held and passes:
                other[role] = value
        news = {role for role, value in other.items() if self._said.get(role) != id(value)}
        self._said = {role: id(value) for role, value in other.items()}
        if not news:
            return ""
        return other_objects([self._held[role][0] for role in other])


attached_names = AttachedNames()
"""Those of this rank."""


def other_objects(names: Sequence[str]) -> str:
    """Say that variables of these names are not what is trained."""
    *first, last = dict.fromkeys(names)
    listed = f"{', '.join(first)} and {last}" if first else last
    what = "are other objects than those attached" if first else "is another object than the one attached"
    return f"{listed} {what}; attach again to train with {'these' if first else 'it'}: training still uses the old."


def taken(names: Sequence[str]) -> str:
    """Return what is said of names that people hold themselves."""
    listed = ", ".join(names)
    return (
        f"Variables of your own on the ranks stay as they are: {listed}. After `del {listed}` in a %%hvd cell the next "
        "cell finds there what is trained."
    )
