"""A rank works and imports where the notebook does, and runs modules as they are on disk."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.engine.surroundings import Surrounded
from gpumem_nb.kernel.foreground import Followed
from gpumem_nb.shared.messages import Surroundings


@pytest.fixture(autouse=True)
def own_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Paths and finders that nobody else sees."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}
    yield
    for name in sys.modules.keys() - before:
        del sys.modules[name]


@pytest.fixture
def here() -> Surrounded:
    surrounded = Surrounded()
    surrounded.modules.watch()
    return surrounded


def write(path: Path, source: str) -> None:
    """Write a module so that its version differs, whatever the clock of the disk."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    while path.stat().st_mtime_ns == before:
        path.write_text(source)


def run(here: Surrounded, variables: dict[str, Any] | None = None, trained: tuple[object, ...] = ()) -> tuple[str, ...]:
    """What is said before the next code."""
    here.catch_up(variables or {}, trained)
    return here.said()


# Modules --------------------------------------------------------------------------------------------------------------


def test_an_edited_module_is_reloaded_and_said_once(here: Surrounded, tmp_path: Path) -> None:
    write(tmp_path / "of_mine.py", "def f(): return 1")
    module: Any = importlib.import_module("of_mine")
    assert run(here) == ()
    # The same size within the same second: bytecode of the old version would be taken for that of the new one.
    write(tmp_path / "of_mine.py", "def f(): return 2")
    assert run(here) == ("Reloaded, because files changed on disk: of_mine.",)
    assert module.f() == 2
    assert run(here) == ()


def test_a_module_edited_while_its_import_runs_is_seen(here: Surrounded, tmp_path: Path) -> None:
    write(tmp_path / "later.py", "x = 2")
    write(tmp_path / "now.py", f"x = 1\nimport os\nos.replace({str(tmp_path / 'later.py')!r}, __file__)")
    module: Any = importlib.import_module("now")
    assert module.x == 1
    run(here)
    assert module.x == 2


def test_modules_are_reloaded_after_what_they_import(here: Surrounded, tmp_path: Path) -> None:
    write(tmp_path / "package" / "__init__.py", "from .layers import size")
    write(tmp_path / "package" / "layers.py", "from .sizes import size")
    write(tmp_path / "package" / "sizes.py", "size = 1")
    write(tmp_path / "apart.py", "loaded = [0]\nloaded[0] += 1")
    importlib.import_module("package.sizes")  # before what imports it
    package: Any = importlib.import_module("package")
    apart: Any = importlib.import_module("apart")
    kept = apart.loaded
    write(tmp_path / "package" / "sizes.py", "size = 22")
    (note,) = run(here)
    assert note.startswith("Reloaded, because files changed on disk: package.sizes, package.layers, package.")
    assert package.size == package.layers.size == 22
    assert apart.loaded is kept, "nothing of it changed"


def test_a_module_that_cannot_be_reloaded_is_said_to_be_stale(here: Surrounded, tmp_path: Path) -> None:
    write(tmp_path / "of_mine.py", "x = 1")
    module: Any = importlib.import_module("of_mine")
    for wrong, why in (
        ("x = = 2", "SyntaxError"),
        ("x = 2\ndel y", "NameError"),
        ("x = 2\nraise SystemExit(2)", "SystemExit"),  # a script without a guard, say
    ):
        write(tmp_path / "of_mine.py", wrong)
        (note,) = run(here)
        assert note.startswith(f"of_mine changed on disk and could not be reloaded ({why}: ")
        assert note.endswith("so its code from before runs. Correct the file, and run this again.")
        assert module.x == 1
        assert run(here) == ()
    write(tmp_path / "of_mine.py", "x = 333")
    assert run(here) == ("Reloaded, because files changed on disk: of_mine.",)
    assert module.x == 333


def test_after_an_interrupt_all_that_imports_an_edited_module_is_reloaded(here: Surrounded, tmp_path: Path) -> None:
    write(tmp_path / "base.py", "x = 1")
    write(tmp_path / "between.py", "import os\nif os.path.exists('slow'): raise KeyboardInterrupt\nfrom base import x")
    write(tmp_path / "above.py", "from base import x")
    between, above = map(importlib.import_module, ("between", "above"))
    write(tmp_path / "base.py", "x = 2")
    (tmp_path / "slow").touch()
    with pytest.raises(KeyboardInterrupt):
        run(here)
    (tmp_path / "slow").unlink()
    assert run(here) == ("Reloaded, because files changed on disk: base, between, above.",)
    assert between.x == above.x == 2


