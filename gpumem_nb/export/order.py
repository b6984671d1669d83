"""The input of a script: where model and data come from, and under what they are trained."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ..shared.questions import Facts
from ..shared.settings import Settings


def quoted(text: str) -> str:
    """Text as it stands in a script."""
    return json.dumps(text, ensure_ascii=False)


ROLES = {"model": "model", "data": "data", "loss": "loss_of", "optimizer": "optimizer", "scheduler": "scheduler"}
ROLES |= {"eval_data": "eval_data", "metric": "metric"}
"""The names by role under which ``main`` of a script gets the user's own objects."""
PREPARED = {
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "data": "base_dataloader",
    "eval_data": "base_dataloader",
}
"""Where what accelerate's ``prepare()`` gives has what it was given, by role."""
MAKERS = {role: f"make_{name}" for role, name in ROLES.items() if role not in ("loss", "metric")}
"""The same where it is given functions that make it."""


@dataclass(frozen=True, slots=True)
class Source:
    """The code of model and data.

    Attributes:
        kind: ``ready`` for a ready-made workload, ``functions`` for those of a ``Workload``, ``cells``.
        template, options: of a ready-made workload.
        separable: whether its convolutions are.
        imports: lines that come first, of functions; cells have theirs in the code.
        definitions: the code.
        names: what the user's own code calls each role.
        cell_seed: where the random numbers of cells began.
        uses: names that ranks or IPython offer to cells, and the code uses.
        saves: whether functions in it write files by ``torch.save``.
        prepares: whether it uses accelerate, which takes MPI's or torchrun's ranks for its own.
        plots: whether it imports matplotlib or seaborn.
        defines: names that the code defines.
        left_out: statements of cells that do something outside of the script, such as making files, and are not in it.
        settings: statements in it that set something of the whole process.
        lazy_annotations: whether annotations of some of it are not evaluated.
    """

    kind: str
    template: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    separable: bool = False
    imports: tuple[str, ...] = ()
    definitions: str = ""
    names: dict[str, str] = field(default_factory=dict)
    cell_seed: int = 0
    uses: frozenset[str] = frozenset()
    saves: bool = False
    prepares: bool = False
    plots: bool = False
    defines: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    lazy_annotations: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """The description of the script to write.

    Attributes:
        threads: of each rank; ``None`` leaves them to torch.
        eval_every: steps between evaluations, 0 for none but the last.
        steps: how many the script takes by default.
        evaluates: whether there is validation data.
        own_rate: the learning rate that the workload's own optimizer came with.
        header: of the script.
        folder: in which it will lie.
        parameter_bytes: of the model.
    """

    source: Source
    settings: Settings
    facts: Facts
    ddp: bool
    threads: int | None
    eval_every: int
    steps: int
    evaluates: bool
    own_rate: float | None
    header: str
    folder: str
    parameter_bytes: int
