"""The text of a script, from what is trained: rates, resuming, and what would clash or differ."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpumem_nb.export import refusals
from gpumem_nb.export.imports import check_code
from gpumem_nb.export.order import Order, Source
from gpumem_nb.export.script import script
from gpumem_nb.export.selecting import selected
from gpumem_nb.kernel.questions.exporting import agreed
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.questions import Cell, Facts
from gpumem_nb.shared.settings import Settings
from gpumem_nb.workloads import catalog

_EMPTY: dict[str, Any] = {
    "int": 0,
    "bool": False,
    "str": "",
    "str | None": "",
    "float": 0.1,
    "tuple[str, ...]": (),
    "tuple[dict[str, list[int]], ...]": (),
    "dict[str, str]": {},
}
FACTS = Facts(**{field.name: _EMPTY[str(field.type)] for field in fields(Facts)})
OWN = Source("functions", definitions="a = 1", names={"model": "make", "data": "rows", "optimizer": "opt"})


def written(settings: Settings, source: Source = OWN, ddp: bool = True, evaluates: bool = False, **facts: Any) -> str:
    told: dict[str, Any] = {
        "stepped": True,
        "order": "in turn",
        "batch": "pair",
        "loss": "outputs",
        "own_optimizer": True,
        "groups": 1,
    }
    order = Order(
        source, settings, replace(FACTS, **told | facts), ddp, None, 0, 5, evaluates, 0.1, "A script.", "/here", 100
    )
    text = script(order)
    ast.parse(text)
    return text


@pytest.mark.parametrize("groups", [1, 2])
def test_a_rate_that_was_set_reaches_an_own_optimizer_however_many_groups_it_has(groups: int) -> None:
    text = written(Settings(optimizer="own", learning_rate=0.5), groups=groups)
    assert 'group["lr"] = args.learning_rate' in text.partition("start = resume")[2]
    assert "default=0.5)" in text


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    text = written(Settings(optimizer="own", learning_rate=0.1), tensor_rate=True)
    assert 'group["lr"] = ' not in text


def test_resuming_keeps_the_rate_and_the_implementation_of_now(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "script"}
    exec(written(Settings(optimizer="sgd", learning_rate=0.5, optimizer_impl="foreach"), groups=1), names)
    weight = torch.ones(2, requires_grad=True)
    before, now = (
        torch.optim.SGD([weight], lr=lr, momentum=momentum, foreach=foreach)
        for lr, momentum, foreach in ((0.1, 0.9, False), (0.5, 0.9, True))
    )
    weight.grad = torch.ones(2)
    before.step()
    saved, own, content = before.state_dict(), io.BytesIO(), io.BytesIO()
    version, words, gauss = __import__("random").getstate()
    kind, keys, *rest = __import__("numpy").random.get_state()
    numbers = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words), gauss),
        "numpy": (kind, torch.tensor(keys.astype("int64")), *rest),
        "cuda": None,
    }
    torch.save({"random": numbers, "buffers": {}}, own)
    ranks = [torch.frombuffer(bytearray(own.getvalue()), dtype=torch.uint8)]
    optimizer = {"state": saved["state"], "groups": saved["param_groups"]}
    torch.save({"parameters": {"w": weight.detach()}, "optimizer": optimizer, "ranks": ranks}, content)
    header = {"settings": {"optimizer": "sgd"}, "seed": 0, "ranks": 0, "steps": 1}
    path = tmp_path / "a.state"
    path.write_bytes(b"line\n" + json.dumps(header).encode() + b"\n" + content.getvalue() + b"\nend \n" + b"0" * 64)
    names["dist"] = type("Alone", (), {"get_rank": staticmethod(lambda: 0)})
    names["resume"](path, {"w": weight}, now)
    assert (now.param_groups[0]["lr"], now.param_groups[0]["foreach"]) == (0.5, True)
    assert now.state[weight]["momentum_buffer"].tolist() == [1, 1]


def test_what_is_left_out_in_some_steps_is_looked_for_in_each() -> None:
    assert "find_unused_parameters=True" in written(Settings(), sometimes=("extra.weight",))
    assert "find_unused_parameters" not in written(Settings(), absent=("extra.weight",))


def test_blocks_are_compiled_before_they_are_checkpointed() -> None:
    settings = Settings(compile="blocks", checkpointing="blocks")
    text = written(settings, blocks=("layers.0", "layers.1"), cache=True)
    compiled = text.index("block.forward = torch.compile(block.forward, dynamic=True")
    assert text.index("use_cache = False") < compiled < text.index("functools.partial(checkpoint, block.forward")
    assert "torch.compile" not in written(settings.replace(compile="off"), blocks=("layers.0", "layers.1"))


def test_distributed_data_parallel_sees_the_loss_where_logits_come_in_parts() -> None:
    facts: dict[str, Any] = {"head": "head", "sometimes": ("extra.weight",)}
    assert "ddp(batch)" in written(Settings(loss_head="chunked"), **facts)
    assert "ddp(batch[0])" in written(Settings(), **facts)


def test_variables_of_horovod_are_those_of_the_settings_and_of_the_start() -> None:
    started = {"HOROVOD_FUSION_THRESHOLD": "16777216", "HOROVOD_CYCLE_TIME": "5"}
    own = replace(OWN, kind="cells")
    text = written(Settings(cycle_time_ms=2, cache_capacity=0), own, ddp=False, variables=started)
    assert 'setdefault("HOROVOD_CYCLE_TIME", "2")' in text
    assert 'setdefault("HOROVOD_FUSION_THRESHOLD", "16777216")' in text
    assert 'setdefault("HOROVOD_CACHE_CAPACITY", "0")' in text
    assert "HOROVOD" not in written(Settings(cycle_time_ms=2), own, ddp=True, variables=started)
    assert "HOROVOD_CYCLE" not in written(Settings(cycle_time_ms=1), own, ddp=False, variables=started)


def test_a_script_finds_the_modules_that_lie_beside_the_notebook(tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text("raise ValueError('imported')")
    lazily = replace(OWN, definitions="def f():\n    import later, json, missing")
    assert f'sys.path[:0] = ["{tmp_path}"]  # where the session has later' in written(
        Settings(), lazily, folder=str(tmp_path)
    )
    modules = {"layers": "/project", "extra": "/project/src", "unused": "/other"}
    source = replace(OWN, definitions="def f():\n    from layers.blocks import B\n    import os, extra")
    text = written(Settings(), source, modules=modules)
    path = 'sys.path[:0] = ["/project", "/project/src", "/other"]  # where the session has extra, layers from'
    assert text.index("import sys\n") < text.index(path) < text.index("import argparse\n")
    assert "sys.path" not in written(Settings(), source, modules={"layers": "/here", "unused": "/other"})
    assert "sys.path" not in written(Settings(), OWN, modules=modules)
    there = written(Settings(), replace(OWN, imports=("import layers.a as a",)), modules=modules | {"layers": "/here"})
    assert "sys.path" not in there
    assert "sys.path" in written(Settings(), replace(OWN, imports=("import layers.a as a",)), modules=modules)


@pytest.mark.parametrize("kind", ["functions", "cells"])
def test_another_optimizer_trains_and_clips_what_the_own_one_held(kind: str) -> None:
    text = written(Settings(optimizer="sgd", clip_norm=1.0), replace(OWN, kind=kind))
    held = 'for group in {}.param_groups for weight in group["params"]]'
    made = "make_optimizer(named.values())" if kind == "functions" else "optimizer"
    assert f"SGD([weight {held.format(made)}" in text
    assert f"clip_grad_norm_([weight {held.format('optimizer')}, 1.0)" in text


def test_a_state_that_is_there_already_is_told_apart_from_one_to_go_on_from() -> None:
    text = written(Settings())
    stops = text.index('sys.exit(f"{args.resume} is at step')
    assert text.index("start = resume(") < stops < text.index("for step in range(")


def test_an_attached_optimizer_keeps_the_state_that_it_has() -> None:
    text = written(Settings(optimizer="own", learning_rate=0.5), ddp=False)
    assert (
        text.index("state = optimizer.state") < text.index("DistributedOptimizer(") < text.index("state.update(state)")
    )


@pytest.mark.parametrize(
    ("settings", "facts", "message"),
    [
        (Settings(reduction="adasum", optimizer="sgd", compression="fp16"), {}, "adasum.*compression=none"),
        (Settings(), {"sometimes": ("extra.weight",)}, r"extra\.weight has a gradient on no rank.*--ddp"),
        (Settings(), {"unsent": "base.weight"}, r"base\.weight is of a type.*--ddp"),
        (Settings(), {"strided": "conv.weight"}, r"conv\.weight is not contiguous.*--ddp"),
        (Settings(optimizer="own"), {"optimizer_needs": ("decay",)}, "without decay.*--ddp"),
        (Settings(optimizer="own", lr_schedule="own", learning_rate=0.5), {}, r"0\.5 was set over.*learning_rate=0\.1"),
        (Settings(optimizer="own", learning_rate=0.5), {"tensor_rate": True}, "rate is a tensor"),
        (Settings(optimizer="own"), {"optimizer_keeps": ("lam",), "rate": 0.1, "asked_rate": 0.1}, "keeps lam.*--ddp"),
    ],
)
def test_what_horovod_does_otherwise_in_a_script_is_refused(
    settings: Settings, facts: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkloadError, match=message):
        refusals.check(settings, replace(FACTS, stepped=True, order="in turn", **facts), own=True, ddp=False)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (replace(OWN, imports=("from random import random",)), "both call something random"),
        (replace(OWN, imports=("from lib import micro_batches",)), "both call something micro_batches"),
        (replace(OWN, defines=frozenset({"torch"})), "both call something torch"),
        (replace(OWN, imports=("import horovod.torch as hvd",)), "uses Horovod.*without --ddp"),
        (replace(OWN, definitions="a = hvd.allreduce(b)"), "uses Horovod.*without --ddp"),
        (replace(OWN, definitions="a = [hvd, hvd.rank()]"), "uses Horovod.*without --ddp"),
    ],
)
def test_names_that_clash_are_refused(source: Source, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        written(Settings(), source)
    assert written(Settings(), replace(OWN, imports=("import random", "import torch")))


@pytest.mark.parametrize(("gpus", "backend", "used"), [(4, "nccl", 3), (2, "gloo", 1), (0, "gloo", None)])
def test_more_processes_than_gpus_share_them_as_the_ranks_of_a_session_do(
    monkeypatch: pytest.MonkeyPatch, gpus: int, backend: str, used: int | None
) -> None:
    joined, chosen = list[str](), list[int]()
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", joined.append)
    begin, end = "args = parser.parse_args()\n", "    device = torch.device("
    joining = written(Settings()).partition(begin)[2].partition(end)[0]
    exec(textwrap.dedent(joining), {"os": os, "torch": torch, "dist": torch.distributed})
    assert (joined, chosen) == ([backend], [] if used is None else [used])


def test_cells_that_only_ask_which_rank_they_run_on_have_an_answer_beside_distributed_data_parallel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    code = "if hvd.rank() == 0:\n    print(hvd.size(), hvd.local_rank())"
    source = replace(OWN, kind="cells", definitions=code, uses=frozenset({"hvd"}))
    text = written(Settings(), source)
    given = text[text.index("hvd = SimpleNamespace(") : text.index("torch.manual_seed")]
    names: dict[str, Any] = {"SimpleNamespace": SimpleNamespace, "os": os}
    names["dist"] = SimpleNamespace(get_rank=lambda: 1, get_world_size=lambda: 2)
    exec(f"{given}\nfound = hvd.rank(), hvd.size(), hvd.local_rank()", names)
    assert names["found"] == (1, 2, 0)
    assert "from types import SimpleNamespace\n" in text
    assert "SimpleNamespace" not in written(Settings(), source, ddp=False)


def test_odd_names_are_quoted_and_weights_of_the_criterion_too_can_lack_gradients() -> None:
    source = replace(OWN, names=OWN.names | {"loss": "criterion", "metric": 'partial(f, "x")'})
    absent = ('a "b"', "loss.scale")
    text = written(Settings(), source, absent=absent, metric="batch", criterion_weights=True, variables={"A": 'b"c'})
    assert 'named["a \\"b\\""].requires_grad_(False)' in text
    assert (
        text.index("loss_of.named_parameters()") < text.index('named["loss.scale"]') < text.index("DataParallel(With")
    )


def test_the_process_group_ends_when_nothing_holds_it_any_more() -> None:
    text = written(Settings())
    # Functions of this module keep the group for good, as their defaults, where they are defined after it.
    assert text.index("import torch.distributed.nn\n") < text.index("dist.init_process_group(")
    assert text.index("main(make, rows, opt)\n") < text.index("    dist.destroy_process_group()")


def test_text_hashes_as_in_the_session_before_anything_is_imported(tmp_path: Path) -> None:
    text = written(Settings(), hash_seed="7")
    head, _, rest = text.partition("import argparse\n")
    assert 'os.environ.get("PYTHONHASHSEED") != "7"' in head
    path = tmp_path / "train.py"
    path.write_text(head + 'print(hash("a"), *sys.argv[1:])')
    run = [sys.executable, str(path), "--steps", "3"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    said = {subprocess.run(run, env=environment, capture_output=True, check=True).stdout for _ in range(3)}
    assert len(said) == 1
    assert said.pop().endswith(b" --steps 3\n")
    assert rest.count("import sys") == 0


@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize("name", ["digits-resnet", "digits-separable", "text-gpt"])
def test_ready_made_workloads_under_default_settings_have_at_most_200_lines(name: str, ddp: bool) -> None:
    entry = catalog.find(name)
    source = Source("ready", entry.task, dict(entry.values({})), separable=name == "digits-separable")
    facts = replace(FACTS, stepped=True, order="shuffled")
    header = "\n" * 8
    order = Order(source, Settings(), facts, ddp, 1, 0, 1000, True, None, header, "/here", 10**6)
    assert script(order).count("\n") <= 200


def test_annotations_that_are_not_evaluated_are_said_in_the_first_line_of_code() -> None:
    text = written(Settings(), replace(OWN, definitions="def f(x: Later): pass", lazy_annotations=True))
    assert isinstance(ast.parse(text).body[1], ast.ImportFrom)
    exec(compile(text, "script", "exec", dont_inherit=True), {"__name__": "script"})
    assert "__future__" not in written(Settings())


def test_facts_are_those_of_ranks_that_have_the_settings_of_the_script() -> None:
    old, new = Settings(optimizer="adamw"), Settings(optimizer="own")
    stale, fresh = (replace(FACTS, optimizer=one.optimizer) for one in (old, new))
    answers = iter([stale, stale, fresh])
    assert agreed(lambda: next(answers), lambda: new) == (fresh, new)
    asked = iter([old, new, new, new, new, new])  # it was set meanwhile
    answers = iter([stale, stale, fresh])
    assert agreed(lambda: next(answers), lambda: next(asked)) == (fresh, new)
    with pytest.raises(WorkloadError, match=r"ranks do not have optimizer=own yet.*Export again"):
        agreed(lambda: stale, lambda: new)


class Mode(torch.nn.Module):
    """Says in which mode it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.frozen = torch.nn.Dropout(), torch.nn.Dropout().eval()

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.tensor(float(self.training + self.kept.training))