def test_what_could_not_be_reloaded_before_an_interrupt_is_told_with_the_next_request(
    here: Surrounded, tmp_path: Path
) -> None:
    for name in ("wrong", "gone"):
        write(tmp_path / f"{name}.py", "x = 1")
        importlib.import_module(name)
    write(tmp_path / "slow.py", "import os\nif os.path.exists('now'): raise KeyboardInterrupt")
    importlib.import_module("slow")
    write(tmp_path / "wrong.py", "x = (")
    (tmp_path / "gone.py").unlink()
    write(tmp_path / "slow.py", (tmp_path / "slow.py").read_text())
    (tmp_path / "now").touch()
    with pytest.raises(KeyboardInterrupt):
        run(here)
    (tmp_path / "now").unlink()
    wrong, gone, slow = run(here)
    assert wrong.startswith("wrong changed on disk and could not be reloaded")
    assert gone.startswith("gone changed on disk and could not be reloaded")
    assert slow == "Reloaded, because files changed on disk: slow."
    assert run(here) == ()


def test_a_module_whose_file_is_gone_is_said_to_be_stale(here: Surrounded, tmp_path: Path) -> None:
    write(tmp_path / "of_mine.py", "x = 1")
    importlib.import_module("of_mine")
    (tmp_path / "of_mine.py").unlink()
    (note,) = run(here)
    assert "of_mine changed on disk and could not be reloaded" in note
    assert run(here) == ()


def test_what_was_made_of_the_code_from_before_is_named(here: Surrounded, tmp_path: Path) -> None:
    write(tmp_path / "of_mine.py", "class Net: pass\ndef f(): return 1")
    module: Any = importlib.import_module("of_mine")
    net = module.Net()
    variables = {"Net": module.Net, "net": net, "g": module.f, "of_mine": module, "_": net, "x": 5, "xs": [net]}
    write(tmp_path / "of_mine.py", "class Net: pass\ndef f(): return 22")
    loaded, trained = run(here, variables, trained=(object(), net))
    assert loaded.endswith(" Of the code from before, until the cells that made them run again: Net, net, g.")
    assert trained == (
        "What is trained was made before that: load it again, or run the cell that made it and attach it again."
    )


def test_a_reload_by_hand_counts(here: Surrounded, tmp_path: Path) -> None:
    write(tmp_path / "of_mine.py", "x = 1")
    module = importlib.import_module("of_mine")
    write(tmp_path / "of_mine.py", "x = 2")
    importlib.reload(module)
    assert run(here) == ()


def test_installed_modules_are_not_looked_at(here: Surrounded, tmp_path: Path) -> None:
    write(tmp_path / "site-packages" / "installed.py", "x = 1")
    sys.path.insert(0, str(tmp_path / "site-packages"))
    module: Any = importlib.import_module("installed")
    write(tmp_path / "site-packages" / "installed.py", "x = 22")
    assert run(here) == ()
    assert module.x == 1


# Paths and working directory ------------------------------------------------------------------------------------------


def test_a_rank_looks_for_modules_where_the_notebook_does_and_in_its_order(here: Surrounded, tmp_path: Path) -> None:
    of_rank = str(tmp_path / "of_rank")
    sys.path.append(of_rank)
    usual = [path for path in sys.path if os.path.exists(path)]
    for name in ("first", "last"):
        (tmp_path / name).mkdir()
    first, last = str(tmp_path / "first"), str(tmp_path / "last")
    here.follow(Surroundings(first, (first, *usual, last)))
    assert sys.path[0] == first
    assert sys.path.index(last) > sys.path.index(usual[-1])
    assert sys.path[-1] == of_rank or of_rank in sys.path
    assert os.getcwd() == first
    here.follow(Surroundings(first, tuple(usual)))
    assert first not in sys.path
    assert last not in sys.path
    assert of_rank in sys.path
    assert here.said() == ()


def test_a_folder_that_is_not_there_is_said_once(here: Surrounded, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    for _ in range(2):
        here.follow(Surroundings(gone, (gone, *filter(os.path.exists, sys.path))))
    assert here.said() == (f"The notebook works in {gone} or imports from it, and there is no such folder here.",)
    assert gone not in sys.path
    assert os.getcwd() == str(tmp_path)


def test_ranks_are_told_what_changed_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Surroundings] = []
    followed = Followed()
    followed.tell(sent.append)
    followed.tell(sent.append)
    assert len(sent) == 1
    (tmp_path / "more").mkdir()
    sys.path[:0] = ["more", str(tmp_path / "gone")]
    followed.tell(sent.append)
    assert sent[1].paths[0] == str(tmp_path / "more"), "as an absolute path, and without what is not there"
    assert str(tmp_path / "gone") not in sent[1].paths
    (tmp_path / "gone").mkdir()
    followed.tell(sent.append)
    followed.tell(sent.append)
    assert str(tmp_path / "gone") in sent[2].paths, "it is there by now"
    monkeypatch.chdir(tmp_path / "more")
    followed.tell(sent.append)
    assert sent[3].folder == str(tmp_path / "more")
    assert len(sent) == 4


def test_what_could_not_be_sent_is_sent_again() -> None:
    sent: list[Surroundings] = []
    followed = Followed()

    def fail(_: Surroundings) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        followed.tell(fail)
    followed.tell(sent.append)
    assert len(sent) == 1
