"""What runs in the notebook's process imports no torch, nor do logs that are written there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ALL_MODULES = """
import importlib, pkgutil, sys
import gpumem_nb
from gpumem_nb.kernel.logs import Logs

ON_RANKS = (
    *("engine", "memory", "workloads", "course.on_ranks"),
    *("internals.torch", "internals.horovod", "internals.fake", "internals.bits"),
)
for module in pkgutil.walk_packages(gpumem_nb.__path__, "gpumem_nb."):
    if not module.name.removeprefix("gpumem_nb.").startswith(ON_RANKS):
        importlib.import_module(module.name)
        assert "torch" not in sys.modules, module.name
logs = Logs(print)
logs.begin(sys.argv[1], "tensorboard", None)
logs.stop()
assert not {"torch", "horovod"} & sys.modules.keys()
"""


def test_no_module_of_the_notebook_and_no_log_imports_torch(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", ALL_MODULES, str(tmp_path / "a")], check=True, env=environment)
    assert list((tmp_path / "a").iterdir())
