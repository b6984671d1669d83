"""Which torch suits this machine: the driver and its GPUs decide, unless TORCH names one."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

VERSION = "2.13.0"
# Where PyTorch keeps builds for one platform each; the usual package index has one build alone, for CUDA 13.
INDEX = "https://download.pytorch.org/whl"
CUDA_12 = "cu126"  # the only build of this torch for CUDA 12
# Compute capabilities that builds of this torch know: from the first on for CUDA 13, below the second for CUDA 12
# (PyTorch's release matrix, https://github.com/pytorch/pytorch/blob/main/RELEASE.md).
OLDEST_OF_13, TOO_NEW_FOR_12 = (7, 5), (10, 0)
# Three signs of equality: 2.13.0+cpu, which may be there already, is a 2.13.0 for pip.
ORDINARY = f"torch==={VERSION}"
# Sizes of its wheel and those that it needs on the package index, and .venv's of Python 3.12 (docs/install.md).
ORDINARY_COSTS = "2.7 GB to download, most of it CUDA's libraries, and a .venv of 5.7 GiB instead of 2"
_NOT_LOADED = 9  # NVML_ERROR_DRIVER_NOT_LOADED


class Trouble(Exception):
    """Set-up cannot go on; the message is one sentence with the remedy."""


@dataclass(frozen=True)
class Choice:
    """A torch to install.

    Attributes:
        requirement: for pip, with its options if somebody named some.
        index: where to look for it if the usual package index does not have it; may be empty.
        why: in words.
        instead: what computes the same if no index has it for this Python; may be empty.
        instead_costs: what that takes, in words.
    """

    requirement: str
    index: str
    why: str
    instead: str = ""
    instead_costs: str = ""


@dataclass(frozen=True)
class Gpus:
    """What the driver says: the newest CUDA that it can run, and each GPU's compute capability, as pairs of numbers."""

    cuda: tuple[int, int]
    capabilities: tuple[tuple[int, int], ...]


def choose() -> Choice:
    """What TORCH names, or what driver and GPUs can run; without a GPU the CPU build, by its name.

    Raises:
        Trouble: the driver does not answer, or no torch would run on these GPUs with it.
    """
    named = os.environ.get("TORCH")
    if named:
        return Choice(named, "", "TORCH names it")
    gpus = find_gpus()
    if gpus is None:
        return _on_the_cpu("no NVIDIA GPU was found (TORCH= names another)")
    knows = "the NVIDIA driver knows CUDA {}.{}".format(*gpus.cuda)
    if gpus.cuda < (12, 0):
        return _on_the_cpu(f"{knows}, and this torch needs 12 or later: update the driver, or name one with TORCH=")
    oldest, newest = min(gpus.capabilities), max(gpus.capabilities)
    if gpus.cuda >= (13, 0) and oldest >= OLDEST_OF_13:
        return Choice(ORDINARY, "", knows)
    if newest >= TOO_NEW_FOR_12:
        raise Trouble(
            "A GPU of compute capability {}.{} needs a torch for CUDA 13 and {}".format(*newest, knows)
            + (": update it to 580 or later, " if gpus.cuda < (13, 0) else ", but another GPU is too old for that: ")
            + "or name a torch with TORCH=."
        )
    if gpus.cuda >= (13, 0):
        knows = "{}, but a GPU of compute capability {}.{} needs a build for CUDA 12".format(knows, *oldest)
    return _build(CUDA_12, knows)


def find_gpus() -> Gpus | None:
    """What NVML says; nothing without a driver or a GPU.

    Raises:
        Trouble: there is a driver and it does not answer, as after its update before the next start of the machine.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    code = nvml.nvmlInit_v2()
    if code == _NOT_LOADED:
        return None
    if code:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        raise Trouble(
            f"The NVIDIA driver does not answer ({nvml.nvmlErrorString(code).decode()}): start the machine anew, see "
            f"what nvidia-smi says, or name a torch: TORCH='torch=={VERSION}+cpu --index-url {INDEX}/cpu'."
        )
    try:
        count, version = ctypes.c_uint(), ctypes.c_int()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) or not count.value:
            return None
        if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version)):
            return None
        capabilities = tuple(_capability(nvml, index) for index in range(count.value))
        return Gpus((version.value // 1000, version.value % 1000 // 10), capabilities)
    finally:
        nvml.nvmlShutdown()


def _capability(nvml: ctypes.CDLL, index: int) -> tuple[int, int]:
    """One GPU's; where it does not say, that of one that every build knows."""
    gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu)):
        return (8, 0)
    if nvml.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor)):
        return (8, 0)
    return major.value, minor.value


def _on_the_cpu(why: str) -> Choice:
    """The CPU build; where no index has it, the ordinary build computes on the CPU as well."""
    named = _build("cpu", why)
    return Choice(named.requirement, named.index, why, ORDINARY, ORDINARY_COSTS)


def _build(platform: str, why: str) -> Choice:
    return Choice(f"torch=={VERSION}+{platform}", f"{INDEX}/{platform}", why)
