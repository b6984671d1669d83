"""Training and its knobs."""

from __future__ import annotations

import argparse
import textwrap
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument

from ..report.differences import arrows, mathematics
from ..report.runs.record import FIGURES
from ..session import current, latest
from ..shared.errors import InvalidInput
from ..shared.knobs import KNOBS
from ..ui.cells import progress_bar, say
from .arguments import Offered, Pair, magic, pairs, plain, words_of
from .waiting import asked


def _with_note(magic: Callable[..., Any], line: str) -> Namespace:
    """Return the arguments of a line; argparse would read a "--" in the words of a note as its own."""
    before, _, rest = line.partition("--note ")
    args = plain(magic, before)
    args.note = words_of(rest)
    return args


@magics_class
class TrainingMagics(Magics):
    """Training and its knobs."""

    @magic()
    @argument(
        "pairs",
        nargs="*",
        type=Pair("batch_size=16"),
        metavar="knob=value",
        help="knobs to change; without any, show them all",
    )
    def hvd_set(self, args: Namespace) -> None:
        """Change knobs of the live model, also while it trains, and what the session does by itself (on_oom=shrink)."""
        session = current()
        knobs = pairs(args)
        if not knobs:
            lines = (f"settings: {session.settings}", f"what the session does by itself: {session.policy}")
            say(
                "\n".join(
                    textwrap.fill(line, 72, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
                    for line in lines
                )
            )
            return
        settings, policy = session.settings, session.policy
        wanted = settings.replace(**{name: value for name, value in knobs.items() if name in KNOBS})
        session.set(**knobs)
        if wanted != settings:
            say(f"This {mathematics(settings, wanted, session.splits)}.")
        changes = [arrows(settings, session.settings), arrows(policy, session.policy)]
        say("\n".join(filter(None, changes)) or "No change: already set.")
        foreseen = session.foreseen()
        if foreseen and foreseen.refusal:
            say(f"It was predicted that this {foreseen.refusal}.")

    @magic()
    @argument("steps", nargs="?", type=int, default=100, help="optimizer steps (100)")
    def hvd_train(self, args: Namespace) -> Any:
        """Train some steps and wait for them; the stop button pauses."""
        steps, session = args.steps, current()
        with progress_bar("Training") as progress:
            # A log is not told of each step.
            return session.train(steps, progress) if progress.rewrites else session.train(steps)

    @magic()
    def hvd_play(self, args: Namespace) -> None:
        """Train in the background until %hvd_pause."""
        current().play()

    @magic()
    def hvd_pause(self, args: Namespace) -> None:
        """Pause training after the steps under way."""
        session = current()
        played = session.playing
        session.pause()
        now = session.doing.rstrip(".")
        say(f"{'' if played else 'Nothing was training. '}{now[:1].upper()}{now[1:]}.")

    @magic()
    def hvd_eval(self, args: Namespace) -> Any:
        """Show loss and metrics on the validation data; %hvd_set eval_every=100 does it every 100 steps."""
        session = current()
        with asked("Evaluating", session):
            return session.evaluate()

    @magic(read=_with_note)
    @argument("--sort", metavar="COLUMN", type=Offered((*FIGURES, *KNOBS)), help="by a figure or a knob")
    @argument("--all", action="store_true", help="also those of one step")
    @argument("--compare", nargs=2, type=int, metavar=("A", "B"), help="two runs, by their numbers, with their charts")
    @argument(
        "--note",
        nargs=argparse.REMAINDER,
        metavar="RUN TEXT",
        help="keep words of your own beside a run, up to the end of the line ('' erases them, none shows them)",
    )
    @argument("--export", metavar="PATH", help="write all of them to a file: .csv, .parquet or .html")
    @argument("--load", metavar="PATH", help="bring back those that %%hvd_save wrote, without what was trained")
    @argument("--pin", action="store_true", help="compare all further settings with those of now")
    @argument("--unpin", action="store_true", help="compare again with the settings before each flip")
    def hvd_runs(self, args: Namespace) -> Any:
        """Show every configuration tried, side by side; in a notebook a click on a heading sorts."""
        session, note = latest(), args.note
        if args.compare and args.export:
            raise InvalidInput("--export writes all runs, not a comparison: use --compare and --export one by one.")
        if args.pin or args.unpin:
            session.pin(args.pin)
        if args.load:
            say(session.load_runs(args.load))
        if len(note) == 1:
            run = session.runs[_number(note[0])]
            return say(run.note or f"There is no note on run {run.number}.")
        if note:
            session.runs.note(_number(note[0]), " ".join(note[1:]))
        if args.compare:
            return session.runs.compare(*args.compare)
        if args.export:
            return session.runs.export(args.export)
        runs = session.runs.sorted(args.sort) if args.sort else session.runs
        return runs.unfolded if args.all else runs


def _number(text: str) -> int:
    if not text.isdecimal():
        raise InvalidInput(f"{text!r} is not the number of a run. Write, for example:  %hvd_runs --note 3 best so far")
    return int(text)
