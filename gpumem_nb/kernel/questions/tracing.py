"""One file of what all ranks did in some steps: they record, write their parts on one clock, and send them in turn."""

from __future__ import annotations

import gzip
import os
import statistics
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ...report.step_time import behind
from ...report.written import TraceFile, check_over, steps_in_words, written_over
from ...shared.answers import Progress
from ...shared.errors import GpumemError, InvalidInput, WorkloadError
from ...shared.messages import RankInfo
from ...shared.questions import BETWEEN, HEAD, TAIL, TIMELINE, TraceOrder, TracePart
from ...shared.state_file import as_path
from ...shared.step_times import StepLanes
from ...shared.units import as_whole
from ..cluster import AsksRanks

MOST_STEPS = 100  # a viewer opens no more of them
_RECORDED, _WRITTEN = 0.4, 0.6  # shares of the time that it takes, about
_TRACE = "a trace of gpumem_nb"
_GZIP = 31  # how zlib is told that a gzip file comes


class Tracing(AsksRanks):
    """Writes traces of one cluster."""

    def trace(self, path: str | os.PathLike[str], steps: int, progress: Progress) -> TraceFile:
        """Train some steps and write what all ranks did in them.

        Raises:
            InvalidInput: no number of steps that could be recorded, or a file that cannot be written.
            WorkloadError: nothing is loaded, or a rank could not record.
            TrainingFailed: a step could not be done.
        """
        if (count := as_whole(steps, 1, MOST_STEPS)) is None:
            raise InvalidInput(f"{steps!r} steps cannot be traced: write a whole number from 1 to {MOST_STEPS}.")
        if before := os.environ.get(TIMELINE):
            raise InvalidInput(
                f"Horovod writes a timeline already ({TIMELINE}={before}), and can write one only: take that out of "
                "os.environ, then %hvd_restart."
            )
        target = as_path(path)
        self._foreground.check_loaded()
        check_over(target, _ours, _TRACE)
        self._foreground.call("check_trace")
        with written_over(target, _ours, _TRACE) as whole, _maybe_packed(whole, target) as file:
            try:
                lanes = self._recorded(count, progress)
                events = self._gathered(file, lanes, progress)
            finally:  # also after an interrupt; ranks that are gone have nothing left
                with suppress(GpumemError):
                    self._foreground.ask("drop_trace")
        size_bytes = target.stat().st_size
        done = tuple(lane.step for lane in lanes[0])
        return TraceFile(target, done, count, len(lanes), events, size_bytes)

    def _recorded(self, steps: int, progress: Progress) -> list[tuple[StepLanes, ...]]:
        """Train them; the steps of each rank, as they happened by the clock of its host."""
        what = f"recording {steps} step{'s' if steps > 1 else ''} of {len(self._ranks)} ranks"

        def meanwhile() -> None:
            report = self._foreground.wait_report
            progress(f"{what}: {report.text}" if report else what, 0.0)

        with self._foreground.interruptible():
            lanes = [reply.lanes for reply in self._training.requests.trace(steps, meanwhile)]
        self._history.mark(
            "note", f"traced, which slows steps down: {steps_in_words(tuple(lane.step for lane in lanes[0]))}"
        )
        return lanes

    def _gathered(self, file: IO[bytes], lanes: Sequence[Sequence[StepLanes]], progress: Progress) -> int:
        """Let ranks write their parts, and put these together; says how many events there are."""
        progress("ranks write what they recorded", _RECORDED)
        order = _order(self._ranks, lanes)
        with self._foreground.telling(lambda what, _: progress(what, _RECORDED)):
            parts: list[TracePart] = self._foreground.call_alone("write_trace", order)
        for rank, part in enumerate(parts):
            if part.problem:
                raise WorkloadError(f"Rank {rank}: {part.problem}. The steps were trained, but no trace was written.")
        file.write(HEAD)
        total, done = sum(part.size_bytes for part in parts), 0
        for rank, part in enumerate(parts):
            file.write(BETWEEN if rank else b"")

            def piece(offset: int, rank: int = rank, before: int = done) -> bytes:
                progress(f"gathering the part of rank {rank}", _WRITTEN + (1 - _WRITTEN) * (before + offset) / total)
                (read,) = self._foreground.call("read_trace", offset, ranks=[rank])
                return bytes(read)

            for text in unpacked(rank, part.size_bytes, piece):
                file.write(text)
            done += part.size_bytes
        file.write(TAIL)
        return sum(part.events for part in parts)


def unpacked(rank: int, size_bytes: int, piece: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield what the part of a rank holds; ``piece`` reads some of its ``size_bytes`` compressed bytes from an offset.

    Raises:
        WorkloadError: the part ends before that, or is damaged.
    """
    unpacking, read = zlib.decompressobj(_GZIP), 0
    with suppress(zlib.error):
        while read < size_bytes and (packed := piece(read)):
            read += len(packed)
            yield unpacking.decompress(packed)
    if not unpacking.eof:
        raise WorkloadError(
            f"The part of rank {rank} is cut short or damaged: {read} of {size_bytes} bytes could be read. "
            "No trace was written. Free some room on the disk of temporary files, then trace again."
        )


def _order(ranks: Sequence[RankInfo], lanes: Sequence[Sequence[StepLanes]]) -> TraceOrder:
    """Return one clock for all hosts: of several steps the middle one says best by how much theirs differ."""
    hosts = [info.host for info in ranks]
    by_step = [behind(of_step, hosts) for of_step in zip(*lanes, strict=True)]
    later_s = tuple(statistics.median(of_step[info.rank] for of_step in by_step) for info in ranks)
    origin_s = min(of_rank[0].parts[0].began_s + later_s[rank] for rank, of_rank in enumerate(lanes))
    titles = tuple(f"rank {info.rank} ({info.host}, {info.device_name})" for info in ranks)
    return TraceOrder(titles, later_s, origin_s)


def _ours(file: IO[bytes]) -> bool:
    begin = file.read(len(HEAD))
    with suppress(OSError, EOFError, zlib.error):
        file.seek(0)
        begin = gzip.GzipFile(fileobj=file).read(len(HEAD))
    return begin == HEAD


@contextmanager
def _maybe_packed(file: IO[bytes], path: Path) -> Iterator[Any]:
    """Compresses what is written, if the file's name says so."""
    if path.suffix != ".gz":
        yield file
        return
    with gzip.GzipFile(path.stem, "wb", compresslevel=6, fileobj=file) as packed:
        yield packed
