"""The targets of logs: what other programs read, and the names under which numbers are logged."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from pathlib import Path
from typing import Any, Protocol

from ..report.configurations import Tried
from ..report.run_summary import Evaluation
from ..shared.errors import InvalidInput
from ..shared.messages import Sample
from .history import Event

_GIB = 2**30


class Target(Protocol):
    """The destination of a log. Used by one thread; whatever a method raises ends the log, and is told.

    Times are seconds since 1970.

    Attributes:
        about: what is written where, and how to look at it, in one line.
    """

    about: str

    def new_run(self, number: int) -> None:
        """Steps of something else follow, from the first on; runs count from 1, and the first is there already."""

    def go_on_from(self, step: int) -> None:
        """This step follows: what an earlier log in the same place has of it and of later ones is of no worth."""

    def settings(self, time_s: float, step: int, tried: Tried) -> None:
        """The settings of the steps after this one."""

    def step(self, time_s: float, samples: Sequence[Sample]) -> None:
        """One step: the samples of all ranks, perhaps of one that was discarded."""

    def evaluation(self, time_s: float, evaluation: Evaluation) -> None:
        """Loss and metrics on the validation data."""

    def event(self, time_s: float, event: Event) -> None:
        """A flip, an error, or whatever else is marked."""

    def flush(self) -> None:
        """Let what was written be on the disk."""

    def close(self) -> None:
        """Nothing follows."""


def of_step(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the numbers of one finished step by their tags: those of each rank, and one of all where one is wanted."""
    losses = [sample.loss for sample in samples if sample.loss is not None]
    tags: dict[str, float] = {"loss/mean": statistics.fmean(losses)} if losses else {}
    tags["samples_per_s/all"] = sum(sample.samples_per_s for sample in samples)
    tags["step_s/slowest"] = max(sample.step_s for sample in samples)
    for sample in samples:
        of_rank = {
            "loss": sample.loss,
            "step_s": sample.step_s,
            "memory/live_peak_gib": sample.live_peak_bytes / _GIB,
            "memory/reserved_peak_gib": sample.reserved_peak_bytes / _GIB,
            "memory/device_used_gib": None if sample.device_used_bytes is None else sample.device_used_bytes / _GIB,
        }
        tags |= {f"{name}/rank{sample.rank}": value for name, value in of_rank.items() if value is not None}
    return tags


def of_evaluation(evaluation: Evaluation) -> dict[str, float]:
    """Return the numbers of an evaluation by their tags."""
    return {f"eval/{name}": value for name, value in {"loss": evaluation.loss, **evaluation.metrics}.items()}


def of_settings(tried: Tried) -> dict[str, float]:
    """Those settings that are numbers, by their tags."""
    numbers = {name: value for name, value in tried.settings.as_dict().items() if isinstance(value, int | float)}
    return {f"settings/{name}": float(value) for name, value in numbers.items()}


