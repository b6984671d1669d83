"""Undocumented parts of cloudpickle: by which a function of ``__main__`` is made anew, and its variables are filled.

``_make_function`` gets variables that only functions of the same pickle share, and ``_function_setstate`` adds what
they use. So a function that was brought back would not see what cells set later.
"""

from __future__ import annotations

import pickle
import sys
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
    if variables.get("__name__") == "__main__":
        variables = vars(sys.modules["__main__"])
    made: FunctionType = cloudpickle._make_function(code, variables, *others)
    return made


def _filled(function: FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    variables = vars(sys.modules["__main__"])
    if function.__globals__ is variables:
        used = state[1]["__globals__"]
        state[1]["__globals__"] = {name: value for name, value in used.items() if name not in variables}
    cloudpickle._function_setstate(function, state)


_OURS = {"_make_function": _made, "_function_setstate": _filled}
