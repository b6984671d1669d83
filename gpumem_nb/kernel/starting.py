"""What a start needs: checked arguments, and a plan by which a restart gets the same ranks again."""

from __future__ import annotations

from dataclasses import dataclass

from ..cluster import resources
from ..cluster.hosts import Host, share_out
from ..cluster.launch import Progress
from ..cluster.ranks import Ranks
from ..engine import entry
from ..shared import cluster_records
from ..shared.errors import InvalidInput
from ..shared.messages import RankConfig
from ..shared.units import parse_size

DEVICES = resources.DEVICES
LAUNCHERS = ("mpi",)


@dataclass(frozen=True)
class Plan:
    """Which ranks to start."""

    size: int
    device: str
    memory_limit: int | None
    threads: int
    timeout: float
    hosts: tuple[Host, ...]

    def start(self, started_s: float, stall_limit_s: float, progress: Progress) -> Ranks:
        """Start them and wait until they have joined each other; samples count their time from ``started_s``."""
        config = RankConfig(self.device, self.memory_limit, self.threads, started_s, stall_limit_s)
        return Ranks(
            self.size,
            self.threads,
            self.device,
            entry,
            ("set_up", config),
            self.timeout,
            progress,
            self.memory_limit,
            self.hosts,
        )


def plan(
    n: int | None,
    device: str,
    memory_limit: str | int | None,
    hosts: str | None,
    launcher: str,
    threads: int | None,
    timeout: float,
    progress: Progress,
) -> Plan:
    """Check the arguments of a start against one another and the machine, and clean up after kernels that are gone."""
    if launcher not in LAUNCHERS:
        raise InvalidInput(f"launcher={launcher!r} is not known. Allowed: {', '.join(LAUNCHERS)}.")
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout > 0:
        raise InvalidInput(f"timeout={timeout!r} cannot be used: it must be a number of seconds above 0, such as 120.")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise InvalidInput(f"threads={threads!r} cannot be used: it must be a whole number of at least 1, such as 2.")
    limit = None if memory_limit is None else parse_size(memory_limit)
    for left in cluster_records.clean_up_after_others():
        progress(f"ended what kernel {left.kernel.pid} had left behind", 0.0)
    places = () if hosts is None else share_out(hosts, n)
    here, kind = resources.choose(places[0].ranks if places else n, device)
    for other in others(kind):
        progress(f"besides, {other}", 0.0)
    size = sum(host.ranks for host in places) or here
    most = max((host.ranks for host in places), default=size)  # on one host
    return Plan(size, kind, limit, threads or max(1, resources.cores() // most), float(timeout), places)


def others(device: str) -> list[str]:
    """Who else uses this machine's memory for ranks, and its GPUs."""
    return [*map(str, cluster_records.others()), *(resources.gpus_in_use() if device == "cuda" else [])]
