"""The start of ranks: checked arguments, and a plan by which a restart gets the same ranks again."""

from __future__ import annotations

from dataclasses import dataclass

from ..cluster import resources
from ..cluster.launchers import LAUNCHERS, Job, Launcher, launcher_named
from ..cluster.ranks import Ranks
from ..cluster.resources import Host, share_out
from ..engine import entry
from ..shared import cluster_records, processes
from ..shared.answers import Progress
from ..shared.errors import InvalidInput
from ..shared.knobs import additional
from ..shared.messages import RankConfig
from ..shared.units import as_whole, checked_seconds, parse_size
from .running import pickled

__all__ = ["DEVICES", "LAUNCHERS", "Plan", "others", "plan"]

DEVICES = resources.DEVICES


@dataclass(frozen=True)
class Plan:
    """The ranks to start, and how.

    Attributes:
        memory_limit: of each in bytes.
        hosts: none when all run on this machine.
        why: as many as there are, where no number was named; else empty.
    """

    size: int
    device: str
    memory_limit: int | None
    threads: int
    timeout_s: float
    hosts: tuple[Host, ...]
    launcher: type[Launcher]
    why: str = ""

    @property
    def chosen(self) -> str:
        """Say how many ranks were chosen and why, in a sentence; empty where a number was named."""
        if not self.why:
            return ""
        count = f"{self.size} rank{'s' * (self.size != 1)}"
        if self.device == "cuda":
            return f"{count}: {self.why}."
        cores = processes.cores()
        of_cores = f"{self.threads} of {cores} cores each" if cores >= self.size else "one core between them"
        return (
            f"{count} ({of_cores}), {self.why}. No GPU is used, so each rank has a virtual one on the CPU. For another "
            "number: %hvd_start 4"
        )

    def start(self, started_s: float, stall_limit_s: float, seed: int, progress: Progress) -> Ranks:
        """Start them and wait until they have joined each other; samples count their time from ``started_s``.

        ``seed`` is that of the random numbers which cells draw.

        Raises:
            StartError, SetupError: the start failed; nothing is left running.
            WorkloadError: a knob was registered that cannot be sent to the ranks; nothing was started.
        """
        config = RankConfig(self.device, self.memory_limit, self.threads, started_s, stall_limit_s, additional(), seed)
        pickled(config, "A registered knob")
        job = Job(self.size, self.threads, self.device, self.memory_limit, self.hosts, entry.START_UP)
        return Ranks(self.launcher(job), entry, config, self.timeout_s, progress)


def plan(
    n: int | None,
    *,
    device: str = "auto",
    memory_limit: str | int | None = None,
    hosts: str | None = None,
    launcher: str = "mpi",
    threads: int | None = None,
    timeout: float = 120.0,
    progress: Progress,
) -> Plan:
    """Check the arguments of a start against one another and the machine, and clean up after kernels that are gone.

    Raises:
        InvalidInput: an argument that cannot be used.
        StartError: there is no GPU, and one was asked for.
    """
    start_by = launcher_named(launcher)
    timeout_s = checked_seconds("timeout", timeout, 120)
    each = as_whole(threads, 1)
    if threads is not None and each is None:
        raise InvalidInput(f"threads={threads!r} cannot be used: it must be a whole number of at least 1, such as 2.")
    limit = None if memory_limit is None else parse_size(memory_limit)
    for left in cluster_records.clean_up_after_others():
        progress(f"ended what kernel {left.kernel.pid} had left behind", 0.0)
    places = () if hosts is None else share_out(hosts, n)
    here, kind, why = resources.choose(places[0].ranks if places else n, device)
    for other in others(kind):
        progress(f"besides, {other}", 0.0)
    size = sum(host.ranks for host in places) or here
    most = max((host.ranks for host in places), default=size)  # on one host
    each = each or max(1, processes.cores() // most)
    return Plan(size, kind, limit, each, timeout_s, places, start_by, why)


def others(device: str) -> list[str]:
    """Return who else uses this machine's memory for ranks, and its GPUs."""
    return [*map(str, cluster_records.others()), *(resources.gpus_in_use() if device == "cuda" else [])]
