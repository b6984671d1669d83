"""The memory report: totals per rank, as table, text and HTML."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from ..sample import RankInfo, Reading
from .units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

_HEADINGS = ("rank", "device", "kind", "live", "live peak", "reserved", "reserved peak", "device used", "limit")
_LEFT_ALIGNED = 3  # the columns of words before those of bytes
_MEANING = (
    "Measured now. Live is held by tensors, reserved by the caching allocator (in use or not), device used by "
    "everything on the device; peaks count since the last reset, n/a could not be read."
)
_VIRTUAL = (
    "Virtual: CPU tensors accounted as on a GPU; reserved is modelled after the CUDA caching allocator and is all that "
    "a virtual device has in use."
)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's device and what it read."""

    info: RankInfo
    reading: Reading

    @property
    def kind(self) -> str:
        """``virtual`` or ``real``."""
        return "virtual" if self.info.virtual else "real"

    @property
    def byte_values(self) -> tuple[int | None, ...]:
        """The byte columns, in the order in which they are shown."""
        r = self.reading
        return (r.live, r.live_peak, r.reserved, r.reserved_peak, r.device_used, r.limit)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row in words."""
        return (str(self.info.rank), self.info.device_name, self.kind, *map(format_bytes, self.byte_values))


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Where the bytes are: live, reserved, device and limit of every rank, in rank order."""

    ranks: tuple[RankMemory, ...]

    def frame(self) -> pd.DataFrame:
        """One row per rank, bytes as nullable integers: what could not be read is ``<NA>``."""
        import pandas as pd

        byte_names = tuple(f"{heading.replace(' ', '_')}_bytes" for heading in _HEADINGS[_LEFT_ALIGNED:])
        rows = [(r.info.rank, r.info.host, r.info.device_name, r.kind, *r.byte_values) for r in self.ranks]
        frame = pd.DataFrame(rows, columns=["rank", "host", "device", "kind", *byte_names])
        return frame.astype(dict.fromkeys(byte_names, "Int64"))

    @property
    def sentences(self) -> tuple[str, ...]:
        """What the numbers mean, and what each rank's readings lack."""
        virtual = (_VIRTUAL,) if any(r.info.virtual for r in self.ranks) else ()
        return (_MEANING, *virtual, *dict.fromkeys(r.info.note for r in self.ranks if r.info.note))

    def __str__(self) -> str:
        rows = [_HEADINGS, *(r.cells for r in self.ranks)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(_pad(*cell) for cell in enumerate(zip(row, widths, strict=True))) for row in rows]
        return "\n".join((*(line.rstrip() for line in lines), *self.sentences))

    def _repr_html_(self) -> str:
        head = "".join(f"<th scope='col' style='{_style(i)}'>{name}</th>" for i, name in enumerate(_HEADINGS))
        body = "".join(
            "<tr>" + "".join(f"<td style='{_style(i)}'>{escape(cell)}</td>" for i, cell in enumerate(r.cells)) + "</tr>"
            for r in self.ranks
        )
        notes = "".join(f"<p style='{_NOTE_STYLE}'>{escape(sentence)}</p>" for sentence in self.sentences)
        return f"<table style='{_TABLE_STYLE}'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


# JupyterLab's theme variables, with values for viewers that have none.
_TABLE_STYLE = (
    "color: var(--jp-ui-font-color1, inherit); background: var(--jp-layout-color1, transparent); "
    "border-collapse: collapse; font-variant-numeric: tabular-nums"
)
_NOTE_STYLE = "color: var(--jp-ui-font-color2, inherit); margin: 4px 8px"


def _style(column: int) -> str:
    side = "left" if column < _LEFT_ALIGNED else "right"
    return f"text-align: {side}; padding: 2px 8px; border-bottom: 1px solid var(--jp-border-color2, currentColor)"


def _pad(column: int, cell: tuple[str, int]) -> str:
    text, width = cell
    return text.ljust(width) if column < _LEFT_ALIGNED else text.rjust(width)
