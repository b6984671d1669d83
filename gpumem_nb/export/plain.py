"""A cell in plain Python: without IPython's own lines, and without what writes files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from IPython.core.inputtransformer2 import TransformerManager

from .imports import PLOTTING

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


_WATCHING = {"%time", "%%time", "%%capture"}
_BLOCKS = ast.If | ast.For | ast.While | ast.With | ast.Try


@dataclass(frozen=True, slots=True)
class PlainCell:
    """A cell as it stands in a script.

    Attributes:
        text: its code. What is not in it stands there as a comment.
        left_out: statements that are not in it though they do something.
        acted: the first of them that runs code under a magic; empty without any.
        odd_save: a statement that writes a file and does something else; empty without any.
        same: whether the rest of it is the code that ran.
    """

    text: str
    left_out: tuple[str, ...]
    acted: str
    odd_save: str
    same: bool = True


def plain_cell(source: str, meant: Mapping[str, str]) -> PlainCell:
    """Return a cell for a script.

    Args:
        source: of the cell, as it ran.
        meant: what names were imported for.
    """
    source = without_timing(source)
    tree = ast.parse(source)
    removed = [*_removed(tree.body, meant)]
    told = [node for node in removed if may_act(node) or saves(node) or makes_files(node, meant)]
    texts = [ast.get_source_segment(source, node) or "" for node in told]
    odd = [node for node in _statements(tree.body) if saves(node) and not only_saves(node)]
    text = _without(source, removed, tree.body)
    return PlainCell(
        text,
        tuple(texts),
        next((text for node, text in zip(told, texts, strict=True) if may_act(node)), ""),
        next((ast.get_source_segment(source, node) or "" for node in odd), ""),
        _is_rest(text, tree, removed),
    )


def without_timing(source: str) -> str:
    """Return code without ``%time``, ``%%time`` and ``%%capture``; unchanged where what they run cannot be read."""
    tree = _parsed(source) if "get_ipython()" in source else None
    watched = [node for node in ast.walk(tree) if _is_watched(node)] if tree else []
    texts = [(node, _plain(magic.code)) for node in watched if (magic := magic_of(node.value))]
    plain = _replaced(source, [(node.value, text) for node, text in texts])
    return plain if watched and _parsed(plain) else source


def defining_magic(source: str, name: str) -> str:
    """Return the magic in some code that runs a definition of a name, which is not read; empty if there is none."""
    tree = _parsed(source) if "get_ipython()" in source else None
    found = (magic_of(node) for node in ast.walk(tree or ast.Pass()))
    return next((magic.name for magic in found if magic and _defines(magic, name)), "")


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements and those in their blocks; not those of functions and classes."""
    for node in body:
        yield node
        if isinstance(node, _BLOCKS):
            for part in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])):
                yield from _statements(part)
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _removed(body: Sequence[ast.stmt], meant: Mapping[str, str]) -> Iterator[ast.stmt]:
    """Yield the outermost statements that are not for a script."""
    end = (0, 0)
    for node in _statements(body):
        if (node.lineno, node.col_offset) < end:
            continue  # inside of one that is removed
        saving = saves(node) and only_saves(node)
        idle = is_line_of_ipython(node) or _opens_window(node, meant)
        if idle or saving or only_makes_files(node, meant):
            end = (node.end_lineno or 0, node.end_col_offset or 0)
            yield node


def _opens_window(node: ast.stmt, meant: Mapping[str, str]) -> bool:
    """Return whether a statement is as ``plt.show()``, where plots are imported: a window would wait to be closed."""
    call = node.value if isinstance(node, ast.Expr) else None
    shows = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "show"
    return shows and any(what.partition(".")[0] in PLOTTING for what in meant.values())


def _without(source: str, removed: Sequence[ast.stmt], body: Sequence[ast.stmt]) -> str:
    """Return the code with comments where statements were."""
    lines, texts = source.encode().split(b"\n"), []
    for node in removed:
        after = lines[(node.end_lineno or 1) - 1][node.end_col_offset or 0 :].decode()
        said = " ".join((ast.get_source_segment(source, node) or "").split())
        before = lines[node.lineno - 1][: node.col_offset].decode()
        alone = not before.strip() and not after.partition("#")[0].strip()
        stays = "" if node in body and alone else "pass"
        texts.append((node, stays + ("  " * bool(stays) + f"# not in the script: {said}" if alone else "")))
    return _replaced(source, texts)


def _is_rest(text: str, tree: ast.Module, removed: Sequence[ast.stmt]) -> bool:
    """Return whether some code is that of a module without these statements."""
    gone = {*map(id, removed)}

    class Rest(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return ast.Pass() if id(node) in gone else self.generic_visit(node)

    rest, there = Rest().visit(tree), _parsed(text)
    return isinstance(rest, ast.Module) and there is not None and _dumped(rest) == _dumped(there)


def _dumped(tree: ast.Module) -> list[str]:
    return [ast.dump(node) for node in tree.body if not isinstance(node, ast.Pass)]


def _replaced(source: str, texts: Sequence[tuple[ast.AST, str]]) -> str:
    """Return code with these texts in place of nodes that do not overlap."""
    lines = source.encode().split(b"\n")  # ast counts bytes
    for node, text in sorted(texts, key=lambda one: (-one[0].lineno, -one[0].col_offset)):  # type: ignore[attr-defined]
        first, end = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
        whole = lines[first][: node.col_offset] + text.encode() + lines[end][node.end_col_offset :]  # type: ignore[attr-defined]
        lines[first : end + 1] = whole.split(b"\n")
    return b"\n".join(lines).decode()


def _is_watched(node: ast.AST) -> TypeGuard[ast.Expr | ast.Assign]:
    """Return whether a statement only times or captures code, or gives a name to what a timed expression gives."""
    magic = magic_of(node.value) if isinstance(node, ast.Expr | ast.Assign) else None
    if magic is None or magic.name not in _WATCHING:
        return False
    return isinstance(node, ast.Expr) or _is_expression(_plain(magic.code))


def _plain(code: str) -> str:
    """Return the code of a magic in plain Python."""
    return without_timing(TransformerManager().transform_cell(code)).rstrip("\n")


def _defines(magic: Magic, name: str) -> bool:
    """Return whether its code, which may begin with options, seems to define a name."""
    assigned = rf"^[^=(\n]*\b{name}\b[^=(\n]*=(?!=)"
    return bool(re.search(rf"{assigned}|\b(def|class|import|as) {name}\b", magic.code, re.MULTILINE))


def _is_expression(code: str) -> bool:
    parsed = _parsed(code)
    return parsed is not None and len(parsed.body) == 1 and isinstance(parsed.body[0], ast.Expr)


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except SyntaxError:
        return None
