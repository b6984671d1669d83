"""Code and variables on ranks, status, bad input."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

import gpumem_nb
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import GpumemError, InvalidInput, RankError, WorkloadError
from tests.conftest import about, weights
from tests.timing import HANG_S

pytestmark = pytest.mark.cluster


def test_code_and_functions_give_results_in_rank_order(two_ranks: Session) -> None:
    def double(value: int) -> int:
        import horovod.torch as hvd

        return value * 2 + int(hvd.rank())

    assert two_ranks.run(double, 10) == [20, 21]
    assert two_ranks.run("x = rank * 10\nx + 1", ranks="1") == [11]
    assert two_ranks.run("x = 1") == [None] * 2
    assert two_ranks.run("rank", ranks=1) == [1]


@pytest.mark.full
def test_ranks_that_have_nothing_to_do_leave_the_cores_alone(two_ranks: Session) -> None:
    def cpu_s() -> float:
        used = [psutil.Process(rank.pid).cpu_times() for rank in two_ranks.ranks]
        return float(sum(one.user + one.system for one in used))

    two_ranks.run("pass")
    began, before_s = time.monotonic(), cpu_s()
    time.sleep(2)  # what they do in that time is what is asked
    assert cpu_s() - before_s < 0.5 * (time.monotonic() - began), "of one core; 0.1 when this was written"


def test_the_first_error_is_raised_without_waiting_for_the_others(two_ranks: Session) -> None:
    with pytest.raises(RankError, match="rank 1: ZeroDivisionError") as caught:
        two_ranks.run("import time\nif rank == 1:\n    1 / 0\nelse:\n    time.sleep(1.5)")
    assert caught.value.rank == 1
    assert "1 / 0" in caught.value.remote_traceback
    assert "entry.py" not in caught.value.remote_traceback
    assert two_ranks.run("rank") == [0, 1]


def test_a_time_out_interrupts_the_ranks(two_ranks: Session) -> None:
    with pytest.raises(TimeoutError, match=r"ranks 0-1 did not answer within 0\.5 s"):
        two_ranks.run("while True: pass", timeout=0.5)
    assert two_ranks.run("rank", timeout=HANG_S) == [0, 1]


def test_variables_go_there_and_back(two_ranks: Session) -> None:
    two_ranks.push({"table": {"a": [1, 2]}})
    assert two_ranks.pull("table") == [{"a": [1, 2]}] * 2
    assert two_ranks.pull("rank", ranks=[1]) == [1]
    with pytest.raises(WorkloadError, match="There is no variable 'nothing' on rank"):
        two_ranks.pull("nothing")


UNREADABLE = """
import sys, types
sys.modules["only_on_ranks"] = types.ModuleType("only_on_ranks")
exec("class Thing:\\n    pass", vars(sys.modules["only_on_ranks"]))
class Demanding(Exception):
    def __init__(self, a, b):
        super().__init__("text")
thing, demanding = sys.modules["only_on_ranks"].Thing(), Demanding(1, 2)
"""


@pytest.mark.parametrize(("name", "why"), [("thing", "ModuleNotFoundError"), ("demanding", "TypeError")])
def test_an_answer_that_cannot_be_read_here_fails_its_own_call_only(two_ranks: Session, name: str, why: str) -> None:
    two_ranks.run(UNREADABLE)
    with pytest.raises(RankError, match=f"rank 0: {why}: .*cannot be read in the notebook"):
        two_ranks.pull(name)
    assert two_ranks.run("rank") == [0, 1]
    two_ranks.run("del thing, demanding, sys.modules['only_on_ranks']")


def test_a_function_of_an_earlier_cell_fails_with_its_own_lines(two_ranks: Session) -> None:
    two_ranks.run("def broken():\n    return 1 / 0  # of the first cell")
    with pytest.raises(RankError, match="ZeroDivisionError") as caught:
        two_ranks.run("# of the second cell\nbroken()  # calls the first")
    assert "return 1 / 0  # of the first cell" in caught.value.remote_traceback
    assert "broken()  # calls the first" in caught.value.remote_traceback


def test_classes_defined_here_work_there(two_ranks: Session) -> None:
    import torch

    class Doubling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    workload = gpumem_nb.Workload(
        "doubling",
        model=Doubling,
        data=lambda: torch.utils.data.TensorDataset(torch.randn(64, 3)),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
    )
    info = two_ranks.load(workload)
    assert (info.name, info.parameters, info.own_optimizer) == ("doubling", 3, "SGD")
    losses = two_ranks.train(30).frame().groupby("step").loss.mean()
    assert losses.iloc[-1] < losses.iloc[0] / 2


def test_attach_trains_exactly_these_objects(two_ranks: Session) -> None:
    two_ranks.run(
        """
