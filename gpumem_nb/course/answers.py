"""The forms in which exercises are answered. Each reads what was typed, or says in a sentence what is expected."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from ..report.run_summary import Run
from ..shared.errors import InvalidInput, nearest
from ..shared.units import is_variable, parse_size

_DIGITS = r"(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_NUMBER = re.compile(rf"[~≈]?\s*([-+]?{_DIGITS})\s*(?:/\s*({_DIGITS}))?\s*(.*)", re.IGNORECASE | re.DOTALL)
_PLURAL = re.compile(r"(?<=ss)es$|(?<!s)s$")
_LEAST_BYTES = 1024
TIMES = {"": 1.0, "x": 1.0, "×": 1.0, "times": 1.0}
"""Units of a :class:`Number` that is a ratio."""
PERCENT = {"": 1.0, "%": 1.0, "percent": 1.0}
SECONDS = {"": 1.0, "s": 1.0, "seconds": 1.0, "ms": 0.001, "milliseconds": 0.001}
RATE = {"": 1.0, "samples/s": 1.0, "samples per second": 1.0}
BYTES_EACH = {"": 1.0, "b": 1.0, "byte": 1.0, "bytes": 1.0, "bit": 0.125, "bits": 0.125}
"""Units of a :class:`Number` of bytes for each parameter; bits are read as what they are."""


def missing(answer: object) -> bool:
    """Return whether nothing was answered yet: the cell still has its ``...``, or the magic no answer."""
    return answer is None or answer is ... or (isinstance(answer, str) and answer.strip() in ("", "...", "…"))


class Answer(ABC):
    """A form of answers."""

    __slots__ = ()

    @property
    @abstractmethod
    def expected(self) -> str:
        """Return what is expected in words, with an example."""

    @abstractmethod
    def read(self, given: Any) -> Any:
        """Return the answer for the judge.

        Raises:
            InvalidInput: it is not of this form.
        """

    @property
    def takes_values(self) -> bool:
        """Return whether a word in its place names a variable of the notebook that holds the answer."""
        return True

    @property
    def nothing(self) -> bool:
        """Return whether the check looks at the session, and no answer is given."""
        return False

    def _refused(self, given: object) -> InvalidInput:
        kind = f"{given!r:.60}" if isinstance(given, str | Real) else f"An object of type {type(given).__name__}"
        return InvalidInput(f"{kind} is not an answer here: give {self.expected}.")


@dataclass(frozen=True, slots=True)
class Nothing(Answer):
    """No answer: the check looks at the session."""

    @property
    def expected(self) -> str:
        """Return that nothing is."""
        return "no answer (the check looks at the session)"

    @property
    def nothing(self) -> bool:
        """Return that there is none."""
        return True

    def read(self, given: Any) -> None:
        """Refuse anything but nothing; raises ``InvalidInput``."""
        if not missing(given):
            raise self._refused(given)


@dataclass(frozen=True, slots=True)
class Size(Answer):
    """Bytes: text with a unit, or a number of bytes."""

    example: str = "41 MiB"

    @property
    def expected(self) -> str:
        """Return how sizes are typed."""
        return f"a size with its unit, such as '{self.example}' ('41 MB' and 41e6 are bytes, too)"

    def read(self, given: Any) -> int:
        """Return bytes; raises ``InvalidInput``, also for what is so small that a unit was forgotten."""
        if isinstance(given, Real) and not isinstance(given, bool):
            number = float(given)
            size = round(number) if math.isfinite(number) else 0
        elif isinstance(given, str):
            try:
                size = parse_size(given.strip().lstrip("~≈"))
            except InvalidInput:
                raise self._refused(given) from None
        else:
            raise self._refused(given)
        if size < _LEAST_BYTES:
            raise InvalidInput(f"{given!r} would be {size} bytes: give {self.expected}.")
        return size


@dataclass(frozen=True, slots=True)
class Number(Answer):
    """A number, alone or as text with a unit; a fraction such as ``1/4`` is one, too.

    Attributes:
        example: how it may be typed.
        units: by their words in lower case, what a number with them is multiplied by.
    """

    example: str
    units: Mapping[str, float] = field(default_factory=lambda: TIMES)

    @property
    def expected(self) -> str:
        """Return how it is typed."""
        return f"a number, such as {self.example}"

    def read(self, given: Any) -> float:
        """Return the number in the first of the units; raises ``InvalidInput``."""
        if isinstance(given, Real) and not isinstance(given, bool) and math.isfinite(given):
            return float(given)
        found = _NUMBER.fullmatch(given.strip()) if isinstance(given, str) else None
        if found is None or (factor := self.units.get(found[3].strip().lower())) is None:
            raise self._refused(given)
        if not (below := float(found[2] or 1)):
            raise self._refused(given)
        return float(found[1]) / below * factor


@dataclass(frozen=True, slots=True)
class Word(Answer):
    """One of some words, such as a category of the ledger or a knob; case and a plural's ending do not matter."""

    allowed: tuple[str, ...]

    @property
    def expected(self) -> str:
        """Return all of them."""
        return f"one of: {', '.join(self.allowed)}"

    @property
    def takes_values(self) -> bool:
        """Return that the word is the answer."""
        return False

    def read(self, given: Any) -> str:
        """Return the word as it is listed; raises ``InvalidInput`` with the nearest one."""
        if not isinstance(given, str):
            raise self._refused(given)
        for word in self.allowed:
            if _plain(word) == _plain(given):
                return word
        raise InvalidInput(f"{given!r:.60} is not an answer here: {nearest(given, self.allowed)}.")


