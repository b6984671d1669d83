"""Rows in the order of a column, and a table that a click on a heading sorts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..tables import Table
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


def ranks(values: Sequence[Any]) -> list[int | None]:
    """Return the place of each value among the different ones: numbers before words; none for what is not known."""
    keys = [None if value in (None, "") or value != value else _key(value) for value in values]
    places = {key: place for place, key in enumerate(sorted({key for key in keys if key is not None}))}
    return [None if key is None else places[key] for key in keys]


def order(values: Sequence[Any], highest_first: bool = False) -> list[int]:
    """Return the places of these values from the lowest to the highest; what is not known comes at the end."""
    sign = -1 if highest_first else 1
    keyed = [(rank is None, sign * (rank or 0), place) for place, rank in enumerate(ranks(values))]
    return [place for _, _, place in sorted(keyed)]


def latest(rows: Sequence[Row], most: int) -> list[Row]:
    """Those that began last and that of now, in the same order; a file's may be older than their numbers."""
    last = sorted(rows, key=lambda row: (row.present, row.began_s))[-most:]
    kept = {row.key for row in last}
    return [row for row in rows if row.key in kept]


def sortable(table: Table, values: Sequence[Sequence[Any]]) -> str:
    """Return the table for a notebook, whose headings sort it; ``values`` has a column of them for each."""
    places = json.dumps([ranks(column) for column in values])
    return f"{SCROLLED}{replace(table, scrolls=True).html()}<script>{_SCRIPT % places}</script></div>"


def _key(value: Any) -> tuple[bool, float, str]:
    return (False, float(value), "") if isinstance(value, (bool, int, float)) else (True, 0.0, str(value))