from torch import nn
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
features = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
train_set = torch.utils.data.TensorDataset(features, (features[:, 0] > 0).long())
criterion = nn.CrossEntropyLoss()
before = [p.detach().clone() for p in net.parameters()]
"""
    )
    two_ranks.attach(model="net", loss="criterion", data="train_set")
    two_ranks.set(learning_rate=0.01)
    two_ranks.train(60)
    moved = two_ranks.run("any(not torch.equal(p, q) for p, q in zip(net.parameters(), before))")
    accuracy = two_ranks.run("(net(features).argmax(1) == (features[:, 0] > 0)).float().mean().item()")
    assert moved == [True, True]
    assert min(accuracy) > 0.9


def test_what_was_set_before_is_said_when_something_is_loaded_and_not_what_it_brings(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.run(
        """
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
net, criterion = nn.Linear(8, 2), nn.CrossEntropyLoss()
loader = DataLoader(TensorDataset(torch.randn(256, 8), torch.randint(0, 2, (256,))), batch_size=16)
own = torch.optim.SGD(net.parameters(), lr=0.25)
"""
    )
    for _ in range(2):
        session.attach(model="net", loss="criterion", data="loader", optimizer="own")
        assert (session.settings.batch_size, session.settings.optimizer, session.kept) == (16, "own", "")
    session.set(clip_norm=1.5)
    session.attach(model="net", loss="criterion", data="loader", optimizer="own")
    assert session.kept == "Kept from before: clip_norm=1.5 (back with: %hvd_set clip_norm=none)."
    session.set(clip_norm="none")


@pytest.mark.full
def test_attach_a_transformers_model_made_from_a_config(two_ranks: Session) -> None:
    two_ranks.run(
        """
from transformers import GPT2Config, GPT2LMHeadModel
gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=32,
                                  bos_token_id=None, eos_token_id=None))
tokens = torch.randint(0, 64, (128, 32), generator=torch.Generator().manual_seed(0))
class Rows(torch.utils.data.Dataset):
    def __len__(self): return len(tokens)
    def __getitem__(self, index): return {"input_ids": tokens[index], "labels": tokens[index]}
