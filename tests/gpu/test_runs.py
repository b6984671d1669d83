"""What is kept and handed on of a session on a real GPU names it: its name, its memory, its driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.units import format_bytes

pytestmark = pytest.mark.gpu
RANKS = 1
GPU = """
import pynvml
pynvml.nvmlInit()
_properties = torch.cuda.get_device_properties(device)
(_properties.name, _properties.total_memory, str(pynvml.nvmlSystemGetDriverVersion()))
"""


@pytest.fixture
def gpu(trained: Session) -> tuple[str, int, str]:
    """Name, bytes and driver, as torch and NVML tell them on the rank."""
    (found,) = trained.run(GPU)
    name, memory_bytes, driver = found
    assert name
    assert memory_bytes > 2**30
    assert driver
    return name, memory_bytes, driver


def test_the_record_names_the_gpu(trained: Session, gpu: tuple[str, int, str], tmp_path: Path) -> None:
    row = list(trained.runs)[-1]
    assert row.present
    assert (row.device, row.device_memory_bytes, row.driver) == gpu
    assert row.reserved_peak_bytes is not None
    assert row.headroom == pytest.approx(1 - row.reserved_peak_bytes / gpu[1])
    last = trained.runs.frame().iloc[-1]
    assert (last.device, last.device_memory_bytes, last.driver) == gpu
    assert f"{gpu[0]}, {format_bytes(gpu[1])}, driver {gpu[2]}" in str(trained.runs)
    assert "virtual" not in row.on
    trained.save(tmp_path / "gpu.state")
    assert trained.load_runs(tmp_path / "gpu.state").unread == 0


def test_a_report_names_the_gpu(trained: Session, gpu: tuple[str, int, str], tmp_path: Path) -> None:
    trained.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    ranks = page[page.index("Ranks and versions") :]
    for said in (gpu[0], format_bytes(gpu[1]), gpu[2]):
        assert said in ranks, said
