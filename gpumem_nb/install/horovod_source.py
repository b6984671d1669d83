"""Horovod's source: fetched from the package index, verified, unpacked, and patched for today's compilers and torch."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from ..shared.errors import SetupError

VERSION = "0.28.1"
"""The last release (June 2023)."""
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""Of the sdist on the package index, the only file there."""
SDIST = f"horovod-{VERSION}.tar.gz"
MARK = "gpumem_nb_settings_change"
"""A variable of the package that is built, by which ranks see that :func:`let_settings_change` was done."""
DOWNLOAD_TIMEOUT_S = 600
FIXED_WIDTH = re.compile(r"\bu?int(8|16|32|64)_t\b")


def fetch(cache: Path) -> Path:
    """Return the verified sdist in ``cache``, downloaded once with pip so that the user's own pip configuration holds.

    Raises:
        SetupError: no network, no such file, or a file that is not the one this recipe was made for.
    """
    kept = cache / SDIST
    if kept.exists() and digest(kept) == SHA256:
        return kept
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
        download(Path(folder))
        verify(Path(folder) / SDIST)
        os.replace(Path(folder) / SDIST, kept)
    return kept


def download(folder: Path) -> None:
    """Let pip download the sdist. It checks the hash before it runs anything out of the archive.

    Raises:
        SetupError: it could not be had.
    """
    wanted = folder / "wanted.txt"
    wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    command += ["--no-cache-dir", "--require-hashes", "--dest", str(folder), "-r", str(wanted)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"Horovod's source took longer than {DOWNLOAD_TIMEOUT_S // 60} minutes. Check the network."
        ) from None
    if answer.returncode:
        raise SetupError(explain_download(answer.stdout + answer.stderr))


def explain_download(output: str) -> str:
    """Return one sentence for what pip said."""
    if "DO NOT MATCH THE HASHES" in output:
        return hash_mismatch("the file that the package index offers")
    if "No module named pip" in output:
        return "This environment has no pip, which downloads Horovod. Install it with: python -m ensurepip"
    unreachable = ("Failed to establish", "Max retries", "resolve", "timed out", "No matching distribution")
    if any(sign in output for sign in unreachable):
        return (
            f"Horovod {VERSION} could not be downloaded. Check the network and pip's index settings (pip config list), "
            "then try again."
        )
    last = (
        [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:] or ["no output"]
    )
    return f"pip could not download Horovod {VERSION}: {last[-1].removeprefix('ERROR: ')}"


def verify(path: Path) -> None:
    """Refuse any other file than the one this recipe was made for.

    Raises:
        SetupError: it is another one.
    """
    if digest(path) != SHA256:
        raise SetupError(hash_mismatch(str(path)))


def hash_mismatch(what: str) -> str:
    """Return the same sentence for each way to notice it."""
    return (
        f"The hash of {what} is not that of Horovod {VERSION}'s published source, so it was not used. "
        "Check which package index pip uses (pip config list) and try again."
    )


def digest(path: Path) -> str:
    """SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack the verified sdist and return the source's own folder."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    return folder / f"horovod-{VERSION}"


def patch(source: Path, runpath: tuple[str, ...], with_cuda: bool) -> None:
    """Make the source of 2023 build with today's torch, compilers and Python. Any change here is a new ``RECIPE``."""
    standard = (r"(CMAKE_CXX_STANDARD )(11|14|17)\b", r"\g<1>20")  # torch's headers need it (horovod#3996, #4014)
    replace(source / "CMakeLists.txt", *standard)
    replace(source / "horovod/torch/CMakeLists.txt", *standard)
    replace(source / "third_party/gloo/CMakeLists.txt", r"-std=c\+\+11", "-std=c++17")
    replace(source / "horovod/common/ops/cuda/CMakeLists.txt", r"(CMAKE_CUDA_STANDARD )11\b", r"\g<1>17")
    # distutils left Python in 3.12
    replace(
        source / "horovod/torch/CMakeLists.txt",
        r"from distutils\.sysconfig import get_python_inc; print\(get_python_inc\(\)\)",
        "import sysconfig; print(sysconfig.get_path('include'))",
    )
    # CMake would write this environment's absolute paths into the library, and the cached wheel serves others too.
    entries = ";".join(runpath)
    replace(
        source / "CMakeLists.txt",
        r"(project\(horovod CXX\)\n)",
        rf'\g<1>set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\nset(CMAKE_INSTALL_RPATH "{entries}")\n',
    )
    if not with_cuda:  # a toolkit that happens to be there must not pull Horovod's CUDA kernels in
        replace(
            source / "cmake/Modules/FindPytorch.cmake",
            r"print\(True if \(\(torch\.version\.cuda is not None\) and \(CUDA_HOME is not None\)\) else False\)",
            "print(False)",
        )
    # The driver's library has its plain name only where a toolkit is on the system.
    replace(source / "horovod/torch/cuda_util.cc", r'dlopen\("libcuda\.so"', 'dlopen("libcuda.so.1"')
    # Without debug information a compiler takes 1.7 GiB at most, with it 2.4.
    replace(source / "setup.py", "'RelWithDebInfo'", "'Release'")
    add_missing_headers(source)
    let_python_go_on(source / "horovod/torch/mpi_ops_v2.cc")
    let_ranks_rest(source / "horovod/common/operations.cc")
    let_settings_change(source)


