"""Statements whose effect lies outside of the script: files that they write, and IPython's own lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .called import last

_SAVING = {
    "dump",
    "push_to_hub",
    "write_text",
    "write_bytes",
    "tofile",
    "imsave",
    "imwrite",
    "write_image",
    "write_html",
}
_SAVING |= {"to_csv", "to_json", "to_parquet", "to_pickle", "to_excel", "to_feather", "to_html", "to_markdown"}
_BESIDE = {"state_dict", "cpu", "detach", "clone", "numpy", "tolist", "to_dict", "items", "keys", "values", "getvalue"}
_BESIDE |= {"dict", "list", "tuple", "str", "int", "float", "len", "print", "open", "close", "Path", "join", "format"}
_BESIDE |= {"makedirs", "mkdir", "rank", "get_rank", "size", "get_world_size", "barrier", "time", "strftime", "exists"}
_IDLE_MAGICS = {"%matplotlib", "%config", "%load_ext", "%reload_ext", "%autoreload", "%pwd", "%ls", "%who", "%whos"}
_IDLE_MAGICS |= {"%pip", "%%bash", "%%sh", "%%!", "%%system", "%%sx", "%%script", "%%writefile", "%%file"}
_IDLE_MAGICS |= {"%%html", "%%HTML", "%%javascript", "%%js", "%%markdown", "%%latex", "%%svg"}


@dataclass(frozen=True, slots=True)
class Magic:
    """A line or cell of IPython's own: its name with one or two ``%``, and what stands behind or below it."""

    name: str
    code: str


def saves(node: ast.stmt) -> bool:
    """Whether a statement writes a file of what is there, or does so in a block that does nothing else."""
    parts = [*_parts(node)]
    return any(map(_is_saving, parts)) and all(_is_saving(part) or _is_beside(part) for part in parts)


def only_saves(node: ast.stmt) -> bool:
    """Whether a statement that saves calls nothing that could do something else."""
    calls = (last(one.func) for one in ast.walk(node) if isinstance(one, ast.Call))
    return all(name in _BESIDE or _names_saving(name) for name in calls)


def magics(node: ast.stmt) -> Iterator[str]:
    """IPython's own lines in a statement, by the names of magics; ``!`` for shell commands."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and _is_ipython(one.func):
            magic = magic_of(one)
            yield magic.name if magic else "!"


def magic_of(node: ast.AST) -> Magic | None:
    """The magic that an expression calls, if it is one of those calls that IPython makes of ``%`` and ``%%``."""
    if not (isinstance(node, ast.Call) and _is_ipython(node.func)):
        return None
    given = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    mark = {"run_line_magic": "%", "run_cell_magic": "%%"}.get(last(node.func), "")
    return Magic(mark + given[0], given[-1]) if len(given) == len(mark) + 1 and mark else None


def is_idle(node: ast.stmt) -> bool:
    """Whether a statement is one of IPython's own lines that does nothing to the program: a shell command, plots."""
    alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _is_ipython(node.value.func)
    return alone and all(name == "!" or name in _IDLE_MAGICS for name in magics(node))


def _parts(node: ast.stmt) -> Iterator[ast.stmt]:
    """The statements in a block, or a statement itself."""
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


def _is_ipython(function: ast.expr) -> bool:
    """Whether a call is one of a method of what ``get_ipython()`` gives."""
    if not isinstance(function, ast.Attribute):
        return False
    return isinstance(function.value, ast.Call) and last(function.value.func) == "get_ipython"
