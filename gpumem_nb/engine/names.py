"""Names under which cells find what is trained, without ever taking one from whoever writes the cells."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any


class OfferedNames:
    """What the toolkit has put under which name of ``variables``. A name that holds anything else is not its own."""

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


def taken(names: Sequence[str]) -> str:
    """What is said of names that people hold themselves."""
    listed = ", ".join(names)
    return (
        f"Variables of your own on the ranks stay as they are: {listed}. After `del {listed}` in a %%hvd cell the next "
        "cell finds there what is trained."
    )
