"""What would fit a GPU that settings do not fit: found with the table, as one answer for one GPU as for five."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import Tensor, nn

import gpumem_nb as gm
from gpumem_nb.engine.dry.batches import Batches
from gpumem_nb.engine.dry.hollow import Hollow
from gpumem_nb.engine.packing import emptied, packed
from gpumem_nb.magics.planning import PlanningMagics
from gpumem_nb.planning import dry_process, gpu_table
from gpumem_nb.planning.cold_table import ColdPredictions
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, Prediction
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.forecast import DryRun, Kernels, Target
from gpumem_nb.shared.settings import Settings
from tests.tiers import every, first_tier

pytestmark = pytest.mark.usefixtures("dry_runs_forked")
MIB = 2**20
HEADING = Path(gpu_table.__file__).with_name("gpus.csv").read_text().splitlines()[0]
WIDTH, LENGTH, DEPTH = 256, 256, 6


class Block(nn.Module):
    """Keeps many activations, which 16 bits halve and checkpointing drops."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def tower() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(DEPTH)))


def rows() -> list[Tensor]:
    return [torch.zeros(LENGTH, WIDTH)] * 8


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def workload(model: Callable[[], nn.Module] = tower) -> gm.Workload:
    return gm.Workload("mine", model, rows, mean_square)