@dataclass(frozen=True, slots=True)
class Words(Answer):
    """Some of some words, in any order: as a list, or as text with commas between them."""

    allowed: tuple[str, ...]

    @property
    def expected(self) -> str:
        """Return all of them."""
        return f"a list of some of: {', '.join(self.allowed)}"

    @property
    def takes_values(self) -> bool:
        """Return that the word is the answer."""
        return False

    def read(self, given: Any) -> frozenset[str]:
        """Return the words as they are listed; raises ``InvalidInput``."""
        if isinstance(given, str):
            given = [part.strip() for part in re.split(r"[,;+]|\band\b", given) if part.strip()]
        if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
            raise self._refused(given)
        return frozenset(map(Word(self.allowed).read, given))


@dataclass(frozen=True, slots=True)
class Variable(Answer):
    """The name of a variable that a cell has defined on the ranks; ``what`` says what it holds, such as a function."""

    what: str
    example: str

    @property
    def expected(self) -> str:
        """Return what is named."""
        return f"the name of {self.what} on the ranks, as text such as '{self.example}'"

    @property
    def takes_values(self) -> bool:
        """Return that the name is the answer."""
        return False

    def read(self, given: Any) -> str:
        """Return the name; raises ``InvalidInput``."""
        if not is_variable(given):
            raise self._refused(given)
        return str(given)


@dataclass(frozen=True, slots=True)
class RunAnswer(Answer):
    """What ``session.train()`` or ``%hvd_train`` gave."""

    @property
    def expected(self) -> str:
        """Return how one gets it."""
        return "the run itself, as in: run = session.train(20)"

    def read(self, given: Any) -> Run:
        """Return the run; raises ``InvalidInput``."""
        if not isinstance(given, Run):
            raise self._refused(given)
        return given


def _plain(word: str) -> str:
    """Return a word without what does not matter."""
    return _PLURAL.sub("", " ".join(re.split(r"[\s_]+", word.strip().lower())))


def in_words(answer: object) -> str:
    """Return an answer that was read, as it is kept."""
    if isinstance(answer, frozenset):
        return ", ".join(sorted(answer))
    return "" if answer is None else str(answer)[:200]
