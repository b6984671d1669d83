"""From the cells that ran on ranks to the statements that made what is trained."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ..shared.errors import WorkloadError
from ..shared.exporting import Cell

OFFERED = frozenset({"hvd", "torch", "rank", "size", "device"})
"""What cells find defined when the ranks start."""
_LOOKS = {"print", "display", "len", "type", "help", "dir", "repr", "id"}
_BUILTIN = frozenset(dir(builtins)) | {"__name__", "__doc__"}


@dataclass(slots=True)
class Unit:
    """One statement of a cell, with the comments above it; or several that share a line.

    Attributes:
        text: its lines.
        cell: its number among all that are looked at.
        binds: names that it defines, those that it may define included.
        surely: those of them that are defined whatever happens in it.
        reads: names that it uses.
        imports: whether it only imports.
        defines: whether it is a definition of functions and classes: mentioning their names changes nothing.
        looks: whether it only shows something.
        calls: whether it calls anything when it runs, so that it may draw random numbers.
    """

    text: str
    cell: int
    binds: frozenset[str]
    surely: frozenset[str]
    reads: frozenset[str]
    imports: bool
    defines: bool
    looks: bool
    calls: bool


@dataclass(frozen=True, slots=True)
class Slice:
    """What is left of the cells.

    Attributes:
        imports: lines.
        text: everything else, in order.
        seed: where random numbers of cells began, before what is in it.
        uses: names of :data:`OFFERED` that it uses.
        binds: names that it defines, and does not only import.
    """

    imports: tuple[str, ...]
    text: str
    seed: int
    uses: frozenset[str]
    binds: frozenset[str]


def needed(cells: Sequence[Cell], names: Collection[str], seed: int, forgotten: bool) -> Slice:
    """The statements of these cells that define the names, or change what they stand for.

    A cell that drew random numbers before one that is needed is there as a whole, unless they were seeded in between.

    Args:
        cells: in the order in which they ran.
        names: what must be defined in the end.
        seed: of the random numbers of cells when the first of them ran.
        forgotten: whether there were earlier ones.

    Raises:
        WorkloadError: a name is not defined by cells that ran well on all ranks.
    """
    units = [
        unit
        for number, cell in enumerate(cells)
        if cell.everywhere and cell.finished
        for unit in units_of(cell.source, number)
    ]
    kept, live = _kept(units, cells, frozenset(names))
    _check(cells, kept, live - OFFERED - _BUILTIN, forgotten)
    first = min((unit.cell for unit in kept if not unit.imports), default=0)
    seeds = [cell.seed for cell in cells[: first + 1] if cell.seed is not None]
    imports = tuple(dict.fromkeys(unit.text for unit in kept if unit.imports))
    binds = frozenset(name for unit in kept if not unit.imports for name in unit.binds)
    text = "\n".join(_joined([unit for unit in kept if not unit.imports], cells))
    return Slice(imports, text, seeds[-1] if seeds else seed, live & OFFERED, binds)


def _kept(units: Sequence[Unit], cells: Sequence[Cell], names: frozenset[str]) -> tuple[list[Unit], frozenset[str]]:
    """Backwards from the end: what defines or changes a name that is still needed there; and what remains needed."""
    defined = {name for unit in units if unit.defines or unit.imports for name in unit.binds}
    live, kept = set(names), list[Unit]()
    drawing = -1  # the earliest cell so far that is needed and draws random numbers
    for unit in reversed(units):
        seeded = any(cell.seed is not None for cell in cells[unit.cell + 1 : drawing + 1])
        draws = unit.calls and cells[unit.cell].drew and drawing >= 0 and not seeded
        changes = bool(unit.reads & live - defined - OFFERED - _BUILTIN) and not (unit.looks or unit.defines)
        if not (unit.binds & live or changes or draws):
            continue
        kept.append(unit)
        live -= unit.surely
        live |= unit.reads
        if cells[unit.cell].drew:
            drawing = unit.cell
    kept.reverse()
    return kept, frozenset(live)


def _check(cells: Sequence[Cell], kept: Sequence[Unit], missing: Collection[str], forgotten: bool) -> None:
    """Refuse what cannot be made again."""
    pushed = {name for cell in cells for name in cell.pushed}
    if missing:
        name = min(missing)
        where = (
            "it was pushed from the notebook"
            if name in pushed
            else "the cells that did are too long ago"
            if forgotten
            else "no %%hvd cell that ran well on all ranks defines it"
        )
        raise WorkloadError(
            f"The script needs {name}, and cannot define it: {where}. Define it in a %%hvd cell, run those after it "
            "again, and attach again."
        )
    last = {name: unit.cell for unit in kept for name in unit.surely}
    for number, cell in enumerate(cells):
        if cell.finished and cell.everywhere and not cell.pushed:
            continue
        binds = {name for unit in units_of(cell.source, number) for name in unit.binds} | set(cell.pushed)
        for name in sorted(binds & last.keys()):
            if number > last[name]:
                how = "was pushed from the notebook" if cell.pushed else "is in a cell that failed"
                how = how if cell.everywhere else "was defined in a cell that ran on some ranks only"
                raise WorkloadError(
                    f"What {name} is cannot be told: after its last cell it {how}. Run its %%hvd cell again on all "
                    "ranks, and attach again."
                )


def units_of(source: str, cell: int = 0) -> list[Unit]:
    """The statements of a cell."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    lines = source.splitlines()
    groups: list[list[ast.stmt]] = []
    for node in tree.body:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        if groups and first <= (groups[-1][-1].end_lineno or 0):
            groups[-1].append(node)
        else:
            groups.append([node])
    units, begin = [], 0
    for group in groups:
        end = group[-1].end_lineno or 0
        text = "\n".join(lines[begin:end]).strip("\n")
        units.append(_unit(text, group, cell))
        begin = end
    return units


