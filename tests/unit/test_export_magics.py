"""IPython's own lines in cells: code that is only timed or captured is read, other code is not."""

from __future__ import annotations

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from gpumem_nb.export.plain import without_timing
from gpumem_nb.export.selecting import selected, settings_in
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.questions import Cell


def cell(source: str, drew: bool = False) -> Cell:
    """As the ranks get it from a notebook."""
    return Cell(TransformerManager().transform_cell(source), drew=drew)


def sliced(*sources: str) -> str:
    found = selected([cell(source) for source in sources], ["net"], 0, forgotten=False)
    return found.definitions


@pytest.mark.parametrize(
    ("source", "plain"),
    [
        ("%time net = [1]", "net = [1]"),
        ("# Slow.\n%time net = [1]  # really", "# Slow.\nnet = [1]  # really"),
        ("é = 'é'\nnet = %time é + 'é'", "é = 'é'\nnet = é + 'é'"),
        ("if True:\n    %time a = 1; net = [a]", "if True:\n    a = 1; net = [a]"),
        ("%%time\n# Both.\na = 1\nnet = [a]", "# Both.\na = 1\nnet = [a]"),
        ("%%capture\nnet = [1]\nprint(net)", "net = [1]\nprint(net)"),
        ("%%capture out --no-stderr\nnet = [1]", "net = [1]"),
        ("%%time\n%%capture\nimport os\n%time net = [os]", "import os\nnet = [os]"),
    ],
)
def test_code_that_is_timed_or_captured_is_as_if_it_were_not(source: str, plain: str) -> None:
    assert sliced(source) == plain
    assert selected([cell(source)], ["net"], 0, forgotten=False).left_out == ()


def test_what_timed_code_draws_and_sets_counts() -> None:
    first, made = cell("%%time\nrows = torch.randn(3)", drew=True), cell("net = torch.randn(3)", drew=True)
    assert "rows = torch.randn(3)" in selected([first, made], ["net"], 0, forgotten=False).definitions
    setting = "torch.set_default_dtype(torch.float64)"
    assert settings_in([cell(f"%%time\n{setting}")]) == [setting]


@pytest.mark.parametrize(
    "source", ["net = %time a = 1", "%time --no-raise-error f()", "%%time\n1 +", "%%timeit\nf()", "f('%time x')"]
)
def test_what_cannot_be_read_stays(source: str) -> None:
    text = cell(source).source
    assert without_timing(text) == text


@pytest.mark.parametrize(
    ("source", "magic"),
    [
        ("%prun -q net = [1]", "%prun"),
        ("%%prun\na, net = 1, 2", "%%prun"),
        ("%memit class net: pass", "%memit"),
        ("%timeit net = [1]", "%timeit"),
    ],
)
def test_a_name_that_other_lines_define_is_said_to_be_in_them(source: str, magic: str) -> None:
    with pytest.raises(WorkloadError, match=f"needs net.*: code under {magic} does, .*without {magic}"):
        sliced(source)


def test_a_name_that_such_lines_only_use_is_not_said_to_be_in_them() -> None:
    with pytest.raises(WorkloadError, match="no %%hvd cell that succeeded"):
        sliced("%timeit f(net, a=1)\n%prun a = net")


def test_cells_under_a_magic_that_runs_them_are_named_and_refused_where_they_drew() -> None:
    timed = "%%timeit\nrows = torch.randn(3)"
    made = cell("net = torch.randn(3)", drew=True)
    assert selected([cell(timed), made], ["net"], 0, forgotten=False).left_out == (cell(timed).source.rstrip(),)
    with pytest.raises(WorkloadError, match=r"IPython's own.*%hvd_seed"):
        selected([cell(timed, drew=True), made], ["net"], 0, forgotten=False)
    shell = cell("%%bash\nls", drew=True)
    assert selected([shell, made], ["net"], 0, forgotten=False).definitions == "net = torch.randn(3)"
