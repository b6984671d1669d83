"""Shared parts of all magics: one sentence for misuse, and the reading of ``name=value`` and paths."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics
from IPython.core.magic_arguments import argument
from IPython.utils.process import arg_split  # type: ignore[attr-defined]

from ..shared.errors import InvalidInput, NoSession, nearest

_UNKNOWN = "unrecognized arguments: "
Magic = TypeVar("Magic", bound=Callable[..., Any])


def says_usage(magic: Magic) -> Magic:
    """Misuse of a magic is a ``UsageError``: one sentence, no traceback."""

    @wraps(magic)
    def shown(magics: Magics, *args: Any, **kwargs: Any) -> Any:
        try:
            return magic(magics, *args, **kwargs)
        except (InvalidInput, NoSession) as error:
            raise UsageError(str(error)) from None
        except UsageError as error:
            raise UsageError(_with_what_is_allowed(str(error), magic.__name__, magics)) from None

    return shown  # type: ignore[return-value]


def _with_what_is_allowed(message: str, name: str, magics: Magics) -> str:
    """Return argparse's message about unknown words, with the options there are."""
    said, _, words = message.partition(_UNKNOWN)
    if said or not words:
        return message
    declared = [one for one in getattr(magics, name).decorators if isinstance(one, argument)]
    options = [word for one in reversed(declared) for word in one.args if word.startswith("-")]
    sign = "%" if shell_of(magics).find_line_magic(name) else "%%"
    allowed = nearest(words.split()[0], options) if options else "it takes none"
    return f"{message} ({allowed}; help: {sign}{name}?)"


def intermixed(magic: Callable[..., Any], line: str) -> argparse.Namespace:
    """Return the arguments of a line in which flags may stand among the other words."""
    parsed: argparse.Namespace = magic.parser.parse_intermixed_args(arg_split(line))  # type: ignore[attr-defined]
    return parsed


def pair(text: str) -> tuple[str, str]:
    """``name=value`` as a pair, for argparse."""
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value, such as batch_size=16")
    return name, value


def pairs(args: Any) -> dict[str, str]:
    """Return all pairs of a line."""
    return dict(args.pairs)


def unquoted(path: str) -> str:
    """Return a path without the quotes that were typed around it."""
    return path[1:-1] if len(path) > 1 and path[0] == path[-1] and path[0] in "\"'" else path


def shell_of(magics: Magics) -> InteractiveShell:
    """Return the shell that the magics belong to."""
    assert magics.shell is not None
    return magics.shell
