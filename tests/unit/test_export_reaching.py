"""Cells that reach variables by other ways than their names, which a script keeps whole."""

from __future__ import annotations

import pytest

from gpumem_nb.export.selecting import settings_in
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.questions import Cell

from .test_export_cells import sliced

REACHING = [
    "globals()['net'].clear()",
    "exec('net.clear()')",
    "exec(code)",
    "vars()['net'].clear()",
    "locals()['net'].clear()",
    "eval('net.clear()')",
    "import sys\nsys.modules['__main__'].net.clear()",
    "import __main__\n__main__.net.clear()",
    "for name, value in list(globals().items()):\n    if isinstance(value, list):\n        value.clear()",
    "import gc\nfor one in gc.get_objects():\n    one.clear() if one is net_of_old else None",
    "__import__('__main__').net.clear()",
    "def change():\n    globals()['net'].clear()\nchange()",
    "run = exec\nrun('net.clear()')",
    "def outer(): return inner()\ndef inner(): exec('net.clear()', globals())\nouter()",
    "exec('net = [2]')",
    "globals().update(net=[3])",
    "(lambda: globals())()['net'].clear()",
    "show = vars\nshow()['net'].clear()",
    "import builtins\nbuiltins.vars()['net'].clear()",
    "import builtins\nbuiltins.eval('net.clear()')",
    "import builtins\ngetattr(builtins, 'exec')('net.clear()')",
    "from builtins import exec as run\nrun('net.clear()')",
    "import inspect\ngetattr(inspect.currentframe(), 'f_globals')['net'].clear()",
]


@pytest.mark.parametrize("cell", REACHING)
def test_cells_that_may_reach_anything_are_kept_whole_with_all_before_them(cell: str) -> None:
    cells = ("code = 'net.clear()'", "net_of_old = 3\nprint(code)", "net = [1]", cell, "other = 4")
    assert sliced(*cells) == "\n\n".join(cells[:-1])
    with pytest.raises(WorkloadError, match="cannot be told"):
        sliced(*cells[:3], Cell(cell, everywhere=False))


@pytest.mark.parametrize(
    "cell",
    [
        "get_ipython().ex('net.clear()')",
        "get_ipython().user_global_ns['net'].clear()",
        "shell = get_ipython()\nshell.ev('net.clear()')",
    ],
)
def test_cells_that_reach_anything_by_ipythons_shell_are_refused(cell: str) -> None:
    with pytest.raises(WorkloadError, match="a script"):
        sliced("net = [1]", cell)


def test_a_function_that_reaches_anything_is_kept_where_it_is_called() -> None:
    cells = ("def change():\n    globals()['net'].clear()", "net = [1]", "change()", "later = 3")
    assert sliced(*cells) == "\n\n".join(cells[:-1])


def test_what_only_such_a_cell_defines_is_not_missing_but_what_was_pushed_is() -> None:
    cell = "exec('net = [1]')\nsize = width"
    with pytest.raises(WorkloadError, match=r"needs width.*pushed"):
        sliced(Cell(pushed=("width",)), cell)
    assert sliced("width = 3", cell) == f"width = 3\n\n{cell}"


def test_cells_that_only_read_what_there_is_do_not_matter() -> None:
    for cell in ("sorted(globals())", "'net' in globals()", "[name for name in vars()]", "print(len(locals()))"):
        assert sliced("net = [1]", cell) == "net = [1]"
        assert sliced(Cell(cell, everywhere=False), "net = [1]", Cell(cell, everywhere=False)) == "net = [1]"


def test_methods_that_are_called_like_such_functions_reach_nothing() -> None:
    assert (
        sliced(
            "net = [1]",
            "old = [2]\nold.eval()\nlist(old.modules())\nvars(old)\nold.compile()\n__import__('gc').collect()",
        )
        == "net = [1]"
    )


def test_what_a_script_cannot_do_is_refused_where_it_is_needed() -> None:
    for cell, why in (
        ("import asyncio\nnet = await asyncio.sleep(0, [1])", "cannot wait outside of functions"),
        ("async with lock:\n    net = [one async for one in rows]", "cannot wait outside of functions"),
        ("import gpumem_nb as gm\nnet = [gm]", "does without gpumem_nb"),
        ("import numpy as np\nnet = np.random.default_rng()", "give them a seed"),
        (
            "from numpy.random import default_rng\ndef draw(): return default_rng(None)\nnet = draw()",
            "give them a seed",
        ),
        ("import random\nclass Rows:\n    numbers = random.Random()\nnet = Rows()", "give them a seed"),
        ("net = [torch.seed()]", "give them a seed"),
    ):
        with pytest.raises(WorkloadError, match=why):
            sliced("lock = rows = [1]", cell)
        assert sliced("lock = rows = [1]", cell, "net = 2") == "net = 2"
    assert "default_rng(seed=3)" in sliced("import numpy as np\nnet = np.random.default_rng(seed=3)")
    assert "await" in sliced("async def f():\n    await f()\nnet = [f]")


