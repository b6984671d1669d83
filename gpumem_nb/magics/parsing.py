"""What all magics share: misuse is told in one sentence, and how ``name=value`` and paths are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics
from IPython.utils.process import arg_split  # type: ignore[attr-defined]

from ..shared.errors import InvalidInput, NoSession

Magic = TypeVar("Magic", bound=Callable[..., Any])


def says_usage(magic: Magic) -> Magic:
    """Misuse of a magic is a ``UsageError``: one sentence, no traceback."""

    @wraps(magic)
    def shown(*args: Any, **kwargs: Any) -> Any:
        try:
            return magic(*args, **kwargs)
        except (InvalidInput, NoSession) as error:
            raise UsageError(str(error)) from None

    return shown  # type: ignore[return-value]


def intermixed(magic: Callable[..., Any], line: str) -> argparse.Namespace:
    """The arguments of a line in which flags may stand among the other words."""
    parsed: argparse.Namespace = magic.parser.parse_intermixed_args(arg_split(line))  # type: ignore[attr-defined]
    return parsed


def pair(text: str) -> tuple[str, str]:
    """``name=value`` as a pair, for argparse."""
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value, such as batch_size=16")
    return name, value


def pairs(args: Any) -> dict[str, str]:
    """All pairs of a line."""
    return dict(args.pairs)


def unquoted(path: str) -> str:
    """A path without the quotes that somebody typed around it."""
    return path[1:-1] if len(path) > 1 and path[0] == path[-1] and path[0] in "\"'" else path


def shell_of(magics: Magics) -> InteractiveShell:
    """The shell that the magics belong to."""
    assert magics.shell is not None
    return magics.shell
