"""What cells do to what is needed: kept in a script as a whole, or refused."""

from __future__ import annotations

import ast
import sys
import textwrap

import pytest

from gpumem_nb.export.selecting import selected, settings_in
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.questions import Cell


def sliced(*cells: Cell | str, names: tuple[str, ...] = ("net",)) -> str:
    found = selected([Cell(one) if isinstance(one, str) else one for one in cells], names, 0, forgotten=False)
    return found.definitions


def result(*cells: str) -> object:
    """What ``net`` is in the end of a script."""
    names: dict[str, object] = {}
    exec(sliced(*cells), names)
    return names["net"]


def test_functions_use_what_their_names_stand_for_when_they_are_called() -> None:
    define = "def make():\n    return scale"
    assert result("scale = 1", define, "scale = 2", "net = make()", "scale = 3") == 2
    assert result("def make():\n    return helper()", "def helper():\n    return 5", "net = make()") == 5
    code = sliced("scale = 1", "class Net:\n    def forward(self): return scale", "net = Net()", "scale = 2")
    assert code.rindex("scale = 2") > code.index("net = Net()")
    assert "old" not in sliced(
        "class Block:\n    old = 1",
        "def make():\n    return Block()",
        "net = make()",
        "class Block:\n    new = 1",
        "net = make()",
    )


@pytest.mark.parametrize(
    ("base", "found"),
    [
        (
            "class Base:\n    kinds = {}\n    def __init_subclass__(cls): Base.kinds[cls.__name__] = cls",
            "Base.kinds['A']",
        ),
        (
            "class Base:\n    kinds = {}\n    def __init_subclass__(cls): cls.kinds[cls.__name__] = cls",
            "Base.kinds['A']",
        ),
        ("kinds = {}\nclass Base:\n    def __init_subclass__(cls): kinds[cls.__name__] = cls", "kinds['A']"),
        (
            "class Meta(type):\n    kinds = {}\n    def __init__(cls, name, *_): Meta.kinds[name] = cls\n"
            "class Base(metaclass=Meta): pass",
            "Meta.kinds['A']",
        ),
        ("class Base: pass", "{c.__name__: c for c in Base.__subclasses__()}['A']"),
    ],
)
def test_classes_that_are_found_by_way_of_what_they_extend_are_there(base: str, found: str) -> None:
    assert type(result(base, "class A(Base): pass", "class B(A): pass", f"net = {found}()")).__name__ == "A"
    assert "class A" not in sliced(base, "class A(Base): pass", "net = 1")


@pytest.mark.parametrize(
    "change",
    [
        "enc = net.encoder\nenc.freeze()",
        "layers = [net.a, net.b]\nfor layer in layers:\n    layer.freeze()",
        "enc = net.encoder\npart = enc.part\npart.requires_grad = False",
        "print(net.load_state_dict(state))\n",
        "len(change(net))",
        "def freeze():\n    net.freeze()\nfreeze()",
        "def swap():\n    global net\n    net = 3\nswap()",
        "torch.set_default_dtype(torch.float64)",
        "torch.backends.cudnn.deterministic = True",
        "from torch.backends import cudnn\ncudnn.benchmark = False",
        "_ = torch.set_default_device('cpu')",
        "Net.width = 8",
        "lib.Block.forward = print",
        "setattr(Net, 'width', 8)",
        "freeze(Net)",
        "class Other:\n    pass\nfor cls in (Net, Other):\n    cls.width = 8",
        "for name, cls in dict(a=Net).items():\n    setattr(cls, name, 8)",
        "k = Net\nk.width = 8",
        "k = other = lib.Block\nother.width = 8",
        "k = Net\nkinds = [k, 3]\nkinds[0].width = 8",
        "def part():\n    return 1\npart = net.part\npart.freeze()",
        "parts = net.parts\nparts += [1]",
        "@net.register\ndef hook():\n    return 1",
    ],
)
def test_changes_are_kept_however_they_are_made(change: str) -> None:
    setup = "import lib\nimport torch\nfrom lib import freeze, change\nstate = 1\n"
    setup += "class Net:\n    pass\nnet = lib.wrap(Net())"
    code = sliced(setup, change)
    assert change.splitlines()[-1] in code


