"""Rows in the order of a column, and a table that a click on a heading sorts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

from ..tables import Table
from .columns import Value
from .row import Row

SCROLLED = "<div style='overflow-x: auto'>"  # where it is wider than the notebook
# Runs where notebooks are trusted, and in a page of one's own. Where scripts are taken out the table stands by itself:
# it is this script that makes headings buttons. The only text in it is numbers.
_SCRIPT = """
(script => {
  const table = script.previousElementSibling, places = %s;
  if (!table?.tBodies?.length || table.dataset.sortable) return;
  table.dataset.sortable = "yes";
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "sort by this";
    button.style.cssText = "all: unset; cursor: pointer; text-decoration: underline dotted";
    button.onfocus = () => button.style.outline = "2px solid #E69F00";
    button.onblur = () => button.style.outline = "";
    button.append(...head.childNodes);
    const arrow = document.createElement("span");
    arrow.setAttribute("aria-hidden", "true");
    head.append(button, arrow);
    button.onclick = () => {
      const downwards = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(other => {
        other.removeAttribute("aria-sort");
        if (other.lastChild?.tagName === "SPAN") other.lastChild.textContent = "";
      });
      head.setAttribute("aria-sort", downwards ? "descending" : "ascending");
      arrow.textContent = downwards ? " \\u25be" : " \\u25b4";
      const sign = downwards ? -1 : 1, of = places[column];
      const sorted = rows.map((_, row) => row);
      sorted.sort((a, b) => (of[a] === null) - (of[b] === null) || sign * (of[a] - of[b]) || a - b);
      body.append(...sorted.map(row => rows[row]));
    };
  });
})(document.currentScript);
"""


def order(values: Sequence[Value], highest_first: bool = False) -> list[int]:
    """The places of these values from the lowest to the highest; numbers before words, what is not known at the end."""
    known = [place for place, value in enumerate(values) if not _missing(value)]
    known.sort(key=lambda place: _key(values[place]), reverse=highest_first)
    return known + [place for place, value in enumerate(values) if _missing(value)]


def latest(rows: Sequence[Row], most: int) -> list[Row]:
    """Those that began last and that of now, in the same order; a file's may be older than their numbers."""
    last = sorted(rows, key=lambda row: (row.present, row.began_s))[-most:]
    kept = {row.key for row in last}
    return [row for row in rows if row.key in kept]


def sortable(table: Table, values: Sequence[Sequence[Value]]) -> str:
    """The table for a notebook, whose headings sort it; ``values`` has one for each cell."""
    columns = [_ranks([row[place] for row in values]) for place in range(len(table.headings))]
    return f"{SCROLLED}{replace(table, scrolls=True).html()}<script>{_SCRIPT % json.dumps(columns)}</script></div>"


def _ranks(values: Sequence[Value]) -> list[int | None]:
    """For each value which place it has among the different ones."""
    different = sorted({_key(value) for value in values if not _missing(value)})
    places = {key: place for place, key in enumerate(different)}
    return [None if _missing(value) else places[_key(value)] for value in values]


def _missing(value: Value) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _key(value: Value) -> tuple[bool, float, str]:
    if isinstance(value, (bool, int, float)):
        return (False, float(value), "")
    return (True, 0.0, str(value))
