"""The magics, in a real IPython shell and in a real kernel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.manager import start_new_kernel

from gpumem_nb.session import Session, current
from gpumem_nb.shared.errors import GpumemError, RankError, StateFileError
from tests import internals

pytestmark = pytest.mark.cluster

MAGICS = (
    "start status push pull load attach seed sync set train play pause eval panel memory time scaling trace runs "
    "report log save resume interrupt restart stop check predict what_if what_fits tune doctor export"
)


def run(shell: InteractiveShell, cell: str) -> Any:
    """What the cell gives; its error, raised."""
    result = shell.run_cell(cell)
    if result.error_before_exec or result.error_in_exec:
        raise result.error_before_exec or result.error_in_exec
    return result.result


@pytest.mark.parametrize("name", MAGICS.split())
def test_every_magic_has_help_made_from_its_arguments(shell: InteractiveShell, name: str) -> None:
    text = shell.object_inspect_text(f"%hvd_{name}", detail_level=0)
    assert f"%hvd_{name}" in text
    assert "::" in text


def test_any_magic_before_start_says_how_to_start(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    needing = set(MAGICS.split()) - {"start", "check", "resume"}  # which starts ranks
    arguments = {
        "push": "x",
        "pull": "x",
        "load": "digits-resnet",
        "attach": "model=a data=b",
        "save": "x",
        "seed": "1",
        "trace": "a.json",
        "report": "a.html",
        "export": "a.py",
    }
    internals.forget_sessions()
    for name in sorted(needing):
        with pytest.raises(UsageError, match="%hvd_start 4"):
            run(shell, f"%hvd_{name} {arguments.get(name, '')}")
    with pytest.raises(UsageError, match="%hvd_start 4"):
        run(shell, "%%hvd\n1")
    assert "Traceback" not in "".join(capsys.readouterr())


def test_a_lesson_by_magic(two_ranks: Session, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    run(shell, "%hvd_load digits-resnet width=8 depth=1 resolution=8")
    said = capsys.readouterr()
    assert "workload digits-resnet" in said.out
    assert "Loading digits-resnet: done in" in said.err
    run(shell, "%hvd_set precision=fp32 checkpointing=none batch_size=16 accumulation_steps=1 optimizer=adamw")
    assert run(shell, "%hvd_train 5").steps == 5
    run(shell, "%hvd_set batch_size=8 accumulation_steps=2 checkpointing=blocks")
    changes = "checkpointing none → blocks, batch_size 16 → 8, accumulation_steps 1 → 2"
    told, printed = capsys.readouterr().out.splitlines()[-2:]
    assert told.startswith("This keeps the mathematics to rounding")
    assert sorted(printed.split(", ")) == sorted(changes.split(", "))
    run(shell, "%hvd_set batch_size=8")
    assert capsys.readouterr().out == "No change: already set.\n"
    with pytest.raises(UsageError, match="A global batch of 100000 × 2 × 2 ranks"):
        run(shell, "%hvd_set batch_size=100000")
    assert capsys.readouterr().out == "", "nothing is said of what is refused"
    run(shell, "%hvd_set on_oom=shrink stall_limit_s=20")
    assert capsys.readouterr().out == "on_oom revert → shrink, stall_limit_s 30.0 → 20.0\n"
    run(shell, "%hvd_set on_oom=revert stall_limit_s=30")
    run(shell, "%hvd_play")
    assert current().playing
    capsys.readouterr()
    run(shell, "%hvd_pause")
    assert not current().playing
    paused = f"Paused at step {current().history.steps}.\n"
    assert capsys.readouterr().out == paused
    run(shell, "%hvd_pause")
    assert capsys.readouterr().out == f"Nothing was training. {paused}"
    assert run(shell, "%hvd_train 2").steps == 2
    assert set(run(shell, "%hvd_eval").metrics) == {"accuracy"}
    assert len(run(shell, "%hvd_runs")) >= 2
    assert len(run(shell, "%hvd_memory").ranks) == 2
    assert run(shell, "%hvd_memory --by module --timeline").worst_timeline.step > 0
    with pytest.raises(UsageError, match="did you mean 'module'"):
        run(shell, "%hvd_memory --by modules")
    assert "2 ranks" in repr(current())
    shell.user_ns["answer"] = 42
    run(shell, "%hvd_push answer")
    assert run(shell, "%hvd_pull answer") == [42, 42]
    assert run(shell, "%hvd_pull answer --ranks 1") == [42]
    run(shell, "%%hvd --ranks 1 --out doubled\nanswer * 2")
    assert shell.user_ns["doubled"] == [84]
    run(shell, "%hvd_seed 7")
    assert "Seed 7: random numbers of cells on all ranks" in capsys.readouterr().out
    run(shell, "%hvd_load digits-resnet width=8 depth=1 resolution=8 seed=7")
    kept = "checkpointing=blocks batch_size=8 accumulation_steps=2"
    back = "checkpointing=none batch_size=32 accumulation_steps=1"
    assert f"Kept from before: {kept} (back with: %hvd_set {back}).\n" in capsys.readouterr().out
    run(shell, f"%hvd_set {back}")
    run(shell, "%hvd_load digits-resnet width=8 depth=1 resolution=8")
    assert "Kept from" not in capsys.readouterr().out
    run(shell, "%hvd_seed 0")


@pytest.mark.full
def test_saving_resuming_and_restarting_by_magic(
    two_ranks: Session, shell: InteractiveShell, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    session = two_ranks
    run(shell, "%hvd_load digits-resnet width=8 depth=1 resolution=8")
    run(shell, f'%hvd_log "{tmp_path / "a log.jsonl"}"')
    assert f"go to JSON lines in {tmp_path}" in capsys.readouterr().out
    run(shell, "%hvd_train 3")
    run(shell, f'%hvd_save "{tmp_path / "of digits.state"}"')
    assert re.search(r"saved .*of digits\.state: step 3, [\d.]+ KiB, [\d.]+ s\n", capsys.readouterr().out)
    run(shell, "%hvd_train 2")
    run(shell, f'%hvd_resume "{tmp_path / "of digits.state"}"')
    assert "of digits.state: step 3" in capsys.readouterr().out
    with pytest.raises(StateFileError, match="There is no file"):
        run(shell, f"%hvd_resume {tmp_path / 'missing.state'}")
    run(shell, "%hvd_train 2")
    run(shell, "%hvd_set batch_size=8")  # before which a snapshot is taken
    run(shell, "%hvd_train 1")
    capsys.readouterr()
    run(shell, "%hvd_resume")
    listed = capsys.readouterr().out
    assert re.search(r"notebook +model +step +ranks +age +path\nthis notebook +digits-resnet +5 +2 +just now", listed)
    assert "%hvd_resume goes on from the first. To go on from another one: %hvd_resume PATH" in listed
    assert re.search(r"resumed .*\.state: step 5, ", listed)
    assert session.status().steps == 5
    assert run(shell, "%hvd_resume --list").own[0].steps == 5
    assert "Traceback" not in "".join(capsys.readouterr())
    run(shell, "%hvd_set batch_size=16")
    old = {info.pid for info in session.ranks}
    run(shell, "%hvd_restart")
    assert "step 5 restored\n" in capsys.readouterr().out
    assert not old & {info.pid for info in session.ranks}
    assert current() is session
    assert session.settings.batch_size == 16
    assert session.train(2).steps == 2
    run(shell, "%hvd_log --stop")
    assert capsys.readouterr().out == "Nothing is logged.\n"
    logged = [json.loads(line) for line in (tmp_path / "a log.jsonl").read_text().splitlines()]
    of_rank = [line for line in logged if line["type"] == "step" and line["rank"] == 1]
    assert [line["step"] for line in of_rank] == [1, 2, 3, 4, 5, 4, 5, 6, 6, 7]
    assert {line["run"] for line in logged} == {1}
    assert {"flip", "load"} <= {line["kind"] for line in logged if line["type"] == "event"}
    capsys.readouterr()
    run(shell, "%hvd_stop")
    ended = r"All 2 ranks have ended\.\n%hvd_runs still shows .*\n.* has digits-resnet at step \d \(age: just now\): "
    assert re.match(f"{ended}%hvd_resume goes on", capsys.readouterr().out)
    assert run(shell, "%hvd_resume") is current()  # where there are no ranks
    listed = r"this notebook +digits-resnet +\d +2 [^\n]*\n(?:.*\n)*resumed .*: step (\d), "
    said = re.search(listed, capsys.readouterr().out)
    assert said
    status = run(shell, "%hvd_status")
    assert (len(status.ranks), status.steps, status.workload.name) == (2, int(said[1]), "digits-resnet")
    assert {rank.memory_limit for rank in status.ranks} == {96 * 2**20}, "as before, not that of a plain start"
    run(shell, "%hvd_stop")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("%hvd_set precison=fp16", "did you mean 'precision'"),
        ("%hvd_set precision", "not of the form name=value"),
        ("%hvd_set on_oom=shrnk", "did you mean 'shrink'"),
        ("%hvd_set stall_limit=5", "did you mean 'stall_limit_s'"),
        ("%hvd_set batch_size=", "not of the form name=value"),
        ("%hvd_train many", "steps must be a whole number"),
        ("%hvd_train 0", "whole number of at least 1"),
        ("%hvd_train 1 2", "unrecognized arguments"),
        ("%hvd_seed many", "whole number from 0 to 4294967295"),
        ("%hvd_load digits-resnet seed=-1", "whole number from 0 to 4294967295"),
        ("%hvd_attach model=a data=b seed=x", "whole number from 0 to 4294967295"),
        ("%hvd_load nothing", "There is no workload 'nothing', nor a variable of that name"),
        ("%hvd_load", "required: name"),
        ("%hvd_attach model=a", "data= is missing"),
        ("%hvd_attach modle=a data=b", "cannot be attached"),
        ("%hvd_push nothing", "no variable 'nothing' in this notebook"),
        ("%hvd_start", "running already"),
        ("%hvd_start four", "n must be a whole number"),
        ("%hvd_panel --float", r"unrecognized arguments: --float \(allowed: --dock, --big; help: %hvd_panel\?\)"),
        ("%%hvd --verbose\npass", r"unrecognized arguments: --verbose \(.*llowed: --ranks.*; help: %%hvd\?\)"),
        ("%hvd_time --timline", r"unrecognized arguments: --timline \(did you mean '--timeline'\?"),
        ("%hvd_log a --to tensorbord", "did you mean 'tensorboard'"),
        ("%hvd_log a --stop", "Nothing is logged to a"),
        ("%hvd_trace", "required: path"),
        ("%hvd_trace a.json --steps 0", "whole number from 1 to 100"),
        ("%hvd_trace a.json --steps many", "--steps must be a whole number"),
        ("%hvd_memory --snapshot step.pickle", "of real GPUs only, and these ranks have virtual ones"),
        ("%hvd_stop now", "unrecognized arguments"),
        ("%%hvd --ranks 9\n1", "there are ranks"),
        ("%%hvd --out 1x\n1", "is not a variable name"),
        ("%%hvd\na b", "syntax error in line 1"),
    ],
)
def test_misuse_is_a_usage_error_and_the_session_goes_on(
    two_ranks: Session, shell: InteractiveShell, line: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=sentence):
        run(shell, line)
    assert "Traceback" not in "".join(capsys.readouterr())
    assert two_ranks.run("rank") == [0, 1]


def test_a_deliberate_error_of_the_python_api_is_a_sentence_too(
    two_ranks: Session, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(GpumemError):
        run(shell, "from gpumem_nb.session import current\ncurrent().set(batch_size=0)")
    shown = "".join(capsys.readouterr())
    assert "InvalidInput: batch_size=0 cannot be used" in shown
    assert "Traceback" not in shown


def offered(shell: InteractiveShell, text: str) -> list[str]:
    """What the text becomes by each completion that a notebook would show at its end."""
    assert shell.Completer is not None
    with provisionalcompleter():
        found = list(shell.Completer.completions(text, len(text)))
    return [text[: one.start] + one.text for one in found]


def test_completion_works_in_the_shell(shell: InteractiveShell) -> None:
    assert offered(shell, "%hvd_set prec") == ["%hvd_set precision="]
    assert offered(shell, "%hvd_set precision=b") == ["%hvd_set precision=bf16", "%hvd_set precision=bf16_weights"]
    assert offered(shell, "x = 1\n%hvd_load digits-r") == ["x = 1\n%hvd_load digits-resnet"]
    assert "%hvd_start --timeout" in offered(shell, "%hvd_start --")
    assert offered(shell, "%hvd_trace a.json --") == ["%hvd_trace a.json --steps"]
    assert len(offered(shell, "%hvd_start --")) == len({*offered(shell, "%hvd_start --")}) < 10, "nothing of Python's"


def test_what_a_cell_did_before_it_failed_is_shown(
    two_ranks: Session, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run(shell, "%%hvd --memory\nkept = torch.zeros(2**20)\nprint('before')\n1 / 0")
    text = capsys.readouterr().out
    assert "before" in text
    assert "left behind: 4.0 MiB" in text
    assert "held by Tensor `kept`" in text
    run(shell, "%%hvd\ndel kept")


def test_the_memory_report_is_text_in_a_terminal(
    two_ranks: Session, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(shell, "%hvd_memory")
    assert repr(report) == str(report)
    assert "reserved" in capsys.readouterr().out


def test_ranks_are_engines_in_order(four_ranks: Session, shell: InteractiveShell) -> None:
    session = four_ranks
    run(shell, "%%hvd --out ways\nrank, size, hvd.rank(), hvd.size()")
    assert shell.user_ns["ways"] == [(rank, 4, rank, 4) for rank in range(4)]
    run(shell, "%%hvd --ranks 1,3 --out odd\nrank * 10 + 1")
    assert shell.user_ns["odd"] == [11, 31]
    assert [info.rank for info in session.ranks] == [0, 1, 2, 3]
    assert len({info.pid for info in session.ranks}) == 4
    assert all(info.virtual and info.memory_limit == 96 * 2**20 and info.threads == 1 for info in session.ranks)


def test_cell_output_is_folded_and_ends_with_the_value(
    four_ranks: Session, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    run(shell, "%%hvd\nprint('hello')\nprint('odd' if rank % 2 else 'even')\nrank // 2 * 0")
    out = capsys.readouterr().out
    assert out.count("hello") == 2
    assert "[ranks 0,2]" in out
    assert "[ranks 1,3]" in out
    run(shell, "%%hvd --quiet\nprint('nothing')")
    assert "nothing" not in capsys.readouterr().out
    run(shell, "%%hvd\n%time x = 1")
    assert "Wall time" in capsys.readouterr().out


def test_an_error_on_one_rank_names_it_and_shows_its_line(
    four_ranks: Session, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankError, match="rank 3: ValueError: oops"):
        run(shell, "%%hvd\nif rank == 3:\n    raise ValueError('oops')")
    shown = "".join(capsys.readouterr())
    assert "[rank 3]" in shown
    assert "raise ValueError('oops')" in shown
    assert "run_cell" not in shown, "the toolkit's own frames help nobody"


@pytest.mark.full
def test_output_streams_while_the_cell_runs_in_a_kernel() -> None:
    """The last message of a cell is not the first that shows output: it is seen before the cell can end."""
    internals.stop_running()
    manager, client = start_new_kernel()
    try:
        client.execute_interactive("%load_ext gpumem_nb\ns = %hvd_start 2 --device cpu", timeout=90)
        cell = "%%hvd\nprint('first', flush=True)\ninput_is_open = True\nwhile input_is_open: pass"
        # Otherwise the kernel aborts what is sent in the moment after the error.
        message_id = client.execute(cell, stop_on_error=False)
        while True:
            message = client.get_iopub_msg(timeout=60)
            shown = message["content"].get("data", {}).get("text/plain", "")
            if message["parent_header"].get("msg_id") == message_id and "first" in shown:
                break
        assert "[ranks 0-1] first" in shown or "[rank" in shown
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=60)
        while reply["parent_header"].get("msg_id") != message_id:
            reply = client.get_shell_msg(timeout=60)
        assert reply["content"]["status"] == "error"
        done = client.execute_interactive("s.run('rank', timeout=20)", timeout=60)
        assert done["content"]["status"] == "ok"
    finally:
        client.execute_interactive("%hvd_stop", timeout=60)
        client.stop_channels()
        manager.shutdown_kernel()
