"""The workload: loaded or attached, saved and resumed; code and variables on the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ..cluster.calls import Call
from ..kernel import state_files
from ..kernel.lifecycle import Lifecycle
from ..kernel.questions.exporting import Exporting
from ..report.written import ExportedScript, Snapshots, StateFile
from ..shared.answers import Progress
from ..shared.units import RankChoice, check_names, checked_flag
from ..shared.workload import Splits, Workload, WorkloadInfo


class HoldsWorkload:
    """The part of a session that knows what is trained, and runs code beside it."""

    _life: Lifecycle

    @property
    def workload(self) -> WorkloadInfo | None:
        """Return what is loaded."""
        return self._life.training.workload

    @property
    def splits(self) -> Splits:
        """Return what is known by now of training a micro-batch of what is loaded in parts."""
        return self._life.cluster.predicting.known_splits

    def load(self, name_or_workload: str | Workload, *, seed: int | str | None = None, **options: Any) -> WorkloadInfo:
        """Load a ready-made workload by name with options, or your own :class:`Workload`; training starts afresh.

        On the ranks ``model`` and ``optimizer`` are what is trained, where these names are free.

        Args:
            name_or_workload: what to train.
            seed: of the initial weights, the order of the data, and whatever its code draws from the random numbers of
                torch, NumPy and Python; that of :meth:`seed` by default.
            **options: those of a ready-made workload.

        Raises:
            InvalidInput: an unknown name, option or value.
            WorkloadError: it cannot be sent to the ranks, or not be trained there.
            RankError: its code failed on a rank.
        """
        return self._life.loading.load(name_or_workload, options, seed)

    @property
    def kept(self) -> str:
        """Return which knobs :meth:`load` or :meth:`attach` have left as they were, in a sentence; empty if none."""
        return self._life.loading.kept

    def attach(
        self,
        model: str | None = None,
        data: str | None = None,
        loss: str | None = None,
        optimizer: str | None = None,
        scheduler: str | None = None,
        eval_data: str | None = None,
        metric: str | None = None,
        *,
        trainer: str | None = None,
        seed: int | str | None = None,
    ) -> WorkloadInfo:
        """Train objects that live on the ranks, named by their variables, which stay what they are.

        Args:
            model: a ``torch.nn.Module``. Rank 0's weights are broadcast.
            data: a dataset, a ``DataLoader``, tensors or arrays of equal length (a tuple or a dict of them), or an
                iterable of micro-batches. The same on all ranks: the toolkit shards it.
            loss: a function ``loss(model, batch)``, or a criterion called as ``criterion(model(inputs), targets)``;
                left out when the model returns its own loss.
            optimizer: the optimizer to train with (``optimizer=own``); AdamW by default.
            scheduler: one of ``torch.optim.lr_scheduler`` that was built on that optimizer. It goes on with every step
                that was done with it, as long as ``lr_schedule=own`` is left; a ``learning_rate`` that is set meanwhile
                holds until the scheduler sets its own.
            eval_data: what :meth:`evaluate` sees, each sample once: a map-style dataset, or a ``DataLoader`` whose
                dataset (or subset) and collate function are used.
            metric: a function ``metric(model, batch)``, or one called as ``metric(model(inputs), targets)``, that
                returns a number or a dict of numbers for a micro-batch. They are averaged over samples, so an accuracy
                is right, and an F1 score, which is not a mean over samples, is not.
            trainer: in place of ``model`` and ``data``: a ``Trainer`` of transformers or an ``SFTTrainer`` of TRL, an
                ``Accelerator`` or what its ``prepare`` returned, a Lightning module, or a Lightning ``Trainer`` beside
                its module (``model=``). What it holds is trained as it would train it, on all ranks, and its arguments
                become the first values of knobs; ``adopted`` of what is returned has the list, also of what is not
                kept. Data, loss and metric that are named beside it take the place of its own.
            seed: of the order of the data, and of the random numbers that training draws; that of :meth:`seed` by
                default.

        Raises:
            InvalidInput: a seed that cannot be used, or what is not the name of a variable.
            WorkloadError: there is no such variable, or what it holds cannot be trained.
            RankError: its code failed on a rank.
        """
        names = {"model": model, "data": data, "loss": loss, "optimizer": optimizer, "scheduler": scheduler}
        return self._life.loading.attach(names | {"eval_data": eval_data, "metric": metric, "trainer": trainer}, seed)

    def seed(self, seed: int | str) -> str:
        """Seed the random numbers of torch, NumPy and Python that cells draw, alike on all ranks, now.

        What is loaded or attached from now on is trained under this seed too, and what is loaded already as long as it
        has done no step. A cell that ran on some ranks only has moved their numbers alone: this aligns them again.

        Returns:
            What follows the seed, in a sentence.

        Raises:
            InvalidInput: not a whole number from 0 to 2**32 - 1.
        """
        return self._life.loading.seed(seed)

    def sync(self) -> None:
        """Give all ranks the weights and the optimizer's state of rank 0, for example after a cell changed one rank's.

        Raises:
            WorkloadError: nothing is loaded, or the ranks hold models of different shapes.
        """
        self._life.foreground.check_loaded()
        self._life.loading.sync()

    def save(self, path: str | os.PathLike[str], progress: Progress = lambda what, done: None) -> StateFile:
        """Write model, optimizer, scaler, data position, random numbers and settings to one file.

        Training goes on afterwards: the state is that between two chunks.

        Raises:
            InvalidInput: not a path.
            WorkloadError: nothing is loaded.
            StateFileError: it cannot be written there; an older file of that name is as it was.
        """
        self._life.foreground.check_loaded()
        return self._life.state_files.save(path, progress)

    def export(self, path: str | os.PathLike[str], *, ddp: bool = False) -> ExportedScript:
        """Write one plain script, without the toolkit, that trains on any ranks as this session does now.

        Model and data are a ready-made workload's code, the cells that defined what was attached, or the functions of
        a :class:`Workload`; settings, schedule, evaluation and the order of samples are those of now. An older export
        of that name is replaced, any other file is not.

        Args:
            path: of the script.
            ddp: for ``torchrun`` and ``DistributedDataParallel`` instead of Horovod.

        Returns:
            What was written, what is not carried over, and how to run it.

        Raises:
            InvalidInput: not a path, a file that cannot be written there, or a ``ddp`` that is neither true nor false.
            WorkloadError: nothing is loaded, or something cannot be exported; nothing was written.
        """
        return Exporting(self._life.cluster).export(path, checked_flag("ddp", ddp))

    def resume(
        self, path: str | os.PathLike[str] | None = None, progress: Progress = lambda what, done: None
    ) -> StateFile:
        """Go on from a saved state, on any number of ranks.

        What is loaded must be the workload that was saved; when nothing is loaded, a ready-made one is loaded first.

        Args:
            path: of the file; without one, the newest automatic snapshot of this notebook. :meth:`snapshots` lists all.
            progress: told what is being done.

        Raises:
            InvalidInput: not a path.
            StateFileError: the file cannot be used, or there is no snapshot of this notebook; nothing was changed.
        """
        self._life.foreground.check_alive()
        return self._life.state_files.resume(path, progress)

    def snapshots(self) -> Snapshots:
        """Return the automatic snapshots to resume from, those of this notebook first, with model, step and age.

        Those of other notebooks' sessions that run on this machine are not among them.
        """
        return state_files.snapshots(self._life.snapshots.folder)

    def run(
        self,
        code_or_function: str | Callable[..., Any],
        *args: Any,
        ranks: RankChoice = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run on ranks and return the results in rank order.

        Results travel as pickles. Tensors on a GPU, also those inside other objects, come back as tensors on the CPU.

        Args:
            code_or_function: source code, whose last expression gives the result, or a function.
            *args: arguments of the function.
            ranks: which ones, as a number, several numbers or text such as ``"0,2-3"``; all by default.
            timeout: seconds to wait; no limit by default.

        Raises:
            InvalidInput: neither code nor a function, a syntax error in the code, no number of seconds, or ranks that
                do not exist.
            WorkloadError: the function or its arguments cannot be sent to the ranks.
            RankError: code failed on a rank, or gave what cannot be read here (an object of a class that only the ranks
                can import); raised as soon as the first one failed (``Stalled`` if that was because other ranks did
                not come).
            TimeoutError: it took too long; the ranks were interrupted.
        """
        return self._life.running.run(code_or_function, args, ranks, timeout)

    def run_cell(
        self,
        source: str,
        *,
        ranks: RankChoice = None,
        timeout: float | None = None,
        title: str = "<code>",
        result: str = "value",
        memory: bool = False,
        show: Callable[[Call], None] = lambda call: None,
    ) -> Call:
        """Run code on ranks, showing its output while it runs; returns the finished call.

        Args:
            source: plain Python.
            ranks, timeout: as in :meth:`run`.
            title: stands in tracebacks in place of a file name, with a number of its own: ``<code 3>``.
            result: ``value`` to send back what the last expression gives, ``text`` for its representation, or
                nothing where that is displayed, as a table is.
            memory: let each rank print what the code did to its memory.
            show: called ten times a second and at the end.

        Raises:
            InvalidInput: a syntax error in the code, ranks that do not exist, or what is not a value of ``memory``.
            RankError, TimeoutError: as in :meth:`run`.
        """
        tells = checked_flag("memory", memory)
        return self._life.running.run_cell(source, title, result, tells, ranks, timeout, show)

    def push(self, variables: Mapping[str, Any], ranks: RankChoice = None) -> None:
        """Define variables on the ranks, all of them by default.

        Raises:
            InvalidInput: no mapping, a name that cannot be a variable's, or ranks that do not exist.
            WorkloadError: a value that cannot be sent to the ranks.
            RankError: a value that a rank cannot receive, for example because a module is missing there.
        """
        self._life.running.push(variables, ranks)

    def pull(self, name: str, ranks: RankChoice = None) -> list[Any]:
        """Return the values of a variable, in rank order. Tensors on a GPU come back on the CPU, see :meth:`run`.

        Raises:
            InvalidInput: what is not a name, or ranks that do not exist.
            WorkloadError: there is no such variable on a rank.
            RankError: a value that cannot be sent, or that cannot be read here.
        """
        check_names({"name": name}, needed=("name",))
        return self._life.foreground.call("pull", name, ranks=ranks)
