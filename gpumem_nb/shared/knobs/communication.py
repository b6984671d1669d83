"""The knobs of how gradients travel; each step of ``engine/step`` reads them by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..categories import COMMUNICATION
from ..values import only_words, positive, whole_or_0
from ..workload import WorkloadInfo
from .knob import KEEPS_TO_ROUNDING, MOST, SOME, Changes, Knob, Need, Settings, carried

COMMUNICATION_FOLD = "communication"
"""Of the panel."""
_LARGEST_MIB = 4096
_LONGEST_CYCLE_MS = 100  # ranks that join again wait for some cycles
_LEAST_FUSED_BYTES = 64  # two numbers in the same buffer, which lie on lines of their own
_SMALL_MIB = 4
_PLAIN = "sgd"
_STARTED_WITH = {"default": None}
_MIB = f"a number of MiB above 0 and at most {_LARGEST_MIB}, such as"


def _mib(value: Any) -> float:
    return _at_most(_LARGEST_MIB, value)


def _cycle(value: Any) -> float:
    return _at_most(_LONGEST_CYCLE_MS, value)


def _at_most(largest: float, value: Any) -> float:
    """Return a number above 0, as people write it."""
    number = positive(value)
    if number > largest:
        raise ValueError(value)
    return int(number) if number == int(number) else number


def _combines(settings: Settings, ranks: int) -> str:
    """Return why gradients cannot be combined by Adasum."""
    if settings.reduction != "adasum":
        return ""
    if ranks & (ranks - 1):
        return (
            f"reduction=adasum cannot be used on {ranks} ranks: Horovod's Adasum needs a power of two of them (2, 4, "
            "8, …). Use reduction=average, or start as many ranks."
        )
    if settings.optimizer == _PLAIN:
        return ""
    return (
        f"reduction=adasum cannot be used with optimizer={settings.optimizer}: Horovod's Adasum combines what each "
        "rank's own optimizer would do to the weights, and with state each rank would keep another. Of plain SGD the "
        f"gradients can be combined instead: set optimizer={_PLAIN} too, or use reduction=average."
    )


def _adapts(settings: Settings, workload: WorkloadInfo) -> Changes:
    adasum = settings.reduction == "adasum" and settings.optimizer != _PLAIN
    return {"reduction": "average"} if adasum else {}


def _refuses_by_hosts(name: str) -> Callable[[Any, WorkloadInfo | None], str]:
    def refuses(value: bool | None, workload: WorkloadInfo | None) -> str:
        if not (value and workload and workload.why_flat):
            return ""
        return f"{name}=on cannot be used: {workload.why_flat}. Leave it at default."

    return refuses


def _not_by_ddp(reduction: str, ddp: bool) -> str:
    if not (ddp and reduction == "adasum"):
        return ""
    return (
        "reduction=adasum is Horovod's: DistributedDataParallel has none. Export without --ddp (ddp=False), or set "
        "reduction=average first."
    )


def _of_horovod(value: Any, ddp: bool) -> str:
    return "it is Horovod's, and DistributedDataParallel has none" if ddp and value is not None else ""


def _by_hosts(name: str, how: str) -> Knob:
    """Return a knob of an all-reduce that Horovod does in stages, inside of hosts and between them."""
    return Knob(
        name,
        None,
        f"{how}; needs Horovod on NCCL and several hosts; default: as the ranks were started (off)",
        parse=only_words,
        allowed="on, off or default",
        words={**_STARTED_WITH, "on": True, "off": False},
        fold=None,
        mathematics=KEEPS_TO_ROUNDING,
        refuses=_refuses_by_hosts(name),
        adapts=lambda settings, workload: {name: None} if workload.why_flat else {},
        exported=carried,
        left_out=_of_horovod,
    )


def _smaller_buffer(need: Need) -> Iterator[Changes]:
    now = need.settings.fusion_threshold_mib
    if now is None or now > _SMALL_MIB:
        yield {"fusion_threshold_mib": _SMALL_MIB}


BUCKET_MIB = Knob(
    "bucket_mib",
    4,
    "gradients leave together, this many MiB at a time, while backward goes on; small ones leave earlier, at more cost",
    parse=_mib,
    allowed=f"{_MIB} 4",
    fold=COMMUNICATION_FOLD,
    short="buckets ",
    mathematics=KEEPS_TO_ROUNDING,
    exported=carried,
)

COMPRESSION = Knob(
    "compression",
    "none",
    "how fp32 gradients travel: as they are, or rounded to fp16 as hvd.Compression.fp16 does, in half the bytes",
    choices=("none", "fp16"),
    means={"none": "32 bit each", "fp16": "rounded to 16 bit on their way: half the bytes"},
    fold=COMMUNICATION_FOLD,
    short="compression ",
    moves={COMMUNICATION: SOME},  # copies of gradients lie beside them until all have arrived
    exported=carried,
)

REDUCTION = Knob(
    "reduction",
    "average",
    "what the ranks' gradients become: their average, their sum (which takes a learning rate smaller by the number of "
    "ranks), or with optimizer=sgd Horovod's Adasum",
    choices=("average", "sum", "adasum"),
    means={
        "average": "the mean of all ranks",
        "sum": "the sum of all ranks, which takes a smaller learning rate",
        "adasum": "between both, by how much the ranks' gradients agree; with sgd alone",
    },
    fold=COMMUNICATION_FOLD,
    short="reduction ",
    adapts=_adapts,
    conflicts=_combines,
    exported=_not_by_ddp,
)

FUSION_THRESHOLD_MIB = Knob(
    "fusion_threshold_mib",
    None,
    "Horovod's fusion buffer, in which gradients travel together; default: as the ranks were started (16 MiB on "
    "virtual GPUs and under limits below 2 GiB, else 128)",
    parse=_mib,
    allowed=f"{_MIB} 16, or default",
    words=_STARTED_WITH,
    fold=COMMUNICATION_FOLD,
    short="fusion ",
    moves={COMMUNICATION: MOST},
    mathematics=KEEPS_TO_ROUNDING,
    lighter=_smaller_buffer,
    saves="Horovod's buffer is smaller",
    exported=carried,
    left_out=_of_horovod,
)

CYCLE_TIME_MS = Knob(
    "cycle_time_ms",
    None,
    "how often Horovod looks for gradients that all ranks have sent; default: as the ranks were started (1 ms, or 20 "
    "for one rank by itself)",
    parse=_cycle,
    allowed=f"a number of milliseconds above 0 and at most {_LONGEST_CYCLE_MS}, such as 2, or default",
    words=_STARTED_WITH,
    fold=COMMUNICATION_FOLD,
    short="cycle ms ",
    mathematics=KEEPS_TO_ROUNDING,
    exported=carried,
    left_out=_of_horovod,
)

CACHE_CAPACITY = Knob(
    "cache_capacity",
    None,
    "how many tensors Horovod remembers, so that it need not agree on them anew; 0: none; default: as the ranks were "
    "started (1024)",
    parse=whole_or_0,
    allowed="a whole number of at least 0, such as 1024, or default",
    words=_STARTED_WITH,
    fold=None,
    short="cache ",
    mathematics=KEEPS_TO_ROUNDING,
    exported=carried,
    left_out=_of_horovod,
)

HIERARCHICAL_ALLREDUCE = _by_hosts(
    "hierarchical_allreduce", "reduce inside of each host over NCCL first, then between hosts over MPI"
)
TORUS_ALLREDUCE = _by_hosts("torus_allreduce", "reduce along two dimensions over NCCL, inside of hosts and across them")

COMMUNICATION_KNOBS = (
    COMPRESSION,
    REDUCTION,
    BUCKET_MIB,
    FUSION_THRESHOLD_MIB,
    CYCLE_TIME_MS,
    CACHE_CAPACITY,
    HIERARCHICAL_ALLREDUCE,
    TORUS_ALLREDUCE,
)


@dataclass(frozen=True, slots=True)
class Variable:
    """One of Horovod's: its name, Horovod's own default, and how a knob's value is written there."""

    name: str
    default: str
    written: Callable[[Any], str] = str


CYCLE_TIME = "HOROVOD_CYCLE_TIME"
VARIABLES = {
    FUSION_THRESHOLD_MIB.name: Variable(
        "HOROVOD_FUSION_THRESHOLD", str(128 * 2**20), lambda mib: str(fusion_bytes(mib))
    ),
    CYCLE_TIME_MS.name: Variable(CYCLE_TIME, "1"),
    CACHE_CAPACITY.name: Variable("HOROVOD_CACHE_CAPACITY", "1024"),
    HIERARCHICAL_ALLREDUCE.name: Variable("HOROVOD_HIERARCHICAL_ALLREDUCE", "0", lambda on: str(int(on))),
    TORUS_ALLREDUCE.name: Variable("HOROVOD_TORUS_ALLREDUCE", "0", lambda on: str(int(on))),
}
"""By knob the variable that Horovod reads when it joins the ranks."""


def fusion_bytes(mib: float) -> int:
    """Return how large the fusion buffer is with such a threshold."""
    return max(_LEAST_FUSED_BYTES, round(mib * 2**20))
