"""Ranks: started, looked at, stopped; code and variables on them."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument

from ..install.environment import check
from ..kernel.starting import DEVICES, LAUNCHERS
from ..session import Session, current, snapshots, start
from ..shared.errors import InvalidInput, nearest
from ..shared.units import is_variable
from ..ui.cells import CellOutput, progress_bar, say
from .arguments import Offered, Pair, intermixed, magic, pairs, shell_of
from .waiting import asked, patient


@magics_class
class RanksMagics(Magics):
    """Ranks: started, looked at, stopped; code and variables on them."""

    _latest: CellOutput | None = None
    _started: tuple[Namespace, Session] | None = None

    @magic()
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
    def hvd_start(self, args: Namespace) -> Session:
        """Start Horovod ranks, one per GPU, and connect to them; the same command again leaves them as they are."""
        if self._started is not None:
            same, before = self._started[0] == args, self._started[1]
            if same and not before.ended:  # a cell that is run twice, or all cells of a notebook
                say("The ranks that this command started are still there, and go on. For new ones: %hvd_stop first.")
                return before
        with progress_bar("Starting ranks") as progress:
            session = start(**vars(args), progress=progress)
        self._started = args, session
        say(session.chosen)
        return session

    @magic()
    @argument("--json", action="store_true", help="print it as JSON, for programs")
    def hvd_status(self, args: Namespace) -> Any:
        """Show the ranks, their devices, and what they are doing."""
        status = current().status()
        return print(status.to_json()) if args.json else status

    @magic()
    def hvd_interrupt(self, args: Namespace) -> None:
        """Interrupt what the ranks are doing."""
        current().interrupt()

    @magic()
    def hvd_restart(self, args: Namespace) -> Session:
        """Stop the ranks and start the same number again; what was trained is restored from the last snapshot."""
        session = current()
        with progress_bar("Restarting ranks") as progress:
            session.restart(progress)
        if session.restored:
            say(session.restored)
        return session

    @magic()
    def hvd_stop(self, args: Namespace) -> None:
        """End all ranks and everything started with them."""
        session = current()
        session.stop()
        said = ["The rank has ended." if session.size == 1 else f"All {session.size} ranks have ended."]
        if session.history.steps:
            said.append("%hvd_runs still shows what was measured.")
        for one in snapshots().own[:1]:
            kept = f"{one.workload} at step {one.steps:,} (age: {one.age})"
            said.append(f"This notebook's newest snapshot has {kept}: %hvd_resume goes on from there.")
        say("\n".join(said))

    @magic(read=intermixed)
    @argument("--sync", action="store_true", help="check instead that ranks hold the same and see different samples")
    @argument("--network", action="store_true", help="time instead how fast messages go between the ranks")
    @argument(
        "pairs",
        nargs="*",
        type=Pair("model=net"),
        metavar="name=variable",
        help="with --sync, of a loop of your own: model=net, and data=loader",
    )
    def hvd_check(self, args: Namespace) -> Any:
        """Check torch, Horovod, MPI and the GPUs: what works, and what to type to repair the rest."""
        names = pairs(args)
        if unknown := [name for name in names if name not in ("model", "data")]:
            raise InvalidInput(f"{unknown[0]} cannot be checked: {nearest(unknown[0], ('model', 'data'))}.")
        if names and not args.sync:
            raise InvalidInput("Variables are checked with --sync: %hvd_check --sync model=net data=loader")
        if args.network and args.sync:
            raise InvalidInput("--network and --sync check different things: give one of them.")
        if args.network:
            with progress_bar("Checking the network") as progress:
                return current().check_network(progress)
        if args.sync:
            session = current()
            with asked("Comparing the ranks", session):
                return session.check_sync(**names)
        with patient("Checking") as progress:
            return check(progress)

    @magic(cell=True)
    @argument("--ranks", help="where to run, such as 0 or 0,2-3; by default everywhere")
    @argument("--out", help="store the results, a list in rank order, in this variable of the notebook")
    @argument("--quiet", action="store_true", help="show no output")
    @argument("--memory", action="store_true", help="report what the cell does to memory: peak, categories, leftovers")
    def hvd(self, args: Namespace, cell: str) -> None:
        """Run the cell on the ranks; output appears by rank while it runs, the first error at once."""
        if args.out and not is_variable(args.out):
            raise InvalidInput(f"--out {args.out!r} is not a variable name.")
        if before := self._latest:
            before.add_late()
        output = self._latest = CellOutput(args.quiet)
        try:
            call = current().run_cell(
                shell_of(self).transform_cell(cell),
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
        if before:  # what its threads had printed a moment before this cell began came with this cell's own output
            before.add_late()
        if args.out:
            shell_of(self).user_ns[args.out] = results

    @magic()
    @argument("names", nargs="+", help="variables of this notebook")
    def hvd_push(self, args: Namespace) -> None:
        """Copy variables of this notebook to all ranks."""
        session = current()
        for name in args.names:
            if name not in shell_of(self).user_ns:
                raise InvalidInput(f"There is no variable {name!r} in this notebook.")
        session.push({name: shell_of(self).user_ns[name] for name in args.names})

    @magic()
    @argument("name", help="a variable on the ranks")
    @argument("--ranks", help="from where, such as 0 or 0,2-3; by default from everywhere")
    def hvd_pull(self, args: Namespace) -> list[Any]:
        """Fetch a variable from the ranks, as a list in rank order."""
        return current().pull(args.name, ranks=args.ranks)
