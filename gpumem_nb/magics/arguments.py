"""Arguments of magics: how they are declared and read, one sentence for misuse, and what completion offers for them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.utils.process import arg_split  # type: ignore[attr-defined]

from ..course.lessons import LESSONS
from ..kernel.policy import RULES
from ..shared.errors import InvalidInput, NoSession, nearest
from ..shared.knobs import KNOBS
from ..shared.values import Option
from ..ui.cells import for_eyes
from ..workloads.catalog import CATALOG

_UNKNOWN = "unrecognized arguments: "
_NO_NUMBER = re.compile(r"argument (.*): invalid (int|float) value: (.*)", re.DOTALL)
_NUMBERS = {"int": "a whole number, such as 4", "float": "a number, such as 60"}
Read = Callable[[Callable[..., Any], str], argparse.Namespace]


def words_of(line: str) -> list[str]:
    """Return the words of a line, without the quotes that were typed around them."""
    return [unquoted(word) for word in arg_split(line)]


def plain(magic: Callable[..., Any], line: str) -> argparse.Namespace:
    """Return the arguments of a line."""
    parsed: argparse.Namespace = magic.parser.parse_args(words_of(line))  # type: ignore[attr-defined]
    return parsed


def intermixed(magic: Callable[..., Any], line: str) -> argparse.Namespace:
    """Return the arguments of a line in which flags may stand among the other words."""
    parsed: argparse.Namespace = magic.parser.parse_intermixed_args(words_of(line))  # type: ignore[attr-defined]
    return parsed


def magic(*, cell: bool = False, read: Read = plain) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a method as the magic of its name, called with what its line says.

    Its arguments are declared below, by ``@argument``. Misuse is one sentence without a traceback: a ``UsageError``,
    in a notebook an ``InvalidInput``, which is shown there with whole words.
    """

    def declare(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(magics: Magics, line: str, *cells: str) -> Any:
            try:
                return method(magics, _read(read, run, line), *cells)
            except (InvalidInput, NoSession) as error:
                raise _misuse(str(error)) from None
            except UsageError as error:
                raise _misuse(_with_what_is_allowed(str(error), method.__name__, magics)) from None

        declared: Callable[..., Any] = magic_arguments()((cell_magic if cell else line_magic)(run))
        return declared

    return declare


def _misuse(said: str) -> Exception:
    return InvalidInput(said) if for_eyes() else UsageError(said)


def _read(read: Read, magic: Callable[..., Any], line: str) -> argparse.Namespace:
    try:
        return read(magic, line)
    except ValueError:  # IPython's, as it splits the line
        raise UsageError(f"A quotation mark is opened and not closed: {line}") from None


def _with_what_is_allowed(message: str, name: str, magics: Magics) -> str:
    """Return argparse's message about a number, or about unknown words with the options there are."""
    if number := _NO_NUMBER.fullmatch(message):
        return f"{number[1]} must be {_NUMBERS[number[2]]} (got {number[3]})"
    said, _, words = message.partition(_UNKNOWN)
    if said or not words:
        return message
    declared = [one for one in getattr(magics, name).decorators if isinstance(one, argument)]
    options = [word for one in reversed(declared) for word in one.args if word.startswith("-")]
    sign = "%" if shell_of(magics).find_line_magic(name) else "%%"
    allowed = nearest(words.split()[0], options) if options else "it takes none"
    return f"{message} ({allowed}; help: {sign}{name}?)"


class Pair:
    """The type of an argument of the form ``name=value``, such as ``example``."""

    def __init__(self, example: str) -> None:
        self._example = example

    def __call__(self, text: str) -> tuple[str, str]:
        """Return name and value, as argparse asks of a type."""
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value, such as {self._example}")
        return name, unquoted(value)


def pairs(args: Any) -> dict[str, str]:
    """Return all pairs of a line."""
    return dict(args.pairs)


def unquoted(word: str) -> str:
    """Return a word without the quotes that were typed around it."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'" else word


def shell_of(magics: Magics) -> InteractiveShell:
    """Return the shell that the magics belong to."""
    assert magics.shell is not None
    return magics.shell


ROLES = ("model", "loss", "data", "optimizer", "scheduler", "eval_data", "metric", "trainer", "seed")
"""What ``%hvd_attach`` takes, each with ``=`` and a variable, the seed with a number."""


COURSE_VERBS = {"check": "1.2 41 MB", "hint": "1.2", "status": "1", "reset": "1"}
"""What ``%lesson`` does, each with an example of what comes after it."""


class Offered:
    """The type of an argument that takes text of which some is offered; the session says whether it can be used.

    Args:
        words: what is offered, or what gives that when it is asked for.
    """

    def __init__(self, words: Collection[str] | Callable[[], Collection[str]]) -> None:
        self._words = words

    @property
    def words(self) -> Collection[str]:
        """Return what is offered now."""
        return self._words() if callable(self._words) else self._words

    def __call__(self, text: str) -> str:
        """Return what argparse asks of a type."""
        return text


class Completion:
    """One of IPython's matchers.

    Args:
        magics: functions by the name of their magic, declared with :mod:`IPython.core.magic_arguments`.
    """

    def __init__(self, magics: Mapping[str, Callable[..., Any]]) -> None:
        self._arguments = {
            name: [decorator for decorator in magic.decorators if isinstance(decorator, argument)]  # type: ignore[attr-defined]
            for name, magic in magics.items()
        }

    def __call__(self, context: CompletionContext) -> SimpleMatcherResult:
        """Return what IPython offers where the cursor is; on a line of ours nothing else, such as Python's names."""
        line = context.text_until_cursor.lstrip()
        found = [SimpleCompletion(word, type="magic") for word in self.offered(line)]
        return {"completions": found, "suppress": bool(found), "matched_fragment": line.split(" ")[-1]}

    def offered(self, line: str) -> list[str]:
        """Return the words that can stand at the end of a line."""
        words = line.split(" ")
        magic, before, word = words[0].lstrip("%"), words[1:-1], words[-1]
        if len(words) < 2 or magic not in self._arguments:
            return []
        return [candidate for candidate in self._candidates(magic, before, word) if candidate.startswith(word)]

    def _candidates(self, magic: str, before: list[str], word: str) -> list[str]:
        declared = self._arguments.get(magic, [])
        flags = {name: one for one in declared for name in one.args if name.startswith("-")}
        previous = flags.get(before[-1]) if before else None
        if previous and "action" not in previous.kwds:
            kind = previous.kwds.get("type")
            return list(kind.words) if isinstance(kind, Offered) else []
        pairs = _PAIRS.get(magic)
        return [*(pairs(before, word) if pairs else []), *flags]


def _knobs(_: list[str], word: str) -> list[str]:
    known: dict[str, Option] = {**KNOBS, **RULES}
    name, equals, _value = word.partition("=")
    if not equals:
        return [f"{name}=" for name in known]
    return [f"{name}={value}" for value in (*known[name].choices, *known[name].words)] if name in known else []


def _predicted(before: list[str], word: str) -> list[str]:
    loaded = next((entry for entry in before if entry in CATALOG), None)
    if loaded:
        return [*_knobs(before, word), *(f"{option}=" for option in CATALOG[loaded].options)]
    return [*_knobs(before, word), *CATALOG]


def _workloads(before: list[str], _: str) -> list[str]:
    loaded = next((entry for entry in before if entry in CATALOG), None)
    return [f"{option}=" for option in (*CATALOG[loaded].options, "seed")] if loaded else list(CATALOG)


def _roles(_: list[str], __: str) -> list[str]:
    return [f"{role}=" for role in ROLES]


def _course(before: list[str], _: str) -> list[str]:
    if not before:
        return [*COURSE_VERBS, *LESSONS]
    if len(before) == 1 and before[0] in ("check", "hint"):
        return [one.number for content in LESSONS.values() for one in content.exercises]
    return [*LESSONS] if len(before) == 1 and before[0] in COURSE_VERBS else []


_PAIRS: dict[str, Callable[[list[str], str], list[str]]] = {
    "hvd_set": _knobs,
    "hvd_predict": _predicted,
    "hvd_load": _workloads,
    "hvd_attach": _roles,
    "lesson": _course,
}
