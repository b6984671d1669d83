"""Ranks: started, looked at, stopped."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ..completion import Offered
from ..install.environment import check
from ..kernel.starting import DEVICES, LAUNCHERS
from ..session import Session, current, start
from ..shared.errors import InvalidInput, nearest
from ..ui.cells import progress_bar
from .parsing import intermixed, pair, pairs, says_usage


@magics_class
class RanksMagics(Magics):
    """Ranks: started, looked at, stopped."""

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
    @says_usage
    def hvd_start(self, line: str) -> Session:
        """Start Horovod ranks, one per GPU, and connect to them."""
        args = parse_argstring(self.hvd_start, line)
        with progress_bar("Starting ranks") as progress:
            return start(**vars(args), progress=progress)

    @magic_arguments()
    @argument("--json", action="store_true", help="print it as JSON, for programs")
    @line_magic
    @says_usage
    def hvd_status(self, line: str) -> Any:
        """Show the ranks, their devices, and what they are doing."""
        args = parse_argstring(self.hvd_status, line)
        status = current().status()
        return print(status.to_json()) if args.json else status

    @magic_arguments()
    @line_magic
    @says_usage
    def hvd_interrupt(self, line: str) -> None:
        """Interrupt what the ranks are doing."""
        parse_argstring(self.hvd_interrupt, line)
        current().interrupt()

    @magic_arguments()
    @line_magic
    @says_usage
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
    @says_usage
    def hvd_stop(self, line: str) -> None:
        """End all ranks and everything started with them."""
        parse_argstring(self.hvd_stop, line)
        current().stop()

    @magic_arguments()
    @argument("--sync", action="store_true", help="check instead that ranks hold the same and see different samples")
    @argument("--network", action="store_true", help="time instead how fast messages go between the ranks")
    @argument(
        "pairs",
        nargs="*",
        type=pair,
        metavar="name=variable",
        help="with --sync, of a loop of your own: model=net, and data=loader",
    )
    @line_magic
    @says_usage
    def hvd_check(self, line: str) -> Any:
        """Check torch, Horovod, MPI and the GPUs: what works, and what to type to repair the rest."""
        args = intermixed(self.hvd_check, line)
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
        return current().check_sync(**names) if args.sync else check()
