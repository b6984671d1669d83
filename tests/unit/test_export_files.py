"""Files that cells fetch, unpack and write, and a script does not: it may read them, so they are named."""

from __future__ import annotations

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from gpumem_nb.export.order import Source
from gpumem_nb.export.selecting import selected
from gpumem_nb.kernel.questions.exporting import _of_statements
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.questions import Cell

BEGIN = (
    "import os, shutil, subprocess, tarfile, urllib.request, zipfile\nimport subprocess as sp\nfrom os import system\n"
    "from urllib.request import urlretrieve as fetch\nfrom torchvision import datasets\nu = 'https://a.b/d.csv'\n"
    "from torchvision.datasets.utils import download_url\nfrom huggingface_hub import snapshot_download"
)
MADE = "from lib import read\nnet = read('d.csv')"


def found(*cells: Cell | str) -> Source:
    to_plain = TransformerManager().transform_cell
    whole = [Cell(to_plain(one).rstrip()) if isinstance(one, str) else one for one in (BEGIN, *cells, MADE)]
    return selected(whole, ["net"], 0, forgotten=False)


@pytest.mark.parametrize(
    "cell",
    [
        "urllib.request.urlretrieve(u, 'd.csv')",
        "fetch(u, 'd.csv')",
        "path, _ = fetch(u)",
        "if not os.path.exists('d.csv'):\n    fetch(u, 'd.csv')",
        "with zipfile.ZipFile('d.zip') as z:\n    z.extractall('data')",
        "tarfile.open('d.tar.gz', 'r:gz').extractall()",
        "subprocess.run(['wget', u])",
        "sp.check_call(f'wget {u}', shell=True)",
        "system('wget -q https://a.b/d.csv > /dev/null 2>&1')",
        "os.system('cd data && unzip d.zip')",
        "download_url(u, '.')",
        "shutil.unpack_archive('d.zip')",
        "shutil.copy('a', 'd.csv')",
        "folder = snapshot_download('a/b')",
        "for train in (True, False):\n    datasets.MNIST('.', train=train, download=True)",
        "with open('input.txt', 'w') as f:\n    f.write('a b')",
        "f = open('input.txt', mode='wb')",
        "from pathlib import Path\nPath('d.csv').open('x').write('1')",
        "def get(): more()\ndef more(): fetch(u, 'd.csv')\nget()",
        "!wget https://a.b/d.csv",
        "!echo 1 > d.csv",
        "lines = !tar -xvf d.tar",
        "%%bash\nls\ncurl -O https://a.b/d.csv",
        "%%writefile layers.py\nwidth = 3",
    ],
)
def test_what_made_files_is_named_where_a_script_does_not_do_it(cell: str) -> None:
    kept = found(cell)
    assert kept.definitions == f"{BEGIN}\n\n{MADE}"
    [text] = kept.left_out
    assert TransformerManager().transform_cell(cell).rstrip().endswith(text)
    partly = Cell(TransformerManager().transform_cell(cell), everywhere=False)
    assert found(partly).left_out == (text,)
    assert found(Cell(partly.source, finished=False)).left_out == ()


@pytest.mark.parametrize(
    "cell",
    [
        "with open('d.csv') as f:\n    print(f.read())",
        "rows = open('d.csv', 'r').read()",
        "subprocess.run(['nvidia-smi'])",
        "os.system('ls -l; pwd')",
        "!nvidia-smi | head -n 3",
        "!pip install -q a > /dev/null 2>&1",
        "%%bash\n# What is here.\nls | wc -l",
        "test = datasets.MNIST('.', train=False, download=True)",
        "def get(): fetch(u, 'd.csv')",
        "class Rows:\n    def get(self): fetch(u, 'd.csv')\nrows = Rows()",
        "other = [u.replace('w', 'a'), len('download')]",
    ],
)
def test_what_makes_no_files_is_not_named(cell: str) -> None:
    assert found(cell).left_out == ()


def test_a_file_that_is_made_for_what_is_needed_is_made_in_the_script() -> None:
    kept = selected([Cell(BEGIN), Cell("path, _ = fetch(u)\nnet = open(path)")], ["net"], 0, forgotten=False)
    assert "fetch(u)" in kept.definitions
    assert kept.left_out == ()


def test_the_answer_says_that_such_files_must_be_there() -> None:
    [told] = _of_statements(Source("cells", left_out=("os.system(\n'wget a')",)))
    assert told.startswith("`os.system( …`: ")
    assert "makes no files of yours again (what it reads must be there)" in told


SAVE = "import torch\ndef save_best(net, path):\n    state = {'net': net.state_dict()}\n    "
FETCH = "def download_rows():\n    global rows\n    rows = [2]"


