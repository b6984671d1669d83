"""Saving and resuming: training goes on as if nothing had happened, and what does not fit changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpumem_nb
from gpumem_nb.session import Session
from gpumem_nb.shared import state_file
from gpumem_nb.shared.errors import GpumemError, InvalidInput, StateFileError
from gpumem_nb.ui import wording
from tests import internals
from tests.conftest import SMALL, about, ranks, weights
from tests.internals import COLLECT, LIVE, POSITION, RANDOM, TRAINER

pytestmark = pytest.mark.cluster

# Everything that a state must hold shows in the losses: dropout and noise in the data (random numbers of torch, Python
# and NumPy), batch statistics, the optimizer's moments, the order of the data.
OWN_MODEL = """
import random
import numpy as np
from torch import nn
torch.manual_seed(3 + rank)
net = nn.Sequential(
    nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
)
features = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return len(features)
    def __getitem__(self, index):
        return features[index] * (1 + 0.1 * random.random()) + 0.1 * np.random.rand(), int(features[index, 0] > 0)
rows = Noisy()
criterion = nn.CrossEntropyLoss()
"""
MOMENTS = (
    f"__import__('hashlib').sha1(b''.join(v.cpu().numpy().tobytes() for p in {TRAINER}.live.optimizer.state.values() "
    "for v in p.values() if torch.is_tensor(v))).hexdigest()"
)


def attach_own(session: Session) -> None:
    session.run(OWN_MODEL)
    session.attach(model="net", loss="criterion", data="rows")


def losses(session: Session, steps: int) -> list[tuple[int, int, float]]:
    """(step, rank, loss), every bit of it."""
    frame = session.train(steps).frame().sort_values(["step", "rank"])
    return list(zip(frame.step, frame["rank"], frame.loss, strict=True))


def anew(n: int) -> Session:
    """A cluster of new processes."""
    internals.stop_running()
    return ranks(n)


SETTINGS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "batch_size": 16},
    {"optimizer": "momentum", "batch_size": 8, "accumulation_steps": 2, "clip_norm": 1.0, "learning_rate": 0.01},
]


@pytest.mark.full
def test_a_new_cluster_goes_on_bit_for_bit(two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path) -> None:
    session = fresh(two_ranks)
    session.train(3)
    session.save(tmp_path / "ready.state")
    expected_of_ready = losses(session, 2)
    expected = []
    for settings in SETTINGS:
        attach_own(session)
        session.set(**gpumem_nb.Settings().replace(**settings).changed_from(session.settings))
        session.train(20)
        path = tmp_path / f"{settings['optimizer']}.state"
        saved = session.save(path)
        assert (saved.steps, saved.bytes) == (20, path.stat().st_size)
        expected.append((losses(session, 12), weights(session)))

    session = anew(2)
    with pytest.raises(GpumemError, match="Nothing is loaded"):
        session.save(tmp_path / "x.state")
    with pytest.raises(StateFileError, match="not a ready-made workload"):
        session.resume(tmp_path / "adamw.state")
    assert session.workload is None
    session.resume(tmp_path / "ready.state")
    assert session.workload is not None
    assert session.workload.name == "digits-resnet"
    assert losses(session, 2) == expected_of_ready
    for settings, (expected_losses, fingerprint) in zip(SETTINGS, expected, strict=True):
        assert len(fingerprint) == 1
        attach_own(session)
        assert session.resume(tmp_path / f"{settings['optimizer']}.state").steps == 20
        assert session.settings == gpumem_nb.Settings().replace(**settings)
        assert session.status().steps == 20
        assert ", 2.5 epochs" in wording.tiles(session, session.history.readings)
        assert losses(session, 12) == expected_losses
        assert weights(session) == fingerprint

    assert sorted(path.name for path in tmp_path.iterdir()) == ["adamw.state", "momentum.state", "ready.state"]


@pytest.mark.full
def test_one_rank_goes_on_from_two_and_two_from_one(two_ranks: Session, tmp_path: Path) -> None:
    session = two_ranks
    attach_own(session)
    session.set(**gpumem_nb.Settings(batch_size=16).changed_from(session.settings))
    session.train(5)
    session.save(tmp_path / "two.state")
    fingerprint, position = weights(session), session.run(POSITION)[0]
    assert position == 5 * 16 * 2

    session = anew(1)
    attach_own(session)
    session.resume(tmp_path / "two.state")
    assert weights(session) == fingerprint
    assert session.run(POSITION) == [position]
    assert losses(session, 4)[0][0] == 6
    session.save(tmp_path / "one.state")
    fingerprint, position = weights(session), position + 4 * 16
    assert session.run(POSITION) == [position]

    session = anew(2)
    attach_own(session)
    session.resume(tmp_path / "one.state")
    assert weights(session) == fingerprint
    assert session.run(POSITION) == [position] * 2
    assert len(set(session.run(RANDOM))) == 2
    assert [step for step, rank, _ in losses(session, 3) if rank == 1] == [10, 11, 12]
    assert len(weights(session)) == 1
    assert session.run(POSITION) == [position + 3 * 16 * 2] * 2


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_state_is_resumed_under_any_precision(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path, precision: str
) -> None:
    session = fresh(two_ranks)
    session.set(precision=precision, batch_size=16)
    session.train(4)
    session.save(tmp_path / "x.state")
    expected = losses(session, 3)
    session.set(precision="bf16" if precision == "fp32" else "fp32", checkpointing="blocks", optimizer="sgd")
    session.train(2)
    session.resume(tmp_path / "x.state")
    assert (session.settings.precision, session.settings.checkpointing) == (precision, "none")
    assert losses(session, 3) == expected
    session.resume(tmp_path / "x.state")
    session.set(precision="bf16")
    assert losses(session, 1)[0][0] == 5
    assert len(weights(session)) == 1


def test_saving_takes_no_device_memory_and_changes_nothing(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.train(3)
    live, fingerprint, moments = session.run(LIVE), weights(session), session.run(MOMENTS)
    session.save(tmp_path / "x.state")
    assert session.run(LIVE) == about(live)
    session.resume(tmp_path / "x.state")
    assert session.run(LIVE) == about(live)
    assert (weights(session), session.run(MOMENTS)) == (fingerprint, moments)


def test_saving_while_training_leaves_it_training(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.play()
    first = session.save(tmp_path / "x.state")
    for rate in (0.01, 0.02, 0.03):
        session.set(learning_rate=rate)
        second = session.save(tmp_path / "x.state")
        saved = state_file.peek(tmp_path / "x.state").settings["learning_rate"]
        assert saved == rate, "what was asked for holds, though ranks are in steps from before"
    assert session.playing
    assert second.steps >= first.steps
    session.pause()
    assert session.status().steps >= second.steps
    session.resume(tmp_path / "x.state")
    assert session.status().steps == second.steps
    assert "paused at step" in str(session.status())


def test_the_workloads_own_optimizer_comes_back(two_ranks: Session, tmp_path: Path) -> None:
    session = two_ranks
    session.run(OWN_MODEL + "\nown = torch.optim.RMSprop(net.parameters(), lr=0.002, momentum=0.5)")
    session.attach(model="net", loss="criterion", data="rows", optimizer="own")
    session.train(5)
    session.save(tmp_path / "x.state")
    expected = losses(session, 4)
    session.run(OWN_MODEL + "\nown = torch.optim.RMSprop(net.parameters(), lr=0.1)")
    session.attach(model="net", loss="criterion", data="rows", optimizer="own")
    session.resume(tmp_path / "x.state")
    assert session.settings.learning_rate == 0.002
    assert losses(session, 4) == expected
    session.run(OWN_MODEL + "\nown = torch.optim.Adagrad(net.parameters())")
    session.attach(model="net", loss="criterion", data="rows", optimizer="own")
    with pytest.raises(StateFileError, match="saved with RMSprop"):
        session.resume(tmp_path / "x.state")
    assert losses(session, 1)[0][0] == 1


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def trained(two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path) -> Iterator[Session]:
    """A session with a state file; at the end everything must be as before."""
    session = fresh(two_ranks)
    session.train(2)
    session.save(tmp_path / "x.state")
    session.run(COLLECT)

    def everything() -> tuple[object, ...]:
        return weights(session), session.settings, session.run(MOMENTS), session.status().steps

    before, live = everything(), session.run(LIVE)
    yield session
    assert everything() == before
    assert session.run(LIVE) == about(live)
    assert session.train(1).steps == 1


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (cut, "is cut off"),
        (flip_bit, "is damaged"),
        (lambda p: p.write_bytes(b"PK\x03\x04" + bytes(999)), "is not a training state"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b"state 1\n", b"state 9\n", 1)), "newer gpumem_nb"),
        (lambda p: p.unlink(), "There is no file"),
    ],
    ids=["truncated", "damaged", "foreign", "newer", "missing"],
)
def test_a_file_that_cannot_be_used_changes_nothing(
    trained: Session, tmp_path: Path, harm: Callable[[Path], object], sentence: str
) -> None:
    harm(tmp_path / "x.state")
    with pytest.raises(StateFileError, match=sentence) as caught:
        trained.resume(tmp_path / "x.state")
    assert "\n" not in str(caught.value)


def test_another_model_or_dataset_is_refused_by_name(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.save(tmp_path / "x.state")
    session.load("digits-resnet", **{**SMALL, "width": 4})
    before = weights(session)
    with pytest.raises(StateFileError, match=r"its parameter '[\w.]+' is float32\[8, .* in the loaded model .*\[4, "):
        session.resume(tmp_path / "x.state")
    assert weights(session) == before
    session.run("layer = torch.nn.Linear(1, 1); few = [torch.ones(1) for _ in range(10)]")
    session.run("def mean(model, batch):\n    return model(batch).mean()")
    session.attach(model="layer", data="few", loss="mean")
    with pytest.raises(StateFileError, match="a dataset of 1500 samples; this one has 10"):
        session.resume(tmp_path / "x.state")
    assert session.train(1).steps == 1


def test_what_cannot_be_stored_safely_is_named(two_ranks: Session, tmp_path: Path) -> None:
    session = two_ranks
    session.run(
        OWN_MODEL
        + """
