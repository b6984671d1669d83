"""Options and values: named words and numbers that people set, immutable and checked on the way in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from .errors import InvalidInput, nearest


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """An option: the values that it accepts.

    Attributes:
        help: one line for people.
        choices: the allowed words; empty for a number.
        means: what each of these words does, explained briefly for newcomers.
        parse: turns a number given as text or value into the stored value, or raises ``ValueError``.
        allowed: the allowed values in words, for the error message.
        words: what can be written in place of a number, and the value that is stored for it.
        write: a stored number as people type it.
    """

    name: str
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    means: Mapping[str, str] = field(default_factory=dict)
    parse: Callable[[Any], Any] | None = None
    allowed: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[Any], str] = str

    def check(self, value: Any) -> Any:
        """Return the value to store for ``value``, or ``InvalidInput`` saying what is allowed."""
        if self.choices:
            if not (isinstance(value, str) and value in self.choices):
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


def whole_or_0(value: Any) -> int:
    """Return a whole number of at least 0."""
    return 0 if value in (0, "0") and value is not False else whole(value)


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


Kind = TypeVar("Kind", bound="Values")


TAKEN = {"self"}
"""Names that no option can have, because values use them for themselves."""


class Values:
    """One value for each option of :attr:`table`, read as attributes; compared and hashed by value.

    Only what differs from the defaults is stored. So values stay equal when an option is added to the table, and few
    bytes travel when they are sent to another process.
    """

    __slots__ = ("_changed",)
    table: ClassVar[Mapping[str, Option]]
    _changed: dict[str, Any]

    def __init_subclass__(cls) -> None:
        TAKEN.update(dir(cls))

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_changed", self._with({}, values))

    def replace(self, /, **values: Any) -> Self:
        """Return a copy with some values changed; an unknown name raises ``InvalidInput`` with the nearest one."""
        return _restored(type(self), self._with(self._changed, values))

    def as_dict(self) -> dict[str, Any]:
        """Return all values by name, for tables, files and json."""
        return {name: getattr(self, name) for name in self.table}

    def changed_from(self, other: Self) -> dict[str, Any]:
        """Return what differs from ``other`` by name, with the value it has here."""
        return {name: getattr(self, name) for name in self.table if getattr(self, name) != getattr(other, name)}

    def _with(self, changed: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        merged = {name: value for name, value in changed.items() if name in self.table}
        for name, value in values.items():
            option = self.table.get(name)
            if option is None:
                raise InvalidInput(f"There is no knob {name!r}: {nearest(name, self.table)}.")
            merged[name] = option.check(value)
        return {name: value for name, value in merged.items() if value != self.table[name].default}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            if name in self._changed:
                return self._changed[name]
            if name in self.table:
                return self.table[name].default
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} cannot be changed. Make others with replace({name}=...).")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.table]

    def __eq__(self, other: object) -> bool:
        return self._changed == other._changed if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(self._changed.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self._changed)

    def __str__(self) -> str:
        return " ".join(f"{name}={option.text(getattr(self, name))}" for name, option in self.table.items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"


def _restored(kind: type[Kind], changed: dict[str, Any]) -> Kind:
    """Values that have been checked already."""
    values = object.__new__(kind)
    object.__setattr__(values, "_changed", changed)
    return values