@pytest.mark.parametrize(
    "code",
    [
        "import random as r\nr.seed()",
        "from random import seed, Random as R\nnumbers = R()",
        "from torch import seed as begin\nbegin()",
        "import numpy.random as npr\nnpr.seed()",
        "import numpy as np\nnumbers = np.random.Generator(np.random.PCG64())",
        "import torch\nnumbers = torch.Generator()\nnumbers.seed()",
        "import time, torch\ntorch.manual_seed(int(time.time()))",
        "from time import time_ns as now\nimport numpy\nnumpy.random.seed(now() % 2**32)",
        "import os, random\nrandom.seed(os.urandom(4))",
        "import time\nseed = int(time.time())",
        "import uuid\nSEED = uuid.uuid4().int % 1000",
        "from transformers import set_seed\nfrom datetime import datetime\nset_seed(datetime.now().microsecond)",
    ],
)
def test_numbers_that_are_others_each_time_are_refused_whatever_they_are_called(code: str) -> None:
    with pytest.raises(WorkloadError, match="its random numbers are others each time: give them a seed"):
        sliced(f"{code}\nnet = [1]")


@pytest.mark.parametrize(
    "code",
    [
        "import time\nbegan = time.time()",
        "import uuid\nrun_name = f'run-{uuid.uuid4()}'",
        "import random as r, torch\nr.seed(3)\ntorch.Generator().manual_seed(4)",
        "import numpy as np\nnumbers = np.random.Generator(np.random.PCG64(3))",
        "def seed(): return 3\nseed = seed()",
    ],
)
def test_numbers_that_are_the_same_each_time_are_not_refused(code: str) -> None:
    assert sliced(f"{code}\nnet = [1]") == f"{code}\nnet = [1]"


def test_what_some_ranks_did_by_such_a_cell_is_not_undone_by_doing_it_again() -> None:
    change = "exec('net.append(1)')"
    with pytest.raises(WorkloadError, match="cannot be told"):
        sliced("net = [1]", Cell(change, everywhere=False), change)


BEGINNING = (
    "rows = [1, 2]",
    "class Net:\n    def __init__(self, r): self.r = r\n    def freeze(self): self.r.append(3)",
)
KEPT_WHOLE = {
    "a name that exec makes": ("net = Net(rows)", "exec('extra = net')", "extra.freeze()"),
    "a name in globals()": ("net = Net(rows)", "globals()['extra'] = net", "extra.freeze()"),
    "a setting by a function's own import": (
        "def setup():\n    import torch as T\n    T.set_default_dtype(T.float64)",
        "setup()",
        "net = Net(rows)",
    ),
    "a counter that a function rebinds": (
        "n = 0",
        "def uid():\n    global n\n    n += 1\n    return n",
        "a = uid()",
        "net = Net([*rows, uid()])",
    ),
    "a list that is a function's default": (
        "def uid(s=[0]):\n    s[0] += 1\n    return s[0]",
        "a = uid()",
        "net = Net([*rows, uid()])",
    ),
    "a block that enters an object": (
        "class Entering:\n    def __enter__(self): rows.append(9)\n    def __exit__(self, *a): pass",
        "net = Net(rows)",
        "held = Entering()",
        "with held: print(1)",
    ),
    "a library's class that a function changes": (
        "import lib\ndef patch(cls): cls.width = 8",
        "net = lib.wrap(Net(rows))",
        "patch(lib.Linear)",
    ),
    "library's classes in a loop of a function": (
        "from lib import nn\ndef patch(kinds):\n    for kind in kinds: setattr(kind, 'forward', len)",
        "net = Net(rows)",
        "patch([nn.Linear, nn.Conv2d])",
    ),
    "a library's class under another name": (
        "import lib\ndef patch(cls): cls.width = 8",
        "net = Net(rows)",
        "kind = getattr(lib, 'Linear')\nlist(map(patch, [kind]))",
    ),
    "a library's class that a decorator changes": (
        "import lib\ndef on(cls):\n    def add(f):\n        cls.forward = f\n    return add",
        "net = Net(rows)",
        "@on(lib.Linear)\ndef forward(self): pass",
    ),
    "a mock of a library's class": (
        "import lib\nfrom unittest import mock",
        "net = Net(rows)",
        "mock.patch.object(lib.Linear, 'width', 8).start()",
    ),
    "a library's list under another name": ("import lib", "net = Net(rows)", "kinds = lib.kinds\nkinds.append(3)"),
    "a library that is imported by a call": (
        "import importlib",
        "net = Net(rows)",
        "lib = importlib.import_module('lib')\nlib.kinds.append(3)",
    ),
    "library's classes by way of two names": (
        "import lib",
        "net = Net(rows)",
        "kinds = (lib.Linear, lib.Conv)\nfor kind in kinds: kind.width = 8",
    ),
    "the variables of a library": ("import lib", "net = Net(rows)", "vars(lib)['kinds'][0] = 3"),
    "a name of Python's own": ("net = Net(rows)", "input = net.r", "input.append(3)"),
    "a name that ranks offer": ("net = Net(rows)", "size = net.r", "size.append(3)"),
    "an attribute that a loop sets": ("net = Net(rows)", "for net.turn in [4, 5]: pass"),
    "an item that a loop sets": ("net = Net(rows)", "for i, net.r[0] in enumerate([7]): pass"),
    "an attribute that a block sets": ("net = Net(rows)", "with open('/dev/null') as net.file: pass"),
    "a key that a function computes": (
        "def fn(x):\n    rows.append(x)\n    return x",
        "net = Net(rows)",
        "print(max([1, 2], key=fn))",
    ),
}


