"""From the cells that ran on ranks to the statements that made what is trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from ..shared.exporting import Cell
from .files import file_makers
from .imports import brought_by_all, imported_in, named, unnamed
from .relations import BUILTIN, OFFERED, Relations
from .shown import READERS, only_shown
from .statements import LOOKS, Unit, has_lazy_annotations, units_of
from .timed import without_timing
from .unclear import (
    check_imports,
    imports_all,
    missing,
    refuse_drawing,
    refuse_odd_save,
    refuse_replaced,
    refuse_setting,
    refuse_unclear,
)


@dataclass(frozen=True, slots=True)
class Slice:
    """What is left of the cells.

    Attributes:
        imports: lines that come first.
        later: those that come in the text, after what they may depend on: the environment, and paths of modules.
        text: everything else, in order.
        seed: where random numbers of cells began, before what is in it.
        uses: names of :data:`OFFERED` that it uses.
        binds: names that it defines, and does not only import.
        left_out: statements that do something outside of the script, such as making files, and are not in it.
        settings: statements in it that set something of the whole process.
        lazy_annotations: whether annotations of some of it are not evaluated.
    """

    imports: tuple[str, ...]
    text: str
    seed: int
    uses: frozenset[str]
    binds: frozenset[str]
    left_out: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    lazy_annotations: bool = False


def settings_in(cells: Sequence[Cell]) -> list[str]:
    """The statements of these cells that set something of whole processes, apart from seeds, or of what they import."""
    units = [unit for number, cell in enumerate(cells) for unit in units_of(without_timing(cell.source), number)]
    relations = Relations(units)
    imported = {name for unit in units if unit.imports for name in unit.binds}
    places = [place for place, unit in enumerate(units) if not unit.defines]
    found = [units[place] for place in places if relations.settings(place) or units[place].sets & imported]
    return list(dict.fromkeys(unit.text for unit in found))


def needed(cells: Sequence[Cell], names: Collection[str], seed: int, forgotten: bool) -> Slice:
    """The statements of these cells that define the names, or change what they stand for.

    A cell that drew random numbers before one that is needed is there as a whole, unless they were seeded in between.

    Args:
        cells: in the order in which they ran.
        names: what must be defined in the end.
        seed: of the random numbers of cells when the first of them ran.
        forgotten: whether there were earlier ones.

    Raises:
        WorkloadError: a name is not defined by cells that ran well on all ranks, or what it is cannot be told.
    """
    cells = [replace(cell, source=without_timing(cell.source)) for cell in cells]
    slicing = _Slicing(cells, frozenset(names))
    kept, lacking, uses, outer = slicing.kept()
    if lacking:
        raise missing(cells, lacking, forgotten)
    check_imports(kept)
    imports = tuple(dict.fromkeys(unit.text for unit in kept[:outer] if unit.imports))
    later = tuple(unit.text for unit in kept[outer:] if unit.imports and unit.text not in imports)
    stays = [unit for place, unit in enumerate(kept) if not unit.imports or (place >= outer and unit.text in later)]
    first = min((unit.cell for unit in stays), default=0)
    seeds = [cell.seed for cell in cells[: first + 1] if cell.seed is not None]
    binds = frozenset(name for unit in kept if not unit.imports for name in unit.binds | unit.assigns_late)
    text = "\n".join(_joined(stays, cells))
    left_out = tuple(dict.fromkeys(unit.text for unit in reversed(slicing.left_out)))
    settings = tuple(settings_in([Cell(unit.text) for unit in kept]))
    lazy = any(has_lazy_annotations(cells[number].source) for number in {unit.cell for unit in kept})
    return Slice(imports, text, seeds[-1] if seeds else seed, uses, binds, left_out, settings, later, lazy)


class _Slicing:
    """Backwards from the end: what defines or changes a name that is still needed there.

    Functions are bound to what they use when they are called. So wherever something runs, the names that kept functions
    before it use are needed too, and so they are in the end. Which functions are kept shows only then, so this is done
    until nothing is added.
    """

    def __init__(self, cells: Sequence[Cell], names: frozenset[str]) -> None:
        self._cells = cells
        self._names = names
        self._units = [*_all_units(cells)]
        self._relations = Relations(self._units)
        bound = {name for unit in self._units for name in unit.binds}
        self._shadowed = bool(LOOKS & bound)
        self._shown = frozenset() if READERS & bound else only_shown(self._units)
        self._file_makers = file_makers(self._units, self._relations)
        self._late: dict[str, int] = {}  # names that kept functions use, and the place of the first of these
        self._ever = names  # names that are needed anywhere
        self._wanted: dict[int, set[str]] = {}  # names that are needed of what is kept, by its place
        self.left_out: list[Unit] = []

    def kept(self) -> tuple[list[Unit], frozenset[str], frozenset[str], int]:
        """What is kept, names that are needed and defined nowhere, and names of :data:`OFFERED` that are used.

        Last, how many of what is kept come before anything that imports may depend on.
        """
        while True:
            before = dict(self._late), self._ever
            places, live, before_all = self._pass()
            if (self._late, self._ever) == before:
                break
        units = [self._unit(place) for place in places]
        bound = {name for unit in units for name in unit.binds | unit.assigns_late}
        outer = [bool(self._relations.settings(place) & self._relations.outer) for place in places]
        lacking = frozenset((live - bound | before_all) - OFFERED - BUILTIN)
        uses = frozenset(OFFERED & (self._ever - bound | before_all))
        return units, lacking, uses, [*outer, True].index(True)

    def _unit(self, place: int) -> Unit:
        """What is kept of a statement: of an import for what it does no name, of one of everything what is needed."""
        unit = self._units[place]
        if unit.imports and imports_all(unit.text):
            text = named(unit.text, self._wanted[place])
            unit = replace(unit, text=text, binds=frozenset(name for name, _ in imported_in(text)))
        if not (unit.imports and unit.binds and unit.binds <= self._relations.unused):
            return unit
        return replace(unit, text=unnamed(unit.text), binds=frozenset(), surely=frozenset())

    def _pass(self) -> tuple[list[int], set[str], set[str]]:
        """Places of what is kept, names that are needed before it, and those of them that surely are."""
        live, kept, first = set(self._names | self._late.keys()), list[int](), set(self._names)
        self.left_out.clear()
        drawing = -1  # the earliest cell so far that is needed and draws random numbers
        ever = set(self._ever)
        for place in reversed(range(len(self._units))):
            unit = self._units[place]
            cell = self._cells[unit.cell]
            if imports_all(unit.text):
                defined = {name for earlier in self._units[:place] for name in earlier.binds}
                brought = brought_by_all(unit.text)
                if brought is None or not cell.known or not unit.imports:
                    refuse_replaced(unit.text, (live if brought is None else live & brought) & defined - OFFERED)
            seeded = any(one.seed is not None for one in self._cells[unit.cell + 1 : drawing + 1])
            draws = not (unit.plain or unit.still) and cell.drew and drawing >= 0 and not seeded
            if not cell.known:
                if draws:
                    refuse_drawing(cell)
                self._check_unclear(place, live, kept)
                self.left_out += [unit] if cell.finished and self._acts_outside(place) else []
                continue
            if not (unit.binds & live or self._changes(place, live) or draws):
                self.left_out += [unit] if self._acts_outside(place) else []
                continue
            if unit.odd_save and not unit.binds & live:
                refuse_odd_save(unit.text)
            if unit.saves and not unit.binds & live:
                self.left_out.append(unit)
                continue
            kept.append(place)
            self._wanted[place] = live & unit.binds
            live -= unit.surely | self._relations.looped[place]
            live |= unit.reads - self._relations.looped[place]
            first = first - unit.binds - unit.assigns_late | unit.first - self._relations.looped[place]
            if not unit.plain:
                live |= unit.late | {name for name, first in self._late.items() if first < place}
            for name in unit.late:
                self._late[name] = min(place, self._late.get(name, place))
            ever |= live
            if cell.drew and not unit.plain:
                drawing = unit.cell
        self._ever = frozenset(ever)
        kept.reverse()
        return kept, live, first

    def _acts_outside(self, place: int) -> bool:
        """Whether what a statement did, such as files that it made, may be missed where it is not in a script."""
        unit = self._units[place]
        return unit.magic or unit.saves or unit.odd_save or place in self._file_makers

    def _changes(self, place: int, live: Collection[str]) -> bool:
        """Whether a statement may change something that is needed."""
        unit, relations = self._units[place], self._relations
        if place in relations.silent or relations.joins(place, self._ever):
            return True
        if (unit.looks and not self._shadowed) or (unit.plain and not unit.pokes) or place in self._shown:
            return False
        if relations.changed(place, self._ever):
            return True
        if (relations.settings(place) or relations.seeds(place)) and not unit.defines:
            return True
        if relations.assigned(place).intersection(live):
            return True
        return not unit.names and relations.touches(place, live)

    def _check_unclear(self, place: int, live: set[str], kept: Sequence[int]) -> None:
        """Refuse a statement that is no known cell's and concerns what is needed, with what is kept after it."""
        unit, relations = self._units[place], self._relations
        cell = self._cells[unit.cell]
        if unit.imports:
            return  # what it would import is missing, or imported by others
        concerned = (unit.binds | relations.assigned(place)) & live
        if not concerned and not (unit.looks and not self._shadowed):
            concerned = relations.changed(place, live) & (live | unit.sets) - OFFERED
            if relations.settings(place) and not (unit.defines or self._said_again(place, kept)):
                refuse_setting(cell, unit.text)  # what is drawn after a seeding is asked for elsewhere
            if not (unit.names or unit.plain or unit.saves) and relations.touches(place, live):
                used = (unit.reads | unit.binds) - OFFERED - BUILTIN
                concerned |= used - relations.defined or used  # functions alone, where they change what is global
        if concerned:
            defined = {name for one in self._units if self._cells[one.cell].known for name in one.binds}
            refuse_unclear(cell, min(concerned), bool(concerned & defined))

    def _said_again(self, place: int, kept: Sequence[int]) -> bool:
        """Whether a known cell says the same before anything acts that is kept."""
        for later in reversed(kept):
            unit = self._units[later]
            if unit.text == self._units[place].text:
                return True
            if not unit.plain:
                return False
        return False


def _all_units(cells: Sequence[Cell]) -> Iterator[Unit]:
    held = set[str]()  # names that people hold themselves, which ranks do not offer anything under
    for number, cell in enumerate(cells):
        for name, variable in cell.offered:
            if variable not in ("", name) and name not in held:
                yield from units_of(f"{name} = {variable}", number)
            elif not variable and name not in held:
                yield Unit("", number, frozenset({name}))
        units = [Unit("", number, frozenset(cell.pushed))] if cell.opaque or cell.pushed else []
        units = units or units_of(cell.source, number)
        for unit in units:
            held = (held | unit.binds | unit.assigns_late) - unit.deletes
        yield from units


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