def test_cells_that_only_look_or_have_nothing_to_do_with_it_are_left_out() -> None:
    code = sliced("net = dict()\nother = 1", "make = 3", "print(net, len(net.layers))", names=("make",))
    assert code == "make = 3"
    assert "print" not in sliced("net = 1", "print(net, len(net.layers))", "for i in range(3):\n    print(i)")


def test_all_that_may_have_drawn_is_kept_even_without_a_call() -> None:
    cell = Cell("rows[0]\nb = a @ a\nprint(rows[1])\nprint(b)\nconstant = 4", drew=True)
    code = sliced("a = 1\nrows = [1]", cell, Cell("net = torch.randn(2)", drew=True))
    assert "rows[0]" in code and "b = a @ a" in code and "rows[1]" in code  # noqa: PT018
    assert "constant = 4" in code


SAVES = [
    "torch.save(net.state_dict(), 'exp1.pt')",
    "if rank == 0:\n    torch.save(net.state_dict(), 'exp1.pt')",
    "with open('net.json', 'w') as file:\n    json.dump(net.state_dict(), file)",
    "net.save_pretrained('here')",
    "frame.to_csv(net.path)",
    "if hvd.rank() == 0:\n    os.makedirs('out')\n    save_checkpoint(net)\n    print('saved')",
]


@pytest.mark.parametrize("save", SAVES)
def test_what_writes_files_is_left_out_and_named(save: str) -> None:
    made = "import torch, json, os\nfrom lib import Net, frame, save_checkpoint\nnet = Net()"
    assert sliced(made, save) == made
    cells = [Cell(made), Cell(save, drew=True), Cell("net.grow()", drew=True)]
    found = selected(cells, ["net"], 0, forgotten=False)
    assert found.left_out == (save,)
    assert found.definitions == f"{made}\n\nnet.grow()"
    inside = sliced(f"{made}\nfor i in range(3):\n    net.grow(i)\n" + textwrap.indent(save, "    "), "net.grow()")
    assert {ast.unparse(one) for one in ast.walk(ast.parse(inside))}.isdisjoint({save, ast.unparse(ast.parse(save))})
    assert "# not in the script: " in inside
    assert "net.grow()" in sliced(made, Cell(save, finished=False), "net.grow()")


def test_a_file_that_is_read_later_under_the_same_name_is_not_written_for_that() -> None:
    write = "with open('net.json', 'w') as file:\n    json.dump(net, file)"
    read = "with open('words.txt') as file:\n    words = file.read()\nnet = list(words)"
    assert "dump" not in sliced("import json\nnet = [1]", write, read)


def test_a_file_that_is_written_with_something_else_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"`torch\.save\(change\(net\), 'x'\)` writes a file"):
        sliced("import torch\nfrom lib import change\nnet = [1]", "torch.save(change(net), 'x')")


def test_an_earlier_object_of_that_name_is_not_kept_for_what_only_calls_torch_or_horovod() -> None:
    first = "net = First()\nhvd.barrier()\nhvd.rank()\ntorch.save(net.state_dict(), 'x')"
    found = selected([Cell(first), Cell("net = list()")], ["net"], 0, forgotten=False)
    assert (found.definitions, found.uses) == ("net = list()", frozenset())


def test_what_functions_set_of_the_process_is_kept() -> None:
    code = sliced("import torch\ndef prepare():\n    torch.set_default_dtype(torch.float64)", "prepare()", "net = [1]")
    assert "prepare()\n" in code
    assert "prepare" not in sliced("def prepare():\n    return torch.empty(3)", "prepare()", "net = [1]")


def test_settings_of_cells_that_failed_do_not_matter_where_they_were_made_again() -> None:
    failed = Cell("torch.set_default_dtype(torch.float64)\nnet = Lsit()", finished=False)
    again = "torch.set_default_dtype(torch.float64)\nnet = list()"
    assert sliced(failed, again) == again
    with pytest.raises(WorkloadError, match=r"Whether `torch\.set_default_dtype.*` holds.*in a cell that failed"):
        sliced(failed, "net = list()", again.partition("\n")[0])
    seeded = Cell("torch.manual_seed(0)\nnet = Lsit()", finished=False, drew=True)
    assert "Lsit" not in sliced(seeded, Cell(seed=3), Cell("torch.manual_seed(0)\nnet = list()", drew=True))
    assert sliced(Cell("torch.set_printoptions(precision=2)", everywhere=False), "net = [1]") == "net = [1]"


