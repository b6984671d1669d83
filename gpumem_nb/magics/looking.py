"""The panel, and where the bytes are."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument
from IPython.display import display

from ..kernel.logs import TARGETS
from ..report.memory import VIEWS
from ..session import current, latest
from ..shared.allocator_settings import NAMES
from ..ui.cells import progress_bar, say
from .arguments import Offered, magic
from .waiting import asked


@magics_class
class LookingMagics(Magics):
    """The panel, and where the bytes are."""

    @magic()
    @argument("--dock", action="store_true", help="beside the notebook instead of under the cell")
    @argument("--big", action="store_true", help="in type that can be read from the back of a room")
    def hvd_panel(self, args: Namespace) -> None:
        """Show controls and live charts."""
        panel = current().panel(big=args.big)
        if args.dock:
            panel.dock()
        else:
            display(panel)

    @magic()
    @argument("path", help="the page to write, such as report.html")
    def hvd_report(self, args: Namespace) -> Any:
        """Write the session as one page to hand on: charts, runs, findings, versions; it opens without a network."""
        session = latest()
        with progress_bar("Examining") as progress:
            return session.report(args.path, progress)

    @magic()
    @argument("target", nargs="?", help="such as runs/a, log.jsonl or project/run; without one, show what is logged")
    @argument(
        "--to",
        type=Offered(TARGETS),
        help=f"{', '.join(TARGETS)}; by default jsonl for a name that ends so, else tensorboard",
    )
    @argument("--stop", action="store_true", help="end this log, or all of them")
    def hvd_log(self, args: Namespace) -> None:
        """Write steps, settings, evaluations and events to TensorBoard event files, JSON lines or trackio."""
        session, target = current(), args.target
        if args.stop:
            session.stop_logging(target)
        elif target:
            session.log_to(target, args.to)
        say("\n".join(map(repr, session.logs)) or "Nothing is logged.")

    @magic()
    @argument(
        "--by", type=Offered(VIEWS), help="break the peak down by category (all ranks) or by module (also as a treemap)"
    )
    @argument("--timeline", action="store_true", help="record one step, allocation by allocation; it is undone")
    @argument("--free", action="store_true", help="give cached memory back to the devices; says what holds the rest")
    @argument("--snapshot", metavar="PATH", help="write torch's own snapshot of one step on rank 0's GPU to a file")
    @argument(
        "--what-if",
        nargs="*",
        metavar="SETTING",
        type=Offered(NAMES),
        help="what a step would reserve under other settings of the caching allocator, such as expandable_segments or "
        "max_split_size_mb:128; without one, the usual ones",
    )
    def hvd_memory(self, args: Namespace) -> Any:
        """Show live, reserved and device bytes of every rank, its limit, and what the peak is made of."""
        session = current()
        with asked("Measuring", session):
            if args.snapshot is not None:
                return say(f"Written: {session.memory_snapshot(args.snapshot)} (for pytorch.org/memory_viz)")
            if args.free:
                return session.free()
            if args.what_if is not None:
                return session.allocator_what_if(*args.what_if)
            report = session.memory(by=args.by, timeline=args.timeline)
        if args.by or args.timeline:
            from ..ui.memory_figures import show_figures  # plotly takes long to import

            show_figures(report)
        return report

    @magic()
    @argument("--timeline", action="store_true", help="draw the latest step of every rank, part by part")
    def hvd_time(self, args: Namespace) -> Any:
        """Show where the time of a step goes on every rank: data, forward, backward, gradients, update."""
        session = current()
        with asked("Measuring", session):
            report = session.time(timeline=args.timeline)
        if report.lanes:
            from ..ui.figures import show_lanes  # plotly takes long to import

            show_lanes(report.lanes)
        return report

    @magic()
    @argument("ranks", nargs="*", type=int, help="numbers of ranks, such as 1 2 4; by default these and all")
    @argument("--steps", type=int, default=20, help="steps to time on each, which are undone (20)")
    def hvd_scaling(self, args: Namespace) -> Any:
        """Measure samples/s on growing numbers of the running ranks, and what is lost; forecast more ranks."""
        session = current()
        with progress_bar("Measuring") as progress:
            return session.scaling(args.ranks or None, args.steps, progress)

    @magic()
    @argument("path", help="the file to write, such as trace.json or trace.json.gz")
    @argument("--steps", type=int, default=3, help="steps to record, which count like any others (3)")
    def hvd_trace(self, args: Namespace) -> Any:
        """Record some steps of all ranks in one file for Perfetto or chrome://tracing, with Horovod's timeline."""
        session = current()
        with progress_bar("Tracing") as progress:
            return session.trace(args.path, args.steps, progress)
