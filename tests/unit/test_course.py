"""The course without ranks: answers are read, guesses compared, and progress is kept whatever happens to its file."""

from __future__ import annotations

import csv
import io
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import gpumem_nb as gm
from gpumem_nb.course import answers, handed_in, progress
from gpumem_nb.course.evidence import Evidence, NotReady
from gpumem_nb.course.exercise import Content, Exercise, Outcome, wrong
from gpumem_nb.course.judges import Mistake, measured, named
from gpumem_nb.course.lesson import BEGIN, GRADING, Lesson, NotRight
from gpumem_nb.course.lessons import LESSONS
from gpumem_nb.magics.course import CourseMagics
from gpumem_nb.report.run_summary import Run
from gpumem_nb.report.tables import marked
from gpumem_nb.shared.errors import InvalidInput, NoSession, RankError, Stalled, WorkloadError

MIB = 2**20


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where progress is kept."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv(GRADING, raising=False)
    return progress.root()


def exercise(judge: Any, answer: answers.Answer | None = None, number: str = "9.1") -> Exercise:
    return Exercise(number, "A title", "What is it?", answer or answers.Size(), judge, ("first hint", "second hint"))


PEAK = measured(
    lambda _: 100 * MIB,
    lambda peak: peak,
    within=0.1,
    why="because",
    mistakes=(Mistake(lambda peak: 2 * peak, "twice"), Mistake(lambda peak: 2.05 * peak, "a bit more than twice")),
    too_low="too low",
    too_high="too high",
)


@pytest.fixture
def lesson(root: Path) -> Lesson:
    """A lesson of two exercises: a guess, and a state that is never right."""
    state = exercise(lambda _, evidence: wrong("look again"), answers.Nothing(), "9.2")
    return Lesson(Content("9", "Nine", (exercise(PEAK), state)))


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("41 MB", 41e6),
        ("~41 MiB", 41 * MIB),
        (" 41mib ", 41 * MIB),
        (41e6, 41e6),
        (np.int64(4096), 4096),
        ("1.5 GiB", 1.5 * 2**30),
        (Fraction(8192, 2), 4096),
        ("4096", 4096),
    ],
)
def test_sizes_are_read_in_every_form(given: Any, size: float) -> None:
    assert answers.Size().read(given) == size


@pytest.mark.parametrize("given", ["forty", "41 apples", [41], True, float("nan"), float("inf"), b"41 MB", 1j])
def test_what_is_no_size_is_refused_in_a_sentence(given: Any) -> None:
    with pytest.raises(InvalidInput, match="such as '41 MiB'") as caught:
        answers.Size().read(given)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("given", [41, "41", 41.5, -1])
def test_a_size_whose_unit_was_forgotten_is_told_so(given: Any) -> None:
    with pytest.raises(InvalidInput, match=r"would be -?\d+ bytes: give a size with its unit"):
        answers.Size().read(given)


@pytest.mark.parametrize(
    ("given", "units", "number"),
    [
        ("16", answers.BYTES_EACH, 16),
        ("16 bytes", answers.BYTES_EACH, 16),
        ("16 bits", answers.BYTES_EACH, 2),
        ("2.5x", answers.TIMES, 2.5),
        ("3 times", answers.TIMES, 3),
        ("1/4", answers.TIMES, 0.25),
        ("3 / 2 times", answers.TIMES, 1.5),
        (np.float32(2), answers.TIMES, 2),
        ("25 %", answers.PERCENT, 25),
        ("200 ms", answers.SECONDS, 0.2),
        ("1e3 samples/s", answers.RATE, 1000),
    ],
)
def test_numbers_are_read_with_their_units(given: Any, units: dict[str, float], number: float) -> None:
    assert answers.Number("4", units).read(given) == pytest.approx(number)


@pytest.mark.parametrize("given", ["16 apples", "x", True, [1], float("nan"), "1.2.3", "0x10", "1/0"])
def test_what_is_no_number_is_refused_in_a_sentence(given: Any) -> None:
    with pytest.raises(InvalidInput, match="give a number, such as 4"):
        answers.Number("4").read(given)


