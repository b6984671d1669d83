"""From cells and functions to the code of a script: what is needed, what is left out, what cannot be told."""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gpumem_nb.export.functions import Collector
from gpumem_nb.export.selecting import selected, settings_in
from gpumem_nb.export.templating import render
from gpumem_nb.kernel.origin import MOST_CELLS, CellRecord
from gpumem_nb.kernel.running import pickled
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.knobs import KNOBS
from gpumem_nb.shared.questions import Cell


def sliced(*cells: Cell | str, names: tuple[str, ...] = ("net",)) -> str:
    found = selected([Cell(one) if isinstance(one, str) else one for one in cells], names, 0, forgotten=False)
    return found.definitions


def test_cells_are_kept_as_they_are_that_define_or_change_what_is_needed() -> None:
    cells = (
        "import math\nfrom torch import nn\nwidth = 3\nother = 4",
        "# The model.\nnet = nn.Linear(width, 2)\nprint(net)  # so far",
        "print(net)",
        "later = other + 3",
        "net.bias.data.zero_()\n\n\nnet",
        "other = net.weight",
    )
    assert sliced(*cells) == "\n\n".join([cells[0], cells[1], cells[4]])


def test_the_last_definition_counts_and_functions_bring_what_they_use() -> None:
    code = sliced(
        "def make(): return old",
        "scale = 2\ndef helper(x):\n    local = x\n    return local * scale",
        "def make():\n    return helper(1)",
        "net = make()",
    )
    assert "old" not in code
    assert code.index("scale = 2") < code.index("def helper") < code.index("def make") < code.index("net = make()")


def test_what_may_be_defined_before_is_kept_where_it_may_not_be_defined_again() -> None:
    assert sliced("net = 1", "if False:\n    net = 2").startswith("net = 1\n\nif False:")


