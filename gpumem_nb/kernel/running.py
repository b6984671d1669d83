"""Code of the notebook, and its variables, on the ranks."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from ..cluster.calls import Call
from ..cluster.ranks import Posted
from ..shared.errors import GpumemError, InvalidInput, WorkloadError
from ..shared.units import RankChoice, checked_seconds, choose_ranks, is_variable
from .cluster import AsksRanks, Cluster


class Running(AsksRanks):
    """Runs code on the ranks of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._all = cluster.ranks
        self._numbers = itertools.count(1)

    def run(
        self,
        code_or_function: str | Callable[..., Any],
        args: Sequence[Any],
        ranks: RankChoice,
        timeout: float | None,
    ) -> list[Any]:
        """Run code, or any function, on ranks; its results in rank order.

        Raises:
            InvalidInput: neither code nor a function, code that is not Python, or a time-out that is none.
            RankError: it failed on a rank.
        """
        if isinstance(code_or_function, str):
            return self.run_cell(code_or_function, "<code>", "value", False, ranks, timeout).get()
        if not callable(code_or_function):
            raise InvalidInput(f"A {type(code_or_function).__name__} cannot be run: give code as text, or a function.")
        self._foreground.tell_surroundings()
        blob = pickled((code_or_function, args), "The function")
        chosen = choose_ranks(ranks, self._all.size)

        def called(call: Call) -> None:
            self._origin.cells.called(everywhere=self._are_all(chosen), drew=call.drew())

        return self._finished(lambda posted: self._all.call_function(blob, chosen, posted), called, timeout).get()

    def push(self, variables: Mapping[str, Any], ranks: RankChoice) -> None:
        """Define variables on ranks.

        Raises:
            InvalidInput: no mapping, or a name that is none.
        """
        if not isinstance(variables, Mapping):
            raise InvalidInput(
                f"A {type(variables).__name__} cannot be pushed: give values by name, such as {{'x': 1}}."
            )
        for name in variables:
            if not is_variable(name):
                raise InvalidInput(f"{name!r} is not a variable name.")
        pickled(variables, "The value")
        everywhere = self._are_all(choose_ranks(ranks, self._all.size))

        def pushed(call: Call) -> None:
            if call.went_well():
                self._origin.cells.pushed(variables, everywhere)

        def post(posted: Posted) -> Call:
            return self._foreground.ask("push", dict(variables), ranks=ranks, posted=posted)

        self._finished(post, pushed).get()

    def run_cell(
        self,
        source: str,
        title: str,
        result: str,
        memory: bool,
        ranks: RankChoice,
        timeout: float | None,
        show: Callable[[Call], None] = lambda call: None,
    ) -> Call:
        """Run code on ranks; returns the finished call.

        ``title`` gets a number of its own, so that a traceback shows this code's lines and no other's.

        Raises:
            InvalidInput: the code is not Python, or a time-out that is none.
            RankError: it failed on a rank.
        """
        self._foreground.tell_surroundings()
        title = f"{str(title).removesuffix('>')} {next(self._numbers)}>"
        try:
            compile(source, title, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            where = f" in line {error.lineno}" if error.lineno else ""
            raise InvalidInput(f"The code has a syntax error{where}: {error.msg}.") from None
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"This is not source code ({error}). Give Python code as text.") from None
        chosen = choose_ranks(ranks, self._all.size)

        def ran(call: Call) -> None:
            everywhere, finished = self._are_all(chosen), call.went_well()
            self._origin.cells.ran(source, everywhere=everywhere, finished=finished, drew=call.drew())

        def post(posted: Posted) -> Call:
            return self._all.run_cell(source, title, result, memory, chosen, posted)

        return self._finished(post, ran, timeout, show)

    def _are_all(self, chosen: Sequence[int] | None) -> bool:
        return chosen is None or len(chosen) == self._all.size

    def _finished(
        self,
        post: Callable[[Posted], Call],
        ended: Posted,
        timeout: float | None = None,
        show: Callable[[Call], None] = lambda call: None,
    ) -> Call:
        """Post a call that runs code of the notebook, and wait for it; ``ended`` is told of it however it ends."""

        def over(call: Call) -> None:
            ended(call)
            self._history.model_may_have_changed()
            self._foreground.mark_notes(call)

        timeout_s = None if timeout is None else checked_seconds("timeout", timeout, 60)
        return self._foreground.finish(post, timeout_s, over, show)


def pickled(value: Any, what: str) -> bytes:
    """Return a value as it travels; ``what`` it is called when it cannot.

    Raises:
        WorkloadError: it cannot travel.
    """
    try:
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    except GpumemError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"{what} cannot be sent to the ranks: {error}. Leave out open files, locks and connections; create them "
            "inside the function that runs there."
        ) from None
