"""The notebook's working directory and import paths, which its ranks follow."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from ..shared.messages import Surroundings


class Followed:
    """The paths that ranks were told last. Asked before each request, so it looks at the disk only after a change."""

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


def notebook_name() -> str:
    """Return where the cells come from: the notebook's path, else this process's working folder; empty if unknown."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    name = os.environ.get("JPY_SESSION_NAME") or (shell.user_ns.get("__vsc_ipynb_file__") if shell else None)
    with suppress(OSError):  # the folder was deleted
        return str(name or os.getcwd())
    return ""
