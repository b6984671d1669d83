"""The magics: parse arguments, call the session, show the answer. Nothing else."""

from __future__ import annotations

from contextlib import suppress

from IPython.core.completer import CompletionContext, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import InteractiveShell

from ..session import current
from ..shared.errors import NoSession
from .arguments import Completion
from .course import CourseMagics
from .looking import LookingMagics
from .planning import PlanningMagics
from .ranks import RanksMagics
from .training import TrainingMagics
from .workload import WorkloadMagics

_FIRST = 1000  # among IPython's matchers, whose own priorities are below 100
MAGICS = (RanksMagics, WorkloadMagics, TrainingMagics, LookingMagics, PlanningMagics, CourseMagics)

complete_hvd = Completion(
    {
        name: getattr(magics, method)
        for magics in MAGICS
        for of_kind in magics.magics.values()
        for name, method in of_kind.items()
    }
)


def register(shell: InteractiveShell) -> None:
    """Make the magics and their completion known to IPython."""
    shell.register_magics(*MAGICS)
    shell.events.register("pre_run_cell", _in_use)
    if shell.Completer is not None and _match not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(_match)


@context_matcher(identifier="gpumem_nb", priority=_FIRST)
def _match(context: CompletionContext) -> SimpleMatcherResult:
    return complete_hvd(context)


def _in_use(info: object) -> None:
    with suppress(NoSession):
        current().touch()
