"""Code and variables on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..cluster.calls import Call
from ..kernel.lifecycle import Lifecycle
from ..shared.ranklist import RankChoice


class RunsCells:
    """The part of a session that runs code and moves variables."""

    _life: Lifecycle

    def run(
        self,
        code_or_function: str | Callable[..., Any],
        *args: Any,
        ranks: RankChoice = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run on ranks and return the results in rank order.

        Results travel as pickles. Tensors on a GPU, also those inside other objects, come back as tensors on the CPU.

        Args:
            code_or_function: source code, whose last expression gives the result, or a function.
            *args: arguments of the function.
            ranks: which ones, as a number, several numbers or text such as ``"0,2-3"``; all by default.
            timeout: seconds to wait; no limit by default.

        Raises:
            InvalidInput: neither code nor a function, a syntax error in the code, or ranks that do not exist.
            WorkloadError: the function or its arguments cannot be sent to the ranks.
            RankError: code failed on a rank, or gave what cannot be read here (an object of a class that only the ranks
                can import); raised as soon as the first one failed (``Stalled`` if that was because other ranks did
                not come).
            TimeoutError: it took too long; the ranks were interrupted.
        """
        return self._life.running.run(code_or_function, args, ranks, timeout)

    def run_cell(
        self,
        source: str,
        *,
        ranks: RankChoice = None,
        timeout: float | None = None,
        title: str = "<code>",
        result: str = "value",
        memory: bool = False,
        show: Callable[[Call], None] = lambda call: None,
    ) -> Call:
        """Run code on ranks, showing its output while it runs; returns the finished call.

        Args:
            source: plain Python.
            ranks, timeout: as in :meth:`run`.
            title: stands in tracebacks in place of a file name, with a number of its own: ``<code 3>``.
            result: ``value`` to send back what the last expression gives, ``text`` for its representation.
            memory: let each rank print what the code did to its memory.
            show: called ten times a second and at the end.

        Raises:
            InvalidInput: a syntax error in the code, or ranks that do not exist.
            RankError, TimeoutError: as in :meth:`run`.
        """
        return self._life.running.run_cell(source, title, result, memory, ranks, timeout, show)

    def push(self, variables: Mapping[str, Any], ranks: RankChoice = None) -> None:
        """Define variables on the ranks, all of them by default.

        Raises:
            InvalidInput: a name that cannot be a variable's, or ranks that do not exist.
            WorkloadError: a value that cannot be sent to the ranks.
            RankError: a value that a rank cannot receive, for example because a module is missing there.
        """
        self._life.running.push(variables, ranks)

    def pull(self, name: str, ranks: RankChoice = None) -> list[Any]:
        """Return the values of a variable, in rank order. Tensors on a GPU come back on the CPU, see :meth:`run`.

        Raises:
            InvalidInput: ranks that do not exist.
            WorkloadError: there is no such variable on a rank.
            RankError: a value that cannot be sent, or that cannot be read here.
        """
        return self._life.foreground.call("pull", name, ranks=ranks)