@pytest.fixture
def small_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs with little memory, as exactly known as none is: an old one, a new one, and a tiny one."""
    own = tmp_path / "own.csv"
    lines = ["Old,7.5,300,100,0,0,measured,measured", "New,8.0,300,100,0,0,measured,measured"]
    lines += ["Tiny,8.0,110,100,0,0,measured,measured"]
    own.write_text("\n".join([HEADING, *lines, ""]))
    monkeypatch.setenv(gpu_table.VARIABLE, str(own))


def table(gpu: str, **knobs: Any) -> ColdPredictions:
    found = gm.predict(workload(), gpu=[gpu], **knobs)
    assert isinstance(found, ColdPredictions)
    return found


@pytest.mark.usefixtures("small_gpus")
@pytest.mark.parametrize(("gpu", "narrow"), first_tier([("Old", "fp16"), ("New", "bf16")], every(2)))
def test_what_is_said_to_fit_instead_is_predicted_to_fit_when_it_is_asked_for(gpu: str, narrow: str) -> None:
    asked: dict[str, Any] = {"batch_size": 48, "optimizer": "sgd"}
    found = table(gpu, **asked)
    assert found[gpu].verdict == DOES_NOT_FIT
    instead = found.fits_with(gpu)
    assert instead
    for one in instead:
        assert one.settings.samples_per_rank == 48
        itself = gm.predict(workload(), gpu=gpu, **one.settings.changed_from(Settings()))
        assert isinstance(itself, Prediction)
        assert itself.verdict == FITS
        assert itself.live_peak_bytes == one.live_peak_bytes
    assert instead[0].settings.same_mathematics(found[gpu].settings)
    assert all(one.settings.precision in ("fp32", narrow) for one in instead)
    assert found.frame()["fits_with"][0] in str(found)
    would = found.instead(gpu)
    assert would.fastest is not None
    assert would.fastest.settings == instead[0].settings
    assert f"{gpu}: {would.reason(found[gpu].settings)}" in str(found), "as everywhere else"


@pytest.mark.usefixtures("small_gpus")
def test_a_gpu_that_fits_needs_nothing_else_and_one_that_holds_no_weights_is_told_what_they_take() -> None:
    found = gm.predict(workload(), gpu="New,Tiny", batch_size=2, optimizer="sgd")
    assert isinstance(found, ColdPredictions)
    assert found.fitting == ("New",)
    assert found.fits_with("New") == found.fits_with("Tiny") == ()
    assert found.tried.keys() == {"Tiny"}
    assert "Tiny: nothing that was tried surely fits, the lightest being " in str(found)
    assert "batch_size=1 accumulation_steps=2" in str(found)
    assert "(parameters 12.0 MiB" in str(found)
    assert list(found.frame()["fits_with"]) == [None, None]


@pytest.mark.usefixtures("small_gpus")
def test_the_table_names_what_the_sentence_below_it_names_which_keeps_the_global_batch() -> None:
    """Of 47 samples no half can be taken."""
    found = table("New", batch_size=47, optimizer="sgd", memory="500MiB")
    assert [one.settings.samples_per_rank for one in found.tried["New"]] == [48, 47]
    assert [one.settings.samples_per_rank for one in found.fits_with("new")] == [47, 48]
    assert found.frame()["fits_with"][0] == "checkpointing=blocks"
    assert "this would fit: checkpointing=blocks" in str(found)
    assert found.instead("new") == found.instead("New")
    with pytest.raises(InvalidInput, match="'Old' was not asked for"):
        found.fits_with("Old")


@pytest.mark.usefixtures("small_gpus")
@pytest.mark.full
def test_one_gpu_is_a_table_in_a_cell_and_says_that_it_has_no_bf16() -> None:
    shell = InteractiveShell.instance()
    shell.user_ns["mine"] = workload()
    found = PlanningMagics(shell).hvd_predict("mine --gpu Old batch_size=1 optimizer=sgd")
    assert isinstance(found, ColdPredictions)
    assert found.fitting == ("Old",)
    assert "Old has no bf16 (compute capability 7.5, it came with 8.0): there 16 bits are fp16." in str(found)
    new = str(table("New", batch_size=1, optimizer="sgd", learning_rate=0.5))
    assert "no bf16" not in new
    assert "not measured" not in new
    estimated = str(table("T4-16GB", batch_size=1))
    assert "The memory of T4-16GB, or what CUDA takes of it, was not measured" in estimated
    assert "the upper end of 95 % has up to 500.0 MiB more" in estimated
    assert new.startswith("Which GPU fits batch_size=1 optimizer=sgd?\n")  # and nothing that memory does not hang on
    larger = table("T4", batch_size=1, memory="48GB")
    assert larger["T4"] is larger["T4-16GB"]
    assert "The memory of T4 with 48GB, or what CUDA takes" in str(larger)
    assert "16GB" not in str(larger).replace("T4-16GB has no bf16", "") + str(larger["T4"])


@pytest.mark.usefixtures("small_gpus")
@pytest.mark.full
def test_micro_batches_that_the_data_brings_are_not_split() -> None:
    batched = gm.Workload("mine", tower, lambda: iter_of(torch.zeros(48, LENGTH, WIDTH)), mean_square)
    found = gm.predict(batched, gpu=["New"], optimizer="sgd")
    assert isinstance(found, ColdPredictions)
    assert found["New"].verdict == DOES_NOT_FIT
    assert all(one.settings.batch_size == 48 for one in found.tried["New"])


def iter_of(batch: Tensor) -> Any:
    return torch.utils.data.DataLoader(cast("Any", [batch]), batch_size=None)


def answer_to(given: bytes, optimizer: str = "adamw") -> Any:
    target = Target(Kernels(True, 0), (), None, 0, 0)
    settings = Settings(batch_size=8, optimizer=optimizer)
    return dry_process.ask(DryRun(given, settings, {"any": target}, largest=False))


def hollow_of(model: nn.Module, loss: Any, optimizer: Any = None) -> bytes:
    return packed(Hollow("mine", emptied((model, loss, optimizer, None, None)), Batches(rows())))


def test_objects_that_are_there_need_what_their_definition_needs() -> None:
    import cloudpickle

    defined, live = answer_to(cloudpickle.dumps(workload())), answer_to(hollow_of(tower(), mean_square))
    assert live.parameters == defined.parameters
    there, made = live.of["any"].forecast, defined.of["any"].forecast
    assert abs(there.live_peak_bytes - made.live_peak_bytes) <= 64  # a single number may be let go of a moment later
    assert replace(there, live_peak_bytes=0, at_peak={}) == replace(made, live_peak_bytes=0, at_peak={})
    assert there.at_peak.keys() == made.at_peak.keys()


@pytest.mark.full
def test_several_ranks_may_share_the_optimizers_state_and_one_may_not() -> None:
    import cloudpickle

    layers = partial(nn.Sequential, *(nn.Linear(1024, 1024) for _ in range(6)))
    wide = gm.Workload("wide", layers, lambda: [torch.zeros(1024)] * 8, mean_square)
    target = Target(Kernels(True, 0), (), 100 * MIB, 0, 0)  # weights have 24

    def lighter(ranks: int) -> list[Settings]:
        asked = DryRun(cloudpickle.dumps(wide), Settings(batch_size=1), {"any": target}, largest=True, ranks=ranks)
        return [one.settings for one in dry_process.ask(asked).of["any"].lighter or ()]

    found = lighter(4)
    assert Settings(batch_size=1, shard_optimizer="on") in found
    assert Settings(batch_size=1, shard_optimizer="on", shard_gradients="on") in found
    assert not any(one.shard_optimizer == "on" for one in lighter(1))


def test_what_compiled_blocks_need_is_not_said_without_ranks() -> None:
    with pytest.raises(
        InvalidInput, match=r"compile=blocks cannot be said without a session.*or ask about compile=off"
    ):
        gm.predict("text-gpt", gpu="T4-16GB", compile="blocks")


def test_what_waits_in_host_memory_is_not_said_without_ranks() -> None:
    with pytest.raises(InvalidInput, match=r"offload_activations=on cannot be said without a session"):
        gm.predict("text-gpt", gpu="T4-16GB", offload_activations="on")


def test_weights_travel_without_their_values_and_tied_ones_stay_tied() -> None:
    model: Any = tower()
    model[1].up.weight = model[0].up.weight
    model[0].where = torch.device("cuda", 1)  # as a model keeps it that was built on a rank's GPU
    assert pickle.loads(emptied(model))[0].where == torch.device("cpu")
    blob = hollow_of(model, mean_square)
    assert len(blob) < 8 * LENGTH * WIDTH * 4 * 3  # the three small micro-batches, and no weights to speak of
    assert answer_to(blob).parameters == sum(param.numel() for param in model.parameters())


def test_an_optimizer_that_was_trained_with_is_taken_with_its_state_and_the_model_keeps_its_own() -> None:
    model = tower()
    optimizer = torch.optim.Adam(model.parameters())
    mean_square(model, torch.zeros(1, LENGTH, WIDTH)).backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    found = answer_to(hollow_of(model, mean_square, optimizer), "own").of["any"].forecast
    weights = sum(param.nbytes for param in model.parameters())
    assert found.at_peak["optimizer state"] >= 2 * weights
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_part_in_evaluation_mode_is_foreseen_as_it_is_trained() -> None:
    def dropping() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(DEPTH)))

    trains, frozen = dropping(), dropping()
    frozen[:-1].eval()
    with_masks, without = (answer_to(hollow_of(model, mean_square)).of["any"].forecast for model in (trains, frozen))
    assert without.at_peak["activations"] < with_masks.at_peak["activations"]