def test_cells_that_drew_before_are_kept_until_numbers_were_seeded() -> None:
    drawn, net = Cell("noise = torch.randn(3)", drew=True), Cell("net = torch.randn(2)", drew=True)
    assert "noise" in sliced(drawn, net)
    assert "noise" not in sliced(drawn, Cell(seed=7), net)
    assert "noise" not in sliced(net, drawn)
    both = sliced(drawn, Cell(seed=7), net, names=("noise", "net"))
    assert both.index("noise") < both.index("torch.manual_seed(7)") < both.index("net =")
    assert selected([drawn, Cell(seed=7), net], ["net"], 0, forgotten=False).cell_seed == 7


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["net = width"], r"needs width.*no %%hvd cell that succeeded"),
        ([Cell(pushed=("width",)), "net = width"], r"needs width.*pushed from the notebook"),
        (["net = 1", Cell("net = 2", finished=False)], r"What net is.*cell that failed"),
        (["net = 1", Cell("net = 2", everywhere=False)], r"What net is.*on some ranks only"),
        (["net = 1", Cell(pushed=("net",))], r"What net is.*pushed from the notebook"),
    ],
)
def test_what_cannot_be_told_is_refused(cells: list[Cell | str], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        sliced(*cells)


def test_a_record_forgets_the_oldest_and_keeps_where_their_numbers_began() -> None:
    record = CellRecord()
    record.seeded(5)
    for number in range(MOST_CELLS + 3):
        record.ran(f"a = {number}", everywhere=True, finished=True, drew=False)
    record.called(everywhere=True, drew=True)
    record.loaded()
    assert record.before_load()[-3] == Cell(drew=True, opaque=True)  # and the names that are offered since
    record.ran("later = 1", everywhere=True, finished=True, drew=False)
    assert (len(record.since_load()), record.seed) == (1, 5)
    assert len(record.before_load()) == MOST_CELLS - 1
    assert record.forgotten
    with pytest.raises(WorkloadError, match="too long ago"):
        selected(record.before_load(), ["net"], record.seed, record.forgotten)


def of(record: CellRecord, name: str = "net") -> str:
    found = selected(record.before_load(), [name], record.seed, record.gone)
    return found.definitions


def ran(record: CellRecord, *sources: str) -> None:
    for source in sources:
        record.ran(source, everywhere=True, finished=True, drew=False)


def test_cells_that_use_the_names_that_ranks_offer_are_kept() -> None:
    record = CellRecord()
    ran(record, "net = list()")
    record.loaded({"model": "net", "optimizer": None})
    ran(record, "model.append(1)", "optimizer.lr = 3")
    record.loaded({"model": "net", "optimizer": None})
    assert of(record) == "net = list()\n\nmodel = net\n\nmodel.append(1)"
    record.loaded()
    ran(record, "net = [model]")
    record.loaded({"model": "net"})
    with pytest.raises(WorkloadError, match=r"needs model, which was what the ranks offer.*no cell made"):
        of(record)


def test_a_function_finds_under_the_names_that_ranks_offer_what_was_attached_last() -> None:
    record = CellRecord()
    ran(record, "net = ['first']", "def loss(): return model")
    record.loaded({"model": "net", "optimizer": None})
    assert of(record, "loss") == "net = ['first']\n\ndef loss(): return model\n\nmodel = net"
    ran(record, "net = ['second']")
    record.loaded({"model": "net", "optimizer": None})
    names: dict[str, Any] = {}
    exec(of(record, "loss"), names)
    assert names["loss"]() == ["second"]
    ran(record, "def loss(): return optimizer.param_groups")
    record.loaded({"model": "net", "optimizer": None})
    with pytest.raises(WorkloadError, match=r"needs optimizer, which was what the ranks offer.*no cell made"):
        of(record, "loss")


def test_a_name_that_somebody_holds_is_not_one_that_ranks_offer() -> None:
    record = CellRecord()
    ran(record, "model = dict()\nnet = list()")
    record.loaded({"model": "net", "optimizer": None})
    ran(record, "model.update(a=1)\nnet.append(2)")
    record.loaded({"model": "net"})
    assert of(record) == "model = dict()\nnet = list()\n\nmodel.update(a=1)\nnet.append(2)"


def test_what_cells_did_before_the_ranks_were_started_again_is_gone() -> None:
    record = CellRecord()
    record.started(3)
    ran(record, "import torch\ntorch.set_default_dtype(torch.float64)", "old = list()")
    record.started(4)
    ran(record, "net = list()")
    record.loaded({"model": "net"})
    assert of(record) == "net = list()"
    with pytest.raises(WorkloadError, match="before the ranks were started again"):
        of(record, "old")
    record.started(5)  # which brings back what is attached
    assert of(record) == "net = list()"
    assert [cell.started for cell in record.since_load()] == [True]


def test_settings_of_the_whole_process_are_found_in_cells() -> None:
    set_here = ["torch.set_float32_matmul_precision('high')", "lib.Block.forward = print", "os.environ['A'] = '1'"]
    source = "import torch, os\nimport lib\nx = {}\nx[1] = 2\ntorch.manual_seed(3)\n" + "\n".join(set_here)
    assert settings_in([Cell(source)]) == set_here
    assert selected([Cell(source), Cell("net = 1")], ["net"], 0, forgotten=False).settings == tuple(set_here)


def notebook(source: str) -> dict[str, Any]:
    """What a cell of a notebook defines."""
    names: dict[str, Any] = {"__name__": "__main__"}
    linecache.cache["<a cell>"] = (len(source), None, source.splitlines(keepends=True), "<a cell>")
    exec(compile(source, "<a cell>", "exec", dont_inherit=True), names)
    return names


def test_functions_of_a_notebook_bring_what_they_use_and_modules_are_imported() -> None:
    names = notebook(
        "import math as m\nfrom collections import Counter\nsize = 3\n"
        "def helper(x):\n    return m.sqrt(x) * size\n"
        "def model(y=2):\n    return helper(Counter())\n"
        "loss = lambda net, batch: net(batch) + size\n"
    )
    collector = Collector()
    assert collector.add("model", names["model"]) == "model"
    assert collector.add("loss", names["loss"]) == "loss_of_workload"
    assert collector.add("data", partial(names["helper"], 4)) == "partial(helper, 4)"
    assert set(collector.imports) == {
        "import math as m",
        "from collections import Counter",
        "from functools import partial",
    }
    assert "def loss_of_workload(net, batch):\n    return net(batch) + size" in collector.definitions
    assert collector.definitions.index("size = 3") < 2
    namespace: dict[str, Any] = {}
    exec("\n".join([*collector.imports, *collector.definitions]), namespace)
    assert namespace["loss_of_workload"](abs, -1) == 4


NET = """
import torch
width = 3
@torch.no_grad
def still(): return 1
class Base:
    def size(self): return width
class Net(Base):
    depth = 2
    layers: int = 4

    @property
    def area(self):
        return self.size() * self.depth
    def double(self):
        return 2 * self.area
    def twice(self): return self.double()
"""


def test_classes_of_a_notebook_are_written_out_with_what_they_use() -> None:
    names = notebook(f"{NET}\ndef model(): return Net().double()")
    collector = Collector()
    collector.add("model", names["model"])
    namespace: dict[str, Any] = {}
    exec("\n".join([*collector.imports, *collector.definitions]), namespace)
    assert namespace["model"]() == 12
    assert set(collector.defined) == {"model", "Net", "Base", "width"}


@pytest.mark.parametrize(
    ("change", "name"), [("Net.depth = 3", "depth"), ("Net.double = print", "double"), ("Net.new = 1", "new")]
)
def test_a_class_that_was_changed_after_it_was_defined_is_refused(change: str, name: str) -> None:
    names = notebook(f"{NET}\ndef model(): return Net()\n{change}")
    with pytest.raises(WorkloadError, match=f"Net, whose {name} was changed after it was defined"):
        Collector().add("model", names["model"])


def test_a_class_without_functions_has_no_known_source() -> None:
    with pytest.raises(WorkloadError, match="Define it in a module"):
        Collector().add("model", notebook("class Net: pass\ndef model(): return Net()")["model"])


def around(value: int) -> Callable[[], int]:
    return lambda: value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: around(3), "takes value from the function around"),
        (
            lambda: notebook("import numpy as np\nx = np.ones(3)\ndef f(): return x")["f"],
            "x, a ndarray of the notebook",
        ),
        (lambda: __import__("gpumem_nb.workloads.catalog").workloads.catalog.accuracy, r"gpumem_nb\.workloads"),
        (lambda: eval("lambda: 3"), "source is not known"),
        (lambda: [].append, "top level of a notebook cell"),
    ],
)
def test_functions_that_cannot_be_written_out_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        Collector().add("data", make())


