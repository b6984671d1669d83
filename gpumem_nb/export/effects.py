"""What the parts of a statement use otherwise than by calling it, set, change, give on and may reach."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping

from .names import dotted, last

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_SETTING = re.compile(
    r"(?!.*(seed|print|verbosity|option$))(set|use_|enable|disable|register|add_safe|update|chdir|putenv)"
)
_OF_LISTS = {"insert", "append", "extend", "remove", "pop", "clear"}
_LOOKING_INTO = {"getattr", "vars", "type", "iter", "reversed", "enumerate", "zip", "partial"}
"""Functions that give parts of what they are given."""
IMPORTING = frozenset({"import_module", "__import__", "reload"})
"""Functions that give modules."""
_GENERATORS = {"default_rng", "RandomState", "SeedSequence", "PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"}
_SEEDING = {"random.Random", "random.seed", "np.random.seed", "numpy.random.seed", "torch.seed", "torch.random.seed"}
_SEEDS = re.compile(r"(.*_)?seeds?(_.*)?|Random", re.IGNORECASE)  # what gives or is a seed is called so
_ANOTHER_EACH_TIME = re.compile(r"(time|datetime|uuid|secrets)\.|os\.(urandom|getpid)")
_REACHING = {"exec", "eval", "globals", "locals", "__builtins__"}
_REACHING_INSIDE = {
    "__globals__",
    "f_globals",
    "f_locals",
    "get_objects",
    "get_referrers",
    "user_ns",
    "user_global_ns",
    "user_module",
    "run_cell",
    "run_cell_async",
    "run_code",
    "run_ast_nodes",
    "ex",
    "ev",
    "exec",
}
_BY_NAME = _REACHING | _REACHING_INSIDE | {"vars"}

OF_CLASS = "__class__"
"""In place of a root: the class of some object, which may be any."""


def root(node: ast.AST) -> str:
    """Return the name that an expression of attributes, items and calls begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(node, ast.Call) and last(node.func) in IMPORTING:
            return last(node.func) * _imports(node)
        if isinstance(node, ast.Call):
            node = node.args[0] if node.args and last(node.func) in _LOOKING_INTO else node.func
        else:
            node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _imports(call: ast.Call) -> bool:
    """Return whether a call gives a module, other than one of Python's own that it names."""
    named = {getattr(one, "value", "") for one in call.args}
    return last(call.func) in IMPORTING and named.isdisjoint(sys.stdlib_module_names)


def values(node: ast.AST) -> Iterator[str]:
    """Yield names that are used otherwise than by calling them, or by extending a class."""
    plain = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.Name) and child in plain):
            yield from values(child)
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
        yield node.id


def sets(node: ast.AST) -> Iterator[str]:
    """Yield roots of what gets attributes or items, or is told by a call to set something."""
    changed = [node.value] if isinstance(node, ast.Attribute | ast.Subscript) and _is_changed(node) else []
    what = last(node.func) if isinstance(node, ast.Call) else ""
    if isinstance(node, ast.Call) and what in ("setattr", "delattr"):
        changed = node.args[:1]
    elif isinstance(node, ast.Call) and (_SETTING.match(what) or _changes_list(node.func, what)):
        yield root(node.func)
    elif isinstance(node, ast.AugAssign):
        yield root(node.target)
    for one in changed:
        yield root(one)
        yield from [OF_CLASS] if _is_of_class(one) else ()


def _is_changed(node: ast.Attribute | ast.Subscript) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _is_of_class(node: ast.AST) -> bool:
    """Return whether an expression is as ``type(net).scale`` or ``net.__class__.scale``."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        if last(node.func if isinstance(node, ast.Call) else node) in ("type", "__class__"):
            return True
        node = node.func if isinstance(node, ast.Call) else node.value
    return False


def _changes_list(function: ast.AST, what: str) -> bool:
    """Return whether a call changes what a list or dict has, of a package or its own; ``np.append`` changes none."""
    held = getattr(function, "value", function)
    return what in _OF_LISTS and (isinstance(held, ast.Attribute) or last(held) in ("path", "environ"))


def keeps(node: ast.AST) -> bool:
    """Return whether a part of a function may change something that is there from one call to the next."""
    kept = isinstance(node, ast.Call) and last(node.func) in _OF_LISTS
    return kept or isinstance(node, ast.Nonlocal) or any(True for _ in sets(node))


def methods(node: ast.AST) -> Iterator[str]:
    """Yield the methods that may be called: ``.name``, and ``name()`` for what may be called as a function is."""
    if isinstance(node, ast.Call):
        yield f".{node.func.attr}" if isinstance(node.func, ast.Attribute) else f"{last(node.func)}()"
    elif isinstance(node, ast.withitem):
        yield from (".__enter__", ".__exit__")


def effects(node: ast.AST) -> Iterator[str]:
    """Yield roots of calls whose value nothing gets, and of decorators."""
    if isinstance(node, ast.Expr):
        yield from (root(one) for one in ast.walk(node) if isinstance(one, ast.Call))
    yield from map(root, getattr(node, "decorator_list", []))


ANY = "*"
"""In place of an argument: whichever."""
Given = tuple[str, int | str, str]
"""A root that is given on: to which function by its name, if that is plain, as which argument, and the root."""


def sets_given(node: ast.stmt) -> frozenset[int | str]:
    """Return which arguments functions in a statement set or change something of, by position and by name.

    Of those that are not the statement itself, :data:`ANY`; themselves (``self``) aside.
    """
    parts = [part for one in ast.walk(node) if isinstance(one, _FUNCTIONS) for part in ast.walk(one)]
    calls = [one for part in parts if isinstance(part, ast.Expr) for one in ast.walk(part) if isinstance(one, ast.Call)]
    changed = {root(one) for one in calls if isinstance(one.func, ast.Attribute)}  # a call alone changes no function
    changed = (changed | {name for part in parts for name in sets(part)}) - {"self"}
    before = set[str]()
    while changed != before:  # they may be parts of something else
        before = set(changed)
        for value, target in (pair for part in parts for pair in _bound_to(part)):
            names = {one.id for one in ast.walk(target) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
            if names & changed:
                changed |= {*parts_in(value)}
    changed &= {part.arg for part in parts if isinstance(part, ast.arg)}
    if not isinstance(node, ast.FunctionDef) or any(
        isinstance(one, _FUNCTIONS) for one in ast.walk(node) if one is not node
    ):
        return frozenset([ANY] if changed else ())
    places = {one.arg: place for place, one in enumerate([*node.args.posonlyargs, *node.args.args])}
    named = places.keys() | {one.arg for one in node.args.kwonlyargs}
    return frozenset(ANY if name not in named else name for name in changed) | {places.get(one, one) for one in changed}


def _bound_to(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield values, and targets that get them or parts of them."""
    if isinstance(node, ast.For | ast.comprehension):
        yield node.iter, node.target
    elif isinstance(node, ast.NamedExpr | ast.AnnAssign) and node.value:
        yield node.value, node.target
    elif isinstance(node, ast.Assign):
        yield from ((node.value, target) for target in node.targets)