def test_words_are_read_whatever_their_case_and_number() -> None:
    form = answers.Words(("optimizer state", "activations"))
    both = frozenset({"optimizer state", "activations"})
    for given in ("Activation, optimizer_state", ["activations", "Optimizer State"], {"activations": 1}.keys() | both):
        assert form.read(given) == both
    assert form.read("activations and optimizer state") == both
    assert answers.Word(("optimizer state",)).read("OPTIMIZER STATES") == "optimizer state"
    assert answers.Word(("losses",)).read("Loss") == answers.Word(("losses",)).read("losses") == "losses"
    with pytest.raises(InvalidInput, match=r"^'optimiser stats' is not"):
        form.read("activations, optimiser stats")
    with pytest.raises(InvalidInput, match=r"^'optimizer' is not an answer here: did you mean 'optimizer state'"):
        form.read("activations, optimizer")
    for bad in ("weights", ["activations", 3], 3, {"activations": 1}):
        with pytest.raises(InvalidInput, match=r"llowed|give a list|give one of"):
            form.read(bad)


def test_runs_and_variables_are_taken_as_such() -> None:
    run = Run([], {}, [])
    assert answers.RunAnswer().read(run) is run
    assert answers.Variable("a function", "train_step").read("mine") == "mine"
    for form, bad in ((answers.RunAnswer(), "run"), (answers.Variable("a function", "f"), "not a name")):
        with pytest.raises(InvalidInput, match="give the"):
            form.read(bad)


@pytest.mark.parametrize(
    ("guess", "state", "said"),
    [
        ("100 MiB", "right", "because"),
        ("91 MiB", "right", "because"),
        ("200 MiB", "not yet", "twice"),
        ("206 MiB", "not yet", "a bit more than twice"),
        ("50 MiB", "not yet", "too low"),
        ("400 MiB", "not yet", "too high"),
    ],
)
def test_a_guess_is_shown_beside_what_was_measured(lesson: Lesson, guess: str, state: str, said: str) -> None:
    report = lesson.check("9.1", guess)
    assert (report.state, report.said) == (state, said)
    assert isinstance(report.compared, dict)
    assert (report.compared["you"], report.compared["measured"]) == (f"{guess.split()[0]}.0 MiB", "100.0 MiB")
    assert "within 10 %" in report._repr_html_()
    assert report.frame().state[0] == state


def test_a_small_tolerance_is_told_as_it_is() -> None:
    judge = measured(
        lambda _: 1.0, lambda one: one, within=0.0005, why="yes", too_low="low", too_high="high", words=str
    )
    above, on_it = (judge(guess, Evidence()).compared for guess in (1.001, 1.0))
    assert above == {"you": "1.001", "measured": "1.0", "you are": "0.1 % above", "right is": "within 0.05 %"}
    assert on_it == {"you": "1.0", "measured": "1.0", "you are": "on it", "right is": "within 0.05 %"}


def test_words_that_should_not_be_there_or_are_left_out_have_their_hints() -> None:
    judge = named(
        lambda _: frozenset({"a", "b"}), why="yes", mistakes=(("c", "not c"), ("-a", "and one more")), otherwise="no"
    )
    outcomes = {given: judge(frozenset(given), Evidence()).said for given in ("ab", "abc", "b", "a", "abd")}
    assert outcomes == {"ab": "yes", "abc": "not c", "b": "and one more", "a": "no", "abd": "no"}
    assert judge("a", Evidence()).said == "yes"


@pytest.mark.parametrize("nothing", [None, ..., "", " ... "])
def test_an_answer_that_is_still_missing_is_no_try(lesson: Lesson, nothing: Any) -> None:
    report = lesson.check("9.1", nothing)
    assert report.state == "open"
    assert "This waits for your answer: a size" in str(report)
    assert lesson.status().exercises[0].tries == 0


def test_what_is_not_of_the_form_is_no_try(lesson: Lesson) -> None:
    with pytest.raises(InvalidInput):
        lesson.check("9.1", "forty")
    with pytest.raises(InvalidInput, match="the check looks at the session"):
        lesson.check("9.2", 4)
    assert [one.tries for one in lesson.status().exercises] == [0, 0]


@pytest.mark.parametrize(
    ("error", "state", "said"),
    [
        (NotReady("Load it."), "open", "Load it."),
        (WorkloadError("Nothing is loaded."), "open", "Nothing is loaded."),
        (RankError(1, "NameError", "name 'x' is not defined"), "not yet", "Your code failed on rank 1: NameError"),
        (Stalled(RankError(0, "Horovod", "shut down"), "Rank 0 waited."), "not yet", "Rank 0 waited.\nYour code lets"),
    ],
)
def test_what_fails_while_it_is_checked_is_told_in_a_sentence(error: Exception, state: str, said: str) -> None:
    def judge(_: Any, __: Evidence) -> Outcome:
        raise error

    report = Lesson(Content("9", "Nine", (exercise(judge, answers.Nothing()),))).check("9.1")
    assert report.state == state
    assert said in str(report)


