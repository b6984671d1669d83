"""Reports: tables and sentences as text for a terminal, as HTML for notebooks and pages, and as data.

However narrow a notebook is, HTML made here breaks no word, and no command that is to be typed and fits a line; a table
that is wider scrolls.
A press on a command copies it. JupyterLab takes that away from notebooks that it does not trust, as all scripts.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

# JupyterLab's theme variables, with values for viewers that have none.
_TABLE_STYLE = (
    "color: var(--jp-ui-font-color1, inherit); background: var(--jp-layout-color1, transparent); "
    "border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 4px 0 8px"
)
_CAPTION_STYLE = "color: var(--jp-ui-font-color1, inherit); text-align: left; font-weight: 600; padding: 4px 8px"
_CELL_STYLE = "padding: 2px 8px; border-bottom: 1px solid var(--jp-border-color2, currentColor)"
_LONG, _SHORT = 32, 16  # characters
# Said explicitly, because notebooks have rules of their own: JupyterLab breaks printed words anywhere.
_WHOLE_WORDS = "word-break: normal; overflow-wrap: normal; hyphens: manual"
_SCROLLS = f"overflow-x: auto; max-width: 100%; {_WHOLE_WORDS}"
_NOTE_STYLE = f"color: var(--jp-ui-font-color2, inherit); margin: 4px 8px; {_SCROLLS}"
# As JupyterLab shows the text of other outputs, which stand above and below.
_WORDS_STYLE = (
    "margin: 0; padding-left: 1ch; font-size: var(--jp-code-font-size, inherit); "
    f"line-height: var(--jp-code-line-height, inherit); white-space: pre-wrap; {_SCROLLS}"
)
_COMMAND_STYLE = "white-space: nowrap"
# In sentences, where a whole line is too narrow for a command, it takes several: what is out of sight is not read.
_COMMAND_IN_WORDS_STYLE = "display: inline-block; max-width: 100%; box-sizing: border-box; white-space: pre-wrap"
# The old way to copy: unlike navigator.clipboard it works on servers without https, too.
_COPIES = (
    """onmouseover="this.title='press to copy';this.style.cursor='copy'" tabindex="0" """
    """onkeydown="if(event.key=='Enter'){event.stopPropagation();this.click()}" """
    """onclick="getSelection().selectAllChildren(this);if(document.execCommand('copy'))this.title='copied'\""""
)

