"""How the ranks' devices look while no chunk tells it."""

from __future__ import annotations

from ...cluster.calls import Call
from ...cluster.ranks import Ranks
from ...shared.answers import Pulse
from ..history import History


class DeviceReadings:
    """Keeps the history's readings up to date. Used by the training thread alone."""

    def __init__(self, ranks: Ranks, history: History) -> None:
        self._ranks = ranks
        self._history = history
        self._asked: Call | None = None
        self._heard: dict[int, Pulse] = {}

    def hear(self) -> None:
        """Readings come with the pulses of ranks that are busy for long."""
        pulses = self._ranks.pulses()
        if pulses and pulses != self._heard:
            self._heard = pulses
            readings, uses = list(self._history.readings), list(self._history.device_uses)
            for rank, pulse in pulses.items():
                readings[rank], uses[rank] = pulse.reading, pulse.device_use
            self._history.read(readings, uses)

    def ask(self) -> None:
        """Keep readings coming while cells run and nothing trains; at most one question is under way."""
        if self._asked is None:
            self._asked = self._ranks.call("look")
        elif not self._asked.pending():
            finished, self._asked = self._asked, None
            self._history.read(*zip(*finished.get(), strict=True))
