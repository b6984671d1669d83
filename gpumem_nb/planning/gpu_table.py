"""GPUs that need not be here: their memory, and what of it torch's allocator cannot have.

The table is ``gpus.csv`` beside this file. Lines of the same form, and records of ``tests/gpu``, are added by naming
their files in the environment variable ``GPUMEM_NB_GPUS``, separated by colons.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..shared.errors import InvalidInput, nearest
from ..shared.forecast import Kernels
from ..shared.units import typed_size

VARIABLE = "GPUMEM_NB_GPUS"
_TABLE = Path(__file__).with_name("gpus.csv")
_MIB = 2**20
_AMPERE, _HOPPER = (8, 0), (9, 0)
NCCL_BYTES, NCCL_ERROR_BYTES = 300 * _MIB, 200 * _MIB
"""An estimate of what one NCCL communicator takes outside of torch's allocator; it grows with ranks and channels."""
UNKNOWN_ERROR_BYTES = 500 * _MIB
"""The error of an unnamed GPU's memory beside torch's allocator, as for an estimate."""
_SIZES = ("memory", "outside", "outside_error", "convolution")
_RECORDED_ERROR_BYTES = 50 * _MIB


@dataclass(frozen=True, slots=True)
class Gpu:
    """The known figures of a GPU, in bytes.

    Attributes:
        name: what people call it.
        capability: CUDA's compute capability, major and minor.
        memory_bytes: what CUDA says that it has.
        outside_bytes: of that, what CUDA's context and loaded libraries take in a training process.
        outside_error_bytes: by how much that may be wrong.
        convolution_bytes: what cuDNN's kernels take besides, where convolutions are computed.
        sources: where memory and outside come from; what begins with ``estimate`` was not measured.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    outside_bytes: int
    outside_error_bytes: int
    convolution_bytes: int
    sources: tuple[str, str]

    @property
    def estimated(self) -> bool:
        """Return whether it is an estimate that was not measured."""
        return any(source.startswith("estimate") for source in self.sources)

    def beside(self, ranks: int) -> tuple[int, int]:
        """Bytes that torch's allocator cannot have where so many ranks train, and by how much that may be wrong."""
        joined = ranks > 1
        return self.outside_bytes + NCCL_BYTES * joined, self.outside_error_bytes + NCCL_ERROR_BYTES * joined

    @property
    def kernels(self) -> Kernels:
        """Return what it has of those that memory depends on.

        cuBLAS gets 32 MiB from Hopper on, else ``:4096:2:16:8`` KiB (ATen/cuda/CublasHandlePool.cpp,
        getChosenWorkspaceSize).
        """
        workspace = 32 * _MIB if self.capability >= _HOPPER else (4096 * 2 + 16 * 8) * 1024
        return Kernels(self.capability >= _AMPERE, workspace)


def table() -> dict[str, Gpu]:
    """Return all GPUs that are known, by name.

    Raises:
        InvalidInput: a file that :data:`VARIABLE` names cannot be used.
    """
    gpus = {gpu.name: gpu for gpu in _of_csv(_TABLE)}
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        path = Path(name)
        try:
            found = [_checked(gpu) for gpu in (_of_record(path, gpus) if path.suffix == ".json" else _of_csv(path))]
        except (OSError, KeyError, ValueError, TypeError, AttributeError, csv.Error) as error:
            raise InvalidInput(
                f"{path}, which {VARIABLE} names, cannot be used ({type(error).__name__}: {error}). Give a file like "
                "gpumem_nb/planning/gpus.csv, or a record that tests/gpu/run.sh wrote."
            ) from None
        gpus.update((gpu.name, gpu) for gpu in found)
    return gpus


def names() -> list[str]:
    """Of all GPUs that are known; only those of the package's own table where an added file cannot be used."""
    try:
        return list(table())
    except InvalidInput:
        return [gpu.name for gpu in _of_csv(_TABLE)]


def find(name: str) -> Gpu:
    """Return the GPU of this name, in any case; the size may be left out where there is one only.

    Raises:
        InvalidInput: it is not known, which names the nearest, or there are several sizes, which names these.
    """
    if not isinstance(name, str):
        raise InvalidInput(
            f"A GPU must be a name, such as gpu='T4-16GB,A100-40GB'; this is a {type(name).__name__}. Names: "
            f"{', '.join(names())}."
        )
    gpus = table()
    found = called(name, gpus)
    if len(found) > 1:
        raise InvalidInput(f"There are several {name} in the table: write {' or '.join(found)}.")
    if not found:
        by_key = {key_of(known): known for known in gpus}
        close = nearest(key_of(name), by_key)
        for key, known in by_key.items():
            close = close.replace(key, known)
        raise InvalidInput(f"There is no GPU {name!r} in the table: {close}. memory= sets another size, such as 48GB.")
    return gpus[found[0]]


