"""What of tests/gpu needs no GPU: the records, how they are checked, and what the script does without one."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumem_nb.memory.virtual_gpu.gpu import replay
from tests.gpu import prepare
from tests.gpu.check import problems
from tests.gpu.record import FOLDER, FORMAT, LARGE, SMALL, grid

ROOT = Path(__file__).parents[2]
MIB = 2**20
RECORDS = [pytest.param(path, id=path.stem) for path in sorted(FOLDER.glob("*.json"))]

# 300 allocations of all sizes, most of them released: what a trace looks like.
EVENTS = [
    size for n in range(100) for size in (3 * MIB + n, 700 * n + 1, 512, *([-3 * n + 1, -3 * n] if n % 3 else []))
]


@pytest.mark.parametrize("path", RECORDS)
def test_what_was_measured_on_a_gpu_adds_up_and_agrees_with_the_model(path: Path) -> None:
    assert problems(json.loads(path.read_text())) == []


@pytest.fixture
def record() -> dict[str, Any]:
    """One as it would be measured, had the GPU's allocator done what the model does."""
    modelled = replay(EVENTS)
    rank = {
        "live_peak_bytes": 300 * MIB,
        "reserved_peak_bytes": 320 * MIB,
        "device": {"own_bytes": 800 * MIB, "used_bytes": 1000 * MIB, "total_bytes": 16000 * MIB, "missing": {}},
        "ledger": {"peak_bytes": 290 * MIB, "at_peak": {"parameters": 90 * MIB, "activations": 200 * MIB}},
    }
    cell = {
        "workload": "text-gpt",
        "outcome": "ok",
        "samples_per_s": 12.5,
        "per_rank": [rank, copy.deepcopy(rank)],
        "trace": {
            "events": EVENTS,
            "requested_bytes": modelled.live_bytes,
            "reserved_bytes": modelled.reserved_bytes,
        },
    }
    return {"format": FORMAT, "cells": [cell, {"workload": "text-gpt", "outcome": "it did not fit"}]}


def test_a_record_that_adds_up_has_no_problems(record: dict[str, Any]) -> None:
    assert problems(record) == []


def test_what_could_not_be_read_is_no_problem(record: dict[str, Any]) -> None:
    cell = record["cells"][0]
    cell["trace"] = cell["per_rank"][0]["ledger"] = cell["per_rank"][0]["device"] = None
    cell["per_rank"][1]["device"]["own_bytes"] = None
    assert problems(record) == []


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (("samples_per_s",), 0.0, "0.0 samples/s"),
        (("per_rank", 1, "ledger", "at_peak", "parameters"), 1, "rank 1: the categories add up to"),
        (("per_rank", 0, "live_peak_bytes"), 400 * MIB, "rank 0: live peak"),
        (("per_rank", 1, "device", "used_bytes"), 700 * MIB, "rank 1: own"),
        (("trace", "requested_bytes"), 7, "bytes held, torch with 7"),
        (("trace", "reserved_bytes"), 7 * MIB, "apart"),
    ],
)
def test_whatever_does_not_add_up_is_found(
    record: dict[str, Any], place: tuple[Any, ...], value: Any, problem: str
) -> None:
    inner = record["cells"][0]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (found,) = problems(record)
    assert found.startswith("cell 0 (text-gpt): ")
    assert problem in found


def test_a_record_of_another_format_is_not_misread(record: dict[str, Any]) -> None:
    record["format"] = 0
    assert problems(record) == ["format 0 is not 2: measure again"]


def test_the_grid_flips_every_choice_once_from_the_default() -> None:
    cells = list(grid())
    assert {} in cells
    assert {"precision": "bf16"} in cells
    assert {"checkpointing": "sqrt"} in cells
    assert not any("own_bytes" in cell.values() for cell in cells)
    assert len(cells) == len({json.dumps(cell) for cell in cells})
    assert LARGE.keys() == SMALL.keys()


NO_GPU = "its torch sees no CUDA GPU" if torch.version.cuda else "its torch is a build for the CPU"


@pytest.mark.parametrize(("options", "reason"), [("", NO_GPU), ("-S", "it has no torch")], ids=["no GPU", "no torch"])
def test_without_a_gpu_the_script_says_that_nothing_was_tested_and_changes_nothing(
    options: str, reason: str, tmp_path: Path
) -> None:
    python, home = tmp_path / "python", tmp_path / "home"
    home.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" {options} "$@"\n')
    python.chmod(0o755)
    before = tree()
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "HOME": str(home), "XDG_CACHE_HOME": str(home)}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # where there is one, it is not to be seen
    answer = subprocess.run([ROOT / "tests/gpu/run.sh"], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert answer.stdout == (
        f"SKIPPED: nothing was tested and nothing was measured on a GPU with {python}, because {reason}.\n"
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert tree() == before
    assert not list(home.iterdir())


def tree() -> dict[Path, int]:
    """Every file that the script could have made or changed here."""
    return {path: path.stat().st_mtime_ns for path in (ROOT / "tests" / "gpu").rglob("*") if path.suffix != ".pyc"}


def test_what_the_script_installs_leaves_the_torch_at_hand_alone() -> None:
    assert any(need.startswith("torch") for need in prepare.needs())
    assert any(need.startswith("pytest-timeout") for need in prepare.needs())
    assert f"torch=={torch.__version__}" in prepare.constraints().splitlines()


@pytest.mark.parametrize("ready", [True, False])
def test_an_environment_is_made_once_and_only_if_this_python_lacks_something(
    ready: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made: list[Path] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(prepare, "is_ready", lambda python: ready if python == Path(sys.executable) else bool(made))
    monkeypatch.setattr(prepare, "make", made.append)
    assert (prepare.main(), prepare.main()) == (0, 0)
    first, second = capfd.readouterr().out.splitlines()
    assert first == second == (sys.executable if ready else str(made[0]))
    assert len(made) == (0 if ready else 1)
    assert all(python.is_relative_to(tmp_path / "gpumem_nb" / "gpu-tests") for python in made)
