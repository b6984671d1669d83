"""Whole notebooks: what the cells of a script make is what the notebook had, whatever the cells do meanwhile."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from IPython.core.inputtransformer2 import TransformerManager

from gpumem_nb.export.selecting import selected
from gpumem_nb.shared.questions import Cell

BEGIN = "import torch, random\nfrom torch import nn\nimport numpy as np\nWIDTH = 4"
DATA = "rows = torch.randn(8, WIDTH)\nlabels = torch.arange(8) % 3"
MODEL = """# The model.
class Net(nn.Module):
    scale = 1.0
    def __init__(self, width):
        super().__init__()
        self.inner, self.norm, self.out = nn.Linear(width, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
    def forward(self, x): return self.scale * self.out(self.norm(self.inner(x)))
net = Net(WIDTH)
print(net)"""
TRAIN = """
def step(rate=0.1):
    loss = nn.functional.cross_entropy(net(rows), labels)
    loss.backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= rate * p.grad
            p.grad = None
    return loss.item()
"""
NOTEBOOKS: list[list[str]] = [
    [BEGIN, DATA, MODEL, "net.eval()", "torch.manual_seed(3)\nnet = Net(WIDTH)"],
    [BEGIN, DATA, MODEL, TRAIN, "losses = [step() for _ in range(3)]", "print(losses)", "net(rows)"],
    [BEGIN, MODEL, MODEL, "torch.randn(3)", MODEL],
    [BEGIN, MODEL, "part = net.inner", "with torch.no_grad():\n    part.weight.fill_(0.5)", "part = 3"],
    [BEGIN, MODEL, "for name in ['inner', 'out']:\n    getattr(net, name).weight.requires_grad_(False)"],
    [BEGIN, MODEL, "state = {k: v * 0 for k, v in net.state_dict().items()}", "net.load_state_dict(state)"],
    [BEGIN, MODEL, "Net.scale = 3.0", "old = Net(WIDTH)"],
    [BEGIN, MODEL, "k = Net", "k.scale = 2.0"],
    [BEGIN, MODEL, "setattr(Net, 'scale', 2.5)"],
    [BEGIN, MODEL, "globals()['net'].scale = 4.0"],
    [BEGIN, MODEL, "exec('net.scale = WIDTH')", "WIDTH = 8"],
    [BEGIN, "exec('WIDTH = 6')", MODEL],
    [BEGIN, MODEL, "def grow():\n    vars()\n    globals()['net'] = Net(2)", "grow()", "x = 1"],
    [BEGIN, MODEL, "import sys\nsetattr(sys.modules[__name__], 'made', 2) if False else None", "net.scale = 2.0"],
    [BEGIN, "def make():\n    return Net(WIDTH)", MODEL, "net = make()", "WIDTH = 9"],
    [BEGIN, DATA, MODEL, TRAIN, "step()", "def step(): return 0", "step()", TRAIN, "step(0.2)"],
    [BEGIN, DATA, MODEL, TRAIN, "%time step()", "%%time\nlast = step()\nlast", "!ls"],
    [BEGIN, DATA, "%%capture\nrows = rows * 2\nprint(rows)", MODEL, TRAIN, "step()"],
    [
        BEGIN,
        DATA,
        MODEL,
        "torch.save(net.state_dict(), 'best.pt')",
        TRAIN,
        "step()\ntorch.save(net.state_dict(), 'best.pt')",
    ],
    [BEGIN, DATA, MODEL, TRAIN + "def keep():\n    step()\n    return net", "other = keep()", "del other"],
    [BEGIN, "torch.set_default_dtype(torch.float64)", MODEL, "torch.set_default_dtype(torch.float32)"],
    [BEGIN, "random.seed(5)\nnp.random.seed(5)", MODEL, "with torch.no_grad():\n    net.out.bias += random.random()"],
    [
        BEGIN,
        MODEL,
        "net.extra = [1]",
        "more = net.extra",
        "more += [2]",
        "more.append(3)\nnet.scale = float(sum(more))",
    ],
    [BEGIN, MODEL, "parts = [net.inner, net.out]", "for part in parts:\n    nn.init.constant_(part.weight, 0.3)"],
    [BEGIN, MODEL, "class Net(Net):\n    scale = 7.0", "net = Net(WIDTH)"],
    [BEGIN, MODEL, "a = b = net", "b.scale = 9.0"],
    [BEGIN, MODEL, "if WIDTH > 3:\n    net.scale = 2.0\nelse:\n    net = None"],
    [BEGIN, MODEL, "try:\n    net.scale = net.missing\nexcept AttributeError:\n    net.scale = 6.0"],
    [BEGIN, "from math import *\nWIDTH = int(sqrt(16))", MODEL, "net.scale = pi"],
    [BEGIN, MODEL, "f = lambda: setattr(net, 'scale', 8.0)", "f()"],
    [BEGIN, MODEL, "import functools", "g = functools.partial(setattr, net, 'scale')", "g(5.0)"],
    [BEGIN, MODEL, "@torch.no_grad()\ndef zero(module):\n    module.weight.zero_()", "zero(net.inner)"],
    [BEGIN, MODEL, "net.scale: float = 5.0", "n = 0\nwhile n < 3:\n    n += 1\n    net.scale += n"],
    [BEGIN, MODEL, "copies = {'a': net}", "copies['a'].scale = 3.5", "copies = None"],
    [BEGIN, MODEL, "hook = net.register_forward_hook(lambda *_: None)", "hook.remove()", "net.scale = 2.0"],
    [BEGIN, "with open('seen.txt', 'w') as file:\n    file.write('3')", "WIDTH = int(open('seen.txt').read())", MODEL],
]


def ran(cells: list[str]) -> tuple[list[Cell], dict[str, Any]]:
    """The record of some cells, and the names that they leave."""
    names, record = begun(), []
    for cell in cells:
        source = TransformerManager().transform_cell(cell)
        before = numbers()
        exec(source, names)
        record.append(Cell(source, drew=numbers() != before))
    return record, names


def begun() -> dict[str, Any]:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)
    torch.set_default_dtype(torch.float32)
    torch.backends.cudnn.enabled = True
    shell = type("Shell", (), {"system": print, "run_line_magic": run, "run_cell_magic": run})
    return {"__name__": "script", "torch": torch, "get_ipython": shell, "display": print}


def run(name: str, *code: str) -> Any:
    """As IPython does; finds the names of the cell that calls it."""
    names = sys._getframe(1).f_globals
    source = TransformerManager().transform_cell(code[-1])
    exec(source, names)


def numbers() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]


def looked_at(net: Any) -> tuple[Any, ...]:
    tensors = [(name, tensor.tolist(), str(tensor.dtype)) for name, tensor in net.state_dict().items()]
    trained = [weight.requires_grad for weight in net.parameters()]
    return type(net).__name__, net.scale, type(net).scale, net.training, tensors, trained


@pytest.mark.parametrize("cells", NOTEBOOKS, ids=lambda cells: cells[-1][:40])
def test_a_script_makes_what_the_notebook_had(
    cells: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record, there = ran(cells)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    found = selected(record, ["net"], 0, forgotten=False)
    here = begun()
    del here["get_ipython"]
    try:
        exec(compile(found.definitions, "script", "exec", dont_inherit=True), here)
    finally:
        torch.set_default_dtype(torch.float32)
    assert looked_at(here["net"]) == looked_at(there["net"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize(
    "cells",
    [
        ("def freeze(part=net): part.append(1)", "freeze()"),
        ("def freeze(*, part=[net]): part[0].append(1)", "freeze()"),
        ("def freeze(part=net): part.append(1)", "def all_of(do=freeze): do()", "all_of()"),
        ("def freeze(part=net): part.append(1)", "ways = [freeze]", "ways[0]()"),
        ("rows = [1]", "net.append(rows)", "def grow(part=rows): part.append(2)", "rows = [3]", "grow()"),
        ("print = lambda *_: net.append(1)", "print('a')"),
        ("class Kept: part = net", "Kept().part.append(1)"),
        ("class Kept: part = net", "class More(Kept):\n    def grow(self): self.part.append(1)", "More().grow()"),
        ("class Base:\n    def grow(self): net.append(1)", "class More(Base): pass", "More().grow()"),
        ("class Meta(type):\n    def __call__(cls): net.append(1)", "class A(metaclass=Meta): pass", "A()"),
    ],
)
def test_what_definitions_hold_and_inherit_changes_by_way_of_their_names(cells: tuple[str, ...]) -> None:
    here, there = both("net = [5]", *cells)
    assert here == there
    assert here != [5]


def both(*cells: str) -> tuple[Any, Any]:
    """What ``net`` is in a script, and in the notebook."""
    found = []
    for code in (selected([Cell(one) for one in cells], ["net"], 0, forgotten=False).definitions, "\n".join(cells)):
        names = begun()
        exec(code, names)
        found.append(names["net"])
    begun()
    return found[0], found[1]


@pytest.mark.parametrize(
    "cells",
    [
        ("scale = 1\ndef make(): return scale", "scale = 2", "net = make()"),
        ("config = dict(width=1)\ndef make(): return config['width']", "config.update(width=5)", "net = make()"),
        ("known = {}\ndef place(word): return known.setdefault(word, len(known))", "place('a')", "net = place('b')"),
        ("rng = random.Random(0)\ndef pick(): return rng.random()", "pick()", "net = pick()"),
        ("rows = []\nclass Net:\n    def size(self): return len(rows)", "rows.append(1)", "net = Net().size()"),
        ("def act(): return 1\ndef make(): return act()", "def act(): return -1", "net = make()"),
    ],
)
def test_what_functions_use_of_their_own_cell_may_change_in_later_ones(cells: tuple[str, ...]) -> None:
    here, there = both("import random", *cells)
    assert here == there


@pytest.mark.parametrize(
    "define",
    [
        "def f(x, total=torch.zeros(1)):\n    total += x\n    return total.item()",
        "def f(x, made=nn.Linear(1, 1)):\n    made.sum = getattr(made, 'sum', 0) + x\n    return made.sum",
        "class Total:\n    n = 0\ndef f(x, total=Total()):\n    total.n += x\n    return total.n",
        "class Adds:\n    total = torch.zeros(1)\n    def of(self, x): return self.total.add_(x).item()\n"
        "def f(x): return Adds().of(x)",
    ],
)
def test_what_a_call_made_for_a_default_or_a_class_keeps_what_later_calls_change(define: str) -> None:
    here, there = both(f"import torch\nfrom torch import nn\n{define}", "f(1)", "net = f(2)")
    assert here == there == 3


COUNTED = "class Layer:\n    made = 0\n    def __init__(self):\n        {0}.made += 1\n        self.number = {0}.made"
NUMBER = "net = Layer().number"
DOUBLE = "torch.set_default_dtype(torch.float64)"
DTYPE = "net = torch.get_default_dtype()"
WRAPPING = "def counted(f):\n    {}\n    def more():\n        {}\n    {}\n    return more"
COUNTING = [
    "class counted:\n    def __init__(self, f): self.f, self.n = f, 0\n"
    "    def __call__(self):\n        self.n += self.f()\n        return self.n",
    WRAPPING.format("n = 0", "nonlocal n; n = n + f(); return n", ""),
    WRAPPING.format("n = [0]", "n[0] += f(); return n[0]", ""),
    WRAPPING.format("n = []", "n.append(f()); return len(n)", ""),
    WRAPPING.format("", "more.n += f(); return more.n", "more.n = 0"),
]


@pytest.mark.parametrize(
    "cells",
    [
        ("import functools\n@functools.lru_cache(None)\ndef make(): return [1]", "make().append(2)", "net = make()"),
        (
            "kept = []\ndef memo(f): return lambda: kept or kept.append(f()) or kept",
            "@memo\ndef make(): return 1",
            "make().append(2)",
            "net = make()",
        ),
        (
            "def known(f=None, kept=dict()): return kept if f is None else kept.update({f.__name__: f})",
            "def small(): return 3",
            "known(small)",
            "net = known()['small']()",
        ),
        (
            "import itertools\nclass Layer:\n    ids = itertools.count()",
            "class Layer(Layer):\n    def __init__(self): self.number = next(self.ids)",
            "probe = Layer()",
            NUMBER,
        ),
        (
            "class Layer:\n    rows = []\n    def add(self): self.rows.append(1)",
            "class More(Layer): pass",
            "probe = Layer()",
            "probe.add()",
            "net = More().rows",
        ),
        (COUNTED.format("type(self)"), "probe = Layer()", NUMBER),
        (COUNTED.format("self.__class__"), "probe = Layer()", NUMBER),
        (COUNTED.format("Layer"), "class More(Layer): pass", "probe = More()", NUMBER),
        (
            "class Config:\n    one, width = None, 1\n    def __new__(cls):\n"
            "        cls.one = cls.one or super().__new__(cls)\n        return cls.one",
            "config = Config()\nconfig.width = 8",
            "net = Config().width",
        ),
        ("class Net: scale = 1", "net = Net()", "type(net).scale = 3", "net = Net().scale"),
        ("class Net: scale = 1", "net = Net()", "setattr(net.__class__, 'scale', 3)", "net = Net().scale"),
        ("class Net: scale = 1", "def kind(): return Net", "kind().scale = 4", "net = Net().scale"),
        (f"class Setup:\n    def apply(self): {DOUBLE}", "setup = Setup()", "setup.apply()", DTYPE),
        (f"class Setup:\n    def __call__(self): {DOUBLE}", "setup = Setup()", "setup()", DTYPE),
        (
            f"class Setup:\n    def __enter__(self): {DOUBLE}\n    def __exit__(self, *_): pass",
            "setup = Setup()",
            "with setup: pass",
            DTYPE,
        ),
        (
            f"class Setup:\n    def outer(self): self.inner()\n    def inner(self): {DOUBLE}",
            "setup = Setup()",
            "def prepare(): setup.outer()",
            "prepare()",
            DTYPE,
        ),
        (
            "class Runs:\n    def go(self, code): exec(code, globals())",
            "net, runs = [1], Runs()",
            "runs.go('net.append(2)')",
        ),
        (
            "import functools\nset_double = functools.partial(torch.set_default_dtype, torch.float64)",
            "set_double()",
            DTYPE,
        ),
        ("cudnn = torch.backends.cudnn", "cudnn.enabled = False", "net = torch.backends.cudnn.enabled"),
        ("import os\nos.environ['EXPORTED'] = '1'", "os.environ.pop('EXPORTED')", "net = os.environ.get('EXPORTED')"),
        (
            "import string\nstring.kinds = [1]",
            "from string import kinds\nkinds += [2]",
            "import string\nnet = [*string.kinds]",
        ),
        (f"import importlib\ndef on():\n    importlib.import_module('torch').{DOUBLE[6:]}", "on()", DTYPE),
        (f"def on():\n    import importlib as one\n    one.import_module('torch').{DOUBLE[6:]}", "on()", DTYPE),
        *((define, "@counted\ndef make(): return 1", "other = make()", "net = make()") for define in COUNTING),
    ],
    ids=lambda cells: cells[-2],
)
def test_what_classes_and_functions_keep_and_methods_set_is_as_in_the_notebook(cells: tuple[str, ...]) -> None:
    here, there = both(*cells)
    assert here == there


def test_methods_that_set_nothing_do_not_keep_what_calls_them() -> None:
    define = "class Net:\n    def fit(self):\n        self.rows = [1]\n        torch.nn.init.zeros_(self.weight)"
    script = selected([Cell(define), Cell("other = Net()"), Cell("other.fit()"), Cell("net = [1]")], ["net"], 0, False)
    assert "fit()" not in script.definitions


def test_what_functions_have_by_names_of_their_own_is_no_package_of_such_a_name() -> None:
    begin = "import torch\nloss = torch.pi\nnet = [1]"
    body = ["loss, rows = 0, [*rows]", "loss += 1", "loss.extra = 1", "loss.backward()", "rows[0] = 2"]
    count = "def count(rows):\n    " + "\n    ".join(body)
    found = selected([Cell(begin), Cell(count), Cell("print(count([3]))")], ["net"], 0, False)
    assert found.settings == ()
    assert "count" not in found.definitions
