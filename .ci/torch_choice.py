"""Which torch suits this machine: the driver of its GPUs decides, unless TORCH names one."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

VERSION = "torch==2.13.0"
# Where PyTorch keeps builds for one platform each; the usual package index has one build alone, for CUDA 13.
INDEX = "https://download.pytorch.org/whl"
CUDA_12 = "cu126"  # the only build of this torch for CUDA 12


@dataclass(frozen=True)
class Choice:
    """A torch to install.

    Attributes:
        requirement: for pip, with its options if somebody named some.
        index: where to look for it if the usual package index does not have it; may be empty.
        why: in words.
    """

    requirement: str
    index: str
    why: str


def choose() -> Choice:
    """What TORCH names, or what the NVIDIA driver can run; without a GPU the CPU build, by its name."""
    named = os.environ.get("TORCH")
    if named:
        return Choice(named, "", "TORCH names it")
    cuda = cuda_of_driver()
    if cuda is None:
        return _build("cpu", "no NVIDIA GPU was found (TORCH= names another)")
    knows = "the NVIDIA driver knows CUDA {}.{}".format(*cuda)
    if cuda >= (13, 0):
        return Choice(VERSION, "", knows)
    if cuda >= (12, 0):
        return _build(CUDA_12, knows)
    return _build("cpu", f"{knows}, and this torch needs 12 or later: update the driver, or name another with TORCH=")


def cuda_of_driver() -> tuple[int, int] | None:
    """The newest CUDA that the driver can run, ``(13, 0)`` say; nothing without a driver or a GPU."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        gpus, version = ctypes.c_uint(), ctypes.c_int()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(gpus)) or not gpus.value:
            return None
        if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version)):
            return None
        return version.value // 1000, version.value % 1000 // 10
    finally:
        nvml.nvmlShutdown()


def _build(platform: str, why: str) -> Choice:
    return Choice(f"{VERSION}+{platform}", f"{INDEX}/{platform}", why)