def test_strings_keep_their_lines() -> None:
    text = 'net = """a\n\n\n\n\nb\x0cc\u2028d"""'
    assert sliced(f"{text}\nother = 2") == f"{text}\nother = 2"
    flags, values = frozenset({"own", "cells"}), defaultdict(lambda: "x", definitions=text, header="A script.")
    assert f"\n\n{text}\n\n\ndef micro_batches" in render("train", flags, values)


def test_every_knob_says_what_a_script_does_with_it() -> None:
    for knob in KNOBS.values():
        assert knob.exported is not None, knob.name


def test_a_local_name_is_not_taken_for_one_of_the_notebook() -> None:
    names = notebook("x = object()\ndef f():\n    x = 1\n    return [x for x in (x,)]")
    collector = Collector()
    collector.add("data", names["f"])
    assert collector.defined == ["f"]


def test_a_workload_whose_functions_use_something_else_by_now_travels_otherwise() -> None:
    names = notebook("rate = 1\ndef f():\n    return rate")
    before = pickled(names["f"], "The function")
    assert pickled(names["f"], "The function") == before
    names["rate"] = 2
    assert pickled(names["f"], "The function") != before


def test_annotations_that_a_function_or_class_does_not_evaluate_are_told() -> None:
    lazy = "from __future__ import annotations\n"
    made = "class Net:\n    def f(self, x: Later): pass\ndef model(): return Net()"
    for source, told in ((lazy + made, True), (made.replace(": Later", ""), False)):
        collector = Collector()
        collector.add("model", notebook(source)["model"])
        assert collector.lazy_annotations is told


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("width = 3\ndef model(x=width): return x\nwidth = 4", "model, whose default of x"),
        ("width = 3\ndef model(*, x=2 * width): return x\nwidth = 4", "model, whose default of x"),
        ("width = 3\nmodel = lambda x=width: x\nwidth = 4", "a lambda whose default of x"),
        ("width = 3\nclass Net:\n    def f(self, x=width): return x\ndef model(): return Net()\nwidth = 4", "Net"),
        ("width = 3\nclass Net:\n    x = width\n    def f(self): pass\ndef model(): return Net()\nwidth = 4", "Net"),
        (
            "class Base: pass\nclass Net(Base):\n    def f(self): return 1\ndef model(): return Net()\n"
            "class Base:\n    def f(self): return 2",
            "Net",
        ),
    ],
)
def test_what_was_evaluated_when_it_was_defined_is_refused_where_it_would_be_something_else(
    source: str, name: str
) -> None:
    with pytest.raises(WorkloadError, match=rf"{name}.*changed"):
        Collector().add("model", notebook(source)["model"])