def let_python_go_on(operations: Path) -> None:
    """What begins a collective does not hold Python's lock (the GIL) while it waits for Horovod's.

    Horovod's own thread holds that one while it shuts down, and lets go of tensors meanwhile, for which torch takes
    Python's: a rank that began a collective at that moment hung for good, where no interrupt reaches it.
    """
    begins = r'(m\.def\("horovod_torch_(?:\w+_async_\w+|join|barrier)",\s*&\w+)\);'
    replace(operations, begins, r"\g<1>, py::call_guard<py::gil_scoped_release>());")


def let_ranks_rest(operations: Path) -> None:
    """After a cycle with nothing to do, the pause of a cycle begins where the ranks have met.

    Horovod counts it from where each rank began the cycle. So a rank that once came early does so for good, and spends
    most of each idle millisecond spinning in MPI until the others come.
    """
    replace(operations, r"(bool should_shutdown = false;\n)(?=  for )", r"\g<1>  bool idle = true;\n")
    done = r"( +should_shutdown \|= response_list\.shutdown\(\);\n)"
    replace(operations, done, r"\g<1>    idle &= response_list.responses().empty();\n")
    rested = r"  if (idle) {\n    state.last_cycle_start = std::chrono::steady_clock::now();\n  }\n"
    replace(operations, r"(  return !should_shutdown;\n)", rested + r"\g<1>")


def let_settings_change(source: Path) -> None:
    """Ranks may be joined again with any of Horovod's variables set.

    What a variable has set is no number of its tuner's any more. Horovod puts its own default there all the same when
    ranks are joined another time in the same processes: outside of what it holds, once a fusion threshold and a cycle
    time are both set, which ends the process. The mark lets ranks see whether they have this Horovod.
    """
    default = r"(  \} else )(\{\n    Eigen::VectorXd v = TunableParameter::BestValue\(\);\n    v\[index_\[variable\]\])"
    missing = r"\g<1>if (fixed_values_.find(variable) == fixed_values_.end()) \g<2>"
    replace(source / "horovod/common/parameter_manager.cc", default, missing)
    replace(source / "horovod/__init__.py", r"(__version__ = .*\n)", rf"\g<1>{MARK} = True\n")


def replace(path: Path, pattern: str, by: str) -> None:
    """Replace a pattern that must be there: a silent miss would build something else than was tested.

    Raises:
        SetupError: it is not there.
    """
    text, count = re.subn(pattern, by, path.read_text())
    if not count:
        raise SetupError(f"The patch for {path.name} does not fit Horovod {VERSION}; please report this with the log.")
    path.write_text(text)


def add_missing_headers(source: Path) -> None:
    """Include <cstdint> where its integers are used without it: gcc 13 stopped bringing it along (horovod#3957)."""
    for folder in ("horovod/common", "horovod/torch", "third_party/gloo/gloo"):
        for header in (source / folder).rglob("*.h"):
            text = header.read_text()
            if FIXED_WIDTH.search(text) and "stdint" not in text:
                header.write_text(f"#include <cstdint>\n{text}")
