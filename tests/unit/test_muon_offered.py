"""``optimizer=muon`` as a value of its knob: where it is offered, where it is refused, and what a script has of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gpumem_nb.engine.data.handed import as_dataset
from gpumem_nb.engine.data.stream import ShardedStream
from gpumem_nb.engine.step.muon import MuonAndAdamW
from gpumem_nb.engine.step.notes import workload_info
from gpumem_nb.kernel import compatibility
from gpumem_nb.memory.device import opened
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS
from gpumem_nb.planning.tuning.space import space
from gpumem_nb.shared.categories import OPTIMIZER_STATE
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.shared.knobs import KNOBS, Need
from gpumem_nb.shared.knobs import update as update_knobs
from gpumem_nb.shared.settings import Settings, mildest_first
from gpumem_nb.shared.workload import Handles, WorkloadInfo
from tests.unit.test_cold_ladder import small_gpus as small_gpus  # a fixture
from tests.unit.test_cold_ladder import table
from tests.unit.test_export_script import OWN, written
from tests.unit.test_muon import MUON, batch, gpt2, live, loss, matrices, plainly, rows, workload
from tests.unit.test_muon import pytestmark as pytestmark
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.tuned_machine import WORKLOAD


def only_biases() -> nn.Module:
    net = gpt2()
    for name, weight in net.named_parameters():
        weight.requires_grad_(name.endswith("bias"))
    return net


def only_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


@pytest.mark.parametrize("make", [only_biases, only_convolutions])
def test_a_model_that_trains_no_hidden_matrix_is_refused(make: Callable[[], nn.Module]) -> None:
    model = live(make)
    with pytest.raises(WorkloadError, match=r"for hidden matrices, and this model trains none.*Use optimizer=adamw\."):
        model.apply(MUON)
    assert model.settings.optimizer == "adamw"
    stream = ShardedStream(*as_dataset(rows()), rank=0, size=1)
    info = workload_info(workload(make), model, stream, None, opened())
    assert not info.matrices
    with pytest.raises(InvalidInput, match=r"for hidden matrices, and net trains none"):
        compatibility.check(MUON, info, 1)
    assert compatibility.adapted(MUON.replace(learning_rate=0.5), info) == Settings(learning_rate=0.5)
    assert workload_info(workload(gpt2), live(), stream, None, opened()).matrices


def test_an_older_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_knobs, "torch_version", lambda: (2, 8))
    with pytest.raises(InvalidInput, match=r"torch has from 2\.9 on.*or use optimizer=adamw\."):
        compatibility.check(MUON, WorkloadInfo("net", 1, 4, 100, blocks=4, matrices=True), 1)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(WorkloadError, match=r"torch has from 2\.9 on"):
        live().apply(MUON)


def test_it_is_offered_where_it_frees_memory_and_named_as_another_mathematics() -> None:
    need = Need(OPTIMIZER_STATE, "update", Settings(), Handles(matrices=True))
    found = [one.optimizer for one in mildest_first(need)]
    assert found[found.index("muon") + 1 :] == ["adafactor", "momentum", "sgd"]
    without = Need(OPTIMIZER_STATE, "update", Settings(), Handles())
    assert "muon" not in [one.optimizer for one in mildest_first(without)]
    assert not MUON.same_mathematics(Settings())
    assert "muon" in KNOBS["optimizer"].offered("adamw", WorkloadInfo("net", 1, 4, 100, blocks=4, matrices=True))
    assert "muon" not in KNOBS["optimizer"].offered("adamw", WorkloadInfo("net", 1, 4, 100, blocks=4))


def test_a_tuner_looks_at_it_where_the_optimizer_is_named_and_mathematics_may_change() -> None:
    def found(workload: WorkloadInfo, **named: Any) -> set[str]:
        def ask(changes: Mapping[str, Any]) -> Settings:
            settings = compatibility.asked(Settings(), changes, 2)
            compatibility.check(settings, workload, 2)
            return settings

        return {one.optimizer for one in space(Settings(), workload, 2, ask, **named).candidates}

    named: dict[str, Any] = {"knobs": ["optimizer"], "same_mathematics": False}
    assert "muon" in found(replace(WORKLOAD, matrices=True), **named)
    assert "muon" not in found(WORKLOAD, **named)
    assert found(replace(WORKLOAD, matrices=True)) == {"adamw"}


@pytest.mark.usefixtures("dry_runs_forked", "small_gpus")
@pytest.mark.full
def test_for_a_gpu_that_is_not_here_it_is_named_where_it_is_enough() -> None:
    found = table("New", batch_size=1, memory="170MiB")
    assert found["New"].verdict == DOES_NOT_FIT
    muon = next(one for one in found.tried["New"] if one.settings.optimizer == "muon")
    assert muon.verdict == FITS
    assert muon.live_peak_bytes < found["New"].live_peak_bytes


@pytest.mark.parametrize(("impl", "flag"), [("default", ""), ("fused", ", fused=True"), ("loop", ", foreach=False")])
def test_a_script_has_the_class_and_names_what_is_left_to_adamw(impl: str, flag: str) -> None:
    source = replace(OWN, kind="cells", names={"model": "net", "data": "rows"})
    settings = MUON.replace(optimizer_impl=impl)
    text = written(settings, source, ddp=False, own_optimizer=False, not_hidden=("wte.weight", "wpe.weight"))
    assert "gpumem_nb" not in text.replace("gpumem_nb_", "")
    assert 'others = ["wte.weight", "wpe.weight"]' in text
    assert f'MuonAndAdamW([{{"params": weights, "matrices": matrices}}], lr=args.learning_rate{flag})' in text
    begins = text.index("class MuonAndAdamW")
    names: dict[str, Any] = {"torch": torch, "Any": Any}
    exec(text[begins : text.index("\n\n\n", begins)], names)
    losses, _ = plainly(gpt2, 2)
    net = gpt2()
    weights = list(net.parameters())
    places = tuple(place for place, one in enumerate(weights) if any(one is other for other in matrices(net)))
    optimizer = names["MuonAndAdamW"]([{"params": weights, "matrices": places}], lr=1e-3)
    for number in range(2):
        found = loss(net, batch(4 * number))
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert found.item() == losses[number]


def test_horovod_can_build_it_anew_from_its_groups() -> None:
    model = live()
    model.apply(MUON)
    again = MuonAndAdamW(model.optimizer.param_groups)
    assert again.param_groups[0]["matrices"] == model.optimizer.param_groups[0]["matrices"] != ()