def test_lines_of_ipython_that_show_something_are_left_out_and_others_refused() -> None:
    shown = "get_ipython().run_line_magic('matplotlib', 'inline')\nget_ipython().system('ls')\ndisplay(3)"
    profiled = "get_ipython().run_line_magic('prun', 'x = 3')"
    made = Cell("net = torch.randn(3)", drew=True)
    lines = sliced(Cell(f"{shown}\nx = 1", drew=True), made).splitlines()
    assert [line for line in lines if line and not line.startswith("# not in the script: ")] == [
        "display(3)",
        "x = 1",
        "net = torch.randn(3)",
    ]
    assert selected([Cell(f"{shown}\nx = 1", drew=True), made], ["net"], 0, False).uses == {"display", "torch"}
    assert selected([Cell(profiled), made], ["net"], 0, forgotten=False).left_out == (profiled,)
    with pytest.raises(WorkloadError, match=r"IPython's own.*%hvd_seed"):
        sliced(Cell(profiled, drew=True), made)


def test_definitions_that_may_not_happen_do_not_end_the_search() -> None:
    assert sliced("net = 1", "net: int").startswith("net = 1")
    code = sliced("net = 1", "with open('x') as file:\n    net = 2")
    assert code.startswith("net = 1\n\nwith")
    assert sliced("with open('x') as file:\n    net = 2")


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            (Cell("x = torch.randn(2)\n1 / 0", finished=False, drew=True), Cell("net = [1]", drew=True)),
            "failed drew random",
        ),
        ((Cell("rand()", everywhere=False, drew=True), Cell("net = [1]", drew=True)), "some ranks only drew random"),
        ((Cell(opaque=True, drew=True), Cell("net = [1]", drew=True)), r"session\.run brought.*%hvd_seed"),
        ((Cell("net = []"), Cell("net.append(1)\n1 / 0", finished=False)), "What net is.*failed"),
        (
            (Cell("net = []"), Cell("part = net", everywhere=True), Cell("part.append(1)", everywhere=False)),
            "some ranks",
        ),
        ((Cell("from a import *"), Cell("net = thing()")), r"needs thing.*imports \*"),
    ],
)
def test_what_cannot_be_made_again_is_refused(cells: tuple[Cell, ...], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        sliced(*cells)


def test_cells_that_failed_and_touched_nothing_do_not_matter() -> None:
    assert (
        sliced("net = 1", Cell("print(nett)", finished=False), Cell("other = 2", everywhere=False)) == "\nnet = 1"[1:]
    )
    assert sliced("net = 1", Cell("net = 2", finished=False), "net = 3") == "net = 3"
    made = "import lib\nnet = lib.made()"
    assert sliced(made, "net.grow()", Cell("net.gro()", finished=False), made) == made
    assert sliced(
        Cell("rand()", finished=False, drew=True), Cell(seed=3), Cell("net = dict()\nr = [1]", drew=True), names=("r",)
    )


def test_what_some_ranks_did_to_an_object_of_that_name_before_it_was_made_anew_does_not_matter() -> None:
    earlier = Cell("optimizer.groups[0]['lr'] = 0.5", everywhere=False)
    assert "0.5" not in sliced("optimizer = list()", earlier, "optimizer = dict()", names=("optimizer",))
    with pytest.raises(WorkloadError, match="some ranks only"):
        sliced("optimizer = dict()", earlier, names=("optimizer",))


LOOPED = "net = nn.Linear(4, 2)\nfor p in net.parameters():\n    p.requires_grad_(False)\n"


def test_a_loop_over_an_object_has_nothing_to_do_with_one_over_an_earlier_object() -> None:
    script = sliced("from torch import nn", Cell(f"{LOOPED}boom", finished=False), LOOPED)
    assert script.count("net = nn.Linear(4, 2)") == 1
    assert "boom" not in script
    assert "requires_grad_(False)" in script
    with pytest.raises(WorkloadError, match="What net is cannot be told"):
        sliced("from torch import nn", Cell(f"{LOOPED}boom", finished=False), "net.eval()")


def test_what_a_loop_leaves_under_its_name_is_followed() -> None:
    cells = ("from torch import nn\nnet = nn.Linear(4, 2)", "for p in net.parameters():\n    pass", "p.zero_()")
    assert "p.zero_()" in sliced(*cells)


def test_every_import_of_a_part_of_a_package_is_kept() -> None:
    cells = ("import os.path\nimport os.abc", "import os\nnet = os.path.sep")
    assert sliced(*cells) == "\n\n".join(cells)
    assert sliced("import os", "import os\nnet = os.sep") == "import os\nnet = os.sep"


def test_a_path_that_is_put_together_sets_nothing() -> None:
    assert settings_in([Cell("import os, sys"), Cell('where = os.path.join("a", "b")')]) == []
    assert settings_in([Cell("import os, sys"), Cell('sys.path.insert(0, "a")')]) == ["sys.path.insert(0, 'a')"]


@pytest.mark.parametrize("cell", [Cell("freeze()", finished=False), Cell("freeze()", everywhere=False)])
def test_a_function_that_may_have_changed_what_is_global_is_not_passed_over(cell: Cell) -> None:
    made = [Cell("net = list()"), Cell("def freeze():\n    net.append(1)")]
    with pytest.raises(WorkloadError, match="What freeze is cannot be told"):
        selected([*made, cell], ["net"], 0, False)


def test_annotations_that_are_not_evaluated_are_refused_because_other_cells_would_be_read_so_too() -> None:
    lazy = "from __future__ import annotations\nimport os\ndef make(x: Later): return [x]"
    with pytest.raises(WorkloadError, match=r"`from __future__ import annotations` is in a cell that the script needs"):
        sliced(lazy, "net = make(1)")
    assert sliced(lazy, "net = [1]") == "net = [1]"


@pytest.mark.parametrize("call", ["set_attention('slow')", "speed.set_attention('slow')", "speed.attention = 'slow'"])
def test_what_is_set_of_a_package_by_a_name_that_nothing_else_uses_is_kept(call: str) -> None:
    imported = "from lib import Net\nfrom lib.speed import set_attention\nfrom lib import speed"
    assert call in sliced(imported, call, "net = Net()")
    with pytest.raises(WorkloadError, match="cannot be told"):
        sliced(imported, Cell(call, finished=False), "net = Net()")


def test_imports_that_nothing_uses_are_kept_because_they_may_register_something() -> None:
    made = "import timm\nnet = timm.make('mine')"
    assert sliced("import json", made, "import my_models, my_layers as layers") == (
        f"{made}\n\nimport my_models, my_layers as layers"
    )


@pytest.mark.parametrize(
    ("cells", "name"),
    [
        (("net = wrap(net)",), "net"),
        (("lr = 0.1 * scale\nscale = 224\nnet = [lr, scale]",), "scale"),
        (("steps += 1", "net = [steps]", "steps = 0"), "steps"),
        (("net = [lr]", "lr = lr / 2", "lr = 3\ndef f(): return lr", "net.append(f)"), "lr"),
    ],
)
def test_a_name_that_is_used_before_its_first_definition_is_missing(cells: tuple[str, ...], name: str) -> None:
    with pytest.raises(WorkloadError, match=f"needs {name}, and cannot define it"):
        sliced("def wrap(x): return x", *cells)


def test_an_offered_name_that_is_used_before_a_cell_defines_it_is_said_to_be_used() -> None:
    found = selected([Cell("lr = 0.1 * size\nsize = 224\nnet = [lr, size]")], ["net"], 0, False)
    assert found.uses == {"size"}
    assert selected([Cell("size = 224\nnet = [0.1 * size]")], ["net"], 0, False).uses == frozenset()


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    net = 1\n    net = [net]\nexcept ValueError:\n    pass",
        "a = 1; net = [a]",
        "for i in range(3):\n    net = [i]",
        "net = [y := 3, y]",
        "class Net:\n    def make(self) -> 'Net': return Net()\n    other = 3\n    more = other\nnet = Net()",
        "f = lambda: late\nlate = 3\nnet = [f()]",
        "import functools\n@functools.cache\ndef f(): return later()\ndef later(): return 1\nnet = [f()]",
        "with open('/dev/null') as file:\n    text = file.read()\n    net = [text]",
    ],
)
def test_names_that_a_statement_defines_before_it_uses_them_are_not_missing(code: str) -> None:
    assert result(code)


