"""The checklist of training on several devices, gone through as far as that can be done by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...install.environment import COLOURS, EnvironmentReport
from ...report.freed import leak_headline
from ...report.sync import SyncReport
from ...report.tables import Report, Table
from ...shared.messages import Leak, RankInfo
from ...shared.units import name_ranks

PAGE = "docs/troubleshooting.md"
SIMPLE = "digits-resnet"
STEPS_FOR_LEAKS = 50
"""Within so many steps leaks were found (docs/memory.md); of fewer nothing is said."""
_OK, _NOT_OK, _NOT_RUN = "ok", "not ok", "not run"
_COLOURS = {
    ("state", _OK): COLOURS["ok"],
    ("state", _NOT_OK): COLOURS["missing"],
    ("state", _NOT_RUN): COLOURS["n/a"],
}
_MARKS = {True: _OK, False: _NOT_OK, None: _NOT_RUN}


@dataclass(frozen=True, slots=True)
class Check:
    """One line: ``ok`` is ``None`` where it could not be checked; ``do`` is what to do then, or if it is not ok."""

    question: str
    ok: bool | None
    found: str
    do: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Checklist(Report):
    """All lines. Prints as a table, in a notebook as one that follows the theme."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Return whether nothing that was checked is wrong."""
        return all(check.ok is not False for check in self.checks)

    @property
    def _table(self) -> Table:
        rows = tuple(
            (one.question, _MARKS[one.ok], "\n".join(filter(None, [one.found, one.do and f"-> {one.do}"])))
            for one in self.checks
        )
        headings = ("question", "state", "found")
        return Table("Training on several devices", headings, rows, frozenset(headings), _COLOURS)

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each of the checks."""
        return [dataclasses.asdict(one) for one in self.checks]

    @property
    def shown(self) -> list[Table | str]:
        """Return the table, and where to read more."""
        return [self._table, _MORE]


_MORE = f"What each line means: {PAGE}"


def checklist(
    ranks: Sequence[RankInfo],
    installed: EnvironmentReport,
    sync: SyncReport | None,
    leaks: Sequence[Sequence[Leak]],
    steps: int,
    workload: str,
    why_not: str = "",
) -> Checklist:
    """From what was found out.

    Args:
        ranks: who they are, with the versions of what they run.
        installed: what is there on this machine.
        sync: weights, gradients and samples of what is loaded; ``None`` if nothing is.
        leaks: by holder, what ranks keep from step to step.
        steps: done since it was loaded.
        workload: its name; empty if nothing is loaded.
        why_not: why weights, gradients and samples of what is loaded could not be compared.
    """
    return Checklist(
        (
            _machine(installed),
            _builds(ranks),
            _synchronised(sync, why_not),
            _split(sync, why_not),
            _grows(leaks, steps),
            _simpler(workload, steps),
        )
    )


def _machine(installed: EnvironmentReport) -> Check:
    missing = [item for item in installed.items if item.ok is False]
    if not missing:
        return Check("is everything installed that is needed?", True, "nothing is missing")
    found = "\n".join(f"{item.name}: {item.found}" for item in missing)
    remedies = [item.remedy for item in missing if item.remedy]
    return Check("is everything installed that is needed?", False, found, "; ".join(remedies) or "%hvd_check")


def _builds(ranks: Sequence[RankInfo]) -> Check:
    question = "do framework and builds of all ranks agree?"
    of_ranks = {versions: [one.rank for one in ranks if one.versions == versions] for versions in _versions(ranks)}
    first, *others = of_ranks
    if not others:
        return Check(question, True, ", ".join(first))
    found = "\n".join(f"{name_ranks(who)}: {', '.join(versions)}" for versions, who in of_ranks.items())
    return Check(question, False, found, "install the same on all hosts, then %hvd_restart")


def _versions(ranks: Sequence[RankInfo]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(one.versions for one in ranks))


_LOAD = "load a workload, then check again: %hvd_load digits-resnet"


_FIX = "fix what fails, then check again: %hvd_check --sync"


def _synchronised(sync: SyncReport | None, why_not: str) -> Check:
    question = "are weights and gradients synchronised?"
    if why_not:
        return Check(question, None, why_not, _FIX)
    if sync is None:
        return Check(question, None, "nothing is loaded", f"{_LOAD}; of your own loop: %hvd_check --sync model=net")
    found = [sync.weights, sync.gradients]
    wrong = any(is_fault for _, is_fault in found)
    return Check(question, not wrong, "\n".join(said for said, _ in found), "%hvd_sync" if wrong else "")


def _split(sync: SyncReport | None, why_not: str) -> Check:
    question = "is the data split without overlap?"
    if why_not:
        return Check(question, None, "not checked, for the same reason", _FIX)
    if sync is None:
        own = "%hvd_check --sync model=net data=loader"
        return Check(question, None, "nothing is loaded", f"{_LOAD}; of your own loop: {own}")
    said, is_fault = sync.samples
    if not said:
        return Check(question, None, "these data can only be iterated, so ranks cannot look ahead")
    return Check(question, not is_fault, said)


def _grows(leaks: Sequence[Sequence[Leak]], steps: int) -> Check:
    question = "does memory stay as it is from step to step?"
    if leaks:
        found = "\n".join(f"{leak_headline(of_ranks)}, held by {of_ranks[0].holder}" for of_ranks in leaks)
        return Check(question, False, found, " ".join(dict.fromkeys(of_ranks[0].fix for of_ranks in leaks)))
    if steps < STEPS_FOR_LEAKS:
        return Check(question, None, f"{steps} steps are too few to tell", f"%hvd_train {STEPS_FOR_LEAKS}")
    return Check(question, True, f"no growth was found in {steps:,} steps")


def _simpler(workload: str, steps: int) -> Check:
    question = "does a simpler model run?"
    if workload == SIMPLE and steps:
        return Check(question, True, f"{SIMPLE} did {steps:,} steps")
    replaces = ", which takes the place of what is loaded (%hvd_save keeps that)" if workload else ""
    return Check(question, None, "not tried by itself", f"%hvd_load {SIMPLE}, then %hvd_train 20{replaces}")
