"""The statements of a cell, and what each of them defines, uses and may change."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from .called import last, root
from .imports import imported_in
from .outside import is_idle, magics, only_saves, saves

LOOKS = frozenset({"print", "display", "len", "type", "help", "dir", "repr", "id"})
"""Functions that only show something."""
_COMPREHENSIONS = {"listcomp", "setcomp", "dictcomp", "genexpr"}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_SURE = _FUNCTIONS | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign
_ACTS = ast.Call | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom
_SETTING = ("set_", "use_", "enable_", "manual_seed", "seed", "register_", "setdefault", "seterr", "add_safe", "update")
_SHOWING = {"set_printoptions", "set_option", "set_verbosity", "set_verbosity_error"}  # settings of what is shown
_PLACING = {"chdir", "putenv"}
_OF_LISTS = {"insert", "append", "extend", "remove", "pop", "clear"}
_SEEDING = ("manual_seed", "seed", "set_seed", "set_random_seed", "set_rng_state")
_SHOWN = ast.Name | ast.Attribute | ast.Constant | ast.JoinedStr | ast.FormattedValue | ast.keyword | ast.expr_context


@dataclass(slots=True)
class Unit:
    """One statement of a cell, with the comments above it; or several that share a line.

    Attributes:
        text: its lines.
        cell: its number among all that are looked at.
        binds: names that it defines, those that it may define included.
        surely: those of them that are defined whatever happens in it.
        deletes: those of them that it deletes.
        loops: names that a loop gives to one thing after the other, which are of no use before it.
        reads: names that it uses when it runs.
        first: those of them that were defined before it: it uses them before it may have defined them itself.
        late: names that functions in it use when they are called, perhaps much later.
        assigns_late: names that they define then.
        imports: whether it only imports.
        defines: whether it is a definition of functions and classes.
        plain: whether it only imports, defines functions and classes, or names constants: it acts on nothing.
        constant: whether it only names constants.
        names: whether it only gives names to what is there, without calling anything.
        looks: whether it only shows something.
        still: whether it only shows what is there already, so that nothing draws random numbers.
        pokes: names of what it sets attributes or items of, or calls for its effect.
        pokes_late: the same of its functions.
        given: names of what it gives to that.
        classes: whether it defines a class.
        extends: names of bases and metaclasses of such classes.
        registers: whether a class that it defines is told of classes that extend it.
        sets: names of what it sets attributes or items of, or calls something of whose name says that it sets.
        seeds: the same, of random numbers.
        sets_late, seeds_late: those of its functions.
        saves: whether it only writes files of what is there.
        odd_save: whether it writes files, and calls other things for that, which may act.
        magic: whether it is a line of IPython's own that may act.
    """

    text: str
    cell: int
    binds: frozenset[str]
    surely: frozenset[str] = frozenset()
    deletes: frozenset[str] = frozenset()
    loops: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    first: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    assigns_late: frozenset[str] = frozenset()
    imports: bool = False
    defines: bool = False
    plain: bool = False
    constant: bool = False
    names: bool = False
    looks: bool = False
    still: bool = False
    pokes: frozenset[str] = frozenset()
    pokes_late: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()
    classes: bool = False
    extends: frozenset[str] = frozenset()
    registers: bool = False
    sets: frozenset[str] = frozenset()
    seeds: frozenset[str] = frozenset()
    sets_late: frozenset[str] = frozenset()
    seeds_late: frozenset[str] = frozenset()
    saves: bool = False
    odd_save: bool = False
    magic: bool = False


def units_of(source: str, cell: int = 0) -> list[Unit]:
    """The statements of a cell."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # as ast counts them
    groups: list[list[ast.stmt]] = []
    for node in tree.body:
        if _is_future(node):  # see has_lazy_annotations
            continue
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        if groups and first <= (groups[-1][-1].end_lineno or 0):
            groups[-1].append(node)
        else:
            groups.append([node])
    units, begin, lazy = [], 0, has_lazy_annotations(source)
    for group in groups:
        end = group[-1].end_lineno or 0
        text = "\n".join(lines[begin:end]).strip("\n")
        if "__future__" in text and any(map(_is_future, ast.parse(text).body)):
            text = "\n".join(map(ast.unparse, group))
        units.append(_unit(text, group, cell, lazy))
        begin = end
    return units


def has_lazy_annotations(source: str) -> bool:
    """Whether annotations of this code are not evaluated: ``from __future__ import annotations``."""
    named = (alias.name for node in ast.parse(source).body if _is_future(node) for alias in node.names)
    return "annotations" in named


