"""Which CUDA toolkit a build is made with, in environments as torch and NVIDIA lay them out."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from gpumem_nb.install import cuda_toolkit
from gpumem_nb.shared.errors import SetupError

from .toolkits import toolkit, wheels

# As torch 2.13.0's wheel on the package index says it.
PIN = 'cuda-toolkit[cublas,cudart,nvrtc]==13.0.3; platform_system == "Linux"'


@pytest.fixture(autouse=True)
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without any toolkit, whose torch is for CUDA 13; nothing is named, nothing on PATH."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name in cuda_toolkit.NAMED_BY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(cuda_toolkit, "USUAL", tmp_path / "usual")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["filelock", PIN])
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def test_a_named_toolkit_comes_first(site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels(site_packages, compiler=True)
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "mine")))
    assert cuda_toolkit.obtain("13.0", tmp_path) == tmp_path / "mine"


def test_a_named_folder_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "include").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(SetupError, match="is no CUDA toolkit: it has no bin/nvcc"):
        cuda_toolkit.obtain("13.0", tmp_path)


def test_a_named_toolkit_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path, release="12.4")))
    with pytest.raises(SetupError, match=r"is CUDA 12, and this torch is built for CUDA 13\.0"):
        cuda_toolkit.obtain("13.0", tmp_path)


def test_wheels_with_a_compiler_become_a_toolkit(site_packages: Path, tmp_path: Path) -> None:
    folder = wheels(site_packages, compiler=True)
    home = cuda_toolkit.obtain("13.0", tmp_path)
    assert not (home / "bin").is_symlink()
    assert (home / "bin" / ".." / "nvvm" / "bin" / "cicc").resolve() == folder / "nvvm" / "bin" / "cicc"
    links = {path.name: path.resolve().name for path in (home / "lib64").iterdir()}
    assert links == {path.name: path.resolve().name for path in (home / "lib").iterdir()}, "where nvcc 13.2 looks"
    assert links == {
        "libcudart.so": "libcudart.so.13",
        "libcudart.so.13": "libcudart.so.13",
        "libcudart_static.a": "libcudart_static.a",
        "libculibos.a": "libculibos.a",
    }


@pytest.mark.parametrize("place", ["PATH", "usual"])
def test_a_toolkit_on_the_system_is_used_if_it_is_of_torchs_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    home = toolkit(tmp_path / "usual", release="12.8")
    if place == "PATH":
        monkeypatch.setattr(cuda_toolkit, "USUAL", Path("/none"))
        monkeypatch.setenv("PATH", f"{home / 'bin'}:{os.environ['PATH']}")
    assert cuda_toolkit.obtain("12.6", tmp_path) == home
    with pytest.raises(SetupError, match=r"built for CUDA 13\.0, and no CUDA toolkit of that version"):
        cuda_toolkit.obtain("13.0", tmp_path)


def test_the_compiler_that_torch_pins_is_installed_where_there_is_none(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels(site_packages, compiler=False)
    installed: list[str] = []

    def install(requirement: str) -> None:
        installed.append(requirement)
        wheels(site_packages, compiler=True)

    monkeypatch.setattr(cuda_toolkit, "install", install)
    home = cuda_toolkit.obtain("13.0", tmp_path)
    assert (home / "bin" / "nvcc").resolve().is_relative_to(site_packages)
    # What nvcc compiles with comes in its own release: a newer one makes code that it refuses.
    assert installed == ["cuda-toolkit[nvcc,nvvm,crt,cccl,culibos,cudart]==13.0.3"]


@pytest.mark.parametrize("crt", ["13.0.88", "13.5.37"])
def test_a_compiler_with_parts_of_another_release_is_installed_anew(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crt: str
) -> None:
    there = {"nvidia-cuda-nvcc": "13.0.88", "nvidia-cuda-crt": crt}  # nvidia-nvvm may be a part of nvcc's wheel

    def version(name: str) -> str:
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return there[name]

    wheels(site_packages, compiler=True)
    monkeypatch.setattr(importlib.metadata, "version", version)
    installed: list[str] = []
    monkeypatch.setattr(cuda_toolkit, "install", installed.append)
    cuda_toolkit.obtain("13.0", tmp_path)
    assert len(installed) == (crt != "13.0.88")


def test_a_compiler_that_pip_puts_in_another_place_than_torchs_is_found(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torch, own = wheels(site_packages, compiler=False), tmp_path / "own"

    def install(requirement: str) -> None:
        wheels(own, compiler=True)
        monkeypatch.setenv("PYTHONPATH", f"{site_packages}:{own}")

    (of_torch / "include" / "cublas_v2.h").touch()
    monkeypatch.setattr(cuda_toolkit, "install", install)
    home = cuda_toolkit.obtain("13.0", tmp_path)
    assert (home / "bin" / "nvcc").resolve().is_relative_to(own)
    assert (home / "include" / "cublas_v2.h").resolve().is_relative_to(site_packages)


def test_what_pip_cannot_install_the_system_may_have(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels(site_packages, compiler=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SetupError, match="pip could not install"):
        cuda_toolkit.obtain("13.0", tmp_path)
    system = toolkit(tmp_path / "usual")
    assert cuda_toolkit.obtain("13.0", tmp_path) == system


def test_a_compiler_that_pip_cannot_install_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SetupError, match=r"pip could not install cuda-toolkit\[nvcc\]==0: .*CUDA_HOME=/usr/local/cuda"):
        cuda_toolkit.install("cuda-toolkit[nvcc]==0")


def test_without_wheels_and_toolkit_it_is_said_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"CUDA 12\.6, .* Install one, or say where it is: CUDA_HOME=/usr/local/cuda"):
        cuda_toolkit.obtain("12.6", tmp_path)
