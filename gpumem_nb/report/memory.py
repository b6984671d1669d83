"""The memory report: live, reserved and device bytes of every rank, and what they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..shared.errors import InvalidInput, nearest
from ..shared.messages import DeviceUse, Ledger, RankInfo, Reading, Timeline
from ..shared.readings import METRICS, LiveBytes
from ..shared.units import format_bytes
from .breakdown import (
    UNEXPLAINED,
    WITHOUT_MODULE,
    by_module,
    category_table,
    device_table,
    module_table,
    not_explained,
    ranks_by_category,
    reasons,
    timeline_table,
)
from .freed import held_by_cells
from .tables import Report, Table

if TYPE_CHECKING:
    import pandas as pd

VIEWS = ("category", "module")

_LIVE = "Live is held by tensors; a peak is the highest since the last reset."
_RESERVED = (
    "Reserved is more than live: the caching allocator rounds sizes up and keeps freed memory for later, some of it in "
    "pieces too small to use (reserved − live)."
)
_DEVICE = (
    "Device used is more than reserved: it counts each process's CUDA context and libraries, and other processes too."
)
_VIRTUAL = (
    "Virtual: CPU tensors accounted as on a GPU; reserved is modelled after the CUDA caching allocator and is all that "
    "a virtual device has in use."
)
_NOT_READ = "n/a means that it could not be read."
_NO_LEDGER = "What the bytes are made of is known once a step has been trained: %hvd_train."
_TENSORS_ONLY = "Only tensors were seen: memory inside operators is missing from the categories."
_TOO_MANY = (
    "The step made more than four million allocations and releases: what those after that held counts as inside "
    "operators."
)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's device and what it read; ``ledger`` is that of the latest recorded step."""

    info: RankInfo
    reading: Reading
    ledger: Ledger | None = None
    device_use: DeviceUse | None = None

    @property
    def kind(self) -> str:
        """``virtual`` or ``real``."""
        return "virtual" if self.info.virtual else "real"

    @property
    def byte_values(self) -> dict[str, int | None]:
        """The columns of bytes by their names in the frame, in the order in which they are shown.

        ``fragmentation_bytes`` are reserved and not held by any tensor.
        """
        known = dataclasses.asdict(self.reading)
        known["fragmentation_bytes"] = self.reading.reserved_bytes - self.reading.live_bytes
        return {name: known[name] for name in _HEADINGS}


_HEADINGS = {
    "live_bytes": "live",
    "live_peak_bytes": "live peak",
    "reserved_bytes": "reserved",
    "reserved_peak_bytes": "reserved peak",
    "fragmentation_bytes": "reserved − live",
    "device_used_bytes": "device used",
    "limit_bytes": "limit",
}