SEEDING = "import torch, random\ndef set_seed(seed):\n    random.seed(seed)\n    torch.manual_seed(seed)"


def test_helpers_that_only_seed_are_no_settings() -> None:
    assert settings_in([Cell(SEEDING), Cell("set_seed(3)")]) == []
    assert settings_in([Cell("from transformers import set_seed\nset_seed(3)\nimport lib\nlib.seed_all(3)")]) == []
    assert "set_seed(3)" in sliced(SEEDING, "set_seed(3)", "net = [torch.randn(2)]")
    more = SEEDING + "\n    torch.use_deterministic_algorithms(True)"
    assert settings_in([Cell(more), Cell("set_seed(3)")]) == ["set_seed(3)"]
    failed = Cell("set_seed(3)\n1 / 0", finished=False)
    assert sliced(SEEDING, failed, "net = [torch]").endswith("net = [torch]")


def test_what_a_helper_sets_of_the_process_is_a_setting() -> None:
    helper = "import torch\ndef prepare():\n    torch.set_default_dtype(torch.float64)"
    assert settings_in([Cell(helper), Cell("prepare()")]) == ["prepare()"]


def test_an_import_of_everything_is_refused_where_it_may_have_replaced_what_is_needed() -> None:
    made, star = "def width(): return 3", "from layers import *"
    with pytest.raises(WorkloadError, match=r"What width is cannot be told.*`from layers import \*`.*by its name"):
        sliced(made, star, "net = [width()]")
    with pytest.raises(WorkloadError, match=r"cannot be told.*`from layers import \*`.*by its name"):
        sliced(f"{made}\n{star}\nnet = [width()]")
    with pytest.raises(WorkloadError, match=r"What width is cannot be told"):
        sliced(made, Cell(f"{star}\n1 / 0", finished=False), "net = [width()]")
    assert star not in sliced(star, made, "net = [width(), torch]")
    assert star not in sliced(made, "net = [width()]", star, "net = list()")


