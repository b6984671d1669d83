"""Everything that the doctor's rules look at, as one value; rules ask neither ranks nor kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...report.bottleneck import Bottleneck, Changes, Circumstances
from ...report.configurations import Effect, Tried
from ...report.instead import Instead
from ...report.rescue import Rescue
from ...report.speed import WARM_UP_STEPS
from ...shared.forecast import LARGE_SEGMENT_BYTES
from ...shared.messages import DeviceUse, Leak, Ledger, RankInfo, Reading, Sample
from ...shared.questions import ModelFacts
from ...shared.readings import LiveBytes
from ...shared.settings import Settings
from ...shared.workload import WorkloadInfo
from ..instead import lighter
from ..prediction import Prediction

# Between live and reserved the allocator's own rounding made 3 to 32 % of difference in the models that were measured
# (docs/memory.md), and a pool's segment that is hardly used 20 MiB. What is more than both is worth a word, if it is a
# tenth of the limit, too: below that nothing would fit that does not.
_USUAL_SHARE, _USUAL_BYTES, _OF_LIMIT = 0.32, 2 * LARGE_SEGMENT_BYTES, 0.1

_STEPS_OF_A_LEAK = 20  # in which it must be seen to go on


def much_unused(reserved: int, used: int, limit: int | None) -> bool:
    """Return whether so much is reserved and not used that it is worth a word; in bytes."""
    return reserved - used > max(_USUAL_SHARE * reserved, _USUAL_BYTES, _OF_LIMIT * (limit or 0))


@dataclass(frozen=True, slots=True)
class OnRank:
    """One rank.

    Attributes:
        info: who it is.
        samples: steps done under the present settings, the latest last.
        reading: of its device now.
        use: what NVML says of that.
        facts: what it may hold for nothing.
        live: who holds its live bytes now.
    """

    info: RankInfo
    samples: tuple[Sample, ...] = ()
    reading: Reading | None = None
    use: DeviceUse | None = None
    facts: ModelFacts | None = None
    live: LiveBytes | None = None

    @property
    def warm(self) -> tuple[Sample, ...]:
        """The steps after those that warm up, if there are any."""
        return self.samples[WARM_UP_STEPS:] or self.samples

    @property
    def ledger(self) -> Ledger | None:
        """Of the latest recorded step."""
        return next((one.ledger for one in reversed(self.samples) if one.ledger), None)

    @property
    def live_peak_bytes(self) -> int | None:
        """The highest live bytes of these steps."""
        return max((one.live_peak_bytes for one in self.warm), default=None)


def still_grows(leaks: Sequence[Leak], samples: Sequence[Sequence[Sample]]) -> bool:
    """Return whether memory grew by half of a leak in the latest steps after it was found, or these were too few.

    Steps under other settings than the latest do not count: a flip frees memory, or takes more.

    Args:
        leaks: of one holder, by rank.
        samples: the latest steps of each rank.
    """
    for one in leaks:
        row = samples[one.rank]
        alike = [sample for sample in row if sample.done and sample.settings_id == row[-1].settings_id]
        later = [sample for sample in alike if sample.step > one.step][-_STEPS_OF_A_LEAK:]
        grown = later[-1].live_bytes - later[0].live_bytes if later else 0
        if len(later) < _STEPS_OF_A_LEAK or grown >= (len(later) - 1) * one.bytes_per_step / 2:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of a step on the rank with least room: live bytes by category, and what runs then."""

    bytes: int
    categories: Mapping[str, int]
    phase: str
    module: str

    @property
    def largest(self) -> str:
        """The category with most bytes."""
        return max(self.categories, key=self.categories.__getitem__)