class Odd(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        if rank == 0:
            self.state[self.param_groups[0]["params"][0]]["what"] = object()
own = Odd(net.parameters(), lr=0.01)
"""
    )
    session.attach(model="net", loss="criterion", data="rows", optimizer="own")
    session.train(1)
    with pytest.raises(StateFileError, match="Odd keeps a object in its state"):
        session.save(tmp_path / "x.state")
    assert session.train(1).steps == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_rank_that_cannot_copy_its_part_leaves_nobody_waiting(two_ranks: Session, tmp_path: Path) -> None:
    session = two_ranks
    attach_own(session)
    session.train(1)
    session.run("dense = net[1].running_mean\nif rank == 1:\n    net[1].running_mean = dense.to_sparse()")
    with pytest.raises(StateFileError, match="on rank 1 cannot be copied"):
        session.save(tmp_path / "x.state")
    session.run("net[1].running_mean = dense")
    assert session.train(1).steps == 1
    session.save(tmp_path / "x.state")


LIMIT = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))"


def test_a_disk_that_takes_no_more_keeps_the_older_file(trained: Session, tmp_path: Path) -> None:
    before = (tmp_path / "x.state").read_bytes()
    trained.run(LIMIT.format(20_000))
    try:
        with pytest.raises(StateFileError, match="larger than this process may write"):
            trained.save(tmp_path / "x.state")
    finally:
        trained.run(LIMIT.format("resource.RLIM_INFINITY"))
    assert (tmp_path / "x.state").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.state"]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/nowhere/x.state", "there is no such folder"),
        ("/proc/x.state", "cannot be written"),
        ("/", "this is a folder"),
        ("", "is not a file's path"),
        (7, "is not a file's path"),
    ],
)
def test_a_path_that_cannot_be_used_gets_a_sentence(trained: Session, path: Any, sentence: str) -> None:
    with pytest.raises(GpumemError, match=sentence) as caught:
        trained.save(path)
    assert "\n" not in str(caught.value)


def test_resuming_from_what_is_no_path_is_refused(two_ranks: Session) -> None:
    with pytest.raises(InvalidInput, match="not a file's path"):
        two_ranks.resume("")
