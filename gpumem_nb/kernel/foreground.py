"""Calls that the notebook waits for: an interrupt reaches the ranks, and ranks that stalled are joined again."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..cluster.calls import Call
from ..cluster.interrupts import let_finish, shielded
from ..cluster.ranks import Posted, Ranks
from ..report import waits
from ..report.rescue import stalled
from ..shared.answers import Progress
from ..shared.errors import ClusterDied, Interrupted, NoSession, RankError, TrainingFailed, WorkloadError
from ..shared.messages import Surroundings
from ..shared.units import RankChoice, choose_ranks, name_ranks
from .history import History
from .policy import Policy
from .training import Training

RESUMING = "gpumem_nb resuming"
"""Names the thread that puts a state in place, or settles what a failed load has left: nothing else may overtake it."""
_BUSY_OTHERWISE = "Interrupted. The ranks are doing something else, which goes on{}. To end that: %hvd_restart"
_BEGUN_S = 0.1  # for what had to wait for steps: it may be over in a moment, and the ranks in the next step
_AHEAD_TIMEOUT_S = 0.8  # for steps that come before what is interrupted, and end at the next one; a busy machine's too
_OUTPUT_TIMEOUT_S = 1.0  # for the last output of a rank, which may come after its answer


class Followed:
    """The paths that ranks were told last. Asked before each request, so it looks for those alone that were missing."""

    def __init__(self) -> None:
        self._told: tuple[str, ...] = ()
        self._missing: list[str] = []  # of the paths; may be made later

    def tell(self, send: Callable[[Surroundings], object]) -> None:
        """Send the working directory and the paths of this process, if they are not what was sent last."""
        try:
            folder = os.getcwd()
        except OSError:  # it was deleted
            return
        now = (folder, *sys.path)
        if now == self._told and not any(map(os.path.exists, self._missing)):
            return
        paths = dict.fromkeys(os.path.abspath(path) for path in sys.path if isinstance(path, str))
        there = tuple(path for path in paths if os.path.exists(path))
        send(Surroundings(folder, there))
        self._told, self._missing = now, [path for path in paths if path not in there]


class Foreground:
    """Asks the ranks of one cluster, which training keeps busy beside it, and waits for their answers.

    Args:
        policy: what the session does by itself, as it is now.
        ended: why the ranks are gone, in words; empty while they live.
        touch: told that the session is in use.
    """

    def __init__(
        self,
        ranks: Ranks,
        training: Training,
        history: History,
        policy: Callable[[], Policy],
        ended: Callable[[], str],
        touch: Callable[[], None],
    ) -> None:
        self._ranks = ranks
        self._training = training
        self._history = history
        self._policy = policy
        self._ended = ended
        self._touch = touch
        self._interrupts = InterruptTracker()
        self._waiting = 0  # calls under way that are waited for
        self._surroundings = Followed()
        self._told: dict[int, Progress] = {}  # by the thread that waits

    @property
    def busy(self) -> bool:
        """Return whether the notebook waits for the ranks."""
        return self._waiting > 0

    @property
    def in_vain(self) -> bool:
        """Return whether some ranks did not stop when they were interrupted last."""
        return self._interrupts.in_vain

    @property
    def wait_report(self) -> waits.WaitReport | None:
        """Return what takes long, and who waits for whom; ``None`` when nothing does."""
        if self._ended():
            return None
        return waits.now(self._ranks.pulses(), self._ranks.pending(), self._ranks.size)

    @contextmanager
    def telling(self, progress: Progress) -> Iterator[None]:
        """Inside, ``progress`` is told what the ranks are doing while the notebook waits for them."""
        thread = threading.get_ident()
        before, self._told[thread] = self._told.get(thread), progress
        try:
            yield
        finally:
            del self._told[thread]
            if before:
                self._told[thread] = before

    def check_alive(self) -> None:
        """Raise what :meth:`check_ranks` does, once a resume that goes on by itself has ended."""
        let_finish(RESUMING)
        self.check_ranks()

    def check_ranks(self) -> None:
        """Raise for ranks that are gone.

        Raises:
            NoSession: they were stopped.
            ClusterDied: they have ended otherwise.
        """
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
        then: Posted = lambda call: None,
    ) -> list[Any]:
        """Call a function of the ranks' entry points by name; its answers in rank order.

        Args:
            then: called with the finished call once all ranks have done it, also when an interrupt came too late to
                stop them: for what the kernel must know from then on. It may not wait.
        """

        def post(posted: Posted) -> Call:
            return self.ask(function, *arguments, ranks=ranks, posted=posted)

        return self.finish(post, timeout, if_done(then)).get()

    def call_alone(self, function: str, *arguments: Any, undone: bool = False) -> list[Any]:
        """Return the same of all ranks, while no chunk of training is sent.

        Args:
            undone: whether it leaves nothing: behind another request an interrupt leaves it to itself.
        """
        return self.finish(lambda posted: self._training.ask_alone(posted, function, *arguments), undone=undone).get()

    def ask(self, function: str, *arguments: Any, ranks: RankChoice = None, posted: Posted = lambda call: None) -> Call:
        """Begin what :meth:`call` waits for."""
        self.tell_surroundings()
        return self._ranks.call(function, *arguments, ranks=choose_ranks(ranks, self._ranks.size), posted=posted)

    def finish(
        self,
        post: Callable[[Posted], Call],
        timeout: float | None = None,
        ended: Posted = lambda call: None,
        show: Callable[[Call], None] = lambda call: None,
        undone: bool = False,
    ) -> Call:
        """Post a call and wait for it. The first error is raised at once; an interrupt or a time-out reaches the ranks.

        Args:
            post: posts it, and tells the function that it is given before an interrupt is heard.
            ended: called with it once it is waited for no more, whatever came of it. It may not wait.
            show: called with it now and then meanwhile.
            undone: as :meth:`call_alone` says.

        Raises:
            RankError: the first error of a rank; ``Stalled`` if ranks had waited for others in it.
            Interrupted: stop was pressed; what came of it.
            ClusterDied: a rank that others wait for cannot be freed.
        """
        asked: list[Call] = []

        def settle() -> None:
            with shielded():
                if asked:
                    ended(asked.pop())

        with self.waited_for():  # once the session is not busy, it is known what came of it
            try:
                call = self._posted_and_done(post, asked, timeout, show, undone)
                settle()
                return call
            except BaseException:  # an interrupt may come between any two lines
                settle()
                raise

    def _posted_and_done(
        self,
        post: Callable[[Posted], Call],
        asked: list[Call],
        timeout: float | None,
        show: Callable[[Call], None],
        undone: bool,
    ) -> Call:
        def stop_ranks() -> bool:
            return all(map(self._interrupt, asked))

        def pending() -> list[int]:
            return [rank for call in asked for rank in call.pending()]

        with self.interruptible(stop_ranks, pending, lambda: any(call.went_well() for call in asked)):
            try:
                call = post(asked.append)
                self._training.make_way()
                self._wait_for(call, timeout, show)
            except KeyboardInterrupt:
                if asked and undone and not self.in_vain and self._behind_others(asked[0]):
                    report = self.wait_report
                    raise Interrupted(_BUSY_OTHERWISE.format(f" ({report})" if report else "")) from None
                raise
            except TimeoutError:
                self._interrupt(call)
                raise
            except RankError as error:
                raise stalled(error, self._after_stall(call), call.failed_trial()) from None
        self._interrupts.in_vain = False  # they answer
        return call

    def _behind_others(self, call: Call) -> bool:
        """Return whether ranks are doing something else than training's steps, requested before this."""
        steps = self._training.under_way()
        return any(one not in steps for one in self._ranks.ahead_of(call))

    def _wait_for(self, call: Call, timeout: float | None, show: Callable[[Call], None]) -> None:
        for finished in call.slices(timeout):
            if finished:
                call.settle(_OUTPUT_TIMEOUT_S)
            show(call)
            if told := self._told.get(threading.get_ident()):
                told(report.text if (report := self.wait_report) else "", 0.0)
            if not finished and waits.out_of_reach(call.pulses()):
                raise ClusterDied(f"{self.wait_report}, and could not be freed.")

    def _interrupt(self, call: Call) -> bool:
        """Interrupt ranks in a call, but not in steps that come before it: training would pause for that."""
        self._training.make_way()  # the interrupt may have come before that
        before = self._ranks.ahead_of(call)
        ahead = [steps for steps in self._training.under_way() if steps in before]
        deadline = time.monotonic() + _AHEAD_TIMEOUT_S
        for steps in ahead:
            steps.finished(max(0.0, deadline - time.monotonic()))
        return call.finished(_BEGUN_S if ahead else 0.0) or self._ranks.interrupt_until(call.finished, call.pending)

    def mark_notes(self, call: Call) -> None:
        """Keep what ranks said of their surroundings, for the panel."""
        for note in call.notes():
            self._history.mark("note", note)

    def tell_surroundings(self) -> None:
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
        """While the notebook waits for the ranks inside, an interrupt reaches them, and says what came of it.

        Args:
            stop_ranks: interrupts them, and says whether they stopped in time; training by default.
            busy: the ranks that have not answered; those that train by default.
            done: whether what they were to do was done nevertheless.
        """
        with self.waited_for():
            try:
                yield
            except Interrupted:
                raise
            except KeyboardInterrupt:
                training = self._training
                explain = self._interrupts.explain
                raise explain(stop_ranks or training.interrupt, busy or training.waiting_for, done) from None

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Inside, the session is busy."""
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
        if call.pending():
            self._ranks.interrupt_until(call.finished, call.pending)
        what = f"{wait_report} (stall_limit_s={self._policy().stall_limit_s:g})."
        self._history.mark("stall", what)
        if left := call.pending():
            return f"{what} {name_ranks(left).capitalize()} could not be interrupted: use %hvd_restart."
        joined = False
        with suppress(TrainingFailed):
            joined = self._ranks.rejoin(timeout_s=2.0)
        return f"{what} They were freed and {'were joined' if joined else 'will be joined'} again."


AGAIN_S = 2.0
"""Two interrupts within this time mean that interrupting the ranks does not help."""


class InterruptTracker:
    """Remembers when stop was pressed last.

    Attributes:
        in_vain: whether some ranks did not stop at the latest interrupt.
    """

    def __init__(self) -> None:
        self._last_s = -AGAIN_S
        self.in_vain = False

    def again(self) -> bool:
        """Stop is pressed now; says whether for the second time within two seconds."""
        before, self._last_s = self._last_s, time.monotonic()
        return self._last_s - before < AGAIN_S

    def explain(
        self, stop_ranks: Callable[[], bool], busy: Callable[[], list[int]], done: Callable[[], bool]
    ) -> Interrupted:
        """Interrupt the ranks and say in words what came of it.

        Args:
            stop_ranks: interrupts them; says whether they stopped in time.
            busy: the ranks that have not answered.
            done: whether what was to be stopped had come to its end by then.
        """
        again = self.again()
        try:
            stopped = stop_ranks()
        except KeyboardInterrupt:  # pressed while waiting for the ranks
            again, stopped = True, False
        finally:
            self._last_s = time.monotonic()
        self.in_vain = not stopped
        if stopped and not again and done():
            return Interrupted("Interrupted, but the ranks had come to the end of it by then. They are ready.")
        if stopped and not again:
            return Interrupted("Interrupted. The ranks stopped what they were doing and are ready.")
        waiting = busy()
        state = "The ranks are ready."
        if waiting:
            have, they, stop = ("has", "it", "stops") if len(waiting) == 1 else ("have", "they", "stop")
            state = (
                f"{name_ranks(waiting).capitalize()} {have} not stopped yet: {they} {stop} when the code that cannot "
                f"be interrupted ends (%hvd_status shows whether {they} did); a rank that waits for another does not."
            )
        return Interrupted(
            f"Interrupted{' twice' * again}. {state} To end the ranks, start them again and restore the training: "
            "%hvd_restart"
        )


def if_done(then: Posted) -> Posted:
    """Return what calls ``then`` with a call that all ranks have done, and with no other."""
    return lambda call: then(call) if call.went_well() else None