def test_what_was_evaluated_when_it_was_defined_is_written_out_where_it_is_the_same() -> None:
    source = (
        "width, sizes = 3, (1, 2)\nfrom math import sqrt\n"
        "def helper(x, act=sqrt, *, size=width + 1, more=sizes, **kw): return x\n"
        "class Base:\n    def f(self): return 1\n"
        "class Net(Base):\n    size = width\n    act = staticmethod(sqrt)\n    def g(self, x=width, y=None): return x\n"
        "def model(y=helper, net=Net): return y(net)\n"
    )
    collector = Collector()
    collector.add("model", notebook(source)["model"])
    assert {"width", "Base", "Net", "helper", "model"} <= {*collector.defined}


@pytest.mark.parametrize("change", ["Net.layers = 5", "Net.act = abs", "Net._Net__size = 4", "Net.wait = print"])
def test_a_change_of_any_attribute_of_a_class_is_noticed(change: str) -> None:
    source = (
        "from math import sqrt\nclass Net:\n    layers: int = 4\n    act = sqrt\n    __size = 3\n"
        "    async def wait(self): return 1\n    def __hidden(self): return self.__size\n"
        "def model(): return Net()\n"
    )
    collector = Collector()
    collector.add("model", notebook(source)["model"])
    assert "Net" in collector.defined
    with pytest.raises(WorkloadError, match=r"Net, whose .* was changed after it was defined"):
        Collector().add("model", notebook(source + change)["model"])


def test_what_was_pushed_since_it_was_loaded_is_told_by_its_name() -> None:
    record = CellRecord()
    record.pushed(["early"], everywhere=True)
    ran(record, "net = list()")
    record.loaded({"model": "net"})
    record.pushed(["late", "later"], everywhere=False)
    ran(record, "net.append(late)")
    assert [cell.pushed for cell in record.since_load()] == [("late", "later"), ()]


def test_a_name_that_was_deleted_is_one_that_ranks_offer_again() -> None:
    record = CellRecord()
    ran(record, "model = dict()", "net = list()\ndel model")
    record.loaded({"model": "net", "optimizer": None})
    ran(record, "model.append(2)")
    record.loaded({"model": "net"})
    assert of(record).endswith("model = net\n\nmodel.append(2)")


def test_a_module_inside_of_a_package_that_functions_use_is_imported_too() -> None:
    names = notebook(
        "import xml.dom.minidom as dom, xml.sax\nimport xml as x\ndef f(): return xml.sax.handler, dom, x.a"
    )
    collector = Collector()
    collector.add("data", names["f"])
    inner = {"import xml.sax", "import xml.sax.handler"}
    assert set(collector.imports) == inner | {"import xml", "import xml as x", "import xml.dom.minidom as dom"}


def test_torch_brings_its_modules_itself() -> None:
    names = notebook("import torch\ndef f(): return torch.nn.functional.relu(torch.ones(3))")
    collector = Collector()
    collector.add("data", names["f"])
    assert collector.imports == ["import torch"]


@pytest.mark.parametrize(
    "made",
    [
        "from torch import nn, no_grad\nclass Net(nn.Module):\n    @no_grad()\n    def reset(self): pass\n"
        "    def forward(self, x): return nn.functional.relu(x)",
        "import enum\nclass Net(enum.Enum):\n    A = 'a'\n    def f(self): return self.value",
        "from typing import NamedTuple\nclass Net(NamedTuple):\n    width: int = 3\n    def f(self): return self.width",
    ],
)
def test_classes_that_something_makes_its_own_of_are_as_they_were_defined(made: str) -> None:
    collector = Collector()
    collector.add("model", notebook(f"{made}\ndef model(): return Net")["model"])
    assert "Net" in collector.defined
    assert "nn.Module" not in made or "import torch.nn as nn" in collector.imports