def called(name: str, gpus: Iterable[str]) -> list[str]:
    """Return those of some GPUs that are called so: the one with this name, else all that have it before their size.

    Of several that are written otherwise and are compared as the same, the last one counts: an added file's.
    """
    by_key, key = {key_of(gpu): gpu for gpu in gpus}, key_of(name)
    return [by_key[key]] if key in by_key else [gpu for gpu in by_key.values() if key_of(_model(gpu)) == key]


def in_words(name: str, memory: int | None) -> str:
    """Return what a GPU of the table is called whose memory is this, in bytes: ``T4 with 48GB``."""
    return name if memory is None else f"{_model(name)} with {typed_size(memory)}"


def _model(gpu: str) -> str:
    """Return a GPU's name without its size: of A100-40GB that is A100."""
    return re.sub(r"[\s_-]+\d+\s*GB$", "", gpu.strip(), flags=re.IGNORECASE)


def key_of(name: str) -> str:
    """Return a name as it is compared: in any case, with spaces, hyphens or neither."""
    return re.sub(r"[\s_-]+", "", name).lower()


def _of_csv(path: Path) -> Iterator[Gpu]:
    with path.open(newline="", encoding="utf-8") as file:
        if "\0" in (text := file.read()):
            raise ValueError("it holds NUL bytes, so it is not text")
        for row in csv.DictReader(io.StringIO(text, newline="")):
            if lacks := [name for name, value in row.items() if name is None or not value]:
                raise ValueError(f"the line of {row['name']!r} has no value of {lacks[0]}, or too many values")
            major, _, minor = row["capability"].partition(".")
            memory, outside, error, convolution = (_bytes(row[f"{name}_mib"]) for name in _SIZES)
            sources = (row["memory_source"], row["outside_source"])
            yield Gpu(row["name"], (int(major), int(minor)), memory, outside, error, convolution, sources)


def _bytes(mib: str) -> int:
    if not math.isfinite(float(mib)):
        raise ValueError(f"{mib} MiB is not a size")
    return round(float(mib) * _MIB)


def _checked(gpu: Gpu) -> Gpu:
    """Return the GPU that a line of a file describes.

    Raises:
        ValueError: it cannot.
    """
    if not gpu.name.isprintable():
        raise ValueError(f"{gpu.name!r} is not a name")
    sizes = gpu.memory_bytes - 1, gpu.outside_bytes, gpu.outside_error_bytes, gpu.convolution_bytes
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise ValueError(f"a size of {gpu.name!r} is negative or not a size")
    return gpu


def _of_record(path: Path, known: Mapping[str, Gpu]) -> Iterator[Gpu]:
    """Yield the GPU of a record of tests/gpu: what its device had in use beyond what torch's allocator had reserved."""
    record = json.loads(path.read_text(encoding="utf-8"))
    machine = record["machine"]
    beside = [
        rank["device"]["used_bytes"] - rank["reserved_peak_bytes"]
        for cell in record["cells"]
        for rank in _measured(cell, record["ranks"])
    ]
    if machine["virtual"] or not beside:
        raise ValueError("it holds no measurement of one rank on a real GPU")
    capability = tuple(machine["capability"]) if machine.get("capability") else _capability_of(machine["gpu"], known)
    source = f"measured: {path.name}"
    sizes = machine["limit_bytes"], max(beside), _RECORDED_ERROR_BYTES, 0
    yield Gpu(machine["gpu"], capability, *sizes, (source, source))


def _capability_of(name: str, known: Mapping[str, Gpu]) -> tuple[int, int]:
    """Of a GPU of which NVML says this name: as the known one of the longest name in it, such as A100 and not A10."""
    models = {_model(gpu.name): gpu.capability for gpu in known.values()}
    inside = [model for model in models if model in key_of(name)]
    return models[max(inside, key=len)] if inside else _AMPERE


def _measured(cell: Mapping[str, Any], ranks: int) -> Sequence[Mapping[str, Any]]:
    if ranks != 1 or cell["outcome"] != "ok":
        return []
    return [rank for rank in cell["per_rank"] if rank["device"] and rank["device"].get("used_bytes")]
