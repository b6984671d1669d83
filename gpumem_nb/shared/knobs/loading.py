"""The knobs of how samples are fetched. Each step reads them by itself; none of them changes the order of samples."""

from __future__ import annotations

from typing import Any

from ..values import only_words, whole, whole_or_0
from ..workload import WorkloadInfo
from .knob import KEEPS, Changes, Knob, Settings, carried

_MOST_WORKERS = 256  # on one rank; what is more is a slip


def _workers(value: Any) -> int:
    number = whole_or_0(value)
    if number > _MOST_WORKERS:
        raise ValueError(value)
    return number


def _refuses_workers(value: int, workload: WorkloadInfo | None) -> str:
    if not (value and workload and workload.data.iterable):
        return ""
    return (
        f"num_workers={value} cannot be used: data that can only be iterated has one order, and each worker would read "
        "all of it. Use num_workers=0, or a dataset with __len__ and __getitem__."
    )


def _adapts_workers(settings: Settings, workload: WorkloadInfo) -> Changes:
    if workload.data.iterable:
        return {"num_workers": 0}
    return {} if workload.data.num_workers is None else {"num_workers": min(workload.data.num_workers, _MOST_WORKERS)}


def _adapts_prefetching(settings: Settings, workload: WorkloadInfo) -> Changes:
    factor = workload.data.prefetch_factor
    return {"prefetch_factor": factor} if factor else {}


def _refuses_pinning(value: bool, workload: WorkloadInfo | None) -> str:
    if not (value and workload) or (workload.data.pinnable and not workload.data.iterable):
        return ""
    if workload.data.iterable:
        return "pin_memory=on cannot be used with data that can only be iterated. Leave it off."
    return "pin_memory=on has no effect on virtual GPUs, which lie in the host's memory. Leave it off."


def _adapts_pinning(settings: Settings, workload: WorkloadInfo) -> Changes:
    if not workload.data.pinnable or workload.data.iterable:
        return {"pin_memory": False}
    return {} if workload.data.pin_memory is None else {"pin_memory": workload.data.pin_memory}


def _stops(value: str, ddp: bool) -> str:
    return "a sample that cannot be fetched ends the script" if value == "skip" else ""


NUM_WORKERS = Knob(
    "num_workers",
    0,
    "processes on each rank that fetch samples ahead; 0 lets the rank fetch them itself",
    parse=_workers,
    allowed=f"a whole number from 0 to {_MOST_WORKERS}, such as 2",
    mathematics=KEEPS,
    short="workers ",
    refuses=_refuses_workers,
    adapts=_adapts_workers,
    exported=carried,
)

PREFETCH_FACTOR = Knob(
    "prefetch_factor",
    2,
    "micro-batches that each worker fetches ahead",
    parse=whole,
    allowed="a whole number of at least 1, such as 2",
    mathematics=KEEPS,
    short="prefetch ",
    adapts=_adapts_prefetching,
    exported=carried,
)

PIN_MEMORY = Knob(
    "pin_memory",
    False,
    "keep batches in page-locked host memory, from which they reach a GPU faster",
    parse=only_words,
    allowed="on or off",
    words={"on": True, "off": False, "true": True, "false": False, "1": True, "0": False},
    mathematics=KEEPS,
    short="pinned ",
    refuses=_refuses_pinning,
    adapts=_adapts_pinning,
    exported=carried,
)

ON_BAD_SAMPLE = Knob(
    "on_bad_sample",
    "stop",
    "a sample that cannot be fetched: stop and name it, or skip it (its micro-batch is smaller then)",
    choices=("stop", "skip"),
    means={"stop": "training pauses and names it", "skip": "its micro-batch goes without it"},
    short="bad samples: ",
    exported=carried,
    left_out=_stops,
)
