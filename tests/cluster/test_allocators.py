"""What the caching allocator would reserve, were it set otherwise, is what it reserves once it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from torch import Tensor, nn

import gpumem_nb
from gpumem_nb import Workload
from gpumem_nb.planning.prediction import DOES_NOT_FIT
from gpumem_nb.session import Session
from gpumem_nb.shared.allocator_settings import VARIABLES
from tests.cluster.test_prediction import EMPTY

pytestmark = pytest.mark.cluster
OTHERS = ("expandable_segments", "roundup_power2_divisions:1", "roundup_power2_divisions:2", "max_split_size_mb:21")


class Widening(nn.Module):
    """Layers of sizes that are no powers of two, some above 10 MiB of activations."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 3000, 300, 7000, 33)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return torch.mean(self.head(x))


def rows() -> list[Tensor]:
    return list(torch.zeros(8192, 16))


WIDENING = Workload("widening", Widening, rows, lambda model, batch: model(batch))


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        for variable in VARIABLES:
            patch.delenv(variable, raising=False)
        yield from session_of_its_own()


def session_of_its_own() -> Iterator[Session]:
    with gpumem_nb.start(2, device="cpu", memory_limit="256MiB") as session:
        session.load(WIDENING)
        session.set(batch_size=512, optimizer="adamw")
        session.train(2)
        yield session


def came(session: Session) -> int:
    """Reserved bytes of the rank that has most, beginning with an empty cache."""
    session.run(EMPTY)
    return int(session.train(3).frame().groupby("step").reserved_peak_bytes.max().median())


@pytest.mark.full
def test_asking_changes_nothing_and_says_how_to_have_it(session: Session) -> None:
    weights, steps = session.run("[p.sum().item() for p in model.parameters()]"), session.history.steps
    said = session.allocator_what_if()
    assert (session.run("[p.sum().item() for p in model.parameters()]"), session.history.steps) == (weights, steps)
    best, least = min(said.others, key=lambda entry: entry[1].reserved_peak_bytes)
    assert least.reserved_peak_bytes < 0.97 * said.now[1].reserved_peak_bytes
    assert f"%env PYTORCH_CUDA_ALLOC_CONF={best} and %hvd_restart" in str(said)
    frame = said.frame()
    assert list(frame.allocator)[1:] == [str(settings) for settings, _ in said.others]
    assert frame.reserved_peak_bytes.notna().all()


@pytest.mark.full
def test_by_magic(shell: InteractiveShell, session: Session) -> None:
    said = shell.run_line_magic("hvd_memory", "--what-if expandable_segments max_split_size_mb=64")
    assert [str(settings) for settings, _ in said.others] == ["expandable_segments:True", "max_split_size_mb:64"]
    assert len(shell.run_line_magic("hvd_memory", "--what-if").others) == 4
    with pytest.raises(UsageError, match="did you mean 'expandable_segments'"):
        shell.run_line_magic("hvd_memory", "--what-if expandable")


@pytest.mark.full
def test_of_a_step_that_does_not_fit_small_ones_tell(session: Session) -> None:
    session.set(batch_size=4096)
    try:
        said = session.allocator_what_if("expandable_segments")
        assert said.now[1].verdict == DOES_NOT_FIT
        assert said.now[1].basis.startswith("scaled")
        assert said.now[1].reserved_peak_bytes > 256 * 2**20
    finally:
        session.set(batch_size=512)


@pytest.mark.full
def test_what_is_said_is_what_comes(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    said = session.allocator_what_if(*OTHERS)
    foreseen = {str(settings): one for settings, one in said.others}
    assert list(foreseen) == ["expandable_segments:True", "roundup_power2_divisions:2", "max_split_size_mb:21"]
    now = said.now[1]
    assert now.low_bytes <= came(session) <= now.high_bytes
    peaks = {one.reserved_peak_bytes for one in (now, *foreseen.values())}
    assert len(peaks) > 2, "a test in which all are alike would show nothing"
    for setting, one in foreseen.items():
        with monkeypatch.context() as patch:
            patch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
            session.restart()
        assert str(session.ranks[1].allocator) == setting
        now, reserved = session.predict(), came(session)
        assert one.low_bytes <= reserved <= one.high_bytes, setting
        assert now.low_bytes <= reserved <= now.high_bytes, setting
