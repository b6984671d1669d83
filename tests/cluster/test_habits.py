"""What people do in cells of any notebook: copies of the model, forward passes, questions, children, exits."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import gpumem_nb
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import ClusterDied, RankError, TrainingFailed
from tests import internals
from tests.timing import HANG_S, until

pytestmark = pytest.mark.cluster

NET = """
import copy
from torch import nn
torch.manual_seed(0)
X = torch.randn(96, 8)
Y = X[:, :1] * 2
rows = torch.utils.data.TensorDataset(X, Y)
net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)], nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=.05)
loss = nn.MSELoss()
"""


def attached(session: Session, code: str = NET, loss: str = "loss", **knobs: Any) -> Session:
    """Attach what this code defines, and set these knobs."""
    session.run(code)
    session.attach(model="net", data="rows", loss=loss, optimizer="opt")
    default = gpumem_nb.Settings().replace(optimizer="own", learning_rate=0.05, batch_size=8, **knobs)
    session.set(**default.changed_from(session.settings))
    return session


# The model under checkpointing ----------------------------------------------------------------------------------------

LOOKS = {
    "a copy": "t = copy.deepcopy(net); l = loss(t(X[:8]), Y[:8]); l.backward(); float(l)",
    "a shallow copy": "t = copy.copy(net); l = loss(t(X[:8]), Y[:8]); l.backward(); float(l)",
    "an average": "t = torch.optim.swa_utils.AveragedModel(net); t.update_parameters(net); float(t(X[:8]).sum())",
    "a forward pass": "float(net(X[:8]).sum())",
    "a kept forward pass": "out = net(X[:8]); float(out.sum())",
    "a backward": "net.zero_grad(); l = loss(net(X[:8]), Y[:8]); l.backward(); float(l)",
    "a pickled copy": "import pickle; t = pickle.loads(pickle.dumps(net)); float(t(X[:8]).sum())",
    "a file": """
import io
file = io.BytesIO()
torch.save(net, file)
file.seek(0)
float(torch.load(file, weights_only=False)(X[:8]).sum())
""",
}


@pytest.mark.parametrize("checkpointing", ["selective", "blocks", "sqrt"])
def test_cells_find_a_plain_model_under_checkpointing(two_ranks: Session, checkpointing: str) -> None:
    plain, trained = list[Any](), list[float]()
    for mode, found in (("none", plain), (checkpointing, list[Any]())):
        attached(two_ranks, checkpointing=mode)
        losses = [two_ranks.train(2).frame().loss.iloc[-1]]
        for cell in LOOKS.values():
            found.append(two_ranks.run(cell))
            losses.append(two_ranks.train(1).frame().loss.iloc[-1])
        assert found == plain
        found_there = two_ranks.pull("net")[0]
        assert type(found_there).__name__ == "Sequential"
        assert trained in ([], losses)
        trained = losses


def test_a_teacher_copied_under_checkpointing_is_called_in_the_loss(two_ranks: Session) -> None:
    code = NET + (
        "teacher = None\n"
        "def loss(model, batch):\n"
        "    global teacher\n"
        "    teacher = teacher or copy.deepcopy(model)\n"
        "    out = model(batch[0])\n"
        "    return ((out - batch[1]) ** 2).mean() + .1 * ((out - teacher(batch[0]).detach()) ** 2).mean()\n"
    )
    plain = attached(two_ranks, code).train(4).frame().loss.tolist()
    assert attached(two_ranks, code, checkpointing="blocks").train(4).frame().loss.tolist() == plain
    two_ranks.run("import pickle; teacher = pickle.loads(pickle.dumps(copy.deepcopy(net)))")
    two_ranks.train(1)


# The process ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell",
    [
        "input('name? ')",
        "import pdb; pdb.set_trace()",
        "breakpoint()",
        "from IPython.core.debugger import set_trace; set_trace()",
        "import getpass; getpass.getpass()",
        "import code; code.interact()",
        "import IPython; IPython.embed()",
        "from IPython.terminal.embed import InteractiveShellEmbed; InteractiveShellEmbed()()",
        "import sys; sys.stdin.read()",
        "import sys; sys.stdin.buffer.read()",
        "import sys; [line for line in sys.stdin]",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    import pdb\n    pdb.post_mortem()",
    ],
)
def test_what_wants_an_answer_is_refused_on_every_rank_and_the_next_cell_runs(two_ranks: Session, cell: str) -> None:
    for rank in (0, 1):
        with pytest.raises(RankError, match="a rank has no keyboard"):
            two_ranks.run(cell, ranks=[rank], timeout=HANG_S)
    with pytest.raises(RankError, match="a rank has no keyboard"):
        two_ranks.run(cell, timeout=HANG_S)
    assert two_ranks.run("1 + rank, __import__('sys').gettrace()", timeout=HANG_S) == [(1, None), (2, None)]


def test_a_debugger_in_the_loss_ends_the_step_in_a_sentence(two_ranks: Session) -> None:
    attached(two_ranks, NET + "def loss(model, batch):\n    breakpoint()\n    return model(batch[0]).sum()\n")
    with pytest.raises(TrainingFailed, match="a rank has no keyboard"):
        two_ranks.train(1)


@pytest.mark.full
def test_what_children_print_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # where it is set, ipykernel leaves alone what is written past Python
    code = "import multiprocessing, time\nchild = multiprocessing.Process(target=print, args=('of a child',))\n"
    internals.stop_running()  # of the tests before
    with gpumem_nb.start(1, device="cpu") as session:
        call = session.run_cell(f"{code}child.start()\nchild.join()\ntime.sleep(0.5)", timeout=HANG_S)
        assert call.outputs() == ["of a child\n"]


def test_children_read_an_empty_standard_input(two_ranks: Session) -> None:
    cell = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'input()'], capture_output=True).returncode"
    assert two_ranks.run(cell, timeout=HANG_S) == [1, 1]


@pytest.mark.full
def test_children_end_as_those_of_a_plain_process(two_ranks: Session) -> None:
    ended = """
