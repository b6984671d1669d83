"""The readings that NVML gives of a rank's device, and the table that lists them.

A new reading is a line in the table at the end. Everything else reads the table: the rank that asks NVML, what travels
to the notebook (:class:`~gpumem_nb.shared.messages.DeviceUse`), and the memory report's table, sentences and frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

from .errors import InvalidInput


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One thing that NVML says of a device.

    Attributes:
        name: with its unit, such as ``temperature_c``.
        word: what people read, above a column and in sentences.
        unit: ``B`` for bytes, or what stands after the number.
        help: one line for people.
        read: asks NVML, given the handles of the device and of the whole GPU that it is or is a MIG instance of. What
            pynvml raises, or a ``LookupError`` in words, becomes the reason why it is missing. ``None`` for what
            ``memory/cuda.py`` works out itself.
        whole: whether it is a whole number.
    """

    name: str
    word: str
    unit: str
    help: str
    read: Callable[[Any, Any], float] | None
    whole: bool = True


METRICS: dict[str, Metric] = {}
"""All of them, in the order in which they are read and shown."""


def register(metric: Metric) -> None:
    """Add a reading to this process's table; where the ranks' tables lack it, it is n/a.

    Raises:
        InvalidInput: the name is taken.
    """
    if metric.name in METRICS:
        raise InvalidInput(f"There is a reading {metric.name!r} already. Choose another name.")
    METRICS[metric.name] = metric


def _used(device: Any, _gpu: Any) -> float:
    return int(pynvml.nvmlDeviceGetMemoryInfo(device).used)


def _total(device: Any, _gpu: Any) -> float:
    return int(pynvml.nvmlDeviceGetMemoryInfo(device).total)


def _utilisation(device: Any, gpu: Any) -> float:
    if gpu is not device:
        raise LookupError("NVML measures the utilisation of a whole GPU, not of a MIG instance")
    return int(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)


def _temperature(_device: Any, gpu: Any) -> float:
    return int(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU))


def _power(_device: Any, gpu: Any) -> float:
    return float(pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000)  # NVML counts milliwatts


def _clock(_device: Any, gpu: Any) -> float:
    return int(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM))


for _metric in (
    Metric("used_bytes", "used", "B", "what all processes hold on the device", _used),
    Metric("total_bytes", "total", "B", "the size of the device's memory", _total),
    Metric("own_bytes", "own", "B", "context, libraries and the allocator's reserved bytes of this process", None),
    Metric("other_bytes", "others", "B", "what all other processes hold on the device", None),
    Metric("utilisation_percent", "utilisation", "%", "share of the time in which the GPU computed", _utilisation),
    Metric("temperature_c", "temperature", "°C", "how hot the whole GPU is", _temperature),
    Metric("power_w", "power", "W", "what the whole GPU draws", _power, whole=False),
    Metric("clock_mhz", "clock", "MHz", "that of the whole GPU's multiprocessors", _clock),
):
    register(_metric)


_NOTABLE, _NOTABLE_WITH_GRAPH = 0.1, 0.02  # of all live bytes


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """The holders of the live bytes on one rank's device.

    Attributes:
        held: live bytes by category, as far as it is known who holds them; what is left goes to ``other``.
        variables: those of cells that hold most besides, with their bytes, the largest first.
        with_graph: variables that keep what their backward pass would need, which is among their bytes.
    """

    held: dict[str, int]
    variables: tuple[tuple[str, int], ...] = ()
    with_graph: tuple[str, ...] = ()

    @property
    def notable(self) -> dict[str, int]:
        """The bytes of variables that hold a tenth of all, or 2 % for a backward pass that will not come."""
        live = sum(self.held.values()) + sum(nbytes for _, nbytes in self.variables)
        return {
            name: nbytes
            for name, nbytes in self.variables
            if nbytes >= live * (_NOTABLE_WITH_GRAPH if name in self.with_graph else _NOTABLE)
        }
