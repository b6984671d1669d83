"""Predictions and advice before a flip."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument
from IPython.display import display

from .. import predict
from ..planning import gpu_table
from ..planning.fit import fits
from ..planning.prediction import Prediction
from ..planning.tuning.result import TuneResult
from ..planning.tuning.space import TUNABLE
from ..session import Session, current
from ..shared.answers import Progress
from ..shared.errors import GpumemError, InvalidInput, NoSession
from ..ui.cells import progress_bar, say
from .arguments import Offered, Pair, intermixed, magic, shell_of
from .waiting import asked, patient

Found = TypeVar("Found")
_OF_COLD = ("gpu", "memory", "ranks")  # flags that make no sense for the ranks at hand


def _name_or_pair(text: str) -> str | tuple[str, str]:
    """Return a name, or ``name=value`` as a pair."""
    return Pair("batch_size=16")(text) if "=" in text else text


def _goes_on(entry: tuple[str, str]) -> bool:
    """Return whether GPUs end with a comma, so that more of them were meant to follow."""
    return entry[0] == "gpu" and entry[1].endswith(",")


def _check_commas(named: list[str], given: list[tuple[str, str]]) -> None:
    """Refuse GPUs that are written with spaces between them."""
    if any("," in name for name in named) or any(map(_goes_on, given)):
        raise InvalidInput(
            "GPUs are written without spaces around the commas between them, or in quotes: "
            "%hvd_predict text-gpt --gpu T4-16GB,A100-40GB batch_size=16."
        )


def _running() -> Session | None:
    """Return the session, if there is one."""
    with suppress(NoSession):
        return current()
    return None


def _answer(title: str, question: Callable[[Progress], Found]) -> Found:
    """Run a question with its progress and return the result; a second press of stop afterwards does not lose it."""
    found: list[Found] = []
    try:
        with progress_bar(title) as progress:
            found.append(question(progress))
    except KeyboardInterrupt:
        if not found:
            raise
    return found[0]


@magics_class
class PlanningMagics(Magics):
    """Predictions and advice before a flip."""

    @magic(read=intermixed)
    @argument(
        "pairs",
        nargs="*",
        type=_name_or_pair,
        metavar="[NAME] key=value",
        help="changes of the present settings; with NAME (a ready-made workload, or a variable that holds a Workload) "
        "no ranks are needed, and options of that workload are taken too",
    )
    @argument(
        "--gpu",
        type=Offered(gpu_table.names),
        help="GPUs that need not be here, with commas between; without NAME for what is loaded or attached",
    )
    @argument("--memory", help="of such a GPU, as 24GB, in place of what the table says")
    @argument("--ranks", type=int, help="how many ranks train together there; by default as many as here, or 1")
    @argument("--largest-batch", action="store_true", help="the largest batch_size that fits every rank with them")
    @argument("--score", action="store_true", help="what was predicted so far beside what came")
    def hvd_predict(self, args: Namespace) -> Any:
        """Say what other settings would need and whether they fit, from small steps that are undone."""
        named = [entry for entry in args.pairs if isinstance(entry, str)]
        if args.score:
            return current().score()
        flags = {name: value for name in _OF_COLD if (value := getattr(args, name)) is not None}
        pairs_given = [entry for entry in args.pairs if not isinstance(entry, str)]
        if named or flags or any(name in _OF_COLD for name, _ in pairs_given):
            _check_commas(named, [("gpu", args.gpu or ""), *pairs_given])
            return self._elsewhere(named, dict(pairs_given) | flags, args.largest_batch)
        session, knobs = current(), dict(pairs_given)
        with asked("Predicting", session):
            if args.largest_batch:
                return session.largest(**knobs)
            said = session.predict(**knobs)
        assert isinstance(said, Prediction)
        return said if fits(said) else _answer("What would fit", lambda progress: session.instead(said, progress))

    def _elsewhere(self, named: list[str], knobs: dict[str, Any], largest: bool) -> Any:
        """Predict for GPUs that need not be here: what is named, or what is loaded."""
        session = None if named else _running()
        if len(named) > 1 or (not named and session is None):
            raise InvalidInput(
                "Name a workload, or load one on ranks first, for example: %hvd_predict text-gpt --gpu "
                "T4-16GB,A100-40GB batch_size=16."
            )
        if largest:
            raise InvalidInput(
                "--largest-batch is for the ranks that run here; a table of GPUs shows it too, for example: "
                f"%hvd_predict {' '.join([*named, '--gpu'])} T4-16GB,A100-40GB."
            )
        if str(knobs.get("ranks", "")).isdecimal():
            knobs["ranks"] = int(knobs["ranks"])
        if isinstance(gpus := knobs.get("gpu"), str):
            knobs["gpu"] = [name.strip() for name in gpus.split(",")]  # for one as for several: a table
        if session:
            with patient("Predicting", measured=True) as progress:
                return session.predict(progress=progress, **knobs)
        if "workload" in knobs:
            raise InvalidInput(
                f"workload={knobs['workload']} cannot be used: the workload is named already, {named[0]}. Name one."
            )
        return predict(shell_of(self).user_ns.get(named[0], named[0]), **knobs)

    @magic()
    @argument(
        "--checklist", action="store_true", help="go through the checklist of training on several devices instead"
    )
    def hvd_doctor(self, args: Namespace) -> Any:
        """Say what is wrong with the session, the worst first, with a button for each fix."""
        session = current()
        if args.checklist:
            return _answer("Examining", session.checklist)
        found = _answer("Examining", session.doctor)
        if getattr(shell_of(self), "kernel", None) is None:
            return found
        with suppress(KeyboardInterrupt):  # of stop that was pressed once more
            from ..ui.doctor_view import DiagnosisView  # widgets take long to import

            return display(DiagnosisView(session, found))
        return found

    @magic()
    def hvd_what_if(self, args: Namespace) -> Any:
        """Show what every single flip from here would need, side by side."""
        session = current()
        with patient("What if", measured=True) as progress:
            return session.what_if(progress=progress)

    @magic()
    def hvd_what_fits(self, args: Namespace) -> Any:
        """Show the largest micro-batch that fits under each precision and checkpointing, and samples/s with it."""
        session = current()
        return _answer("What fits", lambda progress: session.what_fits(progress=progress))

    @magic()
    @argument("--same-mathematics", action="store_true", help="leave out what changes the mathematics, such as bf16")
    def hvd_ladder(self, args: Namespace) -> Any:
        """Show which changes free memory, each on top of those before it, down to the least in which the model trains.

        The one that frees most for the time that it costs comes first; nothing is changed before you type a rung.
        """
        session, same = current(), args.same_mathematics
        found = _answer("Memory ladder", lambda progress: session.ladder(same_mathematics=same, progress=progress))
        with suppress(KeyboardInterrupt):  # of stop that was pressed once more
            from ..ui.figures import show_ladder  # plotly takes long to import

            show_ladder(found)
        return found

    @magic()
    @argument("--budget", help="what may be reserved on a rank, such as 512MiB; by default the rank's limit")
    @argument("--global-batch", type=int, help="samples of a step of all ranks; by default as they are")
    @argument("--seconds", type=float, default=60.0, help="how long it may take, about (60)")
    @argument("--knobs", type=Offered(TUNABLE), help="what may be changed, with commas between")
    @argument("--any-mathematics", action="store_true", help="consider what changes the mathematics too, such as bf16")
    @argument("--apply", action="store_true", help="train with the best settings at once")
    def hvd_tune(self, args: Namespace) -> Any:
        """Look for the fastest settings that fit every rank, by steps that are undone; stop ends it with the best."""
        session = current()
        knobs = [name.strip() for name in args.knobs.split(",") if name.strip()] if args.knobs else None
        result = _answer(
            "Tuning",
            lambda progress: session.tune(
                budget=args.budget,
                global_batch=args.global_batch,
                seconds=args.seconds,
                knobs=knobs,
                same_mathematics=not args.any_mathematics,
                progress=progress,
            ),
        )
        try:
            self._show(result, args.apply)
        except KeyboardInterrupt as why:  # stop was pressed once more: what was found is returned nevertheless
            if args.apply and result.typed and result.best and session.settings != result.best.settings:
                _say_how_to_apply(result, str(why) or "It was interrupted.")
        return result

    def _show(self, result: TuneResult, at_once: bool) -> None:
        """Show the chart, and train with the best settings or say how."""
        if result.measured:
            from ..ui.figures import show_tuned  # plotly takes long to import

            show_tuned(result)
        if result.typed:
            self._apply(result, at_once)

    def _apply(self, result: TuneResult, at_once: bool) -> None:
        """Train with the best settings, or say how."""
        if at_once:
            why_not = "Tuning ended early."
            try:
                if not result.stopped:
                    result.apply()
                    return
            except GpumemError as error:  # what was found is shown nevertheless
                why_not = str(error)
            _say_how_to_apply(result, why_not)
        if getattr(shell_of(self), "kernel", None) is not None:
            with suppress(KeyboardInterrupt):  # how to apply it was said by then, if that was asked for
                from ..ui.tune_view import ApplyView  # widgets take long to import

                display(ApplyView(result))


def _say_how_to_apply(result: TuneResult, why_not: str) -> None:
    say(f"Nothing was applied: {why_not} To apply it: %hvd_set {result.typed}")
