"""The ranks as the session sees them: start, call, interrupt, stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import cloudpickle

from ..internals.ipyparallel_internals import forget_sent
from ..shared.answers import Progress, Pulse
from ..shared.errors import ClusterDied, GpumemError, RankError, StartError, TrainingFailed
from ..shared.messages import RankConfig
from .calls import Call
from .interrupts import finish_anyway, shielded
from .launchers import Launcher
from .watch import Watch

INTERRUPT_TIMEOUT_S = 1.2
"""For ranks to stop what they do after an interrupt: the notebook gives the prompt back within 2 s in any case."""
INTERRUPT_PERIOD_S = 0.3
REJOIN_TIMEOUT_S = 10.0
_NOT_JOINED = (
    "The ranks could not be joined again yet ({}). Try again, or start again with %hvd_restart, which goes back to the "
    "last snapshot."
)
IN_PASSING_S = 1.0  # how long a request waits for those before it, when the ranks must be joined again


Posted = Callable[[Call], object]


def _ignored(call: Call) -> None:
    """Do nothing: the call is not watched."""


class Ranks:
    """A started cluster whose engines have been set up as Horovod ranks.

    Args:
        launcher: starts them.
        entry: importable module of the functions called over there (``call``, ``call_function``, ``run_cell``).
        config: what the ranks are told when they join each other.
        timeout_s: for the whole start.
        progress: told what is being waited for.

    Raises:
        StartError: the start failed; nothing is left running.
    """

    def __init__(
        self, launcher: Launcher, entry: Any, config: RankConfig, timeout_s: float, progress: Progress
    ) -> None:
        self._entry = entry
        self._calls: list[Call] = []
        self._joining: Call | None = None  # the request that joins the ranks again
        self._sending = threading.RLock()  # every rank gets the requests of several threads in the same order
        self.size = launcher.job.size
        deadline = time.monotonic() + timeout_s
        self._death: ClusterDied | None = None
        self._watch: Watch | None = None
        self._launched = launcher
        try:
            self._launched.start(deadline, progress)
            with self._launched.phase("horovod", progress):
                left = max(1.0, deadline - time.monotonic())
                joining = self.call("set_up", config)
                for _ in joining.slices(left):
                    self._launched.check_up()
                self.infos: list[Any] = joining.get()
            self._identities = [self._launched.identify_rank(info) for info in self.infos]
            self._launched.remote_hosts.look_after(self._identities)
            progress("ready", 1.0)
        except BaseException as error:
            tail = self._launched.log_tail()
            finish_anyway(lambda: self._launched.stop(timeout_s=0), "gpumem_nb ending")
            if isinstance(error, GpumemError) and not isinstance(error, ClusterDied):
                raise
            if isinstance(error, TimeoutError):
                raise StartError(
                    f"The ranks did not join each other within {timeout_s:g} s. Give them longer with --timeout. {tail}"
                ) from None
            if isinstance(error, Exception):
                raise StartError(f"The ranks could not be started: {error}. {tail}") from error
            raise

    @property
    def seconds(self) -> dict[str, float]:
        """Return how long each phase of the start took."""
        return self._launched.seconds

    def call(
        self, function: str, *arguments: Any, ranks: Sequence[int] | None = None, posted: Posted = _ignored
    ) -> Call:
        """Call a function of the engine's entry points by name.

        ``posted`` is told of the call before an interrupt can be: what the ranks do is never done behind our back.
        """
        return self._send(self._entry.call, function, cloudpickle.dumps(arguments), ranks=ranks, posted=posted)

    def post(self, function: str, *arguments: Any, posted: Posted = _ignored) -> Call:
        """Return the same to all ranks at once, where they are known to be joined: waits for nothing."""
        packed = cloudpickle.dumps(arguments)
        return self._post(self._entry.call, function, packed, ranks=range(self.size), posted=posted)

    def call_function(self, blob: bytes, ranks: Sequence[int] | None = None, posted: Posted = _ignored) -> Call:
        """Call a pickled function."""
        return self._send(self._entry.call_function, blob, ranks=ranks, posted=posted)

    def run_cell(
        self,
        source: str,
        title: str,
        result: str,
        memory: bool,
        ranks: Sequence[int] | None = None,
        posted: Posted = _ignored,
    ) -> Call:
        """Run code among the ranks' variables."""
        return self._send(self._entry.run_cell, source, title, result, memory, ranks=ranks, posted=posted)

    def pulses(self) -> dict[int, Pulse]:
        """Return what each rank does that has worked for more than a second on one request."""
        return {rank: pulse for call in self._calls for rank, pulse in call.pulses().items()}

    def pending(self) -> list[int]:
        """Return the ranks that have not answered everything yet."""
        return sorted({rank for call in self._calls for rank in call.pending()})

    def ahead_of(self, call: Call) -> list[Call]:
        """Return what ranks that have not answered ``call`` yet were asked before it, and have not answered either."""
        calls = list(self._calls)
        earlier = calls[: calls.index(call)] if call in calls else []
        return [one for one in earlier if set(one.pending()) & set(call.pending())]

    def rejoin(self, timeout_s: float = 0.0) -> bool:
        """Join the ranks again if Horovod was shut down; says whether they are joined.

        They are not while a rank still works (``timeout_s`` is how long that is waited for): the others would wait for
        it where no interrupt reaches them.

        Raises:
            TrainingFailed: they could not be joined.
            ClusterDied: they are gone.
        """
        deadline = time.monotonic() + timeout_s
        while self._joining or self._separated():
            if self._death:
                raise copy(self._death)
            if joining := self._joining or self._begin_joining():
                self._await_joined(joining)
            elif not all(call.finished(max(0.0, deadline - time.monotonic())) for call in list(self._calls)):
                return False
        return True

    def look_after(self, died: Callable[[ClusterDied], None]) -> None:
        """Notice from now on when a process ends that the cluster needs: every call fails, ``died`` is told why."""

        def tell(error: ClusterDied) -> None:
            self._abort(error)
            died(error)

        self._watch = Watch(self._launched, self._identities, self._last_output, tell)
        self._watch.start()

    def interrupt_until(
        self, stopped: Callable[[float], bool], which: Callable[[], Sequence[int]] | None = None
    ) -> bool:
        """Interrupt ranks (all by default) until ``stopped(timeout)`` says that they did; says whether in time.

        A signal that comes before a rank has begun what it is to stop is lost, hence more than one: each time to those
        of ``which()``, because a rank that is done with it trains on. It goes to the ranks themselves: a signal to
        mpiexec would end the job.
        """
        deadline = time.monotonic() + INTERRUPT_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            for rank in which() if which else range(self.size):
                self._identities[rank].signal(signal.SIGINT)
            if stopped(min(INTERRUPT_PERIOD_S, left)):
                return True
        return False

    def nudge(self) -> None:
        """Ask the ranks to end the chunks under way; one of them is enough, because they agree on it."""
        self._identities[0].signal(self._entry.NUDGE)

    def stopped(self) -> dict[int, str]:
        """Ranks that are stopped (SIGSTOP), with the command that continues them."""
        frozen = self._watch.stopped() if self._watch else []
        return {rank: f"{who.shell}kill -CONT {who.pid}" for rank, who in enumerate(self._identities) if who in frozen}

    def stop(self, why: ClusterDied | None = None) -> None:
        """End everything; calls that still wait for an answer raise that, or ``why``."""
        if self._watch:
            self._watch.stop()
        self._abort(why or ClusterDied("The ranks were ended."))
        self._launched.stop()

    def _abort(self, error: ClusterDied) -> None:
        self._death = self._death or error
        for call in list(self._calls):
            call.abort(self._death)

    def _last_output(self, rank: int) -> str:
        calls = [call for call in list(self._calls) if rank in call.pending()]
        return "\n".join(call.outputs()[call.ranks.index(rank)] for call in calls)

    def _send(self, function: Any, *arguments: Any, ranks: Sequence[int] | None, posted: Posted) -> Call:
        self.rejoin(IN_PASSING_S)
        return self._post(function, *arguments, ranks=range(self.size) if ranks is None else ranks, posted=posted)

    def _post(self, function: Any, *arguments: Any, ranks: Sequence[int], posted: Posted = _ignored) -> Call:
        client = self._launched.client
        with shielded(), self._sending:
            if self._death:
                raise copy(self._death)
            results = [client[rank].apply_async(function, *arguments) for rank in ranks]
            call = Call(list(ranks), results, self._entry.PULSE)
            self._calls.append(call)
            posted(call)
            forget_sent(client)
        if self._death:
            call.abort(self._death)
        return call

    def _separated(self) -> bool:
        """Return whether a rank answered that it came apart from the others; forget all other answered calls."""
        with shielded(), self._sending:
            apart = [call for call in self._calls if call.apart()]
            self._calls = [call for call in self._calls if call in apart or call.pending()]
            return bool(apart)

    def _begin_joining(self) -> Call | None:
        """Ask all ranks to join each other, once none of them works any more; ``None`` before that."""
        with shielded(), self._sending:
            if self._joining is None and not any(call.pending() for call in self._calls):
                self._calls = []
                self._joining = self._post(self._entry.call, "rejoin", cloudpickle.dumps(()), ranks=range(self.size))
            return self._joining

    def _await_joined(self, joining: Call) -> None:
        try:
            joining.get(REJOIN_TIMEOUT_S)
        except TimeoutError as error:
            # They are slow or stopped, not dead: the next request waits for the same answer.
            raise TrainingFailed(_NOT_JOINED.format(error)) from None
        except RankError as error:
            self._end_joining(joining)  # the ranks say that they are still apart: the next request tries once more
            raise TrainingFailed(_NOT_JOINED.format(error)) from None
        self._end_joining(joining)

    def _end_joining(self, joining: Call) -> None:
        with shielded(), self._sending:
            if self._joining is joining:
                self._joining = None
