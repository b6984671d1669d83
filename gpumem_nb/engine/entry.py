"""The doors through which the kernel reaches a rank. Imports nothing heavy: the kernel imports this module too.

Everything travels as cloudpickle, in both directions, so that classes defined in a notebook work. Exceptions come back
in an answer too: those that the toolkit raises on purpose as what they are, all others as :class:`Raised`.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import sys
import threading
import traceback
from asyncio import base_events, futures
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import cloudpickle

from ..internals.ipykernel_internals import request_under_way, shell_here
from ..shared.answers import Answer, Apart, Raised
from ..shared.cluster_records import fault_file
from ..shared.errors import GpumemError, text_of
from . import cells, plain_process, surroundings
from .cells import attached_names
from .link import pulse, signals
from .link.signals import handlers_kept, held_back, interruptible

_DOORS = {__file__, cells.__file__, str(Path(__file__).with_name("packing.py"))}
_DOORS |= {base_events.__file__, futures.__file__}  # of a cell that awaits
_fault: TextIO  # kept open for the crash that may come

NUDGE = signals.NUDGE
"""Sent to a rank that trains, asks all ranks to end the chunk under way at the next step."""
PULSE = pulse.KEY
"""Names the pulse among the data that travel beside an answer."""
CELL = "a cell"
_WORDS = {
    "run_chunk": "",
    "load": "loading a workload",
    "attach": "attaching a model",
    "write_trace": "the writing of a trace",
    "forecast": "trial steps for a prediction",
    "forecast_allocators": "a trial step for a prediction",
    "rehearse": "trial steps",
    "look_at_model": "a look at the model",
    "hollow": "a look at the model",
    "splits_to_mean": "a look at the loss",
    "steps_among": "the measuring of scaling",
    "sweep_network": "the timing of all-reduces",
}
_BRING_CODE = {"load", "attach", "push"}
_OF_USER_CODE = {CELL, *(_WORDS.get(function, function) for function in _BRING_CODE)}


START_UP = "from gpumem_nb.engine.entry import start_up; start_up()"
"""What an engine runs while it registers."""


def start_up() -> None:
    """Look after the owner, and import torch and Horovod meanwhile: that takes as long as the registration."""
    global _fault
    profile = Path(os.environ["IPP_PROFILE_DIR"])
    _fault = fault_file(profile, os.getpid()).open("w")
    faulthandler.enable(_fault, all_threads=False)
    plain_process.name_exits(_fault)
    surroundings.here.modules.watch()
    threading.Thread(target=pulse.watch_owner, args=(profile,), daemon=True).start()
    threading.Thread(target=import_module, args=("gpumem_nb.engine.rank",), daemon=True).start()


def call(function: str, arguments: bytes) -> bytes:
    """Call a function of :mod:`gpumem_nb.engine.rank` by name."""

    def run() -> Any:
        if function in _BRING_CODE:
            _catch_up()
            cells.one_more()
        return getattr(import_module("gpumem_nb.engine.rank"), function)(*cloudpickle.loads(arguments))

    return _answer(run, _WORDS.get(function, function.replace("_", " ")))


def call_function(blob: bytes) -> bytes:
    """Call a function that was sent along with its arguments."""

    def run() -> Any:
        with interruptible():
            _catch_up()
        function, args = cloudpickle.loads(blob)
        with interruptible():
            return cells.called(function, args)

    return _answer(run, CELL)


def run_cell(source: str, title: str, result: str, memory: bool) -> bytes:
    """Run code among the rank's variables.

    Args:
        source: plain Python, magics already transformed.
        title: stands in tracebacks in place of a file name.
        result: ``value`` to send back what the last expression gives, ``text`` to show it as a notebook does.
        memory: print at the end what the code did to the memory.
    """

    def run() -> Any:
        with interruptible():
            for note in _catch_up():
                print(note)
        events = shell_here().events
        try:
            with interruptible(), _memory_printed() if memory else nullcontext():
                value = cells.execute(source, title, vars(sys.modules["__main__"]))
        finally:
            events.trigger("post_execute")  # by which IPython shows figures
            for note in _replaced():
                print(note)
        if result == "value" or value is None:
            return value
        if cells.ends_with_semicolon(source):
            return None
        with interruptible():  # what is shown may be computed for it
            return cells.shown(value)

    return _answer(run, CELL)


def _replaced() -> Sequence[str]:
    """After code of the notebook: say what variables it bound to other objects than those trained."""
    rank = sys.modules.get("gpumem_nb.engine.rank")
    said = attached_names.replaced(vars(sys.modules["__main__"])), rank.taken_over() if rank else ""
    notes = [note for note in said if note]
    surroundings.here.notes += notes
    return notes


def _catch_up() -> Sequence[str]:
    """Before code of the notebook: its modules as they are on disk, and the names under which it finds what is trained.

    Not to be interrupted where other ranks count on this one. Returns what there is to say.
    """
    rank = sys.modules.get("gpumem_nb.engine.rank")
    trained = rank.offer_trained() if rank else ()
    surroundings.here.catch_up(vars(sys.modules["__main__"]), trained)
    return surroundings.here.notes


@contextmanager
def _memory_printed() -> Iterator[None]:
    report = None
    try:
        with import_module("gpumem_nb.memory.tracking").track() as report:
            yield
    finally:
        if report is not None:
            print(report)


def _answer(work: Callable[[], Any], what: str) -> bytes:
    message = request_under_way(shell_here())
    if what == CELL:
        plain_process.cell_begins(message)
    with pulse.request(what, message), handlers_kept() if what in _OF_USER_CODE else nullcontext():
        numbers = import_module("gpumem_nb.engine.random_state").RandomState.take() if what == CELL else None
        try:
            with held_back():
                answer = import_module("gpumem_nb.engine.packing").returned(work(), _apart(what))
        except BaseException as error:  # ipyparallel would keep one that gets past here, and its frames' tensors
            answer = failed(error, _readable(error), _apart(what))
            traceback.clear_frames(error.__traceback__)
        if what in _OF_USER_CODE:
            _replaced()
            drew = numbers is not None and numbers.moved_anywhere()
            answer = dataclasses.replace(answer, notes=surroundings.here.said(), drew=drew)
        return cloudpickle.dumps(answer)  # type: ignore[no-any-return]


def failed(error: BaseException, readable: str, apart: Apart | None) -> Answer:
    """Return the answer of a request that raised ``error``; ``readable`` is its traceback as text."""
    content = b""
    if isinstance(error, GpumemError):
        with suppress(Exception):  # something may have been hung on it that cannot be pickled
            content = cloudpickle.dumps(error)
    text = plain_process.explained(error) if isinstance(error, SystemExit) else text_of(error)
    content = content or cloudpickle.dumps(Raised(type(error).__name__, text, readable))
    return Answer(content, type(error).__name__, apart, raised=True)


def _apart(what: str) -> Apart | None:
    """Return whether this request left the rank apart from the others."""
    rank = sys.modules.get("gpumem_nb.engine.rank")
    return rank.apart(what) if rank else None


def _readable(error: BaseException) -> str:
    """Return the traceback from the user's first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _DOORS:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
