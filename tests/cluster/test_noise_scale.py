"""The gradient noise scale of real ranks."""

from __future__ import annotations

import re

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.settings import Settings
from gpumem_nb.ui import wording

pytestmark = pytest.mark.cluster

# The gradient of a sample is w - x: the true one is w - mean(x), its variance that of the data.
# Only some numbers of each weight are used: they are as large as they are to travel in buckets of their own.
QUADRATIC = """
from torch import nn
samples = torch.randn(4096, 400, generator=torch.Generator().manual_seed(3))
rows = torch.utils.data.TensorDataset(samples)
class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.early = nn.Parameter(torch.full((1_100_000,), 0.25))  # travels while the other is still computed
        self.late = nn.Parameter(torch.full((1_100_000,), 0.25))
net = Point()
own = torch.optim.SGD(net.parameters(), lr=0.0)
def loss(net, batch):
    return (torch.cat([net.late[:300], net.early[:100]]) - batch[0]).square().sum(dim=1).mean() / 2
analytic = (samples.var(dim=0).sum() / (0.25 - samples.mean(dim=0)).square().sum()).item()
"""


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_it_is_the_analytic_one_within_a_tenth(two_ranks: Session, precision: str) -> None:
    session = two_ranks
    session.run(QUADRATIC)
    session.attach(model="net", data="rows", loss="loss", optimizer="own")
    default = Settings(batch_size=8, accumulation_steps=2, optimizer="own", precision=precision, learning_rate=0.0)
    session.set(**default.changed_from(session.settings))
    analytic = session.pull("analytic")[0]
    frame = session.train(600).frame()
    found = frame[frame.noise_scale.notna()]
    assert sorted(set(found.step % 20)) == [11]
    assert found.groupby("step").noise_scale.nunique().max() == 1, "all ranks see the same"
    assert found.noise_scale.iloc[-1] == pytest.approx(analytic, rel=0.1)
    assert session.history.noise_scale == found.noise_scale.iloc[-1]
    assert re.search(r"Critical batch about [0-9]+ samples; the global batch is 32", wording.critical(session))
    session.set(batch_size=2, accumulation_steps=1)
    assert session.train(200).frame().noise_scale.dropna().iloc[-1] == pytest.approx(analytic, rel=0.1)
