"""Parts of a script that do what the session does: batches, evaluation, and what is told of it."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import random
import textwrap
import weakref
from collections import Counter, UserDict
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils import checkpoint

from gpumem_nb.engine.data.fetching import to_device
from gpumem_nb.engine.random_state import RandomState
from gpumem_nb.export import refusals
from gpumem_nb.export.selecting import selected
from gpumem_nb.memory.tensors import tensors_in
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.questions import Cell
from gpumem_nb.shared.settings import Settings

from .test_export_script import FACTS, OWN, written


@dataclasses.dataclass(frozen=True)
class Rows:
    first: torch.Tensor
    second: Any


class Named(dict[str, Any]):
    pass


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


def test_a_batch_of_any_kind_goes_to_the_device_as_in_the_session() -> None:
    text = written(Settings(), dataclasses.replace(OWN, kind="cells"), batch="other")
    names: dict[str, Any] = {"torch": torch, "dataclasses": dataclasses, "shallow_copy": copy.copy}
    names["MutableMapping"] = MutableMapping
    exec(text[text.index("def batch_on(") : text.index("def micro_batches(")], names)
    row, there = torch.ones(2), torch.device("meta")
    pair = Pair(row, 3)
    for batch in (Named(a=row), UserDict(a=row), Rows(row, [row, "x"]), (row, [row]), pair, {"a": (row,)}, [row, None]):
        before = copy.copy(batch)
        for moved in (names["batch_on"](batch, there), to_device(batch, there)):
            assert type(moved) is type(batch)
            assert {tensor.device for tensor in tensors_in(moved)} == {there}
        assert repr(batch) == repr(before)


def test_an_evaluation_leaves_random_numbers_of_any_kind_as_they_were() -> None:
    source = dataclasses.replace(OWN, kind="cells", names=dict.fromkeys(("model", "data", "loss", "eval_data"), "x"))
    text = written(Settings(batch_size=2), source, evaluates=True, eval_form="dataset")
    only = text[text.index("def evaluate_together(") : text.index("def resume(")]
    names: dict[str, Any] = {"torch": torch, "np": np, "random": random}
    names["dist"] = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1, all_reduce=lambda sums: None)
    names["default_collate"] = torch.utils.data.default_collate
    exec(only, names)
    rows, args = [(torch.ones(2), torch.ones(2))] * 2, SimpleNamespace(batch_size=2)
    loss = lambda *_: torch.rand([]) + random.random() + np.random.rand()  # noqa: E731
    model, before = torch.nn.Linear(2, 2), RandomState.take()
    names["evaluate_together"](model, rows, args, torch.device("cpu"), loss)
    assert not before.moved()


def test_weights_that_a_script_freezes_and_what_evaluations_change_are_told() -> None:
    assert [*refusals.of_model(FACTS)] == []
    absent = ("experts.1.weight", "experts.1.bias")
    frozen, changed = refusals.of_model(dataclasses.replace(FACTS, absent=absent, eval_changes="calls"))
    assert "experts.1.weight and 1 more" in frozen
    assert changed.startswith("calls: evaluating changes it")
    (other,) = refusals.of_model(dataclasses.replace(FACTS, unsteady=True))
    assert other.startswith("samples that follow from when they were read")


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_groups_whose_own_scheduler_begins_at_0_get_the_rates_that_knobs_ask_for(schedule: str) -> None:
    settings = Settings(optimizer="own", learning_rate=0.1, lr_schedule=schedule, schedule_steps=9)
    lines = written(settings, OWN, groups=2, own_scheduler=True).splitlines()
    known = next(place for place, line in enumerate(lines) if line.startswith("    rates = ["))
    scaled = next(place for place, line in enumerate(lines) if "for group, rate in zip(" in line)
    code = "\n".join(
        textwrap.dedent("\n".join(part)) for part in (lines[known : known + 3], lines[scaled : scaled + 2])
    )
    groups = [{"lr": 0.0, "initial_lr": 0.1}, {"lr": 0.0, "initial_lr": 0.3}]
    names = {"optimizer": SimpleNamespace(param_groups=groups), "args": SimpleNamespace(learning_rate=0.1), "done": 0}
    exec(code, {**names, "rate_of_step": lambda args, done: args.learning_rate})
    assert [one["lr"] for one in groups] == pytest.approx([0.1, 0.3])


def test_proportions_of_a_first_group_without_a_rate_are_refused() -> None:
    facts = dataclasses.replace(FACTS, stepped=True, order="in turn", groups=2, own_rate=0.0, rate=0.1, asked_rate=0.1)
    with pytest.raises(WorkloadError, match="first group has a learning rate of 0"):
        refusals.check(Settings(optimizer="own", learning_rate=0.1), facts, own=True, ddp=True)
    refusals.check(Settings(optimizer="own", learning_rate=0.0), facts, own=True, ddp=True)


@pytest.mark.parametrize(
    "made", ["{0}\nnet, opt, rows = {1}", "def make():\n    {0}\n    return {1}\nnet, opt, rows = make()"]
)
def test_what_accelerate_prepared_is_trained_as_it_was_given_and_its_ranks_are_not_those_of_mpi(made: str) -> None:
    cell = Cell(made.format("from accelerate import Accelerator", "Accelerator().prepare(1, 2, 3)"))
    found = selected([cell], ["net", "opt", "rows"], 0, forgotten=False)
    source = dataclasses.replace(found, names={"model": "net", "data": "rows", "optimizer": "opt"})
    text = written(Settings(optimizer="own"), source, ddp=False)
    assert 'optimizer = getattr(optimizer, "optimizer", optimizer)' in text
    assert 'data = getattr(data, "base_dataloader", data)' in text
    assert text.index("hvd.init()") < text.index("del os.environ[name]") < text.index("import Accelerator")
    assert "getattr" not in written(Settings(optimizer="own"), OWN, ddp=False)
    with pytest.raises(WorkloadError, match=r"uses accelerate.*without --ddp"):
        written(Settings(optimizer="own"), source, ddp=True)


def test_blocks_that_keep_alike_are_told_of_together_and_torch_keeps_what_the_session_did() -> None:
    some, none = {"aten.addmm.default": [0, 2]}, dict[str, list[int]]()
    settings = Settings(optimizer="own", checkpointing="selective", activation_budget=0.3)
    blocks = ("layers.0", "layers.1", "layers.2")
    text = written(settings, blocks=blocks, kept=(none, some, some), changed_by_blocks="")
    compile(text, "train.py", "exec")
    assert 'for block in map(model.get_submodule, ["layers.1", "layers.2"]):' in text
    assert 'kept = {"aten.addmm.default": [0, 2]}' in text
    assert "block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)" in text
    assert "with_statistics" not in text
    with_norms = written(settings, blocks=blocks, kept=(some,) * 3, changed_by_blocks="", norms=True)
    compile(with_norms, "train.py", "exec")
    assert "inside(with_statistics(statistics_of(block)), again)" in with_norms
    with pytest.raises(WorkloadError, match="that shows what blocks keep under this budget"):
        refusals.check(settings, dataclasses.replace(FACTS, blocks=blocks), own=False, ddp=False)
    everything = written(settings.replace(activation_budget=1), blocks=blocks, changed_by_blocks="")
    assert "checkpoint" not in everything


class Reading(torch.nn.Sequential):
    """Reads the statistics of its batch norm, which is called in each block's recomputation once more."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        norm: Any = self[1]
        mean = norm.running_mean.clone()
        result: torch.Tensor = super().forward(rows - mean) * norm.running_var.clone()  # type: ignore[no-untyped-call]
        return result


