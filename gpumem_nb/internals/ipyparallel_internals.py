"""Undocumented parts of ipyparallel.

- The engine's ``shell.data_pub`` with its ``session`` and ``pub_socket``: it publishes data beside an answer that is
  still awaited. The shell's own changes its parent with each request, so a thread gets a publisher of its own.
- ``AsyncResult.metadata["data"]``: there such data arrive.
- A launcher's ``_wait_thread``: it takes in how the process ended, which the system tells once only.
- ``Client.metadata`` and ``AsyncResult._client``: when an answer is complete its entry is taken out, and output that
  comes afterwards gets a new one under the same message.
- ``Client.history``: the client keeps the id of every message it ever sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHECKED_WITH = ("9.2.0",)


def publish_beside(kernel: Any, request: Any, data: dict[str, Any]) -> None:
    """On an engine, from any thread: send data beside the answer to a request, which its message stands for."""
    publisher = kernel.shell.data_pub
    own = type(publisher)(session=publisher.session, pub_socket=publisher.pub_socket)
    own.set_parent(request)
    own.publish_data(data)


def published_beside(result: Any) -> Mapping[str, Any]:
    """Return the latest data that an engine has published beside an answer, by key."""
    data: Mapping[str, Any] = result.metadata["data"]
    return data


def late_output(result: Any) -> str:
    """Return what an engine printed since its answer was complete (in a thread, say) and since the last call."""
    late = [result._client.metadata.pop(message, None) for message in result.msg_ids if result.done()]
    return "".join((beside["stdout"] or "") + (beside["stderr"] or "") for beside in late if beside)


def forget_sent(client: Any) -> None:
    """Let the client forget the ids of the messages that it has sent; answers still arrive."""
    client.history.clear()


def await_exit_code(launcher: Any, timeout_s: float) -> None:
    """Wait until the launcher's own thread knows how the process ended: who asked beside it could take it away."""
    launcher._wait_thread.join(timeout_s)