@dataclass(frozen=True, slots=True, repr=False)
class MemoryReport(Report):
    """The memory of every rank, in rank order.

    ``by`` chooses what the peak is broken down into when the report is shown: the worst rank's categories (``None``),
    those of all ranks (``category``), or the worst rank's modules (``module``). ``timelines`` are recorded steps,
    ``live`` says of each rank who holds its live bytes now.

    Raises:
        InvalidInput: ``by`` is none of these.
    """

    ranks: tuple[RankMemory, ...]
    by: str | None = None
    timelines: tuple[Timeline, ...] = ()
    live: tuple[LiveBytes, ...] = ()

    def __post_init__(self) -> None:
        check_view(self.by)

    @property
    def worst(self) -> RankMemory | None:
        """The rank whose recorded peak is the largest share of its limit; ``None`` before any was recorded."""
        return next(iter(self._worst_first), None)

    @property
    def _worst_first(self) -> list[RankMemory]:
        known = [rank for rank in self.ranks if rank.ledger]
        return sorted(known, key=lambda rank: -_share(rank.ledger, rank.reading.limit_bytes))

    @property
    def worst_timeline(self) -> Timeline | None:
        """The recorded step of the rank with the largest share of its limit at the peak."""
        limits = {rank.info.rank: rank.reading.limit_bytes for rank in self.ranks}
        return max(self.timelines, key=lambda line: _share(line.ledger, limits.get(line.rank)), default=None)

    def frame(self, by: str | None = None) -> pd.DataFrame:
        """Return the report as data; bytes are nullable integers, ``<NA>`` where they could not be read.

        Args:
            by: ``None`` for one row per rank, ``category`` or ``module`` for what the peaks are made of, ``timeline``
                for the recorded steps.

        Raises:
            InvalidInput: ``by`` is none of these.
        """
        if by is None:
            return _frame(self.records)
        if by not in _FRAMES:
            raise InvalidInput(f"by={by!r} is not known: {nearest(str(by), list(_FRAMES))}.")
        rows_of, columns = _FRAMES[by]
        parts: Iterable[Any] = self.timelines if by == "timeline" else self.ranks
        return _frame([row for one in parts for row in rows_of(one)], columns)

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each rank."""
        return [self._row(rank) for rank in self.ranks]

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return why the numbers differ, and which readings are missing and why."""
        most = max((rank.ledger for rank in self.ranks if rank.ledger), key=lambda one: one.host_bytes, default=None)
        lacking = any(value is None for rank in self.ranks for value in rank.byte_values.values())
        return (
            *why_they_differ([rank.info for rank in self.ranks]),
            *([_NOT_READ] if lacking else []),
            *reasons([(rank.info.rank, rank.device_use) for rank in self.ranks if rank.device_use]),
            *dict.fromkeys(rank.info.note for rank in self.ranks if rank.info.note),
            *([_on_host(most)] if most and most.host_bytes else []),
        )

    @property
    def shown(self) -> list[Table | str]:
        """The devices, then what the peaks are made of, as far as a step was recorded."""
        headings = ("rank", "device", "kind", *_HEADINGS.values())
        rows = tuple(
            (str(r.info.rank), r.info.device_name, r.kind, *map(format_bytes, r.byte_values.values()))
            for r in self.ranks
        )
        shown: list[Table | str] = [Table("", headings, rows, frozenset(headings[:3]))]
        if uses := [(r.info.rank, r.reading.reserved_bytes, r.device_use) for r in self.ranks if r.device_use]:
            shown.append(device_table(uses))
        shown += [*self.sentences, *dict.fromkeys(filter(None, map(held_by_cells, self.live)))]
        if timeline := self.worst_timeline:
            shown.append(timeline_table(timeline))
        worst = self.worst
        if worst is None or worst.ledger is None:
            return [*shown, _NO_LEDGER]
        if self.by == "category":
            shown.append(ranks_by_category({one.info.rank: one.ledger for one in self._worst_first if one.ledger}))
        else:
            table = module_table if self.by == "module" else category_table
            shown.append(table(worst.info.rank, worst.ledger))
        return [*shown, *([] if worst.ledger.exact else [_TOO_MANY if worst.ledger.virtual else _TENSORS_ONLY])]

    def _row(self, rank: RankMemory) -> dict[str, Any]:
        info, use, ledger = rank.info, rank.device_use or DeviceUse(), rank.ledger
        return {
            "rank": info.rank,
            "host": info.host,
            "device": info.device_name,
            "kind": rank.kind,
            **rank.byte_values,
            **{column: getattr(use, name) for name, column in _metric_columns().items()},
            "peak_bytes": ledger.peak_bytes if ledger else None,
            "peak_phase": ledger.phase if ledger else None,
            "peak_module": ledger.module if ledger else None,
            "host_peak_bytes": ledger.host_bytes if ledger else None,
            "host_state_bytes": ledger.host_state_bytes if ledger else None,
        }


def _on_host(ledger: Ledger) -> str:
    knobs = ["offload_activations=on"] if ledger.host_bytes > ledger.host_state_bytes else []
    knobs += ["offload_optimizer=on"] if ledger.host_state_bytes else []
    return (
        f"Up to {format_bytes(ledger.host_bytes)} waited in host memory ({', '.join(knobs)}), of "
        f"{format_bytes(ledger.host_limit_bytes)} that a rank may use there. They count for no device."
    )


