from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gpumem_nb as gm
from gpumem_nb.magics.arguments import Completion
from gpumem_nb.magics.planning import PlanningMagics
from gpumem_nb.planning import dry_process, gpu_table
from gpumem_nb.planning.cold_table import ColdPredictions
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, NO_LIMIT, TIGHT, Prediction
from gpumem_nb.shared.answers import Progress
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.shared.forecast import DryAnswer, DryRun
from tests.published import rows as published
from tests.timing import stop_pressed_in
from tests.unit.dry_runs import apart

pytestmark = pytest.mark.usefixtures("dry_runs_forked")
MIB = 2**20
WIDTH, SAMPLES = 256, 64
HEADING = Path(gpu_table.__file__).with_name("gpus.csv").read_text().splitlines()[0]


def predict(workload: Any, **arguments: Any) -> Prediction:
    predicted = gm.predict(workload, **arguments)
    assert isinstance(predicted, Prediction)
    return predicted


def samples() -> list[tuple[Tensor, int]]:
    return [(torch.zeros(WIDTH), index % 4) for index in range(8)]


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def perceptron() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def asks_for_values() -> nn.Module:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = perceptron()

        def forward(self, inputs: Tensor) -> Tensor:
            if inputs.sum() > 1e9:
                raise AssertionError
            outputs: Tensor = self.inside(inputs)
            return outputs

    return Asking()


def workload(model: Any, data: Any = samples, loss: Any = mean_loss) -> gm.Workload:
    return gm.Workload("mine", model, data, loss)