rows = Rows()
"""
    )
    info = two_ranks.attach(model="gpt2", data="rows")
    assert info.blocks == 4
    two_ranks.set(batch_size=8, learning_rate=3e-3)
    plain = two_ranks.train(15).frame()
    two_ranks.set(checkpointing="blocks")
    checkpointed = two_ranks.train(3).frame()
    assert plain.loss.iloc[-1] < plain.loss.iloc[0]
    assert checkpointed.live_peak_bytes.max() < plain.live_peak_bytes.max()
    two_ranks.set(checkpointing="none", precision="bf16")
    assert two_ranks.train(2).steps == 2


def test_status_says_who_where_and_what(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.train(3)
    status = session.status()
    text = str(status)
    assert "paused at step 3" in text
    assert "rank 1: virtual GPU" in text
    assert "digits-resnet" in text
    parsed = json.loads(status.to_json())
    assert parsed["settings"]["batch_size"] == 32
    assert len(parsed["ranks"]) == 2
    assert {"controller", "engines", "horovod"} <= set(parsed["start_seconds"])


@pytest.mark.full
def test_the_rank_that_the_others_wait_for_is_named(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    fresh(two_ranks)
    two_ranks.run("import time; slow = model.register_forward_pre_hook(lambda *_: time.sleep(0.2))", ranks=[1])
    run = two_ranks.train(8)
    assert "rank 1 is slowest, others wait" in str(two_ranks.status())
    waited = run.frame().groupby("rank").reduction_s.median()
    assert waited[0] > 0.15 > waited[1]
    two_ranks.run("slow.remove()", ranks=[1])


def test_memory_gives_live_peak_reserved_and_limit_of_each_rank(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.train(2)
    frame = session.memory().frame()
    assert len(frame) == 2
    assert "virtual" in str(session.memory())
    assert "96.0 MiB" in str(session.memory())


def test_memory_says_what_the_peak_of_each_rank_is_made_of(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    assert "known once a step has been trained" in str(session.memory())
    session.train(2)
    report = session.memory(by="category")
    frame, peaks = report.frame(by="category"), report.frame()["peak_bytes"]
    assert list(frame.groupby("rank")["peak_bytes"].sum()) == list(peaks)
    assert list(report.frame(by="module").groupby("rank")["peak_bytes"].sum()) == list(peaks)
    parameters = frame[frame["category"] == "parameters"]["peak_bytes"]
    assert list(parameters) == [session.workload.parameter_bytes] * 2  # type: ignore[union-attr]
    assert "activations" in str(report)
    with pytest.raises(InvalidInput, match="did you mean 'module'"):
        session.memory(by="modules")


def test_a_recorded_step_is_in_the_report_and_undone(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.train(2)
    before = weights(session)
    report = session.memory(by="module", timeline=True)
    assert weights(session) == before
    assert session.history.steps == 2
    assert [line.rank for line in report.timelines] == [0, 1]
    frame = report.frame(by="timeline")
    assert {"forward", "backward", "update"} <= set(frame["phase"])
    for line in report.timelines:
        recorded = frame[frame["rank"] == line.rank]
        assert recorded.groupby("time_ms")["live_bytes"].sum().max() == line.ledger.peak_bytes
    assert str(report).count("← peak") == 1


def test_memory_held_by_a_cell_shows(two_ranks: Session) -> None:
    two_ranks.run("import gc; gc.collect(); held = None")
    before = [entry.reading.live_bytes for entry in two_ranks.memory().ranks]
    two_ranks.run("held = torch.empty(5 * 2**20, dtype=torch.uint8)")
    after = [entry.reading.live_bytes for entry in two_ranks.memory().ranks]
    two_ranks.run("held = None")
    assert [b - a for a, b in zip(before, after, strict=True)] == about([5 * 2**20] * 2)


NOT_SENT: Any = (threading.Lock().acquire, list, max)
BAD: list[tuple[Callable[[Session], Any], str]] = [
    (lambda s: s.set(precison="bf16"), "did you mean 'precision'"),
    (lambda s: s.set(precision="bf61"), "did you mean 'bf16'"),
    (lambda s: s.set(batch_size=0), "whole number of at least 1"),
    (lambda s: s.set(batch_size="many"), "whole number of at least 1"),
    (lambda s: s.set(learning_rate=-1), "number of at least 0"),
    (lambda s: s.set(learning_rate=float("nan")), "number of at least 0"),
    (lambda s: s.set(batch_size=10_000), "larger than the dataset"),
    (lambda s: s.set(optimizer="own"), "brings no optimizer of its own"),
    (lambda s: s.train(0), "whole number of at least 1"),
    (lambda s: s.train(True), "whole number of at least 1"),
    (lambda s: s.load("digits-resnot"), "did you mean 'digits-resnet'"),
    (lambda s: s.load("digits-resnet", widht=3), "did you mean 'width'"),
    (lambda s: s.load(cast(Any, 42)), "cannot be loaded"),
    (lambda s: s.run("a b"), "syntax error in line 1"),
    (lambda s: s.run(cast(Any, 42)), "cannot be run"),
    (lambda s: s.run("1", ranks="7"), "there are ranks 0-1"),
    (lambda s: s.run("1", ranks="x"), "Write single ranks and ranges"),
    (lambda s: s.run("1", ranks=[1.5]), r"ranks=\[1\.5\] cannot be read"),  # type: ignore[list-item]
    (lambda s: s.run("1", ranks=True), "ranks=True cannot be read"),
    (lambda s: s.run("1", ranks="0-999999999"), "there are ranks 0-1"),
    (lambda s: s.run("1", ranks="1-0"), "the range 1-0 runs backwards"),
    (lambda s: s.push({"not a name": 1}), "is not a variable name"),
    (lambda s: s.push({"lock": threading.Lock()}), "cannot be sent to the ranks"),
    (lambda s: s.attach(model="nett", data="rows"), "there is no variable 'nett' on the ranks"),
    (lambda s: s.attach(model="model", data="(X, Y)"), "name one variable here. Make it in a %%hvd cell: data = "),
    (lambda s: gpumem_nb.start(2), "running already"),
    (lambda s: s.load(gpumem_nb.Workload("w", *NOT_SENT)), "cannot be sent to the ranks"),
]


@pytest.mark.parametrize(("misuse", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_bad_input_gets_a_sentence_and_changes_nothing(
    two_ranks: Session, fresh: Callable[..., Session], misuse: Callable[[Session], Any], sentence: str
) -> None:
    if two_ranks.workload is None or two_ranks.workload.name != "digits-resnet":
        fresh(two_ranks)
    settings = two_ranks.settings
    with pytest.raises(GpumemError, match=sentence) as caught:
        misuse(two_ranks)
    assert "\n" not in str(caught.value)
    assert two_ranks.settings == settings
    assert two_ranks.train(1).steps == 1


@pytest.mark.parametrize(
    ("definition", "sentence"),
    [
        ("thing = []", "is empty"),
        ("thing = 5", "has neither"),
    ],
)
def test_data_that_cannot_be_sharded_keeps_the_old_workload(
    two_ranks: Session, fresh: Callable[..., Session], definition: str, sentence: str
) -> None:
    fresh(two_ranks)
    two_ranks.run(f"import torch\n{definition}\nlayer = torch.nn.Linear(1, 1)")
    with pytest.raises(WorkloadError, match=sentence):
        two_ranks.attach(model="layer", data="thing")
    assert two_ranks.train(1).steps == 1


def test_a_model_that_is_none_leaves_nothing_loaded(two_ranks: Session) -> None:
    two_ranks.run("thing = [1.0, 2.0]; layer = 7")
    with pytest.raises(WorkloadError, match=r"must be a torch\.nn\.Module; this is a int"):
        two_ranks.attach(model="layer", data="thing")
    with pytest.raises(WorkloadError, match="Nothing is loaded"):
        two_ranks.train(1)


@pytest.mark.full
def test_a_load_that_takes_long_says_what_the_ranks_are_at(two_ranks: Session, tmp_path: Path) -> None:
    go = tmp_path / "go"
    two_ranks.run(
        f"""
