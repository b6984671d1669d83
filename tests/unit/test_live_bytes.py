"""Who holds the live bytes of a rank: what is trained, and variables of cells with what their graphs keep."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpumem_nb.engine import rank
from gpumem_nb.engine.cells import OfferedNames
from gpumem_nb.engine.device_look import LiveHolders, live_bytes
from gpumem_nb.memory.cuda import CudaDevice
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from gpumem_nb.planning.doctor.evidence import OnRank
from gpumem_nb.planning.doctor.rules import findings
from gpumem_nb.planning.prediction import TIGHT
from gpumem_nb.report.freed import held_by_cells
from gpumem_nb.shared import categories as c
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.readings import LiveBytes
from gpumem_nb.shared.settings import Settings
from tests.ledgers import MIB
from tests.unit.test_doctor import LEAK, causes, evidence, failed, prediction
from tests.unit.test_doctor import rank as on_rank
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.test_questions import trainer

pytestmark = pytest.mark.usefixtures("alone")
ROWS = 2048  # of an evaluation: 2.3 MiB after each of two wide layers
SETTINGS = Settings(batch_size=2)


class Hostile:
    """What may not be looked into."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)


def test_what_graphs_keep_counts_with_the_variable_and_weights_inputs_and_data_do_not(gpu: VirtualGPU) -> None:
    trained = trainer(gpu)
    assert trained.run(Chunk(SETTINGS, 1, 2)).failure is None
    model, inputs = trained.live.model, torch.randn(ROWS, 4)
    losses = [model(inputs).mean() for _ in range(3)]
    with torch.no_grad():
        preds = [model(inputs) for _ in range(3)]
    variables = {"hostile": Hostile(), "model": model, "losses": losses, "preds": preds, "rows": trained.stream.dataset}
    found = live_bytes(trained, variables)
    named = dict(found.variables)
    assert found.with_graph == ("losses",)
    assert named["losses"] == pytest.approx(3 * 2 * ROWS * 300 * 4 + inputs.nbytes, rel=0.05)
    assert named["preds"] == 3 * ROWS * 4 * 4
    assert {"model", "rows"} & set(named) == set()
    assert found.held[c.PARAMETERS] == sum(param.nbytes for param in model.parameters())
    assert sum(found.held.values()) + sum(named.values()) == gpu.reading().live_bytes
    assert held_by_cells(found).startswith("Variables of cells hold memory: losses 14.1 MiB. losses keeps what a")
    del losses, variables["losses"]
    assert held_by_cells(live_bytes(trained, {"model": model})) == ""


def test_sparse_tensors_count_with_their_parts_and_lazy_layers_stop_nothing(gpu: VirtualGPU) -> None:
    graph = torch.eye(64).to_sparse()
    of_graph = graph._indices().nbytes + graph._values().nbytes
    on_a_gpu = CudaDevice.__new__(CudaDevice)
    on_a_gpu.torch_device = torch.device("cpu")
    variables = {"lazy": nn.LazyLinear(3), "graph": graph, "rows": torch.eye(8).to_sparse_csr()}
    for device in (gpu, on_a_gpu):
        assert LiveHolders(device, None, variables).variables[0] == ("graph", of_graph)


def test_a_step_that_runs_out_of_memory_says_which_variables_hold_it(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = trainer(gpu)
    assert trained.run(Chunk(SETTINGS, 1, 1)).failure is None
    parts = {
        **{"_trainer": trained, "_device": gpu, "_names": OfferedNames(vars(sys.modules["__main__"]))},
        "_snapshots": SimpleNamespace(stored=lambda: None),
    }
    for name, value in parts.items():
        monkeypatch.setattr(rank, name, value, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "preds", trained.live.model(torch.randn(ROWS, 4)), raising=False)
    gpu.empty_cache()
    gpu.set_limit(gpu.reading().live_bytes)
    try:
        failure = rank.run_chunk(Chunk(SETTINGS.replace(optimizer="adam"), 2, 1)).failure
    finally:
        gpu.set_limit(None)
    assert failure is not None
    assert failure.kind == "oom"
    assert failure.live is not None
    assert "preds keeps what a backward pass would need" in held_by_cells(failure.live)


def holding(mib: int, graph: bool = True, name: str = "preds") -> OnRank:
    """A rank on which a cell's variable holds memory."""
    return on_rank(1, live=LiveBytes({c.PARAMETERS: 25 * MIB}, ((name, mib * MIB),), (name,) if graph else ()))


def test_where_cells_hold_a_scarce_limit_the_variable_is_named_and_no_flip_is_offered() -> None:
    assert causes(ranks=(on_rank(0), holding(3))) == ["memory held by cells"]
    assert causes(ranks=(on_rank(0), holding(1))) == [], "less than the error of a prediction"
    scarce = prediction(live=870, most=c.COMMUNICATION)
    assert causes(needs=scarce) == ["communication buffers dominate"]
    for graph in (True, False):
        [found] = findings(evidence(needs=scarce, ranks=(on_rank(0), holding(400, graph))))
        assert found.cause == "memory held by cells"
        assert "preds 400.0 MiB" in found.sentence
        assert "del preds" in found.do
        assert ("torch.no_grad()" in found.do) is graph
    assert causes(ranks=(on_rank(0), holding(30, graph=False))) == [], "tensors that a cell keeps where there is room"
    kept = holding(400, name="kept")
    assert causes(needs=scarce, ranks=(on_rank(0), kept), leaks=((LEAK,),))[0] == "leak"
    within = ((dataclasses.replace(LEAK, name="kept.outputs[3]"),),)
    assert "memory held by cells" not in causes(needs=scarce, ranks=(on_rank(0), kept), leaks=within)
    for other in ("k", "ep", "outputs"):  # of which the leak's expression has the letters
        assert "memory held by cells" in causes(ranks=(on_rank(0), holding(400, name=other)), leaks=within)


def test_what_cells_hold_comes_before_settings_that_do_not_fit_with_it() -> None:
    ranks = (on_rank(0), holding(400))
    assert causes(rescue=failed("oom"), ranks=ranks) == ["memory held by cells", "does not fit"]
    assert causes(needs=prediction(verdict=TIGHT), ranks=ranks) == ["memory held by cells", "barely fits"]
    assert causes(rescue=failed("oom"), ranks=(on_rank(0), holding(50))) == ["does not fit", "memory held by cells"]


def test_the_advice_after_memory_ran_out_names_what_cells_hold() -> None:
    rescue = failed("oom")
    live = holding(400).live
    told = dataclasses.replace(rescue, failure=dataclasses.replace(rescue.failure, live=live))
    assert told.advice.startswith("Variables of cells hold memory: preds 400.0 MiB. preds keeps what a backward pass")
    assert told.advice.endswith(rescue.advice)
    assert "del preds" in str(told)


def test_outputs_are_found_in_objects_of_cells_classes_and_in_what_cells_hang_on_a_model(gpu: VirtualGPU) -> None:
    trained = trainer(gpu)
    model, inputs = trained.live.model, torch.randn(ROWS, 4)

    class Result:
        def __init__(self) -> None:
            self.output = model(inputs)

    Result.__module__ = "__main__"
    model.kept = [model(inputs)]  # type: ignore[assignment]
    found = live_bytes(trained, {"model": model, "results": [Result()], "others": [torch.nn.Linear(1000, 1000)]})
    del model.kept
    assert set(found.with_graph) == {"model.kept", "results"}
    assert dict(found.variables)["others"] == 1001 * 1000 * 4
    assert "model.kept" in held_by_cells(found).partition(": del ")[2]
