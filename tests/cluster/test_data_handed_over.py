"""Loaders, workers and iterables of real ranks."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import TrainingFailed, WorkloadError
from tests.conftest import SMALL, weights

pytestmark = pytest.mark.cluster

CODE = """
import multiprocessing, os, signal
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler

class Rows(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        assert index < 30, "that is validated with"
        print("sample", index, flush=True)
        return index + torch.rand(4)

class Lines(IterableDataset):
    def __iter__(self):
        for index in torch.randperm(11):
            yield index + torch.rand(4)

def make():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

def loss(model, batch):
    return model(batch).square().mean() * 1e-3

net, lines = make(), Lines()
sampler = SubsetRandomSampler(range(30))
loader = DataLoader(Rows(), batch_size=3, sampler=sampler, num_workers=2)

def workers():
    return sorted(process.pid for process in multiprocessing.active_children())
"""


def losses(session: Session, steps: int) -> list[float]:
    return list(session.train(steps).frame().sort_values(["step", "rank"]).loss)


def attached(session: Session, **knobs: object) -> Session:
    session.run(CODE)
    session.attach(model="net", data="loader", loss="loss")
    session.set(learning_rate=0.01, optimizer="adamw", **knobs)
    return session


def test_a_loader_is_taken_by_its_word_and_its_workers_change_no_loss(two_ranks: Session) -> None:
    session = attached(two_ranks)
    assert (session.settings.batch_size, session.settings.num_workers) == (3, 2)
    with_workers = losses(session, 12)
    pids = [pid for of_rank in session.run("workers()") for pid in of_rank]
    assert len(pids) == 4
    assert len(weights(session)) == 1
    attached(session, num_workers=0)
    assert not any(psutil.pid_exists(pid) for pid in pids), "they ended with what they were for"
    assert losses(session, 12) == with_workers
    assert session.run("workers()") == [[], []]


@pytest.mark.full
def test_a_worker_that_dies_is_named_and_training_goes_on(two_ranks: Session) -> None:
    session = attached(two_ranks)
    session.train(4)
    for worker in psutil.Process(session.ranks[1].pid).children():
        worker.kill()
    with pytest.raises(
        TrainingFailed, match=r"rank 1 failed in the data part .* A data worker \(pid \d+\) was ended by"
    ):
        session.train(20)
    session.train(4)
    assert len(weights(session)) == 1
    two_ranks.load("digits-resnet", **SMALL)
    assert session.run("workers()") == [[], []]


def test_ranks_that_hold_different_data_are_refused(two_ranks: Session) -> None:
    session = attached(two_ranks)
    session.run("rows = torch.utils.data.TensorDataset(torch.ones(8 + rank, 4))")
    with pytest.raises(WorkloadError, match="rank 0 has 8 samples, rank 1 has 9"):
        session.attach(model="net", data="rows", loss="loss")
    session.run("rows = torch.utils.data.TensorDataset(torch.full((8, 4), float(rank)))")
    with pytest.raises(WorkloadError, match="samples on rank 1 are not those on rank 0"):
        session.attach(model="net", data="rows", loss="loss")
    session.train(2)  # what was attached before


def test_an_iterable_is_found_again_where_a_state_was_saved(two_ranks: Session, tmp_path: Path) -> None:
    session = two_ranks
    session.run(CODE)
    info = session.attach(model="net", data="lines", loss="loss")
    session.set(batch_size=2)
    assert info.dataset_len is None
    assert "n/a samples" in str(session.status())
    session.train(5)
    session.save(tmp_path / "lines.state")
    expected = losses(session, 6)
    session.resume(tmp_path / "lines.state")
    assert losses(session, 6) == expected
    assert len(weights(session)) == 1