def _is_future(node: ast.stmt) -> TypeGuard[ast.ImportFrom]:
    """Whether it is an import that says how code is read."""
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _unit(text: str, nodes: Sequence[ast.stmt], cell: int, lazy: bool) -> Unit:
    table = symtable.symtable(text, "cell", "exec")
    binds = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    if lazy:
        table = symtable.symtable(f"from __future__ import annotations\n{text}", "cell", "exec")
    reads = {one.get_name() for one in table.get_symbols() if one.is_referenced()}
    reads |= {name for node in nodes for name in _added_to(node)}
    late, assigns_late = set[str](), set[str]()
    for name, assigned, called_later in _inner(table, False):
        (late if called_later else reads).add(name)
        if assigned:
            (assigns_late if called_later else binds).add(name)
    sure = all(isinstance(node, _SURE) or (isinstance(node, ast.AnnAssign) and node.value) for node in nodes)
    constant = all(map(_names_constants, nodes))
    imports = all(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes)
    if imports:
        binds |= {name for name, _ in imported_in(text)}  # what Python's own modules bring by * included
    if saving := all(map(saves, nodes)):  # what a block has open is of no use after it
        binds -= {name for node in nodes for name in _open_in(node)}
    return Unit(
        text=text,
        cell=cell,
        binds=frozenset(binds),
        surely=frozenset(binds - set(_packages(nodes)) if sure else ()),
        deletes=frozenset(name for node in nodes for name in _deleted(node)),
        loops=frozenset(_looped(nodes)),
        reads=frozenset(reads),
        first=frozenset(reads if len(nodes) == 1 and _reads_first(nodes[0]) else reads - binds),
        late=frozenset(late),
        assigns_late=frozenset(assigns_late),
        imports=imports,
        defines=all(isinstance(node, _FUNCTIONS | ast.ClassDef) for node in nodes),
        plain=imports or constant or all(map(_only_defines, nodes)),
        constant=constant,
        names=all(map(_only_names, nodes)),
        looks=all(map(_only_looks, nodes)),
        still=all(_only_looks(node) and _only_shown(node) for node in nodes),
        pokes=frozenset(name for node in nodes for name in _pokes(node)),
        pokes_late=frozenset(name for node in nodes for name in _pokes(node, inside=True)),
        given=frozenset(name for node in nodes for name in _given(node)),
        classes=any(isinstance(node, ast.ClassDef) for node in nodes),
        extends=frozenset(name for node in nodes for name in _extends(node)),
        registers=any(map(_registers, nodes)),
        sets=frozenset(name for node in nodes for name, seeds in _sets(node) if not seeds),
        seeds=frozenset(name for node in nodes for name, seeds in _sets(node) if seeds),
        sets_late=frozenset(name for node in nodes for name, seeds in _sets(node, inside=True) if not seeds),
        seeds_late=frozenset(name for node in nodes for name, seeds in _sets(node, inside=True) if seeds),
        saves=saving and all(map(only_saves, nodes)),
        odd_save=saving and not all(map(only_saves, nodes)),
        magic=any(next(magics(node), "") for node in nodes) and not all(map(is_idle, nodes)),
    )


def _reads_first(node: ast.stmt) -> bool:
    """Whether a statement uses whatever it uses before it defines anything."""
    plain = isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr)
    return plain and not any(isinstance(one, ast.NamedExpr) for one in ast.walk(node))


