"""Gathers what the doctor's rules look at, and predicts the flips that they propose."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress

from ...install import environment
from ...planning.doctor.checklist import Checklist, checklist
from ...planning.doctor.evidence import Evidence, OnRank, still_grows
from ...planning.doctor.finding import FASTER, FIT, LESS, ROOM, Diagnosis, Finding, Flip
from ...planning.doctor.rules import findings
from ...planning.doctor.rules.limits import barely_fits
from ...planning.doctor.rules.memory import fragmentation
from ...planning.doctor.rules.time import larger, small_batch, without_checkpointing
from ...planning.fit import fits
from ...planning.prediction import DOES_NOT_FIT, FITS, TIGHT, Prediction
from ...planning.score import Asked, foretold
from ...planning.tuning.record import Candidate
from ...planning.tuning.search import in_rounds
from ...report.answered import DOCTOR
from ...report.bottleneck import FEWEST_STEPS, Changes
from ...report.differences import typed
from ...report.speed import WARM_UP_STEPS
from ...shared.answers import Progress
from ...shared.errors import InvalidInput, NotThisTime, RankError, TrainingFailed, WorkloadError
from ...shared.messages import Leak, Sample
from ...shared.questions import ModelFacts
from ...shared.settings import Settings
from ...shared.units import format_bytes, format_rate
from .. import compatibility
from ..cluster import AsksRanks, Cluster
from .fitting import Changed, Unchanged
from .instead import FindingInstead
from .predicting import LONGEST_S

STEPS_LOOKED_AT = 200  # the latest, for peaks and losses
_TIMED_STEPS = FEWEST_STEPS + WARM_UP_STEPS
_WAITED_FOR = (
    "Other work waits for the ranks, such as a cell that trains: inputs were not examined, and trial steps are "
    "not timed meanwhile. Run it again when that is over."
)
_EXPANDABLE = "expandable_segments:True"
_TURNS, _TURNS_S = 4, 4.0  # of each setting whose throughput decides, as long as there is time
_TRIED_FLIPS = 3  # of those that may fix a finding, as many are predicted


class Doctoring(AsksRanks):
    """Examines the session of one cluster; training goes on meanwhile and afterwards as if nothing had been."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._predicting = cluster.predicting
        self._inspection = cluster.inspection
        self._finding = FindingInstead(cluster)

    def examine(self, progress: Progress) -> Diagnosis:
        """Return what is found, with flips that were predicted.

        Raises:
            WorkloadError: nothing is loaded, or no step was done; ``NotThisTime`` if settings were changed meanwhile.
        """
        self._foreground.check_loaded()
        stopped = self._history.rescue or self._training.stopped_for()
        if not self._history.steps and stopped is None:
            raise WorkloadError(
                "Nothing was trained yet, so there is nothing to examine: %hvd_train 20, then run this again."
            )
        notes: list[str] = []
        unchanged = Unchanged(self._history)
        evidence = self._evidence(progress, notes)
        found = findings(evidence)
        for place, finding in enumerate(found):
            progress(f"what would help: {finding.title}", 0.5 + 0.5 * place / len(found))
            found[place] = self._with_flip(finding, evidence)
        try:
            unchanged.check()
        except Changed as why:
            raise NotThisTime(f"Meanwhile {why} Run it again.") from None
        if self._training.settings != evidence.settings:
            raise NotThisTime("Settings were changed while the session was examined. Run it again.")
        found.sort(key=lambda finding: finding.order)
        diagnosis = Diagnosis(tuple(found), tuple(dict.fromkeys(notes)), _came(evidence))
        self._record.answered(DOCTOR, diagnosis.summary, evidence.steps, evidence.workload.name)
        return diagnosis

    def checklist(self, progress: Progress) -> Checklist:
        """Return the checklist of training on several devices, as far as it can be gone through by itself."""
        self._foreground.check_alive()
        progress("packages of this machine", 0.0)
        installed = environment.check()
        sync, why_not = None, ""
        if self._training.workload:
            progress("weights, gradients and samples", 0.5)
            try:
                sync = self._inspection.sync(None, None)
            except (RankError, TrainingFailed, WorkloadError) as error:  # it is for models whose steps fail
                why_not = str(error)
        workload = self._training.workload
        return checklist(
            self._ranks,
            installed,
            sync,
            self._leaks(),
            self._history.steps_since_load,
            workload.name if workload else "",
            why_not,
        )

    def _leaks(self) -> list[tuple[Leak, ...]]:
        """Those that go on, as far as steps tell."""
        rows = self._history.of_loaded(STEPS_LOOKED_AT)
        return [leaks for leaks in self._history.leaks.values() if still_grows(leaks, rows)]

    def _evidence(self, progress: Progress, notes: list[str]) -> Evidence:
        """Return all but what would help; ``notes`` takes in what could not be found out."""
        history, settings, workload = self._history, self._training.settings, self._training.workload
        if workload is None:  # it was unloaded this moment
            raise NotThisTime("Another workload is being loaded. Run it again.")
        now = history.now()
        if now is not None and (now.settings != settings or not now.steps):
            now = None
        stopped_for = self._training.stopped_for()
        progress("the ranks", 0.0)
        looks = self._foreground.call("look_closer")
        progress("what these settings need", 0.1)
        needs = self._predict({}, notes)
        rows = history.since_cell(history.asked_for(STEPS_LOOKED_AT))
        progress("what ranks hold", 0.3)
        facts = self._facts(needs, notes)
        ranks = tuple(
            OnRank(info, _under(row, now.settings_id if now else None), reading, use, of_model, holders)
            for info, row, (reading, use, holders), of_model in zip(self._ranks, rows, looks, facts, strict=True)
        )
        if now is None:
            notes.append("No step was done under these settings yet: only what they need was judged. %hvd_train 20")
        elif min(now.steps, history.steps - history.changed_after) < _TIMED_STEPS:
            notes.append(
                f"Time is judged from {_TIMED_STEPS} steps on, counted from the last flip or cell on the ranks: "
                "%hvd_train 20"
            )
        tried = tuple(one for one in list(history.tried) if one.settings_id >= history.loaded_as)
        effect = history.effect()
        evidence = Evidence(
            settings=settings,
            workload=workload,
            ranks=ranks,
            tried=tried,
            now=now,
            needs=needs,
            verdicts=tuple(self._inspection.verdicts()),
            leaks=tuple(self._leaks()),
            rescue=history.rescue,
            stopped_for=str(stopped_for or ""),
            effect=effect,
            foretold=foretold(history.asked, history.tried, effect.after) if effect else None,
            noise_scale=history.noise_scale,
            steps=history.steps,
        )
        if needs is not None and barely_fits(evidence):
            evidence = dataclasses.replace(evidence, instead=self._finding.find(needs, progress))
        if fragmentation(evidence) and not all(rank.virtual for rank in self._ranks):
            with suppress(InvalidInput, WorkloadError):
                for _, would in self._predicting.allocators([_EXPANDABLE]).others:  # none, where it is in use
                    evidence = dataclasses.replace(evidence, expandable=would)
        return self._with_faster(evidence, progress)

    def _with_faster(self, evidence: Evidence, progress: Progress) -> Evidence:
        """Return the same with what all activations kept and larger micro-batches would bring, where worth asking."""
        wanted = [without_checkpointing(evidence), larger(evidence)]
        if not any(wanted):
            return evidence
        progress("throughput, in turns", 0.4)
        kept, more = (self._predict(changes, []) if changes else None for changes in wanted)
        needs, kept, more = self._in_turns([evidence.needs, kept, more])
        evidence = dataclasses.replace(evidence, needs=needs, all_kept=kept, larger=more)
        if small_batch(evidence) is None:
            return evidence
        try:
            largest: int | None = self._predicting.largest_fitting({}).size
        except (InvalidInput, WorkloadError):
            largest = None
        return dataclasses.replace(evidence, largest_batch=largest)

    def _in_turns(self, found: Sequence[Prediction | None]) -> list[Prediction | None]:
        """Return the same with throughput by several turns, so that a machine that is busy for a moment slows all."""
        history, now = self._history, self._training.settings
        begun, model_version = history.begun, history.model_version
        candidates = [Candidate(one.settings, one) if one and one.samples_per_s else None for one in found]
        timed = [one for one in candidates if one]
        for one in timed:
            one.took_steps(one.predicted)
        until_s = time.monotonic() + _TURNS_S
        with suppress(WorkloadError):  # which takes away turns, not answers
            for one in in_rounds(timed, _TURNS - 1, lambda one: one.usable):
                if time.monotonic() > until_s:
                    break
                one.took_steps(self._predicting.by_whole_steps(one.settings))
        for one in timed:  # flips are offered with these figures, too
            history.predicted(Asked(dataclasses.replace(one.foretold, before=now), model_version, now, begun))
        return [one.foretold if one else said for one, said in zip(candidates, found, strict=True)]

    def _facts(self, needs: Prediction | None, notes: list[str]) -> Sequence[ModelFacts | None]:
        """Return what each rank holds for nothing; of inputs, where the step for it does not take long."""
        quick = needs is not None and needs.step_s is not None and needs.step_s <= LONGEST_S
        if needs is None:
            notes.append("Inputs were not examined, either.")
        elif needs.cut_short:
            notes.append(_WAITED_FOR)
        elif not quick:
            notes.append("Inputs were not examined, because steps take long or do not fit.")
        found: list[ModelFacts] = self._foreground.call_alone("look_at_model", quick, undone=True)
        return found

    def _predict(self, changes: Changes, notes: list[str]) -> Prediction | None:
        """Return what is predicted of these changes; ``None`` where nothing can be said."""
        try:
            return self._predicting.predict(dict(changes))
        except (InvalidInput, WorkloadError) as error:
            notes.append(f"What these settings need could not be predicted: {error}")
            return None

    def _foreseen(self, changes: Changes) -> Prediction:
        """Return what was predicted of these changes, now or before."""
        wanted = compatibility.asked(self._training.settings, changes, len(self._ranks))
        known = self._history.foreseen.get(wanted)
        return self._predicting.predict(dict(changes)) if known is None or known.cut_short else known

    def _with_flip(self, finding: Finding, evidence: Evidence) -> Finding:
        """Return the finding with its first candidate that is good enough, or with those that are not, and why."""
        in_vain: dict[str, list[str]] = {}
        for changes in finding.candidates[:_TRIED_FLIPS]:
            after = self._after(changes)
            if after is None or after == evidence.settings:
                continue
            try:
                will: Prediction | None = self._foreseen(changes)
            except NotThisTime:
                will = None
            except (InvalidInput, WorkloadError) as error:
                in_vain.setdefault("Not possible", []).append(f"{typed(evidence.settings, after)} ({error})")
                continue
            if will and not will.measured and evidence.tried_out(after, self._history.model_version):
                will = dataclasses.replace(will, runs=True)  # small steps do not deny what was
            splits, now_per_s = self._predicting.splits(evidence.settings, after), evidence.now_per_s(changes)
            flip = Flip(evidence.settings, after, changes, evidence.needs, will, now_per_s, splits)
            if _brings(flip, finding.wants):
                return dataclasses.replace(finding, flip=flip)
            untimed = finding.wants == FASTER and will is not None and will.cut_short
            barely = finding.wants in (FIT, ROOM) and will is not None and will.verdict == TIGHT
            why_not = "Not timed" if untimed else "Fits, but barely" if barely else "Predicted not to bring enough"
            in_vain.setdefault(why_not, []).append(flip.typed)
        said = [f"{why_not}: {'; '.join(flips)}." for why_not, flips in in_vain.items()]
        return dataclasses.replace(finding, do=" ".join(filter(None, (*said, finding.do))))

    def _after(self, changes: Changes) -> Settings | None:
        try:
            return compatibility.asked(self._training.settings, changes, len(self._ranks))
        except InvalidInput:
            return None


