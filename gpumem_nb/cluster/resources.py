"""Where ranks run: this machine with its cores, memory and GPUs, and other hosts, given as ``a:2,b:2``."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil
import pynvml

from ..shared import gpus, processes
from ..shared.errors import InvalidInput, StartError
from ..shared.units import as_whole

# An idle rank (Python, torch, Horovod) holds about 330 MB of resident memory (measured, torch 2.13 CPU build).
RANK_RESIDENT_BYTES = 330 * 10**6
DEFAULT_RANKS_WITHOUT_GPU = 2
_WITHOUT_GPU = "the fewest that exchange gradients"
DEVICES = ("auto", "cuda", "cpu")


def visible_gpus() -> int:
    """GPUs that ranks will see, counted through NVML so that the kernel never touches CUDA; 0 without a driver."""
    there = 0
    with contextlib.suppress(*gpus.ERRORS), gpus.opened():
        there = int(pynvml.nvmlDeviceGetCount())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not there:
        return there

    def is_named(device: str) -> bool:
        return int(device) < there if device.isdecimal() else device.startswith(("GPU-", "MIG-"))

    # CUDA ends the list at the first entry that names no device, such as Slurm's NoDevFiles.
    return len(list(itertools.takewhile(is_named, map(str.strip, visible.split(",")))))


def gpus_in_use() -> list[str]:
    """Return which GPUs that ranks may use other processes compute on, in words; those of this kernel's ranks left out.

    In a container NVML may know processes by numbers of its own; once this kernel has ranks, those may be they.
    """
    own = {child.pid for child in psutil.Process().children(recursive=True)}
    found = []
    with contextlib.suppress(*gpus.ERRORS), gpus.opened():
        for name, uuid, device in gpus.devices():
            if not gpus.may_be_visible(name, uuid):
                continue
            with contextlib.suppress(*gpus.ERRORS):  # of this device only
                pids = gpus.computing(device).keys() - own
                seen = sorted(filter(psutil.pid_exists, pids))
                if seen:
                    found.append(f"{name} is in use by process {', '.join(map(str, seen))}")
                elif pids and not own:
                    found.append(f"{name} is in use by a process that cannot be seen from here")
    return found


def most_ranks() -> int:
    """Return how many ranks this machine can hold: bounded by memory, and by eight ranks a core."""
    by_memory = processes.available_bytes() // RANK_RESIDENT_BYTES
    return max(1, min(int(by_memory), 8 * processes.cores()))


def checked_number(n: int) -> int:
    """Return a number of ranks; raises ``InvalidInput`` for anything else."""
    if (number := as_whole(n, 1)) is None:
        raise InvalidInput(f"{n!r} ranks cannot be started: it must be a whole number of at least 1, such as 4.")
    return number


def choose(n: int | None, device: str) -> tuple[int, str, str]:
    """Return the number of ranks, their kind of device (``cuda`` or ``cpu``), and why it is that number.

    A number that was named is checked against the machine, and there is nothing to say of it.

    Raises:
        InvalidInput: no number of ranks, or no kind of device.
        StartError: the machine has no such devices, or too little memory.
    """
    if device not in DEVICES:
        raise InvalidInput(f"device={device!r} is not known. Allowed: {', '.join(DEVICES)}.")
    if n is not None:
        n = checked_number(n)
    seen = visible_gpus() if device != "cpu" else 0
    if device == "cuda" and not seen:
        raise StartError("There is no GPU that this notebook can see. Use --device cpu for virtual GPUs on the CPU.")
    kind, most = "cuda" if seen else "cpu", most_ranks()
    if n is None:
        n = seen or min(DEFAULT_RANKS_WITHOUT_GPU, most)
        why = "one for each GPU" if seen else _WITHOUT_GPU if n > 1 else "because memory has no room for more"
        return n, kind, why
    if n > most:
        memory = processes.available_bytes() / 2**30
        raise InvalidInput(
            f"{n} ranks do not fit on this machine: with {processes.cores()} cores and {memory:.0f} GiB of free memory "
            f"at most {most} make sense. Try %hvd_start {min(4, most)}."
        )
    return n, kind, ""


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # never an option of ssh's
_FORM = "Write NAME:RANKS for each host, such as --hosts a:2,b:2."


@dataclass(frozen=True)
class Host:
    """A machine, how many ranks it gets, and whether it is the one that the notebook runs on."""

    name: str
    ranks: int
    here: bool


def share_out(text: str, n: int | None) -> tuple[Host, ...]:
    """Return the hosts in the order of their ranks: this machine first, because rank 0 writes the files.

    Args:
        text: such as ``a:2,b:2``; a host without a number gets one rank.
        n: ranks in all, filling one host after the other; by default as many as there is room for.

    Raises:
        InvalidInput: not of that form, a host named twice, this machine missing, or more ranks than there is room for.
    """
    if not isinstance(text, str):
        raise InvalidInput(f"hosts={text!r} cannot be used: it must be text such as 'a:2,b:2'.")
    named = sorted((_host(part.strip()) for part in text.split(",")), key=lambda host: not host.here)
    if len(named) > len({"" if host.here else host.name for host in named}):
        raise InvalidInput(f"hosts={text!r} names one host twice: name each once, with all its ranks. {_FORM}")
    if not named[0].here:
        raise InvalidInput(
            f"hosts={text!r} leaves out the machine that this notebook runs on, whose first rank writes the files: "
            f"add {socket.gethostname()}:1."
        )
    room = sum(host.ranks for host in named)
    if n is None:
        return tuple(named)
    n = checked_number(n)
    if n > room:
        raise InvalidInput(f"{n} ranks do not fit: hosts={text!r} has room for {room}. {_FORM}")
    return tuple(_fill(named, n))


def _host(part: str) -> Host:
    name, colon, number = part.partition(":")
    if not _NAME.fullmatch(name) or (colon and not (number.isdecimal() and int(number) > 0)):
        raise InvalidInput(f"{part!r} is not a host with its number of ranks. {_FORM}")
    return Host(name, int(number) if colon else 1, _is_here(name))


def _fill(hosts: Sequence[Host], n: int) -> Iterator[Host]:
    for host in hosts:
        if ranks := min(host.ranks, n):
            yield Host(host.name, ranks, host.here)
        n -= ranks


def _is_here(name: str) -> bool:
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    except OSError:  # a name that ssh alone knows
        return False
    return bool(addresses & own_networks().keys()) or any(address.startswith("127.") for address in addresses)


def own_networks() -> dict[str, str]:
    """This machine's addresses (IPv4), each with the mask of its network."""
    return {
        entry.address: entry.netmask or "255.255.255.255"
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    }
