"""The knob ``checkpointing``."""

from __future__ import annotations

from collections.abc import Iterator

from ..categories import ACTIVATIONS, CASTS
from ..workload import WorkloadInfo
from .knob import KEEPS, MOST, SOME, Changes, Knob, LiveModel, Need, Settings, carried


def _apply(live: LiveModel, settings: Settings) -> None:
    live.set_checkpointing(settings.checkpointing)


def _lighter(need: Need) -> Iterator[Changes]:
    # Whether √n blocks save more than single ones depends on the model.
    if need.blocks and need.settings.checkpointing == "none":
        yield {"checkpointing": "blocks"}


def _adapts(settings: Settings, workload: WorkloadInfo) -> Changes:
    return {} if workload.blocks else {"checkpointing": "none"}


CHECKPOINTING = Knob(
    "checkpointing",
    "none",
    "activation checkpointing: keep all activations, or recompute them in backward per block or per √n blocks",
    in_front=True,
    choices=("none", "blocks", "sqrt"),
    short="ckpt ",
    moves={ACTIVATIONS: MOST, CASTS: SOME},  # casts are made one segment at a time
    mathematics=KEEPS,
    apply=_apply,
    lighter=_lighter,
    adapts=_adapts,
    retired={"all": "none"},  # one segment over all blocks, which saved nothing
    exported=carried,
)
