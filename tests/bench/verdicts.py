"""Does the verdict on time name what was planted, and keep silent where nothing was?

``python -m tests.bench.verdicts`` trains on two ranks with each fault of :mod:`tests.bench.planted`, and as often
without one, and writes the counts into docs/time.md. The network is made slow between two namespaces, which takes root.
The machine should have nothing else to do: other load is one of the causes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gpumem_nb
from gpumem_nb.session import Session
from tests.bench.planted import HEALTHY, NETWORK, PLAIN, PLANTED, Case
from tests.cluster.two_hosts import ROOT, missing, two_hosts

PAGE = ROOT / "docs" / "time.md"
BEGIN, END = "<!-- planted -->\n", "<!-- end of planted -->"
STEPS = 36
NETWORK_ON_A = "--network"
FOUND = "found: "


def main() -> int:
    """Run all, write what came of it."""
    if sys.argv[1:] == [NETWORK_ON_A]:
        return on_two_hosts()
    with gpumem_nb.start(2, device="cpu", threads=1) as session:
        wanted = sys.argv[1:]
        groups = {name: cases for name, cases in PLANTED.items() if not wanted or name in wanted}
        named = {name: [tried(session, case) for case in cases] for name, cases in groups.items()}
        silent = [tried(session, case) for case in HEALTHY if not wanted or "healthy" in wanted]
    if not wanted or "network" in wanted:
        named["a slow network"] = through_a_narrow_network()
    lines = ["| planted | named | of |", "|---|---:|---:|"]
    lines += [f"| {name} | {sum(right)} | {len(right)} |" for name, right in sorted(named.items())]
    count, right = sum(map(len, named.values())), sum(map(sum, named.values()))
    lines += [f"| all | {right} | {count} |", f"| nothing: no verdict | {sum(silent)} | {len(silent)} |"]
    print("\n".join(lines))
    if not wanted:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text("\n".join([before + BEGIN.rstrip(), *lines, END + rest.partition(END)[2]]))
    return 0


def tried(session: Session, case: Case) -> bool:
    """Whether the verdict is right."""
    session.load(case.workload())
    if session.workload and session.workload.own_optimizer:
        session.set(**PLAIN, **case.settings)
    else:
        session.set(**PLAIN | {"optimizer": "adamw", "optimizer_impl": "default", "num_workers": 0, "clip_norm": None}
                    | dict(case.settings))  # fmt: skip
    with case.beside():
        if case.healthy_steps:
            session.train(case.healthy_steps)
        if case.cell:
            session.run(case.cell, ranks=list(case.ranks))
        session.train(STEPS)
    verdict = session.time().verdict
    right = (verdict.cause if verdict else "") == case.cause and case.words in str(verdict)
    print(f"{'right' if right else 'WRONG'}: {case.cause or 'healthy'}, {case.name}: {verdict}", flush=True)
    return right


def through_a_narrow_network() -> list[bool]:
    """The same on two hosts, whose network carries little."""
    if why := missing():
        print(f"NOT RUN: a slow network: {why}.")
        return []
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as command:
        run = [*command, sys.executable, "-m", "tests.bench.verdicts", NETWORK_ON_A]
        answer = subprocess.run(run, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(answer.stdout)
    right: list[bool] = json.loads(answer.stdout.rpartition(FOUND)[2])
    return right


def on_two_hosts() -> int:
    """On host a, whose cable is made narrow for each case."""
    shape = ["tc", "qdisc", "replace", "dev", "veth-a", "root", "tbf", "burst", "32kb", "latency", "200ms", "rate"]
    right = []
    for case in NETWORK:
        with gpumem_nb.start(hosts="b:1,a:1", device="cpu", threads=1) as session:
            rate = case.settings["rate"]
            session.load(case.workload())
            session.set(**PLAIN)
            subprocess.run([*shape, f"{rate}mbit"], check=True)
            session.train(STEPS)
            verdict = session.time().verdict
            subprocess.run(["tc", "qdisc", "del", "dev", "veth-a", "root"], check=True)
        right.append(bool(verdict and verdict.cause == case.cause))
        print(f"{'right' if right[-1] else 'WRONG'}: {case.cause}, {case.name}: {verdict}", flush=True)
    print(f"{FOUND}{json.dumps(right)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
