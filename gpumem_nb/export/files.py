"""Effects of statements outside of the program: files that they write or fetch, and IPython's own lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
_SHELLS = {"%%bash", "%%sh", "%%!", "%%system", "%%sx"}
_IDLE_COMMANDS = {"ls", "cat", "head", "tail", "wc", "du", "df", "pwd", "cd", "echo", "which", "date", "hostname"}
_IDLE_COMMANDS |= {"whoami", "env", "uname", "free", "lscpu", "nproc", "nvidia-smi", "ps", "top", "grep", "find"}
_IDLE_COMMANDS |= {"tree", "file", "set", "export", "pip", "pip3", "conda", "mamba", "uv", "apt", "apt-get", "sleep"}
_IDLE_MAGICS = {"%matplotlib", "%config", "%load_ext", "%reload_ext", "%autoreload", "%pwd", "%ls", "%who", "%whos"}
_IDLE_MAGICS |= {"%pip", "%%script", "%%writefile", "%%file", "%%html", "%%HTML", "%%javascript", "%%js", "!"}
_IDLE_MAGICS |= {"%%markdown", "%%latex", "%%svg", *_SHELLS}
_NOT_KEPT = re.compile(r"[\d&]?>\s*/dev/null|\d?>&\d|#.*")  # output that goes nowhere, and comments
_WRITTEN = re.compile(r"[rbt]*[wax+][bt+]*([:|].*)?")  # modes of open()


@dataclass(frozen=True, slots=True)
class Magic:
    """A line or cell of IPython's own: its name with one or two ``%``, and what stands behind or below it."""

    name: str
    code: str


def last(function: ast.AST) -> str:
    """Return what a function is called, without where it is from."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def dotted(function: ast.AST, meant: Mapping[str, str]) -> str:
    """Return what a function is called from its module on; ``meant`` says what names were imported for."""
    if isinstance(function, ast.Attribute):
        return f"{dotted(function.value, meant)}.{function.attr}"
    if isinstance(function, ast.Call):
        return f"{dotted(function.func, meant)}()"
    return meant.get(function.id, function.id) if isinstance(function, ast.Name) else ""


def calls(name: str, code: str) -> bool:
    """Return whether some code calls a function by this name."""
    return any(isinstance(node, ast.Call) and dotted(node.func, {}) == name for node in ast.walk(ast.parse(code)))


def magic_of(node: ast.AST) -> Magic | None:
    """Return the magic that an expression calls, as IPython writes ``%``, ``%%`` and ``!``; ``None`` for others."""
    name = dotted(node.func, {}) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or not name.startswith("get_ipython()."):
        return None
    given = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if name.endswith(("system", "getoutput")):
        return Magic("!", given[0] if given else "?")
    mark = {"run_line_magic": "%", "run_cell_magic": "%%"}.get(last(node.func), "")
    return Magic(mark + given[0], given[-1]) if len(given) == len(mark) + 1 and mark else None


def is_line_of_ipython(node: ast.stmt) -> bool:
    """Return whether a statement is a magic or a shell command whose value nothing gets."""
    return isinstance(node, ast.Expr) and magic_of(node.value) is not None


def may_act(node: ast.stmt) -> bool:
    """Return whether a statement is a line of IPython's that runs code, such as ``%prun``."""
    magic = magic_of(node.value) if isinstance(node, ast.Expr) else None
    return magic is not None and magic.name not in _IDLE_MAGICS


def saves(node: ast.stmt) -> bool:
    """Return whether a statement writes a file of what is there, or does so in a block that does nothing else."""
    parts = [*_parts(node)]
    return any(map(_is_saving, parts)) and all(_is_saving(part) or _is_beside(part) for part in parts)


def only_saves(node: ast.stmt) -> bool:
    """Return whether a statement that saves calls nothing that could do something else."""
    calls = (last(one.func) for one in ast.walk(node) if isinstance(one, ast.Call))
    return all(name in _BESIDE or _names_saving(name) for name in calls)


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


def _makes_file(node: ast.AST, meant: Mapping[str, str]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func, meant)
    end = name.rpartition(".")[2]
    if end in ("open", "ZipFile"):
        return any(map(_WRITTEN.fullmatch, _modes(node)))
    if magic := magic_of(node):
        written = magic.name in ("%%writefile", "%%file")
        return written or (magic.name in (*_SHELLS, "!") and _does_more(magic.code))
    if name in _RUNNING:
        return _does_more(_command(node.args[0]) if node.args else "?")
    return end in _MAKING or name in _MAKING or "download" in end.split("_")


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
