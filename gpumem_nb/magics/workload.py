"""The workload: loaded or attached, saved and resumed."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument
from IPython.display import display

from ..report.adopted import AdoptedReport
from ..session import Session, current, resume, snapshots
from ..shared.errors import InvalidInput
from ..shared.workload import Workload
from ..ui.cells import progress_bar, say
from .arguments import ROLES, Pair, magic, pairs, shell_of
from .waiting import asked


@magics_class
class WorkloadMagics(Magics):
    """The workload: loaded or attached, saved and resumed."""

    @magic()
    @argument("name", help="digits-resnet, digits-separable, text-gpt, or a variable that holds a Workload")
    @argument(
        "pairs",
        nargs="*",
        default=(),
        type=Pair("width=8"),
        metavar="key=value",
        help="seed=, and options of a ready-made workload",
    )
    def hvd_load(self, args: Namespace) -> None:
        """Load a workload on all ranks, where model and optimizer then name what is trained, unless you hold them."""
        own = shell_of(self).user_ns.get(args.name)
        options, session = pairs(args), current()
        with progress_bar(f"Loading {args.name}", measured=False) as progress, session.telling(progress):
            session.load(own if isinstance(own, Workload) else args.name, **options)
        say(_loaded(session))

    @magic()
    @argument(
        "pairs",
        nargs="+",
        type=Pair("model=net"),
        metavar="role=variable",
        help="model= and data=, optionally loss=, optimizer=, scheduler=, eval_data= and metric=; or trainer=, which "
        "brings these; and seed=NUMBER",
    )
    def hvd_attach(self, args: Namespace) -> Any:
        """Train objects that live on the ranks, such as: %hvd_attach model=net loss=criterion data=train_set.

        Your variables stay what they are; model and optimizer then name what is trained, unless you hold them.

        %hvd_attach trainer=NAME trains what a transformers or TRL Trainer, an Accelerator (or what its prepare
        returned) or a Lightning module holds, and lists which knobs begin with which of its arguments.
        """
        roles = pairs(args)
        if unknown := roles.keys() - set(ROLES):
            raise InvalidInput(
                f"{min(unknown)!r} cannot be attached. Allowed: {', '.join(f'{role}=' for role in ROLES)}."
            )
        missing = {"model", "data"} - roles.keys()
        if missing and "trainer" not in roles:
            raise InvalidInput(
                f"{max(missing)}= is missing. Write, for example: model=net loss=criterion data=train_set, or "
                "trainer=trainer"
            )
        session, what = current(), roles.get("trainer") or roles["model"]
        with progress_bar(f"Attaching {what}", measured=False) as progress, session.telling(progress):
            info = session.attach(**roles)
        say(_loaded(session))
        return AdoptedReport(info.adopted) if info.adopted else None

    @magic()
    @argument("seed", help="a whole number from 0 to 4294967295")
    def hvd_seed(self, args: Namespace) -> None:
        """Seed torch, NumPy and Python alike on all ranks, for cells and for what is loaded from now on.

        A cell that ran on some ranks only has moved their random numbers alone: this aligns them again.
        """
        say(current().seed(args.seed))

    @magic()
    def hvd_sync(self, args: Namespace) -> None:
        """Give all ranks the weights and the optimizer's state of rank 0."""
        session = current()
        with asked("Giving all ranks what rank 0 has", session):
            session.sync()
        say("All ranks have the weights and the optimizer's state of rank 0.")

    @magic()
    @argument("path", help="the file to write, such as digits.state")
    def hvd_save(self, args: Namespace) -> None:
        """Save model, optimizer, scaler, data position, random numbers and settings in one file."""
        session = current()
        with progress_bar("Saving") as progress:
            saved = session.save(args.path, progress)
        say(saved)

    @magic()
    @argument("path", help="the script to write, such as train.py; an older export is replaced, no other file")
    @argument("--ddp", action="store_true", help="for torchrun and DistributedDataParallel instead of Horovod")
    def hvd_export(self, args: Namespace) -> None:
        """Write one plain script that trains as the session does now, and say what it does not carry over."""
        session = current()
        with asked("Writing the script", session):
            written = session.export(args.path, ddp=args.ddp)
        say(written)

    @magic()
    @argument("path", nargs="?", help="a saved state; without one, the newest automatic snapshot of this notebook")
    @argument("--list", action="store_true", help="show the automatic snapshots there are, and go on from none")
    def hvd_resume(self, args: Namespace) -> Any:
        """Go on from a saved state, on any number of ranks; where there are none, start them.

        Without a path, list the automatic snapshots of this notebook and go on from the newest one.
        """
        found = snapshots() if args.list or args.path is None else None
        if args.list:
            return found
        if found and found.own:
            display(found.of_this_notebook)
        with progress_bar("Resuming") as progress:
            resumed = resume(args.path, progress)
        say(resumed)
        return current()


def _loaded(session: Session) -> str:
    notes = session.workload.notes if session.workload else ()
    what = str(session.status()).split("\nsettings: ")[0].splitlines()[-1]
    return "\n".join(filter(None, [what, f"settings: {session.settings.in_short}", session.kept, *notes]))
