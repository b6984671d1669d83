"""What a script that was written does, what it leaves out, and how to run it."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class ExportedScript:
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
        """What starts it, each of them by itself."""
        return commands(self.path.name, self.ranks, self.ddp)

    def __str__(self) -> str:
        told = [f"Written: {self.path} ({self.lines} lines)."]
        told += ["Not carried over:", *(f"- {sentence}" for sentence in self.left_out)] if self.left_out else []
        told.append(f"Run it in a terminal, in {self.path.parent}:")
        if sys.prefix != sys.base_prefix:
            told.append(f"  source {shlex.quote(sys.prefix)}/bin/activate")
        return "\n".join([*told, "  " + "\n  or: ".join(self.commands)])

    __repr__ = __str__


def commands(name: str, ranks: int, ddp: bool) -> tuple[str, ...]:
    """What starts a script on so many ranks of one host such as this one.

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