# A command with its arguments, a knob with its value, and a path: without the full stop or bracket that comes after.
_PAIR = r"[A-Za-z_]\w*=[^\s;()]*[^\s.,:;()…?]"
_PATH = r"(?<![\w.:/<])~?/[\w.+@~-]+(?:/[\w.+@~-]+)*(?<![.])"
_ARGUMENT = rf"(?:{_PAIR}|--?[a-z][\w-]*|\d+(?:\.\d+)?(?![./-]\w)|[A-Z]{{2,}}|[\w.~/-]*[\d./-][\w.,~/-]*\w)"
_MAGIC = r"%{1,2}(?:hvd_\w+|hvd|env|lesson(?: check| hint| status| reset)?)\b"
_COMMAND = re.compile(rf"{_MAGIC}(?: {_ARGUMENT}(?![\w…]))*|(?<![\w.]){_PAIR}|{_PATH}")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells in words, which may have several lines.

    Attributes:
        title: above the table; may be empty.
        headings: of the columns.
        rows: as many cells each as there are headings.
        words: headings of the columns that are set to the left; all others are set to the right.
        colours: the CSS colours of cells by their heading and what they say exactly, in a notebook only.
        hints: what is said of a heading while the mouse is over it, in a notebook only.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[str]
    colours: Mapping[tuple[str, str], str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [line for row in (self.headings, *self.rows) for line in _lines(row)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text = ["  ".join(self._padded(*cell) for cell in enumerate(zip(row, widths, strict=True))) for row in rows]
        return "\n".join(([self.title] if self.title else []) + [line.rstrip() for line in text])

    def html(self, scrolls: bool = False) -> str:
        """Return the same for a notebook; ``scrolls``: where it may be wider than that, and stands in what scrolls."""
        caption = f"<caption style='{_CAPTION_STYLE}'>{escape(self.title)}</caption>" if self.title else ""
        head = "".join(
            f"<th scope='col'{self._hint(name)} style='{style}'>{escape(name)}</th>"
            for name, style in self._cells(self.headings, scrolls)
        )
        lines = [
            "".join(
                f"<td style='{style}'>{marked(cell, _COMMAND_STYLE)}</td>" for cell, style in self._cells(row, scrolls)
            )
            for row in self.rows
        ]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        table = f"<table style='{_TABLE_STYLE}'>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return table if scrolls else f"<div style='{_SCROLLS}'>{table}</div>"

    def _hint(self, heading: str) -> str:
        return f" title='{escape(self.hints[heading])}'" if heading in self.hints else ""

    def _padded(self, column: int, cell: tuple[str, int]) -> str:
        text, width = cell
        return text.ljust(width) if self.headings[column] in self.words else text.rjust(width)

    def _cells(self, row: tuple[str, ...], scrolls: bool) -> Iterator[tuple[str, str]]:
        """Yield each cell with its style."""
        for cell, heading in zip(row, self.headings, strict=True):
            side = "left" if heading in self.words else "right"
            breaks = "pre-line" if heading in self.words and len(cell) > _SHORT else "pre"
            style = f"text-align: {side}; white-space: {breaks}; {_CELL_STYLE}"
            least_em = _LONG / 2 if scrolls and len(cell) > _LONG else min(len(cell), _LONG) / 3
            if breaks == "pre-line":
                style += f"; min-width: {least_em:.3g}em"  # beside many columns it would become one word wide
            if colour := self.colours.get((heading, cell)):
                style += f"; color: {colour}; font-weight: 600"
            yield cell, style


def _lines(row: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the lines of text that a row takes."""
    return zip_longest(*(cell.split("\n") for cell in row), fillvalue="")


def marked(text: str, style: str = _COMMAND_IN_WORDS_STYLE) -> str:
    """Return text as HTML, in which commands and settings that are to be typed stay whole; a press copies one.

    ``style``: that of a command; by default one that is longer than a line goes on in the next.
    """
    parts, end = list[str](), 0
    for found in _COMMAND.finditer(text):
        parts += (
            escape(text[end : found.start()]),
            f"<code style='{style}' {_COPIES}>{escape(found[0])}</code>",
        )
        end = found.end()
    return "".join([*parts, escape(text[end:])])


def notes_html(sentences: Sequence[str]) -> str:
    """Sentences under a table."""
    return "".join(f"<p style='{_NOTE_STYLE}'>{marked(sentence)}</p>" for sentence in sentences)


def words_html(text: str) -> str:
    """Lines of text as a notebook prints them, but for whole words."""
    return f"<pre style='{_WORDS_STYLE}'>{marked(text)}</pre>"


class Words:
    """What is shown as it reads: its ``__str__``, in a notebook with whole words."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return words_html(str(self))


class Report(ABC):
    """A result to show: tables and sentences in order, and the same as data.

    A report defines both; how they look is decided here.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def shown(self) -> Sequence[Table | str]:
        """Return the tables and sentences to show, in order."""

    @property
    @abstractmethod
    def records(self) -> Iterable[Mapping[str, Any]]:
        """Return the result as rows of data, each by the names of columns."""

    def frame(self) -> pd.DataFrame:
        """Return the report as a pandas DataFrame, with a row for each of its records."""
        import pandas as pd  # takes long to import

        return pd.DataFrame(list(self.records))

    def __str__(self) -> str:
        blocks = (list(block) for _, block in groupby(self.shown, key=_by_itself))
        return "\n\n".join("\n".join(map(str, block)) for block in blocks)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return shown_html(self.shown)


def shown_html(shown: Sequence[Table | str]) -> str:
    """Tables and sentences for a notebook."""
    return "".join(part.html() if isinstance(part, Table) else notes_html([part]) for part in shown)


def _by_itself(part: Table | str) -> int:
    """Another number for each table, and 0 for sentences, which stand together."""
    return id(part) if isinstance(part, Table) else 0


BEGIN = b"<!DOCTYPE html>\n<!-- written by gpumem_nb -->\n"
_CSS = files(__package__).joinpath("page.css").read_text(encoding="utf-8")


def page(title: str, sections: Sequence[str], css: str = "") -> str:
    """HTML of a whole page.

    Args:
        title: in words, which are escaped.
        sections: HTML, one below the other.
        css: more style.
    """
    body = "".join(f"<section>{section}</section>\n" for section in sections)
    return (
        f"{BEGIN.decode()}<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_CSS}{css}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )
