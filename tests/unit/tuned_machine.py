"""A machine whose memory and speed are known, on which the tuner searches in no time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpumem_nb.planning.fit import Missed, settled, verdict
from gpumem_nb.planning.prediction import DOES_NOT_FIT, Prediction
from gpumem_nb.planning.tuning.record import Candidate, Record, TrialTimes
from gpumem_nb.planning.tuning.result import TuneResult
from gpumem_nb.planning.tuning.search import search
from gpumem_nb.planning.tuning.space import Space, space
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Splits, WorkloadInfo

MIB = 2**20
RANKS = 2
WORKLOAD = WorkloadInfo("mine", 1000, 4000, 4096, 4)


def space_of(present: Settings, workload: WorkloadInfo = WORKLOAD, **options: Any) -> Space:
    def ask(changes: Mapping[str, Any]) -> Settings:
        after = present.replace(**changes)
        if after.samples_per_rank * RANKS > (workload.dataset_len or 0):
            raise InvalidInput("too large")
        return after

    return space(present, workload, RANKS, ask, **options)


def bytes_of(settings: Settings) -> int:
    each = {"none": 8, "blocks": 3, "sqrt": 4}[settings.checkpointing] * (1 if settings.precision == "fp32" else 0.6)
    return int(MIB * (20 + each * settings.batch_size))


def seconds_of(settings: Settings) -> float:
    """Of a step: calling operators costs as much in a micro-batch of any size."""
    recomputing = 1.0 if settings.checkpointing == "none" else 1.33
    of_precision = {"fp32": 1.0, "fp16": 0.7, "bf16": 0.6}[settings.precision]
    update = {"default": 0.02, "foreach": 0.02, "loop": 0.05, "fused": 0.01}[settings.optimizer_impl]
    micro = (0.03 + 0.004 * settings.batch_size * of_precision) * recomputing
    return float(settings.accumulation_steps * micro + update)


def said_of(settings: Settings, reserved: int, limit: int | None, error: int = 0) -> Prediction:
    low, high = reserved - error, reserved + error
    said = verdict(low, high, limit, limit is None or reserved <= limit)
    return Prediction(settings, reserved, reserved, None, low, high, limit, said, {}, "", "", "", 0.0)


class Machine:
    """Measures in no time; counts seconds by itself."""

    def __init__(
        self,
        start: Settings,
        limit_bytes: int | None,
        seconds: float,
        noise: float = 0.0,
        error_bytes: int = 0,
        more: Callable[[Settings], float] = lambda settings: 1.0,
        step_s: Callable[[Settings], float] = seconds_of,
        running: Settings | None = None,
    ) -> None:
        self.running = running
        self.more = more  # memory that whole steps take, times what small ones say
        self.step_s = step_s
        self.record = Record(start)
        self.limit_bytes = limit_bytes
        self.error_bytes = error_bytes  # of what is said of memory
        self.seconds = seconds
        self.spent_s = 0.0
        self.times = TrialTimes()
        self.measured: list[Settings] = []
        self._noise = random.Random(0)
        self._share = noise

    def time_spent(self) -> float:
        return self.spent_s / self.seconds

    def time_for(self, settings: Settings) -> bool:
        ahead_s = self.times.ahead_s(settings, settings in self.record.candidates) if self.record.measured else 0.0
        return self.seconds - self.spent_s > ahead_s

    def fits(self, settings: Settings) -> bool:
        known = self.record.candidates
        if settings not in known:
            self.spent_s += 0.1
            self.times.small_steps(0.1)
            reserved = bytes_of(settings)
            said = said_of(settings, reserved, self.limit_bytes, self.error_bytes)
            known[settings] = Candidate(settings, settled(said, Missed(), self._came(said)))
        return known[settings].fits

    def _came(self, said: Prediction) -> tuple[int, int] | None:
        """What training has shown, of the settings that it runs under."""
        return (said.live_peak_bytes, said.reserved_peak_bytes) if said.settings == self.running else None

    def measure(self, settings: Settings) -> None:
        assert self.record.candidates[settings].fits, "nothing is measured that is not expected to fit"
        self.measured.append(settings)
        step_s = self.step_s(settings)
        self.spent_s += 3 * step_s
        self.times.turn(settings, 3 * step_s, step_s)
        noise = 1 + self._noise.gauss(0, self._share)
        rate = settings.samples_per_rank * RANKS / step_s * noise
        reserved = round(bytes_of(settings) * self.more(settings))
        said = said_of(settings, reserved, self.limit_bytes, self.error_bytes)
        said = replace(said, measured=True, samples_per_s=rate if said.verdict != DOES_NOT_FIT else None)
        self.record.candidates[settings].took_steps(settled(said, Missed(), self._came(said)))


def tuned(
    present: Settings,
    limit_mib: float | None,
    seconds: float = 100.0,
    noise: float = 0.0,
    error_mib: float = 0.0,
    more: Callable[[Settings], float] = lambda settings: 1.0,
    step_s: Callable[[Settings], float] = seconds_of,
    running: Settings | None = None,
    **options: Any,
) -> Any:
    choice = space_of(present, **options)
    limit = None if limit_mib is None else round(MIB * limit_mib)
    machine = Machine(choice.start, limit, seconds, noise, round(MIB * error_mib), more, step_s, running)
    search(choice, machine)
    result = TuneResult(
        present=present,
        space=choice,
        looked_at=tuple(machine.record.candidates.values()),
        budget_bytes=machine.limit_bytes,
        ranks=RANKS,
        seconds=machine.spent_s,
        given_s=seconds,
        longest_s=machine.times.longest_s,
        stopped="",
        refused={},
        splits=Splits(mean=True),
        _set=lambda _: None,
    )
    return result, machine, choice