def _brings(flip: Flip, wants: str) -> bool:
    """Return whether a flip is worth a button: as far as is known, it fits and does what it is for."""
    will, saves, gains = flip.will, flip.saves_bytes, flip.gains_samples_per_s
    if will is None:
        return wants not in (FIT, ROOM)
    if wants == FIT:
        return fits(will)
    if wants == ROOM:
        less = flip.was is not None and (
            flip.was.lower_bound or will.reserved_peak_bytes < flip.was.reserved_peak_bytes
        )
        return will.verdict == FITS and less
    if will.verdict == DOES_NOT_FIT:
        return False
    if wants == LESS:
        return saves is not None and saves >= _LEAST_SAVED * will.live_peak_bytes
    return wants != FASTER or (not will.cut_short if gains is None else gains > 0)


_LEAST_SAVED = 0.05  # of what is left; a button for less is not worth pressing


def _under(samples: Sequence[Sample], settings_id: int | None) -> tuple[Sample, ...]:
    """Those that were done under these settings."""
    return tuple(one for one in samples if one.done and one.settings_id == settings_id)


def _came(evidence: Evidence) -> str:
    """Return what the latest flip did, or all since the pinned settings, beside what had been predicted of it."""
    effect, said = evidence.effect, evidence.foretold
    if effect is None or said is None or not effect.after.steps:
        return ""
    came = effect.after
    what = "What differs from the pinned settings" if effect.pinned else "The latest flip"
    words = f"{what}, {effect.flip}: predicted a live peak of {said.in_words(said.live_peak_bytes)}"
    if said.samples_per_s and said.settings == came.settings:  # others of the same memory may be faster or slower
        words += f" and {format_rate(said.samples_per_s)} samples/s"
    words += f"; measured {format_bytes(came.peak_bytes)}"
    return f"{words} and {format_rate(came.samples_per_s)} samples/s." if came.samples_per_s else f"{words}."