class EventFiles:
    """Writes event files into a folder; further runs get folders beside it, ``…-2`` and so on.

    One step is one event with all its numbers, which costs a tenth of what an event for each number does.

    Raises:
        InvalidInput: the package is missing, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
            from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise InvalidInput(
                "TensorBoard event files need a package that is not installed. Type: pip install tensorboard"
            ) from None
        self._open: Any = EventFileWriter
        self._events, self._summaries = event_pb2, summary_pb2
        self._tensors, self._shape = tensor_pb2, tensor_shape_pb2.TensorShapeProto
        plugin = summary_pb2.SummaryMetadata.PluginData(
            plugin_name="text", content=TextPluginData(version=0).SerializeToString()
        )
        self._shown_as_text = summary_pb2.SummaryMetadata(plugin_data=plugin)
        self._folder = folder
        self.about = f"TensorBoard event files in {folder} (tensorboard --logdir {folder.parent})"
        self._writer: Any = self._opened(folder)

    def new_run(self, number: int) -> None:
        """Go on in a folder of its own."""
        self._writer.close()
        self._writer = self._opened(self._folder.with_name(f"{self._folder.name}-{number}"))

    def go_on_from(self, step: int) -> None:
        """TensorBoard shows nothing of earlier files from this step on."""
        log = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(session_log=log, step=step, wall_time=time.time()))

    def settings(self, time_s: float, step: int, tried: Tried) -> None:
        """Numbers as scalars, and all of them as text."""
        self._scalars(of_settings(tried), step, time_s)
        self._text("settings", f"{tried.workload}: {tried.settings}", step, time_s)

    def step(self, time_s: float, samples: Sequence[Sample]) -> None:
        """The scalars of a finished step; a discarded one has none."""
        if samples[0].done:
            self._scalars(of_step(samples), samples[0].step, time_s)

    def evaluation(self, time_s: float, evaluation: Evaluation) -> None:
        """Scalars."""
        self._scalars(of_evaluation(evaluation), evaluation.step, time_s)

    def event(self, time_s: float, event: Event) -> None:
        """Text."""
        self._text("events", f"{event.kind}: {event.text}", event.step, time_s)

    def flush(self) -> None:
        """Wait until the events are written."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _scalars(self, numbers: Mapping[str, float], step: int, time_s: float) -> None:
        value = self._summaries.Summary.Value
        self._add([value(tag=tag, simple_value=number) for tag, number in numbers.items()], step, time_s)

    def _text(self, tag: str, text: str, step: int, time_s: float) -> None:
        """As ``SummaryWriter.add_text`` writes it."""
        tensor = self._tensors.TensorProto(
            dtype="DT_STRING", string_val=[text.encode()], tensor_shape=self._shape(dim=[self._shape.Dim(size=1)])
        )
        value = self._summaries.Summary.Value
        self._add([value(tag=f"{tag}/text_summary", metadata=self._shown_as_text, tensor=tensor)], step, time_s)

    def _add(self, values: Sequence[Any], step: int, time_s: float) -> None:
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(summary=summary, step=step, wall_time=time_s))

    def _opened(self, folder: Path) -> Any:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return self._open(str(folder), max_queue_size=1000)
        except OSError as error:
            raise InvalidInput(f"{folder} cannot be written: {error}. Give another folder, such as runs/a.") from None


_TYPES = ("settings", "step", "eval", "event")


