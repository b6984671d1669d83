"""The quickstart notebook runs from top to bottom, as with Restart & Run all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(400)]

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"
CELL_TIMEOUT_S = 120
FASTER = 1.3  # times as fast, at least: by CPU time it is three


@pytest.fixture(scope="module")
def source() -> Any:
    """The notebook as it is shipped."""
    return nbformat.read(QUICKSTART, as_version=4)


@pytest.fixture(scope="module")
def executed(source: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each code cell showed as text, by cell id; a cell that fails ends the execution with its error."""
    notebook = nbformat.from_dict(source)
    temporary = tmp_path_factory.mktemp("ranks")
    folder = tmp_path_factory.mktemp("notebook")  # it writes a script beside itself
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": str(folder)}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        client.execute()
    assert not list(temporary.glob("gpumem_nb-*"))
    return {cell.id: shown(cell) for cell in notebook.cells if cell.cell_type == "code"}


def shown(cell: Any) -> str:
    """Streams and plain text of a cell's outputs."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "\n".join(texts)


def test_it_is_shipped_without_outputs_and_opens_without_a_dialog(source: Any) -> None:
    nbformat.validate(source)
    assert source.metadata.kernelspec.name == "python3"
    assert not [cell.id for cell in source.cells if cell.get("outputs") or cell.get("execution_count")]
    assert len({cell.id for cell in source.cells}) == len(source.cells)


def test_ranks_are_started_without_a_number_and_it_is_said_how_many_and_why(executed: dict[str, str]) -> None:
    assert "2 ranks (" in executed["start"]
    assert "No GPU is used, so each rank has a virtual one on the CPU." in executed["start"]
    assert "40 steps on 2 ranks" in executed["train"]
    assert all(f"rank {rank}: " in executed["status"] for rank in range(2))


def test_flips_say_what_they_did(executed: dict[str, str]) -> None:
    assert "precision fp32 → bf16: live peak" in executed["flip-precision"]
    assert "checkpointing none → blocks" in executed["flip-checkpointing"]
    assert "batch_size 32 → 64" in executed["flip-batch"]
    assert "accumulation_steps 1 → 4" in executed["flip-accumulation"]


def test_cells_on_ranks_look_at_the_live_model(executed: dict[str, str]) -> None:
    assert "norm" in executed["look"]
    accuracy = float(executed["accuracy"].split("accuracy ")[1].rstrip("%' \n"))
    assert accuracy > 95
    assert "right" in executed["own-score"]


def test_what_will_not_fit_is_said_before(executed: dict[str, str]) -> None:
    said = re.search(
        r"batch_size=(\d+) is the largest that fits every rank: live peak [\d.]+ MiB, reserved [\d.]+ MiB of 160.0 MiB",
        executed["predict-largest"],
    )
    assert said
    assert 32 < int(said[1]) < 1024
    assert "does not fit: live peak" in executed["predict-too-large"]
    assert re.search(r"th(is|ese) would fit: .*Type %hvd_set", executed["predict-too-large"])


def test_running_out_of_memory_is_survived(executed: dict[str, str]) -> None:
    assert "5 steps on 2 ranks" in executed["oom"]
    assert "ran out of memory" in executed["oom"]
    assert "went back to batch_size=32" in executed["oom"]
    assert "oom" in executed["runs"]


def test_it_ends_with_a_discovery_and_not_with_the_error_made_on_purpose(executed: dict[str, str]) -> None:
    assert "ran out of memory" not in "".join(executed[cell] for cell in ("taken-over", "doctor", "tune", "faster"))
    found = ["Checkpointing can be switched off", "Larger micro-batches would be faster"]
    assert any(title in executed["doctor"] for title in found), executed["doctor"]
    assert "were measured by steps that were undone" in executed["tune"]
    assert "Nothing was applied" not in executed["tune"]
    effect = re.search(r"([\d,]+) → ([\d,]+) samples/s", executed["faster"])
    assert effect, executed["faster"]
    slow, fast = (float(figure.replace(",", "")) for figure in effect.groups())
    assert fast > FASTER * slow
    assert "horovodrun" in executed["export"]


def test_nothing_is_left_running(executed: dict[str, str]) -> None:
    assert executed["stop"].startswith("All 2 ranks have ended.")
    left = [process.cmdline() for process in psutil.Process().children(recursive=True) if is_rank(process)]
    assert not left


def is_rank(process: psutil.Process) -> bool:
    try:
        return "ipyparallel" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_the_memory_report_says_what_fills_the_peak(executed: dict[str, str]) -> None:
    assert "activations" in executed["memory"]
    assert "forward" in executed["timeline"]
    assert "backward" in executed["timeline"]
