"""The knobs of how gradients travel; each step of ``engine/step`` reads them by itself."""

from __future__ import annotations

from typing import Any

from ..categories import COMMUNICATION
from .knob import SOME, Knob
from .option import positive

_LARGEST_MIB = 4096
_MIB = f"a number of MiB above 0 and at most {_LARGEST_MIB}, such as"


def _mib(value: Any) -> float:
    number = positive(value)
    if number > _LARGEST_MIB:
        raise ValueError(value)
    return int(number) if number == int(number) else number


BUCKET_MIB = Knob(
    "bucket_mib",
    4,
    "gradients leave together, this many MiB at a time, while backward goes on; small ones leave earlier, at more cost",
    parse=_mib,
    allowed=f"{_MIB} 4",
    short="buckets ",
    changes_mathematics=False,
)

COMPRESSION = Knob(
    "compression",
    "none",
    "how fp32 gradients travel: as they are, or rounded to fp16 as hvd.Compression.fp16 does, in half the bytes",
    choices=("none", "fp16"),
    short="compression ",
    moves={COMMUNICATION: SOME},  # copies of gradients lie beside them until all have arrived
)

COMMUNICATION_KNOBS = (COMPRESSION, BUCKET_MIB)
