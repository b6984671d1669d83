"""Statements that fetch, unpack or write files: a script without them may read these, so they are named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from .imports import imported_in
from .outside import magic_of
from .relations import Relations
from .statements import Unit

_MAKING = {"urlretrieve", "extractall", "extract_archive", "unpack_archive", "untar_data", "copyfile", "copytree"}
_MAKING_THERE = {"shutil.copy", "shutil.copy2", "shutil.move", "os.rename", "os.replace", "os.symlink", "os.link"}
_RUNNING = {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output", "Popen", "getoutput")}
_RUNNING |= {"os.system", "os.popen", "get_ipython().system", "get_ipython().getoutput"}
_SHELLS = {"%%bash", "%%sh", "%%!", "%%system", "%%sx"}
_IDLE_COMMANDS = {"ls", "cat", "head", "tail", "wc", "du", "df", "pwd", "cd", "echo", "which", "date", "hostname"}
_IDLE_COMMANDS |= {"whoami", "env", "uname", "free", "lscpu", "nproc", "nvidia-smi", "ps", "top", "grep", "find"}
_IDLE_COMMANDS |= {"tree", "file", "set", "export", "pip", "pip3", "conda", "mamba", "uv", "apt", "apt-get", "sleep"}
_NOT_KEPT = re.compile(r"[\d&]?>\s*/dev/null|\d?>&\d|#.*")  # output that goes nowhere, and comments
_WRITTEN = re.compile(r"[rbt]*[wax+][bt+]*([:|].*)?")  # modes of open()


def file_makers(units: Sequence[Unit], relations: Relations) -> frozenset[int]:
    """Places of statements that make files, in functions that they call too."""
    meant = {name: what for unit in units if unit.imports for name, what in imported_in(unit.text)}
    making = {unit.text for unit in units if not unit.classes and _makes_files(unit, meant)}
    called = ((place, [unit, *relations.called(place)]) for place, unit in enumerate(units) if not unit.defines)
    return frozenset(place for place, reached in called if any(one.text in making for one in reached))


def _makes_files(unit: Unit, meant: Mapping[str, str]) -> bool:
    nodes = () if unit.imports or unit.constant else ast.walk(ast.parse(unit.text))
    return any(_makes_file(node, meant) or _is_told_to(node) for node in nodes)


def _is_told_to(node: ast.AST) -> bool:
    """Whether it is there to download something: where the data gets a name, a script has it or has no use for it."""
    call = node.value if isinstance(node, ast.Expr) else None
    options = call.keywords if isinstance(call, ast.Call) else ()
    return any(one.arg == "download" and getattr(one.value, "value", None) is True for one in options)


def _makes_file(node: ast.AST, meant: Mapping[str, str]) -> bool:
    """Whether it is a call that fetches, unpacks or writes files, by its name; or runs a command that may."""
    if not isinstance(node, ast.Call):
        return False
    name = _dotted(node.func, meant)
    last = name.rpartition(".")[2]
    if last in ("open", "ZipFile"):
        return any(map(_WRITTEN.fullmatch, _modes(node)))
    if magic := magic_of(node):
        return magic.name in ("%%writefile", "%%file") or (magic.name in _SHELLS and _does_more(magic.code))
    if name in _RUNNING:
        return _does_more(_command(node.args[0]) if node.args else "?")
    return last in _MAKING or name in _MAKING_THERE or "download" in last.split("_")


def _dotted(function: ast.AST, meant: Mapping[str, str]) -> str:
    """What a function is called from its module on."""
    if isinstance(function, ast.Attribute):
        return f"{_dotted(function.value, meant)}.{function.attr}"
    if isinstance(function, ast.Call):
        return f"{_dotted(function.func, meant)}()"
    return meant.get(function.id, function.id) if isinstance(function, ast.Name) else ""


def _modes(call: ast.Call) -> Iterator[str]:
    """Text that may say how a file is opened: of ``open()`` what comes after the file, ``Path.open()`` has none."""
    given = call.args[1 if isinstance(call.func, ast.Name) else 0 : 2]
    for one in [*given, *(option.value for option in call.keywords if option.arg == "mode")]:
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def _command(given: ast.AST) -> str:
    """What a shell is told; ``?`` for what is not written out."""
    if isinstance(given, ast.List | ast.Tuple | ast.JoinedStr):
        parts = given.values if isinstance(given, ast.JoinedStr) else given.elts
        return ("" if isinstance(given, ast.JoinedStr) else " ").join(map(_command, parts))
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else "?"


def _does_more(commands: str) -> bool:
    """Whether there are commands that may do more than show something or install packages."""
    plain = _NOT_KEPT.sub("", commands)
    words = [part.split()[0] for part in re.split(r"[;&|\n]+", plain) if part.strip()]
    return ">" in plain or not _IDLE_COMMANDS.issuperset(words)
