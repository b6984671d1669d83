"""Files that were written: exports, scripts, traces and training states, in words."""

from __future__ import annotations

import dataclasses
import errno
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from ..shared.errors import InvalidInput
from ..shared.state_file import Ours, check_no_folder, why_kept, why_not, written_whole
from ..shared.units import format_bytes
from .tables import Report, Table, Words


@dataclass(frozen=True, slots=True, repr=False)
class Written(Words):
    """A file that was written: where, how large, and what it holds, in a sentence."""

    path: Path
    size_bytes: int
    holds: str

    def __str__(self) -> str:
        return f"Written: {self.path} ({format_bytes(self.size_bytes)}). {self.holds}"


def check_over(target: Path, ours: Ours, what: str = "such a file") -> None:
    """Refuse to replace anything but ``what`` is ours, before any work is done for it.

    Raises:
        InvalidInput: something else has that name, or it cannot be told.
    """
    try:
        check_no_folder(target)
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if not os.access(target.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if kept := why_kept(target, ours, what):
            raise InvalidInput(kept)
    except OSError as error:
        raise InvalidInput(f"{target} cannot be written: {why_not(error)}.") from None


@contextmanager
def written_over(target: Path, ours: Ours, what: str = "such a file") -> Iterator[IO[bytes]]:
    """Give a stream whose content becomes the file if the block succeeds, in place of nothing but ``what`` is ours.

    Raises:
        InvalidInput: it cannot be written, or something else has that name.
    """
    check_over(target, ours, what)
    try:
        with written_whole(target) as file:
            yield file
    except OSError as error:
        raise InvalidInput(f"{target} cannot be written: {why_not(error)}.") from None


def write_over(target: Path, data: bytes, begin: bytes, holds: str) -> Written:
    """Write a whole file, in place of nothing but one that begins like this.

    Raises:
        InvalidInput: as :func:`written_over`.
    """
    with written_over(target, begin) as file:
        file.write(data)
    return Written(target, len(data), holds)


@dataclass(frozen=True, slots=True, repr=False)
class ExportedScript(Words):
    """A plain script that trains as the session does.

    Attributes:
        path: of the file.
        lines: in it.
        ranks: of the session.
        ddp: whether it is for ``torchrun`` and DistributedDataParallel instead of Horovod.
        left_out: sentences about what the session does and the script does not.
    """

    path: Path
    lines: int
    ranks: int
    ddp: bool
    left_out: tuple[str, ...]

    @property
    def commands(self) -> tuple[str, ...]:
        """Return the commands that start it; each is complete."""
        return commands(self.path.name, self.ranks, self.ddp)

    def __str__(self) -> str:
        told = [f"Written: {self.path} ({self.lines} lines)."]
        told += ["Not carried over:", *(f"- {sentence}" for sentence in self.left_out)] if self.left_out else []
        told.append(f"Run it in a terminal, in {self.path.parent}:")
        if sys.prefix != sys.base_prefix:
            told.append(f"  source {shlex.quote(sys.prefix)}/bin/activate")
        return "\n".join([*told, "  " + "\n  or: ".join(self.commands)])


def commands(name: str, ranks: int, ddp: bool) -> tuple[str, ...]:
    """Return the command that starts a script on so many ranks of one host like this one.

    Open MPI would bind each of few ranks to a core, start no more ranks than there are cores, and nothing as root.
    Horovod 0.28.1 turns binding off by an option that Open MPI 5 does not take, so it is told how.
    """
    name = shlex.quote(name)
    if ddp:
        return (f"torchrun --nproc-per-node {ranks} {name}",)
    options = ["--bind-to none"]
    if ranks > (psutil.cpu_count(logical=False) or 1):
        options.append("--oversubscribe")
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    return (
        f"mpiexec -n {ranks} {' '.join(options)} python {name}",
        f"horovodrun -np {ranks} --binding-args='--bind-to none' python {name}",
    )


@dataclass(frozen=True, slots=True, repr=False)
class TraceFile(Words):
    """A trace of all ranks.

    Attributes:
        path: of the file.
        steps: the numbers of those recorded.
        wanted: how many were asked for.
        ranks: of how many ranks.
        events: all that is in it.
        size_bytes: the file's size.
    """

    path: Path
    steps: tuple[int, ...]
    wanted: int
    ranks: int
    events: int
    size_bytes: int

    def __str__(self) -> str:
        fewer = f" ({self.wanted} were asked for: an evaluation came)" if len(self.steps) < self.wanted else ""
        return (
            f"Written: {self.path} ({format_bytes(self.size_bytes)}).\n"
            f"It has {steps_in_words(self.steps)} of {self.ranks} ranks in {self.events:,} events{fewer}.\n"
            "Open it at https://ui.perfetto.dev, which reads it in your browser, or in chrome://tracing."
        )


def steps_in_words(steps: Sequence[int]) -> str:
    """Of steps in a row which they are."""
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"))


@dataclass(frozen=True, repr=False)
class StateFile(Words):
    """A training state that was saved or resumed; ``bytes`` is the file's size, ``seconds`` what it took."""

    done: str
    path: Path
    bytes: int
    steps: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.done} {self.path}: step {self.steps}, {format_bytes(self.bytes)}, {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """One automatic snapshot.

    Attributes:
        path: its file.
        workload, steps, ranks: what was trained, for how long, and on how many ranks.
        created: seconds since the epoch.
        own: whether it is of this notebook.
        notebook: where its session was; empty if that is not known.
        over: whether that session is known to be over.
    """

    path: Path
    workload: str
    steps: int
    ranks: int
    created: float
    own: bool
    notebook: str
    over: bool

    @property
    def age(self) -> str:
        """Return how long ago it was taken, in words."""
        seconds = max(0.0, time.time() - self.created)
        for size, unit in _UNITS:
            if count := int(seconds // size):
                return f"{count} {unit}{'s' * (count != 1)}"
        return "just now"

    @property
    def of(self) -> str:
        """Return in words which session it belongs to."""
        if self.own:
            return "this notebook"
        return (self.notebook or "another session") + ("" if self.over else " (may still run on another machine)")


@dataclass(frozen=True, slots=True, repr=False)
class Snapshots(Report):
    """The automatic snapshots that can be resumed from, those of this notebook first; ``others`` are counted alone."""

    rows: tuple[SnapshotRow, ...]
    others: int = 0

    @property
    def own(self) -> tuple[SnapshotRow, ...]:
        """Those of this notebook, the newest first."""
        return tuple(row for row in self.rows if row.own)

    @property
    def of_this_notebook(self) -> Snapshots:
        """Return these alone."""
        return Snapshots(self.own, len(self.rows) - len(self.own))

    @property
    def shown(self) -> list[Table | str]:
        """The table, and what to type."""
        if not self.rows:
            return ["There is no automatic snapshot."]
        headings, words = (
            ("notebook", "model", "step", "ranks", "age", "path"),
            frozenset({"notebook", "model", "path"}),
        )
        rows = [(row.of, row.workload, f"{row.steps:,}", f"{row.ranks}", row.age, str(row.path)) for row in self.rows]
        first = "%hvd_resume goes on from the first. " if self.own else ""
        others = f"Other notebooks have {self.others} more: %hvd_resume --list" if self.others else ""
        said = [f"{first}To go on from another one: %hvd_resume PATH", *filter(None, [others])]
        return [Table("", headings, tuple(rows), words), *said]

    @property
    def records(self) -> list[dict[str, Any]]:
        """One for each snapshot."""
        return [dataclasses.asdict(row) for row in self.rows]
