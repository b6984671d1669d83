"""Templates: text of which lines are left out.

A line that ends with ``#? CONDITION`` is there where that holds, without the mark; so are the lines between
``#? if CONDITION`` and ``#? end``. A condition has the names of flags, with ``and``, ``or``, ``not`` and brackets.
``{{name}}`` is replaced; where it stands alone in a line it may be several lines, or none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from importlib.resources import files

_MARK = "#? "
_IF, _END = _MARK + "if ", _MARK + "end"
_VALUE = re.compile(r"\{\{(\w+)\}\}")
_MOST_BLANK = 2  # lines in a row


def render(name: str, flags: Collection[str], values: Mapping[str, str]) -> str:
    """Return the template of that name in ``templates/``, with these flags set; ends with a newline."""
    template = files(__package__).joinpath("templates", f"{name}.py.txt").read_text(encoding="utf-8")
    parts = _filled(_chosen(template.splitlines(), frozenset(flags)), values)
    return "\n".join(_fewer_blank(parts)).strip("\n") + "\n"


def as_on_ranks(path: str, begins: str) -> str:
    """Return what ranks run, from the line that begins so, without marks for checkers."""
    code = files(__package__.partition(".")[0]).joinpath("engine", path).read_text(encoding="utf-8")
    return re.sub(r"  # (type: ignore|noqa).*", "", code[code.index(f"\n{begins}") :])


def _chosen(lines: list[str], flags: frozenset[str]) -> Iterator[str]:
    holds = [True]
    for line in lines:
        said = line.strip()
        if said.startswith(_IF):
            holds.append(holds[-1] and _true(said.removeprefix(_IF), flags))
        elif said == _END:
            holds.pop()
        elif holds[-1]:
            text, mark, condition = line.rpartition("  " + _MARK)
            if not mark:
                yield line
            elif _true(condition, flags):
                yield text
    assert len(holds) == 1, "an #? if without its #? end"


def _filled(lines: Iterator[str], values: Mapping[str, str]) -> Iterator[str]:
    for line in lines:
        alone = _VALUE.fullmatch(line.strip())
        if alone:
            indent, value = line[: len(line) - len(line.lstrip())], values[alone[1]].strip("\n")
            if value:  # as a whole: strings in it keep their lines
                yield "\n".join(indent + one if one else "" for one in value.split("\n"))
        else:
            yield _VALUE.sub(lambda found: values[found[1]], line)


def _fewer_blank(parts: Iterator[str]) -> Iterator[str]:
    """Yield the parts without the gaps of those that are left out."""
    blank = 0
    for part in parts:
        blank = 0 if part else blank + 1
        if blank <= _MOST_BLANK:
            yield part


def _true(condition: str, flags: frozenset[str]) -> bool:
    """Return whether a condition of our own templates holds."""
    words = re.findall(r"\w+|[()]", condition)
    return bool(eval(" ".join(word if word in _OPERATORS else str(word in flags) for word in words)))


_OPERATORS = {"and", "or", "not", "(", ")"}
