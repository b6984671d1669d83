"""The names that a statement of a cell defines, uses and may change."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .effects import (
    IMPORTING,
    OF_CLASS,
    Given,
    effects,
    given_on,
    keeps,
    methods,
    parts_in,
    reaches,
    root,
    sets,
    sets_given,
    values,
)
from .names import last

NOTEBOOK = frozenset({"get_ipython", "display"})
"""What IPython adds to Python's own names."""
BUILTIN = frozenset(dir(builtins)) - NOTEBOOK | {"__name__", "__doc__", "__file__"}
LOOKS = frozenset({"print", "display", "len", "type", "help", "dir", "repr", "id"})
"""Functions that only show something."""
_WAITS = ast.Await | ast.AsyncFor | ast.AsyncWith
_COMPREHENSIONS = {"listcomp", "setcomp", "dictcomp", "genexpr"}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = _FUNCTIONS | ast.ClassDef
_SURE = _DEFINITIONS | ast.Import | ast.ImportFrom | ast.Assign
_ACTS = ast.Call | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom
_USING_UP = ast.Starred | ast.comprehension | ast.In | ast.NotIn  # what reads an iterator leaves less of it
_OBJECTS = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.GeneratorExp
_OF_VALUES = {"abs", "bool", "bytes", "complex", "device", "field", "float", "frozenset", "int", "len", "max", "min"}
_OF_VALUES |= {"Path", "range", "round", "str", "sum", "tuple", "TypeVar"}  # calls that make nothing that can change
_CACHE = re.compile("cache(?!d_property)|memoi")  # decorators whose functions give one object again and again


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement at the top level of a cell.

    Attributes:
        text: its code, without comments.
        binds: names that it defines, those that it may define included.
        surely: those of them that are defined whatever happens in it.
        fresh: those that stand for something else after it: also what loops and ``with`` give names to.
        deletes: those that it deletes.
        reads: names that it uses when it runs.
        first: those of them that it uses before it may have defined them itself.
        late: names that functions in it use when they are called, perhaps much later.
        binds_late: names that they define then.
        values: names that it uses otherwise than by calling them: what is given on, or changed.
        sets: roots of what it sets attributes or items of, or calls by a name that says that it sets something.
        effects: roots of what it calls and gets nothing of, and of decorators.
        sets_late, effects_late: the same of its functions, which may have others by names of their own.
        calls, calls_late: the methods that it may call when it runs, and those that its functions may.
        methods: of a class, each looked at like a function.
        gives: roots of names and attributes in it that are not called, but may be given to a function.
        sets_given: which arguments its functions set or change something of.
        adds_to: classes that it extends, and packages that it imports parts of.
        aliases: names that it gives to parts of something.
        parts_of: roots of that something.
        reaches: whether it may reach any name, by ``exec``, ``globals()`` and the like; its functions included.
        imports: whether it only imports.
        defines: whether it is a definition of a function or class.
        constant: whether it names numbers, text, or tuples of them.
        acts: whether anything runs in it but definitions.
        looks: whether it only shows something.
        waits: whether it waits outside of functions, as a cell may and a script may not.
        holds: whether it is a definition that keeps objects from one use to the next.
        keeps: whether its functions may change something that is there from one call to the next.
    """

    text: str
    binds: frozenset[str]
    surely: frozenset[str]
    fresh: frozenset[str]
    deletes: frozenset[str]
    reads: frozenset[str]
    first: frozenset[str]
    late: frozenset[str]
    binds_late: frozenset[str]
    values: frozenset[str]
    sets: frozenset[str]
    effects: frozenset[str]
    sets_late: frozenset[str]
    effects_late: frozenset[str]
    calls: frozenset[str]
    calls_late: frozenset[str]
    methods: tuple[tuple[str, Statement], ...]
    gives: frozenset[Given]
    sets_given: frozenset[int | str]
    adds_to: frozenset[str]
    aliases: frozenset[str]
    parts_of: frozenset[str]
    reaches: bool
    imports: bool
    defines: bool
    constant: bool
    acts: bool
    looks: bool
    waits: bool
    holds: bool
    keeps: bool


def statement(node: ast.stmt, brought: Collection[str]) -> Statement:
    """Look at a statement.

    Args:
        node: the statement.
        brought: names that an import in it brings by ``*``.
    """
    text = ast.unparse(node)
    known = _WithoutAwait.of(text) if "await" in text or "async" in text else text
    table = symtable.symtable(known, "cell", "exec")
    binds = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()} | set(brought)
    reads = {one.get_name() for one in table.get_symbols() if one.is_referenced()}
    own = [*_outside_functions(node)]
    reads -= {name for one in own for name in _given(one)} - {name for one in own for name in _read_before(one)}
    reads |= {one.target.id for one in own if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name)}
    deletes = {one.id for one in own if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Del)}
    reads |= deletes  # it fails without them
    late, binds_late = set[str](), set[str]()
    for name, assigned, called_later in _inner(table, False):
        (late if called_later else reads).add(name)
        if assigned:
            (binds_late if called_later else binds).add(name)
    imports, defines = isinstance(node, ast.Import | ast.ImportFrom), isinstance(node, _DEFINITIONS)
    sure = isinstance(node, _SURE) or (isinstance(node, ast.AnnAssign) and node.value is not None)
    surely = binds - _packages(node) if sure else set[str]()
    everything = [*ast.walk(node)]
    # What functions call so may be their own otherwise.
    of_module = set[str]()
    if late or defines:
        of_module = reads | late | binds_late | {OF_CLASS, *IMPORTING, *_imported(everything)}
    constant = _names_constants(node)
    given = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else getattr(node, "iter", None)
    return Statement(
        text=text,
        binds=frozenset(binds),
        surely=frozenset(surely),
        fresh=frozenset(surely | {name for one in own for name in _given(one)}),
        deletes=frozenset(deletes),
        reads=frozenset(reads),
        first=frozenset(reads if _reads_first(node) else reads - binds),
        late=frozenset(late),
        binds_late=frozenset(binds_late),
        values=frozenset(values(node)),
        sets=frozenset(name for one in own for name in sets(one)),
        effects=frozenset(name for one in own for name in effects(one)),
        sets_late=frozenset(name for one in everything for name in sets(one) if name in of_module),
        effects_late=frozenset(name for one in everything for name in effects(one) if name in of_module),
        calls=frozenset(name for one in own for name in methods(one)),
        calls_late=frozenset(name for one in everything for name in methods(one)) if late or defines else frozenset(),
        methods=tuple((f".{one.name}", statement(one, ())) for one in _methods_of(node)),
        gives=frozenset(
            name for one in (getattr(node, "decorator_list", []) if defines else [node]) for name in given_on(one)
        ),
        sets_given=sets_given(node),
        adds_to=frozenset(_packages(node) | {name for one in own for name in _extended(one)}),
        aliases=frozenset(binds if isinstance(node, ast.Assign | ast.AnnAssign | ast.For) else ()),
        parts_of=frozenset(parts_in(given) if given else ()),
        reaches=any(map(reaches, everything)),
        imports=imports,
        defines=defines,
        constant=constant,
        acts=not (imports or constant or _only_defines(node)),
        looks=_only_looks(node),
        holds=defines and _holds(node),
        keeps=defines and any(map(keeps, everything)),
        waits=any(isinstance(one, _WAITS) or getattr(one, "is_async", 0) for one in own),
    )


class _WithoutAwait(ast.NodeTransformer):
    """Code of a cell that waits at its top level, which a module does not do: as if it did not wait."""

    @classmethod
    def of(cls, text: str) -> str:
        """Return such code."""
        return ast.unparse(ast.fix_missing_locations(cls().visit(ast.parse(text))))

    def visit_Await(self, node: ast.Await) -> ast.AST:
        return self.visit(node.value)  # type: ignore[no-any-return]

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        return self.generic_visit(ast.For(node.target, node.iter, node.body, node.orelse))

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        return self.generic_visit(ast.With(node.items, node.body))

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        node.is_async = 0
        return self.generic_visit(node)


def _methods_of(node: ast.stmt) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (one for one in node.body if isinstance(one, _FUNCTIONS)) if isinstance(node, ast.ClassDef) else ()


def _holds(node: ast.AST) -> bool:
    """Return whether a definition keeps objects from one use to the next: defaults, attributes of a class, a cache."""
    if any(_CACHE.search(last(getattr(one, "func", one))) for one in getattr(node, "decorator_list", [])):
        return True
    if isinstance(node, _FUNCTIONS):
        given = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
    else:
        assert isinstance(node, ast.ClassDef)
        given = [one.value for one in node.body if isinstance(one, ast.Assign | ast.AnnAssign) and one.value]
        if any(isinstance(one, _DEFINITIONS) and _holds(one) for one in node.body):
            return True
        if any(name in (OF_CLASS, "cls") for part in ast.walk(node) for name in sets(part)):
            return True
    return any(isinstance(part, _OBJECTS) or _makes_object(part) for one in given for part in ast.walk(one))


def _makes_object(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and last(node.func) not in _OF_VALUES


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement that run with it, and not when a function in it is called."""
    yield node
    inside = isinstance(node, _FUNCTIONS | ast.Lambda)
    for child in getattr(node, "decorator_list", []) if inside else ast.iter_child_nodes(node):
        yield from _outside_functions(child)