def _unit(text: str, nodes: Sequence[ast.stmt], cell: int) -> Unit:
    table = symtable.symtable(text, "cell", "exec")
    binds = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    own = {one.get_name() for one in table.get_symbols() if one.is_referenced()}
    inner = set(_globals_of(table))
    assigned_inside = {name for name, assigned in _global_symbols(table) if assigned}
    straight = all(isinstance(node, _STRAIGHT) for node in nodes)
    return Unit(
        text=text,
        cell=cell,
        binds=frozenset(binds | assigned_inside),
        surely=frozenset(binds if straight else ()),
        reads=frozenset(own | inner),
        imports=all(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes),
        defines=all(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in nodes),
        looks=all(_only_looks(node) for node in nodes),
        calls=any(map(_calls, nodes)),
    )


_STRAIGHT = (
    ast.Assign
    | ast.AnnAssign
    | ast.FunctionDef
    | ast.AsyncFunctionDef
    | ast.ClassDef
    | ast.Import
    | ast.ImportFrom
    | ast.With
)


def _globals_of(table: symtable.SymbolTable) -> Iterator[str]:
    """Names of the module that the functions and classes of a statement use."""
    return (name for name, _ in _global_symbols(table))


def _global_symbols(table: symtable.SymbolTable) -> Iterator[tuple[str, bool]]:
    for child in table.get_children():
        for one in child.get_symbols():
            if one.is_global() and (one.is_referenced() or one.is_assigned()):
                yield one.get_name(), one.is_assigned() and one.is_declared_global()
        yield from _global_symbols(child)


def _only_looks(node: ast.stmt) -> bool:
    """Whether a statement only shows something: a print, or a value at the end of a cell."""
    if not isinstance(node, ast.Expr):
        return False
    called = node.value.func if isinstance(node.value, ast.Call) else None
    if called is not None:
        return isinstance(called, ast.Name) and called.id in _LOOKS
    return not any(isinstance(one, ast.Call | ast.NamedExpr | ast.Await) for one in ast.walk(node))


def _calls(node: ast.AST) -> bool:
    """Whether something is called in a statement itself, and not in the functions that it defines."""
    if isinstance(node, ast.Call | ast.Await):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return any(map(_calls, getattr(node, "decorator_list", [])))
    return any(map(_calls, ast.iter_child_nodes(node)))


def _joined(units: Sequence[Unit], cells: Sequence[Cell]) -> Iterator[str]:
    """The statements, two blank lines around definitions; and where random numbers were seeded in between."""
    before: Unit | None = None
    for unit in units:
        if before is not None and (unit.defines or before.defines):
            yield from ("", "")
        elif before is not None and before.cell != unit.cell:
            yield ""
        seeds = [cell.seed for cell in cells[before.cell + 1 : unit.cell]] if before else []
        for seed in [seed for seed in seeds if seed is not None][-1:]:
            yield f"torch.manual_seed({seed})\nnp.random.seed({seed})\nrandom.seed({seed})"
        yield unit.text
        before = unit
