from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.categories import (
    ACTIVATIONS,
    CASTS,
    CATEGORIES,
    COMMUNICATION,
    GRADIENTS,
    INPUTS,
    OPTIMIZER_STATE,
    PARAMETERS,
)
from gpumem_nb.shared.errors import InvalidInput, TrainingFailed
from gpumem_nb.shared.messages import Ledger, Sample
from tests.conftest import about, weights
from tests.internals import LIVE, RANDOM
from tests.timing import HANG_S

pytestmark = pytest.mark.cluster
GPT = {"width": 32, "depth": 4, "heads": 2, "sequence_length": 64}


STATE = f"""
import hashlib
tensors = [*model.parameters()]
tensors += [value for values in optimizer.state.values() for value in values.values()]
(hashlib.sha1(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest(), {RANDOM}), {LIVE}
"""


def recorded_steps(session: Session) -> list[list[Sample]]:
    """Of each rank the samples with a ledger, latest last."""
    return [[sample for sample in of_rank if sample.ledger] for of_rank in session.history.samples()]


def latest(session: Session) -> Ledger:
    session.train(3)
    ledger = recorded_steps(session)[0][-1].ledger
    assert ledger is not None
    return ledger


def test_every_byte_of_a_step_has_a_category(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "text-gpt", **GPT)
    session.set(ledger_steps=5)
    run = session.train(21)
    for samples in recorded_steps(session):
        ours = [sample for sample in samples if sample.settings_id >= session.history.loaded_as]
        assert [sample.step for sample in ours] == [1, 2, 6, 11, 16, 21]
        for sample in ours:
            ledger = sample.ledger
            assert ledger is not None
            assert ledger.exact
            assert ledger.virtual
            assert sum(ledger.at_peak.values()) == ledger.peak_bytes == sample.live_peak_bytes
            assert sum(ledger.at_rest.values()) == sample.live_bytes
            assert set(ledger.at_peak) <= set(CATEGORIES)
            assert ledger.at_peak[INPUTS] > 0
            assert any(module.startswith("blocks.3") for module, _, _ in ledger.modules)
        assert ledger is not None
        assert ledger.at_peak[COMMUNICATION] >= 16 * 2**20, "Horovod's fusion buffer, once there is one"
    frame = run.frame()
    assert frame.activations_bytes.notna().sum() == 2 * 6
    assert ledger is not None
    assert frame.optimizer_state_bytes.max() == ledger.at_peak[OPTIMIZER_STATE]
    assert len(weights(session)) == 1


def test_weights_that_nobody_trains_are_weights_too(two_ranks: Session) -> None:
    """Of a frozen model with a small part to train, as LoRA has it; the optimizer is given that part only."""
    two_ranks.run(
        """
import torch
from torch import nn
torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
for part in backbone[:4]:
    part.requires_grad_(False)
trained = torch.optim.AdamW([p for p in backbone.parameters() if p.requires_grad])
criterion = nn.CrossEntropyLoss()
rows = [(torch.randn(64), torch.tensor(index % 4)) for index in range(64)]
"""
    )
    two_ranks.attach(model="backbone", loss="criterion", data="rows", optimizer="trained")
    two_ranks.set(batch_size=4, optimizer="own")
    ledger = latest(two_ranks)
    every = sum(4 * (shape + 1) * out for shape, out in ((64, 512), (512, 512), (512, 4)))
    assert ledger.at_peak[PARAMETERS] == every
    predicted = two_ranks.predict(batch_size=32)
    assert predicted.categories[PARAMETERS] == every


def test_each_flip_moves_its_band(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "text-gpt", **GPT)
    session.set(batch_size=16)
    plain = latest(session).at_peak
    session.set(precision="bf16")
    bf16 = latest(session).at_peak
    assert bf16[ACTIVATIONS] < 0.7 * plain[ACTIVATIONS]
    assert bf16[CASTS] > 0
    session.set(precision="fp32", checkpointing="blocks")
    assert latest(session).at_peak[ACTIVATIONS] < 0.6 * plain[ACTIVATIONS]
    session.set(checkpointing="none", optimizer="sgd")
    assert OPTIMIZER_STATE not in latest(session).at_peak
    session.set(optimizer="adamw", accumulation_steps=2)
    accumulated = latest(session).at_peak
    assert accumulated[GRADIENTS] >= accumulated[PARAMETERS]
    assert plain.get(GRADIENTS, 0) < 0.2 * accumulated[GRADIENTS]
    assert PARAMETERS in plain


def test_looking_into_steps_changes_nothing_that_is_trained(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    def losses(every: int | str) -> list[float]:
        session = fresh(two_ranks, "text-gpt", **GPT, dropout=0.1)
        session.set(ledger_steps=every, checkpointing="blocks", precision="bf16")
        return list(session.train(6).frame().sort_values(["step", "rank"]).loss)

    assert losses(1) == losses("never")
    assert not recorded_steps(two_ranks)[0][-1].settings_id > two_ranks.history.loaded_as + 1
    two_ranks.set(ledger_steps=20)


def test_how_often_is_checked(two_ranks: Session) -> None:
    with pytest.raises(InvalidInput, match="whole number of at least 1, such as 20, or auto, or never"):
        two_ranks.set(ledger_steps=0)


def test_a_recorded_step_is_undone(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "text-gpt", **GPT, dropout=0.1)
    session.train(3)
    before = session.run(STATE)
    timelines = session.timeline()
    assert [digest for digest, _ in session.run(STATE)] == [digest for digest, _ in before]
    assert [timeline.rank for timeline in timelines] == [0, 1]
    for timeline, (_, live) in zip(timelines, before, strict=True):
        assert timeline.step == 4
        totals = list(map(sum, zip(*timeline.live_bytes.values(), strict=True)))
        assert max(totals) == timeline.ledger.peak_bytes
        assert totals[0] == about(live)
        phases = [span.phase for span in timeline.spans]
        order = ["data", "forward", "backward", "reduction", "update"]
        assert [phase for phase in dict.fromkeys(phases) if phase in order] == order


@pytest.mark.full
def test_a_step_that_is_recorded_may_run_out_of_memory(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "text-gpt", **GPT)
    session.set(ledger_steps=1)
    session.train(2)
    before = session.run(STATE)
    session.set(batch_size=1024)
    assert any("out of memory" in note for note in session.train(2).notes)
    session.set(batch_size=8)
    session.set(ledger_steps=20, on_oom="stop", batch_size=1024)
    with pytest.raises(TrainingFailed, match="out of memory"):
        session.train(2)
    session.set(on_oom="revert", batch_size=8)
    assert len(weights(session)) == 1
    for (_, live), (_, live_before) in zip(session.run(STATE), before, strict=True):
        assert live == about(live_before)


def test_a_cell_reports_what_it_does_to_the_memory(two_ranks: Session) -> None:
    source = "kept = torch.zeros(2**20, dtype=torch.uint8); torch.zeros(2**21, dtype=torch.uint8).sum()"
    call = two_ranks.run_cell(source, ranks="1", title="<%%hvd cell>", memory=True)
    call.settle(HANG_S)
    (text,) = call.outputs()
    assert "live peak" in text
    assert "(virtual)" in text
    assert "left behind: 1.0 MiB" in text
    assert re.search(r"<%%hvd cell \d+>:1\b", text)
    assert "`kept` in the notebook's variables on the rank" in text
    two_ranks.run("del kept", ranks="1")
