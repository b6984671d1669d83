"""Selection of the cells that a script needs, of those that ran on the ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ..shared.questions import Cell
from .cells import OFFERED, Part, Relations, parts_of
from .effects import unseeded
from .imports import brought_by_all, imported_in, imported_inside
from .names import calls, given_in
from .order import Source
from .plain import without_timing
from .refusals import (
    missing,
    not_for_a_script,
    replaced_by_all,
    saved_with_more,
    unclear_name,
    unclear_numbers,
    unclear_setting,
)
from .shown import READERS, only_shown
from .statements import BUILTIN, NOTEBOOK


def settings_in(cells: Sequence[Cell]) -> list[str]:
    """Return the statements that set something of whole processes, apart from seeds, or of what they import."""
    parts = parts_of(cells)
    relations = Relations(parts)
    return list(dict.fromkeys(one.text for place in range(len(parts)) for one in relations.settings(place)))


def selected(cells: Sequence[Cell], names: Collection[str], seed: int, forgotten: bool) -> Source:
    """Return the cells that define the names, or may change what they stand for: each as a whole.

    A cell that drew random numbers before one that is needed is there too, unless they were seeded in between.

    Args:
        cells: in the order in which they ran.
        names: what must be defined in the end.
        seed: of the random numbers of cells when the first of them ran.
        forgotten: whether there were earlier ones.

    Raises:
        WorkloadError: a name is not defined by cells that succeeded on all ranks, or what it is cannot be told.
    """
    selection = _Selection(cells, frozenset(names))
    places, lacking, uses = selection.kept()
    if lacking:
        raise missing([Cell(without_timing(cell.source), pushed=cell.pushed) for cell in cells], lacking, forgotten)
    kept = [selection.parts[place] for place in places]
    first = min((part.number for part in kept), default=0)
    seeds = [cell.seed for cell in cells[: first + 1] if cell.seed is not None]
    imported = [one for part in kept for one in imported_inside(part.plain.text)]
    packages, meant = {what.partition(".")[0] for _, what in imported}, dict(imported)
    return Source(
        "cells",
        definitions=_joined(kept, cells),
        cell_seed=seeds[-1] if seeds else seed,
        uses=uses,
        defines=frozenset(name for part in kept for name in _defined(part)),
        left_out=tuple(dict.fromkeys(reversed(selection.left_out))),
        settings=tuple(one.text for place in places for one in selection.relations.settings(place)),
        prepares="accelerate" in packages or any("TrainingArguments" in part.plain.text for part in kept),
        plots=bool({"matplotlib", "seaborn"} & packages),
        saves=any(calls("torch.save", one.text, meant) for part in kept for one in part.statements),
    )


def _defined(part: Part) -> Iterator[str]:
    for one in part.statements:
        yield from () if one.imports else one.binds | one.binds_late


class _Selection:
    """Backwards from the end: what defines or changes a name that is still needed there.

    Functions are bound to what they use when they are called. So wherever something runs, the names that kept functions
    before it use are needed too, and so they are in the end. Which functions are kept shows only then, so this is done
    until nothing is added.
    """

    def __init__(self, cells: Sequence[Cell], names: frozenset[str]) -> None:
        self._cells, self._names = cells, names
        self.parts = parts_of(cells)
        self.relations = Relations(self.parts)
        shown = not READERS & self.relations.bound
        found = only_shown([part.statements for part in self.parts]) if shown else frozenset[int]()
        self._shown = frozenset(place for place in found if not self.parts[place].unseen)
        self._ever = names  # names that are needed anywhere
        self._late: dict[str, int] = {}  # names that kept functions use, and the place of the first of these
        self.left_out: list[str] = []

    def kept(self) -> tuple[list[int], frozenset[str], frozenset[str]]:
        """Return places of what is kept, names that are needed and not defined, and those of the ranks' own."""
        while True:
            before = dict(self._late), self._ever
            places, live, first = self._pass()
            if (self._late, self._ever) == before:
                break
        parts = [self.parts[place] for place in places]
        bound = {name for part in parts for name in part.binds}
        used = {name for part in parts for name in part.reads | part.late} | self._names
        lacking = (live - bound | first) - OFFERED - BUILTIN - {"display"}
        if any(map(self.relations.reaches, places)):  # which may define anything
            lacking &= NOTEBOOK.union(*(part.binds for part in self.parts if not self._cells[part.number].known))
        return places, frozenset(lacking), frozenset((OFFERED | {"display"}) & used - bound | OFFERED & first)

    def _pass(self) -> tuple[list[int], set[str], set[str]]:
        """Return places of what is kept, names that are needed before it, and those of them that surely are."""
        live, kept, first = set(self._names | self._late.keys()), list[int](), set(self._names)
        self.left_out.clear()
        drawing = -1  # the earliest cell so far that is needed and draws random numbers
        ever, everything = set(self._ever), False  # whether what is kept may use any name
        for place in reversed(range(len(self.parts))):
            part = self.parts[place]
            cell = self._cells[part.number]
            self._check_stars(place, live)
            seeded = any(one.seed is not None for one in self._cells[part.number + 1 : drawing + 1])
            draws = (
                cell.drew
                and drawing >= 0
                and not seeded
                and (bool(part.statements) or part.plain.acted or not cell.source)
            )
            if not cell.known:
                if draws:
                    raise unclear_numbers(cell)
                self._check_unclear(place, live, kept)
                self._leave_out(place) if cell.finished else None
                continue
            for text in part.plain.left_out:
                if live.intersection(given_in(text)):
                    raise saved_with_more(text)
            needed = part.binds & live or draws or self._changes(place, live)
            if not (needed or (everything and part.statements)):
                self._leave_out(place)
                continue
            self._check(part, cell)
            kept.append(place)
            self.left_out += reversed(part.plain.left_out)
            everything = everything or self.relations.reaches(place)
            live = (live - part.surely) | part.reads
            ever |= live | part.binds
            first = first - part.binds | part.first
            if part.acts:
                live |= {name for name, where in self._late.items() if where < place}
            for name in part.late:
                self._late[name] = min(place, self._late.get(name, place))
            if cell.drew and part.acts:
                drawing = part.number
        kept.reverse()
        self._ever = frozenset(ever)
        return kept, live, first

    def _leave_out(self, place: int) -> None:
        self.left_out += reversed([*self.parts[place].plain.left_out, *self.relations.files_of(place)])

    def _check(self, part: Part, cell: Cell) -> None:
        """Refuse what cannot be kept as it is."""
        if part.plain.acted and cell.drew:
            raise missing([], NOTEBOOK - {"display"}, False)
        if not part.plain.same:
            raise not_for_a_script(part.plain.text, "would stand there otherwise than it ran")
        if part.plain.odd_save:
            raise saved_with_more(part.plain.odd_save)
        for one in part.statements:
            packages = {what.partition(".")[0] for _, what in imported_in(one.text)}
            if one.waits:
                raise not_for_a_script(one.text, "a script cannot wait outside of functions")
            if unseeded(one.text, self.relations.meant):
                raise not_for_a_script(one.text, "its random numbers are others each time: give them a seed")
            if "gpumem_nb" in packages:
                raise not_for_a_script(one.text, "a script does without gpumem_nb")
            if "__future__" in packages:
                raise not_for_a_script(one.text, "would change how all other cells are read")
            if brought_by_all(one.text) is None:
                raise replaced_by_all(one.text, min(part.binds - part.imports or self._names))

    def _check_stars(self, place: int, live: set[str]) -> None:
        """Refuse an import of ``*`` that may have replaced something that is needed after it."""
        part = self.parts[place]
        for one in part.statements:
            brought = brought_by_all(one.text)
            if brought is None or not self._cells[part.number].known:
                before = {name for earlier in self.parts[:place] for name in earlier.binds}
                if names := (live if brought is None else live & brought) & before - OFFERED:
                    raise replaced_by_all(one.text, min(names))

    def _changes(self, place: int, live: Collection[str]) -> bool:
        """Return whether a part may change something that is needed."""
        part = self.parts[place]
        if part.looks or place in self._shown:
            return False
        if self.relations.doubtful(place):
            return True
        return self.relations.pokes(place, self._ever) or (part.acts and self.relations.touches(place, live))

    def _check_unclear(self, place: int, live: set[str], kept: Sequence[int]) -> None:
        """Refuse a part that is no known cell's and concerns what is needed, with what is kept after it."""
        part, cell = self.parts[place], self._cells[self.parts[place].number]
        concerned = (part.binds - part.imports) & live
        if not concerned and not part.looks and place not in self._shown:
            doubtful = [
                *self.relations.settings(place),
                *(one for one in part.statements if self.relations.may_reach(one)),
            ]
            again = self._said_again(place, kept)
            if unclear := [
                one.text for one in doubtful if one.text not in again or (self.relations.may_reach(one) and one.acts)
            ]:
                raise unclear_setting(cell, unclear[0])
            if part.acts and (self.relations.touches(place, live) or self.relations.alters(place, self._ever)):
                used = part.reads - OFFERED - BUILTIN - NOTEBOOK
                concerned = frozenset(used - part.imports - self.relations.imported or used or live)
        if concerned:
            known = {name for one in self.parts if self._cells[one.number].known for name in one.binds}
            raise unclear_name(cell, min(concerned), bool(concerned & known))

    def _said_again(self, place: int, kept: Sequence[int]) -> set[str]:
        """Return what known cells say before anything acts that is kept and is not in this part."""
        here, found = {one.text for one in self.parts[place].statements}, set[str]()
        for later in reversed(kept):
            for one in self.parts[later].statements:
                found.add(one.text)
                if one.acts and one.text not in here:
                    return found
        return found


def _joined(parts: Sequence[Part], cells: Sequence[Cell]) -> str:
    """Return the cells, a blank line between them; and where random numbers were seeded in between."""
    texts, before = list[str](), len(cells)
    for part in parts:
        seeds = [cell.seed for cell in cells[before + 1 : part.number] if cell.seed is not None]
        if seeds:
            texts.append("torch.manual_seed({0})\nnp.random.seed({0})\nrandom.seed({0})".format(seeds[-1]))
        texts.append(part.plain.text.strip("\n"))
        before = part.number
    return "\n\n".join(texts)
