"""The stop button: the ranks are interrupted, the prompt comes back, and there is a way out."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..shared.errors import Interrupted
from ..shared.ranklist import name_ranks

AGAIN_S = 2.0
"""Two interrupts within this time mean that interrupting the ranks does not help."""


class InterruptTracker:
    """Remembers when stop was pressed last.

    Attributes:
        in_vain: whether some ranks did not stop at the latest interrupt.
    """

    def __init__(self) -> None:
        self._last_s = -AGAIN_S
        self.in_vain = False

    def again(self) -> bool:
        """Stop is pressed now; says whether for the second time within two seconds."""
        before, self._last_s = self._last_s, time.monotonic()
        return self._last_s - before < AGAIN_S

    def explain(
        self, stop_ranks: Callable[[], bool], busy: Callable[[], list[int]], done: Callable[[], bool]
    ) -> Interrupted:
        """Interrupt the ranks and say in words what came of it.

        Args:
            stop_ranks: interrupts them; says whether they stopped in time.
            busy: the ranks that have not answered.
            done: whether what was to be stopped had come to its end by then.
        """
        again = self.again()
        try:
            stopped = stop_ranks()
        except KeyboardInterrupt:  # pressed while waiting for the ranks
            again, stopped = True, False
        finally:
            self._last_s = time.monotonic()
        self.in_vain = not stopped
        if stopped and not again and done():
            return Interrupted("Interrupted, but the ranks had come to the end of it by then. They are ready.")
        if stopped and not again:
            return Interrupted("Interrupted. The ranks stopped what they were doing and are ready.")
        waiting = busy()
        state = "The ranks are ready."
        if waiting:
            verb = "has" if len(waiting) == 1 else "have"
            state = (
                f"{name_ranks(waiting).capitalize()} {verb} not stopped yet: busy in code that cannot be interrupted, "
                "stopped, or waiting for another rank."
            )
        return Interrupted(
            f"Interrupted{' twice' * again}. {state} To end the ranks, start them again and restore the training: "
            "%hvd_restart"
        )
