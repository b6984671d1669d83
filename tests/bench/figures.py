"""What is measured: one function for each figure, each of several rounds in which the sides take turns."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpumem_nb.engine.step.ballot import EVERY_STEPS
from gpumem_nb.engine.step.gradients import EVERY_STEPS as NOISE_EVERY_STEPS
from gpumem_nb.install.mpi_tools import require_tool
from tests.bench.sides import Notebook, Script, Side, rank_environment
from tests.internals import INSIDE

HELLO = "import torch, horovod.torch as hvd; hvd.init(); print('up', flush=True)"


@dataclass
class Figure:
    """One measured number of each round, with its target.

    Attributes:
        target: in words, such as ``≥ 0.98``; empty for none.
        unit: behind the numbers; empty for a ratio.
        details: what it was computed from.
    """

    name: str
    target: str
    unit: str = ""
    values: list[float] = field(default_factory=list)
    details: str = ""

    @property
    def measured(self) -> str:
        """Median with the smallest and the largest value."""
        low, high = min(self.values), max(self.values)
        return f"{_number(statistics.median(self.values))} [{_number(low)}, {_number(high)}]{self.unit}"

    @property
    def met(self) -> str:
        """Whether the median reaches the target."""
        if not self.target:
            return ""
        sign, limit = self.target.split()[:2]
        median = statistics.median(self.values)
        return "yes" if (median >= float(limit) if sign == "≥" else median <= float(limit)) else "no"


def say(text: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def throughput(notebook: Notebook, ranks: int, workload: str, rounds: int, slot_s: float) -> list[Figure]:
    """The live loop against plain Horovod and DistributedDataParallel, on the session that is running."""
    notebook.thaw()
    notebook.run(f"session.load('{workload}'); display(session.panel())")
    scripts = [
        Script("plain Horovod", "plain_horovod", ranks, workload),
        Script("DistributedDataParallel", "plain_ddp", ranks, workload),
    ]
    try:
        rates = take_turns([notebook, *scripts], rounds, slot_s, global_batch=32 * ranks)
    finally:
        for script in scripts:
            script.close()
        notebook.thaw()
    live, *others = rates
    return [
        _ratio(f"live loop ÷ {script.name}, {workload}, {ranks} ranks", target, live, other)
        for script, other, target in zip(scripts, others, ("≥ 0.98", "≥ 1.00"), strict=True)
    ]


def alone(notebook: Notebook, workload: str, target: str, rounds: int, slot_s: float, layers: int = 0) -> Figure:
    """The live loop of a session with one rank against plain torch in one process, without Horovod.

    Args:
        layers: of :data:`tests.bench.plain.LAYERS`, in place of a ready-made workload.
    """
    notebook.thaw()
    made = f"plain.small_layers({layers})" if layers else repr(workload)
    notebook.run(f"from tests.bench import plain; session.load({made}); display(session.panel())")
    options = [f"count={layers}"] * bool(layers)
    script = Script("plain torch", "plain_single", None, workload, *options)
    try:
        live, other = take_turns([notebook, script], rounds, slot_s, global_batch=32)
    finally:
        script.close()
        notebook.thaw()
    what = f"{layers:,} small layers" if layers else workload
    figure = _ratio(f"live loop ÷ plain torch, {what}, 1 rank", target, live, other)
    share = "[float((run[part].astype(float) / run.step_s).median()) for part in ('toolkit_s', 'queued_s')]"
    toolkit, queued = notebook.run("", share)
    of_kernel = f"the kernel with its panel took {notebook.kernel_share:.1%} of a core meanwhile"
    figure.details += f"; of a step {toolkit:.1%} was the toolkit's, in {queued:.1%} it had no core; {of_kernel}"
    return figure


def _ratio(name: str, target: str, ours: Sequence[float], others: Sequence[float]) -> Figure:
    ratios = [a / b for a, b in zip(ours, others, strict=True)]
    details = f"{statistics.median(ours):.0f} ÷ {statistics.median(others):.0f} samples/s"
    return Figure(name, target, "", ratios, details)


def take_turns(sides: Sequence[Side], rounds: int, slot_s: float, global_batch: int) -> list[list[float]]:
    """samples/s of each side and round: A B C, A B C, … with all sides but one frozen."""
    for side in sides:
        side.train(10)  # up and warm before it is frozen
        side.freeze()
    speeds = []
    for side in sides:
        with side.awake():
            speeds.append(side.train(10))
    steps = max(10, round(slot_s * statistics.median(speeds) / global_batch))
    rates: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        for index, side in enumerate(sides):
            with side.awake():
                rates[index].append(side.train(steps))
        latest = ", ".join(f"{side.name} {rate[-1]:.0f}" for side, rate in zip(sides, rates, strict=True))
        say(f"  round {number + 1} of {rounds}, {steps} steps: {latest} samples/s")
    return rates


def start(notebook: Notebook, ranks: int, rounds: int) -> Figure:
    """``session.start`` against bare mpiexec, both until every rank has done ``hvd.init()``; the last one stays up."""
    ours, bare = [], []
    for number in range(rounds):
        bare.append(bare_start(ranks))
        if number:
            notebook.run("session.stop()")
        ours.append(notebook.start(ranks))
        say(f"  round {number + 1} of {rounds}: session.start {ours[-1]:.2f} s, bare mpiexec {bare[-1]:.2f} s")
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    details = f"{statistics.median(ours):.2f} s ÷ {statistics.median(bare):.2f} s"
    return Figure(f"start of {ranks} ranks ÷ bare mpiexec", "≤ 1.25", "", ratios, details)


def bare_start(ranks: int) -> float:
    """Seconds until the last rank says that it is up."""
    command = [str(require_tool("mpiexec")), "-n", str(ranks), sys.executable, "-c", HELLO]
    began = time.perf_counter()
    with subprocess.Popen(command, env=rank_environment(ranks), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        up = [line for line, _ in zip(process.stdout, range(ranks), strict=False)]
        took = time.perf_counter() - began
        process.stdout.read()
    if len(up) < ranks:
        raise RuntimeError(f"bare mpiexec ended with code {process.returncode}")
    return took


def empty_cell(notebook: Notebook, ranks: int, rounds: int) -> Figure:
    """``%%hvd`` with nothing to do, through IPython."""
    code = (
        "times = []\n"
        f"for _ in range({rounds + 3}):\n"
        "    began = time.perf_counter(); get_ipython().run_cell_magic('hvd', '', 'pass')\n"
        "    times.append((time.perf_counter() - began) * 1000)"
    )
    notebook.run(code)
    values = notebook.run("", "times[3:]")
    return Figure(f"empty %%hvd cell, {ranks} ranks", "≤ 30 ms", " ms", values, f"{rounds} cells")


FLIPS = """
import itertools
session.load("digits-resnet")
session.train(20)
session.play()
flips = []
for precision in itertools.islice(itertools.cycle(["bf16", "fp32"]), {rounds}):
    time.sleep(1.5)
    latest = session.history.samples(last=1)[0][0]
    chunk = max(1, int(CHUNK_S / latest.step_s))
    asked_s = session.history.now_s()
    session.set(precision=precision)
    first = None
    while first is None and session.playing:
        time.sleep(0.02)
        seen = [sample for sample in session.history.samples()[0] if sample.time_s > asked_s]
        first = next((sample for sample in seen if sample.event == "flip"), None)
    old = [sample for sample in seen if sample.time_s < first.time_s]
    flips.append((first.time_s - asked_s, len(old) / chunk))
