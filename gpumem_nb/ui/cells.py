"""Output of the cell that runs, updated in place: of a ``%%hvd`` cell by rank, and the progress of long calls.

A notebook gets tqdm's text and not its widget: of a widget a saved notebook keeps only how it looked at first, which is
0 %, whereas text is kept as it was shown last, with how long it took.
"""

from __future__ import annotations

import importlib
import io
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.getipython import get_ipython
from IPython.display import display

from ..internals.ipykernel_internals import for_a_person, request_under_way
from ..report.progress_bar import ProgressBar, shown, text_bar
from ..report.tables import words_html
from ..shared import errors
from ..shared.units import name_ranks
from . import threads

if TYPE_CHECKING:
    from ..cluster.calls import Call

Given = ParamSpec("Given")
Found = TypeVar("Found")
PATIENCE_S = 1.0  # work that ends by then shows no progress
_LIVE = 65536  # characters that are sent again each time something is printed; all of them come at the end


class CellOutput:
    """Shows the output of one call, updated in place in a notebook, once at the end in a terminal."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._output = _Output()
        self._shown = ""
        self._call: Call | None = None
        self._outputs: list[str] = []
        self._live = in_notebook()

    def __call__(self, call: Call) -> None:
        """Show what has been printed so far."""
        self._call, self._outputs = call, call.outputs()
        if self._live:
            text = fold(call.ranks, self._outputs)
            self._show(text if len(text) <= _LIVE else f"…{text[-_LIVE:]}")

    def failed(self) -> None:
        """Show what was printed and displayed before the cell failed."""
        if self._call is None:
            return
        if text := fold(self._call.ranks, self._outputs):
            self._show(text)
        self._display(self._call)

    def finish(self, call: Call, results: Sequence[str | None]) -> None:
        """Show everything, and what the last expression gave."""
        self._outputs = [_with_result(out, result or "") for out, result in zip(call.outputs(), results, strict=True)]
        self._show(fold(call.ranks, self._outputs))
        self._display(call)

    def _display(self, call: Call) -> None:
        """Show figures and tables, those that several ranks have alike once."""
        blocks: list[tuple[list[dict[str, Any]], list[int]]] = []
        for rank, bundles in zip(call.ranks, call.displays(), strict=True):
            alike = next((ranks for known, ranks in blocks if known == bundles), None)
            if alike is None:
                blocks.append((bundles, [rank]))
            else:
                alike.append(rank)
        for bundles, ranks in blocks if not self._quiet else ():
            for bundle in bundles:
                display({"text/plain": f"[{name_ranks(ranks)}]"}, raw=True)
                display(bundle, raw=True)

    def add_late(self) -> None:
        """Show what threads of this cell have printed since it had ended: in its place, or here if it has none."""
        late = self._call.late_outputs() if self._call else []
        if not self._call or not any(late):
            return
        self._outputs = [_with_result(out, more) for out, more in zip(self._outputs, late, strict=True)]
        self._show(fold(self._call.ranks, self._outputs if self._output.shown else late))

    def _show(self, text: str) -> None:
        if self._quiet or text == self._shown:
            return
        self._shown = text
        if self._live:
            self._output.write(text)
        else:
            print(text)


def _with_result(output: str, result: str) -> str:
    between = "\n" if output and result and not output.endswith("\n") else ""
    return f"{output}{between}{result}"


def _as_shown(output: str) -> str:
    """Return the text that a terminal would show at the end: a carriage return starts the line anew."""
    lines = output.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def fold(ranks: Sequence[int], outputs: Sequence[str]) -> str:
    """Return one block for each distinct output, headed by the ranks that printed it, in order of the first of them."""
    blocks: dict[str, list[int]] = {}
    for rank, output in zip(ranks, outputs, strict=True):
        if shown := _as_shown(output).rstrip():
            blocks.setdefault(shown, []).append(rank)
    return "\n".join(
        f"[{name_ranks(of)}]" + (" " if "\n" not in output else "\n") + output for output, of in blocks.items()
    )


def progress_bar(title: str, measured: bool = True, patience_s: float = 0.0) -> AbstractContextManager[ProgressBar]:
    """Show progress until the block ends, then how long it took, or what was under way when it failed.

    Args:
        title: what is being done.
        measured: whether it is known how much is done; otherwise only the time is shown.
        patience_s: nothing is shown of work that ends by then.
    """
    if in_notebook():
        return shown(ProgressBar(title, _Output(), rewrites=True, measured=measured, patience_s=patience_s))
    return shown(text_bar(title, sys.stderr, measured, patience_s))


def shows_progress(title: str) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """Decorate what takes ``progress``: called in a notebook's cell without it, it shows how far it is.

    Nothing is shown in a terminal, nor of what another thread than that of cells does, such as one of the panel's.
    """

    def decorate(ask: Callable[Given, Found]) -> Callable[Given, Found]:
        takes = signature(ask)

        @wraps(ask)
        def asked(*args: Given.args, **kwargs: Given.kwargs) -> Found:
            if not in_notebook() or threading.current_thread() is not threading.main_thread():
                return ask(*args, **kwargs)
            if "progress" in takes.bind(*args, **kwargs).arguments:
                return ask(*args, **kwargs)
            with progress_bar(title, patience_s=PATIENCE_S) as progress:
                kwargs["progress"] = progress
                return ask(*args, **kwargs)

        return asked

    return decorate


class _Output(io.TextIOBase):
    """An output of the cell that runs, which holds what was written last; updated in place."""

    encoding = "utf-8"  # for the characters of bars

    def __init__(self) -> None:
        self._handle: Any = None

    @property
    def shown(self) -> bool:
        """Return whether anything was written."""
        return self._handle is not None

    def write(self, text: str) -> int:
        """Show it in place of what was there; nothing where tqdm clears its line."""
        bundle = {"text/plain": text.strip()}
        if text.strip() and self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        elif text.strip():
            self._handle.update(bundle, raw=True)
        return len(text)


def say(text: object) -> None:
    """Print what there is to say; in a notebook no word or command of it is broken. Nothing where there is nothing."""
    if not (words := str(text)):
        return
    if in_notebook():
        display({"text/plain": words, "text/html": words_html(words)}, raw=True)
    else:
        print(words)


def for_eyes() -> bool:
    """Return whether a person's notebook shows outputs; programs that execute notebooks tell their errors as text."""
    return in_notebook() and for_a_person(_shell().kernel)


