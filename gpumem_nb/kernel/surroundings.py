"""Where the notebook works and imports from, which its ranks follow."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from ..shared.messages import Surroundings


class Followed:
    """What ranks were told last. Asked before each request, so it looks at the disk only when something changed."""

    def __init__(self) -> None:
        self._told: tuple[str, ...] = ()

    def tell(self, send: Callable[[Surroundings], object]) -> None:
        """Send the working directory and the paths of this process, if they are not what was sent last."""
        try:
            folder = os.getcwd()
        except OSError:  # it was deleted
            return
        now = (folder, *sys.path)
        if now == self._told:
            return
        paths = dict.fromkeys(os.path.abspath(path) for path in sys.path if isinstance(path, str))
        send(Surroundings(folder, tuple(path for path in paths if os.path.exists(path))))
        self._told = now
