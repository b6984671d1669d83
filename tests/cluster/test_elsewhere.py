"""What is trained here is predicted for GPUs that are not here, as it is now, and goes on as if nobody had asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import Tensor, nn

import gpumem_nb as gm
from gpumem_nb.magics.planning import PlanningMagics
from gpumem_nb.planning.cold_table import ColdPredictions
from gpumem_nb.planning.prediction import Prediction
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from tests.conftest import about, weights

pytestmark = pytest.mark.cluster
GPU = "A100-40GB"

OWN = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x): return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
net = nn.Sequential(*(Block() for _ in range(4)), nn.Flatten(), nn.Linear(16 * 64, 3))
rows = [(torch.randn(16, 64), torch.tensor(index % 3)) for index in range(256)]
loss = nn.CrossEntropyLoss()
"""


class Block(nn.Module):
    """The same as the cell's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def net() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(4)), nn.Flatten(), nn.Linear(16 * 64, 3))


def defined(model: Callable[[], nn.Module] = net) -> gm.Workload:
    """What the cell defines, as functions that make it."""
    return gm.Workload(
        "net",
        model,
        lambda: [(torch.randn(16, 64), torch.tensor(index % 3)) for index in range(256)],
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


@pytest.fixture
def attached(two_ranks: Session) -> Session:
    two_ranks.run(OWN)
    two_ranks.attach(model="net", loss="loss", data="rows")
    two_ranks.set(**gm.Settings(batch_size=16).changed_from(two_ranks.settings))
    return two_ranks


def elsewhere(session: Session, **knobs: Any) -> Prediction:
    found = session.predict(gpu=GPU, **knobs)
    assert isinstance(found, Prediction)
    return found


def by_definition(model: Callable[[], nn.Module] = net, **knobs: Any) -> Prediction:
    found = gm.predict(defined(model), gpu=GPU, ranks=2, **knobs)
    assert isinstance(found, Prediction)
    return found


@pytest.mark.full
def test_what_is_attached_needs_what_its_definition_needs_and_trains_on(attached: Session) -> None:
    attached.train(2)
    before, steps = weights(attached), attached.status().steps
    for knobs in ({"batch_size": 16}, {"batch_size": 64, "precision": "bf16", "checkpointing": "blocks"}):
        found, expected = elsewhere(attached, **knobs), by_definition(**knobs)
        assert found.live_peak_bytes == about(expected.live_peak_bytes)  # a number, by how the loss is written
        assert found.reserved_peak_bytes == expected.reserved_peak_bytes
        assert found.categories == about(expected.categories)
        assert found.verdict == expected.verdict
    assert (weights(attached), attached.status().steps) == (before, steps)
    assert attached.train(1).steps == 1


@pytest.mark.full
def test_what_a_cell_froze_is_predicted_frozen(attached: Session) -> None:
    def frozen() -> nn.Module:
        model = net()
        model[:3].requires_grad_(False)
        return model

    attached.run("net[:3].requires_grad_(False);")
    found = elsewhere(attached, batch_size=16)
    assert found.live_peak_bytes == about(by_definition(frozen, batch_size=16).live_peak_bytes)
    assert found.live_peak_bytes < by_definition(batch_size=16).live_peak_bytes


@pytest.mark.full
def test_the_table_is_of_the_present_settings_and_the_ranks_here(attached: Session) -> None:
    attached.set(batch_size=8, accumulation_steps=2, checkpointing="blocks")
    found = PlanningMagics(InteractiveShell.instance()).hvd_predict("--gpu T4-16GB,A100-40GB")
    assert isinstance(found, ColdPredictions)
    assert found.fitting == ("T4-16GB", "A100-40GB")
    assert "batch_size=8 checkpointing=blocks accumulation_steps=2" in str(found)
    assert found["T4-16GB"].categories["communication"] > 0  # gradients of two ranks
    one = PlanningMagics(InteractiveShell.instance()).hvd_predict("gpu=T4-16GB ranks=1 checkpointing=none")
    assert isinstance(one, ColdPredictions)
    assert list(one.by_gpu) == ["T4-16GB"]
    assert one["T4-16GB"].settings.checkpointing == "none"


@pytest.mark.full
def test_a_loaded_workload_is_predicted_as_by_its_name(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "text-gpt")
    session.train(1)
    found, expected = elsewhere(session), gm.predict("text-gpt", gpu=GPU, ranks=2)
    assert isinstance(expected, Prediction)
    assert found.live_peak_bytes == about(expected.live_peak_bytes)
    assert found.reserved_peak_bytes == expected.reserved_peak_bytes


HELD = """
import threading, torch
class Stream(torch.utils.data.IterableDataset):
    begun = 0
    def __iter__(self):
        Stream.begun += 1
        return iter([(torch.full((4,), float(place)), torch.zeros(1)) for place in range(64)])
stream, small, squared = Stream(), torch.nn.Linear(4, 1), torch.nn.MSELoss()
"""


def test_a_stream_is_not_begun_anew_to_look_at_its_samples(two_ranks: Session) -> None:
    two_ranks.run(HELD)
    two_ranks.attach(model="small", loss="squared", data="stream")
    two_ranks.set(batch_size=4)
    two_ranks.train(1)
    begun = two_ranks.run("Stream.begun")
    assert elsewhere(two_ranks).live_peak_bytes > 0
    assert two_ranks.run("Stream.begun") == begun
    assert two_ranks.train(2).steps == 2


def test_what_cannot_be_asked_or_sent_is_a_sentence(two_ranks: Session, attached: Session) -> None:
    with pytest.raises(InvalidInput, match="There is no GPU 'T5' in the table"):
        attached.predict(gpu="T5")
    with pytest.raises(InvalidInput, match="did you mean 'batch_size'"):
        attached.predict(gpu=GPU, batchsize=4)
    two_ranks.run("import threading\nnet.held = threading.Lock()")
    with pytest.raises(WorkloadError, match=r"net cannot be sent to another process .*lock.*write a Workload"):
        attached.predict(gpu=GPU)
    two_ranks.run("del net.held")
    assert attached.train(1).steps == 1
