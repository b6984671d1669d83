"""What magics show in a narrow notebook: no word is broken, and no command."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from .lab import Lab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

CELLS = """
import gpumem_nb
from gpumem_nb.report.tables import Table
from gpumem_nb.report.written import SnapshotRow, Snapshots
from gpumem_nb.ui.cells import say
from IPython.display import HTML
from pathlib import Path
import time
rows = (SnapshotRow(Path("/home/somebody/.cache/gpumem_nb/snapshots/a-folder/001-000001200.state"), "text-gpt", 1200, 2,
                    time.time() - 7200, True, "01_quickstart.ipynb", True),)
display(Snapshots(rows))
print("Plain text.")
say("Kept from before: checkpointing=blocks batch_size=8 accumulation_steps=2 (back with: %hvd_set checkpointing=none "
    "batch_size=32 accumulation_steps=1 precision=fp32). Everything else is unchanged.")
display(gpumem_nb.check())
say("Type %hvd_set checkpointing=blocks loss_head=chunked batch_size=256 accumulation_steps=4 shard_optimizer=on "
    "fusion_threshold_mib=4 optimizer=adamw8bit precision=bf16 num_workers=2 lr_schedule=cosine")
flips = [(f"ckpt none, batch {n}, accum 1, foreach", "best", f"{n} ± 29", "48.0 MiB", "yes", str(n)) for n in (8, 16)]
headings = ("flip", "", "samples/s", "reserved", "fits", "turns")
display(HTML(Table("Tuning", headings, tuple(flips), frozenset({"flip", "", "fits"})).html()))
"""
# Of each word in the outputs: how many lines it stands on; of each command that a line has room for, too.
BROKEN = """() => {
    const broken = [], lines = range => new Set([...range.getClientRects()].filter(one => one.width > 0.5)
        .map(one => Math.round(one.top))).size;
    const widthOnOneLine = code => {
        const before = code.style.cssText;
        code.style.whiteSpace = 'nowrap'; code.style.maxWidth = 'none';
        const width = code.getBoundingClientRect().width;
        code.style.cssText = before;
        return width;
    };
    for (const output of document.querySelectorAll('.jp-OutputArea-output')) {
        const texts = document.createTreeWalker(output, NodeFilter.SHOW_TEXT);
        for (let text; text = texts.nextNode();)
            for (const word of text.textContent.matchAll(/\\S+/g)) {
                const range = document.createRange();
                range.setStart(text, word.index); range.setEnd(text, word.index + word[0].length);
                const pieces = word[0].split('-').length;  // a hyphen may end a line
                if (lines(range) > (/[=%/]/.test(word[0]) ? 1 : pieces)) broken.push(word[0]);
            }
        for (const code of output.querySelectorAll('code')) {
            const range = document.createRange();
            range.selectNodeContents(code);
            if (lines(range) === 1 && !code.closest('table') &&
                code.getBoundingClientRect().right > output.getBoundingClientRect().right + 1)
                broken.push(`out of sight: ${code.textContent}`);
            if (lines(range) > 1 && code.parentElement.clientWidth > widthOnOneLine(code))
                broken.push(code.textContent);
        }
    }
    return broken;
}"""


@pytest.fixture(scope="module")
def notebook(lab: Lab, chrome: Browser) -> Iterator[Notebook]:
    errors = ["%load_ext gpumem_nb\n%hvd_set batch_size=16", "gpumem_nb.Settings(checkpointing='block')"]
    lab.write("narrow.ipynb", [CELLS, *errors])
    notebook = lab.open(chrome, "narrow.ipynb", width=1366, height=768)
    notebook.run(0)
    notebook.page.locator(".jp-OutputArea-output table").nth(1).wait_for()
    notebook.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for cell in (1, 2):
        notebook.run(cell)
    yield notebook
    notebook.close()


@pytest.mark.parametrize("width", [480, 700, 1366])
def test_words_and_commands_stay_whole(notebook: Notebook, width: int) -> None:
    page = notebook.page
    page.add_style_tag(content=f".jp-NotebookPanel-notebook {{ width: {width}px !important }}")
    page.wait_for_function(
        "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
    )
    assert page.locator(".jp-OutputArea-output code").count() > 3
    assert page.evaluate(BROKEN) == []


def test_words_stand_below_plain_text_as_it_does(notebook: Notebook) -> None:
    looks = [
        notebook.page.locator(".jp-OutputArea-output pre", has_text=words).first.evaluate(
            "pre => { const range = document.createRange(); range.selectNodeContents(pre);"
            " const { fontSize, lineHeight } = getComputedStyle(pre);"
            " return [range.getClientRects()[0].left, fontSize, lineHeight]; }"
        )
        for words in ("Plain text.", "Kept from before")
    ]
    assert looks[0] == looks[1]


def test_a_row_beside_many_columns_takes_few_lines(notebook: Notebook) -> None:
    notebook.page.add_style_tag(content=".jp-NotebookPanel-notebook { width: 480px !important }")
    row = notebook.page.locator(".jp-OutputArea-output tr", has_text="ckpt none, batch 16")
    taken = row.evaluate("row => row.getBoundingClientRect().height / parseFloat(getComputedStyle(row).fontSize)")
    assert taken < 5, "three lines of text at most"


@pytest.mark.parametrize("press", ["mouse", "Enter"])
def test_an_error_is_told_once_and_a_press_on_its_command_copies_it(notebook: Notebook, press: str) -> None:
    cell = notebook.page.locator(".jp-Notebook .jp-CodeCell").nth(1)
    said = cell.locator(".jp-OutputArea").inner_text()
    assert said.count("No ranks are running") == 1
    assert said.rstrip().endswith("InvalidInput")
    notebook.page.evaluate("navigator.clipboard.writeText('of before')")
    command = cell.locator("code", has_text="%hvd_start").first
    if press == "mouse":
        command.click()
    else:
        command.press(press)
    assert notebook.page.evaluate("navigator.clipboard.readText()") == "%hvd_start 4"
