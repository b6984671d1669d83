"""Which model a row is of: a ready-made workload with other options is another model under the same name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .row import Row


def named(rows: Sequence[Row]) -> Callable[[Row], str]:
    """What a row's workload is called beside these rows: with the options, or the size, in which they differ."""
    namesakes: dict[str, list[Row]] = {}
    for row in rows:
        namesakes.setdefault(row.workload, []).append(row)
    differ = {name: _differ(alike) for name, alike in namesakes.items()}

    def name_of(row: Row) -> str:
        options, by_size = differ.get(row.workload, ((), False))
        own = dict(row.options)
        parts = [f"{option}={own[option]:g}" for option in options if option in own]
        if by_size and row.parameters is not None:
            parts.append(f"{row.parameters:,} parameters")
        return f"{row.workload}({', '.join(parts)})" if parts else row.workload

    return name_of


def options_text(row: Row) -> str:
    """The options of a ready-made workload as people type them."""
    return " ".join(f"{name}={value:g}" for name, value in row.options)


def _differ(rows: Sequence[Row]) -> tuple[tuple[str, ...], bool]:
    """The options that are not the same in all of these rows, and whether sizes differ where options do not."""
    every = [dict(row.options) for row in rows]
    names = dict.fromkeys(name for options in every for name in options)
    options = tuple(name for name in names if len({one.get(name) for one in every}) > 1)
    sizes: dict[tuple[tuple[str, float], ...], set[int | None]] = {}
    for row in rows:
        sizes.setdefault(row.options, set()).add(row.parameters)
    return options, any(len(found) > 1 for found in sizes.values())
