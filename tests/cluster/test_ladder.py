"""The memory ladder on real ranks: its rungs come true when they are taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput
from tests.cluster.test_ledger import STATE
from tests.tiers import every, first_tier

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("knobs", "above"),
    first_tier(
        [({"checkpointing": "blocks"}, 1.4), ({}, 1.01), ({"precision": "bf16", "optimizer": "sgd"}, 1.01)], every(3)
    ),
)
def test_a_deeper_model_needs_what_was_said_of_its_blocks(
    two_ranks: Session, fresh: Callable[..., Session], knobs: dict[str, str], above: float
) -> None:
    found = []
    for depth in (4, 9):
        session = fresh(two_ranks, "text-gpt", width=64, depth=depth, heads=2, sequence_length=32)
        session.set(batch_size=8, **knobs)
        session.train(2)
        found.append(session.predict())
    grown = (found[1].live_peak_bytes - found[0].live_peak_bytes) / 5
    assert found[0].block_bytes is not None
    assert 0.99 * grown <= found[0].block_bytes <= above * grown


@pytest.mark.full
def test_every_rung_needs_what_was_said_when_it_is_taken(
    two_ranks: Session, fresh: Callable[..., Session], shell: InteractiveShell
) -> None:
    session = fresh(two_ranks, "text-gpt", width=64, depth=3, heads=2, sequence_length=32)
    session.set(batch_size=8)
    session.train(3)
    before = session.run(STATE)
    found = shell.run_line_magic("hvd_ladder", "")
    assert [digest for digest, _ in session.run(STATE)] == [digest for digest, _ in before]
    peaks = [found.now.live_peak_bytes, *(one.live_peak_bytes for one in found.rungs)]
    assert len(peaks) >= 4
    assert all(below <= 0.98 * above for above, below in itertools.pairwise(peaks))
    assert peaks[-1] < 0.5 * peaks[0]
    session.run("del tensors")  # which hold the state of an optimizer that rungs replace
    present = session.settings
    for number, rung in enumerate(found.rungs, 1):
        found.apply(number)
        session.train(3)
        assert session.settings == rung.settings
        # On a busy machine more gradients are on their way while backward goes on, which is a part of so small a peak.
        assert session.history.tried[-1].peak_bytes == pytest.approx(rung.live_peak_bytes, rel=0.05), rung.settings
    found.apply(0)
    assert session.settings == present
    session.set(compression="fp16")
    with pytest.raises(InvalidInput, match="found before compression changed"):
        found.apply(1)
