"""Predictions without a session: for GPUs that are not here."""

from __future__ import annotations

import linecache
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..report.tables import Report, Table
from ..shared.errors import InvalidInput, nearest
from ..shared.forecast import DryAnswer, DryRun, Target
from ..shared.knobs import KNOBS, additional
from ..shared.knobs.communication import fusion_bytes
from ..shared.settings import Settings
from ..shared.units import format_bytes, parse_size
from ..shared.workload import Workload
from ..workloads import catalog
from . import dry_process, gpu_table
from .fit import predicted
from .gpu_table import Gpu
from .prediction import FITS, Prediction

GENERIC = "A100-40GB"
"""The GPU whose kernels are assumed if none is named."""

_FIXED, _UNKNOWN = "fixed by the data", "not known"

FUSION_MIB = 128
"""Horovod's fusion buffer, from torch's allocator: the default of HOROVOD_FUSION_THRESHOLD (operations.cc)."""


@dataclass(frozen=True, repr=False)
class ColdPredictions(Report):
    """Predictions of the same steps on several GPUs.

    Attributes:
        by_gpu: a prediction for each GPU, in the order in which they were named.
        largest: the largest ``batch_size`` that surely fits each; 0 if none does, ``None`` if the data says it, or it
            is not known.
        slow: GPUs on which the settings would be slow, and why, in words.
        unknown: why the largest ``batch_size`` is not known, as a sentence, for those GPUs of which it is not.
        seconds: what predicting took.
    """

    by_gpu: Mapping[str, Prediction]
    largest: Mapping[str, int | None]
    unknown: Mapping[str, str]
    seconds: float
    slow: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, gpu: str) -> Prediction:
        by_key = {gpu_table.key_of(name): one for name, one in self.by_gpu.items()}
        if (found := by_key.get(gpu_table.key_of(gpu))) is None:
            raise InvalidInput(f"{gpu!r} was not asked for. There are {', '.join(self.by_gpu)}.")
        return found

    @property
    def fitting(self) -> tuple[str, ...]:
        """The GPUs on which it fits."""
        return tuple(gpu for gpu, one in self.by_gpu.items() if one.verdict == FITS)

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each GPU."""
        return [
            {
                "gpu": gpu,
                **one.columns,
                "device_bytes": one.device_bytes,
                "largest_batch": self.largest[gpu],
            }
            for gpu, one in self.by_gpu.items()
        ]

    @property
    def shown(self) -> list[Table | str]:
        """Return the table and the sentences below it."""
        return [self._table, *self._notes]

    @property
    def _notes(self) -> list[str]:
        gpus: dict[str, list[str]] = {}
        for gpu, why in self.unknown.items():
            gpus.setdefault(why, []).append(gpu)
        notes = [f"Largest batch of {', '.join(those)} not known: {why}" for why, those in gpus.items()]
        return notes + [f"{why}." for why in self.slow.values()]

    def _largest_text(self, gpu: str) -> str:
        if gpu in self.unknown:
            return _UNKNOWN
        return _FIXED if self.largest[gpu] is None else str(self.largest[gpu] or "none")

    @property
    def _table(self) -> Table:
        rows = tuple(
            (
                gpu,
                one.verdict,
                format_bytes(one.reserved_peak_bytes),
                f"{format_bytes(one.low_bytes)} to {format_bytes(one.high_bytes)}",
                format_bytes(one.limit_bytes),
                self._largest_text(gpu),
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
    """Return what training a workload would need on GPUs that need not be here; see :func:`gpumem_nb.predict`.

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
    known = gpu is not None
    settings.check_together(ranks)
    asked = {one.name: _asked(one, capacity, ranks, known, settings.fusion_threshold_mib) for one in gpus}
    several = known and len(gpus) + (not isinstance(gpu, str)) > 1
    adapts = "batch_size" not in own_knobs
    answer = dry_process.ask(DryRun(_pickled(made), settings, asked, several, adapts, ranks, _sources()))
    seconds = time.perf_counter() - began_s
    by_gpu = {one.name: _prediction(answer, one, asked[one.name], ranks, known, seconds) for one in gpus}
    if several:
        largest = {name: answer.of[name].largest for name in by_gpu}
        unknown = {name: why for name in by_gpu if (why := answer.of[name].unknown)}
        slow = {one.name: why for one in gpus if (why := _slow(one, answer.settings))}
        return ColdPredictions(by_gpu, largest, unknown, seconds, slow)
    return by_gpu[gpus[0].name]


