"""What the environment check says about what is there, and about what is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpumem_nb.install import environment
from gpumem_nb.install.environment import EnvironmentReport, Item
from tests.timing import in_time

ROOT = Path(__file__).parents[2]
CHECK = "from gpumem_nb.install.environment import check; print(check())"


@pytest.fixture(scope="module")
def report() -> EnvironmentReport:
    return environment.check()


def item(report: EnvironmentReport, name: str) -> Item:
    return next(item for item in report.items if item.name == name)


def test_everything_that_set_up_made_is_found(report: EnvironmentReport) -> None:
    needed = ["Python", "torch", "Horovod", "mpiexec", "ipyparallel", "C++ compiler", "virtual GPU"]
    assert [item(report, name).ok for name in [*needed, "jupyterlab", "ipywidgets"]] == [True] * 9, str(report)
    assert report.ok
    assert "MPI, Gloo" in item(report, "Horovod").found


@pytest.mark.full
def test_check_takes_less_than_four_seconds() -> None:
    started = time.monotonic()
    environment.check()
    assert in_time(time.monotonic() - started, 4.0)


def test_kernel_imports_neither_horovod_nor_torch() -> None:
    code = f"import sys; {CHECK}; print(sorted({{'torch', 'horovod'}} & sys.modules.keys()))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip().endswith("[]")


def test_missing_compiler_is_named_with_its_command() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", CHECK],
        cwd=ROOT,
        env={**os.environ, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "C++ compiler  missing" in answer.stdout
    assert "-> apt-get install g++ make" in answer.stdout
    assert "mpiexec       ok" in answer.stdout


def test_horovod_of_another_torch_is_told_from_none() -> None:
    broken = environment.check_horovod({"horovod": {"error": "ImportError: undefined symbol: _ZN3c10"}})
    assert broken.ok is False
    assert "another torch" in broken.found
    assert broken.remedy == "python -m gpumem_nb.install.horovod_build"


def test_horovod_without_mpi_is_not_enough() -> None:
    facts = {"horovod": {"version": "0.28.1", "mpi": False, "gloo": True, "nccl": False}}
    assert environment.check_horovod(facts).ok is False


def test_unbuilt_extension_names_its_builder() -> None:
    unbuilt = environment.check_extension({"extension": {"path": None}})
    assert unbuilt.remedy == "python -m gpumem_nb.memory.virtual_gpu.build"


def test_package_that_is_too_old_or_absent_names_its_command() -> None:
    assert environment.check_package("ipywidgets", "999").remedy == 'python -m pip install --upgrade "ipywidgets>=999"'
    assert environment.check_package("no-such-package", "1").remedy == 'python -m pip install "no-such-package>=1"'


def test_text_has_one_line_for_each_item_and_each_remedy() -> None:
    report = EnvironmentReport((Item("a", True, "1.0"), Item("longer", False, "not found", "install it")))
    assert str(report).splitlines() == [
        "Environment",
        "part    state    found",
        "a       ok       1.0",
        "longer  missing  not found",
        "                 -> install it",
    ]
    assert not report.ok


def test_what_is_not_needed_here_does_not_spoil_the_report() -> None:
    assert EnvironmentReport((Item("GPUs", None, "none"),)).ok


def test_html_follows_the_theme_and_escapes_what_it_shows() -> None:
    text = EnvironmentReport((Item("torch", False, "<b>broken</b>", 'pip install "torch>=2"'),))._repr_html_()
    assert "&lt;b&gt;broken" in text
    assert "pip install &quot;torch&gt;=2&quot;" in text
    assert "var(--jp-error-color0" in text
    assert "missing" in text
