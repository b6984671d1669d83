"""The panel's tuner: what to look for, how far it is, and what was found with a button that applies it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from html import escape

import ipywidgets

from ..planning.tuning.result import TuneResult
from ..shared.errors import GpumemError, InvalidInput
from .controls import box
from .fits_view import fits_view
from .region import Region
from .steered import Steered

_SECONDS = "60"
_START = "Find the fastest"
Ask = Callable[[Callable[[], object]], object]


class TuneView:
    """Asks the session to tune, and for what fits.

    Attributes:
        widget: everything.

    Args:
        session: what is tuned.
        ask: has something done that may take long, of which somebody may be told that it was refused.
        apply: the same of what is done at once.
    """

    def __init__(self, session: Steered, ask: Ask, apply: Ask) -> None:
        self._session = session
        self._ask = ask
        self._apply = apply
        self._stop = threading.Event()
        self._busy = False
        text = {"continuous_update": False}
        self._budget = ipywidgets.Text(
            description="budget",
            placeholder="the limit",
            tooltip="what may be reserved on a rank, such as 512MiB",
            **text,
        )
        self._batch = ipywidgets.Text(
            description="global batch", placeholder="as it is", tooltip="samples of a step of all ranks", **text
        )
        self._seconds = ipywidgets.Text(value=_SECONDS, description="seconds", tooltip="how long it may take", **text)
        self._any = ipywidgets.Checkbox(
            description="change the mathematics",
            indent=False,
            tooltip="consider fp16 and bf16 too, which train another way",
        )
        self._start = ipywidgets.Button(
            description=_START, icon="bolt", tooltip="look for the fastest settings that fit"
        )
        self._start.on_click(lambda _: self._stop.set() if self._busy else self._begin(self._tune))
        self._fits = ipywidgets.Button(
            description="What fits?",
            icon="th",
            tooltip="the largest micro-batch under each precision and checkpointing",
        )
        self._fits.on_click(lambda _: self._begin(self._what_fits))
        self._said = Region(role="status", label="how far tuning is")
        self._said.add_class("gpumem-tuning")
        self._found = ipywidgets.VBox([])
        form = [self._budget, self._batch, self._seconds, self._any, self._start, self._fits]
        self.widget = ipywidgets.VBox([box(form, "gpumem-form"), self._said, self._found])

    def follow(self, why_not: str) -> None:
        """Switch the buttons off, for a reason, or on."""
        self._start.disabled = bool(why_not) and not self._busy
        self._fits.disabled = bool(why_not) or self._busy

    def close(self) -> None:
        """End what is under way."""
        self._stop.set()

    def _begin(self, work: Callable[[], None]) -> None:
        if not self._busy:
            self._busy = True
            self._stop.clear()
            self._start.description, self._start.icon = "Stop", "stop"
            self._ask(lambda: self._do(work))

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except GpumemError as error:
            self._say(str(error))
        except KeyboardInterrupt:
            self._say("Stopped.")
        finally:
            self._busy = False
            self._start.description, self._start.icon = _START, "bolt"

    def _tune(self) -> None:
        batch = self._batch.value.strip()
        if batch and not batch.isdecimal():
            raise InvalidInput(f"global batch {batch!r} cannot be used: write a whole number, or leave it empty.")
        try:
            seconds = float(self._seconds.value)
        except ValueError:
            raise InvalidInput(f"{self._seconds.value!r} are no seconds: write a number, such as 60.") from None
        self._found.children = ()
        result = self._session.tune(
            budget=self._budget.value.strip() or None,
            global_batch=int(batch) if batch else None,
            seconds=seconds,
            same_mathematics=not self._any.value,
            progress=self._progress,
        )
        self._say(result.why)
        self._show(result)

    def _show(self, result: TuneResult) -> None:
        from .tune_figure import tuned_widget  # plotly takes long to import

        table = ipywidgets.HTML(result.table_html())
        parts = [tuned_widget(result), table] if result.measured else [table]
        best = result.best
        if best and best is not result.now:
            apply = ipywidgets.Button(description=f"Apply {result.typed}", tooltip="train with the best settings")
            apply.add_class("gpumem-apply")
            apply.on_click(lambda _: self._apply(result.apply))
            parts.insert(0, apply)
        self._found.children = tuple(parts)

    def _what_fits(self) -> None:
        self._found.children = ()
        found = self._session.what_fits(progress=self._progress)
        self._say("")
        self._found.children = (fits_view(found, self._apply),)

    def _progress(self, what: str, done: float) -> None:
        if self._stop.is_set():
            raise KeyboardInterrupt
        self._said.html = f"<progress value='{done:.3f}' aria-label='done'></progress> {escape(what)}"

    def _say(self, what: str) -> None:
        self._said.html = f"<p>{escape(what)}</p>" if what else ""
