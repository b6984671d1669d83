"""Undocumented parts of ipykernel.

- ``shell.parent_header``, the message that asked for the request under way: what is published meanwhile names it.
- ``Kernel.pre_handler_hook`` and ``post_handler_hook``, which let SIGINT raise anywhere in a request: ranks handle it
  themselves, because one that left between two collectives would leave the others waiting.
- ``Kernel.set_parent``, unbound: what a thread sends is ascribed to the request that it is told, and from 7.4 on a
  control whose messages belong to a running cell waits for that cell. The kernel's own ``set_parent`` would also
  redirect what the running cell prints.
- ``Kernel._allow_stdin``: whether the page that asked for what runs now could ask a person for input.
- ``Kernel._shutdown_message``: the answer to the request to shut down, made before the kernel ends its children.
- ``IPython.terminal.embed``: a shell that it embeds takes the place of the kernel's, which then answers no request.
- ``OutStream.set_thread_parent``: what a thread prints belongs to the request that it is told.
- ``asyncio._set_running_loop``: the kernel answers requests inside of its event loop, and Python runs no other loop in
  the same thread meanwhile, unless it is told that none is running.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

CHECKED_WITH = ("7.4.0",)


def shell_here() -> Any:
    """Return the shell of this process, also where cells have deleted ``get_ipython``; ``None`` without one."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def refuse_embedded_shells(refuse: Callable[..., Any]) -> None:
    """Have this called in place of ``IPython.embed()``, whose shell would take the kernel's place for good."""
    name, package = "IPython.terminal.embed", sys.modules.get("IPython")
    if package is not None:
        embed = ModuleType(name)  # the package imports its own when it is asked for, and that takes long
        embed.embed = package.embed = refuse  # type: ignore[attr-defined]
        embed.InteractiveShellEmbed = type("InteractiveShellEmbed", (), {"__init__": refuse})  # type: ignore[attr-defined]
        sys.modules[name] = embed


def request_under_way(shell: Any) -> Any:
    """Return the message that asked for what the shell does now."""
    return shell.parent_header


def for_a_person(kernel: Any) -> bool:
    """Return whether a person's page asked for what runs now, and no program that executes notebooks."""
    return bool(kernel._allow_stdin)


def shuts_down() -> bool:
    """Return whether this kernel was asked to shut down, so that what happens now is part of its end."""
    kernel = getattr(shell_here(), "kernel", None)
    return kernel is not None and kernel._shutdown_message is not None


def leave_interrupts_alone(kernel: Any) -> None:
    """Let the kernel change nothing about SIGINT any more when it handles a request."""
    kernel.pre_handler_hook = kernel.post_handler_hook = lambda: None


def speak_for_no_request(kernel: Any) -> None:
    """Let what the calling thread sends from now on belong to no cell."""
    from ipykernel.kernelbase import Kernel  # here: sessions without a notebook need no ipykernel

    Kernel.set_parent(kernel, [], {})  # type: ignore[no-untyped-call]


@contextmanager
def with_running_loop(loop: asyncio.AbstractEventLoop | None) -> Iterator[None]:
    """Inside, this event loop counts as the one that runs, not the kernel's, which waits for this request.

    With ``None`` no loop does, so that another one can be run.
    """
    kernels = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(kernels)
