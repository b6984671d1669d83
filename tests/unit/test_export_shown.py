"""What notebooks plot and count on the way is not in their script, unless it changes something."""

from __future__ import annotations

import pytest

from gpumem_nb.export.selecting import selected
from gpumem_nb.shared.questions import Cell

BEGIN = (
    "import matplotlib.pyplot as plt\nimport seaborn as sns",
    "def load(): return [1]\ndef change(x): x.clear()",
    "rows = load()",
    "class Net:\n    def __init__(self, rows): self.rows = rows",
    "net = Net(rows)",
    "losses = [3]",
)


def sliced(*cells: str | Cell) -> str:
    """The script of a ``net`` that ``rows`` are part of."""
    whole = [Cell(one) if isinstance(one, str) else one for one in (*BEGIN, *cells)]
    found = selected(whole, ("net", "rows"), 0, forgotten=False)
    return found.definitions


@pytest.mark.parametrize(
    "cell",
    [
        "plt.imshow(rows[0][0].permute(1, 2, 0).cpu())\nplt.title(rows[0][1])\nplt.show()",
        "fig, ax = plt.subplots(2)\nax[0].plot(losses)\nax[0].set_title(len(rows))\nfig.savefig('a.png')",
        "for i in range(3):\n    plt.subplot(1, 3, i)\n    img, y = rows[i]\n    plt.imshow(img.squeeze())",
        "with plt.style.context('ggplot'):\n    plt.hist([len(one) for one in [rows, net.rows]])",
        "sns.heatmap(net.weight.detach().numpy())",
        "sum(p.numel() for p in net.parameters())",
        "params = sum(p.numel() for p in net.parameters() if p.requires_grad)\nprint(f'{params:,}')",
        "rows[0][0].shape, len(rows), rows[0][1].item()",
        "for name, p in net.named_parameters():\n    print(name, p.size())",
    ],
)
def test_what_only_plots_or_counts_is_not_in_a_script(cell: str) -> None:
    assert sliced(cell) == sliced()


@pytest.mark.parametrize(
    "cell",
    [
        "net.float()",
        "list(rows)",
        "for row in rows:\n    print(row)",
        "params = [p.requires_grad_(False) for p in net.parameters()]",
        "for p in net.parameters():\n    p.data = p.data + 1",
        "for p in net.parameters():\n    p += 1",
        "plt.imshow(change(rows))",
        "plt.plot(rows.pop())",
        "fig = rows\nfig.draw()",
        "plt = net\nplt.draw()",
        "rows = sns.load_dataset('a')\nrows.dropna(inplace=True)",
        "rows = plt.imread('a.png')\nrows[0] = 1",
        "rows, edges, _ = plt.hist(rows)\nrows[rows == 0] = 1",
        "p = sns.lineplot(rows)\nfor p in net.parameters():\n    p.clear()",
        "def sum(x): x.clear()\nsum(p for p in net.parameters())",
        Cell("plt.imshow(rows[0])", drew=True),
    ],
)
def test_what_may_change_something_or_draws_is_in_a_script(cell: str | Cell) -> None:
    drawn = Cell("net.draw()", drew=True) if isinstance(cell, Cell) else ""
    text = cell.source if isinstance(cell, Cell) else cell
    assert text.splitlines()[-1] in sliced(cell, drawn or "pass")


NET = "class Net:\n    def __init__(self, rows): self.rows = rows\n"
UNSEEN = {
    "@property\n    def part(self): return self.rows.pop()": "net.part[0]",
    "part = property(lambda self: self.rows.pop())": "hasattr(net, 'part')",
    "def _take(self): return next(self.rows)\n    part = property(_take)": "print(net.part)",
    "def take(self): self.rows.pop()\n    @property\n    def part(self): return self.take()": "print(f'{net.part}')",
    "@cached_property\n    def part(self): return len(self.rows)": "net.part",
    "def __add__(self, other):\n        self.rows += [other]\n        return self": "net + 1",
    "def __repr__(self): return f'{self.rows.pop()}'": "print(net)",
    "def __getattr__(self, name):\n        self.seen[name] = 1": "net.width",
    "def __getitem__(self, i): return self.random.normal()": "print(net[0])",
    "def __bool__(self): return bool(self.rows.pop())": "not net",
    "def parameters(self):\n        self.rows.clear()\n        return []": "sum(p.numel() for p in net.parameters())",
}


@pytest.mark.parametrize("method", UNSEEN)
def test_what_methods_change_that_python_calls_by_itself_is_in_a_script(method: str) -> None:
    begin = "from functools import cached_property"
    assert UNSEEN[method] in sliced(begin, f"{NET}    {method}", "net = Net(rows)", UNSEEN[method])


@pytest.mark.parametrize("cell", ["print(net[0])", "net.part", "print(len(net), net)", "net == 3"])
def test_methods_that_change_nothing_do_not_keep_what_uses_them(cell: str) -> None:
    methods = (
        "    def __len__(self): return len(self.rows)\n    def __repr__(self): return f'{self.rows}'\n"
        "    def __getitem__(self, i): return self.transform(self.rows[i])\n"
        "    @property\n    def part(self): return 1"
    )
    made = (NET + methods, "net = Net(rows)")
    assert sliced(*made, cell) == sliced(*made)


@pytest.mark.parametrize(
    ("made", "look"),
    [
        ("from collections import defaultdict\nids = defaultdict(lambda: len(ids))", "print(ids['the'])"),
        ("import collections\nids = collections.defaultdict(list)", "ids['the']"),
        ("from collections import defaultdict as filled\nids = filled(list)", "for one in range(3): print(ids[one])"),
        ("ids = iter([3, 4, 5])", "print([one for one in ids])"),
        ("ids = iter([3, 4, 5])", "[one for one in ids][:2]"),
        ("ids = iter([3, 4, 5])", "print(4 in ids)"),
        ("ids = iter([3, 4, 5])", "if 4 not in ids: print(4)"),
    ],
)
def test_a_look_that_uses_up_or_fills_what_it_reads_is_kept(made: str, look: str) -> None:
    names: dict[str, list[int]] = {}
    cells = [made, look, "net = list(ids)"]
    exec("\n".join(cells), names)
    found = selected([*map(Cell, cells)], ("net",), 0, forgotten=False)
    again: dict[str, list[int]] = {}
    exec(found.definitions, again)
    assert again["net"] == names["net"]
    plain = "ids = {'the': 3}"
    assert "print" not in selected([*map(Cell, (plain, "print(ids['the'])", cells[2]))], ("net",), 0, False).definitions
