"""All cases, and those few that ``make test`` holds."""

from __future__ import annotations

from collections.abc import Iterator

from tests.matrix.case import Case
from tests.matrix.data import DATA
from tests.matrix.deeds import DEEDS
from tests.matrix.models import MODELS
from tests.matrix.refused import REFUSED
from tests.matrix.training import TRAINING
from tests.matrix.transformers_models import GPT2, TRANSFORMERS

CHECKPOINTING = ("none", "blocks", "sqrt")
PRECISIONS = ("fp32", "bf16", "fp16")
SUBJECTS = (*MODELS, *TRANSFORMERS, *TRAINING, *DATA)


def of_models() -> Iterator[Case]:
    """Every model under every checkpointing and precision."""
    for subject in SUBJECTS:
        for precision in PRECISIONS:
            for checkpointing in CHECKPOINTING:
                yield Case(subject, checkpointing=checkpointing, precision=precision)


def of_refused() -> Iterator[Case]:
    """What is refused whatever it is trained with."""
    yield from (Case(subject) for subject in REFUSED)


def of_deeds() -> Iterator[Case]:
    """Everything that people do, on each of its models, under every checkpointing and precision.

    What agrees to rounding only says nothing in 16 bits.
    """
    for deed, subjects in DEEDS:
        for subject in subjects:
            for precision in PRECISIONS if deed.plainly is None else PRECISIONS[:1]:
                for checkpointing in CHECKPOINTING:
                    yield Case(subject, deed, checkpointing, precision)


def of_selective() -> Iterator[Case]:
    """Every model that is not compiled, of which selective checkpointing keeps half; the page has no column of it."""
    for subject in SUBJECTS:
        if "torch.compile" not in subject.name:
            yield from (Case(subject, checkpointing="selective", precision=precision) for precision in PRECISIONS[:2])


def selected() -> Iterator[Case]:
    """Every model and every deed once, each under another checkpointing than its neighbours."""
    for index, subject in enumerate(SUBJECTS):
        yield Case(subject, checkpointing=CHECKPOINTING[index % 3])
    for index, (deed, subjects) in enumerate(DEEDS):
        yield Case(subjects[0], deed, CHECKPOINTING[index % 3])
    yield from of_refused()
    yield Case(GPT2, checkpointing="sqrt", precision="bf16")
