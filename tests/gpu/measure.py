"""Measure what a real GPU shows of the toolkit, most valuable first, into one file that is written after each figure.

``python -m tests.gpu.measure [--device cuda] [--out measured.json] [--small] [--parts a,b]``: each part starts ranks of
its own, and one that fails does not keep the next from running. ``--small`` with ``--device cpu`` tries the script.
``nccl`` and ``several`` are for a Horovod on NCCL and for several GPUs (``tests/gpu/run.py``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gpumem_nb
from gpumem_nb.cluster.resources import visible_gpus
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import GpumemError
from gpumem_nb.workloads.catalog import CATALOG

GIB = 2**30
LARGE = {"width": 1024, "depth": 24, "heads": 16, "sequence_length": 512}  # 303 M weights
SMALL = {"width": 32, "depth": 2, "heads": 2, "sequence_length": 32}
# The same training without the toolkit, in the same process, with a model of its own.
PLAIN_LOOP = """
from tests.bench import plain as _bench

def _plain(workload, batch_size, precision, steps):
    net = workload.model().to(device).train()
    optimizer = _bench.OPTIMIZERS["adamw"](net.parameters(), 1e-3)
    batches = _bench.batches(workload.data(), batch_size, rank=0, size=1)
    took = []
    for _ in range(steps):
        began = _bench.now(device)
        with _bench.autocast(precision, device):
            loss = workload.loss(net, _bench.to_device(next(batches), device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(_bench.now(device) - began)
    return took
"""


HERE = "from gpumem_nb.engine.link import communicator\n_link = communicator.here()"
# Where the time of a question goes on the rank: in Python, and in what waits for the device.
PROFILE = """
import cProfile, io, pstats, torch.profiler
_tracing = torch.profiler.profile()
def _waits():
    _tracing.__exit__(None, None, None)
    meant = "Memcpy", "cudaMemcpy", "cudaStreamSync", "cudaDeviceSync", "cudaEventSync", "cudaMalloc", "cudaFree"
    found = [one for one in _tracing.key_averages() if one.key.startswith(meant)]
    return {one.key: (one.count, one.cpu_time_total, one.device_time_total) for one in found}
_profile = cProfile.Profile()
def _profiled(lines=40):
    _profile.disable()
    said = io.StringIO()
    pstats.Stats(_profile, stream=said).sort_stats("tottime").print_stats(lines)
    return said.getvalue()
"""


class Bench:
    """One run: its sizes, and what was found so far."""

    def __init__(self, device: str, small: bool, out: Path) -> None:
        self.device, self.small, self._out = device, small, out
        self.options = SMALL if small else LARGE
        self.batch_size = 4 if small else 16
        self.steps = 4 if small else 6
        self.found: dict[str, Any] = {}

    def say(self, part: str, **figures: Any) -> None:
        """Add figures of a part, and write all of them."""
        self.found.setdefault(part, {}).update(figures)
        print(part, json.dumps(figures, default=str), flush=True)
        self._out.write_text(json.dumps(self.found, indent=1, default=str))

    def start(self, ranks: int = 1, limit: int | None = None, **options: Any) -> Session:
        """Start ranks with the large model."""
        began = time.monotonic()
        session = gpumem_nb.start(ranks, device=self.device, memory_limit=limit)
        session.load("text-gpt", **{**self.options, **options})
        session.set(batch_size=self.batch_size)
        self.say("start", **{f"{ranks} ranks": time.monotonic() - began})
        return session


def timed(ask: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long a question took, and its answer or error."""
    began = time.monotonic()
    try:
        answer = ask()
    except GpumemError as error:
        answer = f"{type(error).__name__}: {error}"
    return round(time.monotonic() - began, 3), answer


def parts_of(frame: Any) -> dict[str, float]:
    """Return the medians of a run's columns of seconds."""
    return {name: float(frame[name].median()) for name in frame if name.endswith("_s") and name != "time_s"}


def speed(bench: Bench) -> None:
    """A single rank, with its panel open, beside plain torch in the same process, in turns."""
    with bench.start() as session:
        session.panel()  # which draws, to no browser
        began = time.monotonic()
        first = session.train(1)
        bench.say("speed", first_step_s=time.monotonic() - began, told=str(first))
        session.run(PLAIN_LOOP)
        entry = CATALOG["text-gpt"]
        session.push({"_workload": entry.build("text-gpt", entry.values(bench.options))})
        for precision in ("fp32", "bf16"):
            session.set(precision=precision)
            warm = session.train(3).frame()
            recorded_s = float(warm[warm.parameters_bytes.notna()].step_s.iloc[-1])  # the second of two
            ours: list[float] = []
            plain: list[float] = []
            parts: dict[str, float] = {}
            for _ in range(2):
                frame = session.train(bench.steps).frame()
                ours += frame.step_s.tolist()[2:]
                parts = parts_of(frame)
                [took] = session.run(f"_plain(_workload, {bench.batch_size}, {precision!r}, {bench.steps})")
                session.run("torch.cuda.empty_cache()")
                plain += took[2:]
            bench.say(
                "speed",
                **{
                    precision: {
                        "ours_s": statistics.median(ours),
                        "plain_s": statistics.median(plain),
                        "ratio": statistics.median(plain) / statistics.median(ours),
                        "recorded_ratio": recorded_s / statistics.median(ours),
                        "parts": parts,
                    }
                },
            )


def questions(bench: Bench) -> None:
    """How long questions take, and how far predictions are from what comes."""
    with bench.start() as session:
        session.train(6)
        step_s = float(session.train(bench.steps).frame().step_s.median())
        bench.say("questions", step_s=step_s)
        session.run(PROFILE)
        flips: list[dict[str, Any]] = [
            {"precision": "bf16"}, {"checkpointing": "blocks"}, {"batch_size": 2 * bench.batch_size},
            {"precision": "bf16", "checkpointing": "sqrt"}, {"precision": "fp16"}, {"optimizer": "momentum"},
        ]  # fmt: skip
        for number, flip in enumerate(flips):
            if number in (1, 2):  # these two take somewhat longer for it
                session.run("_profile.enable()" if number == 1 else "_tracing.__enter__() and None")
                session.train(2)  # the first step after a cell copies what it may have changed
            took, predicted = timed(partial(session.predict, **flip))
            if number == 1:
                [lines] = session.run("_profiled()")
                bench.say("questions", profile=lines.splitlines())
            if number == 2:
                [found] = session.run("_waits()")
                bench.say("questions", waits=found)
            name = ",".join(f"{key}={value}" for key, value in flip.items())
            if isinstance(predicted, str):
                bench.say("questions", **{name: predicted})
                continue
            before = session.settings
            session.run("torch.cuda.empty_cache()" if bench.device == "cuda" else "0")
            session.set(**flip)
            session.train(3)
            frame = session.train(bench.steps // 2).frame()
            live, reserved = int(frame.live_peak_bytes.max()), int(frame.reserved_peak_bytes.max())
            came_s = float(frame.step_s.median())
            bench.say("questions", **{name: {
                "took_s": took, "own_s": predicted.seconds, "live_off": predicted.live_peak_bytes / live - 1,
                "reserved_off": predicted.reserved_peak_bytes / reserved - 1, "step_s": came_s,
                "step_off": predicted.step_s / came_s - 1 if predicted.step_s else None, "verdict": predicted.verdict,
                "basis": predicted.basis,
            }})  # fmt: skip
            session.set(**{knob: getattr(before, knob) for knob in flip})
        took, found = timed(session.doctor)
        bench.say("questions", doctor_s=took, doctor=str(found))
        took, found = timed(session.doctor)
        bench.say("questions", doctor_again_s=took)
        took, found = timed(session.largest_batch)
        bench.say("questions", largest_batch_s=took, largest_batch=found)
        seconds = 10 if bench.small else 15
        took, found = timed(lambda: session.tune(seconds=seconds))
        bench.say("questions", tune_s=took, tune=str(found))


def limits(bench: Bench) -> None:
    """At the largest batch: many steps, a cell that allocates, a step that runs out, the way back, and free()."""
    limit = 400 * 2**20 if bench.small else 16 * GIB
    with bench.start(limit=limit) as session:
        session.train(4)
        took, largest = timed(session.largest_batch)
        bench.say("limits", largest_batch_s=took, largest=largest)
        session.set(batch_size=largest)
        run = session.train(20 if bench.small else 40)
        frame = run.frame()
        reserved, live = int(frame.reserved_peak_bytes.max()) / limit, int(frame.live_peak_bytes.max()) / limit
        bench.say("limits", steps=run.steps, notes=run.notes, reserved_of_limit=reserved, live_of_limit=live)
        mib = 1 if bench.small else 100
        session.run(f"_cell = torch.empty({mib} * 2**20, dtype=torch.uint8, device=device)")
        run = session.train(8)
        bench.say("limits", with_a_cell={"steps": run.steps, "notes": run.notes, "batch": session.settings.batch_size})
        session.run("del _cell")
        session.set(batch_size=largest + max(1, largest // 3))
        took, run = timed(lambda: session.train(8))
        bench.say("limits", too_large={"took_s": took, "answer": str(run), "notes": getattr(run, "notes", None),
                                       "batch": session.settings.batch_size})  # fmt: skip
        took, run = timed(lambda: session.train(8))
        bench.say("limits", after={"took_s": took, "answer": str(run), "batch": session.settings.batch_size})
        session.set(batch_size=1)
        session.train(2)
        took, freed = timed(session.free)
        bench.say("limits", free_s=took, freed=str(freed))


def sharing(bench: Bench) -> None:
    """Four ranks that share the GPU: what reducing costs."""
    with bench.start(4 if bench.device == "cuda" else 2) as session:
        session.set(batch_size=max(2, bench.batch_size // 4), precision="bf16")
        session.train(4)
        for how, code in (("staged", ""), ("by Horovod alone", "_stage, _link._stage = _link._stage, None"),
                          ("staged again", "_link._stage = _stage")):  # fmt: skip
            session.run(f"{HERE}\n{code}")
            session.train(2)
            frame = session.train(bench.steps).frame()
            hidden = frame.hidden_s / (frame.hidden_s + frame.reduction_s)
            found = {"step_s": float(frame.step_s.median()), "parts": parts_of(frame), "time": str(session.time())}
            bench.say("sharing", **{how: {**found, "hidden_share": float(hidden.median())}})
        took, predicted = timed(lambda: session.predict(checkpointing="blocks"))
        bench.say("sharing", predict_s=took, predicted=str(predicted))


def nccl(bench: Bench) -> None:
    """One rank with a Horovod on NCCL: it starts, trains, predicts, and refuses a second rank on its GPU."""
    bench.say("nccl", check=str(gpumem_nb.check()))
    with bench.start() as session:
        built = session.run("hvd.nccl_built()") if bench.device == "cuda" else [0]
        frame = session.train(bench.steps).frame()
        bench.say("nccl", built=built, losses=frame.loss.tolist(), step_s=float(frame.step_s.median()))
        took, predicted = timed(lambda: session.predict(precision="bf16"))
        bench.say("nccl", predict_s=took, predicted=str(predicted))
    if bench.device == "cuda" and visible_gpus() == 1:
        took, answer = timed(lambda: gpumem_nb.start(2, device="cuda"))
        bench.say("nccl", refused_s=took, refused=str(answer))


def several(bench: Bench) -> None:
    """A rank on each GPU: speed, what backward hides, and that all hold the same weights; needs several."""
    ranks = visible_gpus() if bench.device == "cuda" else 2
    with bench.start(ranks) as session:
        for precision in ("fp32", "bf16"):
            session.set(precision=precision)
            session.train(4)
            frame = session.train(bench.steps).frame()
            hidden = frame.hidden_s / (frame.hidden_s + frame.reduction_s)
            found = {"ranks": ranks, "step_s": float(frame.step_s.median()), "parts": parts_of(frame)}
            one, *others = session.run("[float(param.double().sum()) for param in model.parameters()]")
            alike = all(other == one for other in others)
            bench.say("several", **{precision: {**found, "hidden_share": float(hidden.median()), "alike": alike}})
        bench.say("several", scaling=str(session.scaling(steps=6)), network=str(session.check_network()))


def leaving(bench: Bench) -> None:
    """Attach a model of a cell, train, tune, export, and run the script."""
    with gpumem_nb.start(1, device=bench.device) as session:
        session.run(ATTACHED)
        session.attach(model="net", loss="loss_of", data="data", optimizer="opt")
        session.set(batch_size=16)
        losses = session.train(6).frame().loss.tolist()
        took, tuned = timed(lambda: session.tune(seconds=8))
        bench.say("leaving", losses=losses, tune_s=took, tuned=str(tuned))
        with tempfile.TemporaryDirectory() as folder:
            took, answer = timed(lambda: session.export(Path(folder) / "train.py"))
            bench.say("leaving", export_s=took, answer=str(answer))
            done = subprocess.run(
                [sys.executable, "train.py", "--steps", "20"], cwd=folder, capture_output=True, text=True
            )
            bench.say("leaving", code=done.returncode, out=done.stdout[-1500:], err=done.stderr[-1500:])


ATTACHED = """
import torch
from torch import nn
torch.manual_seed(3)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        block = lambda: nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.head = nn.Linear(32, 10)
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))
net = Net().to(device)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,)))
def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
PARTS: dict[str, Callable[[Bench], None]] = {
    "speed": speed, "sharing": sharing, "questions": questions, "limits": limits, "leaving": leaving,
}  # fmt: skip
ELSEWHERE: dict[str, Callable[[Bench], None]] = {"nccl": nccl, "several": several}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path("measured.json"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parts", default=",".join(PARTS))
    args = parser.parse_args(arguments)
    bench, failed = Bench(args.device, args.small, args.out), 0
    for name in args.parts.split(","):
        began = time.monotonic()
        try:
            (PARTS | ELSEWHERE)[name](bench)
        except Exception:
            failed = 1
            bench.say(name, error=traceback.format_exc())
        bench.say("seconds", **{name: time.monotonic() - began})
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
