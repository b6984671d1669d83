"""Code in cells finds a process like that of a notebook: its variables, signals of children, and no keyboard."""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import getpass
import io
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import MutableMapping
from typing import Any, NoReturn, TextIO

from ..internals.ipykernel_internals import refuse_embedded_shells, shell_here
from ..internals.lightning_internals import see_no_mpi

_OF_LAUNCHERS = ("OMPI_", "OPAL_", "PMIX_", "PRTE_")
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # by a rank, in its own ways
_cell: Any = None  # the message that asked for the latest one
_engines_streams: list[Any] = []
_masks = threading.local()  # of the thread that forks: which signals it held back before
_INSTEAD = "Type %hvd_stop to end all ranks, or %hvd_restart to start them anew."
_NO_INPUT = (
    "a rank has no keyboard: input(), getpass() and debuggers get no answer there. Pass values with %hvd_push or write "
    "them in the cell, and print what you want to look at."
)


class NoKeyboard(NotImplementedError):
    """Code on a rank asked for input."""


def make_plain(variables: MutableMapping[str, Any]) -> None:
    """Let cells find what they would find in the notebook's own process. Call it once MPI has started.

    Args:
        variables: those of cells; IPython's own ``exit`` and ``quit`` are taken out, which would end the rank.
    """
    # Libraries such as accelerate take Open MPI's variables for a launcher of their own. MPI reads them as it starts.
    for name in [name for name in (*os.environ, *_names_in_c()) if name.startswith(_OF_LAUNCHERS)]:
        os.environ.pop(name, None)
        os.unsetenv(name)
    see_no_mpi()
    for stream in (sys.stdout, sys.stderr):
        _engines_streams.append(stream)
        _look_after(stream)
    os.register_at_fork(
        before=_hold_signals, after_in_parent=_let_signals_through, after_in_child=_handle_signals_as_usual
    )
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # for children, which would wait for mpiexec's standard input
    sys.stdin = _NoInput()
    getpass.getpass = _refuse  # it would ask the terminal
    sys.breakpointhook = _refuse
    refuse_embedded_shells(_refuse)
    for name in ("exit", "quit"):
        variables.pop(name, None)
        setattr(builtins, name, _Exit(name))
    if shell := shell_here():
        shell.ask_exit = _Exit("exit")  # which IPython's own exit and quit call: %reset brings them back
        builtins.get_ipython = shell_here  # type: ignore[attr-defined]  # for magics, when cells delete theirs
        shell.set_hook("show_in_pager", _print, 0)  # what net? gives, of which a notebook would get nothing else


def cell_begins(message: Any) -> None:
    """Let what threads print from now on belong to the cell that this message asked for, also once it has ended."""
    global _cell
    _cell = message


def name_exits(file: TextIO) -> None:
    """Let this process write into ``file`` who ended it by ``os._exit``."""
    usual, rank = os._exit, os.getpid()

    def exit_at_once(status: int) -> NoReturn:
        if os.getpid() == rank:
            caller = traceback.extract_stack(limit=2)[0]
            file.write(f"os._exit({status}) was called in {caller.filename}, line {caller.lineno}\n")
            file.flush()
        usual(status)

    os._exit = exit_at_once


def explained(error: SystemExit) -> str:
    """Return what to say of a cell that wanted to end its process."""
    if isinstance(error.code, str):
        return error.code
    return f"sys.exit({'' if error.code is None else error.code}) ends this cell, not the rank. {_INSTEAD}"


class _Exit:
    """Stands for ``exit`` and ``quit``."""

    def __init__(self, name: str) -> None:
        self._sentence = f"{name}() would end this rank, and all others with it. {_INSTEAD}"

    def __call__(self, code: object = None) -> NoReturn:
        raise SystemExit(self._sentence)

    def __repr__(self) -> str:
        return self._sentence


class _NoInput(io.TextIOBase):
    """Standard input of a rank: refuses to be read, at once."""

    name, encoding = "<stdin>", "utf-8"

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> str:
        _refuse()

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        _refuse()

    @property
    def buffer(self) -> io.BufferedReader:
        """Bytes cannot be read either."""
        _refuse()


def _print(shell: Any, page: Any, *_: object, **__: object) -> None:
    print(page["text/plain"] if isinstance(page, dict) else page)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise NoKeyboard(_NO_INPUT)


def _names_in_c() -> list[str]:
    """Return the environment as children inherit it: what C code has set there, Python does not know."""
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found = itertools.takewhile(bool, (entries[place] for place in itertools.count()))
    return [os.fsdecode(entry).partition("=")[0] for entry in found if entry]


def _look_after(stream: Any) -> None:
    """Make flushing an empty stream free, and let what threads print belong to the latest cell.

    The engine flushes standard output and error four times a request, and each flush waits for another thread: on busy
    cores that took 4 % of a rank's time between the chunks of a training run.
    """
    write, flush = stream.write, stream.flush
    written = False

    def write_and_note(text: str) -> Any:
        nonlocal written
        written = True
        if isinstance(text, str) and not text.isascii():  # half a surrogate pair could not be sent, nor what follows it
            text = text.encode(errors="backslashreplace").decode()
        if _cell is not None and threading.current_thread() is not threading.main_thread():
            stream.set_thread_parent(_cell)
        return write(text)

    def flush_if_written() -> None:
        nonlocal written
        if written:
            written = False
            flush()

    stream.write, stream.flush = write_and_note, flush_if_written


def _hold_signals() -> None:
    """Before a fork: what comes to the child at once waits until it handles signals as usual."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)


def _let_signals_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _handle_signals_as_usual() -> None:
    """In a forked child: what a rank does with signals, crashes and prints is not for its children."""
    faulthandler.disable()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) in _engines_streams:  # which have a thread of the rank's send what is printed
            setattr(sys, name, getattr(sys, f"__{name}__"))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    _let_signals_through()
