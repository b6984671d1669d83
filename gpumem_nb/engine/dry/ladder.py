"""Settings that would fit in place of others: lighter values of knobs, and smaller micro-batches of as many samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...shared.categories import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATE, TEMPORARIES
from ...shared.errors import InvalidInput
from ...shared.forecast import Kernels, Lighter, Target
from ...shared.knobs import Need
from ...shared.knobs.step import halved
from ...shared.settings import Settings, mildest_first
from ...shared.workload import Handles
from .batches import Batches
from .hollow import Given
from .run import Run, surely_within


class Ladder:
    """Runs of one workload under settings that need ever less memory, each taken once for each set of kernels.

    Args:
        given, batches: the workload and its data.
        settings: that were asked about.
        ranks: how many train together.
    """

    def __init__(self, given: Given, batches: Batches, settings: Settings, ranks: int) -> None:
        self._given, self._batches, self._settings, self._ranks = given, batches, settings, ranks
        self._runs: dict[tuple[Settings, Kernels], Run] = {}

    def run(self, settings: Settings, used: Kernels) -> Run:
        """Return steps under these settings.

        Raises:
            WorkloadError: none can be taken.
        """
        if (settings, used) not in self._runs:
            with Run(self._given, self._batches, settings, used, self._ranks) as run:
                run.take()
            self._runs[settings, used] = run
        return self._runs[settings, used]

    def lighter(self, asked: Target) -> Iterator[Lighter]:
        """Yield settings of the same global batch that surely fit a GPU; if none does, the lightest that was tried.

        Single changes come first, and of these the one that changes least. More is tried where none of them is enough:
        first what keeps the mathematics, then all of it, at last another update.
        """
        self._last: Lighter | None = None
        found = False
        for rung in self._rungs(asked):
            for settings, splits in rung:
                one = self._split(settings, asked) if splits else self._whole(settings, asked)
                if one is not None:
                    found = True
                    yield one
            if found:
                return
        if self._last:
            yield self._last

    def _rungs(self, asked: Target) -> Iterator[list[tuple[Settings, bool]]]:
        """Yield settings, and whether to split their micro-batches; those of one rung change about as much."""
        now = self._settings
        with self.run(now, asked.kernels) as run:
            phase, handles = run.found(asked).forecast.phase, run.handles
        if phase == "update":
            yield [(one, False) for one in _other_updates(now, handles)]
        single = [_usable(one, asked.kernels) for one in mildest_first(Need(ACTIVATIONS, "forward", now, handles))]
        single = [one for one in single if one.batch_size == now.batch_size]
        yield [(now, True), *((one, False) for one in single)]
        exact = _together(now, [one for one in single if one.same_mathematics(now)])
        every = _together(now, single)
        for one in dict.fromkeys((exact, every)):
            yield [(one, False)] * (one not in (now, *single))
            yield [(one, True)] * (one != now)
        lightest = every
        for one in _other_updates(every, handles):
            lightest = self._going_together(lightest.replace(**one.changed_from(every)))
            yield [(lightest, False)]
            yield [(lightest, True)]

    def _going_together(self, settings: Settings) -> Settings:
        """Return the same with an optimizer whose state ranks can share, or with all of it on each."""
        try:
            settings.check_together(self._ranks)
        except InvalidInput:
            return settings.replace(shard_optimizer="off", shard_gradients="off")
        return settings

    def _whole(self, settings: Settings, asked: Target) -> Lighter | None:
        """Return these settings if they fit."""
        try:
            with self.run(settings, asked.kernels) as run:
                return self._if_fits(settings, run, asked)
        except (Exception, SystemExit):  # the user's code, or an optimizer that has no other way for its update
            return None

    def _split(self, settings: Settings, asked: Target) -> Lighter | None:
        """Return these settings in the largest micro-batches that fit, of about as many samples a step."""
        smaller = None if self._batches.fixed else halved(settings)
        if smaller is None:
            return None
        try:
            with self.run(smaller, asked.kernels) as run:
                size = run.largest(asked)
                while smaller.batch_size > max(size, 1):
                    smaller = halved(smaller, settings)
                    assert smaller
                return self._if_fits(smaller, run, asked)
        except (Exception, SystemExit):  # the user's code may take no other number of samples
            return None

    def _if_fits(self, settings: Settings, run: Run, asked: Target) -> Lighter | None:
        of = run.found(asked, settings.batch_size)
        self._last = Lighter(settings, of)
        return self._last if surely_within(of.forecast, asked, of.limit_bytes) else None


def _other_updates(settings: Settings, handles: Handles) -> list[Settings]:
    """Return what the update, and what it is given, may be instead, the mildest first; of the same samples and types.

    Weights in bf16 are no other update, and not every GPU computes with them.
    """
    categories = TEMPORARIES, GRADIENTS, OPTIMIZER_STATE
    needs = (Need(category, "update", settings, handles, tried_out=True) for category in categories)
    found = (one for need in needs for one in mildest_first(need))
    return [
        one
        for one in found
        if one.samples_per_rank == settings.samples_per_rank and one.precision == settings.precision
    ]


def _usable(settings: Settings, used: Kernels) -> Settings:
    """Return the same with the 16 bits that a GPU computes in."""
    narrow = settings.precision == "bf16" and not used.ampere
    return settings.replace(precision="fp16") if narrow else settings


def _together(now: Settings, each: list[Settings]) -> Settings:
    """Return all of these changes at once."""
    changes: Mapping[str, Any] = {}
    for one in each:
        changes = {**changes, **one.changed_from(now)}
    return now.replace(**changes)