def given_on(node: ast.AST, function: str = "", place: int | str = "") -> Iterator[Given]:
    """Yield roots of names and attributes that are not called, and to which function they are given."""
    if isinstance(node, ast.Name):
        yield function, place, node.id
    elif isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        for number, one in enumerate(node.args):
            yield from given_on(one, name, number) if not isinstance(one, ast.Starred) else given_on(one)
        for word in node.keywords:
            yield from given_on(word.value, name if word.arg else "", word.arg or "")
        called = node.func
        while isinstance(called, ast.Attribute):
            called = called.value
        yield from () if isinstance(called, ast.Name) else given_on(called)
    else:
        for child in ast.iter_child_nodes(node):
            yield from given_on(child, function, place)


def parts_in(value: ast.AST) -> Iterator[str]:
    """Yield roots of names and attributes in a value, of what is called and given to calls aside."""
    if isinstance(value, ast.Attribute | ast.Name):
        yield root(value)
    elif isinstance(value, ast.Call) and last(value.func) in _LOOKING_INTO:
        for part in value.args:
            yield from parts_in(part)
    elif isinstance(value, ast.Call):
        yield from [last(value.func)] if _imports(value) else []
    else:
        for child in ast.iter_child_nodes(value):
            yield from parts_in(child)


def unseeded(code: str, meant: Mapping[str, str]) -> bool:
    """Return whether some code makes a random generator without a seed, or a seed of what is another each time.

    ``meant`` says what names were imported for.
    """
    parts = [*ast.walk(ast.parse(code))]
    seeds = (
        one for one in parts if isinstance(one, ast.Assign) and any(_SEEDS.fullmatch(last(t)) for t in one.targets)
    )
    return any(_is_unseeded(one, meant) for one in parts if isinstance(one, ast.Call)) or any(
        _is_another_each_time(one.value, meant) for one in seeds
    )


def _is_unseeded(call: ast.Call, meant: Mapping[str, str]) -> bool:
    given = [*call.args, *(word.value for word in call.keywords)]
    name = dotted(call.func, meant)
    end = name.rpartition(".")[2]
    if (end in _GENERATORS or _SEEDS.fullmatch(end)) and any(_is_another_each_time(one, meant) for one in given):
        return True
    of_object = name.endswith(".seed") and not given  # as of ``torch.Generator().seed()``
    seeds = [one for one in given if getattr(one, "value", 0) is not None]
    return end == "SystemRandom" or of_object or (not seeds and (end in _GENERATORS or name in _SEEDING))


def _is_another_each_time(value: ast.AST, meant: Mapping[str, str]) -> bool:
    calls = (one for one in ast.walk(value) if isinstance(one, ast.Call))
    return any(_ANOTHER_EACH_TIME.match(dotted(one.func, meant)) for one in calls)


def reaches(node: ast.AST) -> bool:
    """Return whether a part of a statement may reach names that do not stand in it."""
    if isinstance(node, ast.Call) and last(node.func) in ("vars", "__import__"):
        given = [getattr(one, "value", "__main__") for one in node.args]
        return "__main__" in given if last(node.func) == "__import__" else not given
    if isinstance(node, ast.Call) and last(node.func) in ("getattr", "attrgetter"):
        return not {getattr(one, "value", "") for one in node.args}.isdisjoint(_BY_NAME)
    if isinstance(node, ast.Attribute):
        of_builtins = last(node.value) == "builtins" and node.attr in _REACHING
        return of_builtins or node.attr in _REACHING_INSIDE or dotted(node, {}) == "sys.modules"
    if isinstance(node, ast.Import | ast.ImportFrom):
        names, module = {alias.name for alias in node.names}, getattr(node, "module", "")
        return "__main__" in (module, *names) or (module == "builtins" and not names.isdisjoint(_BY_NAME))
    if isinstance(node, ast.Assign):
        return isinstance(node.value, ast.Name) and node.value.id == "vars"
    return isinstance(node, ast.Name) and node.id in _REACHING