def _reads_first(node: ast.stmt) -> bool:
    """Return whether a statement uses whatever it uses before it defines anything."""
    plain = isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr)
    return plain and not any(isinstance(one, ast.NamedExpr) for one in ast.walk(node))


def _packages(node: ast.stmt) -> set[str]:
    """Return the packages that ``import a.b`` adds to: it may be one of several that do."""
    names = node.names if isinstance(node, ast.Import) else []
    return {one.name.partition(".")[0] for one in names if "." in one.name and not one.asname}


def _imported(parts: Collection[ast.AST]) -> Iterator[str]:
    imports = (one for one in parts if isinstance(one, ast.Import | ast.ImportFrom))
    yield from (name.asname or name.name.partition(".")[0] for one in imports for name in one.names)


def _extended(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        yield from (root(part) for part in [*node.bases, *(word.value for word in node.keywords)])


def _given(node: ast.AST) -> Iterator[str]:
    """Yield names that ``with`` and ``for`` give."""
    target = node.optional_vars if isinstance(node, ast.withitem) else None
    target = node.target if isinstance(node, ast.For) else target
    names = (one for one in ast.walk(target or ast.Pass()) if isinstance(one, ast.Name))
    yield from (one.id for one in names if isinstance(one.ctx, ast.Store))


def _read_before(node: ast.AST) -> Iterator[str]:
    """Yield names that ``with`` and ``for`` use before they give any, or after all of it."""
    parts = [node.iter, *node.orelse] if isinstance(node, ast.For) else []
    parts += [node.context_expr] if isinstance(node, ast.withitem) else []
    yield from (one.id for part in parts for one in ast.walk(part) if isinstance(one, ast.Name))


def _inner(table: symtable.SymbolTable, later: bool) -> Iterator[tuple[str, bool, bool]]:
    """Yield names of the module that functions and classes use: name, assigned there, only when called."""
    for child in table.get_children():
        called = later or (child.get_type() == "function" and child.get_name() not in _COMPREHENSIONS)
        for one in child.get_symbols():
            if one.is_global() and (one.is_referenced() or one.is_assigned()):
                yield one.get_name(), one.is_assigned() and one.is_declared_global(), called
        yield from _inner(child, called)


def _acts(node: ast.AST) -> bool:
    """Return whether something is called in a statement itself, and not in the functions that it defines."""
    if isinstance(node, _FUNCTIONS | ast.Lambda):
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        return bool(getattr(node, "decorator_list", [])) or any(map(_acts, defaults))
    return isinstance(node, _ACTS) or any(map(_acts, ast.iter_child_nodes(node)))


def _only_defines(node: ast.stmt) -> bool:
    """Return whether a statement does nothing but define a function, or a class of functions and constants."""
    if isinstance(node, ast.ClassDef):
        parts = (part for part in node.body if not (isinstance(part, ast.Pass) or _is_text(part)))
        inner = all(_only_defines(part) or _names_constants(part) for part in parts)
        return inner and not node.decorator_list and not any(map(_acts, [*node.bases, *node.keywords]))
    return isinstance(node, _FUNCTIONS) and not _acts(node)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _names_constants(node: ast.stmt) -> bool:
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and (node.value is None or _is_constant(node.value))
    if not isinstance(node, ast.Assign):
        return False
    return all(isinstance(one, ast.Name) for one in node.targets) and _is_constant(node.value)


def _is_constant(node: ast.expr) -> bool:
    """Return whether an expression is a number, text, or a tuple of them."""
    kinds = ast.Constant | ast.Tuple | ast.UnaryOp | ast.BinOp | ast.operator | ast.unaryop | ast.expr_context
    return all(isinstance(one, kinds) for one in ast.walk(node))


def _only_looks(node: ast.stmt) -> bool:
    """Return whether a statement only shows something: a print, or a value at the end of a cell."""
    if isinstance(node, ast.Pass):
        return True
    if not isinstance(node, ast.Expr):
        return False
    inner = [one for one in ast.walk(node) if isinstance(one, _ACTS | _USING_UP)]
    return all(isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id in LOOKS for one in inner)