def test_criteria_and_metrics_are_in_evaluation_mode_while_a_script_evaluates(capsys: Any) -> None:
    source = replace(OWN, kind="cells", names=dict.fromkeys(("model", "data", "loss", "eval_data", "metric"), "x"))
    told: dict[str, Any] = {"eval_form": "dataset", "metric": "outputs", "criterion": True, "metric_module": True}
    text = written(Settings(batch_size=2), source, evaluates=True, **told)
    assert text.index("metric.to(device)") < text.index("loss_of.to(device)") < text.index("for step in range(")
    names: dict[str, Any] = {"__name__": "script"}
    only = text[text.index("def evaluate_together(") : text.index("def resume(")]
    exec(f"import random, torch\nimport numpy as np\nfrom collections import defaultdict\n{only}", names)
    names["dist"] = SimpleNamespace(
        get_rank=lambda: 0,
        get_world_size=lambda: 1,
        all_gather_object=lambda parts, mine: parts.__setitem__(0, mine),
    )
    names |= {"default_collate": torch.utils.data.default_collate}
    model, criterion, metric = torch.nn.Dropout(), Mode(), Mode()
    data, args = [(torch.ones(2), torch.ones(2))] * 2, type("Arguments", (), {"batch_size": 2})
    names["evaluate_together"](model, data, args, torch.device("cpu"), criterion, metric)
    assert capsys.readouterr().out == "validation: loss 0, x 0\n"
    assert model.training and metric.kept.training  # noqa: PT018
    assert not criterion.frozen.training
    plain = written(Settings(), source, evaluates=True, eval_form="dataset", metric="outputs")
    assert "model.eval()" in plain and "modes" not in plain  # noqa: PT018


