"""Answers of a dry run: forecasts for each GPU, the largest batch that fits it, and what else would fit."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ...shared.errors import GpumemError, InvalidInput, WorkloadError
from ...shared.forecast import SEARCH_S, DryAnswer, DryRun, OnGpu, Target
from ...shared.knobs.step import why_fixed
from ...shared.settings import Settings
from ...shared.units import DEFAULT_SEED
from ...shared.workload import DataInfo, Workload
from .. import cells
from ..random_state import seeded
from .batches import Batches
from .hollow import Given, Hollow
from .ladder import Ladder
from .run import Run, lack, surely_within
from .step import refused

_NO_END = f"It was not found within {SEARCH_S} s and the memory of a dry run. Predict single sizes."


def answers(question: DryRun) -> Iterator[DryAnswer]:
    """Yield what these GPUs would need, and then, with one GPU after the other, the largest batch that fits it.

    A problem is said in an answer, and not raised. What goes wrong while the largest batch is looked for takes away
    nothing that was found before.
    """
    torch.set_num_threads(1)
    given: DryAnswer | None = None
    try:
        for given in _answers(question):
            yield _measured(given)
    except (GpumemError, MemoryError) as error:
        if given is None:
            lacks = f"The dry run needs more memory than it may take ({error})."
            problem = str(error) if isinstance(error, GpumemError) else lacks
            given = DryAnswer({}, question.settings, problem=problem, of_input=isinstance(error, InvalidInput))
            yield _measured(given)


def _measured(given: DryAnswer) -> DryAnswer:
    return replace(given, peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _answers(question: DryRun) -> Iterator[DryAnswer]:
    for title, source in question.sources.items():
        cells.remember(source, title)
    given: Given = _unpickled(question.workload)
    batches = given.batches if isinstance(given, Hollow) else _batches(given)
    settings = _settled(question, batches.info)
    ladder = Ladder(given, batches, settings, question.ranks)
    found: dict[str, OnGpu] = {}
    searched = question.largest and not batches.fixed
    for used in dict.fromkeys(asked.kernels for asked in question.gpus.values()):
        with ladder.run(settings, used) as run:
            for name, asked in question.gpus.items():
                if asked.kernels == used:
                    found[name] = replace(run.found(asked), unknown=_NO_END * searched)
    parameters = run.parameters

    def known(what: str = "", done: float = 1.0) -> DryAnswer:
        return DryAnswer(dict(found), settings, parameters, next=(what, done))

    # The largest first: a line that holds for it holds for the others.
    by_limit = sorted(found, key=lambda name: -(found[name].limit_bytes or 0)) * question.largest
    for place, name in enumerate(by_limit * searched):
        yield known(f"the largest batch on {name}", _STEP + _LARGEST * place / len(by_limit))
        with ladder.run(settings, question.gpus[name].kernels) as run:
            found[name] = _searched(found[name], run, question.gpus[name])
    short = [name for name in by_limit if not _fits(found[name], question.gpus[name])]
    for place, name in enumerate(short):
        yield known(f"what would fit on {name}", _STEP + _LARGEST + _LIGHTER * place / len(short))
        found[name] = replace(found[name], lighter=tuple(ladder.lighter(question.gpus[name])))
    yield known()


_STEP, _LARGEST, _LIGHTER = 0.3, 0.2, 0.5  # shares of the work, roughly


def _fits(found: OnGpu, asked: Target) -> bool:
    return surely_within(found.forecast, asked, found.limit_bytes)


def _searched(found: OnGpu, run: Run, asked: Target) -> OnGpu:
    try:
        return replace(found, largest=run.largest(asked), unknown="")
    except (GpumemError, MemoryError) as error:
        return replace(found, unknown=str(error))


def _unpickled(workload: bytes) -> Any:
    try:
        return pickle.loads(workload)
    except Exception as error:
        raise InvalidInput(
            f"The workload cannot be sent to another process ({type(error).__name__}: {error}). Define its factories "
            "in a cell or in a module that can be imported."
        ) from None


def _batches(workload: Workload) -> Batches:
    try:
        with seeded(DEFAULT_SEED):  # as on ranks
            return Batches(workload.data())
    except GpumemError:
        raise
    except (Exception, SystemExit) as error:
        lacks = lack(error)
        enough = " A few samples are enough for it." * bool(lacks)
        raise WorkloadError(f"{refused(error, 'data', 'made')}{lacks}{enough}") from None


def _settled(question: DryRun, info: DataInfo) -> Settings:
    """Return the settings with the data's own batch size, as ranks begin with it.

    Raises:
        InvalidInput: another size was named than that of the micro-batches that the data brings.
    """
    settings = question.settings
    if info.batch_size is None or settings.batch_size == info.batch_size:
        return settings
    if question.adapts:
        return settings.replace(batch_size=info.batch_size)
    if info.batched:
        raise InvalidInput(why_fixed(settings.batch_size, info))
    return settings
