"""Which torch set-up takes, asked of a driver that is compiled here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / ".ci"
ASK = "import json, torch_choice; print(json.dumps(vars(torch_choice.choose())))"
NVML = """
extern "C" {
int nvmlInit_v2() { return INIT; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = GPUS; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = CUDA; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** gpu) { *gpu = (void*)(long)(index + 1); return 0; }
int nvmlDeviceGetCudaComputeCapability(void* gpu, int* major, int* minor) {
  const int asked = gpu == (void*)1 ? FIRST : OTHERS;
  *major = asked / 10;
  *minor = asked % 10;
  return 0;
}
const char* nvmlErrorString(int) { return "Driver/library version mismatch"; }
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("driver")


def chosen(folder: Path, driver: dict[str, int] | None, **variables: str) -> dict[str, str]:
    """What is chosen where the driver's library answers so, or where there is none."""
    library = folder / "libnvidia-ml.so.1"
    library.unlink(missing_ok=True)
    if driver:
        defined = [
            f"-D{name}={value}" for name, value in ({"INIT": 0, "GPUS": 1, "FIRST": 80, "OTHERS": 80} | driver).items()
        ]
        command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library), *defined]
        subprocess.run(command, input=NVML, text=True, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "TORCH"} | variables
    environment |= {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(SCRIPTS), "PYTHONDONTWRITEBYTECODE": "1"}
    answer = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=False)
    if "torch_choice.Trouble: " in answer.stderr:
        return {"trouble": answer.stderr.rpartition("torch_choice.Trouble: ")[2]}
    return json.loads(answer.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("driver", "requirement", "index", "why"),
    [
        (None, "torch==2.13.0+cpu", "whl/cpu", "no NVIDIA GPU was found"),
        ({"CUDA": 13000, "INIT": 9}, "torch==2.13.0+cpu", "whl/cpu", "no NVIDIA GPU was found"),
        ({"CUDA": 13000, "GPUS": 0}, "torch==2.13.0+cpu", "whl/cpu", "no NVIDIA GPU was found"),
        ({"CUDA": 13000}, "torch===2.13.0", "", "the NVIDIA driver knows CUDA 13.0"),
        ({"CUDA": 13020, "FIRST": 120}, "torch===2.13.0", "", "the NVIDIA driver knows CUDA 13.2"),
        ({"CUDA": 13000, "FIRST": 70}, "torch==2.13.0+cu126", "whl/cu126", "capability 7.0 needs a build for CUDA 12"),
        ({"CUDA": 13000, "GPUS": 2, "OTHERS": 61}, "torch==2.13.0+cu126", "whl/cu126", "capability 6.1"),
        ({"CUDA": 12040}, "torch==2.13.0+cu126", "whl/cu126", "the NVIDIA driver knows CUDA 12.4"),
        ({"CUDA": 11080}, "torch==2.13.0+cpu", "whl/cpu", "CUDA 11.8, and this torch needs 12 or later"),
    ],
)
def test_the_driver_decides(
    folder: Path, driver: dict[str, int] | None, requirement: str, index: str, why: str
) -> None:
    if driver is None and Path("/proc/driver/nvidia").exists():
        pytest.skip("a driver is installed here")
    found = chosen(folder, driver)
    assert found["requirement"] == requirement
    assert found["index"].endswith(index)
    assert why in found["why"]


def test_a_named_torch_is_taken_whatever_the_driver_says(folder: Path) -> None:
    found = chosen(folder, {"CUDA": 13000}, TORCH="torch==2.12.0 --index-url https://example.org/simple")
    assert found["requirement"] == "torch==2.12.0 --index-url https://example.org/simple"
    assert found["index"] == ""


@pytest.mark.parametrize(
    ("driver", "sentence"),
    [
        (
            {"CUDA": 12080, "FIRST": 120},
            "needs a torch for CUDA 13 and the NVIDIA driver knows CUDA 12.8: update it to 580",
        ),
        ({"CUDA": 13000, "GPUS": 2, "FIRST": 100, "OTHERS": 70}, "another GPU is too old for that"),
        ({"CUDA": 13000, "INIT": 18}, "does not answer (Driver/library version mismatch): start the machine anew"),
    ],
)
def test_what_no_torch_can_run_on_is_one_sentence(folder: Path, driver: dict[str, int], sentence: str) -> None:
    assert sentence in chosen(folder, driver)["trouble"]