class _Errors:
    """Shows what an error says so that no word of it is broken and its commands can be copied, where a person looks.

    JupyterLab breaks the text of errors anywhere. IPython asks for it twice: for the page, and for its history.
    """

    def __init__(self) -> None:
        self._shown: tuple[str, str] = "", ""

    def __call__(self, said: str) -> bool:
        """Return whether it is shown; ``%%capture`` would take the words, and leaves the name of the error."""
        if not for_eyes() or isinstance(_shell().display_pub, CapturingDisplayPublisher):
            return False
        what = said, request_under_way(_shell())["header"]["msg_id"]
        if what != self._shown:
            self._shown = what
            say(said)
        return True


errors.show = _Errors()


def _shell() -> Any:
    return get_ipython()


def in_notebook() -> bool:
    """Return whether outputs can be changed: a terminal gets text only, once."""
    return getattr(get_ipython(), "kernel", None) is not None


def import_panel() -> None:
    """Import what a panel needs on a thread of its own, while people go on to their next cell: it takes seconds.

    A person's page loads meanwhile what draws charts; a program that executes notebooks would save that with them.
    """
    if not in_notebook():
        return
    is_seen = for_eyes()

    def prepare() -> None:
        importlib.import_module(f"{__package__}.panel")
        if is_seen:
            from ..internals.plotly_internals import load_ahead

            load_ahead()

    threads.start(prepare, "gpumem_nb imports")
