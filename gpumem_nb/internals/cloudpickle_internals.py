"""Undocumented parts of cloudpickle: by which a function of ``__main__`` is made anew, and its variables are filled.

``_make_function`` gets variables that only functions of the same pickle share, and ``_function_setstate`` adds what
they use. So a function that was brought back would not see what cells set later. Both put a dict in place of the module
``__builtins__``.
"""

from __future__ import annotations

import builtins
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from cloudpickle import cloudpickle

CHECKED_WITH = ("3.1.2",)


class IntoMain(pickle.Unpickler):
    """Makes functions of ``__main__`` among its variables; those that are there already keep what they hold."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names."""
        found = super().find_class(module, name)
        return _OURS.get(name, found) if module == cloudpickle.__name__ else found


def _made(code: Any, variables: dict[str, Any], *others: Any) -> FunctionType:
    with _variables() as ours:
        variables = ours if variables.get("__name__") == "__main__" else variables
        made: FunctionType = cloudpickle._make_function(code, variables, *others)
    return made


def _filled(function: FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    with _variables() as variables:
        if function.__globals__ is variables:
            used = state[1]["__globals__"]
            state[1]["__globals__"] = {name: value for name, value in used.items() if name not in variables}
        cloudpickle._function_setstate(function, state)


@contextmanager
def _variables() -> Iterator[dict[str, Any]]:
    variables = vars(sys.modules["__main__"])
    builtin = variables.get("__builtins__", builtins)
    yield variables
    variables["__builtins__"] = builtin


_OURS = {"_make_function": _made, "_function_setstate": _filled}