def _workload(workload: str | Workload, knobs: dict[str, Any]) -> tuple[Workload, dict[str, Any]]:
    """Return the workload, and the knobs that are none of its options."""
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
    settings = Settings().replace(**own, **knobs)
    for knob in additional():
        if getattr(settings, knob.name) != knob.default:
            raise InvalidInput(
                f"{knob.name}={knob.text(getattr(settings, knob.name))} cannot be predicted without ranks: what a knob "
                "that was registered here does to memory is not known. Leave it out, or start ranks (%hvd_start) and "
                "predict there."
            )
    return settings


def _gpus(gpu: str | Sequence[str] | None) -> list[Gpu]:
    if gpu is None:
        return [gpu_table.find(GENERIC)]
    if not isinstance(gpu, str | Sequence):
        raise InvalidInput(f"gpu={gpu!r} cannot be used. Name some, such as gpu='T4-16GB,A100-40GB'.")
    names = gpu.split(",") if isinstance(gpu, str) else list(gpu)
    found = {one.name: one for one in (gpu_table.find(name) for name in names)}
    if not found:
        raise InvalidInput("No GPU was named. Name some, such as gpu='T4-16GB,A100-40GB'.")
    return list(found.values())


def _asked(gpu: Gpu, capacity: int | None, ranks: int, known: bool, fusion_mib: float | None = None) -> Target:
    """Return the part of a question that is about one GPU.

    Args:
        gpu: the GPU whose kernels are assumed.
        capacity: of its memory in bytes, if it was given.
        ranks: how many train together.
        known: whether this GPU was named.
        fusion_mib: the knob ``fusion_threshold_mib``.

    Raises:
        InvalidInput: it has no memory left for tensors.
    """
    beside, error = gpu.beside(ranks)
    if not known:
        error += max(0, gpu_table.UNKNOWN_ERROR_BYTES - gpu.outside_error_bytes)
    memory = capacity if capacity is not None else gpu.memory_bytes if known else None
    if memory is not None and memory <= beside + gpu.convolution_bytes:
        whose = "memory=" if capacity is not None else f"The memory of {gpu.name}: "
        raise InvalidInput(
            f"{whose}{format_bytes(memory)} is not more than CUDA's context and libraries take "
            f"({format_bytes(beside + gpu.convolution_bytes)}). Name a larger one."
        )
    held = (fusion_bytes(FUSION_MIB if fusion_mib is None else fusion_mib),) if ranks > 1 else ()
    limit, error = (None, 0) if memory is None else (memory - beside, error)
    return Target(gpu.kernels, held, limit, error, gpu.convolution_bytes)


def _prediction(answer: DryAnswer, gpu: Gpu, asked: Target, ranks: int, known: bool, seconds: float) -> Prediction:
    found = answer.of[gpu.name]
    estimated = ", with estimates of its memory or its libraries" if known and gpu.estimated else ""
    where = f"for {gpu.name}{estimated}" if known else f"with kernels as on {gpu.name}"
    basis = f"{found.forecast.how} {where}: from {found.how}"
    if known and (slow := _slow(gpu, answer.settings)):
        basis += f"; {slow}"
    device = gpu.beside(ranks)[0] + asked.convolution_bytes * found.convolves if known else None
    error = asked.limit_error_bytes
    return predicted(found.forecast, answer.settings, found.limit_bytes, device, basis, seconds, error)


def _slow(gpu: Gpu, settings: Settings) -> str:
    """Return why these settings would be slow on a GPU, however little memory they need; empty if they would not."""
    if settings.precision != "bf16" or gpu.kernels.ampere:
        return ""
    major, minor = gpu.capability
    return (
        f"{gpu.name} has no arithmetic for bf16 (compute capability {major}.{minor}, it came with 8.0), so expect it "
        "to be slower than fp32: precision=fp16 is what that GPU has"
    )


def _pickled(workload: Workload) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(workload))
    except Exception as error:
        raise InvalidInput(
            f"The workload cannot be sent to another process ({type(error).__name__}: {error}). Let its factories make "
            "what they need instead of holding it."
        ) from None


def _sources() -> dict[str, str]:
    """Of cells: IPython keeps their lines for tracebacks, without a time of change because they lie in no file."""
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    return {name: "".join(entry[2]) for name, entry in entries.items()}
