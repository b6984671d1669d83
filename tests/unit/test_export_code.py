"""Functions, lambdas and classes in a script are the code that ran, or are refused by name."""

from __future__ import annotations

import itertools
import linecache
import pickle
from typing import Any

import pytest

from gpumem_nb.export.functions import Collector
from gpumem_nb.shared.errors import WorkloadError

_numbers = itertools.count()


def notebook(source: str, shown: str | None = None) -> dict[str, Any]:
    """What a cell of a notebook defines; ``shown`` is the source that Python finds for it."""
    title, names = f"<a cell {next(_numbers)}>", {"__name__": "__main__"}
    shown = source if shown is None else shown
    linecache.cache[title] = (len(shown), None, shown.splitlines(keepends=True), title)
    exec(compile(source, title, "exec", dont_inherit=True), names)
    return names


def written(source: str, name: str = "loss") -> Any:
    """The function of that name as a script has it."""
    collector = Collector()
    called = collector.add("loss", notebook(source)[name])
    namespace: dict[str, Any] = {"__name__": "script"}
    exec("\n".join([*collector.imports, *collector.definitions]), namespace)
    return eval(called, namespace)


@pytest.mark.parametrize(
    "source",
    [
        "loss = lambda a, b: (\n    a\n    + 10 * b\n    + 100\n)",
        "loss = lambda a, b: (a\n+ 10 * b\n+ 100)",
        "loss = lambda a, b: (\n        a  # the first\n            + 10 * b\n    # and\n        + 100  # more\n)",
        "loss = (\n    lambda a, b:\n        a + 10 * b +\n        100\n)",
        "loss = lambda a, b: a + \\\n    10 * b + 100",
        "loss = lambda a, b: sum([\n    a,\n    10 * b,\n    100,\n])",
        "loss = lambda a, b: len('''x\n  y''') - 5 + (\n    a + 10 * b + 100)",
        "loss = lambda a, b: (\n    a + 10 * b + 100\n    if b > 1\n    else -1\n)",
        "loss = lambda a, *, b=2, c=(1,\n    2): (\n    a + 10 * b\n    + 100\n)",
        "from functools import partial\nloss = partial(lambda c, a, b: (\n    a + 10 * b\n    + c\n), 100)",
        "import math\nloss = lambda a, b: (a + math.floor(10.5) * b\n    + 100)",
        "class Sum:\n    def __call__(self, *x): return sum(x)\nloss = lambda a, b: (\n  Sum()(a,\n 10 * b)\n + 100)",
        "if True:\n    def loss(a, b):\n        return (a +\n    10 * b\n  + 100)",
        "if True:\n    def loss(a, b):\n        return len('''a\n  b\n''') - 6 + a + 10 * b + 100",
        "rate = lambda b: (\n    10\n    * b)\ndef loss(a, b): return a + rate(b) + 100",
        "def ten(b): return 10 * b\nrate = ten\ndef loss(a, b): return a + rate(b) + 100",
        "other, loss = lambda a, b: 0, lambda a, b: a + 10 * b + 100",
    ],
)
def test_no_part_of_a_function_is_lost(source: str) -> None:
    function = written(source)
    arguments = {"b": 2} if "*," in source else {}
    assert (function(3, **arguments) if arguments else function(3, 2)) == 123


@pytest.mark.parametrize(
    "source",
    [
        "class Block:\n    def grow(self): return Large()\nclass Large(Block):\n    size = 123\n"
        "def loss(a, b): return Block().grow().size",
        "def one(n): return two(n) if n else b\ndef two(n, then=one): return then(n - 1)\n"
        "def loss(a, _): return one(a)\nb = 123",
        "def one(): return b\nb = 123\ndef two(c=one()): return c\ndef loss(a, b): return two()",
    ],
)
def test_definitions_that_use_each_other_are_there_when_they_are_needed(source: str) -> None:
    assert written(source.replace("size = 123", "size = 123\n    def f(self): pass"))(3, 2) == 123


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("loss = lambda a: a + 1", "loss = lambda a: a - 1"),
        ("loss = lambda a: a + 0.0", "loss = lambda a: a + -0.0"),
        ("def loss(a): return a + 1", "def loss(a): return a + 2"),
        ("def loss(a): return [a for a in a if a]", "def loss(a): return [a for a in a]"),
        (
            "class Net:\n    def f(self): return 1\nloss = lambda a: Net()",
            "class Net:\n    def f(self): return 2\nloss = lambda a: Net()",
        ),
        (
            "class Net:\n    @property\n    def f(self): return 1\n    def g(self): return 1\nloss = lambda a: Net()",
            "class Net:\n    @property\n    def f(self): return 2\n    def g(self): return 1\nloss = lambda a: Net()",
        ),
    ],
)
def test_what_is_not_the_code_that_ran_is_refused_by_its_name(source: str, shown: str | None) -> None:
    function = notebook(source, shown)["loss"]
    with pytest.raises(WorkloadError, match=r"The workload's loss (is a lambda|uses (loss|Net)).*(Define)"):
        Collector().add("loss", function)


