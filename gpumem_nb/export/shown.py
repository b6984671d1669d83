"""Statements that only plot or count what is there: they change nothing that a script needs."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from .effects import root
from .imports import PLOTTING, imported_in
from .names import last
from .statements import LOOKS, Statement

_READING = LOOKS | {"range", "round", "abs", "str", "int", "float", "bool", "isinstance", "hasattr"}
_READING |= {"globals", "locals", "vars"}
_ITERATING = {"sum", "min", "max", "list", "tuple", "set", "dict", "sorted", "enumerate", "zip", "any", "all"}
READERS = _READING | _ITERATING
"""Python's own functions that change nothing, unless cells call something else so."""
_COUNTING = {"numel", "parameters", "named_parameters", "modules", "named_modules", "children", "named_children"}
_COUNTING |= {"buffers", "named_buffers", "size", "dim", "nelement", "element_size", "item", "keys", "values", "items"}
_OF_TENSORS = {"cpu", "numpy", "detach", "permute", "transpose", "squeeze", "unsqueeze", "reshape", "view", "flatten"}
_OF_TENSORS |= {"tolist", "float", "clone", "argmax", "mean", "std", "sum", "min", "max", "abs", "astype"}
READING_METHODS = frozenset(_COUNTING | _OF_TENSORS)
"""Methods that change nothing, unless classes of cells say otherwise."""
_MAKERS = {"Figure", "FacetGrid", "figure", "subplots", "make_subplots", "subplot", "add_subplot", "axes", "gca", "gcf"}
_MAKERS |= {"twinx", "colorbar", "imshow", "scatter", "line", "bar", "histogram", "heatmap"}
_MAKERS |= {"lineplot", "barplot", "histplot"}
"""What gives figures and their parts, and never data."""
_PARTS = ast.Expr | ast.Assign | ast.AnnAssign | ast.For | ast.With | ast.If | ast.Pass
_LOOPS = ast.For | ast.comprehension
_HELD_IN = ast.In | ast.NotIn


def only_shown(parts: Sequence[Sequence[Statement]]) -> frozenset[int]:
    """Return places of those parts whose statements do nothing but plot, or read and count.

    Iterators are used up by who reads them, so what is read one by one must be made for that: ``range(9)``,
    ``model.parameters()``.
    """
    plots, found = set[str](), set[int]()
    for place, statements in enumerate(parts):
        shows = bool(statements)
        for one in statements:
            node = ast.parse(one.text).body[0]
            if one.imports:
                plots -= one.binds
                plots |= (of_plotting := {name for name, what in imported_in(one.text) if _is_plotting(what)})
                shows = shows and of_plotting == one.binds
                continue
            shows = shows and _shows(node, plots)
            plots = plots | one.binds if _makes_plot(node, plots) else plots - one.binds
        found |= {place} if shows else set()
    return frozenset(found)


def _is_plotting(what: str) -> bool:
    return what.partition(".")[0] in PLOTTING


def _makes_plot(node: ast.stmt, plots: Collection[str]) -> bool:
    """Return whether it is as ``figure, axes = plt.subplots()``."""
    call = node.value if isinstance(node, ast.Assign) else None
    return isinstance(call, ast.Call) and last(call.func) in _MAKERS and root(call) in plots


def _shows(node: ast.stmt, plots: Collection[str]) -> bool:
    parts = list(ast.walk(node))
    plots = set(plots) - {one.id for one in parts if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    if not all(isinstance(part, _PARTS) for part in parts if isinstance(part, ast.stmt)):
        return False
    if any(isinstance(part, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom | ast.Starred) for part in parts):
        return False
    stored = (part for part in parts if isinstance(part, ast.Attribute | ast.Subscript))
    if any(not isinstance(part.ctx, ast.Load) and root(part) not in plots for part in stored):
        return False
    calls = [part for part in parts if isinstance(part, ast.Call)]
    methods = _COUNTING | (_OF_TENSORS if any(root(call) in plots for call in calls) else set())
    if not all(_reads(call, plots, methods) for call in calls):
        return False
    if any(one.arg == "key" for call in calls for one in call.keywords):
        return False
    if any(root(part.context_expr) not in plots for part in parts if isinstance(part, ast.withitem)):
        return False
    return all(isinstance(read, ast.Call) or _is_made(read) for read in _read_one_by_one(parts, calls))


def _reads(call: ast.Call, plots: Collection[str], methods: Collection[str]) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in READERS or call.func.id in plots
    return isinstance(call.func, ast.Attribute) and (root(call) in plots or call.func.attr in methods)


def _read_one_by_one(parts: Sequence[ast.AST], calls: Sequence[ast.Call]) -> Iterator[ast.expr]:
    yield from (part.iter for part in parts if isinstance(part, _LOOPS))
    for one in (part for part in parts if isinstance(part, ast.Compare)):
        yield from (read for sign, read in zip(one.ops, one.comparators, strict=True) if isinstance(sign, _HELD_IN))
    for part in parts:
        if (
            isinstance(part, ast.Assign)
            and isinstance(part.value, ast.Name)
            and any(isinstance(one, ast.Tuple | ast.List) for one in part.targets)
        ):
            yield part.value
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id in _ITERATING:
            yield from call.args


def _is_made(read: ast.expr) -> bool:
    """Return whether it is begun in the statement itself."""
    return isinstance(read, ast.GeneratorExp | ast.ListComp | ast.List | ast.Tuple | ast.Constant)
