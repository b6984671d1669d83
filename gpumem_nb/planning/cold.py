"""Predictions without a session: for GPUs that are not here."""

from __future__ import annotations

import linecache
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..report.differences import NOT_KNOWN
from ..shared.answers import Progress
from ..shared.errors import InvalidInput, nearest
from ..shared.forecast import DryRun, OnGpu, Target
from ..shared.knobs import KNOBS, additional
from ..shared.knobs.communication import fusion_bytes
from ..shared.settings import Settings
from ..shared.units import as_whole, format_bytes, parse_size
from ..shared.workload import Splits, Workload
from ..workloads import catalog
from . import dry_process, gpu_table
from .cold_table import ColdPredictions
from .fit import predicted
from .gpu_table import Gpu
from .prediction import Prediction

GENERIC = "A100-40GB"
"""The GPU whose kernels are assumed if none is named."""

FUSION_MIB = 128
"""Horovod's fusion buffer, from torch's allocator: the default of HOROVOD_FUSION_THRESHOLD (operations.cc)."""


def predict(
    workload: str | Workload,
    *,
    gpu: str | Sequence[str] | None = None,
    memory: str | int | None = None,
    ranks: int = 1,
    progress: Progress = lambda what, done: None,
    **knobs: Any,
) -> Prediction | ColdPredictions:
    """Return what training a workload would need on GPUs that need not be here; see :func:`gpumem_nb.predict`.

    Raises:
        InvalidInput: an unknown workload, option, knob or GPU, or a value that cannot be used.
        WorkloadError: the workload cannot be run without memory; says which operator and which line of it.
    """
    made, own_knobs = _workload(workload, knobs)
    settings = _settings(made, own_knobs)
    adapts = "batch_size" not in own_knobs
    return of_packed(lambda: _pickled(made), settings, gpu, memory, ranks, progress, adapts)


def of_packed(
    pack: Callable[[], bytes],
    settings: Settings,
    gpu: str | Sequence[str] | None,
    memory: str | int | None,
    ranks: int,
    progress: Progress,
    adapts: bool = False,
    splits: Splits = NOT_KNOWN,
) -> Prediction | ColdPredictions:
    """Return the same of what a dry run is given.

    Args:
        pack: gives that, in a pickle; called once everything else was found to be in order.
        settings: to predict.
        gpu, memory, ranks, progress: as :func:`gpumem_nb.predict` has them.
        adapts: whether a batch size that the data brings comes before that of the settings.
        splits: what is known of training its micro-batches in parts.

    Raises:
        InvalidInput, WorkloadError: as :func:`predict`.
    """
    began_s = time.perf_counter()
    _check_additional(settings)
    gpus = _gpus(gpu)
    capacity = None if memory is None else parse_size(memory)
    if (together := as_whole(ranks, 1)) is None:
        raise InvalidInput(f"ranks={ranks!r} cannot be used: it must be a whole number of at least 1.")
    ranks = together
    known = gpu is not None
    settings.check_together(ranks)
    asked = {one.name: _asked(one, capacity, ranks, known, settings.fusion_threshold_mib) for one in gpus}
    several = known and len(gpus) + (not isinstance(gpu, str)) > 1
    answer = dry_process.ask(DryRun(pack(), settings, asked, several, adapts, ranks, _sources()), progress)
    seconds = time.perf_counter() - began_s

    def predicted_on(one: Gpu, settings: Settings, found: OnGpu) -> Prediction:
        called = replace(one, name=gpu_table.in_words(one.name, capacity))
        said = _prediction(found, settings, called, asked[one.name], ranks, known, seconds)
        return replace(said, splits=splits)

    by_gpu = {one.name: predicted_on(one, answer.settings, answer.of[one.name]) for one in gpus}
    if not several:
        return by_gpu[gpus[0].name]
    return ColdPredictions(
        by_gpu,
        {name: answer.of[name].largest for name in by_gpu},
        {name: why for name in by_gpu if (why := answer.of[name].unknown)},
        seconds,
        {one.name: why for one in gpus if (why := _slow(one, answer.settings) or _narrow(one, answer.settings))},
        {
            one.name: tuple(predicted_on(one, other.settings, other.of) for other in lighter)
            for one in gpus
            if (lighter := answer.of[one.name].lighter) is not None
        },
        ranks,
        tuple(one.name for one in gpus if one.estimated),
        capacity,
    )


def _workload(workload: str | Workload, knobs: dict[str, Any]) -> tuple[Workload, dict[str, Any]]:
    """Return the workload, and the knobs that are none of its options."""
    if isinstance(workload, Workload):
        return workload, knobs
    if not isinstance(workload, str):
        raise InvalidInput(
            f"The workload must be a Workload or the name of a ready-made one; this is a {type(workload).__name__}. "
            f"Names: {', '.join(catalog.CATALOG)}. For a model of your own write "
            "w = gpumem_nb.Workload('mine', model, data, loss), with functions that return model and data and one that "
            "returns the loss of a micro-batch, loss(model, batch), and name w."
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


def _check_additional(settings: Settings) -> None:
    for knob in additional():
        if getattr(settings, knob.name) != knob.default:
            raise InvalidInput(
                f"{knob.name}={knob.text(getattr(settings, knob.name))} cannot be predicted without ranks: what a knob "
                "that was registered here does to memory is not known. Leave it out, or start ranks (%hvd_start) and "
                "predict there."
            )


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


def _prediction(
    found: OnGpu, settings: Settings, gpu: Gpu, asked: Target, ranks: int, known: bool, seconds: float
) -> Prediction:
    estimated = ", with estimates of its memory or its libraries" if known and gpu.estimated else ""
    where = f"for {gpu.name}{estimated}" if known else f"with kernels as on {gpu.name}"
    basis = f"{found.forecast.how} {where}: from {found.how}"
    if known and (slow := _slow(gpu, settings)):
        basis += f"; {slow}"
    device = gpu.beside(ranks)[0] + asked.convolution_bytes * found.convolves if known else None
    error = asked.limit_error_bytes
    return predicted(found.forecast, settings, found.limit_bytes, device, basis, seconds, error)


def _slow(gpu: Gpu, settings: Settings) -> str:
    """Return why these settings would be slow on a GPU, however little memory they need; empty if they would not."""
    if settings.precision not in ("bf16", "bf16_weights") or gpu.kernels.ampere:
        return ""
    major, minor = gpu.capability
    return (
        f"{gpu.name} has no arithmetic for bf16 (compute capability {major}.{minor}, it came with 8.0), so expect it "
        "to be slower than fp32: precision=fp16 is what that GPU has"
    )


def _narrow(gpu: Gpu, settings: Settings) -> str:
    """Return that a GPU does not compute in bf16, where that may yet be tried; empty if it does."""
    if settings.precision == "fp16" or gpu.kernels.ampere:
        return ""
    major, minor = gpu.capability
    return f"{gpu.name} has no bf16 (compute capability {major}.{minor}, it came with 8.0): there 16 bits are fp16"


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
