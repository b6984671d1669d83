"""Folders that look like a CUDA toolkit, and like what NVIDIA's wheels bring of one."""

from __future__ import annotations

from pathlib import Path


def toolkit(folder: Path, release: str = "13.0") -> Path:
    """One as installers lay it out, whose compiler says that it is of this release."""
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime.h").touch()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    nvcc.chmod(0o755)
    return folder


def wheels(site_packages: Path, compiler: bool) -> Path:
    """The folder of NVIDIA's wheels for CUDA 13, as torch installs them or with a compiler."""
    folder = site_packages / "nvidia" / "cu13"
    for name in ("include/cuda_runtime.h", "lib/libcudart.so.13", "lib/libcudart_static.a"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    if compiler:
        for name in ("bin/nvcc", "bin/ptxas", "nvvm/bin/cicc", "include/nv/target", "lib/libculibos.a"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    return folder
