"""Every exception the toolkit raises on purpose. Each message ends with what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any


def _nowhere(said: str) -> bool:
    return False


show: Callable[[str], bool] = _nowhere
"""Shows a sentence in a notebook, with whole words, and returns whether it did: ``ui/cells`` brings one that does."""


class GpumemError(Exception):
    """Base of all deliberate errors: one sentence of what was wrong, one of what to do."""

    def __reduce__(self) -> tuple[Any, ...]:
        """They travel between processes: made again as they are, because constructors do not take what they made."""
        return _made_again, (type(self), self.args), vars(self)

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of a traceback: where in the toolkit it was raised does not help the user."""
        return _rendered(type(self).__name__, str(self))


def _rendered(name: str, said: str) -> list[str]:
    """Return what IPython prints of an error: its name alone where the words stand above it already."""
    return [name] if show(said) else [f"{name}: {said}"]


def _made_again(kind: type[GpumemError], args: tuple[Any, ...]) -> GpumemError:
    error = kind.__new__(kind)
    error.args = args
    return error


class InvalidInput(GpumemError, ValueError):
    """An argument, knob or value that cannot be used. Outside of notebooks, magics show it as a ``UsageError``."""


class SetupError(GpumemError):
    """Something that the toolkit needs is missing or broken; the message names the command that repairs it."""


class StartError(GpumemError):
    """The ranks could not be started; whatever had been started has been stopped again."""


class NoSession(GpumemError):
    """No ranks are running: they have not been started, or were stopped."""

    def __init__(self) -> None:
        super().__init__(
            "No ranks are running. Start some with %hvd_start 4 (or gpumem_nb.start(4)), or go on from a snapshot with "
            "%hvd_resume."
        )


class WorkloadError(GpumemError):
    """The model, loss, data or optimizer that was handed over cannot be trained as it is."""


class NotThisTime(WorkloadError):
    """A question could not be answered for a temporary reason, such as an interrupt."""


class TrainingFailed(GpumemError):
    """Training stopped by itself: a step could not be finished and there is nothing to go back to."""


class StateFileError(GpumemError):
    """A file of training state that cannot be written, read, or used with what is loaded; nothing was changed."""


class RankError(GpumemError):
    """Code failed on a rank.

    Attributes:
        rank: the Horovod rank that failed first.
        ename, evalue: class name and text of the exception over there.
        remote_traceback: its traceback as text, as the rank printed it.
    """

    def __init__(self, rank: int, ename: str, evalue: str, remote_traceback: str = "") -> None:
        super().__init__(f"rank {rank}: {ename}: {evalue}" if evalue else f"rank {rank}: {ename}")
        self.rank = rank
        self.ename = ename
        self.evalue = evalue
        self.remote_traceback = remote_traceback

    def _render_traceback_(self) -> list[str]:
        return [f"[rank {self.rank}] {self.remote_traceback}".rstrip() if self.remote_traceback else str(self)]


class TrialFailed(RankError):
    """A step of a question failed on a rank for which others then waited in vain.

    Attributes:
        failure: why, a :class:`~gpumem_nb.shared.messages.Failure`.
    """

    def __init__(self, failure: Any) -> None:
        super().__init__(failure.rank, failure.kind, failure.message, failure.traceback)
        self.failure = failure


class Stalled(RankError):
    """Code on a rank waited for ranks that did not come, and was freed."""

    def __init__(self, error: RankError, what: str) -> None:
        super().__init__(error.rank, error.ename, error.evalue, error.remote_traceback)
        self.args = (what,)

    def _render_traceback_(self) -> list[str]:
        return [*super()._render_traceback_(), str(self)]


class ClusterDied(GpumemError):
    """A rank, the controller or mpiexec ended while it was needed.

    Attributes:
        cause: what ended and why, as a sentence.

    Args:
        remedy: what to do about it, as another one.
    """

    def __init__(self, cause: str, remedy: str = "Start again with %hvd_restart.") -> None:
        super().__init__(f"{cause} {remedy}")
        self.cause = cause


class Interrupted(KeyboardInterrupt):
    """The user pressed stop; the message says what state the ranks are in, and what to type if they do not stop."""

    def _render_traceback_(self) -> list[str]:
        return _rendered("KeyboardInterrupt", str(self))


def text_of(error: BaseException) -> str:
    """Return an exception's message, or the name of its type if converting it to text fails."""
    try:
        return str(error)
    except Exception:
        return type(error).__name__


_CLOSE, _FAR = 0.75, 0.5  # shares of letters that two words have in common
_LONG_PART = 3  # letters: shorter ones are in too many words


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return a sentence fragment naming the closest valid word, or all valid ones when none is close.

    A word that has a part of another one is close, too: ``gradient_clip`` is to ``clip_norm``.
    """
    choices = list(allowed)
    parts = {part for part in word.split("_") if len(part) >= _LONG_PART}
    close = difflib.get_close_matches(word, choices, n=1, cutoff=_CLOSE)
    close = close or [choice for choice in choices if parts & set(choice.split("_"))]
    close = close or difflib.get_close_matches(word, choices, n=1, cutoff=_FAR)
    if close:
        return f"did you mean {close[0]!r}? Allowed: {', '.join(choices)}"
    return f"allowed: {', '.join(choices)}"