def _packages(nodes: Sequence[ast.stmt]) -> Iterator[str]:
    """What ``import a`` and ``import a.b`` define: all add to the same ``a``, so none stands for the others."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (one.name.partition(".")[0] for one in node.names if not one.asname)


def _open_in(node: ast.AST) -> Iterator[str]:
    """Names that ``with`` and ``for`` give."""
    for one in ast.walk(node):
        target = (
            one.optional_vars if isinstance(one, ast.withitem) else one.target if isinstance(one, ast.For) else None
        )
        yield from (name.id for name in ast.walk(target or ast.Pass()) if isinstance(name, ast.Name))


def _inner(table: symtable.SymbolTable, later: bool) -> Iterator[tuple[str, bool, bool]]:
    """Names of the module that the functions and classes of a statement use: name, assigned there, only when called."""
    for child in table.get_children():
        called = later or (child.get_type() == "function" and child.get_name() not in _COMPREHENSIONS)
        for one in child.get_symbols():
            if one.is_global() and (one.is_referenced() or one.is_assigned()):
                yield one.get_name(), one.is_assigned() and one.is_declared_global(), called
        yield from _inner(child, called)


def _acts(node: ast.AST) -> bool:
    """Whether something is called in a statement itself, and not in the functions that it defines."""
    if isinstance(node, _ACTS):
        return True
    if isinstance(node, ast.Lambda):
        return any(map(_acts, node.args.defaults))
    if isinstance(node, _FUNCTIONS):
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        return bool(node.decorator_list) or any(map(_acts, defaults))
    return any(map(_acts, ast.iter_child_nodes(node)))


def _only_defines(node: ast.stmt) -> bool:
    """Whether a statement does nothing but define a function, or a class of functions and constants."""
    if isinstance(node, ast.ClassDef):
        parts = (part for part in node.body if not isinstance(part, ast.Pass))
        inner = all(_only_defines(part) or _names_constants(part) or _is_text(part) for part in parts)
        return inner and not node.decorator_list and not any(map(_acts, [*node.bases, *node.keywords]))
    return isinstance(node, _FUNCTIONS) and not _acts(node)


def _only_names(node: ast.stmt) -> bool:
    assigns = isinstance(node, ast.Assign | ast.AnnAssign)
    return assigns and not _acts(node) and not any(_set_places(node, False))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _names_constants(node: ast.stmt) -> bool:
    """Whether a statement gives names to numbers, text, or tuples of them."""
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and (node.value is None or _is_constant(node.value))
    if not isinstance(node, ast.Assign):
        return False
    return all(isinstance(one, ast.Name) for one in node.targets) and _is_constant(node.value)


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return all(map(_is_constant, node.elts))
    if isinstance(node, ast.UnaryOp):
        return _is_constant(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_constant(node.left) and _is_constant(node.right)
    return isinstance(node, ast.Constant)


def _only_looks(node: ast.stmt) -> bool:
    """Whether a statement only shows something: a print, or a value at the end of a cell."""
    if not isinstance(node, ast.Expr):
        return False
    if is_idle(node):
        return True
    inner = [one for one in ast.walk(node) if isinstance(one, _ACTS)]
    return all(isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id in LOOKS for one in inner)


def _only_shown(node: ast.stmt) -> bool:
    return all(isinstance(one, _SHOWN | ast.Call | ast.Expr) for one in ast.walk(node))


def _walk(node: ast.AST, inside: bool) -> Iterator[ast.AST]:
    """The parts of a statement, those of the functions that it defines only where they are asked for."""
    yield node
    if isinstance(node, _FUNCTIONS | ast.Lambda) and not inside:
        children: Iterable[ast.AST] = getattr(node, "decorator_list", [])
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from _walk(child, inside)


def _pokes(node: ast.AST, inside: bool = False) -> Iterator[str]:
    """Names of what gets attributes or items, is a decorator, or is called for its effect."""
    yield from filter(None, map(root, _set_places(node, inside)))
    for one in _walk(node, inside):
        yield from filter(None, map(root, getattr(one, "decorator_list", [])))
        call = one.value if isinstance(one, ast.Expr) else one
        if isinstance(call, ast.Await):
            call = call.value
        if not isinstance(call, ast.Call):
            continue
        if (isinstance(one, ast.Expr) and not _only_looks(one)) or last(call.func).startswith(_SETTING):
            attributes = last(call.func) in ("setattr", "delattr")
            yield from filter(None, map(root, call.args[:1] if attributes else [call.func]))


def _added_to(node: ast.AST) -> Iterator[str]:
    """Names of what ``+=`` and the like use, and perhaps change in place."""
    for one in _walk(node, False):
        if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name):
            yield one.target.id


def _given(node: ast.AST) -> Iterator[str]:
    """Names of what is given as it is to something that is called for its effect."""
    for one in _walk(node, False):
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and not _only_looks(one):
            arguments = [*one.value.args, *(keyword.value for keyword in one.value.keywords)]
            yield from (root(part) for part in arguments if isinstance(part, ast.Name | ast.Attribute))


def _extends(node: ast.AST) -> Iterator[str]:
    classes = (one for one in _walk(node, False) if isinstance(one, ast.ClassDef))
    yield from (root(part) for one in classes for part in [*one.bases, *(word.value for word in one.keywords)])


def _registers(node: ast.AST) -> bool:
    """Whether it defines a class with ``__init_subclass__``, or a metaclass that sees classes begin."""
    names = {one.name for one in ast.walk(node) if isinstance(one, _FUNCTIONS)}
    return "__init_subclass__" in names or ("type" in _extends(node) and bool(names & {"__new__", "__init__"}))


def _sets(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Names of what gets attributes or items, or is told by a call to set something; and whether that only seeds."""
    yield from ((root(place), False) for place in _set_places(node, inside))
    for call in _walk(node, inside):
        what = last(call.func) if isinstance(call, ast.Call) else ""
        if isinstance(call, ast.Call) and what in ("setattr", "delattr"):
            yield from ((root(one), False) for one in call.args[:1])
        elif isinstance(call, ast.Call) and (what in _PLACING or _changes_path(call.func, what)):
            yield root(call.func), False
        elif isinstance(call, ast.Call) and what.startswith(_SETTING) and what not in _SHOWING:
            yield root(call.func), what.startswith(_SEEDING)


def _changes_path(function: ast.AST, what: str) -> bool:
    """Whether it changes ``sys.path``; ``os.path`` has no such functions."""
    return what in _OF_LISTS and last(getattr(function, "value", function)) == "path"


def _set_places(node: ast.AST, inside: bool) -> Iterator[ast.AST]:
    for one in _walk(node, inside):
        if isinstance(one, ast.Attribute | ast.Subscript) and isinstance(one.ctx, ast.Store | ast.Del):
            yield one


def _deleted(node: ast.stmt) -> Iterator[str]:
    """Names that ``del`` takes away."""
    parts = ast.walk(node) if isinstance(node, ast.Delete) else ()
    yield from (one.id for one in parts if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Del))


def _looped(nodes: Sequence[ast.stmt]) -> set[str]:
    """Targets of a loop, unless what it loops over or what comes after it uses them, too."""
    if len(nodes) != 1 or not isinstance(loop := nodes[0], ast.For):
        return set()
    before = {node.id for one in (loop.iter, *loop.orelse) for node in ast.walk(one) if isinstance(node, ast.Name)}
    return {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)} - before
