"""Knobs of how gradients travel, on real ranks, held against a plain Horovod script in the same environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.cluster.launchers import mpi
from gpumem_nb.install.mpi_tools import require_tool
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, RankError, TrainingFailed, WorkloadError
from gpumem_nb.shared.knobs.communication import VARIABLES
from gpumem_nb.shared.settings import Settings
from tests.conftest import weights
from tests.tiers import every, first_tier
from tests.timing import HANG_S, in_time, until

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
MIB = 2**20
STEPS, BATCH = 6, 4
NET = """
import torch
from torch import nn
torch.manual_seed(5)
net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
features = torch.randn(64, 6)
data = torch.utils.data.TensorDataset(features, features[:, :3].argmax(1))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
"""
PLAIN_SGD = "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"


def plain_script(file: Path, ranks: int, knobs: Mapping[str, Any]) -> list[list[float]]:
    """Losses of each rank, step by step, of the plain script with Horovod's own settings in its environment."""
    settings = Settings(**knobs)
    variables = {variable.name: variable.written(knobs[knob]) for knob, variable in VARIABLES.items() if knob in knobs}
    arguments = (str(file), str(BATCH), str(STEPS), settings.compression, settings.reduction)
    answer = subprocess.run(
        [str(require_tool("mpiexec")), "-n", str(ranks), sys.executable, "-m", "tests.plain_horovod", *arguments],
        cwd=ROOT,
        env=os.environ | mpi.environment(1, "cpu") | variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    losses: list[list[float]] = json.loads(answer.stdout.splitlines()[-1])
    return losses


def losses_of(session: Session, code: str, knobs: Mapping[str, Any]) -> list[list[float]]:
    """The same of ranks, which flip to the knobs before the first step."""
    session.run(code)
    own = {} if "optimizer" in knobs else {"optimizer": "optimizer"}
    session.attach(model="net", data="data", loss="criterion", **own)
    session.set(batch_size=BATCH, **knobs)
    frame = session.train(STEPS).frame()
    return [list(frame[frame["rank"] == rank].loss) for rank in range(session.size)]


EXACT, HALF = 1e-6, 1e-4  # what is rounded to 16 bit is the gradient here, and the update there
KNOBS: tuple[tuple[dict[str, Any], float], ...] = (
    ({}, EXACT),
    ({"compression": "fp16"}, EXACT),
    ({"compression": "fp16", "bucket_mib": 0.001}, EXACT),
    ({"reduction": "sum"}, EXACT),
    ({"fusion_threshold_mib": 0.001, "bucket_mib": 0.001}, EXACT),
    ({"cycle_time_ms": 5}, EXACT),
    ({"cache_capacity": 0}, EXACT),
    ({"reduction": "adasum", "optimizer": "sgd", "learning_rate": 0.1}, EXACT),
    ({"reduction": "adasum", "optimizer": "sgd", "learning_rate": 0.1, "compression": "fp16"}, HALF),
)


@pytest.mark.parametrize(("knobs", "rounding"), first_tier(KNOBS, lambda index, _: index == 3), ids=str)
def test_each_knob_gives_the_losses_of_a_plain_script_with_the_same_environment(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path, knobs: dict[str, Any], rounding: float
) -> None:
    fresh(two_ranks)
    code = NET + PLAIN_SGD if "optimizer" in knobs else NET
    file = tmp_path / "trained.py"
    file.write_text(code)
    plain = plain_script(file, 2, knobs)
    measured = losses_of(two_ranks, code, knobs)
    assert len(plain) == len(measured) == 2
    for rank in range(2):
        assert measured[rank] == pytest.approx(plain[rank], rel=rounding)
    assert len(weights(two_ranks)) == 1


@pytest.mark.full
@pytest.mark.parametrize("knobs", [{"compression": "fp16"}, {"reduction": "adasum", "optimizer": "sgd"}], ids=str)
def test_four_ranks_get_what_a_plain_script_gets_the_same_bits_on_each(
    four_ranks: Session, fresh: Callable[..., Session], tmp_path: Path, knobs: dict[str, Any]
) -> None:
    fresh(four_ranks)
    file = tmp_path / "trained.py"
    file.write_text(NET + PLAIN_SGD)
    knobs = {"optimizer": "sgd", "learning_rate": 0.1, **knobs}
    plain = plain_script(file, 4, knobs)
    for measured, expected in zip(losses_of(four_ranks, NET + PLAIN_SGD, knobs), plain, strict=True):
        assert measured == pytest.approx(expected, rel=EXACT)
    assert len(weights(four_ranks)) == 1


TABLE = (
    NET
    + """
data = torch.utils.data.TensorDataset(torch.arange(64).reshape(32, 2), torch.arange(32) % 3)
net = nn.Sequential(nn.EmbeddingBag(64, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 3))
net[1].weight.requires_grad_(False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""
)


@pytest.mark.parametrize("reduction", ["average", "sum"])
def test_sparse_gradients_travel_under_compression_beside_frozen_weights(
    two_ranks: Session, fresh: Callable[..., Session], reduction: str
) -> None:
    wide = losses_of(fresh(two_ranks), TABLE, {"reduction": reduction})
    narrow = losses_of(fresh(two_ranks), TABLE, {"reduction": reduction, "compression": "fp16"})
    for measured, expected in zip(narrow, wide, strict=True):
        assert measured == pytest.approx(expected, rel=1e-2)
    assert len(weights(two_ranks)) == 1


def communication(run: Any) -> float:
    """What gradients on their way take at the peak, in MiB."""
    return float(run.frame().communication_bytes.max()) / MIB


@pytest.mark.full
def test_a_flip_of_horovods_own_settings_takes_little_time_and_changes_its_buffer(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    assert communication(session.train(3)) == pytest.approx(16, abs=0.5)
    for mib in (2, 32):
        began_s = time.monotonic()
        session.set(fusion_threshold_mib=mib)
        assert in_time(time.monotonic() - began_s, 0.5)
        assert communication(session.train(3)) == pytest.approx(mib, abs=0.5)
    session.set(cycle_time_ms=100)
    slow = session.train(6).frame().step_s.median()
    began_s = time.monotonic()
    session.set(fusion_threshold_mib="default", cycle_time_ms="default")
    assert in_time(time.monotonic() - began_s, 0.5)
    run = session.train(6)
    assert communication(run) == pytest.approx(16, abs=0.5)
    assert slow > 0.03 + run.frame().step_s.median()
    assert len(weights(session)) == 1


@pytest.mark.full
def test_what_a_flip_of_the_buffer_would_need_is_predicted_and_taken_back(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    before = session.train(3).frame().live_bytes.max()
    predicted = session.predict(fusion_threshold_mib=2)
    assert predicted.categories["communication"] == pytest.approx(2 * MIB, rel=0.05)
    assert session.train(2).frame().live_bytes.max() == pytest.approx(before, abs=MIB / 8), "but for gradients"
    session.set(fusion_threshold_mib=2)
    came = session.train(4).frame().live_peak_bytes.max()
    assert came == pytest.approx(predicted.live_peak_bytes, rel=0.01)


@pytest.mark.full
def test_knobs_are_kept_across_rescue_save_resume_and_restart(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    knobs = {"compression": "fp16", "bucket_mib": 0.01, "fusion_threshold_mib": 2, "cycle_time_ms": 2}
    session = fresh(two_ranks)
    session.set(**knobs)
    session.train(2)
    session.run("hook = model.register_forward_pre_hook(lambda *_: 1 / 0)", ranks=1)
    with pytest.raises(TrainingFailed, match="ZeroDivisionError"):
        session.train(1)
    session.run("hook.remove()", ranks=1)
    session.save(tmp_path / "trained.state")
    plain = list(session.train(3).frame().loss)
    session.set(compression="none", bucket_mib=4, fusion_threshold_mib="default", cycle_time_ms="default")
    session.resume(tmp_path / "trained.state")
    assert list(session.train(3).frame().loss) == pytest.approx(plain, rel=1e-6)
    session.restart()
    assert knobs.items() <= session.settings.as_dict().items()
    assert communication(session.train(2)) == pytest.approx(2, abs=0.5)
    assert session.run("[__import__('os').environ['HOROVOD_CYCLE_TIME']]") == [["2"], ["2"]]


LATE = """
import time
from gpumem_nb.engine.link import settings as horovod_settings
prompt = horovod_settings.follow
horovod_settings.follow = lambda *given: time.sleep(4) or prompt(*given)
"""


@pytest.mark.full
def test_a_rank_that_does_not_come_to_a_flip_keeps_nobody_waiting(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.train(2)
    session.set(stall_limit_s=1)
    session.run(LATE, ranks=1)
    with pytest.raises(TrainingFailed):
        session.set(fusion_threshold_mib=2)
    session.run("horovod_settings.follow = prompt", ranks=1)
    session.set(stall_limit_s=60)
    session.set(fusion_threshold_mib=3)
    assert communication(session.train(3)) == pytest.approx(3, abs=0.5)
    assert len(weights(session)) == 1


LATE_BACK = """
import time
from gpumem_nb.engine.link import settings as horovod_settings
prompt = horovod_settings.follow
def late(settings, device):
    time.sleep(0 if settings.fusion_threshold_mib else 4)
    prompt(settings, device)
horovod_settings.follow = late
"""


@pytest.mark.full
def test_a_trial_is_taken_back_where_the_ranks_come_apart_on_the_way(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.train(2)
    trained = session.run("type(optimizer).__name__")
    session.set(stall_limit_s=1)
    session.run(LATE_BACK, ranks=1)
    with pytest.raises((WorkloadError, RankError)):
        session.predict(optimizer="sgd", fusion_threshold_mib=2)
    session.run("horovod_settings.follow = prompt", ranks=1)
    assert session.run("type(optimizer).__name__") == trained
    session.set(stall_limit_s=60)
    assert session.train(2).steps == 2
    assert len(weights(session)) == 1


FAILING = """
from gpumem_nb.engine.step.live_model import LiveModel
set_optimizer = LiveModel.set_optimizer
def fail(live, settings):
    if settings.optimizer == "sgd":
        raise RuntimeError("not here")
    set_optimizer(live, settings)
LiveModel.set_optimizer = fail
"""


@pytest.mark.parametrize(
    "knobs", first_tier([{"compression": "fp16"}, {"bucket_mib": 0.001}, {"reduction": "sum"}], every(3)), ids=str
)
def test_settings_that_one_rank_cannot_apply_let_nobody_wait_for_its_gradients(
    two_ranks: Session, fresh: Callable[..., Session], knobs: dict[str, Any]
) -> None:
    session = fresh(two_ranks)
    session.train(2)
    before = weights(session)
    session.run(FAILING, ranks=1)
    try:
        began_s = time.monotonic()
        with pytest.raises(WorkloadError, match="not here"):
            session.predict(optimizer="sgd", **knobs)
        assert in_time(time.monotonic() - began_s, 2)
        assert weights(session) == before
        session.play()
        began_s = time.monotonic()
        session.set(optimizer="sgd", **knobs)
        until(lambda: not session.playing)
        assert in_time(time.monotonic() - began_s, 2)
    finally:
        session.run("LiveModel.set_optimizer = set_optimizer", ranks=1)
    assert session.settings.optimizer != "sgd"
    assert session.train(2).steps == 2
    assert len(weights(session)) == 1


LARGE = (
    NET
    + """
class Large(nn.Module):
    def forward(self, output, target):
        return 40_000 * output.sum() / len(output)
net, criterion = nn.Linear(6, 3), Large()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""
)


def test_a_sum_that_is_too_large_for_fp16_discards_the_step_on_all_ranks(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.run(LARGE)
    session.attach(model="net", data="data", loss="criterion", optimizer="optimizer")
    session.set(batch_size=4, compression="fp16")
    before = weights(session)
    with pytest.raises(TrainingFailed, match=r"bias.*compression=none"):
        session.train(1)
    assert weights(session) == before
    session.set(compression="none")
    session.train(1)
    assert len(weights(session)) == 1
    assert weights(session) != before


def test_a_flip_tells_what_it_does_to_gradients(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.train(8)
    session.set(compression="fp16")
    session.train(8)
    told = str(session.history.effect())
    assert re.search(r"compression none → fp16: live peak .* samples/s.* → \d+ % of communication hidden", told)
    assert re.search(r"compression takes 0\.0\d+ % of gradients$", told)
    session.set(batch_size=16)
    session.train(3)
    assert "hidden" not in str(session.history.effect())


@pytest.mark.parametrize("knob", ["hierarchical_allreduce", "torus_allreduce"])
def test_what_this_build_of_horovod_does_not_have_is_refused_with_the_reason(
    two_ranks: Session, fresh: Callable[..., Session], knob: str
) -> None:
    session = fresh(two_ranks)
    with pytest.raises(InvalidInput, match=rf"{knob}=on .*NCCL.*reduces over MPI"):
        session.set(**{knob: "on"})
    session.set(**{knob: "off"})
    assert session.train(2).steps == 2
    assert fresh(session).settings.as_dict()[knob] is None


def test_what_adasum_cannot_combine_is_refused_in_a_sentence(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    with pytest.raises(InvalidInput, match=r"optimizer=adamw.*optimizer=sgd"):
        session.set(reduction="adasum")
    session.set(reduction="adasum", optimizer="sgd")
    session.train(2)
    with pytest.raises(InvalidInput, match=r"optimizer=momentum"):
        session.set(optimizer="momentum")
    session.run(NET)
    session.attach(model="net", data="data", loss="criterion", optimizer="optimizer")
    assert session.settings.reduction == "average"
    with pytest.raises(InvalidInput, match=r"3 ranks.*power of two"):
        Settings(reduction="adasum", optimizer="sgd").check_together(3)