@pytest.mark.parametrize("case", KEPT_WHOLE)
def test_what_changes_something_by_a_detour_is_kept(case: str) -> None:
    cells = (*BEGINNING, *KEPT_WHOLE[case])
    assert sliced(*cells) == "\n\n".join(cells)


REFUSED = {
    "a failed rebinding that leaves an alias": ("enc = net.r", Cell("enc = nope()", finished=False), "enc.append(7)"),
    "a class that a library changes in a cell that failed": (
        "import lib",
        Cell("lib.patch(Net)\nboom()", finished=False),
    ),
    "a library's class that a function changes on some ranks": (
        "import lib\ndef patch(cls): cls.width = 8",
        Cell("patch(lib.Linear)", everywhere=False),
    ),
    "an import of a cell that failed": (
        Cell("import sys\nboom()", finished=False),
        "sys.modules['__main__'].net.freeze()",
    ),
    "exec by a function on some ranks": (
        "def ex(c): exec(c, globals())",
        Cell("ex('net.freeze()')", everywhere=False),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_some_ranks_or_a_failed_cell_did_by_a_detour_is_refused(case: str) -> None:
    with pytest.raises(WorkloadError):
        sliced(*BEGINNING, "net = Net(rows)", *REFUSED[case])


def test_what_a_function_only_uses_of_a_library_is_not_set() -> None:
    build = "import torch\ndef build(net, kind, dtype):\n    net.act = kind()\n    net.parts = [dtype]"
    assert settings_in([Cell(build), Cell("build(net, torch.nn.ReLU, dtype=torch.float16)")]) == []
    patch = "import torch\ndef patch(net, kind):\n    net.act = 1\n    kind.forward = len"
    assert settings_in([Cell(patch), Cell("patch(net, kind=torch.nn.ReLU)")]) == ["patch(net, kind=torch.nn.ReLU)"]
    assert settings_in([Cell(patch), Cell("patch(torch.nn.ReLU, len)")]) == ["patch(torch.nn.ReLU, len)"]
    assert settings_in([Cell(patch), Cell("patch(len, len)")]) == []
    each = "import torch\ndef each(net, function):\n    for part in net.children(): function(part)"
    assert settings_in([Cell(each), Cell("each(net, torch.nn.init.zeros_)")]) == []


def test_devices_and_ranks_do_not_tie_what_they_are_given_to() -> None:
    device = "import torch\ndevice = torch.device('cuda' if torch.cuda.is_available() else 'cpu')"
    made = ("old = list()\nold.to(device)", "net = dict()\nnet.to(device)")
    assert sliced(device, *made) == sliced(device, made[1])