session.pause()
"""


def flip(notebook: Notebook, ranks: int, rounds: int) -> list[Figure]:
    """From the call of ``set`` to the end of the first step under the new settings, while training."""
    notebook.run("from gpumem_nb.kernel.training.chunks import CHUNK_S")
    notebook.run(FLIPS.format(rounds=rounds))
    flips = notebook.run("", "flips")
    what = f"flip → end of first step under new settings, {ranks} ranks"
    return [
        Figure(what, "≤ 2 chunks", " chunks", [chunks for _, chunks in flips], "steps still done under the old ones"),
        Figure(what, "≤ 0.5 s", " s", [seconds for seconds, _ in flips], f"{rounds} flips of precision"),
    ]


def accounting(workload: str, rounds: int, slot_s: float) -> Figure:
    """Step time under the virtual GPU's allocator against torch's own, one process each."""
    sides = [
        Script("virtual GPU", "plain_single", None, workload, "--virtual"),
        Script("plain", "plain_single", None, workload),
    ]
    try:
        counted, plain = take_turns(sides, rounds, slot_s, global_batch=32)
    finally:
        for side in sides:
            side.close()
    ratios = [b / a for a, b in zip(counted, plain, strict=True)]
    details = f"{statistics.median(counted):.0f} and {statistics.median(plain):.0f} samples/s"
    return Figure(f"accounting: step time with ÷ without, {workload}, 1 process", "≤ 1.02", "", ratios, details)


def accuracy() -> Figure:
    """The ledger's peak against that of torch's profiler, in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.accuracy"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True)
    values = json.loads(done.stdout.splitlines()[-1])
    details = f"{len(values)} combinations of model, precision and checkpointing"
    return Figure("ledger's peak, off the profiler's, virtual GPU", "≤ 0.1 %", " %", values, details)


