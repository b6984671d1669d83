"""What fits as a heat map of buttons: a press on a cell trains with its micro-batch."""

from __future__ import annotations

from functools import partial
from html import escape
from typing import Any

import ipywidgets

from ..planning.what_fits import COLUMNS, ROWS, Cell, WhatFits
from .controls import box
from .search_view import Ask
from .style import shade


def fits_view(found: WhatFits, ask: Ask) -> Any:
    """A widget with a button for each cell, darker the faster it is; cells on the frontier have a frame.

    ``ask`` has something done of which somebody may be told that it was refused.
    """
    modes = list(dict.fromkeys(cell.checkpointing for cell in found.cells))
    fastest = max((cell.samples_per_s or 0.0 for cell in found.cells), default=0.0)
    children: list[Any] = [_label(f"{ROWS} \\ {COLUMNS}"), *map(_label, modes)]
    for precision in dict.fromkeys(cell.precision for cell in found.cells):
        children.append(_label(precision))
        cells = {cell.checkpointing: cell for cell in found.cells if cell.precision == precision}
        children += [_button(cells.get(mode), found, fastest, ask) for mode in modes]
    grid = box(children, "gpumem-fits-map")
    grid.layout.grid_template_columns = f"max-content repeat({len(modes)}, minmax(7em, 1fr))"
    notes = ipywidgets.HTML("".join(f"<p>{escape(note)}</p>" for note in [*found.notes, _KEY]))
    notes.add_class("gpumem-notes")
    return ipywidgets.VBox([grid, notes])


_KEY = "Darker is faster; with a frame: no other cell has as large a micro-batch and is as fast. A press sets it."


def _button(cell: Cell | None, found: WhatFits, fastest: float, ask: Ask) -> Any:
    button = ipywidgets.Button(description=cell.words if cell else "n/a", disabled=not (cell and cell.settings))
    if cell and cell.settings:
        button.style.button_color = shade((cell.samples_per_s or 0.0) / (fastest or 1.0))
        button.style.text_color = "#000"
        button.tooltip = f"set {ROWS}={cell.precision} {COLUMNS}={cell.checkpointing} batch_size={cell.largest}"
        button.on_click(lambda _: ask(partial(found.apply, cell.precision, cell.checkpointing)))
    if cell in found.frontier:
        button.add_class("gpumem-frontier")
    return button


def _label(text: str) -> Any:
    return ipywidgets.Label(text)