@pytest.mark.parametrize("mode", ["blocks", "sqrt", "selective"])
def test_a_script_recomputes_with_the_statistics_of_batch_norms_that_forward_saw(mode: str) -> None:
    settings = Settings(optimizer="own", checkpointing=mode)
    blocks = tuple(map(str, range(4)))
    kept = {"aten.addmm.default": [0]}
    text = written(settings, blocks=blocks, kept=(kept,) * 4, changed_by_blocks="", norms=True)
    kinds = ast.FunctionDef | ast.ClassDef
    functions: list[ast.stmt] = [one for one in ast.parse(text).body if isinstance(one, kinds)]
    names: dict[str, Any] = (
        vars(contextlib) | vars(checkpoint) | {"torch": torch, "weakref": weakref, "Counter": Counter}
    )
    exec(compile(ast.Module(functions, []), "train.py", "exec"), names)
    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(
        *(Reading(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh()) for _ in blocks)
    )
    plain: Any = copy.deepcopy(net)
    if mode == "sqrt":
        names["recompute_together"](net, 2)
    for block in net if mode != "sqrt" else ():
        contexts = functools.partial(names["keeping"], block, kept) if mode == "selective" else None
        contexts = contexts or functools.partial(names["once_in_statistics"], block)
        again = functools.partial(names["checkpoint"], use_reentrant=False, context_fn=contexts)
        block.forward = functools.partial(again, block.forward)
    for _ in range(2):
        rows = torch.randn(8, 4)
        for one in (net, plain):
            one(rows).square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), plain.buffers(), strict=True))
