"""Code that IPython only times or captures, read as if it stood there without that; and code that is not read."""

from __future__ import annotations

import ast
import re
from typing import TypeGuard

from IPython.core.inputtransformer2 import TransformerManager

from .outside import Magic, magic_of

_WATCHING = {"%time", "%%time", "%%capture"}


def without_timing(source: str) -> str:
    """Plain Python without ``%time``, ``%%time`` and ``%%capture``; unchanged where what they run cannot be read."""
    tree = _parsed(source) if "get_ipython()" in source else None
    watched = [node for node in ast.walk(tree) if _is_watched(node)] if tree else []
    lines = source.encode().split(b"\n")  # ast counts bytes
    for node in sorted(watched, key=lambda node: -node.lineno):
        magic, place = magic_of(node.value), node.lineno - 1
        code = _plain(magic.code) if magic else ""
        lines[place] = lines[place][: node.value.col_offset] + code.encode() + lines[place][node.value.end_col_offset :]
    plain = b"\n".join(lines).decode()
    return plain if watched and _parsed(plain) else source


def defining_magic(source: str, name: str) -> str:
    """The magic in some code that runs a definition of a name, which is not read; empty if there is none."""
    tree = _parsed(source) if "get_ipython()" in source else None
    found = (magic_of(node) for node in ast.walk(tree or ast.Pass()))
    return next((magic.name for magic in found if magic and _defines(magic, name)), "")


def _is_watched(node: ast.AST) -> TypeGuard[ast.Expr | ast.Assign]:
    """Whether a statement only times or captures code, or gives a name to what a timed expression gives."""
    magic = magic_of(node.value) if isinstance(node, ast.Expr | ast.Assign) else None
    if magic is None or magic.name not in _WATCHING:
        return False
    return isinstance(node, ast.Expr) or _is_expression(_plain(magic.code))


def _plain(code: str) -> str:
    """The code of a magic in plain Python."""
    return without_timing(TransformerManager().transform_cell(code)).rstrip("\n")


def _defines(magic: Magic, name: str) -> bool:
    """Whether its code, which may begin with options, seems to define a name."""
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