def test_functions_of_cells_that_do_more_than_their_names_say_are_not_left_out() -> None:
    made = "net = torch.nn.Linear(2, 2)"
    plain = SAVE + "torch.save(state, path)"
    found = selected([Cell(plain), Cell(made), Cell("save_best(net, 'x')")], ["net"], 0, forgotten=False)
    assert found.left_out == ("save_best(net, 'x')",)
    for more in ("net.requires_grad_(False)", "net.head = None", "change(net)"):
        cells = [Cell(f"def change(net): net.eval()\n{SAVE}{more}"), Cell(made), Cell("save_best(net, 'x')")]
        with pytest.raises(
            WorkloadError, match="writes a file, which a script shall not do again, and calls something"
        ):
            selected(cells, ["net"], 0, forgotten=False)
    fetch = "import os, requests\ndef download(path):\n    if not os.path.exists(path):\n        "
    fetch += "open(path, 'wb').write(requests.get('u').content)"
    found = selected([Cell(fetch), Cell("download('x')"), Cell("net = open('x')")], ["net"], 0, forgotten=False)
    assert (found.definitions, found.left_out) == ("net = open('x')", ("download('x')",))
    cells = [Cell("rows = [1]"), Cell(FETCH), Cell("download_rows()")]
    assert selected(cells, ["rows"], 0, forgotten=False).definitions.endswith("\n\ndownload_rows()")


@pytest.mark.parametrize(
    "change",
    [
        "with open('log', 'w') as file:\n    net.freeze()",
        "with open('log', 'w') as file:\n    file.write(str(net.rows.pop()))",
        "open('log', 'w').write(str(measured(net)))",
        "net = save_and_load(net)",
    ],
)
def test_what_is_done_beside_writing_a_file_is_not_left_out(change: str) -> None:
    begin = "from lib import made, save_and_load\ndef measured(net): return net.eval()\nnet = made()"
    with pytest.raises(WorkloadError, match="writes a file, which a script shall not do again"):
        selected([Cell(begin), Cell(change)], ["net"], 0, forgotten=False)
    assert "log" not in selected([Cell(begin), Cell(change), Cell("net = made()")], ["net"], 0, False).definitions


def test_what_only_counts_may_be_written_to_a_file() -> None:
    begin = (
        "class Net(list):\n    def about(self): return len(self)\ndef count(net): return net.about() + 1\nnet = Net()"
    )
    for write in ("with open('log', 'w') as file:\n    file.write(f'{count(net)} {net.about()}')", "save(count(net))"):
        found = selected([Cell(begin), Cell(write)], ["net"], 0, forgotten=False)
        assert (found.definitions, found.left_out) == (begin, (write,))


@pytest.mark.parametrize(
    ("imports", "call"),
    [("import torch", "torch.save"), ("import torch as t", "t.save"), ("from torch import save as keep", "keep")],
)
def test_functions_of_cells_save_nothing_in_a_script_whatever_they_call_it(imports: str, call: str) -> None:
    cell = Cell(f"{imports}\nnet = [1]\ndef grow():\n    net.append(2)\n    {call}(net, 'best.pt')\ngrow()")
    assert selected([cell], ["net"], 0, forgotten=False).saves


@pytest.mark.parametrize(
    "cells",
    [
        ("import io, json", "held = io.StringIO()", "json.dump([1, 2], held)", "net = held.getvalue()"),
        ("import pickle\nfrom io import BytesIO\nheld = BytesIO()\npickle.dump(3, file=held)", "net = held.tell()"),
        ("import io, pickle\nwith io.BytesIO() as held:\n    pickle.dump(3, held)\n    net = held.tell()",),
        ("import io, torch\nheld = io.BytesIO()", "torch.save([3], held)", "held.seek(0)\nnet = torch.load(held)"),
    ],
)
def test_what_is_written_to_memory_is_no_file(cells: tuple[str, ...]) -> None:
    code = selected([*map(Cell, cells)], ["net"], 0, forgotten=False).definitions
    there: dict[str, object] = {}
    again: dict[str, object] = {}
    exec("\n".join(cells), there)
    exec(code, again)
    assert again["net"] == there["net"]


@pytest.mark.parametrize(
    ("made", "call"),
    [
        ("held = []\ndump = held.append", "dump(3)"),
        ("held = []\nsave = lambda one: held.append(one)", "save(3)"),
        ("class Held(list):\n    def save(self): super().append(3)\nheld = Held()", "held.save()"),
    ],
)
def test_what_is_called_as_if_it_wrote_files_and_does_something_else_is_not_left_out(made: str, call: str) -> None:
    with pytest.raises(WorkloadError, match="calls something that may change"):
        selected([Cell(made), Cell(call), Cell("net = held")], ["net"], 0, forgotten=False)
