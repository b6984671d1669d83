"""Calls that somebody waits for: an interrupt reaches the ranks, and ranks that stalled are brought together again."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any

import cloudpickle

from ..cluster.calls import Call
from ..cluster.ranks import Ranks
from ..cluster.shield import let_finish
from ..report import waits
from ..shared.errors import (
    ClusterDied,
    GpumemError,
    Interrupted,
    InvalidInput,
    NoSession,
    RankError,
    Stalled,
    TrainingFailed,
    WorkloadError,
)
from ..shared.progress import Progress
from ..shared.ranklist import RankChoice, choose_ranks, name_ranks
from .cell_record import CellRecord
from .history import History
from .policy import Policy
from .stop_button import InterruptTracker
from .surroundings import Followed
from .training import Training

RESUMING = "gpumem_nb resuming"
"""Names the thread that puts a state in place, or settles what a failed load has left: nothing else may overtake it."""
_BUSY_OTHERWISE = "Interrupted. The ranks are at something else, which goes on{}. %hvd_restart would end it."
_AHEAD_PATIENCE_S = 0.8  # for steps that come before what is interrupted, and end at the next one; a busy machine's too


class Foreground:
    """Asks the ranks of one cluster, which training keeps busy beside it, and waits for their answers.

    Args:
        policy: what the session does by itself, as it is now.
        ended: why the ranks are gone, in words; empty while they live.
        touch: told that somebody works here.
        cells: keeps the code that runs.
    """

    def __init__(
        self,
        ranks: Ranks,
        training: Training,
        history: History,
        policy: Callable[[], Policy],
        ended: Callable[[], str],
        touch: Callable[[], None],
        cells: CellRecord,
    ) -> None:
        self._ranks = ranks
        self._training = training
        self._history = history
        self._policy = policy
        self._ended = ended
        self._touch = touch
        self._cells = cells
        self._interrupts = InterruptTracker()
        self._numbers = itertools.count(1)
        self._waiting = 0  # calls that somebody waits for
        self._surroundings = Followed()
        self._told: dict[int, Progress] = {}  # by the thread that waits

    @property
    def busy(self) -> bool:
        """Whether somebody waits."""
        return self._waiting > 0

    @property
    def in_vain(self) -> bool:
        """Whether some ranks did not stop when they were interrupted last."""
        return self._interrupts.in_vain

    @property
    def wait_report(self) -> waits.WaitReport | None:
        """What takes long, and who waits for whom; ``None`` when nothing does."""
        if self._ended():
            return None
        return waits.now(self._ranks.pulses(), self._ranks.pending(), self._ranks.size)

    @contextmanager
    def telling(self, progress: Progress) -> Iterator[None]:
        """Inside, ``progress`` is told what the ranks are at while somebody waits for them."""
        thread = threading.get_ident()
        before, self._told[thread] = self._told.get(thread), progress
        try:
            yield
        finally:
            del self._told[thread]
            if before:
                self._told[thread] = before

    def check_alive(self) -> None:
        """Raise for ranks that are gone.

        Raises:
            NoSession: they were stopped.
            ClusterDied: they have ended otherwise.
        """
        let_finish(RESUMING)
        ended = self._ended()
        if ended == "stopped":
            raise NoSession
        if ended:
            raise ClusterDied(f"{ended[:1].upper()}{ended[1:].rstrip('.')}.")
        self._touch()

    def check_loaded(self) -> None:
        """Raise when there is nothing to train.

        Raises:
            WorkloadError: there is nothing.
        """
        self.check_alive()
        if self._training.workload is None:
            raise WorkloadError("Nothing is loaded. Load a workload first, for example %hvd_load digits-resnet.")

    def call(
        self,
        function: str,
        *arguments: Any,
        ranks: RankChoice = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a function of the ranks' entry points by name; its answers in rank order."""
        return self.finish(self.ask(function, *arguments, ranks=ranks), timeout).get()

    def ask(self, function: str, *arguments: Any, ranks: RankChoice = None) -> Call:
        """Begin what :meth:`call` waits for."""
        self._tell_surroundings()
        return self._ranks.call(function, *arguments, ranks=choose_ranks(ranks, self._ranks.size))

    def run(
        self,
        code_or_function: str | Callable[..., Any],
        args: Sequence[Any],
        ranks: RankChoice,
        timeout: float | None,
    ) -> list[Any]:
        """Run code, or any function, on ranks; its results in rank order.

        Raises:
            InvalidInput: neither code nor a function, or code that is not Python.
            RankError: it failed on a rank.
        """
        if isinstance(code_or_function, str):
            return self.run_cell(code_or_function, "<code>", "value", False, ranks, timeout).get()
        if not callable(code_or_function):
            raise InvalidInput(f"A {type(code_or_function).__name__} cannot be run: give code as text, or a function.")
        self._tell_surroundings()
        blob = pickled((code_or_function, args), "The function")
        chosen = choose_ranks(ranks, self._ranks.size)
        call = self._ranks.call_function(blob, chosen)
        try:
            return self._finished(call, timeout).get()
        finally:
            self._cells.called(everywhere=self._are_all(chosen), drew=call.drew())

    def push(self, variables: Mapping[str, Any], ranks: RankChoice) -> None:
        """Define variables on ranks.

        Raises:
            InvalidInput: a name that is none.
        """
        for name in variables:
            if not isinstance(name, str) or not name.isidentifier():
                raise InvalidInput(f"{name!r} is not a variable name.")
        pickled(variables, "The value")
        self._finished(self.ask("push", dict(variables), ranks=ranks)).get()
        self._cells.pushed(variables, self._are_all(choose_ranks(ranks, self._ranks.size)))

    def run_cell(
        self,
        source: str,
        title: str,
        result: str,
        memory: bool,
        ranks: RankChoice,
        timeout: float | None,
        show: Callable[[Call], None] = lambda call: None,
    ) -> Call:
        """Run code on ranks; returns the finished call.

        ``title`` gets a number of its own, so that a traceback shows this code's lines and no other's.

        Raises:
            InvalidInput: the code is not Python.
            RankError: it failed on a rank.
        """
        self._tell_surroundings()
        title = f"{title.removesuffix('>')} {next(self._numbers)}>"
        try:
            compile(source, title, "exec")
        except SyntaxError as error:
            raise InvalidInput(f"The code has a syntax error in line {error.lineno}: {error.msg}.") from None
        chosen = choose_ranks(ranks, self._ranks.size)
        call, finished = self._ranks.run_cell(source, title, result, memory, chosen), False
        try:
            self._finished(call, timeout, show)
            finished = True
        finally:
            self._cells.ran(source, everywhere=self._are_all(chosen), finished=finished, drew=call.drew())
        return call

    def _are_all(self, chosen: Sequence[int] | None) -> bool:
        return chosen is None or len(chosen) == self._ranks.size

    def finish(
        self,
        call: Call,
        timeout: float | None = None,
        show: Callable[[Call], None] = lambda call: None,
        undone: bool = False,
    ) -> Call:
        """Wait for a call. The first error is raised at once; an interrupt or a time-out reaches the ranks.

        Args:
            undone: whether nothing comes of it: behind somebody else's request an interrupt leaves it to itself.

        Raises:
            RankError: the first error of a rank; ``Stalled`` if ranks had waited for others in it.
            Interrupted: stop was pressed; what came of it.
            ClusterDied: a rank that others wait for cannot be freed.
        """
        ahead = self._training.under_way()
        self._training.make_way()
        with self.interruptible(lambda: self._interrupt(call, ahead), call.pending, call.went_well):
            try:
                self._wait_for(call, timeout, show)
            except KeyboardInterrupt:
                if undone and not self.in_vain and any(one not in ahead for one in self._ranks.ahead_of(call)):
                    report = self.wait_report
                    raise Interrupted(_BUSY_OTHERWISE.format(f" ({report})" if report else "")) from None
                raise
            except TimeoutError:
                self._ranks.interrupt_until(call.finished, call.pending())
                raise
            except RankError as error:
                if what := self._after_stall(call):
                    raise Stalled(error, what) from None
                raise
        self._interrupts.in_vain = False  # they answer
        return call

    def _wait_for(self, call: Call, timeout: float | None, show: Callable[[Call], None]) -> None:
        for finished in call.slices(timeout):
            if finished:
                call.settle(1.0)
            show(call)
            if told := self._told.get(threading.get_ident()):
                told(report.text if (report := self.wait_report) else "", 0.0)
            if not finished and waits.out_of_reach(call.pulses()):
                raise ClusterDied(f"{self.wait_report}, and could not be freed.")

    def _interrupt(self, call: Call, ahead: Sequence[Call]) -> bool:
        """Interrupt ranks in a call, but not in steps that come before it: training would pause for that."""
        deadline = time.monotonic() + _AHEAD_PATIENCE_S
        for steps in ahead:
            steps.finished(max(0.0, deadline - time.monotonic()))
        return call.finished(0.0) or self._ranks.interrupt_until(call.finished)

    def mark_notes(self, call: Call) -> None:
        """Keep what ranks said of their surroundings, for the panel."""
        for note in call.notes():
            self._history.mark("note", note)

    def _finished(
        self, call: Call, timeout: float | None = None, show: Callable[[Call], None] = lambda call: None
    ) -> Call:
        with self._waited_for():  # whoever finds nobody waiting finds the model's new version
            try:
                return self.finish(call, timeout, show)
            finally:
                self._history.model_may_have_changed()
                self.mark_notes(call)

    def _tell_surroundings(self) -> None:
        """Let the ranks work and import where the notebook does, if that has changed since they were told."""
        self.check_alive()
        self._surroundings.tell(lambda surroundings: self._ranks.call("follow", surroundings))

    def pause(self) -> None:
        """Stop training after the steps under way, and wait for them."""
        self.check_alive()
        with self.interruptible():
            self._training.pause()

    @contextmanager
    def interruptible(
        self,
        stop_ranks: Callable[[], bool] | None = None,
        busy: Callable[[], list[int]] | None = None,
        done: Callable[[], bool] = lambda: False,
    ) -> Iterator[None]:
        """While somebody waits for the ranks inside, an interrupt reaches them, and says what came of it.

        Args:
            stop_ranks: interrupts them, and says whether they stopped in time; training by default.
            busy: the ranks that have not answered; those that train by default.
            done: whether what they were to do was done nevertheless.
        """
        with self._waited_for():
            try:
                yield
            except Interrupted:
                raise
            except KeyboardInterrupt:
                training = self._training
                explain = self._interrupts.explain
                raise explain(stop_ranks or training.interrupt, busy or training.waiting_for, done) from None

    @contextmanager
    def _waited_for(self) -> Iterator[None]:
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._touch()

    def _after_stall(self, call: Call) -> str:
        """Bring the ranks together again when some were freed from waiting; says what had happened."""
        call.finished(0.5)  # ranks that waited together are freed together
        if not call.apart():
            return ""
        wait_report = waits.ended(call.apart(), self._ranks.pulses(), call.pending(), self._ranks.size)
        if not wait_report:
            return ""
        if late := call.pending():
            self._ranks.interrupt_until(call.finished, late)
        what = f"{wait_report} (stall_limit_s={self._policy().stall_limit_s:g})."
        self._history.mark("stall", what)
        if left := call.pending():
            return f"{what} {name_ranks(left).capitalize()} could not be interrupted: use %hvd_restart."
        joined = False
        with suppress(TrainingFailed):
            joined = self._ranks.rejoin(patience_s=2.0)
        return f"{what} They were freed and {'were joined' if joined else 'will be joined'} again."


def pickled(value: Any, what: str) -> bytes:
    """A value as it travels; ``what`` it is called when it cannot.

    Raises:
        WorkloadError: it cannot travel.
    """
    try:
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    except GpumemError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"{what} cannot be sent to the ranks: {error}. Leave out open files, locks and connections; create them "
            "inside the function that runs there."
        ) from None


def fingerprint(workload: Any) -> bytes:
    """Of a workload as it travels, with what its functions use of the notebook: another one says that this changed.

    Raises:
        WorkloadError: it cannot travel.
    """
    return sha256(pickled(workload, "The workload")).digest()
