"""What functions, and what is looked into, are called in some code."""

from __future__ import annotations

import ast


def last(function: ast.AST) -> str:
    """What a function is called, without where it is from."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def root(node: ast.AST) -> str:
    """The name that an expression of attributes, items and calls begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
