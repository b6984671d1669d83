"""An option: something with a name that people set to a word or a number, in a form that every reader understands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ..errors import InvalidInput, nearest


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """An option: the values that it accepts.

    Attributes:
        help: one line for people.
        choices: the allowed words; empty for a number.
        parse: turns a number given as text or value into the stored value, or raises ``ValueError``.
        allowed: the allowed values in words, for the error message.
        words: what can be written in place of a number, and the value that is stored for it.
        write: a stored number as people type it.
    """

    name: str
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None
    allowed: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[Any], str] = str

    def check(self, value: Any) -> Any:
        """Return the value to store for ``value``, or ``InvalidInput`` saying what is allowed."""
        if self.choices:
            if value not in self.choices:
                raise InvalidInput(f"{self.name}={value!r} is not known: {nearest(str(value), self.choices)}.")
            return value
        if isinstance(value, str) and value.lower() in self.words:
            return self.words[value.lower()]
        if any(value is stored for stored in self.words.values()):
            return value
        assert self.parse is not None
        try:
            return self.parse(value)
        except (TypeError, ValueError, OverflowError):
            raise InvalidInput(f"{self.name}={value!r} cannot be used: it must be {self.allowed}.") from None

    def text(self, value: Any) -> str:
        """Return a stored value as people write it."""
        return next((word for word, stored in self.words.items() if stored == value), self.write(value))


def whole(value: Any) -> int:
    """Return a whole number of at least 1; what is larger than 2**31 is a slip."""
    number = int(value)
    if isinstance(value, bool) or number != float(value) or not 1 <= number <= 2**31:
        raise ValueError(value)
    return number


def not_negative(value: Any) -> float:
    """Return a finite number of at least 0."""
    return 0.0 if not isinstance(value, bool) and float(value) == 0 else positive(value)


def only_words(value: Any) -> NoReturn:
    """No number: what is allowed are words."""
    raise ValueError(value)


def positive(value: Any) -> float:
    """Return a finite number above 0."""
    number = float(value)
    if isinstance(value, bool) or not 0 < number < float("inf"):
        raise ValueError(value)
    return number