def why_they_differ(ranks: Sequence[RankInfo]) -> tuple[str, ...]:
    """Return a sentence each about live, reserved and device bytes of these ranks."""
    real, virtual = not all(info.virtual for info in ranks), any(info.virtual for info in ranks)
    return (_LIVE, _RESERVED, *([_DEVICE] if real else []), *([_VIRTUAL] if virtual else []))


def check_view(by: object) -> None:
    """Refuse what a peak cannot be broken down into.

    Raises:
        InvalidInput: neither ``None`` nor one of ``VIEWS``.
    """
    if by is not None and not (isinstance(by, str) and by in VIEWS):
        raise InvalidInput(f"by={by!r} is not known: {nearest(str(by), VIEWS)}.")


# What columns of readings are called where it isn't the reading's own name; None for what the frame has without NVML.
_METRIC_COLUMNS = {
    **{"used_bytes": None, "total_bytes": None},
    **{"other_bytes": "others_bytes", "temperature_c": "temperature_celsius", "power_w": "power_watts"},
}


def _metric_columns() -> dict[str, str]:
    """Return the frame's column of each reading."""
    columns = {name: _METRIC_COLUMNS.get(name, name) for name in METRICS}
    return {name: column for name, column in columns.items() if column}


def _share(ledger: Ledger | None, limit: int | None) -> float:
    return ledger.peak_bytes / (limit or 1) if ledger else 0.0


def _category_rows(rank: RankMemory) -> Iterator[dict[str, Any]]:
    if ledger := rank.ledger:
        missing = not_explained(ledger)
        for name, size in {**ledger.at_peak, **({UNEXPLAINED: missing} if missing else {})}.items():
            yield _of_peak(rank, ledger, size) | {"category": name, "rest_bytes": ledger.at_rest.get(name)}


def _module_rows(rank: RankMemory) -> Iterator[dict[str, Any]]:
    if ledger := rank.ledger:
        for module, category, size in by_module(ledger):
            named = "" if module == WITHOUT_MODULE else module
            yield _of_peak(rank, ledger, size) | {"module": named, "category": category}


def _of_peak(rank: RankMemory, ledger: Ledger, size: int) -> dict[str, Any]:
    share = size / ledger.peak_bytes if ledger.peak_bytes else None
    return {"rank": rank.info.rank, "peak_bytes": size, "share": share}


def _timeline_rows(line: Timeline) -> Iterator[dict[str, Any]]:
    spans, at = line.spans, 0
    for i, moment in enumerate(line.time_ms):
        while at + 1 < len(spans) and spans[at].end_ms <= moment:
            at += 1
        place = {"phase": spans[at].phase, "module": spans[at].module} if spans else {}
        when = {"rank": line.rank, "step": line.step, "time_ms": moment, **place}
        yield from (when | {"category": name, "live_bytes": values[i]} for name, values in line.live_bytes.items())


# How what a peak is made of becomes rows, and the columns of these.
_FRAMES: dict[str, tuple[Callable[[Any], Iterator[dict[str, Any]]], tuple[str, ...]]] = {
    "category": (_category_rows, ("rank", "category", "peak_bytes", "share", "rest_bytes")),
    "module": (_module_rows, ("rank", "module", "category", "peak_bytes", "share")),
    "timeline": (_timeline_rows, ("rank", "step", "time_ms", "phase", "module", "category", "live_bytes")),
}


def _frame(rows: list[dict[str, Any]], columns: tuple[str, ...] | None = None) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame(rows, columns=columns)
    readings = {column for name, column in _metric_columns().items() if METRICS[name].whole}
    whole = [name for name in frame.columns if name.endswith("_bytes") or name in readings]
    return frame.astype(dict.fromkeys(whole, "Int64"))
