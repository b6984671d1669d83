"""The panel's tuner: what to look for, the best settings with a button that applies them, and a map of what fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets

from ..planning.tuning.result import TuneResult
from ..planning.what_if import COLUMNS, ROWS, Cell, WhatFits
from ..report.tables import marked, notes_html, shown_html
from ..shared.answers import Progress
from ..shared.errors import InvalidInput
from . import threads
from .search_view import SearchView
from .style import SHADES, mixed
from .widgets import ApplyButton, Ask, box, style_sheet, text_of, toggle

if TYPE_CHECKING:
    from ..session import Session


class ApplyView:
    """The best settings to apply, which there must be; shown by being displayed, or by :attr:`view` as part of more.

    Args:
        result: what was found; ``typed`` of it is not empty.
        ask: has something done; without one, a thread does it.
    """

    def __init__(self, result: TuneResult, ask: Ask | None = None) -> None:
        self._result = result
        self._ask = ask
        self.view = threads.make(self._make)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return the widget, and for a page without a kernel what is typed instead."""
        said = f"Train with the best settings: %hvd_set {self._result.typed}"
        bundle: dict[str, Any] = dict(self.view._repr_mimebundle_() or {})
        return bundle | {"text/plain": said, "text/html": notes_html([said])}

    def _make(self) -> Any:
        typed = "" if self._ask else self._result.typed  # the line of the panel that it stands in has said it
        apply = ApplyButton(typed, "train with the best settings", self._apply, self._ask)
        apply.button.add_class("gpumem-apply")
        return box([style_sheet(text_of("answers.css")), apply.button, apply.said], "gpumem-tuned")

    def _apply(self) -> str:
        self._result.apply()
        return "Changed: the next steps are trained with these settings."


def fits_view(found: WhatFits, ask: Ask) -> Any:
    """Return a widget with a button for each cell, darker the faster it is; cells on the frontier have a frame.

    ``ask`` has something done; if it is refused, the panel says so.
    """
    modes = list(dict.fromkeys(cell.checkpointing for cell in found.cells))
    fastest = max((cell.samples_per_s or 0.0 for cell in found.cells), default=0.0)
    children: list[Any] = [*map(ipywidgets.Label, (f"{ROWS} \\ {COLUMNS}", *modes))]
    for precision in dict.fromkeys(cell.precision for cell in found.cells):
        children.append(ipywidgets.Label(precision))
        cells = {cell.checkpointing: cell for cell in found.cells if cell.precision == precision}
        children += [_button(cells.get(mode), found, fastest, ask) for mode in modes]
    grid = box(children, "gpumem-fits-map")
    grid.layout.grid_template_columns = f"max-content repeat({len(modes)}, minmax(7em, 1fr))"
    notes = ipywidgets.HTML("".join(f"<p>{marked(note)}</p>" for note in [*found.notes, _KEY]))
    notes.add_class("gpumem-notes")
    return ipywidgets.VBox([grid, notes])


_KEY = "Darker is faster; with a frame: no other cell has as large a micro-batch and is as fast. A press sets it."


def _button(cell: Cell | None, found: WhatFits, fastest: float, ask: Ask) -> Any:
    button = ipywidgets.Button(description=cell.words if cell else "n/a", disabled=not (cell and cell.settings))
    if cell and cell.settings:
        button.style.button_color = mixed(SHADES, (cell.samples_per_s or 0.0) / (fastest or 1.0))
        button.style.text_color = "#000"
        button.tooltip = f"set {ROWS}={cell.precision} {COLUMNS}={cell.checkpointing} batch_size={cell.largest}"
        button.on_click(lambda _: ask(partial(found.apply, cell.precision, cell.checkpointing)))
    if cell in found.frontier:
        button.add_class("gpumem-frontier")
    return button


class TuneView(SearchView):
    """Asks the session for the fastest settings that fit."""

    def __init__(self, session: Session, search: Ask, ask: Ask, close: Callable[[], object]) -> None:
        self._budget = _text("budget", "the limit", "what may be reserved on a rank, such as 512MiB")
        self._batch = _text("global batch", "as it is", "samples of a step of all ranks")
        self._seconds = _text("seconds", "60", "how long it may take, about")
        self._any = ipywidgets.Checkbox(description="change the mathematics", indent=False)
        self._any.tooltip = "consider fp16 and bf16 too, which train another way"
        tune = ("Find the fastest", "bolt", "look for the fastest settings that fit", self._tune)
        form = [self._budget, self._batch, self._seconds, self._any]
        super().__init__(session, "Tune", form, [tune], search, ask, close)

    def _tune(self, progress: Progress) -> str:
        batch, seconds = self._batch.value.strip(), self._seconds.value.strip() or "60"
        if batch and not batch.isdecimal():
            raise InvalidInput(f"global batch {batch!r} cannot be used: write a whole number, or leave it empty.")
        try:
            longest_s = float(seconds)
        except ValueError:
            raise InvalidInput(f"seconds must be a number, such as 60 (got {seconds!r}).") from None
        result = self._session.tune(
            budget=self._budget.value.strip() or None,
            global_batch=int(batch) if batch else None,
            seconds=longest_s,
            same_mathematics=not self._any.value,
            progress=progress,
        )
        self.show(self._details(result))
        if result.typed:
            self.keep([ApplyView(result, self.ask).view])
        return result.line

    def _details(self, result: TuneResult) -> list[Any]:
        """Return why, and a button that shows what was measured, as a chart and as a table."""
        why = ipywidgets.HTML(f"<p>{marked(result.why)}</p>")
        if not result.shown[1:]:
            return [why]
        more = toggle("details", "line-chart", "everything that was measured: speed, its standard error, memory, turns")
        measured = box([], "gpumem-measured")

        def unfold(change: dict[str, Any]) -> None:
            if not measured.children:
                measured.children = threads.make(lambda: _measured(result))
            measured.layout.display = "" if change["new"] else "none"

        more.observe(unfold, names="value")
        return [why, more, measured]


def _measured(result: TuneResult) -> list[Any]:
    table = ipywidgets.HTML(shown_html(result.shown[1:]))
    if not result.measured:
        return [table]
    from .figures import tuned_widget  # plotly takes long to import

    return [tuned_widget(result), table]


class FitsView(SearchView):
    """Asks the session for what fits."""

    def __init__(self, session: Session, search: Ask, ask: Ask, close: Callable[[], object]) -> None:
        tip = "the largest micro-batch under each precision and checkpointing"
        super().__init__(session, "What fits", [], [("Look again", "th", tip, self._what_fits)], search, ask, close)

    def _what_fits(self, progress: Progress) -> str:
        found = self._session.what_fits(progress=progress)
        self.show([fits_view(found, self.ask)])
        fitting = [cell for cell in found.cells if cell.largest]
        if not fitting:
            return "What fits: nothing under any precision and checkpointing."
        most = max(fitting, key=lambda cell: cell.largest)
        return f"What fits: micro-batches of up to {most.largest:,}, with {most.precision} and {most.checkpointing}."


def _text(label: str, placeholder: str, tip: str) -> Any:
    return ipywidgets.Text(description=label, placeholder=placeholder, tooltip=tip, continuous_update=False)
