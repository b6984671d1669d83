"""Which GPUs cold predictions know, how they are named, and how far a figure of them is trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.magics import planning
from gpumem_nb.magics.planning import PlanningMagics
from gpumem_nb.planning import cold, gpu_table
from gpumem_nb.shared.errors import InvalidInput

MIB, GB = 2**20, 10**9
HEADING = Path(gpu_table.__file__).with_name("gpus.csv").read_text().splitlines()[0]


def test_a_size_alone_is_trusted_less_than_a_gpu_that_was_measured() -> None:
    gpu = gpu_table.find(cold.GENERIC)
    errors = {
        (known, ranks): cold._asked(gpu, 24 * GB, ranks, known).limit_error_bytes
        for known in (True, False)
        for ranks in (1, 2)
    }
    assert errors == {(True, 1): 50 * MIB, (True, 2): 250 * MIB, (False, 1): 500 * MIB, (False, 2): 700 * MIB}
    assert cold._asked(gpu, None, 1, False).limit_error_bytes == 0  # of no limit


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the magic asks for."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(planning, "predict", lambda workload, **arguments: found.update(arguments))
    return found


@pytest.mark.parametrize(
    "line",
    [
        "text-gpt --gpu T4-16GB, A100-40GB batch_size=16",
        "text-gpt --gpu T4-16GB ,A100-40GB",
        "text-gpt --gpu T4-16GB , A100-40GB",
        "text-gpt gpu=T4-16GB, A100-40GB",
        "text-gpt gpu='T4-16GB, A100-40GB'",
        "--gpu T4-16GB, A100-40GB",
    ],
)
def test_a_space_beside_a_comma_is_said(line: str, asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"GPUs are written without spaces around the commas.*--gpu T4-16GB,A100-40GB"):
        PlanningMagics(InteractiveShell.instance()).hvd_predict(line)
    assert not asked


@pytest.mark.parametrize(
    ("line", "memory"),
    [
        ("text-gpt --gpu 'T4-16GB, A100-40GB' --memory '24 GB' --ranks 4", "24 GB"),
        ('text-gpt gpu="T4-16GB,A100-40GB" memory="24GB" ranks=4', "24GB"),
    ],
)
def test_quotes_and_pairs_are_read_as_flags_are(line: str, memory: str, asked: dict[str, Any]) -> None:
    PlanningMagics(InteractiveShell.instance()).hvd_predict(line)
    assert asked == {"gpu": ["T4-16GB", "A100-40GB"], "memory": memory, "ranks": 4}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--gpu T4-16GB", "Name a workload, or load one on ranks first, for example: %hvd_predict text-gpt --gpu"),
        ("text-gpt digits-resnet --gpu T4-16GB", "Name a workload, or load one on ranks first"),
        (
            "text-gpt --largest-batch",
            "--largest-batch is for the ranks that run here; a table of GPUs shows it too, for example: "
            "%hvd_predict text-gpt --gpu T4-16GB,A100-40GB.",
        ),
    ],
)
def test_what_cannot_be_asked_of_gpus_that_are_not_here_is_a_sentence(
    line: str, sentence: str, asked: dict[str, Any]
) -> None:
    with pytest.raises(UsageError) as raised:
        PlanningMagics(InteractiveShell.instance()).hvd_predict(line)
    assert str(raised.value).startswith(sentence)
    assert not asked


def test_ranks_that_are_no_number_are_a_sentence() -> None:
    with pytest.raises(UsageError, match="ranks='four' cannot be used: it must be a whole number"):
        PlanningMagics(InteractiveShell.instance()).hvd_predict("text-gpt ranks=four")


@pytest.mark.parametrize(
    "line",
    [
        "Mine-8GB,8.6,inf,700,20,100,measured,measured",
        "Mine-8GB,8.6,nan,700,20,100,measured,measured",
        "Mine-8GB,8.6,8000,inf,20,100,measured,measured",
        "Mine-8GB,8.6,8000,-700,20,100,measured,measured",
        "Mine-8GB,8.6,8000,700,-20,100,measured,measured",
        "Mine-8GB,8.6,8000,700,20,-100,measured,measured",
        "Mine-8GB,8.6,0,700,20,100,measured,measured",
        "Mi\0ne-8GB,8.6,8000,700,20,100,measured,measured",
        "Mine-8GB,8.6,8000,700,20,1\x0000,measured,measured",
    ],
)
def test_figures_that_cannot_be_are_a_sentence(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.csv"
    own.write_text(f"{HEADING}\n{line}\n")
    monkeypatch.setenv(gpu_table.VARIABLE, str(own))
    with pytest.raises(InvalidInput, match=r"own\.csv, which GPUMEM_NB_GPUS names, cannot be used"):
        gpu_table.find("T4-16GB")


@pytest.mark.parametrize("machine", [{"limit_bytes": float("inf")}, {"limit_bytes": -1}, None, "A100"])
def test_a_record_that_cannot_be_is_a_sentence(machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = {"device": {"used_bytes": 3 * 2**30}, "reserved_peak_bytes": 2**30}
    own = {"gpu": "Mine", "virtual": False} | machine if isinstance(machine, dict) else machine
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"ranks": 1, "machine": own, "cells": [{"outcome": "ok", "per_rank": [used]}]}))
    monkeypatch.setenv(gpu_table.VARIABLE, str(path))
    with pytest.raises(InvalidInput, match=r"mine\.json, which GPUMEM_NB_GPUS names, cannot be used"):
        gpu_table.find("T4-16GB")


@pytest.mark.parametrize("name", ["A100 40GB", "a100_40gb", " A100 - 40 GB ", "a10040gb", "A100-40GB"])
def test_a_gpu_is_found_however_its_name_is_divided(name: str) -> None:
    assert gpu_table.find(name).name == "A100-40GB"


@pytest.mark.parametrize(("name", "whole"), [("T4", "T4-16GB"), ("rtx 3090", "RTX3090-24GB"), ("h200", "H200-141GB")])
def test_a_size_may_be_left_out_where_there_is_one(name: str, whole: str) -> None:
    assert gpu_table.find(name).name == whole


def test_where_there_are_several_sizes_these_are_named() -> None:
    with pytest.raises(InvalidInput) as raised:
        gpu_table.find("a100")
    assert str(raised.value) == "There are several a100 in the table: write A100-40GB or A100-80GB."


@pytest.mark.parametrize("name", ["T4", "T4-16GB", "t4 16gb"])
def test_a_gpu_of_an_added_file_that_is_written_otherwise_counts_in_place_of_that_of_the_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.csv"
    own.write_text(f"{HEADING}\nT4 16GB,7.5,14000,700,20,100,measured,measured\n")
    monkeypatch.setenv(gpu_table.VARIABLE, str(own))
    assert gpu_table.find(name).memory_bytes == 14000 * MIB
