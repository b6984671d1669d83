"""The hosts that the ranks run on: parse ``a:2,b:2`` and share out the ranks."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from ...shared.errors import InvalidInput
from ..resources import check_number

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
    check_number(n)
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
