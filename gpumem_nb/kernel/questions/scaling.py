"""Throughput by the number of ranks: measured on some of those that run, with nothing started again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...report.scaling import NetworkReport, Scaled, ScalingReport
from ...shared.answers import Progress
from ...shared.errors import InvalidInput, WorkloadError
from ...shared.messages import RankInfo
from ...shared.questions import SWEEP_BYTES, StepsAmong, Sweep
from ...shared.settings import Settings
from ...shared.step_times import StepTimes
from ...shared.units import as_whole
from ..cluster import AsksRanks

LEAST_STEPS, MOST_STEPS = 4, 1000
LONGEST_MESSAGE_S = 2.0  # as far as smaller ones tell; larger ones are left out
_ROUNDS = 4  # in which numbers of ranks take turns, so that what changes on the machine meets all of them


class Scaling(AsksRanks):
    """Measures the ranks of one cluster."""

    def measure(self, ranks: Sequence[int] | None, steps: int, progress: Progress) -> ScalingReport:
        """Steps on these numbers of ranks.

        Raises:
            InvalidInput: no numbers of ranks that there are, or no number of steps that could be timed.
            WorkloadError: nothing is loaded, training goes on, or a step failed.
        """
        counts = self._counts(ranks)
        if (timed := as_whole(steps, LEAST_STEPS, MOST_STEPS)) is None:
            raise InvalidInput(
                f"{steps!r} steps cannot be measured: write a whole number from {LEAST_STEPS} to {MOST_STEPS}."
            )
        self._foreground.check_loaded()
        if self._training.busy:
            raise WorkloadError(
                "Training is going on, and would share the ranks with what is measured: %hvd_pause first."
            )
        with self._foreground.interruptible():
            self._training.apply()
        network = self.network(counts[-1], lambda what, done: progress(what, 0.1 * done)) if counts[-1] > 1 else None
        settings = self._training.settings
        found: dict[int, list[list[StepTimes]]] = {count: [[] for _ in range(count)] for count in counts}
        sent_bytes = 0
        for done in range(_ROUNDS):
            now = timed * (done + 1) // _ROUNDS - timed * done // _ROUNDS
            for place, count in enumerate(counts):
                what = f"steps on {count} of {len(self._ranks)} ranks"
                progress(what, 0.1 + 0.9 * (done + place / len(counts)) / _ROUNDS)
                for rank, answer in enumerate(self._among(count, settings, now)):
                    found[count][rank] += answer.times
                    sent_bytes = answer.sent_bytes
        return self._report(found, settings, network, sent_bytes)

    def network(self, count: int, progress: Progress) -> NetworkReport:
        """All-reduces of the first so many ranks.

        Raises:
            InvalidInput: that is one rank only.
        """
        if count < 2:
            raise InvalidInput("A single rank has no other rank to send to. Start two: %hvd_start 2")
        seconds: dict[int, float] = {}
        for place, size in enumerate(SWEEP_BYTES):
            if seconds and max(seconds.values()) * size / max(seconds) > LONGEST_MESSAGE_S:
                break  # each is sent a few times
            progress("timing all-reduces", place / len(SWEEP_BYTES))
            sweeps: list[Sweep | None] = self._ask("sweep_network", count, [size])
            seconds[size] = max(sweep.seconds[size] for sweep in sweeps if sweep)
        return NetworkReport(count, seconds)

    def _among(self, count: int, settings: Settings, steps: int) -> list[StepsAmong]:
        answers: list[StepsAmong] = self._ask("steps_among", count, settings, steps)
        for rank, answer in enumerate(answers):
            if answer.failure:
                raise WorkloadError(f"A step on {count} ranks failed on rank {rank}: {answer.failure.message}")
        if not all(answer.times for answer in answers[:count]):
            raise WorkloadError(f"A step on {count} ranks could not be timed. Try again.")
        return answers[:count]

    def _ask(self, function: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = self._foreground.call_alone(function, *arguments)
        return answers

    def _report(
        self,
        found: dict[int, list[list[StepTimes]]],
        settings: Settings,
        network: NetworkReport | None,
        sent_bytes: int,
    ) -> ScalingReport:
        batch = settings.samples_per_rank
        measured = tuple(Scaled(count, tuple(map(tuple, times)), batch * count) for count, times in found.items())
        return ScalingReport(measured, network, sent_bytes, self._hosts(), self._ranks[0].threads)

    def _hosts(self) -> tuple[tuple[int, int], ...]:
        hosts: dict[str, list[RankInfo]] = {}
        for info in self._ranks:
            if info.virtual:
                hosts.setdefault(info.host, []).append(info)
        return tuple((len({core for info in of for core in info.cores}) or 1, len(of)) for of in hosts.values())

    def _counts(self, ranks: Sequence[int] | None) -> list[int]:
        most = len(self._ranks)
        if ranks is None:
            return sorted({most, *(2**power for power in range(most.bit_length()) if 2**power < most)})
        if isinstance(ranks, str) or not isinstance(ranks, Iterable):
            raise InvalidInput(f"ranks={ranks!r} are not numbers of ranks: write them as a list, such as [1, 2].")
        counts = set[int]()
        for given in ranks:
            if (count := as_whole(given, 1, most)) is None:
                raise InvalidInput(f"{given!r} ranks cannot be measured: write numbers from 1 to {most}.")
            counts.add(count)
        if not counts:
            raise InvalidInput("No number of ranks was given: write some, such as [1, 2], or leave them out.")
        return sorted(counts)
