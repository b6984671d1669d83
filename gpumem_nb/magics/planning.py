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
from ..planning.tuning.result import TuneResult
from ..planning.tuning.space import TUNABLE
from ..session import current
from ..shared.answers import Progress
from ..shared.errors import GpumemError, InvalidInput
from ..shared.workload import Workload
from ..ui.cells import progress_bar
from .arguments import Offered, intermixed, magic, pair, pairs, shell_of

Found = TypeVar("Found")
_OF_COLD = ("gpu", "memory", "ranks")  # flags that make no sense for the ranks at hand


def _name_or_pair(text: str) -> str | tuple[str, str]:
    """Return a name, or ``name=value`` as a pair."""
    return pair(text) if "=" in text else text


def _goes_on(entry: str | tuple[str, str]) -> bool:
    """Return whether GPUs end with a comma, so that more of them were meant to follow."""
    return entry[0] == "gpu" and entry[1].endswith(",")


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
    @argument("--gpu", type=Offered(gpu_table.names), help="with NAME: GPUs that need not be here, with commas between")
    @argument("--memory", help="with NAME: the GPU's memory, such as 24GB, in place of what the table says")
    @argument("--ranks", type=int, help="with NAME: how many ranks train together")
    @argument("--largest-batch", action="store_true", help="the largest batch_size that fits every rank with them")
    @argument("--score", action="store_true", help="what was predicted so far beside what came")
    def hvd_predict(self, args: Namespace) -> Any:
        """Say what other settings would need and whether they fit, from small steps that are undone."""
        named = [entry for entry in args.pairs if isinstance(entry, str)]
        given = {name: value for name in _OF_COLD if (value := getattr(args, name)) is not None}
        if args.score:
            return current().score()
        if named or given:
            return self._cold(named, given, args)
        if args.largest_batch:
            return current().largest_batch(**pairs(args))
        session = current()
        said = session.predict(**pairs(args))
        return said if fits(said) else _answer("What would fit", lambda progress: session.instead(said, progress))

    def _cold(self, named: list[str], given: dict[str, Any], args: Any) -> Any:
        if any("," in name for name in named) or any(
            _goes_on(entry) for entry in (("gpu", args.gpu or ""), *args.pairs)
        ):
            raise InvalidInput(
                "GPUs are written without spaces around the commas between them, or in quotes: "
                "%hvd_predict text-gpt --gpu T4-16GB,A100-40GB batch_size=16."
            )
        if len(named) != 1 or args.largest_batch:
            what = "--largest-batch is for loaded workloads; several GPUs show it too" if named else "Name a workload"
            raise InvalidInput(f"{what}, for example: %hvd_predict text-gpt --gpu T4-16GB,A100-40GB batch_size=16.")
        own = shell_of(self).user_ns.get(named[0])
        args.pairs.remove(named[0])
        knobs: dict[str, Any] = given | pairs(args)
        if str(knobs.get("ranks", "")).isdecimal():
            knobs["ranks"] = int(knobs["ranks"])
        if "workload" in knobs:
            raise InvalidInput(
                f"workload={knobs['workload']} cannot be used: the workload is named already, {named[0]}. Name one."
            )
        return predict(own if isinstance(own, Workload) else named[0], **knobs)

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
        return current().what_if()

    @magic()
    def hvd_what_fits(self, args: Namespace) -> Any:
        """Show the largest micro-batch that fits under each precision and checkpointing, and samples/s with it."""
        session = current()
        return _answer("What fits", lambda progress: session.what_fits(progress=progress))

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
    print(f"Nothing was applied: {why_not} To apply it: %hvd_set {result.typed}")
