"""A log as JSON lines: one object a line, with a ``type``."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...report.configurations import Tried
from ...report.evaluation import Evaluation
from ...shared.errors import InvalidInput
from ...shared.messages import Sample
from ..history import Event

_TYPES = ("settings", "step", "eval", "event")


class JsonLines:
    """Appends to a file. ``type`` is ``settings``, ``step`` (one rank's part of it), ``eval`` or ``event``.

    Bytes, seconds and names are as in :class:`Sample`, :class:`Evaluation` and :class:`Event`; ``time`` is seconds
    since 1970, and a number that is not finite is text (``nan``, ``inf``, ``-inf``), for JSON has no such numbers.

    Raises:
        InvalidInput: the file cannot be written, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.about = f"JSON lines in {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _check(path)
            self._file = path.open("a", encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{path} cannot be written: {error}. Give another file, such as run.jsonl.") from None
        self._run = 1

    def new_run(self, number: int) -> None:
        """The lines from here on are of another run."""
        self._run = number

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
