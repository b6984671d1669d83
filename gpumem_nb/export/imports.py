"""The imports of a script in the order in which linters want them, each once."""

from __future__ import annotations

import ast
import importlib
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cache

_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
PLOTTING = frozenset({"matplotlib", "seaborn", "plotly"})  # packages whose import changes nothing that is trained


def with_sorted_imports(text: str) -> str:
    """Return a module whose block of imports is sorted by section and name; blocks in cells stay as they are."""
    tree, blocks = ast.parse(text), [list[ast.Import | ast.ImportFrom]()]
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            blocks[-1].append(node)
        elif blocks[-1]:
            blocks.append([])
    ours = (block for block in blocks if any(alias.name == "argparse" for one in block for alias in one.names))
    nodes = next(ours, blocks[0])
    lines = text.removesuffix("\n").split("\n")  # as ast counts them
    begin, end = nodes[0].lineno - 1, nodes[-1].end_lineno or 0
    sections = "\n\n".join(filter(None, map("\n".join, _sections(nodes))))
    rest = "\n".join(lines[end:]).lstrip("\n")
    after = tree.body.index(nodes[-1]) + 1
    defined = isinstance(tree.body[after], ast.FunctionDef | ast.ClassDef)
    return "\n".join([*lines[:begin], sections]) + "\n" * (3 if defined else 2) + rest + "\n"


def imported_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield names that imports of a module define, outside of its functions: each with what it is, written in one way.

    Of ``*`` what Python's own modules bring.
    """
    for node in _at_top(ast.parse(text)):
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                names = _brought(node) or () if alias.name == "*" else [alias.name]
                module = f"{'.' * node.level}{node.module or ''}"
                yield from ((alias.asname or name, f"{module}.{name}") for name in names)
            else:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, alias.name if alias.asname else top


def _at_top(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case) and not isinstance(child, _DEFINITIONS):
            yield from _at_top(child)


def named(text: str, names: Collection[str]) -> str:
    """Imports with those of these names that ``*`` of Python's own modules brings in the place of it."""
    tree, changed = ast.parse(text), False
    for node in tree.body:
        brought = _brought(node) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" else None
        if isinstance(node, ast.ImportFrom) and brought is not None:
            node.names, changed = [ast.alias(name) for name in sorted(brought.intersection(names))], True
    tree.body = [node for node in tree.body if getattr(node, "names", True)]
    return ast.unparse(tree) if changed else text


@cache
def brought_by_all(text: str) -> frozenset[str] | None:
    """Return names that imports of ``*`` in some code bring; ``None`` if some are not of Python's own modules."""
    found = set[str]()
    for node in ast.walk(ast.parse(text)) if "*" in text else ():
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            brought = _brought(node)
            if brought is None:
                return None
            found |= brought
    return frozenset(found)


def _brought(node: ast.ImportFrom) -> set[str] | None:
    """Names that an import of ``*`` brings; ``None`` of other modules than Python's own."""
    if (node.module or "").partition(".")[0] not in sys.stdlib_module_names or node.level:
        return None
    try:
        module = importlib.import_module(node.module or "")
    except ImportError:  # it may be there for the ranks only
        return None
    return set(getattr(module, "__all__", (name for name in vars(module) if not name.startswith("_"))))


def _sections(nodes: list[ast.Import | ast.ImportFrom]) -> list[list[str]]:
    """Python's own modules, those of others: lines of each."""
    plain: set[tuple[str, str]] = set()
    members: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for node in nodes:
        for alias in node.names:
            renamed = f" as {alias.asname}" if alias.asname and alias.asname != alias.name else ""
            if isinstance(node, ast.Import):
                plain.add((alias.name, renamed))
            else:
                members["." * node.level + (node.module or "")].add((alias.name, renamed))
    sections: list[list[str]] = [[], [], []]
    for module, renamed in sorted(plain, key=lambda entry: (entry[0].lower(), entry[1])):
        sections[_section(module)].append(f"import {module}{renamed}")
    for module in sorted(members, key=str.lower):
        names = sorted(members[module], key=lambda entry: (_kind(entry[0]), entry[0].lower(), entry[1]))
        line = f"from {module} import {', '.join(name + renamed for name, renamed in names)}"
        sections[_section(module)].append(line)
    sections[0].sort(key=lambda line: line.startswith("from __future__") * -1)
    return sections


def _section(module: str) -> int:
    top = module.partition(".")[0]
    return 2 if not top else 0 if top in sys.stdlib_module_names else 1


def _kind(name: str) -> int:
    """Constants come before classes, and these before all others."""
    return 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
