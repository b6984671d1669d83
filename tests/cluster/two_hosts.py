"""Two hosts on one machine: network namespaces joined by a cable, with an ssh server in the second one.

Host ``a`` is where the notebook is: it has a network and a name of its own. Host ``b`` has, besides, its own processes,
temporary folder and shared memory. Nothing outside the two and a temporary folder is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.timing import until

ADDRESSES = {"a": "10.87.0.1", "b": "10.87.0.2"}
B = "TWO_HOSTS_B"  # in a's environment: the pid of b's first process
ROOT = Path(__file__).parents[2]

SSHD = """
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PidFile none
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
"""
SSH = """
Host *
IdentityFile {folder}/key
IdentitiesOnly yes
IdentityAgent none
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile /dev/null
"""
START_B = """
set -e
hostname b
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs tmpfs /run && mkdir /run/sshd
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs {folder}/tmp
ip link set lo up
until ip link show veth-b; do sleep 0.05; done
ip addr add {b}/24 dev veth-b
ip link set veth-b up
exec {sshd} -D -e -f {folder}/sshd_config
"""
START_A = """
set -e
hostname a
mount --bind {folder}/hosts /etc/hosts
ip link set lo up
ip link add veth-a type veth peer name veth-b netns ${variable}
ip addr add {a}/24 dev veth-a
ip link set veth-a up
until nsenter --target ${variable} --net ip -oneline addr show veth-b up | grep {b}; do sleep 0.05; done
until ssh -o BatchMode=yes b true; do sleep 0.1; done
exec "$@"
"""


def missing() -> str:
    """Why there can be no two hosts here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = ["ip", "ssh", "ssh-keygen", "unshare", "nsenter"]
    if lacking := [tool for tool in tools if not shutil.which(tool)] + ["sshd"] * (not sshd()):
        return f"{', '.join(lacking)} not installed (Debian: iproute2, openssh-client, openssh-server)"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "true"])
    return "this container may not make namespaces" if tried.returncode else ""


def sshd() -> str | None:
    """The ssh server, which is on no ordinary user's path."""
    return shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


@contextmanager
def two_hosts(folder: Path) -> Iterator[list[str]]:
    """Make them; gives the command under which programs run on host a, as ``ssh b`` finds b from there."""
    places = {"folder": folder, "sshd": sshd(), "variable": B, **ADDRESSES}
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    key = (folder / "key.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"{name} {key}" for name in ADDRESSES))
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in ADDRESSES.items()))
    (folder / "sshd_config").write_text(SSHD.format(address=ADDRESSES["b"], **places))
    (folder / "ssh_config").write_text(SSH.format(**places))
    (folder / "tmp").mkdir()
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    fresh = ["unshare", "--net", "--mount", "--uts"]
    alone = [*fresh, "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    with (folder / "b.log").open("wb") as log:
        b = subprocess.Popen([*alone, "sh", "-c", START_B.format(**places)], stdout=log, stderr=log)
    try:
        first = _first_child(b.pid)
        path = f"PATH={folder}/bin:{os.environ['PATH']}"
        there = ["env", path, f"TMPDIR={folder}/tmp", f"PYTHONPATH={ROOT}", f"{B}={first}"]
        yield [*there, *fresh, "sh", "-c", START_A.format(**places), "sh"]
    finally:
        b.kill()  # and with it everything on b
        b.wait()


def _first_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return int(until(lambda: children.read_text().split(), lambda: "host b did not come up")[0])


def on_b(*command: str) -> str:
    """Run something on host b, past all networks; what it prints. For programs on host a."""
    enter = ["nsenter", "--target", os.environ[B], "--net", "--mount", "--pid", "--uts", "--ipc"]
    return subprocess.run([*enter, *command], stdout=subprocess.PIPE, text=True, check=True).stdout


def left_on_b() -> list[str]:
    """What there is of a cluster on host b: its processes, and what lies in the places for its files."""
    marks = ("gpumem_nb", "ipyparallel", "prted")
    processes = [line for line in on_b("ps", "-eo", "pid,args").splitlines() if any(mark in line for mark in marks)]
    return processes + on_b("find", os.environ["TMPDIR"], "/dev/shm", "-mindepth", "1").split()


def run_on_a(command: list[str], scenario: str) -> subprocess.CompletedProcess[str]:
    """Run a function of :mod:`tests.cluster.hosts_scenarios` on host a."""
    return subprocess.run(
        [*command, sys.executable, "-m", "tests.cluster.hosts_scenarios", scenario],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
