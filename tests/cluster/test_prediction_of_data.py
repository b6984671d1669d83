"""What is predicted of data that no straight line describes: pairs of samples, and texts of different lengths."""

from __future__ import annotations

import pytest

from gpumem_nb.session import Session
from tests.cluster.test_prediction import measured

pytestmark = pytest.mark.cluster

PAIRS = """
import torch
from torch import nn
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 8)
    def forward(self, x):
        return self.left(x) @ self.right(x).T
torch.manual_seed(0)
towers = Towers()
pairs = [torch.randn(16) for _ in range(4096)]
def contrast(model, batch):
    scores = model(batch)
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))
"""


def test_a_loss_over_pairs_of_samples_needs_what_was_predicted(two_ranks: Session) -> None:
    two_ranks.run(PAIRS)
    two_ranks.attach(model="towers", loss="contrast", data="pairs")
    two_ranks.set(precision="fp32", checkpointing="none", batch_size=1024, accumulation_steps=1, optimizer="sgd")
    predicted, by_small_steps = two_ranks.predict(), two_ranks.peaks_by_batch()[1024]
    live, reserved = measured(two_ranks)
    assert live > 1024**2 * 4
    assert predicted.live_peak_bytes == pytest.approx(live, rel=0.01)
    assert by_small_steps == pytest.approx(reserved, rel=0.1)


@pytest.mark.full
def test_texts_of_different_lengths_are_predicted_roughly(two_ranks: Session) -> None:
    """Also where one small step is all there is, or where the longest text happens to be among the first."""
    two_ranks.run(
        """
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
torch.manual_seed(0)
texts = [torch.randint(0, 50, (2 + 37 * index % 61,)) for index in range(128)]
words = nn.Embedding(50, 8)
def mean(model, batch):
    return model(batch).mean()
def padded(samples):
    return pad_sequence(samples, batch_first=True)
def to_the_end(samples):
    return torch.stack([nn.functional.pad(sample, (0, 64 - len(sample))) for sample in samples])
loaders = [torch.utils.data.DataLoader(texts, 4, collate_fn=collate) for collate in (padded, to_the_end)]
rough, alike = loaders
"""
    )
    for data, known in (("rough", True), ("alike", False)):
        two_ranks.attach(model="words", loss="mean", data=data)
        two_ranks.set(precision="fp32", checkpointing="none", batch_size=4, accumulation_steps=1, optimizer="sgd")
        for batch_size in (4, 32):
            assert ("differ in size" in two_ranks.predict(batch_size=batch_size).basis) is known