def test_names_of_python_that_the_script_uses_are_not_to_be_redefined() -> None:
    for source in (
        replace(OWN, defines=frozenset({"range"})),
        replace(OWN, imports=("from lib import next",)),
    ):
        with pytest.raises(WorkloadError, match=r"both call something (range|next)\. Rename yours"):
            written(Settings(), source)
    assert written(Settings(), replace(OWN, defines=frozenset({"filter"})))


def test_cells_may_use_the_device_that_they_find_and_call_another_one_so() -> None:
    code = "first = torch.zeros(2).to(device)\ndevice = 'cpu'"
    source = Source("cells", definitions=code, names={"model": "net", "data": "rows"}, defines=frozenset({"device"}))
    text = written(Settings(), source, own_optimizer=False)
    assert (
        text.index("\ndevice = torch.device(") < text.index("\nfirst = ") < text.index("\n    device = torch.device(")
    )


def test_cells_open_no_windows_and_save_nothing_while_they_run() -> None:
    code = "import torch\nimport matplotlib.pyplot as plt\ndef keep(x): torch.save(x, 'best.pt')\n"
    code += "keep(1)\nplt.show()\ndisplay(3)"
    found = selected([Cell(code), Cell("net = keep")], ["net"], 0, forgotten=False)
    assert found.plots and found.saves and found.uses == {"display"}  # noqa: PT018
    assert "\n# not in the script: plt.show()\n" in found.definitions
    source = Source(
        "cells",
        definitions=found.definitions,
        names={"model": "net"},
        uses=found.uses,
        plots=found.plots,
        saves=found.saves,
    )
    lines = written(Settings(), source).splitlines()
    backend = next(place for place, line in enumerate(lines) if line.startswith('os.environ.setdefault("MPLBACKEND"'))
    first, last = lines.index("import matplotlib.pyplot as plt"), lines.index("display(3)")
    assert backend < lines.index("display = print  # IPython's shows more than a terminal can") < first
    off = next(place for place, line in enumerate(lines) if line.startswith("torch.save = lambda"))
    assert off < first < last < lines.index("torch.save = torch.serialization.save")
    names: dict[str, object] = {"io": io, "torch": SimpleNamespace(serialization=torch.serialization)}
    exec(f"{lines[off]}\ntorch.save([3], 'best.pt')\nheld = io.BytesIO()\ntorch.save(obj=[3], f=held)", names)
    held = names["held"]
    assert isinstance(held, io.BytesIO)
    assert held.tell() > 0
    assert not Path("best.pt").exists()
    plain = written(Settings(), replace(OWN, kind="cells"))
    assert "torch.save =" not in plain and "MPLBACKEND" not in plain and "display" not in plain  # noqa: PT018


def test_code_that_would_stand_otherwise_in_a_script_is_refused() -> None:
    check_code("a = 1\nb = '''x\n\n\n\ny'''", "import os\na = 1\nb = '''x\n\n\n\ny'''\nc = 3")
    for text in ("a = 1\nb = '''x\n\ny'''", "b = '''x\n\n\n\ny'''\na = 1", "a = 1"):
        with pytest.raises(WorkloadError, match="otherwise than it ran"):
            check_code("a = 1\nb = '''x\n\n\n\ny'''", text)