import multiprocessing as mp, os, signal, time
def child():
    ready.set()
    while True:
        time.sleep(0.01)  # one long sleep would go on to its end if the signal came just before it
codes = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    ready = mp.Event()
    process = mp.Process(target=child)
    process.start()
    ready.wait()
    os.kill(process.pid, number)
    process.join(20)
    codes.append(process.exitcode)
    process.kill()
codes
"""
    # An interrupt is an exception, after which multiprocessing ends the child with 1.
    assert two_ranks.run(ended, timeout=HANG_S) == [[-signal.SIGTERM, 1, -signal.SIGUSR1]] * 2
    pools = """
import multiprocessing as mp, time
def square(x): return x * x
for _ in range(10):
    with mp.Pool(2) as pool:
        found = pool.map(square, range(4))
with mp.Pool(2) as pool:
    pool.apply_async(time.sleep, (60,))
found
"""
    assert two_ranks.run(pools, timeout=HANG_S) == [[0, 1, 4, 9]] * 2


def test_cells_find_no_variables_of_the_launcher(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    look = "import os, subprocess, sys\n[name for name in {} if name.startswith(('OMPI_', 'PMIX_', 'PRTE_', 'OPAL_'))]"
    assert two_ranks.run(look.format("os.environ")) == [[], []]
    children = "subprocess.run(['env'], capture_output=True, text=True).stdout.splitlines()"
    assert two_ranks.run(look.format(children)) == [[], []]
    assert two_ranks.run("float(hvd.allreduce(torch.ones(1)))") == [1.0, 1.0]
    two_ranks.run("hvd.shutdown()")  # they are joined again without them
    fresh(two_ranks).train(2)


@pytest.mark.full
def test_transformers_and_accelerate_take_a_rank_for_a_plain_process(two_ranks: Session) -> None:
    assert (
        two_ranks.run(
            "from accelerate import Accelerator\nAccelerator(cpu=True).num_processes, Accelerator().process_index"
        )
        == [(1, 0)] * 2
    )
    arguments = "transformers.TrainingArguments(output_dir='out', use_cpu=True)"
    assert two_ranks.run(f"import transformers\n{arguments}.world_size, {arguments}.local_rank") == [(1, -1)] * 2


@pytest.mark.parametrize("cell", ["exit()", "quit()", "exit(3)", "import sys; sys.exit()", "import sys; sys.exit(3)"])
def test_a_cell_that_wants_to_exit_is_told_what_ends_ranks(two_ranks: Session, cell: str) -> None:
    with pytest.raises(RankError, match=r"%hvd_stop to end all ranks"):
        two_ranks.run(cell, timeout=HANG_S)
    assert two_ranks.run("rank", timeout=HANG_S) == [0, 1]
    assert "%hvd_stop" in two_ranks.run("repr(exit)")[0]


@pytest.mark.parametrize(
    "clears",
    [
        "for name in [name for name in globals() if name[0] != '_']: del globals()[name]",
        "get_ipython().run_line_magic('reset', '-f')",
    ],
)
def test_a_cell_that_clears_all_names_leaves_ranks_that_answer(two_ranks: Session, clears: str) -> None:
    two_ranks.run("import builtins; builtins.kept = dict(globals())")
    try:
        two_ranks.run(clears)
        assert two_ranks.run("get_ipython().run_line_magic('time', '1 + 1')", timeout=HANG_S) == [2, 2]
        with pytest.raises(RankError, match=r"%hvd_stop to end all ranks"):
            two_ranks.run("exit()", timeout=HANG_S)
    finally:
        two_ranks.run("globals().update(kept)")
    assert two_ranks.run("rank", timeout=HANG_S) == [0, 1]


@pytest.mark.full
def test_an_exit_at_once_is_named_as_the_end_of_the_ranks() -> None:
    named = r"Rank 1 .*exit code 3.*os\._exit\(3\) was called in <code \d+>, line 2"
    internals.stop_running()
    with gpumem_nb.start(2, device="cpu", memory_limit="96MiB") as session, pytest.raises(ClusterDied, match=named):
        session.run("import os\nif rank == 1: os._exit(3)\nhvd.barrier()")


# What people attach ---------------------------------------------------------------------------------------------------


def test_sparse_gradients_cannot_be_clipped_which_is_said_in_a_sentence(two_ranks: Session) -> None:
    code = """
