"""Commands stay on one line and words whole, wherever a notebook shows them."""

from __future__ import annotations

import re
from html import unescape
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.magics.planning import _say_how_to_apply
from gpumem_nb.planning.fit import Largest
from gpumem_nb.planning.prediction import FITS, Prediction
from gpumem_nb.report.tables import Table, marked, notes_html, words_html
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.settings import Settings
from gpumem_nb.ui import cells
from tests.unit.tuned_machine import tuned

MIB = 2**20
_CODE = re.compile(r"<code style='[^']*white-space: (?:nowrap|pre-wrap)[^']*' [^>]*copy[^>]*>(.*?)</code>")


def commands(html: str) -> list[str]:
    return [unescape(found) for found in _CODE.findall(html)]


@pytest.mark.parametrize(
    ("sentence", "whole"),
    [
        ("Go on: %hvd_set checkpointing=blocks.", ["%hvd_set checkpointing=blocks"]),
        (
            "%hvd_set batch_size=16 accumulation_steps=4, then ask again.",
            ["%hvd_set batch_size=16 accumulation_steps=4"],
        ),
        ("Try %hvd_start 4 (or %hvd_start).", ["%hvd_start 4", "%hvd_start"]),
        (
            "such as %hvd_predict text-gpt --gpu T4-16GB,A100-40GB batch_size=16.",
            ["%hvd_predict text-gpt --gpu T4-16GB,A100-40GB batch_size=16"],
        ),
        ("To go on from another one: %hvd_resume PATH", ["%hvd_resume PATH"]),
        ("Write it with %hvd_export train.py and run it.", ["%hvd_export train.py"]),
        ("In a %%hvd cell on all ranks: net.eval()", ["%%hvd"]),
        (
            "%env PYTORCH_CUDA_ALLOC_CONF=a:True,b:1 and %hvd_restart, which",
            ["%env PYTORCH_CUDA_ALLOC_CONF=a:True,b:1", "%hvd_restart"],
        ),
        ("settings: precision=fp32 batch_size=32", ["precision=fp32", "batch_size=32"]),
        ("checkpointing=blocks fits and keeps the mathematics", ["checkpointing=blocks"]),
        ("Type %hvd_stop to end it; 4 ranks are running", ["%hvd_stop"]),
        ("Written: /home/me/a-b/train.py. Run it.", ["/home/me/a-b/train.py"]),
        ("see https://example.org/a-b, 12 samples/s and/or more / less", []),
        ("the peak is 12 % of 3 GiB", []),
        ("lower <b> & higher", []),
    ],
)
def test_a_command_is_kept_whole_without_the_words_around_it(sentence: str, whole: list[str]) -> None:
    assert commands(marked(sentence)) == whole
    assert unescape(re.sub(r"</?code[^>]*>", "", marked(sentence))) == sentence


def test_tables_and_sentences_break_no_words() -> None:
    table = Table("", ("setting", "reserved"), (("checkpointing=blocks", "12.0 MiB"),), frozenset({"setting"})).html()
    assert commands(table) == ["checkpointing=blocks"]
    figure = re.search(r"<td style='([^']*)'>12.0 MiB", table)
    assert figure
    assert "white-space: pre;" in f"{figure[1]};"
    for html in (table, notes_html(["Type %hvd_stop."]), words_html("two\nlines")):
        assert "word-break: normal; overflow-wrap: normal" in html
        assert "overflow-x: auto" in html
    assert "two\nlines" in words_html("two\nlines")


def prediction(**changed: Any) -> Prediction:
    known: dict[str, Any] = {
        "settings": Settings(batch_size=96),
        "live_peak_bytes": 100 * MIB,
        "reserved_peak_bytes": 120 * MIB,
        "device_bytes": None,
        "low_bytes": 118 * MIB,
        "high_bytes": 125 * MIB,
        "limit_bytes": 160 * MIB,
        "verdict": FITS,
        "categories": {"other": 100 * MIB},
        "phase": "forward",
        "module": "",
        "basis": "from steps",
        "seconds": 0.5,
    }
    return Prediction(**known | changed)


def test_the_largest_batch_is_a_sentence_with_peak_and_limit() -> None:
    said = str(Largest(96, prediction(), most=1000))
    assert said == (
        "batch_size=96 is the largest that fits every rank: live peak 100.0 MiB, reserved 120.0 MiB of 160.0 MiB "
        "(118.0 MiB to 125.0 MiB)."
    )
    assert str(Largest(96, prediction(), most=96)).endswith("; an epoch has no more samples for a step.")
    assert str(Largest(0, prediction(lower_bound=True))) == (
        "Not even batch_size=1 fits: live peak more than 100.0 MiB, reserved more than 120.0 MiB of 160.0 MiB."
    )
    assert "of" not in str(Largest(96, prediction(limit_bytes=None))).partition(":")[2].partition("(")[0]
    assert commands(Largest(96, prediction())._repr_html_()) == ["batch_size=96"]


def test_what_magics_say_is_printed_in_a_terminal_and_displayed_in_a_notebook(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tuned(Settings(batch_size=8, accumulation_steps=8), 600)[0]
    _say_how_to_apply(result, "Stopped.")
    printed = capsys.readouterr().out
    assert printed == f"Nothing was applied: Stopped. To apply it: %hvd_set {result.typed}\n"
    shown: list[dict[str, str]] = []
    monkeypatch.setattr(InteractiveShell.instance(), "kernel", object(), raising=False)
    monkeypatch.setattr(cells, "display", lambda bundle, raw: shown.append(bundle))
    _say_how_to_apply(result, "Stopped.")
    cells.say("")
    assert capsys.readouterr().out == ""
    assert [bundle["text/plain"] for bundle in shown] == [printed.rstrip("\n")]
    assert commands(shown[0]["text/html"]) == [f"%hvd_set {result.typed}"]


@pytest.mark.parametrize("captured", [False, True])
def test_an_error_is_told_where_it_is_seen(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr(cells, "display", lambda bundle, raw: shown.append(bundle))
    shell = SimpleNamespace(
        kernel=SimpleNamespace(_allow_stdin=True),
        parent_header={"header": {"msg_id": "1"}},
        display_pub=CapturingDisplayPublisher() if captured else None,  # as %%capture does, which takes no errors
    )
    monkeypatch.setattr(cells, "get_ipython", lambda: shell)
    told = InvalidInput(f"Told once: {captured}.")._render_traceback_()
    assert told == ([f"InvalidInput: Told once: {captured}."] if captured else ["InvalidInput"])
    assert [bundle["text/plain"] for bundle in shown] == ([] if captured else ["Told once: False."])
