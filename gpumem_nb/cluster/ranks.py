"""The ranks as the session sees them: start, call, interrupt, stop."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from ..errors import ClusterDied, GpumemError, RankError, StartError
from ..sample import Pulse
from .calls import Call
from .launch import Launched, Progress, environment

INTERRUPT_PATIENCE_S = 2.0
REJOIN_PATIENCE_S = 10.0
IN_PASSING_S = 1.0  # how long a request waits for those before it, when the ranks must be joined again


class Ranks:
    """A started cluster whose engines have been set up as Horovod ranks.

    Args:
        n: number of ranks.
        threads: CPU threads of each.
        device: ``cuda`` or ``cpu``.
        entry: importable module of the functions called over there (``call``, ``call_function``, ``run_cell``,
            ``start_up_code``).
        set_up: name and argument of the function that joins the ranks.
        timeout: seconds for the whole start.

    Attributes:
        stall_limit_s: how long ranks wait for one another.
    """

    def __init__(
        self, n: int, threads: int, device: str, entry: Any, set_up: tuple[str, Any], timeout: float, progress: Progress
    ) -> None:
        self._entry = entry
        self._calls: list[Call] = []
        self._apart = False
        self.stall_limit_s: float = set_up[1].stall_limit_s
        self._sending = threading.RLock()  # every rank gets the requests of several threads in the same order
        self.size = n
        deadline = time.monotonic() + timeout
        self._launched = Launched(n, environment(threads, device), entry.start_up_code)
        try:
            self._launched.start(deadline, progress)
            with self._launched.phase("horovod", progress):
                name, argument = set_up
                left = max(1.0, deadline - time.monotonic())
                self.infos: list[Any] = self.call(name, argument).get(left)
            progress("ready", 1.0)
        except BaseException as error:
            tail = self._launched.log_tail()
            self._launched.stop()
            if isinstance(error, GpumemError) and not isinstance(error, ClusterDied):
                raise
            if isinstance(error, TimeoutError):
                raise StartError(
                    f"The ranks did not join each other within {timeout:g} s. Give them longer with --timeout. {tail}"
                ) from None
            if isinstance(error, Exception):
                raise StartError(f"The ranks could not be started: {error}. {tail}") from error
            raise

    @property
    def seconds(self) -> dict[str, float]:
        """How long each phase of the start took."""
        return self._launched.seconds

    def call(self, function: str, *arguments: Any, ranks: Sequence[int] | None = None) -> Call:
        """Call a function of the engine's entry points by name."""
        return self._send(self._entry.call, function, cloudpickle.dumps(arguments), ranks=ranks)

    def call_function(self, blob: bytes, ranks: Sequence[int] | None = None) -> Call:
        """Call a pickled function."""
        return self._send(self._entry.call_function, blob, ranks=ranks)

    def run_cell(self, source: str, title: str, result: str, ranks: Sequence[int] | None = None) -> Call:
        """Run code among the ranks' variables."""
        return self._send(self._entry.run_cell, source, title, result, ranks=ranks)

    def pulses(self) -> dict[int, Pulse]:
        """What each rank does that has worked for more than a second on one request."""
        return {rank: pulse for call in self._calls for rank, pulse in call.pulses().items()}

    def pending(self) -> list[int]:
        """The ranks that have not answered everything yet."""
        return sorted({rank for call in self._calls for rank in call.pending()})

    def set_stall_limit(self, seconds: float) -> None:
        """Let ranks wait for one another no longer than this."""
        self.stall_limit_s = seconds
        self.call("set_stall_limit", seconds)

    def rejoin(self, patience_s: float = 0.0) -> bool:
        """Join the ranks again if Horovod was shut down; says whether they are joined.

        They are not while a rank still works (``patience_s`` is how long that is waited for): the others would wait for
        it where no interrupt reaches them.
        """
        with self._sending:
            self._apart = self._apart or any(call.apart() for call in self._calls)
            if not self._apart:
                self._calls = [call for call in self._calls if call.pending()]
                return True
            deadline = time.monotonic() + patience_s
            if not all(call.finished(max(0.0, deadline - time.monotonic())) for call in self._calls):
                return False
            self._calls = []
            try:
                self._post(self._entry.call, "rejoin", cloudpickle.dumps(()), ranks=range(self.size)).get(
                    REJOIN_PATIENCE_S
                )
            except (TimeoutError, RankError) as error:
                raise ClusterDied(
                    f"The ranks could not be joined again ({error}). Start them again with %hvd_restart."
                ) from None
            self._apart = False
            return True

    def interrupt_until(self, stopped: Callable[[float], bool], ranks: Sequence[int] | None = None) -> None:
        """Interrupt ranks (all by default) until ``stopped(timeout)`` says that they did, for two seconds at most.

        A signal that comes before a rank has begun what it is to stop is lost, hence more than one. It goes through the
        engines' nannies: a signal to mpiexec would end the job.
        """
        deadline = time.monotonic() + INTERRUPT_PATIENCE_S
        while True:
            client = self._launched.client
            delivery = client.send_signal(
                signal.SIGINT, targets=list(client.ids if ranks is None else ranks), block=False
            )
            done = stopped(0.3) or time.monotonic() > deadline
            concurrent.futures.wait([delivery], timeout=1.0)  # a signal still on its way would hit what runs next
            if done:
                return

    def nudge(self) -> None:
        """Ask the ranks to end the chunks under way; one of them is enough, because they agree on it."""
        with self._sending:
            self._launched.client.send_signal(self._entry.NUDGE, targets=[0], block=False)

    def dead(self) -> list[int]:
        """Ranks that are gone."""
        alive = set(self._launched.client.ids)
        return [rank for rank in range(self.size) if rank not in alive]

    def last_words(self) -> str:
        """What the processes wrote last."""
        return self._launched.log_tail()

    def stop(self) -> None:
        """End everything."""
        self._launched.stop()

    def _send(self, function: Any, *arguments: Any, ranks: Sequence[int] | None) -> Call:
        chosen = range(self.size) if ranks is None else ranks
        if missing := [rank for rank in self.dead() if rank in chosen]:
            raise ClusterDied(f"Rank {missing[0]} has ended. Start again with %hvd_restart. {self.last_words()}")
        with self._sending:
            self.rejoin(IN_PASSING_S)
            return self._post(function, *arguments, ranks=chosen)

    def _post(self, function: Any, *arguments: Any, ranks: Sequence[int]) -> Call:
        client = self._launched.client
        results = [client[rank].apply_async(function, *arguments) for rank in ranks]
        call = Call(list(ranks), results, self._entry.PULSE)
        self._calls.append(call)
        return call
