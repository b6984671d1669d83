"""The plan of automatic snapshots, and their cost so far."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ..shared import snapshot_folder
from ..shared.messages import ChunkReply, SnapshotOrder, Stored
from ..shared.units import format_bytes
from ..shared.workload import WorkloadInfo
from .policy import Policy

# Of training time. Half of the promised 1 %, because what writing does to caches and memory bandwidth is not measured.
LARGEST_SHARE = 0.005
FEWEST_STEPS = 50
# Before the first one is measured: parameters, and twice as much optimizer state, at the pace of a slow disk.
_GUESSED_BYTES_PER_S = 300e6


class SnapshotPlan:
    """Decides which chunk begins with a snapshot: the first after a flip, and every so many steps.

    Used by the training thread under its lock, and by loading and saving while nothing trains.

    Attributes:
        generation: counts the workloads that were loaded or resumed; part of a snapshot's name.
        latest: the last snapshot that was written.
        problem: why the last one that was asked for could not be kept; empty if it was.
        expected_s: what the next one will cost.

    Args:
        folder: the session's own.
        policy: the rules as they are now.
        note: told in words when no snapshot could be kept.
    """

    def __init__(self, folder: Path, policy: Callable[[], Policy], note: Callable[[str], None]) -> None:
        self.folder = folder
        self.generation = 0
        self._policy = policy
        self._note = note
        self.problem = ""
        self._options: dict[str, float] | None = None
        self.latest: Stored | None = None
        self.expected_s = 0.0
        self._asked_at = 0
        self._before_flip = False
        self._writing = False
        self._trained_s = 0.0
        self._cost_s = 0.0
        self._held_up_s = 0.0
        self._unfit_bytes = 0

    def begin(self, workload: WorkloadInfo, steps: int, options: dict[str, float] | None) -> None:
        """A workload was loaded or resumed; snapshots of what was there before are not of it."""
        self.generation += 1
        self._options = options
        self.latest, self._asked_at = None, steps
        self.expected_s = 3 * workload.parameter_bytes / _GUESSED_BYTES_PER_S
        self._before_flip = self._writing = False
        self._trained_s = self._cost_s = 0.0
        self._unfit_bytes = 0

    @property
    def space(self) -> int:
        """Bytes that snapshots may take."""
        space_bytes: int = self._policy().snapshot_space
        return space_bytes

    def flip(self) -> None:
        """The next chunk changes settings."""
        self._before_flip = True

    def steps_left(self, steps: int) -> float:
        """Return the steps that the next chunk may have so as not to pass the moment for a snapshot."""
        every = self._policy().snapshot_steps
        return max(1, self._asked_at + every - steps) if isinstance(every, int) else math.inf

    def order(self, steps: int) -> SnapshotOrder | None:
        """Return the snapshot that a chunk which begins after ``steps`` steps is to take, if one is due."""
        flip, self._before_flip = self._before_flip, False
        return self.order_now(steps) if self._due(steps - self._asked_at, flip) else None

    def order_now(self, steps: int) -> SnapshotOrder | None:
        """Return a snapshot whether due or not; ``None`` when there is no place for it."""
        try:
            snapshot_folder.make(self.folder, notebook_name())
        except OSError as error:
            self._say(f"No snapshot was taken: {self.folder} cannot be made ({error.strerror}).")
            return None
        self._asked_at, self._writing = steps, True
        return SnapshotOrder(str(self.folder), self.generation, self._policy().snapshot_space, self._options)

    def received(self, trained_s: float, replies: Sequence[ChunkReply]) -> None:
        """Take in how long a chunk took, and what its replies say about snapshots."""
        self._trained_s += trained_s
        held_up_s = max(reply.snapshot_s for reply in replies)
        if held_up_s:
            self._held_up_s = held_up_s
            self._cost_s += held_up_s
        for reply in replies:
            if reply.stored:
                self.order_ended(reply.stored)

    def order_ended(self, stored: Stored | None = None) -> None:
        """An order was carried out, or nothing came of it; in either case the next one may be given."""
        self._writing = False
        if stored is None or not stored.taken:
            return
        # Ranks wait for one another: a core's second taken from one of them is taken from all.
        self._cost_s += stored.cpu_s
        self.expected_s = self._held_up_s + stored.cpu_s
        self._say(stored.problem)
        if stored.problem:
            self._unfit_bytes = stored.size_bytes
        elif Path(stored.path).name == snapshot_folder.file_name(self.generation, stored.steps):
            self.latest, self._asked_at = stored, stored.steps

    def describe(self) -> str:
        """Return the last snapshot and what all of them cost, in one line."""
        share = f"{100 * self._cost_s / self._trained_s:.2f} %" if self._trained_s else "n/a"
        cost = f"snapshots cost {share} of training time"
        if self.problem:
            return f"{self.problem} ({cost})"
        if self.latest is None:
            return "no snapshot yet" if self._policy().snapshot_steps != "never" else "snapshots are off"
        return f"last snapshot at step {self.latest.steps}, {format_bytes(self.latest.size_bytes)}; {cost}"

    def _due(self, since: int, flip: bool) -> bool:
        policy = self._policy()
        too_large = self._unfit_bytes > policy.snapshot_space
        if policy.snapshot_steps == "never" or since <= 0 or self._writing or too_large:
            return False
        if flip:
            return True
        if isinstance(policy.snapshot_steps, int):
            return since >= policy.snapshot_steps
        affordable = self._cost_s + self.expected_s <= LARGEST_SHARE * self._trained_s
        return since >= FEWEST_STEPS and affordable

    def _say(self, problem: str) -> None:
        if problem and problem != self.problem:
            self._note(problem)
        self.problem = problem


def notebook_name() -> str:
    """Return where the cells come from: the notebook's path, else this process's working folder; empty if unknown."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    name = os.environ.get("JPY_SESSION_NAME") or (shell.user_ns.get("__vsc_ipynb_file__") if shell else None)
    with suppress(OSError):  # the folder was deleted
        return str(name or os.getcwd())
    return ""
