"""The quickstart without a browser: ``python -m gpumem_nb.demo`` trains and prints what it measured."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gpumem_nb

from .session import Session
from .shared.errors import GpumemError

MEMORY_LIMIT = "512MiB"
ACCURACY_EXPECTED = 0.95
FLIPS: list[tuple[str, dict[str, Any]]] = [
    ("Precision: forward and backward in 16 bits, weights stay in 32.", {"precision": "bf16"}),
    ("Checkpointing: recompute activations block by block instead of keeping them.", {"checkpointing": "blocks"}),
    ("Batch size: twice as many samples at once.", {"batch_size": 64}),
    ("Accumulation: the same 64 samples, in two micro-batches of 32.", {"batch_size": 32, "accumulation_steps": 2}),
]
ACCURACY = """
from gpumem_nb.workloads.evaluate import score
score("digits-resnet", model)["accuracy"]
"""


class _Disappointed(Exception):
    """Something ran and did not do what the quickstart promises."""


def main() -> int:
    """Run it all; the exit code is 0, 1 after a failure, or 130 after Ctrl-C. The ranks are stopped in any case."""
    # A shell without job control starts what it runs in the background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in a pipe as in a terminal: progress, not silence
    try:
        with _started() as session:
            _learn(session)
            _flip(session)
            _run_out_of_memory(session)
            _say("Everything that was tried, side by side:")
            print(session.runs)
    except KeyboardInterrupt:
        print("Interrupted. The ranks are stopped.", file=sys.stderr)
        return 130
    except (GpumemError, _Disappointed) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    _say("The ranks are stopped. The same in a browser, with live charts: make lab")
    return 0


@contextmanager
def _started() -> Iterator[Session]:
    _say(f"Horovod ranks with {MEMORY_LIMIT} each: one for each GPU, or on virtual ones where there is none.")
    with gpumem_nb.start(memory_limit=MEMORY_LIMIT) as session:
        print(session.chosen)
        print(session.status())
        yield session


def _learn(session: Session) -> None:
    _say("A small residual network learns handwritten digits. Each rank trains on its share of every batch.")
    session.load("digits-resnet")
    for _ in range(3):
        _train(session, 20)
    accuracy = session.run(ACCURACY, ranks=[0])[0]
    print(f"Test accuracy on rank 0: {accuracy:.1%} of 297 digits that it never saw.")
    if accuracy <= ACCURACY_EXPECTED:
        raise _Disappointed(f"the accuracy should be above {ACCURACY_EXPECTED:.0%} after 60 steps.")


def _flip(session: Session) -> None:
    _say("Now settings change on the live model; weights and optimizer state stay. Before → after of each change:")
    for words, knobs in FLIPS:
        session.set(**knobs)
        _check(session.train(8).notes)
        print(f"{words}\n    {session.history.effect()}")


def _run_out_of_memory(session: Session) -> None:
    _say("Out of memory on purpose: a GPT on text, first with 16 sequences at once, then with 1024.")
    session.load("text-gpt")
    session.set(batch_size=16, accumulation_steps=1, checkpointing="none", precision="fp32")
    _train(session, 5)
    session.set(batch_size=1024)
    run = session.train(5)
    print(run)
    if not any("ran out of memory" in note for note in run.notes) or session.settings.batch_size != 16:
        raise _Disappointed(f"1024 sequences should not have fitted into {MEMORY_LIMIT}.")
    print(f"Recovered: batch_size={session.settings.batch_size} again, {session.history.steps} steps done, no restart.")
    print(session.memory())


def _train(session: Session, steps: int) -> None:
    run = session.train(steps)
    print(run)
    _check(run.notes)


def _check(notes: list[str]) -> None:
    """Session.train returns what was done when it is interrupted; here Ctrl-C ends everything."""
    if "Interrupted." in notes:
        raise KeyboardInterrupt


def _say(text: str) -> None:
    print(f"\n{text}")


if __name__ == "__main__":
    sys.exit(main())
