"""Predictions without a session: for GPUs that are not here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..report.tables import Table
from ..shared.dry_run import Asked, DryAnswer, DryRun
from ..shared.errors import InvalidInput, nearest
from ..shared.forecast import Forecast
from ..shared.knobs import KNOBS
from ..shared.settings import Settings
from ..shared.units import format_bytes, parse_size
from ..shared.workload import Workload
from ..workloads import catalog
from . import dry_process, gpu_table
from .gpu_table import Gpu
from .prediction import FITS, Prediction, predicted

GENERIC = "A100-40GB"
"""Whose kernels are meant where no GPU is named."""

FUSION_BYTES = 128 * 2**20
"""Horovod's fusion buffer, from torch's allocator: the default of HOROVOD_FUSION_THRESHOLD (operations.cc)."""

NCCL_BYTES, NCCL_ERROR_BYTES = 300 * 2**20, 200 * 2**20
"""An estimate of what one NCCL communicator takes outside of torch's allocator; it grows with ranks and channels."""


@dataclass(frozen=True)
class ColdPredictions:
    """What the same steps would need on several GPUs.

    Attributes:
        by_gpu: a prediction for each GPU, in the order in which they were named.
        largest: the largest ``batch_size`` that surely fits each; 0 if none does.
        seconds: what predicting took.
    """

    by_gpu: Mapping[str, Prediction]
    largest: Mapping[str, int]
    seconds: float

    def __getitem__(self, gpu: str) -> Prediction:
        return self.by_gpu[gpu]

    @property
    def fitting(self) -> tuple[str, ...]:
        """The GPUs on which it fits."""
        return tuple(gpu for gpu, one in self.by_gpu.items() if one.verdict == FITS)

    def frame(self) -> Any:
        """A pandas DataFrame with one row a GPU."""
        import pandas as pd  # takes long to import

        return pd.DataFrame(
            {
                "gpu": gpu,
                **one.columns,
                "device_bytes": one.device_bytes,
                "largest_batch": self.largest[gpu],
            }
            for gpu, one in self.by_gpu.items()
        )

    def __str__(self) -> str:
        return str(self._table)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table.html()

    @property
    def _table(self) -> Table:
        rows = tuple(
            (
                gpu,
                one.verdict,
                format_bytes(one.reserved_peak_bytes),
                f"{format_bytes(one.low_bytes)} to {format_bytes(one.high_bytes)}",
                format_bytes(one.limit_bytes),
                str(self.largest[gpu]) if self.largest[gpu] else "none",
            )
            for gpu, one in self.by_gpu.items()
        )
        size = next(iter(self.by_gpu.values())).settings.batch_size
        headings = ("GPU", "verdict", "reserved", "95 %", "may be reserved", "largest batch")
        return Table(f"Which GPU fits batch_size={size}?", headings, rows, frozenset({"GPU", "verdict"}))


def predict(
    workload: str | Workload,
    *,
    gpu: str | Sequence[str] | None = None,
    memory: str | int | None = None,
    ranks: int = 1,
    **knobs: Any,
) -> Prediction | ColdPredictions:
    """What training a workload would need on GPUs that need not be here; see :func:`gpumem_nb.predict`.

    Raises:
        InvalidInput: an unknown workload, option, knob or GPU, or a value that cannot be used.
        WorkloadError: the workload cannot be run without memory; says which operator and which line of it.
    """
    began_s = time.perf_counter()
    made, own_knobs = _workload(workload, knobs)
    settings = _settings(made, own_knobs)
    gpus = _gpus(gpu)
    capacity = None if memory is None else parse_size(memory)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InvalidInput(f"ranks={ranks!r} cannot be used: it must be a whole number of at least 1.")
    question = _Question(settings, ranks, known=gpu is not None)
    asked = {one.name: _asked(one, settings, capacity, ranks, question.known) for one in gpus}
    several = gpu is not None and len(gpus) + (not isinstance(gpu, str)) > 1
    answer = dry_process.ask(DryRun(_pickled(made), settings, asked, several))
    seconds = time.perf_counter() - began_s
    by_gpu = {one.name: _prediction(answer, one, asked[one.name], question, seconds) for one in gpus}
    return ColdPredictions(by_gpu, answer.largest, seconds) if several else by_gpu[gpus[0].name]