import pathlib, time
class Slow:
    def __len__(self):
        while not pathlib.Path({str(go)!r}).exists():
            time.sleep(0.01)
        return 64
    def __getitem__(self, index):
        return torch.ones(1)
slow, layer = Slow(), torch.nn.Linear(1, 1)
def mean(model, batch):
    return model(batch).mean()
"""
    )
    told: list[str] = []

    def progress(what: str, done: float) -> None:
        told.append(what)
        if what:
            go.touch()

    with two_ranks.telling(progress):
        two_ranks.attach(model="layer", data="slow", loss="mean")
    assert "attaching a model" in next(filter(None, told))
    assert two_ranks.train(1).steps == 1
    go.unlink()

    def broken(what: str, done: float) -> None:
        go.touch()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), two_ranks.telling(broken):  # nothing counts as loaded: it is not known here
        two_ranks.attach(model="layer", data="slow", loss="mean")
    with pytest.raises(WorkloadError, match="Nothing is loaded"):
        two_ranks.train(1)
    two_ranks.attach(model="layer", data="slow", loss="mean")
    assert two_ranks.train(1).steps == 1


def test_a_batch_that_is_too_large_for_a_new_dataset_is_reduced_and_said(two_ranks: Session) -> None:
    two_ranks.run("layer = torch.nn.Linear(1, 1); few = [torch.ones(1) for _ in range(10)]")
    two_ranks.run("def mean(model, batch):\n    return model(batch).mean()")
    two_ranks.attach(model="layer", data="few", loss="mean")
    assert two_ranks.settings.batch_size == 5
    assert any("batch_size=5" in event.text for event in two_ranks.history.events)


def test_a_number_of_ranks_that_makes_no_sense_is_refused() -> None:
    for n, sentence in ((0, "at least 1"), (-1, "at least 1"), (10_000, "do not fit on this machine")):
        with pytest.raises(InvalidInput, match=f"{sentence}|running already"):
            gpumem_nb.start(n)
