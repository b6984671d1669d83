"""What a script that was written does, what it leaves out, and how to run it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path


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
        folder = f" (in {self.path.parent})"
        return "\n".join([*told, f"Run it with: {' or '.join(self.commands)}{folder}"])

    __repr__ = __str__


def commands(name: str, ranks: int, ddp: bool) -> tuple[str, ...]:
    """What starts a script on so many ranks of one host."""
    name = shlex.quote(name)
    if ddp:
        return (f"torchrun --nproc-per-node {ranks} {name}",)
    return f"horovodrun -np {ranks} python {name}", f"mpiexec -n {ranks} python {name}"