def test_a_function_whose_code_was_replaced_is_refused() -> None:
    names = notebook("def loss(a): return 1\ndef other(a): return 2\nloss.__code__ = other.__code__")
    with pytest.raises(WorkloadError, match=r"uses loss, which cannot be written.*Define it at the top level"):
        Collector().add("loss", names["loss"])


def test_lambdas_in_one_line_are_told_apart_by_what_they_do() -> None:
    with pytest.raises(WorkloadError, match="several lambdas in one line"):
        written("first, loss = lambda a, b=1: a + b, lambda a, b=2: a + b")


BODY = """
base = [1, 2]
class Slow:
    def __call__(self): return 1
class Net:
    (a, *b), c = [1, 2, 3], 4
    widths = [2 * width for width in base]
    act = Slow()
    double = lambda self, x: 2 * x
    __part = 3
    more = __part + a
    if base:
        first = 1
    else:
        second = 2
    for last in base:
        pass
    def f(self): return 1
def loss(*_): return Net
"""


def test_a_class_is_what_its_statements_make_it() -> None:
    made = written(BODY)()
    assert (made.b, made.widths, made.more, made.first, made.last) == ([2, 3], [2, 4], 4, 1, 2)


@pytest.mark.parametrize(
    "change",
    [
        "Net.b = [5]",
        "Net.widths = [2, 5]",
        "base.append(3)",
        "Net.act = [1]",
        "Net.double = lambda self, x: 3 * x",
        "Net._Net__part = 4",
        "Net.first = 2",
        "Net.last = 5",
        "del Net.c",
    ],
)
def test_a_class_that_its_statements_do_not_make_any_more_is_refused(change: str) -> None:
    with pytest.raises(WorkloadError, match=r"Net, whose .* was changed after it was defined"):
        written(BODY + change)


@pytest.mark.parametrize(
    "source",
    [
        "def loss(a, b): return a * getattr(loss, 'scale', 1)\nloss.scale = 10",
        "loss = lambda a, b: a * getattr(loss, 'scale', 1)\nloss.scale = 10",
        "def rate(a): return rate.scale * a\nrate.scale = 10\ndef loss(a, b): return rate(a)",
        "class Rate:\n    def __call__(self, a): return a\nRate.__call__.scale = 10\ndef loss(a, b): return Rate()(a)",
    ],
)
def test_a_function_with_attributes_of_its_own_is_refused(source: str) -> None:
    with pytest.raises(WorkloadError, match=r"attribute scale.* was changed after it was defined"):
        written(source)


@pytest.mark.parametrize("change", ["Net.Part.width = 9", "Net.Part.f = lambda self: 9", "Net.Part.Inner.depth = 3"])
def test_a_class_inside_of_a_class_that_was_changed_is_refused(change: str) -> None:
    source = (
        "class Net:\n    class Part:\n        width = 2\n        class Inner:\n            depth = 1\n"
        "        def f(self): return 3\n    def f(self): return self.Part().f() + self.Part.Inner.depth\n"
        "def loss(*_): return Net().f()\n"
    )
    assert written(source)() == 4
    with pytest.raises(WorkloadError, match=r"Net, whose Part\..* was changed after it was defined"):
        written(source + change)


@pytest.mark.parametrize(
    "made", ["rows = [1]\nmore = rows", "rows = [1]\nmore = {'rows': rows}", "rows = more = [[0]] * 2"]
)
def test_variables_that_hold_one_list_are_refused_because_a_script_would_make_two(made: str) -> None:
    with pytest.raises(
        WorkloadError, match=r"uses (rows|more), a (list|dict) of the notebook, which cannot be written"
    ):
        written(f"{made}\ndef loss(*_): return rows, more")


def test_a_set_has_the_order_that_it_has_on_ranks() -> None:
    for number in range(200):
        words = "{" + ", ".join(f"'word{number} {place}'" for place in range(9)) + "}"
        source = f"kinds = ({{'a': [{words}]}},)\ndef loss(): return list(kinds[0]['a'][0])"
        assert written(source)() == list(pickle.loads(pickle.dumps(notebook(source)["kinds"]))[0]["a"][0])
