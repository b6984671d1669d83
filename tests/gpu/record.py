"""Measure the ready-made workloads under every knob on this machine, into one file (tests/gpu/README.md).

``python -m tests.gpu.record [--ranks 1] [--device cuda] [--folder tests/gpu/records] [--small]``
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pynvml

import gpumem_nb
from gpumem_nb.report.run_summary import Run
from gpumem_nb.session import Session
from gpumem_nb.shared import gpus
from gpumem_nb.shared.errors import GpumemError
from gpumem_nb.shared.knobs import KNOBS
from gpumem_nb.shared.messages import Sample
from gpumem_nb.shared.settings import Settings
from gpumem_nb.workloads.catalog import CATALOG

FORMAT = 2
FOLDER = Path(__file__).parent / "records"
TRACED_STEPS = 3
TIMED_STEPS = 60  # enough for one that is recorded at the default of one in twenty
# Large enough for a GPU to have something to do, small enough for four ranks on one of 16 GB.
LARGE: dict[str, dict[str, int]] = {
    "digits-resnet": {"width": 64, "depth": 6, "resolution": 32},
    "digits-separable": {"width": 64, "depth": 6, "resolution": 32},
    "text-gpt": {"width": 512, "depth": 8, "heads": 8, "sequence_length": 256},
}
SMALL: dict[str, dict[str, int]] = {
    "digits-resnet": {"width": 8, "depth": 1, "resolution": 8},
    "digits-separable": {"width": 8, "depth": 1, "resolution": 8},
    "text-gpt": {"width": 16, "depth": 1, "heads": 2, "sequence_length": 16},
}

VERSIONS = """
import platform
import horovod
{
    "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    "horovod": horovod.__version__, "horovod_reduces": "by NCCL" if hvd.nccl_built() else "on the CPU",
    "capability": list(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None,
}
"""
BEGIN = """
torch.cuda.synchronize()
torch.cuda.memory._record_memory_history("all", context=None, max_entries=2_000_000)
_before = torch.cuda.memory._snapshot()
"""
END = """
from tests.gpu.snapshots import events_of
torch.cuda.synchronize()
_stats = torch.cuda.memory_stats()
_events = events_of(_before, torch.cuda.memory._snapshot(), torch.cuda.current_device())
torch.cuda.memory._record_memory_history(None)
{
    "events": _events,
    "requested_bytes": _stats["requested_bytes.all.current"],
    "reserved_bytes": _stats["reserved_bytes.all.current"],
}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the whole grid; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--small", action="store_true", help="workloads as small as they get")
    parser.add_argument("--workloads", nargs="+", default=list(LARGE), choices=list(LARGE), metavar="NAME")
    args = parser.parse_args(arguments)
    sizes = SMALL if args.small else LARGE
    # Whatever ends it early, there are some of each.
    cells = [(name, sizes[name], knobs) for knobs in grid() for name in args.workloads]
    print(f"{len(cells)} records into {record(args.ranks, args.device, args.folder, cells)}")
    return 0


def grid() -> Iterator[dict[str, Any]]:
    """Every value of every knob that memory or speed depends on, one flip away from the default settings."""
    default = Settings()
    yield {}
    for name, knob in KNOBS.items():
        for value in knob.choices if knob.moves else ():
            if value not in (getattr(default, name), "own"):
                yield {name: value}
    yield {"batch_size": 2 * default.batch_size}
    yield {"accumulation_steps": 4}
    yield {"precision": "bf16", "checkpointing": "blocks"}


def record(ranks: int, device: str, folder: Path, cells: Sequence[tuple[str, dict[str, int], dict[str, Any]]]) -> Path:
    """Measure cells of the grid, each on fresh ranks, and write them after each; returns the file."""
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    written: list[dict[str, Any]] = []
    path = folder
    for number, (name, options, knobs) in enumerate(cells, start=1):
        print(f"{number}/{len(cells)} {name} {knobs or 'as it comes'}", flush=True)
        with gpumem_nb.start(ranks, device=device) as session:
            machine = look_at_machine(session)
            written.append(measure(session, name, options, knobs))
        slug = re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
        path = folder / f"{slug}-{ranks}-{re.sub('[-:]', '', began)}.json"
        folder.mkdir(parents=True, exist_ok=True)
        whole = {"format": FORMAT, "date": began, "machine": machine, "ranks": ranks, "cells": written}
        path.write_text(json.dumps(whole, separators=(",", ":")))
    return path


def look_at_machine(session: Session) -> dict[str, Any]:
    """What the figures depend on besides settings."""
    first = session.ranks[0]
    driver = None
    with suppress(*gpus.ERRORS), gpus.opened():
        driver = pynvml.nvmlSystemGetDriverVersion()
    return {
        "gpu": "virtual GPU" if first.virtual else first.device_name,
        "virtual": first.virtual,
        "limit_bytes": first.memory_limit,
        "driver": driver,
        "gpumem_nb": gpumem_nb.__version__,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "",
        **session.run(VERSIONS, ranks=[0])[0],
    }


def measure(session: Session, name: str, options: dict[str, int], knobs: dict[str, Any]) -> dict[str, Any]:
    """One cell: a trace of the allocations from loading on, then what training takes and yields."""
    wanted = Settings().replace(**knobs)
    cell: dict[str, Any] = {
        "workload": name,
        "options": CATALOG[name].values(options),
        "settings": wanted.as_dict(),
        "outcome": "ok",
        "trace": None,
    }
    real = not session.ranks[0].virtual
    try:
        if real:
            session.run(BEGIN, ranks=[0])
        session.load(name, **options)
        session.set(**wanted.changed_from(session.settings))
        session.train(TRACED_STEPS)
        if real:
            cell["trace"] = session.run(END, ranks=[0])[0]
        run = session.train(TIMED_STEPS)
    except GpumemError as error:
        return cell | {"outcome": str(error)}
    if run.notes:
        return cell | {"outcome": run.notes[0]}
    return cell | figures(session, run)


def figures(session: Session, run: Run) -> dict[str, Any]:
    """What a stretch of training took and yielded; bytes of each rank."""
    frame = run.frame()
    speeds = frame.groupby("step")["samples_per_s"].sum()
    uses = [rank.device_use for rank in session.memory().ranks]
    peaks = frame.groupby("rank")[["live_peak_bytes", "reserved_peak_bytes"]].max()
    return {
        "steps": run.steps,
        "samples_per_s": statistics.median(speeds),
        "per_rank": [
            {
                "live_peak_bytes": int(peaks["live_peak_bytes"][rank]),
                "reserved_peak_bytes": int(peaks["reserved_peak_bytes"][rank]),
                "device": use.as_dict() | {"missing": use.missing} if use else None,
                "ledger": latest_ledger(session.history.samples()[rank]),
            }
            for rank, use in enumerate(uses)
        ],
    }


def latest_ledger(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """The categories of the latest step that was recorded."""
    ledger = next((sample.ledger for sample in reversed(samples) if sample.ledger), None)
    return dataclasses.asdict(ledger) if ledger else None


if __name__ == "__main__":
    raise SystemExit(main())