class JsonLines:
    """Appends to a file. ``type`` is ``settings``, ``step`` (one rank's part of it), ``eval`` or ``event``.

    Bytes, seconds and names are as in :class:`Sample`, :class:`Evaluation` and :class:`Event`; ``time`` is seconds
    since 1970, and a number that is not finite is text (``nan``, ``inf``, ``-inf``), for JSON has no such numbers.
    ``run`` goes on from what an earlier log has left in the file: no number is of two.

    Raises:
        InvalidInput: the file cannot be written, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.about = f"JSON lines in {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _check(path)
            self._before, cut_short = _end_of(path)
            self._file = path.open("a", encoding="utf-8")
            self._file.write("\n" * cut_short)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{path} cannot be written: {error}. Give another file, such as run.jsonl.") from None
        self.new_run(1)

    def new_run(self, number: int) -> None:
        """The lines from here on are of another run."""
        self._run = self._before + number

    def go_on_from(self, step: int) -> None:
        """Nothing: the event of resuming says it."""

    def settings(self, time_s: float, step: int, tried: Tried) -> None:
        """One line."""
        named = {"settings_id": tried.settings_id, "workload": tried.workload}
        self._write("settings", time_s, {"step": step, **named, **tried.settings.as_dict()})

    def step(self, time_s: float, samples: Sequence[Sample]) -> None:
        """A line for each rank."""
        for sample in samples:
            values = {name: getattr(sample, name) for name in _SAMPLE}
            if sample.times:
                values |= sample.times.columns
            if sample.ledger:
                values["at_peak"] = sample.ledger.at_peak
            self._write("step", time_s, values)

    def evaluation(self, time_s: float, evaluation: Evaluation) -> None:
        """One line."""
        self._write("eval", time_s, dataclasses.asdict(evaluation))

    def event(self, time_s: float, event: Event) -> None:
        """One line."""
        self._write("event", time_s, dataclasses.asdict(event))

    def flush(self) -> None:
        """Hand the lines to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file; what the disk has no room for is lost."""
        self._file.close()

    def _write(self, kind: str, time_s: float, values: dict[str, Any]) -> None:
        line = {"type": kind, "time": round(time_s, 6), "run": self._run}
        line |= {name: value for name, value in values.items() if name != "time_s"}
        self._file.write(json.dumps(_finite(line), default=str) + "\n")


_SAMPLE = tuple(field.name for field in dataclasses.fields(Sample) if field.name not in ("time_s", "ledger", "times"))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return {name: _finite(item) for name, item in value.items()} if isinstance(value, dict) else value


def _check(path: Path) -> None:
    """Refuse to append to a file that is not a log: a slip of the finger must not cost a notebook."""
    if not path.is_file() or not os.path.getsize(path):
        return
    with path.open(encoding="utf-8") as file:
        first = file.readline(10_000)
    try:
        known = json.loads(first)["type"] in _TYPES
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise InvalidInput(f"{path} holds something else than a log. Give another file, such as run.jsonl.")


def _end_of(path: Path) -> tuple[int, bool]:
    """Return the number of the run that a log ends with, 0 where there is none; and whether its last line was cut."""
    if not path.is_file():
        return 0, False
    with path.open("rb") as file:
        file.seek(max(0, os.path.getsize(path) - 2 * _LONGEST_LINE))
        end = file.read()
    cut_short = not end.endswith(b"\n") and bool(end)
    for line in reversed(end.splitlines()):
        with suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["run"]), cut_short
    return 0, cut_short


_LONGEST_LINE = 2**16  # bytes, and more than any has


class TrackioRun:
    """Logs to ``project`` or ``project/name``; further runs are called ``name-2`` and so on.

    A run of the same name is gone on with. No dashboard is started and nothing is measured by trackio itself; where its
    own environment variables name a server or a Space, it sends to that.

    Raises:
        InvalidInput: the package is missing, or trackio refuses the name.
    """

    NAME = "run"  # where only a project is named

    def __init__(self, target: str) -> None:
        try:
            import trackio
        except ImportError:
            raise InvalidInput("trackio is not installed. Type: pip install trackio") from None
        self._trackio: Any = trackio
        self._project, _, name = target.partition("/")
        self._name = name or self.NAME
        self.about = f"run {self._name} of the trackio project {self._project} (trackio show --project {self._project})"
        self._run = self._opened(self._name)

    def new_run(self, number: int) -> None:
        """Go on under a name of its own."""
        self._run.finish()
        self._run = self._opened(f"{self._name}-{number}")

    def go_on_from(self, step: int) -> None:
        """Nothing: trackio takes no step back."""

    def settings(self, time_s: float, step: int, tried: Tried) -> None:
        """Numbers as metrics."""
        self._run.log(dict(of_settings(tried)), step=step)

    def step(self, time_s: float, samples: Sequence[Sample]) -> None:
        """The metrics of a finished step; a discarded one has none."""
        if samples[0].done:
            self._run.log(dict(of_step(samples)), step=samples[0].step)

    def evaluation(self, time_s: float, evaluation: Evaluation) -> None:
        """Metrics."""
        self._run.log(dict(of_evaluation(evaluation)), step=evaluation.step)

    def event(self, time_s: float, event: Event) -> None:
        """A text beside the metrics."""
        self._run.log({"events": f"{event.kind}: {event.text}"}, step=event.step)

    def flush(self) -> None:
        """Nothing: trackio's own thread sends several times a second."""

    def close(self) -> None:
        """Wait for trackio to write what it has."""
        self._run.finish()

    def _opened(self, name: str) -> Any:
        try:
            # In a context of its own: in the notebook's, it would replace a run that a cell logs to there.
            return Context().run(
                self._trackio.init,
                self._project,
                name=name,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except ValueError as error:
            raise InvalidInput(f"trackio refuses the project {self._project!r}: {error}") from None
