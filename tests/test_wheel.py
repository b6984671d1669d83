"""The package as others get it: an sdist in which make works; a wheel, installed and imported outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.install.run import copy_checkout, files_of_checkout

ROOT = Path(__file__).parents[1]
SHOW = "import gpumem_nb, gpumem_nb.install.horovod_build, gpumem_nb.install.environment; print(gpumem_nb.__path__[0])"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with sdist and wheel, built from what git would commit, so that nothing else can slip in."""
    folder = tmp_path_factory.mktemp("built")
    copy_checkout(folder / "source")
    command = [sys.executable, "-m", "build", "--sdist", "--wheel", "--no-isolation", "--outdir", str(folder), "source"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("gpumem_nb-*.whl"))


def test_the_sdist_is_a_checkout(built: Path) -> None:
    with tarfile.open(next(built.glob("gpumem_nb-*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    assert {name for name in names if "egg-info" not in name} - {"PKG-INFO", "setup.cfg"} == set(files_of_checkout())


def test_wheel_holds_the_sources_that_are_compiled_and_nothing_of_the_checkout(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    suffixes = {".c", ".cpp", ".h"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "gpumem_nb").rglob("*") if path.suffix in suffixes}
    assert {name for name in names if Path(name).suffix in suffixes} == sources
    assert {Path(name).name for name in sources} >= {"allocator.cpp", "caching_model.h", "loopback.c"}
    assert {name.split("/")[0] for name in names} == {"gpumem_nb", f"{wheel.name.rsplit('-', 3)[0]}.dist-info"}


def test_installed_wheel_imports_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    site = Path(where.stdout.strip())
    # The dependencies are those of this environment; its own gpumem_nb comes later on the path than the wheel's.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    shown = subprocess.run([python, "-c", SHOW], cwd=tmp_path, env=clean, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == str(site / "gpumem_nb")
