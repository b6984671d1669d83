"""A cell in plain Python: without IPython's own lines, and without what writes files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from IPython.core.inputtransformer2 import TransformerManager

from .files import SHELLS, acts_beside, makes_files, only_makes_files, only_saves, saves
from .imports import PLOTTING
from .names import Magic, magic_of

_IDLE_MAGICS = {"%matplotlib", "%config", "%load_ext", "%reload_ext", "%autoreload", "%pwd", "%ls", "%who", "%whos"}
_IDLE_MAGICS |= {"%pip", "%%script", "%%writefile", "%%file", "%%html", "%%HTML", "%%javascript", "%%js", "!"}
_IDLE_MAGICS |= {"%%markdown", "%%latex", "%%svg", *SHELLS}


def is_line_of_ipython(node: ast.stmt) -> bool:
    """Return whether a statement is a magic or a shell command whose value nothing gets."""
    return isinstance(node, ast.Expr) and magic_of(node.value) is not None


def may_act(node: ast.stmt) -> bool:
    """Return whether a statement is a line of IPython's that runs code, such as ``%prun``."""
    magic = magic_of(node.value) if isinstance(node, ast.Expr) else None
    return magic is not None and magic.name not in _IDLE_MAGICS


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


def plain_cell(source: str, meant: Mapping[str, str], more: frozenset[str], harmless: frozenset[str]) -> PlainCell:
    """Return a cell for a script.

    Args:
        source: of the cell, as it ran.
        meant: what names were imported for.
        more, harmless: functions of cells that do more than make files as their names say, and that change nothing.
    """
    source = without_timing(source)
    tree = ast.parse(source)
    removed = [*_removed(tree.body, meant, more, harmless)]
    told = [node for node in removed if may_act(node) or saves(node, more) or makes_files(node, meant)]
    texts = [ast.get_source_segment(source, node) or "" for node in told]
    odd = [
        node
        for node in _statements(tree.body)
        if (saves(node, more) and not only_saves(node, more, harmless))
        or (only_makes_files(node, meant) and acts_beside(node, meant, frozenset(), harmless))
    ]
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


def _removed(
    body: Sequence[ast.stmt], meant: Mapping[str, str], more: frozenset[str], harmless: frozenset[str]
) -> Iterator[ast.stmt]:
    """Yield the outermost statements that are not for a script."""
    end = (0, 0)
    for node in _statements(body):
        if (node.lineno, node.col_offset) < end:
            continue  # inside of one that is removed
        saving = saves(node, more) and only_saves(node, more, harmless)
        making = only_makes_files(node, meant) and not acts_beside(node, meant, more, harmless)
        idle = is_line_of_ipython(node) or _opens_window(node, meant)
        if idle or saving or making:
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
