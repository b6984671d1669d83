"""Statements that write, fetch or unpack files, which a script does not do again."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping

from .names import dotted, last, magic_of

_SAVING = {"dump", "push_to_hub", "write_text", "write_bytes", "tofile", "imsave", "imwrite", "write_image"}
_SAVING |= {f"to_{kind}" for kind in ("csv", "json", "parquet", "pickle", "excel", "feather", "html", "markdown")}
_SAVING |= {"write_html"}
_BESIDE = {"state_dict", "cpu", "detach", "clone", "numpy", "tolist", "to_dict", "items", "keys", "values", "getvalue"}
_BESIDE |= {"dict", "list", "tuple", "str", "int", "float", "len", "print", "open", "close", "Path", "join", "format"}
_BESIDE |= {"makedirs", "mkdir", "rank", "get_rank", "size", "get_world_size", "barrier", "time", "strftime", "exists"}
_MAKING = {"urlretrieve", "extractall", "extract_archive", "unpack_archive", "untar_data", "copyfile", "copytree"}
_MAKING |= {"shutil.copy", "shutil.copy2", "shutil.move", "os.rename", "os.replace", "os.symlink", "os.link"}
_RUNNING = {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output", "Popen", "getoutput")}
_RUNNING |= {"os.system", "os.popen", "get_ipython().system", "get_ipython().getoutput"}
SHELLS = {"%%bash", "%%sh", "%%!", "%%system", "%%sx"}
_IDLE_COMMANDS = {"ls", "cat", "head", "tail", "wc", "du", "df", "pwd", "cd", "echo", "which", "date", "hostname"}
_IDLE_COMMANDS |= {"whoami", "env", "uname", "free", "lscpu", "nproc", "nvidia-smi", "ps", "top", "grep", "find"}
_IDLE_COMMANDS |= {"tree", "file", "set", "export", "pip", "pip3", "conda", "mamba", "uv", "apt", "apt-get", "sleep"}
_BUFFERS = {"BytesIO", "StringIO"}
_NOT_KEPT = re.compile(r"[\d&]?>\s*/dev/null|\d?>&\d|#.*")  # output that goes nowhere, and comments
_WRITTEN = re.compile(r"[rbt]*[wax+][bt+]*([:|].*)?")  # modes of open()


def saves(node: ast.stmt, more: frozenset[str]) -> bool:
    """Return whether a statement writes a file of what is there, or does so in a block that does nothing else.

    ``more`` has the names of buffers in memory, too: what is written there is there for what comes after it.
    """
    parts = [*_parts(node)]
    given = {getattr(one, "id", "") for call in ast.walk(node) if isinstance(call, ast.Call) for one in _given(call)}
    alone = any(map(_is_saving, parts)) and all(_is_saving(part) or _is_beside(part) for part in parts)
    return alone and given.isdisjoint(more)


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(word.value for word in call.keywords)]


def only_saves(node: ast.AST, more: frozenset[str], harmless: frozenset[str]) -> bool:
    """Return whether code that saves calls nothing that could do something else, as functions of these names do."""
    return all(
        (name in _BESIDE or _names_saving(name) or name in harmless) and name not in more for name in _called(node)
    )


def doing_more(cells: Iterable[ast.AST], meant: Mapping[str, str], harmless: frozenset[str]) -> frozenset[str]:
    """Return the names of functions of cells that seem to make files by their names, and may change something.

    And those of buffers in memory, which are written to like files.

    Args:
        cells: all of them.
        meant: what names were imported for.
        harmless: the names of functions of cells that change nothing.
    """
    nodes = [node for cell in cells for node in ast.walk(cell)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    named = [one for one in functions if _makes_by_name(one.name)]
    found = frozenset(name for node in nodes for name in _made_otherwise(node))
    while more := {one.name for one in named if _changes(one) or acts_beside(one, meant, found, harmless)} - found:
        found |= more
    return found


def _made_otherwise(node: ast.AST) -> Iterator[str]:
    """Yield names of buffers in memory, and of what may do anything and is called as if it made files."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "optional_vars", None)]
    value = getattr(node, "value", getattr(node, "context_expr", None))
    buffer = isinstance(value, ast.Call) and last(value.func) in _BUFFERS
    names = (one.id for one in targets if isinstance(one, ast.Name))
    yield from (name for name in names if buffer or (isinstance(node, ast.Assign) and _makes_by_name(name)))


def _changes(function: ast.FunctionDef) -> bool:
    """Return whether a function sets something that is not its own."""
    own, parts = {*_made_in(function)}, [*ast.walk(function)]
    stored = [
        one for one in parts if isinstance(one, ast.Attribute | ast.Subscript) and not isinstance(one.ctx, ast.Load)
    ]
    others = any(dotted(one.value, {}).partition(".")[0] not in own for one in stored)
    return others or any(isinstance(one, ast.Global | ast.Nonlocal) for one in parts)


