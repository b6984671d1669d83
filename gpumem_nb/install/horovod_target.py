"""The target of a Horovod build: everything that makes one wheel unfit for another environment."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import runpy
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

import pynvml

from ..shared import gpus
from ..shared.errors import SetupError
from .mpi_tools import mpi_library_folders, mpi_version, require_tool

GPU_MODES = ("auto", "nccl", "staged")
NO_ANSWER = (
    "The NVIDIA driver does not answer ({}): see what nvidia-smi says. After the driver's update the machine has to be "
    "started anew."
)


@dataclass(frozen=True, slots=True)
class Target:
    """The ingredients of one build; two environments with equal targets can share a wheel.

    ``gpu`` is ``none`` (torch without CUDA, or no GPU here), ``nccl`` or ``staged`` (GPU tensors reduced through the
    CPU, which lets ranks share a GPU). ``runpath`` is where the library looks for torch, MPI and NCCL; ``$ORIGIN`` is
    its own folder.
    """

    torch: str
    cuda: str
    python: str
    machine: str
    mpi: str
    gpu: str
    cuda_capabilities: str
    runpath: tuple[str, ...]
    recipe: int

    def key(self) -> str:
        """Return a short name for the cache folder that changes with every ingredient."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"torch{self.torch}-{self.gpu}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def detect(gpu: str, recipe: int) -> Target:
    """Return what a build for this environment has to fit. ``gpu`` is one of :data:`GPU_MODES`.

    Raises:
        SetupError: torch or MPI is missing, or the GPU mode does not suit this torch.
    """
    torch_folder = find_torch()
    torch_version, cuda = torch_versions(torch_folder)
    mode = choose_gpu_mode(gpu, cuda)
    folders = [torch_folder / "lib", *mpi_library_folders(require_tool("mpicxx"))]
    nccl = nccl_folder() if mode == "nccl" else None
    if nccl is not None:
        folders.append(nccl / "lib")
    return Target(
        torch=torch_version,
        cuda=cuda or "none",
        python=sysconfig.get_config_var("SOABI") or sys.version,
        machine=f"{platform.system()}-{platform.machine()}",
        mpi=mpi_version(require_tool("mpiexec")),
        gpu=mode,
        cuda_capabilities="none" if mode == "none" else cuda_capabilities(),
        runpath=tuple(runpath_entry(folder) for folder in folders),
        recipe=recipe,
    )


def find_torch() -> Path:
    """Return the folder of the installed torch without importing it (an import costs a second and a lot of memory).

    Raises:
        SetupError: there is none.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SetupError("PyTorch is not installed in this environment. Install it with: python -m pip install torch")
    return Path(found.origin).parent.resolve()


def torch_versions(folder: Path) -> tuple[str, str | None]:
    """Torch's own version and the CUDA version it was built for, or ``None``."""
    values = runpy.run_path(str(folder / "version.py"))
    cuda = values.get("cuda")
    return str(values["__version__"]), str(cuda) if cuda else None


def choose_gpu_mode(asked: str, cuda: str | None) -> str:
    """Return the GPU mode to build: what was asked, or with ``auto`` what suits this machine.

    A package index may bring torch's CUDA build to a machine without any GPU: there Horovod needs no CUDA either. Where
    there is a single GPU, ranks have to share it, which NCCL refuses.

    Raises:
        SetupError: the mode is not known, or does not suit this torch.
    """
    if asked not in GPU_MODES:
        raise SetupError(f"--gpu {asked} is unknown. Allowed: {', '.join(GPU_MODES)}")
    if cuda is None:
        if asked == "nccl":
            raise SetupError(
                "NCCL needs a CUDA build of torch, and this one is for the CPU. Install a CUDA build first."
            )
        return "none"
    if asked == "auto":
        wanted = gpus_wanted()
        if not wanted:
            return "none"
        return "nccl" if nccl_folder() and wanted > 1 else "staged"
    if asked == "nccl" and nccl_folder() is None:
        raise SetupError(
            "NCCL's headers were not found. "
            f"Install them with: python -m pip install nvidia-nccl-cu{cuda.split('.')[0]}, "
            "or set HOROVOD_NCCL_HOME, or build with --gpu staged"
        )
    return asked


def gpus_wanted() -> int:
    """Return how many GPUs the driver shows; several if you named capabilities to build for (in a container's recipe).

    Raises:
        SetupError: there is a driver and it does not answer.
    """
    if os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST"):
        return 2
    try:
        with gpus.opened():
            return int(pynvml.nvmlDeviceGetCount())
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return 0
    except gpus.ERRORS as error:
        raise SetupError(NO_ANSWER.format(error)) from None


def nccl_folder() -> Path | None:
    """Return where NCCL's headers and library are: ``HOROVOD_NCCL_HOME``, or torch's nvidia-nccl wheel."""
    named = os.environ.get("HOROVOD_NCCL_HOME")
    if named:
        return Path(named).resolve()
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    for place in (found.submodule_search_locations or []) if found else []:
        if (Path(place) / "include" / "nccl.h").exists():
            return Path(place).resolve()
    return None


def cuda_capabilities() -> str:
    """Return the devices' compute capabilities in Horovod's form (``80,90``); ``HOROVOD_BUILD_CUDA_CC_LIST`` wins.

    Horovod's own list holds old ones that nvcc 13 no longer knows. Without a visible device it cannot be guessed.

    Raises:
        SetupError: torch cannot ask the GPUs, or sees none.
    """
    named = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST")
    if named:
        return named
    code = (
        "import torch; print(','.join(sorted({'%d%d' % torch.cuda.get_device_capability(i)"
        " for i in range(torch.cuda.device_count())})))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    found = answer.stdout.strip()
    if answer.returncode:
        said = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        raise SetupError(f"torch cannot ask the GPUs for their compute capability: {said[-1]}")
    if not found:
        raise SetupError(
            "No CUDA device is visible here, so its compute capability is unknown. "
            "Name it, for an A100: HOROVOD_BUILD_CUDA_CC_LIST=80 python -m gpumem_nb.install.horovod_build"
        )
    return found


def runpath_entry(folder: Path) -> str:
    """Return the library's path to a folder: relative within an environment, so that the wheel fits others."""
    library = Path(sysconfig.get_path("platlib")).resolve() / "horovod" / "torch"
    prefix = Path(sys.prefix).resolve()
    if folder.is_relative_to(prefix):
        return "$ORIGIN/" + os.path.relpath(folder, library)
    return str(folder)
