"""The record of runs: which rows and columns there are, what their figures mean, and two of them compared."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from gpumem_nb.planning.prediction import FITS, Prediction
from gpumem_nb.planning.score import Asked
from gpumem_nb.report.runs import Runs
from gpumem_nb.report.runs.columns import latest, order
from gpumem_nb.report.runs.files import packed, unpacked
from gpumem_nb.report.runs.row import MOST_POINTS, Curve
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.knobs import KNOBS
from gpumem_nb.shared.settings import Settings
from gpumem_nb.ui.pictures import picture
from tests.ledgers import MIB, info, ledger
from tests.runs import LIMITS, cells, history_of, runs_of, shown, table, train

TEN = [2.0] * 10


def test_only_what_varies_has_a_column_and_the_rest_is_told_once() -> None:
    history = history_of()
    train(history, Settings(), TEN)
    train(history, Settings(learning_rate=1e-4), TEN)
    train(history, Settings(learning_rate=1e-4, clip_norm=1.0), TEN)
    train(history, Settings(learning_rate=1e-4, clip_norm=1.0, optimizer_impl="foreach"), TEN)
    _, runs = runs_of(history)
    text = str(runs)
    names = table(runs)[0]
    assert [name for name in names if name in KNOBS] == ["optimizer_impl", "learning_rate", "clip_norm"]
    assert cells(runs, "learning_rate") == ["0.001", "0.0001", "0.0001", "0.0001"]
    assert cells(runs, "clip_norm") == ["none", "none", "1.0", "1.0"]
    assert "batch" not in names
    assert "The same in all: mine, precision=fp32, checkpointing=none, batch_size=32," in text
    assert "outcome" not in names, "all went well"
    train(history, Settings(batch_size=64), TEN)
    _, runs = runs_of(history)
    assert cells(runs, "batch")[-2:] == ["32×1×2", "64×1×2"]


def test_headroom_is_that_of_the_rank_with_least_and_the_spread_stands_beside_the_rate() -> None:
    history = history_of()
    train(history, Settings(), TEN, rates=(100.0, 200.0, 300.0))
    _, runs = runs_of(history)
    (row,) = runs
    assert row.headroom == 1 - 48 * MIB / LIMITS[1] == min(1 - 40 * MIB / LIMITS[0], 1 - 48 * MIB / LIMITS[1])
    assert row.speed
    rates = 2 * np.array([100.0, 200.0, 300.0] * 4)[2:10]  # of two ranks; the first two steps warm up
    assert [row.speed.low, row.speed.median, row.speed.high] == pytest.approx(np.percentile(rates, [25, 50, 75]))
    assert cells(runs, "headroom") == ["40 %"]
    spread = (row.speed.high - row.speed.low) / 2 / row.speed.median
    assert cells(runs, "samples/s") == [f"{row.speed.median:.0f} ± {100 * spread:.0f} %"]
    unlimited = history_of()
    unlimited.begin(1, "mine", Settings())
    _, none = runs_of(unlimited)
    assert "Nothing has been tried yet" in str(none)


def test_loss_is_compared_after_as_many_samples_as_all_have_seen() -> None:
    history = history_of()
    draw = random.Random(1)
    sizes, counts = (16, 32, 48), (90, 60, 7)
    losses = [[draw.random() for _ in range(count)] for count in counts]
    for size, of_run in zip(sizes, losses, strict=True):
        train(history, Settings(batch_size=size), of_run)
    train(history, Settings(batch_size=8), [9.0] * 4)  # too few steps to be compared
    train(history, Settings(batch_size=8), [9.0] * 6)
    history.tried[-1].outcome = "oom"  # which decides nothing for the others
    _, runs = runs_of(history)
    samples = 7 * 48 * 2  # of two ranks
    frame = runs.frame()
    assert list(frame.loss_samples[:3]) == [samples] * 3
    for size, of_run, found in zip(sizes, losses, frame.loss_at_equal_samples, strict=False):
        of_each_sample = np.repeat(of_run, 2 * size)
        assert found == pytest.approx(of_each_sample[samples * 3 // 4 : samples].mean())
    assert np.isnan(frame.loss_at_equal_samples[3])
    by_table = frame.sort_values("loss_at_equal_samples").run.tolist()
    assert by_table != frame.sort_values("loss").run.tolist()
    assert [row.number for row in runs.sorted("loss")] == by_table, "as the table shows them"
    two = runs.compare(1, 2)
    assert two.samples == 90 * 16 * 2
    of_each_sample = np.repeat(losses[1], 2 * 32)
    (loss,) = two.frame().query("what == 'loss'")["run 2"]
    assert loss == pytest.approx(of_each_sample[two.samples * 3 // 4 : two.samples].mean())
    assert f"{two.samples:,} samples" in str(two)


def test_a_workload_with_other_options_is_another_model() -> None:
    history = history_of()
    small, large = (("depth", 2.0), ("width", 64.0)), (("depth", 24.0), ("width", 64.0))
    train(history, Settings(), [1.0] * 90, "gpt", rates=(900.0,), options=small, parameters=10)
    train(history, Settings(), [2.0] * 6, "gpt", options=large, parameters=99)
    train(history, Settings(), TEN, "mine", parameters=1000)
    train(history, Settings(), TEN, "mine", parameters=2000)
    record, runs = runs_of(history)
    assert cells(runs, "workload") == [
        *("gpt(depth=2)", "gpt(depth=24)", "mine(1,000 parameters)", "mine(2,000 parameters)")
    ]
    assert cells(runs, "mark") == ["best", "best", "best", "best, now"]
    assert list(runs.frame().loss_samples) == [90 * 64, 6 * 64, 640, 640]
    assert list(runs.frame().options[:2]) == ["depth=2 width=64", "depth=24 width=64"]
    assert runs.compare(1, 2).changed == "workload gpt(depth=2) → gpt(depth=24)"
    later, _ = runs_of()
    later.bring(unpacked(packed(record.rows()))[0], "a.state")
    assert [row.model for row in later.rows()] == [row.model for row in runs]
    assert "2: gpt(depth=24)" in picture(runs.rows, None, "")


def test_a_long_run_takes_few_points_and_stays_exact_at_its_beginning() -> None:
    curve, draw = Curve(), random.Random(2)
    losses = [3 / (1 + step / 50) + 0.1 * draw.random() for step in range(20_000)]
    for step, loss in enumerate(losses):
        curve.add(64, loss, 100.0, MIB * (2 if step == 5000 else 1))
    curve.thin()
    assert len(curve) <= MOST_POINTS
    assert (curve.steps[-1], curve.samples[-1], max(curve.live_peaks)) == (20_000, 64 * 20_000, 2 * MIB)
    for steps in (8, 40, 400, 20_000):
        exact = np.mean(losses[steps * 3 // 4 : steps])
        assert curve.mean_loss(48 * steps, 64 * steps) == pytest.approx(exact, rel=0.001 if steps < 20 else 0.03)
    assert curve.mean_loss(0, 64 * 20_000) == pytest.approx(np.mean(losses)), "joining points keeps sums"
    assert curve.mean_loss(0, 64 * 20_001) is None, "more than were seen"


def test_a_loss_that_is_not_known_is_not_made_up() -> None:
    history = history_of()
    train(history, Settings(), [None] * 8)
    _, runs = runs_of(history)
    assert np.isnan(runs.frame().loss_at_equal_samples.astype(float)[0])
    assert "loss" not in table(runs)[0]


def test_the_best_and_the_present_are_marked_and_single_steps_folded_away() -> None:
    history = history_of()
    train(history, Settings(), TEN)
    train(history, Settings(batch_size=64), TEN, rates=(500.0,))
    train(history, Settings(batch_size=65), [1.0], rates=(900.0,))
    train(history, Settings(batch_size=66), [])
    history.tried[-1].outcome = "oom"
    train(history, Settings(batch_size=8), TEN)
    record, runs = runs_of(history)
    assert [(row.number, row.steps, row.present) for row in runs] == [
        *((1, 10, False), (2, 10, False), (3, 1, False), (4, 0, False), (5, 10, True))
    ]
    text = str(runs)
    assert cells(runs, "run") == ["1", "2", "4", "5"], "of a failure one step is enough"
    assert cells(runs, "mark") == ["", "best", "", "now"]
    assert cells(runs, "outcome") == ["ok", "ok", "oom", "ok"]
    assert "Run 3 is folded away: it has one step (%hvd_runs --all shows all)." in text
    assert cells(runs.unfolded, "run") == ["1", "2", "3", "4", "5"]
    record.note(runs[3].key, "look")
    assert cells(shown(record), "run") == ["1", "2", "3", "4", "5"], "what somebody wrote at is shown"


def test_numbers_stay_with_their_rows() -> None:
    history = history_of()
    train(history, Settings(), TEN)
    train(history, Settings(batch_size=8), [])  # flipped away before its first step
    train(history, Settings(batch_size=16), TEN)
    record, runs = runs_of(history)
    assert [(row.number, row.settings.batch_size) for row in runs] == [(1, 32), (2, 16)]
    train(history, Settings(batch_size=64), TEN)
    again = history_of()
    again.started_s = history.started_s + 1
    record.follow(again, info())
    assert not any(row.present for row in record.rows())
    train(again, Settings(batch_size=4), TEN)
    found = [(row.number, row.settings.batch_size, row.came_from, row.present) for row in shown(record)]
    before = "before a restart"
    assert found == [(1, 32, before, False), (2, 16, before, False), (3, 64, before, False), (4, 4, "", True)]


def test_rows_are_sorted_by_any_column_and_what_is_not_known_comes_last() -> None:
    history = history_of()
    for size, rate, clip in ((8, 10.0, None), (16, 30.0, 1.0), (4, 20.0, 0.5)):
        train(history, Settings(batch_size=size, clip_norm=clip), TEN, rates=(rate,))
    _, runs = runs_of(history)
    assert [row.number for row in runs.sorted("samples_per_s")] == [2, 3, 1], "the highest first"
    assert [row.number for row in runs.sorted("batch_size")] == [3, 1, 2]
    assert [row.number for row in runs.sorted("clip_norm")] == [3, 2, 1]
    assert [row.number for row in runs.sorted("batch")] == [3, 1, 2], "by the headings that people see"
    assert [row.number for row in runs.sorted("samples/s")] == [2, 3, 1]
    with pytest.raises(InvalidInput, match="There is no column 'samples_per_sec': did you mean 'samples_per_s'"):
        runs.sorted("samples_per_sec")
    assert order([None, "b", 2, float("nan"), "a", 1]) == [5, 2, 4, 1, 0, 3]
    assert order([None, 1, 2], highest_first=True) == [2, 1, 0]


def test_the_table_of_a_notebook_stands_without_its_script_and_has_nobodys_words_in_it() -> None:
    history = history_of()
    train(history, Settings(), TEN, workload="<i>mine</i>")
    train(history, Settings(batch_size=8), TEN, workload="<i>mine</i>")
    record, runs = runs_of(history)
    runs.note(1, "  </script>\n<b>bold</b> ")
    html = shown(record)._repr_html_()
    plain, script = html.split("<script>")
    script = script.split("</script>")[0]
    assert "&lt;/script&gt; &lt;b&gt;bold" in plain
    assert "<button" not in plain
    assert "bold" not in script
    assert "mine" not in script
    assert len(table(shown(record))) == 3


def test_what_was_predicted_stands_beside_what_was_measured() -> None:
    history = history_of()
    train(history, Settings(), TEN)
    wanted = Settings(batch_size=64)
    said = Prediction(
        *(wanted, 66 * MIB, 70 * MIB, None, 60 * MIB, 80 * MIB, None, FITS, {}, "forward", "", "", 0.1),
        samples_per_s=700.0,
    )
    history.predicted(Asked(said, history.model_version, Settings(), history.begun))
    train(history, wanted, TEN, peak=56 * MIB)
    record, runs = runs_of(history)
    assert cells(runs, "predicted") == ["n/a", "66.0 MiB (+10.0 %)\n700/s"]
    train(history, wanted, TEN, peak=60 * MIB)  # under another number, after an interrupt
    assert cells(shown(record), "predicted")[2] == "66.0 MiB (+3.1 %)\n700/s"
    for size in range(4, 10):
        train(history, Settings(batch_size=size), TEN)
    assert record.rows()[1].foretold
    history.asked.clear()
    assert record.rows()[1].foretold, "only the latest predictions are kept, but not only their rows"
    assert list(runs.frame().predicted_live_peak_bytes)[1] == 66 * MIB


@pytest.mark.parametrize("number", [0, 3, -1, "1", True])
def test_a_run_that_is_not_there_is_refused_in_a_sentence(number: Any) -> None:
    history = history_of()
    for size in (8, 16):
        train(history, Settings(batch_size=size), TEN)
    _, runs = runs_of(history)
    with pytest.raises(InvalidInput, match=r"There is no run .*: there are 1 to 2\.$"):
        runs.compare(1, number)
    _, none = runs_of(history_of())
    with pytest.raises(InvalidInput, match="There is no run 1: Nothing has been tried yet"):
        none.note(1, "x")


def test_a_part_of_the_rows_is_judged_beside_all_and_is_that_which_began_last() -> None:
    history = history_of()
    train(history, Settings(), [1.0] * 6, rates=(900.0,))
    train(history, Settings(batch_size=16), TEN)
    train(history, Settings(batch_size=8), TEN)
    record, runs = runs_of(history)
    old = history_of()
    old.started_s -= 1000
    train(old, Settings(batch_size=4), TEN)
    old.tried[0].began_s -= 1000
    record.bring([replace(row, device="other") for row in runs_of(old)[1]], "old.state")
    runs = shown(record)
    assert runs[4].came_from
    last = runs.latest(2)
    assert [row.number for row in last] == [2, 3], "what came from a file is older than its number"
    assert cells(last, "mark") == ["", "now"], "the best of all is not among them"
    assert set(last.frame().loss_samples) == {min(row.samples for row in runs)}
    assert set(runs.sorted("batch_size").latest(3).frame().loss_samples) == set(last.frame().loss_samples)
    assert [row.number for row in latest([replace(row, present=row.number == 1) for row in runs], 2)] == [1, 3]
    drawn = ElementTree.fromstring(picture(runs.rows, 60 * MIB, "virtual GPU"))
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}line"))) == 3, "none beside the run of another device"


def test_only_marks_have_colours_and_numbers_not_known_are_nan() -> None:
    history = history_of()
    train(history, Settings(), [None] * 6)
    history.add([], [])
    record, runs = runs_of(history)
    runs.note(1, "best")
    assert shown(record)._repr_html_().count("success-color") == 1
    frame = runs.frame()
    assert frame.loss.dtype == frame.parameters.dtype == frame.predicted_live_peak_bytes.dtype == float
    assert np.isnan(frame.predicted_samples_per_s[0])


def test_what_is_shown_of_a_long_configuration_is_thinned() -> None:
    history = history_of()
    train(history, Settings(), [1.0] * 500)
    _, runs = runs_of(history)
    assert len(runs[1].curve) <= MOST_POINTS
    assert runs[1].samples == 500 * 64
    assert len(history.tried[0].curve) == 500, "its own goes on"


def test_its_version_tells_when_rows_or_notes_change_and_not_when_devices_are_read() -> None:
    history = history_of()
    train(history, Settings(), TEN)
    record, runs = runs_of(history)
    seen = [record.version]

    def changed() -> bool:
        seen.append(record.version)
        return seen[-1] != seen[-2]

    history.read([None, None])
    record.rows()
    assert not changed()
    runs.note(1, "look")
    assert changed()
    train(history, Settings(batch_size=8), [1.0])
    assert changed()
    history.tried[-1].outcome = "oom"
    assert changed()
    record.bring([replace(runs[1], key="other")], "x.state")
    assert changed()


def test_a_picture_of_what_was_tried_needs_no_program() -> None:
    history = history_of()
    train(history, Settings(), TEN, workload="digits", peak=36 * MIB)
    train(history, Settings(precision="bf16"), TEN, workload="digits", peak=16 * MIB)
    train(history, Settings(precision="bf16", batch_size=999), [], workload="digits")
    history.tried[-1].outcome = "oom"
    rows = runs_of(history)[1].rows
    svg = ElementTree.fromstring(picture(rows, 80 * MIB, "virtual GPU"))
    words = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert [words[place] for place in (2, 4, 6)] == ["1: digits", "2: bf16", "3: batch 999"]
    assert words[-1] == "out of memory"
    wide, narrow, none = [float(bar.get("width", "")) for bar in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert (wide, none) == (2 * narrow, 0)
    limit, *_ = svg.iter("{http://www.w3.org/2000/svg}line")
    first = next(svg.iter("{http://www.w3.org/2000/svg}rect"))
    assert float(limit.get("x1", "")) - float(first.get("x", "")) == 2 * wide
    assert "<line" not in picture(rows, 900 * MIB, "virtual GPU"), "a limit far away would flatten the bars"


def test_the_record_can_be_read_while_it_is_written() -> None:
    history = history_of()
    record, _ = runs_of(history)
    over = threading.Event()
    failed: list[BaseException] = []

    def read() -> None:
        while not over.is_set():
            try:
                str(shown(record))
                record.rows()
            except BaseException as error:
                failed.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for size in range(1, 30):
        train(history, Settings(batch_size=size), TEN, recorded=ledger())
    over.set()
    reader.join()
    assert not failed
    assert [row.steps for row in record.rows()] == [10] * 29


def test_a_long_note_has_room_and_more_of_it_in_the_table_that_scrolls() -> None:
    history = history_of()
    train(history, Settings(), TEN)
    _, runs = runs_of(history)
    long = [replace(row, note="what we used in spring, with long samples") for row in runs]
    assert "min-width: 16em" in Runs(long)._repr_html_()
    assert "min-width: 10.7em" in Runs(long)._table.html()


def test_the_limits_line_goes_through_no_words() -> None:
    history = history_of()
    train(history, Settings(), TEN, recorded=ledger())
    _, runs = runs_of(history)
    peak = next(iter(runs)).peak_bytes or 0
    for limit in (round(1.2 * peak), round(2.9 * peak)):
        drawn = ElementTree.fromstring(picture(runs.rows, limit, next(iter(runs)).device))
        tags = {tag: [one for one in drawn if one.tag.endswith(tag)] for tag in ("line", "text")}
        [line] = [float(one.attrib["x1"]) for one in tags["line"]]
        [words] = [one for one in tags["text"] if "samples/s" in (one.text or "")]
        begin = float(words.attrib["x"])
        assert not begin <= line <= begin + 5 * len(words.text or "")


def test_a_table_is_drawn_without_pandas_which_takes_long_to_import_and_much_memory() -> None:
    code = (
        "import sys\n"
        "from gpumem_nb.shared.settings import Settings\n"
        "from tests.runs import history_of, runs_of, train\n"
        "history = history_of(); train(history, Settings(), [1.0] * 10); runs = runs_of(history)[1]\n"
        "str(runs), runs._repr_html_(), runs.sorted('headroom'), str(runs.compare(1, 1))\n"
        "assert 'pandas' not in sys.modules; runs.frame(); assert 'pandas' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