@dataclass(frozen=True, slots=True)
class _Question:
    """What all GPUs are asked: ``known`` says whether somebody named them."""

    settings: Settings
    ranks: int
    known: bool


def _workload(workload: str | Workload, knobs: dict[str, Any]) -> tuple[Workload, dict[str, Any]]:
    """The workload, and the knobs that are none of its options."""
    if isinstance(workload, Workload):
        return workload, knobs
    if not isinstance(workload, str):
        raise InvalidInput(
            f"The workload must be a Workload or the name of a ready-made one; this is a {type(workload).__name__}. "
            f"Names: {', '.join(catalog.CATALOG)}."
        )
    entry = catalog.find(workload)
    given = {name: knobs.pop(name) for name in list(knobs) if name in entry.options and name not in KNOBS}
    for name in knobs:
        if name not in KNOBS:
            known = nearest(name, (*entry.options, *KNOBS))
            raise InvalidInput(f"{name!r} is neither a knob nor an option of {workload}: {known}.")
    return catalog.make(workload, **given), knobs


def _settings(workload: Workload, knobs: dict[str, Any]) -> Settings:
    own = {"optimizer": "own"} if workload.optimizer and "optimizer" not in knobs else {}
    return Settings().replace(**own, **knobs)


def _gpus(gpu: str | Sequence[str] | None) -> list[Gpu]:
    if gpu is None:
        return [gpu_table.find(GENERIC)]
    names = gpu.split(",") if isinstance(gpu, str) else list(gpu)
    found = {one.name: one for one in (gpu_table.find(name) for name in names)}
    if not found:
        raise InvalidInput("No GPU was named. Name some, such as gpu='T4-16GB,A100-40GB'.")
    return list(found.values())


def _asked(gpu: Gpu, settings: Settings, capacity: int | None, ranks: int, known: bool) -> Asked:
    """What is asked for a GPU.

    Args:
        gpu: whose kernels are meant.
        settings: the knobs.
        capacity: of its memory, if somebody said; in bytes.
        ranks: how many train together.
        known: whether somebody named this GPU.

    Raises:
        InvalidInput: it has no memory left for tensors.
    """
    beside = gpu.outside_bytes + NCCL_BYTES * (ranks > 1)
    error = gpu.outside_error_bytes + NCCL_ERROR_BYTES * (ranks > 1)
    limit = (capacity or gpu.memory_bytes) - beside if known or capacity else None
    if limit is not None and limit <= gpu.convolution_bytes:
        raise InvalidInput(
            f"memory={format_bytes(capacity)} is not more than CUDA's context and libraries take "
            f"({format_bytes(beside + gpu.convolution_bytes)}). Name a larger one."
        )
    held = (FUSION_BYTES,) if ranks > 1 else ()
    kernels = gpu.kernels(settings.precision != "fp32")
    return Asked(kernels, held, limit, error if known or capacity else 0, gpu.convolution_bytes)


def _prediction(answer: DryAnswer, gpu: Gpu, asked: Asked, question: _Question, seconds: float) -> Prediction:
    one: Forecast = answer.forecasts[gpu.name]
    more = asked.convolution_bytes if answer.convolves else 0
    beside = gpu.outside_bytes + NCCL_BYTES * (question.ranks > 1) + more
    limit = None if asked.limit_bytes is None else asked.limit_bytes - more
    estimated = ", with estimates of its memory or its libraries" if question.known and gpu.estimated else ""
    where = f"for {gpu.name}{estimated}" if question.known else f"with kernels as on {gpu.name}"
    basis = f"{one.how} {where}: from {answer.how}"
    device = beside if question.known else None
    return predicted(one, question.settings, limit, device, basis, seconds, asked.limit_error_bytes)


def _pickled(workload: Workload) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(workload))
    except Exception as error:
        raise InvalidInput(
            f"The workload cannot be sent to another process ({type(error).__name__}: {error}). Let its factories make "
            "what they need instead of holding it."
        ) from None
