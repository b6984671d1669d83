"""Records steps of one rank: torch's profiler and Horovod's timeline are on for them, and for nothing else."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from ...internals.horovod_internals import read_timeline
from ...internals.profiler_internals import profiles, read_profile
from ...shared.questions import BETWEEN, TIMELINE, TraceOrder, TracePart
from ...shared.step_times import StepLanes
from ..link.communicator import here
from ..link.horovod import stop_timeline
from ..together.interrupts import interruptible
from .events import Event, horovod_events, moved, step_events, torch_events, window_of

PIECE_BYTES = 4 * 2**20
_MICRO = 10**6


class Tracer:
    """The recorder of one rank, in a folder of its own that is gone with the cluster at the latest.

    Args:
        rejoin: shuts Horovod down and joins the other ranks again, which takes some milliseconds.
        on_gpu: whether this rank computes on one.
    """

    def __init__(self, rejoin: Callable[[], None], on_gpu: bool) -> None:
        self._rejoin = rejoin
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._folder: Path | None = None
        self._lanes: Sequence[StepLanes] = ()
        self._zero_ns = 0  # of the clock that lanes have, in nanoseconds since 1970
        self._problem = ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, everything is recorded. All ranks come here together."""
        self.drop()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="trace.", dir=os.environ["IPP_PROFILE_DIR"]))
        except OSError as error:
            self._problem = f"no folder for it could be made ({error})"
        with self._profiled(), self._timeline():  # Horovod last: joining anew lets all ranks begin together
            yield

    def took(self, lanes: Sequence[StepLanes]) -> None:
        """These steps were recorded; without any there is nothing to keep."""
        self._lanes = lanes
        if not lanes:
            self.drop()

    def write(self, order: TraceOrder) -> TracePart:
        """Write this rank's part for :meth:`read`; a problem says why there is none."""
        if self._problem or self._folder is None:
            return TracePart(problem=self._problem or "nothing was recorded")
        file, count = self._folder / "part.gz", 0
        later_us = _MICRO * (order.later_s[self._lanes[0].rank] - order.origin_s)
        try:
            with interruptible(), gzip.open(file, "wb", compresslevel=3) as part:
                for count, event in enumerate(self._events(self._folder, order), 1):
                    part.write((BETWEEN if count > 1 else b"") + _as_json(moved(event, later_us)))
            return TracePart(count, file.stat().st_size)
        except (OSError, ValueError) as error:
            return TracePart(problem=f"what was recorded cannot be read or written ({error})")

    def read(self, offset: int) -> bytes:
        """Return a piece of what was written, from there on."""
        assert self._folder
        with open(self._folder / "part.gz", "rb") as part:
            part.seek(offset)
            return part.read(PIECE_BYTES)

    def drop(self) -> None:
        """Keep nothing of what was recorded."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._lanes, self._problem = None, (), ""

    def _events(self, folder: Path, order: TraceOrder) -> Iterable[Event]:
        rank, window = self._lanes[0].rank, window_of(self._lanes)
        yield from step_events(self._lanes, order.titles[rank])
        yield from torch_events(read_profile((folder / "torch.json").read_text(), self._zero_ns), rank, window)
        if rank == 0:
            timeline = read_timeline((folder / "horovod.json").read_text(), self._zero_ns / 1000)
            yield from horovod_events(timeline, len(order.titles), window)

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its log is that of the ranks, which is read when one dies
        profiler, begun = profile(activities=self._activities), False
        if profiles():
            self._problem = "torch's profiler is on there already. Let the cell that began it end it: prof.stop()"
        elif self._folder:
            with self._noting_problems("torch's profiler could not begin"):
                profiler.start()
                begun = True
        try:
            yield
        finally:
            if begun and self._folder:
                with self._noting_problems("torch's profiler could not end"):
                    profiler.stop()
                    self._zero_ns = time.time_ns() - time.perf_counter_ns()
                    profiler.export_chrome_trace(str(self._folder / "torch.json"))

    @contextmanager
    def _noting_problems(self, what: str) -> Iterator[None]:
        """An error inside is not a reason to fail a step."""
        try:
            yield
        except Exception as error:
            self._problem = f"{what} ({type(error).__name__}: {error})"

    @contextmanager
    def _timeline(self) -> Iterator[None]:
        before = os.environ.get(TIMELINE)
        try:
            self._join_with(str(self._folder / "horovod.json") if self._folder else os.devnull)
            yield
        finally:
            self._join_with(before)

    def _join_with(self, timeline: str | None) -> None:
        """Let Horovod write its timeline there from now on, or nowhere.

        Ranks that have come apart are left apart: the kernel joins them, and Horovod reads its environment then.
        """
        try:
            here().any_rank(False, "trace")
            stop_timeline()  # what is not written yet would be lost
            together = True
        except (RuntimeError, ValueError):
            together = False
        if timeline is None:
            os.environ.pop(TIMELINE, None)
        else:
            os.environ[TIMELINE] = timeline
        if together:
            self._rejoin()


def _as_json(event: Event) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()