from torch import nn
rows = torch.utils.data.TensorDataset(torch.randint(0, 50, (96, 4)), torch.randn(96, 1))
net = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
loss = nn.MSELoss()
"""
    attached(two_ranks, code, clip_norm=1.0)
    with pytest.raises(TrainingFailed, match="clip_norm needs dense gradients") as caught:
        two_ranks.train(1)
    assert len(str(caught.value)) < 500
    two_ranks.set(clip_norm=None)
    assert two_ranks.train(2).frame().step.max() == 2


def test_what_accelerate_prepared_trains_as_what_it_was_given(two_ranks: Session) -> None:
    more = "\nrows = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)"
    more += "\nscheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)"
    plain = attached(two_ranks, NET + more).train(5).frame().loss.tolist()
    more += "\nfrom accelerate import Accelerator"
    more += "\nnet, opt, rows, scheduler = Accelerator(cpu=True).prepare(net, opt, rows, scheduler)"
    assert attached(two_ranks, NET + more).train(5).frame().loss.tolist() == plain
    two_ranks.attach(model="net", data="rows", loss="loss", optimizer="opt", scheduler="scheduler")
    two_ranks.train(2)


def test_a_defining_cell_that_runs_again_without_attach_is_told_at_once(two_ranks: Session) -> None:
    attached(two_ranks, NET).train(1)

    def said_by(cell: str) -> list[str]:
        since_s = two_ranks.history.now_s()
        call = two_ranks.run_cell(cell)
        call.settle(HANG_S)  # what is printed may come after the answer
        events = [event for event in list(two_ranks.history.events) if event.time_s >= since_s]  # only so many are kept
        notes = [event.text for event in events if "attach again" in event.text]
        assert all(output.count("attach again") == len(notes) for output in call.outputs())
        return notes

    (note,) = said_by(NET)
    assert note.startswith("net, rows, loss and opt are other objects than those attached; attach again")
    assert said_by("1 + 1") == []
    (note,) = said_by("def loss(model, batch): return model(batch[0]).sum()")
    assert note.startswith("net, rows, loss and opt are other")
    two_ranks.attach(model="net", data="rows", loss="loss", optimizer="opt")
    assert said_by("loss = loss(net, (X, Y))") == [], "a number is no loss to train with"
    two_ranks.push({"loss": len})
    assert "loss is another object than the one attached" in list(two_ranks.history.events)[-1].text


# What a cell shows ----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_cell_shows_what_it_shows_in_a_notebook(
    two_ranks: Session, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown_by(cell: str, line: str = "") -> str:
        shell.run_cell_magic("hvd", line, cell)
        return capsys.readouterr().out

    assert shown_by("import asyncio\nawait asyncio.sleep(0)\nprint('slept')") == "[ranks 0-1] slept\n"
    assert shown_by("await asyncio.sleep(0, 5)") == "[ranks 0-1] 5\n"
    assert shown_by("1 + 1;") == ""
    assert shown_by("1 + 1") == "[ranks 0-1] 2\n"
    late = "import threading, time\ndef late():\n    while 'go' not in globals(): time.sleep(0.01)\n    print('late')\n"
    shown_by(late + "threading.Thread(target=late).start()", "--ranks 0")
    two_ranks.push({"go": True})  # no cell, to which it would belong
    shown = [shown_by("print('next')")]
    until(lambda: "late" in shown[-1] or shown.append(shown_by("print('next')")))  # type: ignore[func-returns-value]
    assert "".join(shown).count("late") == 1


def test_help_on_an_object_is_shown(
    two_ranks: Session, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell_magic("hvd", "", "rank?")
    assert "int(" in capsys.readouterr().out


def test_figures_are_shown_without_being_asked_for(two_ranks: Session) -> None:
    two_ranks.run(
        "from IPython.display import display\n"
        "def flush(): display({'text/plain': 'a figure'}, raw=True)\n"
        "get_ipython().events.register('post_execute', flush)"  # as matplotlib's inline backend does
    )
    call = two_ranks.run_cell("figure = 1")
    call.settle(HANG_S)
    two_ranks.run("get_ipython().events.unregister('post_execute', flush)")
    assert call.displays() == [[{"text/plain": "a figure"}]] * 2
