"""A log as TensorBoard event files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...report.configurations import Tried
from ...report.evaluation import Evaluation
from ...shared.errors import InvalidInput
from ...shared.messages import Sample
from ..history import Event
from .target import of_evaluation, of_settings, of_step


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