@dataclass(frozen=True, slots=True)
class Evidence:
    """A session as it is.

    Attributes:
        settings: as they are.
        workload: what is loaded.
        ranks: in their order.
        tried: the configurations of what is loaded, the latest last.
        now: the present one, once a step was done under it.
        needs: what these settings are predicted to need and to bring; ``None`` where nothing could be said.
        larger: the same of larger micro-batches, where that was asked.
        largest_batch: the largest ``batch_size`` that fits, where that was asked.
        all_kept: what they are predicted to need and to bring without checkpointing, where that was asked.
        expandable: what they would need with segments that grow, where that was asked.
        verdicts: what the time of a step is lost to.
        leaks: what ranks keep from step to step, by holder.
        rescue: the latest step that was discarded, and is not fixed yet.
        stopped_for: why training stopped by itself, where no such step is to blame; empty if it did not.
        effect: what the latest flip did.
        foretold: what had been predicted of that flip.
        instead: what to train with in place of these settings, where they are not predicted to fit.
        noise_scale: of gradients, in samples.
        steps: done since it was loaded.
    """

    settings: Settings
    workload: WorkloadInfo
    ranks: tuple[OnRank, ...]
    tried: tuple[Tried, ...] = ()
    now: Tried | None = None
    needs: Prediction | None = None
    larger: Prediction | None = None
    largest_batch: int | None = None
    all_kept: Prediction | None = None
    expandable: Prediction | None = None
    verdicts: tuple[Bottleneck, ...] = ()
    leaks: tuple[tuple[Leak, ...], ...] = ()
    rescue: Rescue | None = None
    stopped_for: str = ""
    effect: Effect | None = None
    foretold: Prediction | None = None
    instead: Instead | None = None
    noise_scale: float | None = None
    steps: int = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.settings.samples_per_rank * self.size

    @property
    def wastes(self) -> bool:
        """Return whether a step reserves far more than it uses."""
        needs = self.needs
        return needs is not None and much_unused(needs.reserved_peak_bytes, needs.live_peak_bytes, needs.limit_bytes)

    @property
    def share(self) -> float | None:
        """Of the limit, what these settings need, without what they waste; ``None`` where either is not known."""
        needs = self.needs
        if needs is None or not needs.limit_bytes:
            return None
        return (needs.live_peak_bytes if self.wastes else needs.reserved_peak_bytes) / needs.limit_bytes

    @property
    def peak(self) -> Peak | None:
        """Of the rank with least room, as predicted for it; else as it was recorded last."""
        if self.needs and self.needs.categories:
            needs = self.needs
            return Peak(needs.live_peak_bytes, needs.categories, needs.phase, needs.module)
        ledgers = [rank.ledger for rank in self.ranks if rank.ledger]
        worst = max(ledgers, key=lambda one: one.peak_bytes, default=None)
        return Peak(worst.peak_bytes, worst.at_peak, worst.phase, worst.module) if worst else None

    def live_peak(self, nbytes: int | None) -> dict[str, int | None]:
        """Return a live peak as a number of the evidence: where a trial step ran out of memory, as a lower bound."""
        least = self.needs is not None and self.needs.lower_bound and nbytes == self.needs.live_peak_bytes
        return {"live_peak_at_least_bytes" if least else "live_peak_bytes": nbytes}

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks: the higher of what was measured and what whole steps on trial came to."""
        known = [one.samples_per_s for one in (self.now, self.needs) if one and one.samples_per_s]
        return max(known, default=None)

    def now_per_s(self, changes: Changes) -> float | None:
        """Return the samples/s to compare a flip's with: trial steps do not wait for workers, measured steps do."""
        if "num_workers" in changes:
            return self.now.samples_per_s if self.now else None
        return self.samples_per_s

    @property
    def circumstances(self) -> Circumstances:
        """Return what decides which changes are possible."""
        return Circumstances(self.settings, [rank.info for rank in self.ranks], self.workload)

    def tried_out(self, settings: Settings, model_version: int) -> bool:
        """Return whether the step that ran out of memory was tried out under these settings, and fits the model now."""
        same = self.rescue is not None and self.rescue.model_version == model_version
        instead = self.rescue.instead if self.rescue and same else None
        return instead is not None and any(one.fits and one.settings == settings for one in instead.tried)

    def lighter(self, category: str, phase: str) -> tuple[Changes, ...]:
        """Changes that may make a category smaller, those that keep the mathematics first."""
        return self.possible(lighter(self.settings, phase, self.workload.handles, {category: 1}, tried_out=False))

    def possible(self, wanted: Iterable[Settings]) -> tuple[Changes, ...]:
        """Return what leads to some settings, as far as they go with what is loaded and are not in use."""
        changed = (after.changed_from(self.settings) for after in wanted)
        return tuple(allowed for changes in changed if changes and (allowed := self.circumstances.allowed(**changes)))
