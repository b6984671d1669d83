"""The recorder of tests/gpu on a virtual GPU: all of it but the trace of a real allocator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import internals
from tests.gpu.check import problems
from tests.gpu.record import SMALL, TIMED_STEPS, record

pytestmark = pytest.mark.cluster


@pytest.mark.full
def test_a_record_says_what_was_measured_where_and_what_could_not_be(tmp_path: Path) -> None:
    internals.stop_running()
    cells: list[tuple[str, dict[str, int], dict[str, Any]]] = [
        ("digits-resnet", SMALL["digits-resnet"], {"precision": "bf16"}),
        ("digits-resnet", SMALL["digits-resnet"], {"batch_size": 10**6}),
    ]
    path = record(1, "cpu", tmp_path / "new", cells)
    written = json.loads(path.read_text())
    assert path.name.startswith("virtual-gpu-1-20")
    assert problems(written) == []
    machine = written["machine"]
    assert (machine["gpu"], machine["virtual"], machine["limit_bytes"]) == ("virtual GPU", True, 2 * 2**30)
    assert all(machine[name] for name in ("python", "torch", "horovod", "horovod_reduces", "gpumem_nb"))
    good, bad = written["cells"]
    assert (good["outcome"], good["settings"]["precision"], good["options"]["width"]) == ("ok", "bf16", 8)
    assert (good["steps"], good["trace"], len(good["per_rank"])) == (TIMED_STEPS, None, 1)
    assert good["samples_per_s"] > 0
    assert good["per_rank"][0]["device"] is None
    assert "larger than the dataset" in bad["outcome"]
    assert "per_rank" not in bad
