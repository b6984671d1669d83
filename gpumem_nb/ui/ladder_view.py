"""The panel's memory ladder: a button for each rung, with what it needs, how fast it is, and what it changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets

from ..planning.ladder import Ladder
from ..report.tables import notes_html
from ..shared.answers import Progress
from ..shared.settings import Settings
from ..shared.units import format_bytes, format_rate
from .search_view import SearchView
from .widgets import Ask, box

if TYPE_CHECKING:
    from ..session import Session

_HEADINGS = ("rung: adds", "reserved", "samples/s", "mathematics")


class Rungs:
    """A button for each rung, the present settings first; a press takes it and all above it.

    ``ask`` has something done; if it is refused, the panel says so.

    Attributes:
        widget: everything.
    """

    def __init__(self, found: Ladder, ask: Ask) -> None:
        self._found = found
        self._buttons: list[Any] = []
        children: list[Any] = list(map(ipywidgets.Label, _HEADINGS))
        for row, one in zip(found.records, (found.now, *found.rungs), strict=True):
            button = ipywidgets.Button(description=f"{row['rung']}: {row['adds']}")
            button.tooltip = f"train with rung {row['rung']} and all above it: {one.verdict}"
            button.on_click(lambda _, rung=row["rung"]: ask(partial(found.apply, rung)))
            self._buttons.append(button)
            said = (one.in_words(one.reserved_peak_bytes), format_rate(one.samples_per_s), row["mathematics"])
            children += [button, *map(ipywidgets.Label, said)]
        grid = box(children, "gpumem-fits-map")
        grid.add_class("gpumem-ladder")
        grid.layout.grid_template_columns = "minmax(9em, 2fr) repeat(2, minmax(4em, 1fr)) max-content"
        notes = ipywidgets.HTML(notes_html(found.sentences))
        notes.add_class("gpumem-notes")
        self.widget = ipywidgets.VBox([grid, notes])

    def follow(self, settings: Settings) -> None:
        """Mark the rung that these settings are."""
        taken = self._found.taken(settings)
        for number, button in enumerate(self._buttons):
            button.icon = "check" if number == taken else ""


class LadderView(SearchView):
    """Asks the session for the memory ladder."""

    def __init__(self, session: Session, search: Ask, ask: Ask, close: Callable[[], object]) -> None:
        self._rungs: Rungs | None = None
        self._same = ipywidgets.Checkbox(description="keep the mathematics", indent=False)
        self._same.tooltip = "leave out what trains another way, such as bf16"
        tip = "which changes free memory, one on top of the other"
        look = ("Look again", "sort-amount-desc", tip, self._climb)
        super().__init__(session, "Ladder", [self._same], [look], search, ask, close)

    def follow(self, why_not: str) -> None:
        """Mark the rung that is in force, too."""
        super().follow(why_not)
        if self._rungs:
            self._rungs.follow(self._session.settings)

    def _climb(self, progress: Progress) -> str:
        found = self._session.ladder(same_mathematics=self._same.value, progress=progress)
        self._rungs = Rungs(found, self.ask)
        self.show([self._rungs.widget])
        if not found.rungs:
            return f"Ladder: {found.sentences[0]}"
        least = found.rungs[-1]
        return f"Ladder: {len(found.rungs)} rungs, down to {format_bytes(least.reserved_peak_bytes)} reserved."