def makes_files(node: ast.AST, meant: Mapping[str, str]) -> bool:
    """Return whether some code fetches, unpacks or writes files, or runs a command that may."""
    return any(_makes_file(one, meant) or _is_told_to(one) for one in ast.walk(node))


def only_makes_files(node: ast.stmt, meant: Mapping[str, str]) -> bool:
    """Return whether a statement makes files and gives nothing a name that stays."""
    inner = node.body if isinstance(node, ast.With) else [node]
    return all(isinstance(one, ast.Expr) for one in inner) and makes_files(node, meant)


def _parts(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the statements in a block, or a statement itself."""
    if isinstance(node, ast.If | ast.With | ast.For):
        for part in [*node.body, *getattr(node, "orelse", [])]:
            yield from _parts(part)
    else:
        yield node


def _is_saving(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    return isinstance(value, ast.Call) and _names_saving(last(value.func))


def _is_beside(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass | ast.Import | ast.ImportFrom) or (
        isinstance(node, ast.Expr) and (not isinstance(node.value, ast.Call) or last(node.value.func) in _BESIDE)
    )


def _names_saving(name: str) -> bool:
    return name.startswith("save") or name in _SAVING


def _is_told_to(node: ast.AST) -> bool:
    """Return whether it is there to download something: where the data gets a name, a script has it or needs it not."""
    call = node.value if isinstance(node, ast.Expr) else None
    options = call.keywords if isinstance(call, ast.Call) else ()
    return any(one.arg == "download" and getattr(one.value, "value", None) is True for one in options)


def _makes_by_name(name: str) -> bool:
    return _names_saving(name) or _names_making(name) or name in _MAKING


def acts_beside(node: ast.stmt, meant: Mapping[str, str], more: frozenset[str], harmless: frozenset[str]) -> bool:
    """Return whether code that makes files calls what is the user's own and may change something."""
    others = {*_made_in(node)} | meant.keys() | set(dir(builtins)) - {"super"} | {"get_ipython"}
    for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
        begins, name = dotted(call.func, {}).partition(".")[0].removesuffix("()"), last(call.func)
        plain = begins in others and not name.endswith("_")
        if name in more or not (plain or name in _BESIDE or name in harmless or _makes_by_name(name)):
            return True
    return False


def _made_in(node: ast.AST) -> Iterator[str]:
    """Yield the names of what is opened or made in some code, and not only named there."""
    for one in ast.walk(node):
        if isinstance(one, ast.withitem) and isinstance(one.optional_vars, ast.Name):
            yield one.optional_vars.id
        elif isinstance(one, ast.Assign) and not isinstance(one.value, ast.Name | ast.Attribute | ast.Subscript):
            yield from (target.id for target in one.targets if isinstance(target, ast.Name))


def _names_making(name: str) -> bool:
    return "download" in name.split("_")


def _makes_file(node: ast.AST, meant: Mapping[str, str]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func, meant)
    end = name.rpartition(".")[2]
    if end in ("open", "ZipFile"):
        return any(map(_WRITTEN.fullmatch, _modes(node)))
    if magic := magic_of(node):
        written = magic.name in ("%%writefile", "%%file")
        return written or (magic.name in (*SHELLS, "!") and _does_more(magic.code))
    if name in _RUNNING:
        return _does_more(_command(node.args[0]) if node.args else "?")
    return end in _MAKING or name in _MAKING or _names_making(end)


def _modes(call: ast.Call) -> Iterator[str]:
    """Yield text that may say how a file is opened: of ``open()`` what comes second, of ``Path.open()`` first."""
    given = call.args[1 if isinstance(call.func, ast.Name) else 0 : 2]
    for one in [*given, *(option.value for option in call.keywords if option.arg == "mode")]:
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def _command(given: ast.AST) -> str:
    """Return what a shell is told; ``?`` for what is not written out."""
    if isinstance(given, ast.List | ast.Tuple | ast.JoinedStr):
        parts = given.values if isinstance(given, ast.JoinedStr) else given.elts
        return ("" if isinstance(given, ast.JoinedStr) else " ").join(map(_command, parts))
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else "?"


def _does_more(commands: str) -> bool:
    """Return whether there are commands that may do more than show something or install packages."""
    plain = _NOT_KEPT.sub("", commands)
    words = [part.split()[0] for part in re.split(r"[;&|\n]+", plain) if part.strip()]
    return ">" in plain or not _IDLE_COMMANDS.issuperset(words)


def _called(node: ast.AST) -> list[str]:
    return [last(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)]
