"""Steps that weights were trained for before they were attached again."""

from __future__ import annotations

import gc

import torch

from gpumem_nb.engine.step import parts
from gpumem_nb.engine.step.parts import note_steps, steps_before


def test_steps_add_up_over_attaches_and_new_weights_have_none() -> None:
    old, new = torch.ones(2), torch.ones(2)
    note_steps([old], 1000)
    note_steps([old], 10)
    assert steps_before([new, old]) == 1010
    assert steps_before([new]) == 0
    assert steps_before([]) == 0


def test_nothing_is_kept_alive() -> None:
    before = len(parts._steps)
    weight = torch.ones(2)
    note_steps([weight], 5)
    assert len(parts._steps) == before + 1
    del weight
    gc.collect()
    assert len(parts._steps) == before
