"""What cannot be used is refused in one sentence, before anything is asked of the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.kernel.loading import Loading
from gpumem_nb.kernel.logs import Logs
from gpumem_nb.kernel.running import Running
from gpumem_nb.kernel.starting import plan
from gpumem_nb.magics import MAGICS
from gpumem_nb.magics.arguments import pairs, plain
from gpumem_nb.magics.ranks import RanksMagics
from gpumem_nb.magics.training import TrainingMagics
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.units import as_whole, checked_flag
from gpumem_nb.workloads import catalog


@pytest.fixture
def session() -> Session:
    """A session without ranks, which notes what it asks of them."""
    cluster, life = MagicMock(), MagicMock()
    cluster.ranks.size = 2
    life.running, life.loading, life.foreground = Running(cluster), Loading(cluster), cluster.foreground
    life.logs = Logs(lambda text: None)
    made = Session.__new__(Session)
    made._life = life
    return made


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda s: s.run("1", timeout="5"), "^timeout='5' cannot be used: it must be a number of seconds above 0"),
        (lambda s: s.run(max, 1, 2, timeout=float("nan")), "^timeout=nan cannot be used"),
        (lambda s: s.run("1", timeout=True), "^timeout=True cannot be used"),
        (lambda s: s.run_cell("1", timeout=0), "^timeout=0 cannot be used"),
        (lambda s: s.run("x = '\ud800'"), "^This is not source code "),
        (lambda s: s.run("1\0"), "syntax error: |^This is not source code "),
        (lambda s: s.run_cell(5), "^This is not source code "),
        (lambda s: s.push(["a"]), "^A list cannot be pushed: give values by name"),
        (lambda s: s.push({"class": 1}), "^'class' is not a variable name"),
        (lambda s: s.pull(["net"]), "^name= must be the name of a variable on the ranks, as text.*of type list"),
        (lambda s: s.attach(object(), "data"), "^model= must be the name of a variable.*of type object"),
        (lambda s: s.attach("net", None), "^data= must be the name of a variable.*of type NoneType"),
        (lambda s: s.attach("net", "data", loss=print), "^loss= must be the name of a variable"),
        (lambda s: s.check_sync(object()), "^model= must be the name of a variable"),
        (lambda s: s.log_to(5), "^5 is not a place to log to"),
        (lambda s: s.log_to("a", to=5), "^Nothing can be logged to 5"),
        (lambda s: s.stop_logging(5), "^5 is not a place to log to"),
        (lambda s: s.log_to("a\0b"), "is not a place to log to"),
        (lambda s: s.scaling(1.5), "^ranks=1.5 are not numbers of ranks: write them as a list"),
        (lambda s: s.scaling([True]), "^True ranks cannot be measured"),
        (lambda s: s.trace("a\0b.json"), "is not a file's path"),
        (lambda s: s.export("a.py", ddp="no"), "^ddp='no' cannot be used: it must be True or False.$"),
        (lambda s: s.foreseen({"batch_size": 8}), "^A dict is not Settings"),
        (lambda s: s.train(np.float32(5)), "steps cannot be trained: write a whole number of at least 1"),
        (lambda s: Settings().replace(precision=np.ones(2)), r"^precision=array\(.* is not known"),
    ],
)
def test_a_call_is_refused_before_ranks_are_asked(
    session: Session, call: Callable[[Session], object], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        call(session)
    session._life.foreground.finish.assert_not_called()  # type: ignore[attr-defined]
    session._life.foreground.call.assert_not_called()  # type: ignore[attr-defined]


def test_whole_numbers_of_numpy_are_whole_numbers(session: Session) -> None:
    session.train(cast(int, np.int64(5)))
    (steps, _), _ = cast(MagicMock, session._life.training.train).call_args
    assert type(steps) is int
    assert [as_whole(given, 1, 8) for given in (np.int64(8), 9, 0, True, 2.0, "2", np.bool_(True))] == [8, *[None] * 6]


FLAGS = [
    (name, flag.name)
    for name, method in inspect.getmembers(Session, inspect.isfunction)
    for flag in inspect.signature(method).parameters.values()
    if not name.startswith("_") and flag.annotation == "bool"
]


@pytest.mark.parametrize(("name", "flag"), FLAGS)
@pytest.mark.parametrize("given", ["no", None, 1])
def test_what_is_neither_true_nor_false_is_refused(session: Session, name: str, flag: str, given: object) -> None:
    method = getattr(Session, name)
    needed = [one.name for one in inspect.signature(method).parameters.values() if one.default is one.empty]
    with pytest.raises(InvalidInput, match=f"^{flag}={given!r} cannot be used: it must be True or False.$"):
        method(session, **{one: "1" for one in needed if one != "self"}, **{flag: given})


def test_numpys_true_and_false_are_pythons(session: Session) -> None:
    session.pin(cast(bool, np.bool_(False)))
    (wanted,), _ = cast(MagicMock, session._life.history.pin).call_args
    assert wanted is False
    assert [checked_flag("big", given) for given in (True, False, np.bool_(True))] == [True, False, True]


@pytest.mark.parametrize("timeout", ["5", float("inf"), float("nan"), True, -1])
def test_a_start_takes_seconds(timeout: Any) -> None:
    with pytest.raises(InvalidInput, match="must be a number of seconds above 0, such as 120"):
        plan(2, timeout=timeout, progress=lambda what, done: None)


def test_no_option_is_taken_for_a_parameter_of_ours() -> None:
    with pytest.raises(InvalidInput, match="'name'"):
        catalog.make("digits-resnet", name=3)
    with pytest.raises(InvalidInput, match="'self'"):
        catalog.make("digits-resnet", self=3)


def _magic(name: str) -> Callable[..., Any]:
    shell = InteractiveShell.instance()
    (found,) = (getattr(magics(shell), name) for magics in MAGICS if hasattr(magics, name))
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["hvd_save", "hvd_predict", "hvd_runs", "hvd_check"])
def test_a_quotation_mark_that_is_not_closed_is_misuse(name: str) -> None:
    with pytest.raises(UsageError, match="A quotation mark is opened and not closed: 'a b"):
        _magic(name)("'a b")


@pytest.mark.parametrize(
    ("name", "line", "sentence"),
    [
        ("hvd_attach", "net", "'net' is not of the form name=value, such as model=net"),
        ("hvd_load", "digits-resnet 8", "'8' is not of the form name=value, such as width=8"),
        ("hvd_set", "bf16", "'bf16' is not of the form name=value, such as batch_size=16"),
        ("hvd_train", "many", r"steps must be a whole number, such as 4 \(got 'many'\)"),
        ("hvd_tune", "--seconds long", r"--seconds must be a number, such as 60 \(got 'long'\)"),
    ],
)
def test_what_a_magic_cannot_read_is_told_with_what_it_can(name: str, line: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=f"{sentence}$"):
        _magic(name)(line)


def test_what_is_missing_is_named_and_no_more() -> None:
    with pytest.raises(UsageError, match=r"required: name$"):
        _magic("hvd_load")("")


def test_a_word_of_pythons_is_not_a_variable_for_results() -> None:
    with pytest.raises(UsageError, match="--out 'class' is not a variable name"):
        _magic("hvd")("--out class", "1")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--memory-limit '512 MiB'", {"memory_limit": "512 MiB"}),
        ('2 --hosts "a:2, b:2" --device "cpu"', {"n": 2, "hosts": "a:2, b:2", "device": "cpu"}),
    ],
)
def test_quotes_around_a_word_are_not_part_of_it(line: str, said: dict[str, Any]) -> None:
    assert said.items() <= vars(plain(RanksMagics.hvd_start, line)).items()


def test_quotes_around_a_value_are_not_part_of_it() -> None:
    assert pairs(plain(TrainingMagics.hvd_set, "precision='bf16' on_oom=\"stop\"")) == {
        "precision": "bf16",
        "on_oom": "stop",
    }
