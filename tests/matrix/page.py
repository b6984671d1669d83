"""docs/compatibility.md: what was held, to which exactness, and what is refused with its sentence."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Iterator

from tests.matrix.case import NOTHING, Case
from tests.matrix.cases import CHECKPOINTING, PRECISIONS
from tests.matrix.compare import EXACT, REFUSED, ROUNDED, Result

PACKAGES = ("torch", "horovod", "transformers", "peft", "numpy")
INTRODUCTION = """\
# Compatibility

Other people's models, data and habits on {ranks} ranks, held against a plain loop in one process that simulates the
ranks (`tests/reference.py`: the same initial weights, order of samples and random numbers, gradients averaged, no
checkpointing). Each case trains three steps, does something, and trains three more; then the losses of every step on
every rank, and all weights and buffers on every rank, are compared. This page is written by `make matrix`, which ends
with an error when a case does not hold; `make test` holds a selection.

- **bit**: equal to the last bit. Under bf16 that is autocast on both sides.
- **rounding**: equal to rounding (relative 1e-4), because the reference adds up in another order.
- **refused**: not trained, with the sentence below the table.
"""

RESTORED = """## What undoing restores

A step that one rank cannot finish, a question, an evaluation and a recorded step leave no trace. What is kept before
they run, and put back bit for bit where it differs:

- weights (those that forward itself writes too, found out by their content in the first step and in the first
  evaluation after each cell) and their memory where `data` was replaced, buffers, the optimizer's state and options,
  tensors and containers among them, the loss scale, the learning rate;
- random numbers of torch, CUDA, NumPy and Python, and generators that the model keeps;
- attributes of modules, of hooks, of the loss, and of objects, dataclasses and slots that these hold; closures,
  defaults and globals of your own functions among them, attributes of your own classes, and variables of your own
  modules by the names that these functions use; names that come in the step are dropped;
- hooks of modules, and those that `register_hook` puts on weights;
- what lists, dicts, tuples, sets and deques among these hold, of any length and six deep; tensors in them of up to
  64 KiB, and larger ones once their content was seen to change; NumPy arrays likewise;
- what `bytearray`, `array.array`, `threading.local` and the queues of `queue` hold.

What one part raises stops no other, and the next step tells of it. A cell may change anything, so after each of them
all that was learned of the model is found out anew, and the first update can be undone.

Not restored: files, prints and what runs on other machines; objects of installed packages and of Python's own modules
(such as pandas frames, `contextvars`, `io.StringIO`), and their variables; objects of datasets, samplers and
schedulers;
what `next()` took from an iterator; other attributes of tensors, what serves as a key, and what `lru_cache` keeps; a
tensor above 1 MiB that is neither a weight nor a buffer, in the first step that writes it, and in each that writes it
through `.data` alone; one above 64 KiB that is written through `.data` for the first time after some steps without (in
a checkpointed block it is refused in the next comparison); trained weights above 64 KiB that forward writes
in a question that comes before the first step after a cell (the next step says so).
"""


def page(results: list[Result], ranks: int) -> str:
    """The whole page."""
    by_case = {result.case: result for result in results}
    notes: list[str] = []
    lines = [INTRODUCTION.format(ranks=ranks), "## Models and data", ""]
    columns = [(checkpointing, precision) for precision in PRECISIONS for checkpointing in CHECKPOINTING]
    heads = [f"{precision}, {checkpointing}" for checkpointing, precision in columns]
    lines += _head(["what is trained", *heads])
    refused = [result for result in results if result.case.subject.refused]
    for subject in dict.fromkeys(r.case.subject for r in results if r.case.deed is NOTHING and r not in refused):
        row = [Case(subject, NOTHING, *column) for column in columns]
        lines.append(_row(subject.name, [_cell(by_case[case], notes) for case in row]))
    lines += ["", "## What people do between two chunks", ""]
    lines += _head(["what", "on which model", *heads])
    for deed, subject in dict.fromkeys((r.case.deed, r.case.subject) for r in results if r.case.deed is not NOTHING):
        row = [Case(subject, deed, *column) for column in columns]
        squares = [_cell(by_case[case], notes) if case in by_case else "n/a" for case in row]
        lines.append(_row(deed.name, [subject.name, *squares]))
    lines += ["", "## What is refused", "", *_head(["what", "the sentence"])]
    lines += [_row(result.case.subject.name, [result.sentence.replace("|", "\\|")]) for result in refused]
    lines += ["", *RESTORED.splitlines()]
    if notes:
        lines += ["", "## Sentences", "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    lines += ["", *_versions(), ""]
    return "\n".join(lines)


def _cell(result: Result, notes: list[str]) -> str:
    word = {EXACT: "bit", ROUNDED: "rounding", REFUSED: "refused", "": "**fails**"}[result.held]
    if not result.sentence:
        return word
    if result.sentence not in notes:
        notes.append(result.sentence)
    return f"{word} ({notes.index(result.sentence) + 1})"


def _head(columns: list[str]) -> list[str]:
    return [_row(columns[0], columns[1:]), "|---" * len(columns) + "|"]


def _row(first: str, others: list[str]) -> str:
    return f"| {' | '.join([first, *others])} |"


def _versions() -> Iterator[str]:
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    yield f"Run on {time.strftime('%Y-%m-%d')} with Python {platform.python_version()}, {packages}; one thread a rank."
    yield "Run again: `make matrix`"
