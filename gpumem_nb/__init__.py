"""See, predict and tune the GPU memory of data-parallel PyTorch training, live in JupyterLab.

``%load_ext gpumem_nb`` brings the ``%hvd_*`` magics; the same in Python starts with :func:`start`. Ranks import this
package too, so it loads what is heavy only when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .shared.settings import Settings
from .shared.version import __version__
from .shared.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from .course.lesson import Lesson
    from .install.environment import EnvironmentReport
    from .planning.cold_table import ColdPredictions
    from .planning.prediction import Prediction
    from .session import Session

__all__ = ["Settings", "Workload", "__version__", "check", "lesson", "load_ipython_extension", "predict", "start"]


def start(
    n: int | None = None,
    *,
    device: str = "auto",
    memory_limit: str | int | None = None,
    hosts: str | None = None,
    launcher: str = "mpi",
    threads: int | None = None,
    timeout: float = 120.0,
) -> Session:
    """Start Horovod ranks and connect to them, showing a progress bar.

    Args:
        n: number of ranks; ``None`` for one per visible GPU, or two without GPUs.
        device: ``auto``, ``cuda`` or ``cpu`` (a virtual GPU for every rank).
        memory_limit: for each rank, such as ``"2GiB"`` or a number of bytes; ``None`` for the whole GPU, or 2 GiB of a
            virtual one.
        hosts: where, such as ``"a:2,b:2"``, this machine among them; all on this machine by default. On the others
            everything must lie at the same paths, and ssh must reach them without a password.
        launcher: how they are started, by its name in :data:`gpumem_nb.cluster.launchers.LAUNCHERS`: ``mpi``.
        threads: CPU threads of each rank; by default the cores are shared out evenly.
        timeout: seconds for the whole start.

    Raises:
        InvalidInput: an argument that cannot be used, or ranks that are running already.
        StartError, SetupError: the start failed; nothing is left running.
        Interrupted: stop was pressed; nothing is left running.
    """
    from . import session
    from .ui.cells import progress_bar

    with progress_bar("Starting ranks") as progress:
        return session.start(
            n,
            device=device,
            memory_limit=memory_limit,
            hosts=hosts,
            launcher=launcher,
            threads=threads,
            timeout=timeout,
            progress=progress,
        )


def check() -> EnvironmentReport:
    """Check torch, Horovod, MPI and the GPUs: what works, and what to type to repair the rest; raises nothing."""
    from .install import environment

    return environment.check()


def predict(
    workload: str | Workload,
    *,
    gpu: str | Sequence[str] | None = None,
    memory: str | int | None = None,
    ranks: int = 1,
    **knobs: Any,
) -> Prediction | ColdPredictions:
    """Return what training would need on a GPU that need not be here, without ranks: steps are taken without memory.

    Progress is shown once it takes longer than a second.

    Args:
        workload: the name of a ready-made one, or a ``Workload``.
        gpu: its name, such as ``"A100-40GB"``; several, as a list or with commas between them, are answered by
            :class:`~gpumem_nb.planning.cold_table.ColdPredictions`: which of them fits, with which largest batch, and
            what to change where it does not fit.
        memory: of the GPU in place of what the table says, such as ``"24GB"`` or a number of bytes.
        ranks: how many train together; from two on Horovod and NCCL take their part.
        **knobs: as in :class:`Settings`; of a ready-made workload also its options, such as ``width``.

    Raises:
        InvalidInput: an unknown workload, GPU, knob or option, or a value that cannot be used.
        WorkloadError: the workload cannot be run without memory; names the operator and the line.
    """
    from .planning import cold
    from .ui.cells import PATIENCE_S, progress_bar

    with progress_bar("Predicting", patience_s=PATIENCE_S) as progress:
        return cold.predict(workload, gpu=gpu, memory=memory, ranks=ranks, progress=progress, **knobs)


def lesson(number: str | int) -> Lesson:
    """Return a lesson of the course, whose ``check()``, ``hint()``, ``status()`` and ``reset()`` a notebook calls.

    Raises:
        InvalidInput: there is no such lesson.
    """
    from .course import lesson as course

    return course.lesson(number)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """``%load_ext gpumem_nb``."""
    from .magics import register

    register(shell)