class LiveBytes(TorchDispatchMode):
    """Counts the storages of real tensors from when an operator makes them: independent of the toolkit's ledger."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, tuple[Any, int]] = {}
        self.peak = 0
        for tensor in held:
            self.note(tensor)

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.alive[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor):
                self.note(tensor)
        self.alive = {key: value for key, value in self.alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def live_peak_of_real_steps() -> int:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    peak = 0
    for _ in range(2):
        state = [value for values in optimizer.state.values() for value in values.values() if value.dim()]
        with LiveBytes([*model.parameters(), *state]) as live:
            batch = torch.zeros(SAMPLES, WIDTH), torch.zeros(SAMPLES, dtype=torch.long)
            mean_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = live.peak
    return peak


def test_live_bytes_are_those_of_a_real_step() -> None:
    predicted = predict(workload(perceptron), batch_size=SAMPLES, optimizer_impl="loop")
    workspaces = 2 * (4096 * 2 + 16 * 8) * 1024
    assert predicted.live_peak_bytes - workspaces == pytest.approx(live_peak_of_real_steps(), rel=0.02)
    assert sum(predicted.categories.values()) == predicted.live_peak_bytes
    assert predicted.limit_bytes is None
    assert predicted.verdict == NO_LIMIT
    assert str(predicted).startswith("live peak")  # nobody named what it could fit


@pytest.mark.parametrize(("optimizer", "default"), [("adafactor", "loop"), ("adamw", "foreach")])
def test_an_optimizer_s_default_is_what_torch_takes_on_a_gpu(optimizer: str, default: str) -> None:
    found = {
        way: predict(workload(perceptron), batch_size=1, optimizer=optimizer, optimizer_impl=way).live_peak_bytes
        for way in ("default", "loop", "foreach")
    }
    assert found["loop"] < found["foreach"]
    assert found["default"] == found[default]


@pytest.mark.parametrize(("table", "row_id"), [("transformers", "tf_064"), ("transformers", "tf_129")])
def test_published_peaks_are_met(table: str, row_id: str) -> None:
    row = next(row for row in published.rows(table) if row["row_id"].endswith(row_id))
    predicted = predict(published.workload(row), gpu="A100-40GB", batch_size=int(row["batch_size"]))
    assert predicted.device_bytes == pytest.approx(int(row["max_gpu_memory_mib"]) * MIB, rel=0.03)


def test_all_published_models_can_be_built() -> None:
    for table in published.TABLES:
        for row in published.rows(table):
            with torch.device("meta"):
                model = published.workload(row).model()
            assert sum(param.numel() for param in model.parameters()) == int(row["n_params_formula"]), row["row_id"]


def test_seven_billion_parameters_take_no_memory_here(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = remembered(monkeypatch)
    options: dict[str, Any] = {"width": 4096, "depth": 34, "heads": 32, "sequence_length": 128}
    assert predict("text-gpt", gpu="A100-40GB", batch_size=4, optimizer="sgd", **options).verdict == DOES_NOT_FIT
    assert answers[0].parameters > 6.8e9
    assert answers[0].peak_rss_bytes < 2 * 2**30  # in which not even a tenth of the weights would have room


@pytest.mark.full
def test_which_gpu_fits_and_with_which_batch() -> None:
    options: dict[str, Any] = {"width": 1024, "depth": 4, "heads": 16, "sequence_length": 512, "dropout": 0.1}
    found = gm.predict("text-gpt", gpu="T4-16GB, b200-180gb", batch_size=200, **options)
    assert isinstance(found, ColdPredictions)
    assert found["T4-16GB"].verdict == DOES_NOT_FIT
    assert found.fitting == ("B200-180GB",)
    largest = found.largest["T4-16GB"]
    assert largest is not None
    assert 0 < largest < 200
    assert predict("text-gpt", gpu="T4-16GB", batch_size=largest, **options).verdict == FITS
    assert predict("text-gpt", gpu="T4-16GB", batch_size=largest + 1, **options).verdict == TIGHT
    assert list(found.frame()["largest_batch"]) == [largest, found.largest["B200-180GB"]]


def remembered(monkeypatch: pytest.MonkeyPatch) -> list[DryAnswer]:
    answers: list[DryAnswer] = []
    own = dry_process.ask

    def ask(question: DryRun, progress: Progress) -> DryAnswer:
        answers.append(own(question, progress))
        return answers[-1]

    monkeypatch.setattr(dry_process, "ask", ask)
    return answers


def normed(kind: Any, depth: int = 6) -> Any:
    return lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(WIDTH)) for _ in range(depth)))


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).square().mean()
    return loss


@pytest.mark.full
@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="by its formula before torch 2.9")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rms_norm_keeps_what_a_fused_kernel_does(precision: str) -> None:
    kinds = {"layer": lambda width: nn.LayerNorm(width, bias=False), "rms": nn.RMSNorm}
    rows = 64 * SAMPLES
    layer, rms = (
        predict(workload(normed(kind), loss=mean_square), gpu="A100-40GB", batch_size=rows, precision=precision)
        for kind in kinds.values()
    )
    means = 6 * rows * 4  # layer norm keeps the mean of each row besides
    assert layer.live_peak_bytes - rms.live_peak_bytes == pytest.approx(means, abs=MIB / 8)


def test_a_model_that_asks_for_values_takes_small_steps_on_the_cpu() -> None:
    predicted = predict(workload(asks_for_values), gpu="T4-16GB", batch_size=SAMPLES, optimizer_impl="loop")
    assert "aten._local_scalar_dense.default needs the values of a tensor" in predicted.basis
    assert "in forward: if inputs.sum() > 1e9:" in predicted.basis
    assert predicted.live_peak_bytes - 2 * (4096 * 2 + 16 * 8) * 1024 == pytest.approx(
        live_peak_of_real_steps(), rel=0.05
    )
    assert predicted.high_bytes > 1.3 * predicted.reserved_peak_bytes


def test_a_process_that_dies_is_a_sentence() -> None:
    with apart(), pytest.raises(WorkloadError, match="The process that predicts ended with 3"):
        gm.predict(workload(lambda: os._exit(3)))


def test_an_interrupt_leaves_no_process() -> None:
    before = set(psutil.Process().children())
    with apart(), pytest.raises(KeyboardInterrupt), stop_pressed_in(dry_process._ends_in_time.__code__):
        gm.predict(workload(lambda: time.sleep(60)))
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"workload": "text-gp"}, "did you mean 'text-gpt'"),
        ({"gpu": "A100-40"}, "did you mean 'A100-40GB'"),
        ({"gpu": []}, "No GPU was named"),
        ({"precission": "bf16"}, "did you mean 'precision'"),
        ({"widht": 64}, "did you mean 'width'"),
        ({"precision": "bf61"}, "did you mean 'bf16'"),
        ({"ranks": 0}, "ranks=0 cannot be used"),
        ({"memory": "1GB"}, "is not more than CUDA's context and libraries take"),
        ({"gpu": 3}, "gpu=3 cannot be used"),
        ({"gpu": [None]}, "A GPU must be a name, such as gpu='T4-16GB,A100-40GB'; this is a NoneType"),
        ({"memory": "much"}, "is not a memory size"),
        ({"workload": 3}, "The workload must be a Workload or the name of a ready-made one; this is a int"),
    ],
)
def test_bad_input_is_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        gm.predict(**{"workload": "text-gpt", **given})


def test_gpus_are_added_by_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.csv"
    own.write_text(f"{HEADING}\nMine-8GB,8.6,8000,700,20,100,measured,measured\n")
    monkeypatch.setenv(gpu_table.VARIABLE, str(own))
    assert gpu_table.find("mine-8gb").outside_bytes == 700 * MIB
    monkeypatch.setenv(gpu_table.VARIABLE, str(tmp_path / "missing.csv"))
    with pytest.raises(InvalidInput, match=r"missing\.csv, which GPUMEM_NB_GPUS names, cannot be used"):
        gpu_table.find("T4-16GB")


@pytest.mark.parametrize(
    "line", ["Mine-8GB,8.6,8000,700,20,100", "Mine-8GB,8.6,8000,700,20,100,measured,measured,too many"]
)
def test_a_line_that_is_not_whole_is_a_sentence(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.csv"
    own.write_text(f"{HEADING}\n{line}\n")
    monkeypatch.setenv(gpu_table.VARIABLE, str(own))
    with pytest.raises(InvalidInput, match=r"own\.csv, which GPUMEM_NB_GPUS names, cannot be used.*'Mine-8GB'"):
        gpu_table.find("T4-16GB")
    assert "T4-16GB" in gpu_table.names()


def test_a_gpu_without_room_for_tensors_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.csv"
    own.write_text(f"{HEADING}\nMine-1GB,8.6,1000,1700,20,100,measured,measured\n")
    monkeypatch.setenv(gpu_table.VARIABLE, str(own))
    with pytest.raises(InvalidInput, match=r"The memory of Mine-1GB: 1000\.0 MiB is not more than CUDA's context"):
        gm.predict("text-gpt", gpu="Mine-1GB")
    assert "Mine-1GB" in Completion({"hvd_predict": PlanningMagics.hvd_predict}).offered("%hvd_predict x --gpu Mi")


def test_a_record_without_its_capability_is_like_the_gpu_of_the_longest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {"device": {"used_bytes": 3 * 2**30}, "reserved_peak_bytes": 2**30}
    machine: dict[str, Any] = {"gpu": "NVIDIA A100-SXM4-64GB", "virtual": False, "limit_bytes": 64 * 2**30}
    record = {"ranks": 1, "machine": machine, "cells": [{"outcome": "ok", "per_rank": [used]}]}
    path = tmp_path / "mine.json"
    monkeypatch.setenv(gpu_table.VARIABLE, str(path))
    path.write_text(json.dumps(record))
    assert gpu_table.find(machine["gpu"]).capability == (8, 0)
    path.write_text(json.dumps(record | {"machine": machine | {"capability": [9, 0]}}))
    assert gpu_table.find(machine["gpu"]).capability == (9, 0)


def test_every_figure_of_the_table_has_a_source() -> None:
    for gpu in gpu_table.table().values():
        assert all(gpu.sources), gpu.name
        assert 0 < gpu.outside_bytes < gpu.memory_bytes


def test_the_magic_needs_no_session() -> None:
    shell = InteractiveShell.instance()
    shell.user_ns["mine"] = workload(perceptron)
    found = PlanningMagics(shell).hvd_predict("mine --gpu T4-16GB,H100-80GB batch_size=8 --ranks 2")
    assert isinstance(found, ColdPredictions)
    assert found.fitting == ("T4-16GB", "H100-80GB")
    assert found["T4-16GB"].categories["communication"] == 128 * MIB
    shell.user_ns["config"] = gm.Settings()
    own = r"this is a Settings\. .* For a model of your own write w = gpumem_nb\.Workload\("
    with pytest.raises(UsageError, match=own):
        PlanningMagics(shell).hvd_predict("config --gpu T4-16GB")
    with pytest.raises(UsageError, match="workload=x cannot be used: the workload is named already, text-gpt"):
        PlanningMagics(shell).hvd_predict("text-gpt workload=x")


def test_a_gpu_without_bf16_arithmetic_is_named() -> None:
    def said(gpu: str, precision: str) -> str:
        return str(gm.predict(workload(perceptron), gpu=gpu, precision=precision, batch_size=4))

    assert "T4-16GB has no arithmetic for bf16 (compute capability 7.5, it came with 8.0)" in said("T4-16GB", "bf16")
    assert said("T4-16GB,A100-40GB", "bf16").count("has no arithmetic for bf16") == 1
    assert "no arithmetic" not in said("T4-16GB,A100-40GB", "fp16") + said("A100-40GB", "bf16")
