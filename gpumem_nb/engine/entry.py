"""The doors through which the kernel reaches a rank. Imports nothing heavy: the kernel imports this module too.

Everything travels as cloudpickle, in both directions, so that classes defined in a notebook work. Exceptions come back
as values: those that the toolkit raises on purpose as what they are, all others as :class:`Raised`.
"""

from __future__ import annotations

import ast
import faulthandler
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import cloudpickle

from ..shared.cluster_records import fault_file
from ..shared.errors import GpumemError
from ..shared.messages import Answer, Apart, Raised
from .together import nudge, owner, pulse
from .together.interrupts import held_back, interruptible

_fault: TextIO  # kept open for the crash that may come

NUDGE = nudge.SIGNAL
"""Sent to a rank that trains, asks all ranks to end the chunk under way at the next step."""
PULSE = pulse.KEY
"""Names the pulse among the data that travel beside an answer."""
CELL = "a cell"
_WORDS = {"run_chunk": "", "load": "loading a workload", "attach": "attaching a model"}


START_UP = "from gpumem_nb.engine.entry import start_up; start_up()"
"""What an engine runs while it registers."""


def start_up() -> None:
    """Look after the owner, and import torch and Horovod meanwhile: that takes as long as the registration."""
    global _fault
    profile = Path(os.environ["IPP_PROFILE_DIR"])
    _fault = fault_file(profile, os.getpid()).open("w")
    faulthandler.enable(_fault, all_threads=False)
    threading.Thread(target=owner.watch, args=(profile,), daemon=True).start()
    threading.Thread(target=import_module, args=("gpumem_nb.engine.rank",), daemon=True).start()


def call(function: str, arguments: bytes) -> bytes:
    """Call a function of :mod:`gpumem_nb.engine.rank` by name."""

    def run() -> Any:
        return getattr(import_module("gpumem_nb.engine.rank"), function)(*cloudpickle.loads(arguments))

    return _answer(run, _WORDS.get(function, function.replace("_", " ")))


def call_function(blob: bytes) -> bytes:
    """Call a function that was sent along with its arguments."""

    def run() -> Any:
        function, args = cloudpickle.loads(blob)
        with interruptible():
            return function(*args)

    return _answer(run, CELL)


def run_cell(source: str, title: str, result: str, memory: bool) -> bytes:
    """Run code among the rank's variables.

    Args:
        source: plain Python, magics already transformed.
        title: stands in tracebacks in place of a file name.
        result: ``value`` to send back what the last expression gives, ``text`` for its representation only.
        memory: print at the end what the code did to the memory.
    """

    def run() -> Any:
        with interruptible(), _memory_printed() if memory else nullcontext():
            value = _execute(source, title)
        return value if result == "value" or value is None else repr(value)

    return _answer(run, CELL)


@contextmanager
def _memory_printed() -> Iterator[None]:
    report = None
    try:
        with import_module("gpumem_nb.memory.tracking").track() as report:
            yield
    finally:
        if report is not None:
            print(report)


def _execute(source: str, title: str) -> Any:
    variables = vars(sys.modules["__main__"])
    linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)
    tree = ast.parse(source, title)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, title, "exec"), variables)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), title, "eval"), variables)


def _answer(work: Callable[[], Any], what: str) -> bytes:
    shell = vars(sys.modules["__main__"])["get_ipython"]()
    with pulse.request(what, shell.parent_header):
        try:
            with held_back():
                value = work()
                return cloudpickle.dumps(Answer(value, _apart(what)))  # type: ignore[no-any-return]
        except GpumemError as error:
            answer: Any = error.with_traceback(None)
        except BaseException as error:  # ipyparallel would keep one that gets past here, and its frames' tensors
            answer = Raised(type(error).__name__, str(error), _readable(error))
            traceback.clear_frames(error.__traceback__)
        return cloudpickle.dumps(Answer(answer, _apart(what)))  # type: ignore[no-any-return]


def _apart(what: str) -> Apart | None:
    """Whether this request left the rank apart from the others."""
    rank = sys.modules.get("gpumem_nb.engine.rank")
    return rank.apart(what) if rank else None


def _readable(error: BaseException) -> str:
    """The traceback from the user's first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