LEDGER = """
session.load({workload!r})
session.set(ledger_steps=20)
session.train(20)
session.train({steps})
steps = session.history.samples(last={steps})[0]
shares = []
for part in range({rounds}):
    of_part = steps[part * len(steps) // {rounds}:(part + 1) * len(steps) // {rounds}]
    recorded = statistics.median(sample.step_s for sample in of_part if sample.ledger)
    others = statistics.median(sample.step_s for sample in of_part if not sample.ledger)
    shares.append(100 * (recorded / others - 1) / 20)
"""


def ledger(notebook: Notebook, ranks: int, workload: str, rounds: int) -> Figure:
    """What recording one step in twenty costs on average, from the durations of such steps and the others."""
    notebook.run("import statistics")
    notebook.run(LEDGER.format(workload=workload, steps=60 * rounds, rounds=rounds))
    name = f"ledger: cost of recording 1 step in 20, {workload}, {ranks} ranks"
    return Figure(name, "≤ 2 %", " %", notebook.run("", "shares"), f"{60 * rounds} steps")


WATCH = (
    INSIDE
    + """
import statistics, time
from gpumem_nb.engine.step.ballot import WeightWatch

def watched_s():
    watch = WeightWatch(the_trainer().live.parts)
    began_s = time.perf_counter()
    watch.begin()
    watch.digest()
    return time.perf_counter() - began_s

[watched_s() for _ in range({rounds})]
"""
)


def watch(notebook: Notebook, ranks: int, workload: str, rounds: int) -> Figure:
    """What comparing the ranks' weights once in so many steps costs on average, of the steps just measured."""
    notebook.run(f"took = session.run({WATCH.format(rounds=rounds)!r})")
    share = f"[100 * max(of_round) / ({EVERY_STEPS} * others) for of_round in zip(*took)]"
    name = f"weight watch: cost of comparing 1 step in {EVERY_STEPS}, {workload}, {ranks} ranks"
    return Figure(name, "≤ 0.2 %", " %", notebook.run("", share), f"slowest rank, {rounds} times, all ranks at once")


PARTS = (
    INSIDE
    + """
import time
import horovod.torch as hvd
from gpumem_nb.engine.step.step_clock import StepClock
from gpumem_nb.shared.step_times import PARTS

def followed_s():
    count = sum(param.requires_grad for param in the_trainer().live.parameters)
    handle = hvd.allreduce_async_(torch.zeros(1), name="parts")
    clock = StepClock(torch.device("cpu"))
    began_s = time.perf_counter()
    clock.begin()
    for part in (*PARTS, *PARTS):
        clock.enter(part)
    for _ in range(count):
        hvd.poll(handle)
    clock.end(()).times()
    took_s = time.perf_counter() - began_s
    hvd.synchronize(handle)
    return took_s

[followed_s() for _ in range({rounds})]
"""
)


def parts(notebook: Notebook, ranks: int, workload: str, rounds: int) -> Figure:
    """What it costs to follow the parts of a step, as a share of the steps just measured."""
    notebook.run(f"took = session.run({PARTS.format(rounds=rounds)!r})")
    share = "[100 * max(of_round) / others for of_round in zip(*took)]"
    name = f"parts of a step: cost of following them, {workload}, {ranks} ranks"
    return Figure(name, "≤ 1 %", " %", notebook.run("", share), f"slowest rank, {rounds} times, all ranks at once")


NOISE = (
    INSIDE
    + """
import time
from gpumem_nb.engine.step.gradients import square_of

def measured_s():
    trained = [param for param in the_trainer().live.parameters if param.requires_grad]
    for param in trained:
        param.grad = torch.ones_like(param)
    began_s = time.perf_counter()
    square_of(trained).item(), square_of(trained).item()  # before and after the average
    took_s = time.perf_counter() - began_s
    for param in trained:
        param.grad = None
    return took_s

[measured_s() for _ in range({rounds})]
"""
)


def noise(notebook: Notebook, ranks: int, workload: str, rounds: int) -> Figure:
    """What measuring the gradient noise scale once in so many steps costs on average, of the steps just measured."""
    notebook.run(f"took = session.run({NOISE.format(rounds=rounds)!r})")
    share = f"[100 * max(of_round) / ({NOISE_EVERY_STEPS} * others) for of_round in zip(*took)]"
    name = f"gradient noise scale: cost of measuring 1 step in {NOISE_EVERY_STEPS}, {workload}, {ranks} ranks"
    return Figure(name, "≤ 0.5 %", " %", notebook.run("", share), f"slowest rank, {rounds} times, all ranks at once")


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
