"""The magics: parse arguments, call the session, show the answer. Nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

import gpumem_nb

from .completion import Completion, Offered
from .kernel.policy import RULES
from .kernel.starting import DEVICES, LAUNCHERS
from .report.memory import VIEWS
from .session import Session, current
from .shared.errors import InvalidInput, NoSession
from .ui.cells import CellOutput
from .ui.progress import progress_bar

Magic = TypeVar("Magic", bound=Callable[..., Any])


def _says_usage(magic: Magic) -> Magic:
    """Misuse of a magic is a ``UsageError``: one sentence, no traceback."""

    @wraps(magic)
    def shown(*args: Any, **kwargs: Any) -> Any:
        try:
            return magic(*args, **kwargs)
        except (InvalidInput, NoSession) as error:
            raise UsageError(str(error)) from None

    return shown  # type: ignore[return-value]


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value, such as batch_size=16")
    return name, value


def _pairs(args: Any) -> dict[str, str]:
    return dict(args.pairs)


@magics_class
class HvdMagics(Magics):
    """``%hvd_*`` for the current session."""

    @magic_arguments()
    @argument("n", nargs="?", type=int, help="number of ranks; by default one per visible GPU, or 2 without GPUs")
    @argument(
        "--device", type=Offered(DEVICES), default="auto", help="auto, cuda, or cpu: a virtual GPU for every rank"
    )
    @argument("--memory-limit", help="memory of each rank, such as 2GiB; by default the whole GPU, or 2 GiB if virtual")
    @argument("--hosts", help="hosts with their ranks, this machine among them, such as a:2,b:2; by default only here")
    @argument(
        "--launcher", type=Offered(LAUNCHERS), default="mpi", help=f"how ranks are started: {', '.join(LAUNCHERS)}"
    )
    @argument("--threads", type=int, help="CPU threads of each rank; by default the cores are shared out")
    @argument("--timeout", type=float, default=120.0, help="seconds for the whole start")
    @line_magic
    @_says_usage
    def hvd_start(self, line: str) -> Session:
        """Start Horovod ranks, one per GPU, and connect to them."""
        args = parse_argstring(self.hvd_start, line)
        return gpumem_nb.start(**vars(args))

    @magic_arguments()
    @argument("--json", action="store_true", help="print it as JSON, for programs")
    @line_magic
    @_says_usage
    def hvd_status(self, line: str) -> Any:
        """Show who runs where, on what, doing what."""
        args = parse_argstring(self.hvd_status, line)
        status = current().status()
        return print(status.to_json()) if args.json else status

    @magic_arguments()
    @argument("--ranks", help="where to run, such as 0 or 0,2-3; by default everywhere")
    @argument("--out", help="store the results, a list in rank order, in this variable of the notebook")
    @argument("--quiet", action="store_true", help="show no output")
    @argument("--memory", action="store_true", help="report what the cell does to memory: peak, categories, leftovers")
    @cell_magic
    @_says_usage
    def hvd(self, line: str, cell: str) -> None:
        """Run the cell on the ranks; output appears by rank while it runs, the first error at once."""
        args = parse_argstring(self.hvd, line)
        if args.out and not args.out.isidentifier():
            raise InvalidInput(f"--out {args.out!r} is not a variable name.")
        output = CellOutput(args.quiet)
        try:
            call = current().run_cell(
                self._shell.transform_cell(cell),
                ranks=args.ranks,
                title="<%%hvd cell>",
                result="value" if args.out else "text",
                memory=args.memory,
                show=output,
            )
        except BaseException:
            output.failed()
            raise
        results = call.get()
        output.finish(call, results if not args.out else [None] * len(results))
        if args.out:
            self._shell.user_ns[args.out] = results

    @magic_arguments()
    @argument("names", nargs="+", help="variables of this notebook")
    @line_magic
    @_says_usage
    def hvd_push(self, line: str) -> None:
        """Copy variables of this notebook to all ranks."""
        args = parse_argstring(self.hvd_push, line)
        session = current()
        for name in args.names:
            if name not in self._shell.user_ns:
                raise InvalidInput(f"There is no variable {name!r} in this notebook.")
        session.push({name: self._shell.user_ns[name] for name in args.names})

    @magic_arguments()
    @argument("name", help="a variable on the ranks")
    @argument("--ranks", help="from where, such as 0 or 0,2-3; by default from everywhere")
    @line_magic
    @_says_usage
    def hvd_pull(self, line: str) -> list[Any]:
        """Fetch a variable from the ranks, as a list in rank order."""
        args = parse_argstring(self.hvd_pull, line)
        return current().pull(args.name, ranks=args.ranks)

    @magic_arguments()
    @argument("name", help="digits-resnet, digits-separable, text-gpt, or a variable that holds a Workload")
    @argument("pairs", nargs="*", type=_pair, metavar="key=value", help="options of a ready-made workload")
    @line_magic
    @_says_usage
    def hvd_load(self, line: str) -> None:
        """Load a workload on all ranks."""
        args = parse_argstring(self.hvd_load, line)
        own = self._shell.user_ns.get(args.name)
        session = current()
        session.load(own if isinstance(own, gpumem_nb.Workload) else args.name, **_pairs(args))
        print(_loaded(session))

    @magic_arguments()
    @argument(
        "pairs",
        nargs="+",
        type=_pair,
        metavar="role=variable",
        help="model= and data=, optionally loss= and optimizer=",
    )
    @line_magic
    @_says_usage
    def hvd_attach(self, line: str) -> None:
        """Train objects that live on the ranks, such as: %hvd_attach model=net loss=criterion data=train_set."""
        roles = _pairs(parse_argstring(self.hvd_attach, line))
        if unknown := roles.keys() - {"model", "loss", "data", "optimizer"}:
            raise InvalidInput(f"{min(unknown)!r} cannot be attached. Allowed: model=, data=, loss=, optimizer=.")
        if missing := {"model", "data"} - roles.keys():
            raise InvalidInput(
                f"{max(missing)}= is missing. Write, for example: model=net loss=criterion data=train_set"
            )
        session = current()
        session.attach(**roles)
        print(_loaded(session))

    @magic_arguments()
    @argument("pairs", nargs="*", type=_pair, metavar="knob=value", help="knobs to change; without any, show them all")
    @line_magic
    @_says_usage
    def hvd_set(self, line: str) -> None:
        """Change knobs of the live model, also while it trains, and what the session does by itself (on_oom=shrink)."""
        session = current()
        knobs = _pairs(parse_argstring(self.hvd_set, line))
        print(session.set(**knobs) if knobs else session.settings)
        if not knobs or set(knobs) & set(RULES):
            print(session.policy)

    @magic_arguments()
    @argument("steps", nargs="?", type=int, default=100, help="optimizer steps (100)")
    @line_magic
    @_says_usage
    def hvd_train(self, line: str) -> Any:
        """Train some steps and wait for them; the stop button pauses."""
        return current().train(parse_argstring(self.hvd_train, line).steps)

    @magic_arguments()
    @line_magic
    @_says_usage
    def hvd_play(self, line: str) -> None:
        """Train in the background until %hvd_pause."""
        parse_argstring(self.hvd_play, line)
        current().play()

    @magic_arguments()
    @line_magic
    @_says_usage
    def hvd_pause(self, line: str) -> None:
        """Pause training after the steps under way."""
        parse_argstring(self.hvd_pause, line)
        current().pause()

    @magic_arguments()
    @argument("--dock", action="store_true", help="beside the notebook instead of under the cell")
    @line_magic
    @_says_usage
    def hvd_panel(self, line: str) -> None:
        """Show controls and live charts."""
        args = parse_argstring(self.hvd_panel, line)
        panel = current().panel()
        if args.dock:
            panel.dock()
        else:
            display(panel)

    @magic_arguments()
    @argument(
        "--by", type=Offered(VIEWS), help="break the peak down by category (all ranks) or by module (also as a treemap)"
    )
    @argument("--timeline", action="store_true", help="record one step, allocation by allocation; it is undone")
    @argument("--snapshot", metavar="PATH", help="write torch's own snapshot of one step on rank 0's GPU to a file")
    @line_magic
    @_says_usage
    def hvd_memory(self, line: str) -> Any:
        """Show live, reserved and device bytes of every rank, its limit, and what the peak is made of."""
        args = parse_argstring(self.hvd_memory, line)
        if args.snapshot is not None:
            return print(f"Written: {current().memory_snapshot(_unquoted(args.snapshot))} (for pytorch.org/memory_viz)")
        report = current().memory(by=args.by, timeline=args.timeline)
        if args.by or args.timeline:
            from .ui.memory_figures import show_figures  # plotly takes long to import

            show_figures(report)
        return report

    @magic_arguments()
    @line_magic
    @_says_usage
    def hvd_runs(self, line: str) -> Any:
        """Show every configuration tried, side by side."""
        parse_argstring(self.hvd_runs, line)
        return current().runs

    @magic_arguments()
    @argument("path", help="the file to write, such as digits.state")
    @line_magic
    @_says_usage
    def hvd_save(self, line: str) -> None:
        """Save model, optimizer, scaler, data position, random numbers and settings in one file."""
        path = _unquoted(parse_argstring(self.hvd_save, line).path)
        session = current()
        with progress_bar("Saving") as progress:
            saved = session.save(path, progress)
        print(saved)

    @magic_arguments()
    @argument("path", nargs="?", help="a file that %%hvd_save wrote; without one, the newest automatic snapshot")
    @line_magic
    @_says_usage
    def hvd_resume(self, line: str) -> None:
        """Go on from a saved state, on any number of ranks."""
        path = parse_argstring(self.hvd_resume, line).path
        session = current()
        with progress_bar("Resuming") as progress:
            resumed = session.resume(None if path is None else _unquoted(path), progress)
        print(resumed)

    @magic_arguments()
    @line_magic
    @_says_usage
    def hvd_interrupt(self, line: str) -> None:
        """Interrupt what the ranks are doing."""
        parse_argstring(self.hvd_interrupt, line)
        current().interrupt()

    @magic_arguments()
    @line_magic
    @_says_usage
    def hvd_restart(self, line: str) -> Session:
        """Stop the ranks and start the same number again; what was trained is restored from the last snapshot."""
        parse_argstring(self.hvd_restart, line)
        session = current()
        with progress_bar("Restarting ranks") as progress:
            session.restart(progress)
        if session.restored:
            print(session.restored)
        return session

    @magic_arguments()
    @line_magic
    @_says_usage
    def hvd_stop(self, line: str) -> None:
        """End all ranks and everything started with them."""
        parse_argstring(self.hvd_stop, line)
        current().stop()

    @magic_arguments()
    @line_magic
    def hvd_check(self, line: str) -> Any:
        """Check torch, Horovod, MPI and the GPUs: what works, and what to type to repair the rest."""
        parse_argstring(self.hvd_check, line)
        return gpumem_nb.check()

    @property
    def _shell(self) -> InteractiveShell:
        assert self.shell is not None
        return self.shell


def _unquoted(path: str) -> str:
    return path[1:-1] if len(path) > 1 and path[0] == path[-1] and path[0] in "\"'" else path


def _loaded(session: Session) -> str:
    return str(session.status()).split("\nsettings: ")[0].splitlines()[-1] + f"\nsettings: {session.settings}"


def _somebody_works(info: object) -> None:
    with suppress(NoSession):
        current().touch()


complete_hvd = Completion(
    {name: getattr(HvdMagics, method) for of_kind in HvdMagics.magics.values() for name, method in of_kind.items()}
)


def register(shell: InteractiveShell) -> None:
    """Make the magics and their completion known to IPython."""
    shell.register_magics(HvdMagics)
    shell.events.register("pre_run_cell", _somebody_works)
    shell.set_hook("complete_command", complete_hvd, re_key=r"%{0,2}hvd")