def test_files_that_are_not_written_are_named_whatever_was_in_them() -> None:
    saves = ["tokens.to_csv('a.csv')", "with open('a', 'w') as file:\n    json.dump(change(tokens), file)"]
    cells = [Cell("import json\nfrom lib import change\ntokens = [1]"), *map(Cell, saves), Cell("net = [2]")]
    found = selected(cells, ["net"], 0, False)
    assert found.left_out == tuple(saves)
    assert "dump" not in found.definitions


def test_an_import_of_everything_of_pythons_own_replaces_what_it_has() -> None:
    made = "from torch import nn\ndef width(): return 3"
    assert "typing" not in sliced(made, "from typing import *\nfrom math import *", "net = [nn, width()]")
    assert result("def sqrt(x): return x", "from math import *", "net = sqrt(4)") == 2


def test_a_module_of_pythons_own_that_is_not_here_may_bring_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tkinter", None)
    with pytest.raises(WorkloadError, match="What width is cannot be told"):
        sliced("def width(): return 3", "from tkinter import *", "net = [width()]")


def test_what_a_kept_cell_deletes_is_there() -> None:
    assert result("net = [5]", "box = {'n': net}", "del box") == [5]


@pytest.mark.parametrize(
    "change", ["Net.width = 8", "Net.kinds.append(1)", "k = Net\nk.width = 8", "(lambda: net.append(1))()"]
)
def test_what_some_ranks_changed_of_a_class_or_by_a_lambda_is_refused(change: str) -> None:
    made = "class Net(list):\n    kinds = []\n    def collate(self): pass\nnet = Net()"
    with pytest.raises(WorkloadError, match="cannot be told"):
        sliced(made, Cell(change, everywhere=False))
    assert sliced(made, Cell("rows = dict(fn=Net)\n1 / 0", finished=False)) == made
