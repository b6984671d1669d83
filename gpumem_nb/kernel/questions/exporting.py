"""A session's training as a plain script: what is asked of the ranks for it, and the file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from ...export import refusals
from ...export.functions import Collector
from ...export.imports import own_modules
from ...export.order import ROLES, Order, Source
from ...export.refusals import in_short
from ...export.script import script
from ...export.selecting import selected, settings_in
from ...report.written import ExportedScript, check_over, commands, written_over
from ...shared.errors import WorkloadError
from ...shared.questions import Facts
from ...shared.settings import OWN, Settings
from ...shared.state_file import as_path
from ...shared.units import format_bytes, format_rate
from ...shared.version import __version__
from ...shared.workload import WorkloadInfo
from ...workloads import catalog
from ..cluster import AsksRanks
from ..policy import RULES
from ..running import pickled

MARK = "Written by gpumem_nb"
"""In the first lines of a script: one that has it may be replaced."""
_SCRIPT = "a script that gpumem_nb exported"
_STEPS = 1000
_ASKED_AT_MOST = 10
_BETWEEN_S = 0.05
_MARKED_WITHIN = 4096  # characters


class Exporting(AsksRanks):
    """Writes scripts of one cluster."""

    def export(self, path: str | os.PathLike[str], ddp: bool) -> ExportedScript:
        """Write a script that trains as the session does now.

        Raises:
            InvalidInput: not a path, or a file that cannot be written or is no such script.
            WorkloadError: nothing is loaded, or it cannot be exported.
        """
        target = as_path(path)
        self._foreground.check_loaded()
        check_over(target, _ours, _SCRIPT)
        if (loaded := self._training.workload) and loaded.adopted:
            why = refusals.of_trainer(loaded.adopted, self._training.settings)
            raise WorkloadError(f"No script was written. {why}")
        with self._foreground.interruptible():
            self._training.requests.settle()
        facts, settings = agreed(lambda: self._foreground.call("facts")[0], lambda: self._training.settings)
        workload = self._training.workload
        if workload is None:  # another thread unloads it
            raise WorkloadError("Nothing is loaded. Load a workload first, for example %hvd_load digits-resnet.")
        own = self._origin.options is None
        try:
            refusals.check(settings, facts, own, ddp)
            source = self._source(workload, settings)
            order = self._order(target, source, settings, facts, workload, ddp)
            text = script(order)
        except WorkloadError as error:
            raise WorkloadError(f"No script was written. {error}") from None
        left_out = (*self._left_out(), *_of_statements(source), *refusals.left_out(settings, ddp), *_of_places(order))
        left_out += tuple(refusals.of_model(facts)) * own
        with written_over(target, _ours, _SCRIPT) as file:
            file.write(text.encode())
        return ExportedScript(target, text.count("\n"), len(self._ranks), ddp, left_out)

    def _order(
        self, target: Path, source: Source, settings: Settings, facts: Facts, workload: WorkloadInfo, ddp: bool
    ) -> Order:
        virtual, every = self._ranks[0].virtual, self._policy().eval_every
        return Order(
            source=source,
            settings=settings,
            facts=facts,
            ddp=ddp,
            threads=self._ranks[0].threads if virtual else None,
            eval_every=0 if every == "never" else every,
            steps=settings.schedule_steps or _STEPS,
            evaluates=workload.eval_len is not None,
            own_rate=workload.own_learning_rate,
            # It stands in a docstring.
            folder=str(target.resolve().parent),
            header=self._header(target, facts, settings, workload, ddp).replace("\\", "/").replace('"', "'"),
            parameter_bytes=workload.parameter_bytes,
        )

    def _header(self, target: Path, facts: Facts, settings: Settings, workload: WorkloadInfo, ddp: bool) -> str:
        """Return how to run it, and what was measured."""
        ranks, now = self._ranks, self._history.now()
        framework = "DistributedDataParallel" if ddp else "Horovod"
        run, *others = commands(target.name, len(ranks), ddp)
        devices = f"{len(ranks)} ranks with {ranks[0].device_name}{' and the like' * (len(ranks) > 1)}"
        lines = [
            f"{workload.name} on every rank, with {framework}. {MARK} {__version__} on {time.strftime('%Y-%m-%d')}.",
            "",
            f"Run it:  {run}",
            *(f"    or:  {command}" for command in others),
            "Go on from a state that the session saved with %hvd_save: add --resume FILE.",
            f"Measured in the session, on {devices}, Horovod {facts.horovod}, torch {facts.torch}:",
        ]
        if now is None or not now.steps or now.settings != settings:
            return "\n".join([*lines, "nothing, because no step was done under these settings.", ""])
        measured = f"live peak {format_bytes(now.peak_bytes)}, reserved {format_bytes(now.reserved_peak_bytes)}"
        lines.append(f"{measured} (worst rank), {format_rate(now.samples_per_s)} samples/s (all ranks).")
        return "\n".join([*lines, ""])

    def _source(self, workload: WorkloadInfo, settings: Settings) -> Source:
        origin = self._origin
        if origin.options is not None:
            entry = catalog.find(workload.name)
            return Source("ready", entry.task, dict(origin.options), separable=entry.name == "digits-separable")
        return self._of_cells(settings) if origin.attached else self._of_functions(settings)

    def _of_cells(self, settings: Settings) -> Source:
        names = {role: name for role, name in _used(self._origin.attached or {}, settings).items() if name}
        cells = self._origin.cells
        found = selected(cells.before_load(), names.values(), cells.seed, cells.gone)
        if found.settings and any(cell.started for cell in cells.since_load()):
            raise WorkloadError(
                f"`{in_short(found.settings[0])}` was for the ranks before they were started again, and holds there no "
                "more. Run the cells that made model and data again, and attach again."
            )
        return replace(found, names=names)

    def _of_functions(self, settings: Settings) -> Source:
        workload, collector = self._origin.workload, Collector()
        assert workload is not None
        if pickled(workload, "The workload") != self._origin.sent:
            raise WorkloadError(
                "What the workload's functions use has changed in the notebook since it was loaded, so a script would "
                "train something else. Load it again."
            )
        functions = {role: getattr(workload, role) for role in ROLES}
        used = _used(functions, settings).items()
        names = {role: collector.add(role, function) for role, function in used if function}
        return Source(
            "functions",
            imports=tuple(collector.imports),
            definitions="\n\n\n".join(collector.definitions),
            names=names,
            defines=frozenset(collector.defined),
            lazy_annotations=collector.lazy_annotations,
        )

    def _left_out(self) -> list[str]:
        """Return what is the session's and not the script's."""
        policy, steps, before = self._policy(), self._history.steps, self._origin.cells.before_load()
        later = self._origin.cells.since_load()
        since = sum(bool(cell.source or cell.opaque) for cell in later)
        pushed = dict.fromkeys(name for cell in later for name in cell.pushed)
        told = [
            f"{name}={option.text(getattr(policy, name))}: what a session does by itself"
            for name, option in RULES.items()
            if name != "eval_every" and getattr(policy, name) != option.default
        ]
        if steps:
            told.append(
                f"the {steps:,} step{'s that were' if steps > 1 else ' that was'} done: the script begins with the "
                "first, under the settings of now. "
                "%hvd_save FILE writes a state from which it goes on with --resume FILE"
            )
        earlier = self._origin.trained_before if self._origin.attached else 0
        if earlier:
            told.append(
                f"the {earlier:,} step{'s' * (earlier > 1)} of earlier training that the weights had behind them when "
                "they were attached: the script begins with initial weights. %hvd_save FILE writes a state from which "
                "it goes on with --resume FILE"
            )
        functions = sum(cell.opaque for cell in before)
        if functions:
            told.append(
                f"what {functions} function{'s' * (functions > 1)} that session.run brought to the ranks did there "
                "before this was loaded"
            )
        if not self._origin.attached:
            told += [f"`{in_short(text)}`: a cell set that before this was loaded" for text in settings_in(before)]
        if since:
            told.append(f"what {since} cell{'s' * (since > 1)} did to the ranks since this was loaded")
        if pushed:
            told.append(f"what was pushed to the ranks since this was loaded: {', '.join(pushed)}")
        return told


def agreed(ask: Callable[[], Facts], settings: Callable[[], Settings]) -> tuple[Facts, Settings]:
    """Facts, and the settings that the ranks had when they said them: while they train, a change reaches them later.

    Raises:
        WorkloadError: they still have another optimizer.
    """
    for _ in range(_ASKED_AT_MOST):
        before, facts, now = settings(), ask(), settings()
        if facts.optimizer == before.optimizer and now == before:
            return facts, before
        time.sleep(_BETWEEN_S)
    raise WorkloadError(f"No script was written. The ranks do not have optimizer={now.optimizer} yet. Export again.")


def _of_statements(source: Source) -> list[str]:
    """Return what is told of statements that are not in a script."""
    return [
        f"`{in_short(text)}`: a script makes no files of yours again (what it reads must be there), and has no lines "
        "of IPython's"
        for text in source.left_out
    ] + ["torch.save in functions of your cells: it writes no files while the cells run"] * source.saves


def _of_places(order: Order) -> list[str]:
    """Return what is told of a script that does not lie beside the notebook's files."""
    facts = order.facts
    if order.source.kind == "ready" or order.folder == facts.folder:
        return []
    told = [
        f"the session's folder, {facts.folder}: relative paths in your code begin at the folder in which you start the "
        "script"
    ]
    if elsewhere := {name: folder for name, folder in own_modules(order).items() if folder != order.folder}:
        folders = ", ".join(dict.fromkeys(elsewhere.values()))
        told.append(f"the code of {', '.join(elsewhere)}: the script imports that from {folders}, which must be there")
    return told


def _used(roles: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the roles that a script under these settings has a use for."""
    unused = set() if settings.lr_schedule == OWN else {"scheduler"}
    return {role: roles[role] for role in ROLES if role in roles and role not in unused}


def _ours(file: IO[bytes]) -> bool:
    return MARK.encode() in file.read(_MARKED_WITHIN)
