"""Completion behind ``%hvd_*``: flags and their values, names of workloads and options, knobs and their values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult
from IPython.core.magic_arguments import argument

from .kernel.policy import RULES
from .shared.knobs import KNOBS
from .shared.values import Option
from .workloads.catalog import CATALOG

ROLES = ("model", "loss", "data", "optimizer", "scheduler", "eval_data", "metric", "seed")
"""What ``%hvd_attach`` takes, each with ``=`` and a variable, the seed with a number."""


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


_PAIRS: dict[str, Callable[[list[str], str], list[str]]] = {
    "hvd_set": _knobs,
    "hvd_predict": _predicted,
    "hvd_load": _workloads,
    "hvd_attach": _roles,
}