def test_without_ranks_it_is_said_how_to_start_them() -> None:
    asks = Lesson(Content("9", "Nine", (exercise(lambda _, evidence: evidence.session, answers.Nothing()),)))
    with pytest.raises(NoSession):
        asks.check("9.1")


def test_what_was_right_stays_right_in_every_kernel(lesson: Lesson, root: Path) -> None:
    for guess in ("200 MiB", "100 MiB", "50 MiB"):
        lesson.check("9.1", guess)
    lesson.hint()
    lesson.hint("9.1")
    again = Lesson(Content("9", "Nine", tuple(lesson.exercises)))
    done, state = again.status().exercises
    assert (done.state, done.tries, done.first, done.answer) == ("right", 2, "200 MiB", "100 MiB")
    assert (state.state, state.hints) == ("open", 1)  # hint() is of the first that is not right
    assert "1 of 2 right. Next: 9.2" in str(again.status())
    assert [one.state for one in again.reset().exercises] == ["open", "open"]
    assert not list(root.iterdir())


def test_hints_come_one_by_one_and_stay(lesson: Lesson) -> None:
    assert [lesson.hint("1").told for _ in range(3)] == [("first hint",), *[("first hint", "second hint")] * 2]
    assert "Hint 2 of 2: second hint" in str(lesson.hint("9.1"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"gpumem_nb_course": 7}', b"\xff\xfe", b"[" * 10**5])
def test_a_damaged_file_is_put_aside_and_told(lesson: Lesson, root: Path, content: bytes) -> None:
    root.mkdir(parents=True)
    (root / "lesson-9.json").write_bytes(content)
    report = lesson.check("9.1", "100 MiB")
    assert report.right
    assert "was damaged, so it begins anew" in str(report)
    assert (root / "lesson-9.damaged").read_bytes() == content
    assert "damaged" not in str(lesson.check("9.1", "100 MiB"))


def test_values_of_other_types_are_damage(lesson: Lesson, root: Path) -> None:
    lesson.check("9.1", "100 MiB")
    path = root / "lesson-9.json"
    path.write_text(path.read_text().replace('"tries": 1', '"tries": "many"'))
    assert "was damaged" in str(lesson.status())


def test_where_nothing_can_be_kept_the_check_counts_for_this_kernel(lesson: Lesson, root: Path) -> None:
    root.parent.mkdir(parents=True)
    root.write_text("a file in the place of the folder")
    report = lesson.check("9.1", "100 MiB")
    assert report.right
    assert "Your progress cannot be kept" in str(report)
    assert lesson.status().exercises[0].state == "right"
    root.unlink()
    lesson.hint("9.2")
    assert Lesson(Content("9", "Nine", tuple(lesson.exercises))).status().exercises[0].state == "right"


def test_inside_nbgrader_what_is_not_right_is_an_error(lesson: Lesson, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GRADING, "autograde")
    assert lesson.check("9.1", "100 MiB").right
    with pytest.raises(NotRight, match="too low"):
        lesson.check("9.1", "50 MiB")
    with pytest.raises(NotRight, match="waits for your answer"):
        lesson.check("9.1", ...)


def test_files_that_were_handed_in_become_one_table(
    lesson: Lesson, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, foreign, broken = tmp_path / "=ada.json", tmp_path / "notes.txt", tmp_path / "b.json"
    lesson.check("9.1", "206 MiB")
    assert f"Written: {good}. Hand it in." in str(lesson.status(good))
    foreign.write_text("hello")
    broken.write_bytes(BEGIN + b"1}")
    out = tmp_path / "class.csv"
    asked = [str(good), str(foreign), str(broken), str(tmp_path / "missing.json")]
    assert handed_in.main([*asked, "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert said.count("is left out: ") == 3
    assert "Traceback" not in said
    (row,) = csv.DictReader(io.StringIO(out.read_text()))
    assert (row["lesson"], row["right"], row["9.1"], row["9.1 tries"]) == ("9", "0", "not yet", "1")
    assert row["9.1 first answer"] == "206 MiB"
    assert handed_in.main([str(good)]) == 0
    assert capsys.readouterr().out.startswith("file,user,lesson,written,right,9.1,")
    assert handed_in.main([str(good), "--out", str(tmp_path / "no" / "where.csv")]) == 1
    assert "there is no such folder" in capsys.readouterr().err


def test_no_answer_becomes_a_formula_of_the_teachers_spreadsheet(lesson: Lesson, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        json.dumps(
            {
                "gpumem_nb_course": 1,
                "exercises": {"9.1": {"first": "=1+1"}},
                "lesson": "9",
                "user": "@ada",
                "time": 0,
            }
        )
    )
    row = handed_in.read(tmp_path / "a.json")
    assert (row["9.1 first answer"], row["user"]) == ("'=1+1", "'@ada")


def test_a_file_of_something_else_is_never_written_over(lesson: Lesson, tmp_path: Path) -> None:
    (tmp_path / "thesis.json").write_text('{"a": 1}')
    with pytest.raises(InvalidInput, match="exists"):
        lesson.status(tmp_path / "thesis.json")
    assert (tmp_path / "thesis.json").read_text() == '{"a": 1}'
    lesson.status(tmp_path / "mine.json")
    lesson.status(tmp_path / "mine.json")


@pytest.fixture
def shell() -> Any:
    """IPython with the magics."""
    shell = InteractiveShell.instance()
    gm.load_ipython_extension(shell)
    yield shell
    InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "Name a lesson, such as %lesson 1. There are: 1 Where the bytes are"),
        ("chek 1.1", "did you mean 'check'"),
        ("check", "Say which one: %lesson check 1.2 41 MB"),
        ("check 99.1 4", "There is no lesson '99'"),
        ("check 1.11 4", "no exercise '1.11'. Did you mean 1.1?"),
        ("check 1.3 forty", "'forty' is not an answer here"),
        ("hint 1.2 3", "'3' is too much"),
        ("status 1 a b", "'a b' is too much"),
        ("99", "'99' is not known"),
    ],
)
def test_a_slip_in_the_magic_is_one_sentence(shell: InteractiveShell, line: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        shell.run_line_magic("lesson", line)
    assert said in str(caught.value)


def test_the_magic_does_what_the_methods_do(shell: InteractiveShell, tmp_path: Path) -> None:
    asked = LESSONS["1"].exercises[0]
    assert shell.run_line_magic("lesson", "1").exercises == gm.lesson(1).status().exercises
    assert shell.run_line_magic("lesson", "hint 1.1").told == asked.hints[:1]
    assert shell.run_line_magic("lesson", "hint 1").told == asked.hints[:2]
    assert "waits for your answer" in str(shell.run_line_magic("lesson", "check 1.1"))
    assert "Written" in str(shell.run_line_magic("lesson", f"status 1 {tmp_path}/a.json"))
    assert shell.run_line_magic("lesson", "reset 1").exercises[0].hints == 0


def test_the_magic_takes_a_variable_of_the_notebook_where_values_are_asked_for(shell: InteractiveShell) -> None:
    shell.user_ns |= {"guess": "forty", "activations": 3}
    with pytest.raises(UsageError, match="'forty' is not an answer"):
        shell.run_line_magic("lesson", "check 1.3 guess")
    (magics,) = [one for one in shell.magics_manager.registry.values() if isinstance(one, CourseMagics)]
    assert magics._answer(gm.lesson(1), "1.2", "activations") == "activations"


def test_a_command_of_the_course_can_be_copied_whole() -> None:
    assert ">%lesson hint 1.2</code>" in marked("A hint: %lesson hint 1.2")


def test_there_is_no_such_lesson() -> None:
    with pytest.raises(InvalidInput, match=r"There is no lesson '99'\. There are: 1"):
        gm.lesson("99")
    assert gm.lesson("1") is gm.lesson(1)


@pytest.mark.parametrize("number", LESSONS)
def test_every_exercise_can_be_asked_and_helped_with(number: str) -> None:
    content = LESSONS[number]
    assert content.number == number
    assert len(content.exercises) >= 3
    for place, one in enumerate(content.exercises, 1):
        assert one.number == f"{number}.{place}"
        assert len(one.hints) >= 2, one.number
        assert one.asks.endswith(("?", ".")), one.number
        assert one.answer.expected
