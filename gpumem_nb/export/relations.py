"""Which names may stand for parts of the same objects, and what a call does through the functions that it reaches."""

from __future__ import annotations

import builtins
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from .imports import PLOTTING, imported_in
from .statements import Unit

OFFERED = frozenset({"hvd", "torch", "rank", "size", "device"})
"""What cells find defined when the ranks start."""
NOTEBOOK = frozenset({"get_ipython", "display"})
"""What IPython adds to Python's own names."""
BUILTIN = frozenset(dir(builtins)) - NOTEBOOK | {"__name__", "__doc__"}
_SETTABLE = {"torch", "horovod", "numpy", "random"}

_Version = tuple[str, int]


class Relations:
    """Of the names of some statements, each by its version: every sure definition begins another.

    Attributes:
        defined: names that never stand for anything but functions, classes and modules: using one changes nothing.
        outer: modules whose settings are of the environment, and of where modules are found.
        looped: of each statement, names that only loops use, each of which gives them to something else.
        settable: modules whose settings a script needs whether it names them or not.
        unused: names of others' packages that are imported and that nothing uses.
        silent: places of imports of others' packages that nothing uses: they may be there for what they do.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        others = {name for unit in units if not (unit.defines or unit.imports) for name in unit.binds}
        self.defined = frozenset(name for unit in units for name in unit.binds) - others
        self._package = dict(_packages(units))
        used = {name for unit in units for name in unit.reads | unit.late | unit.assigns_late}
        used |= {name for unit in units if not unit.imports for name in unit.binds}
        self.unused = {name for name, package in self._package.items() if package not in PLOTTING} - used
        self.silent = {place for place, unit in enumerate(units) if unit.imports and unit.binds & self.unused}
        self._others: dict[str, set[str]] = defaultdict(set)
        for unit in units:
            for name in unit.binds - self.defined if unit.names or unit.loops else ():
                self._others[name] |= self._meant(unit.reads) & self.defined
        self._by_name: dict[str, list[Unit]] = defaultdict(list)
        for unit in units:
            for name in unit.binds if unit.late or unit.assigns_late else ():
                self._by_name[name].append(unit)
        self._extended: dict[str, set[str]] = defaultdict(set)
        for unit in units:
            for name in unit.binds if unit.extends else ():
                self._extended[name] |= unit.extends
        asked = any("__subclasses__" in unit.text for unit in units)
        telling = [unit for unit in units if unit.registers or (asked and unit.classes)]
        self._told = {name: unit.binds | unit.late | unit.reads for unit in telling for name in unit.binds}
        self.outer = _names_of(units, {"os", "sys"})
        self.settable = _names_of(units, _SETTABLE) | self.outer | {"torch", "hvd"}
        self._reached = [self._reach(unit) for unit in units]
        elsewhere = (unit.reads | unit.late | unit.assigns_late | unit.binds for unit in units)
        mixed = {name for unit, used in zip(units, elsewhere, strict=True) for name in used - unit.loops}
        self.looped = [unit.loops - mixed for unit in units]
        self._parent: dict[_Version, _Version] = {}
        self._before: list[dict[str, int]] = []
        self._after: list[dict[str, int]] = []
        self._relate()

    def poked(self, place: int) -> frozenset[str]:
        """Names of what a statement sets attributes of or calls for its effect, in functions that it calls too."""
        unit, (_, functions) = self._units[place], self._reached[place]
        return unit.pokes.union(*(one.pokes_late - OFFERED for one in functions)) if not unit.defines else unit.pokes

    def changed(self, place: int, wanted: Collection[str]) -> frozenset[str]:
        """Functions, classes and modules that a statement pokes or gives: of ``wanted``, or poked of their packages."""
        packages = {self._package[name] for name in wanted if name in self._package}
        poked = self._meant(self.poked(place))
        near = {name for name in poked if self._package.get(name) in packages}
        return frozenset(near | (poked | self._meant(self._units[place].given)).intersection(wanted)) & self.defined

    def assigned(self, place: int) -> frozenset[str]:
        """Names that functions which a statement calls may define."""
        unit, (_, functions) = self._units[place], self._reached[place]
        none: frozenset[str] = frozenset()
        return none if unit.plain or unit.names else none.union(*(one.assigns_late for one in functions))

    def settings(self, place: int) -> frozenset[str]:
        """Modules among :attr:`settable` of which a statement sets something, in functions that it calls too."""
        unit = self._units[place]
        return self.settable.intersection(unit.sets.union(*(one.sets_late for one in self.called(place))))

    def seeds(self, place: int) -> frozenset[str]:
        """Those whose random numbers it seeds."""
        unit = self._units[place]
        return self.settable.intersection(unit.seeds.union(*(one.seeds_late for one in self.called(place))))

    def called(self, place: int) -> list[Unit]:
        """Definitions of the functions that a statement calls."""
        unit, (_, functions) = self._units[place], self._reached[place]
        return [] if unit.plain or unit.defines or unit.names else functions

    def joins(self, place: int, wanted: Collection[str]) -> bool:
        """Whether a class that a statement defines may be found by way of a class that it extends, and that is told."""
        above = self._above(self._units[place].extends)
        return any(self._told[name].intersection(wanted) for name in above & self._told.keys())

    def _above(self, names: Collection[str]) -> frozenset[str]:
        """Classes, and those that they extend."""
        found, waiting = set[str](), list(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting.extend(self._extended[name])
        return frozenset(found)

    def touches(self, place: int, live: Collection[str]) -> bool:
        """Whether a statement uses something that may be part of what is needed after it."""
        after, names = self._after[place], self._reached[place][0]
        wanted = {self._find((name, after.get(name, 0))) for name in live if self._stands(name)}
        return any(self._find(self._used(place, name)) in wanted for name in names if self._stands(name))

    def _meant(self, names: Collection[str]) -> set[str]:
        """These names, and those of functions, classes and modules that they may stand for."""
        return set(names).union(*(self._others.get(name, ()) for name in names))

    def _used(self, place: int, name: str) -> _Version:
        """Which object of a name a statement uses."""
        versions = self._after if name in self.looped[place] else self._before
        return name, versions[place].get(name, 0)

    def _stands(self, name: str) -> bool:
        """Whether a name may stand for an object that changes."""
        given = OFFERED | BUILTIN | NOTEBOOK
        return name not in self.defined and name not in given and name not in self._constant

    def _reach(self, unit: Unit) -> tuple[frozenset[str], list[Unit]]:
        """Names that a statement uses, and those of functions that it may call; and the definitions of these."""
        names, functions, waiting = (
            set[str](),
            list[Unit](),
            list(unit.reads | (frozenset() if unit.plain or unit.defines else unit.late)),
        )
        while waiting:
            name = waiting.pop()
            if name in names:
                continue
            names.add(name)
            for one in self._by_name.get(name, ()):
                functions.append(one)
                waiting.extend(one.late)
        return frozenset(names), functions

    def _relate(self) -> None:
        varying = {name for unit in self._units if not unit.constant for name in unit.binds}
        self._constant = {name for unit in self._units for name in unit.binds} - varying
        now: dict[str, int] = {}
        for place, unit in enumerate(self._units):
            self._before.append(dict(now))
            for name in unit.surely | self.looped[place]:
                now[name] = now.get(name, 0) + 1
            self._after.append(dict(now))
            if unit.plain or unit.looks or unit.saves:
                continue
            after = self._after[-1]
            same = [self._used(place, name) for name in self._reached[place][0] if self._stands(name)]
            same += [(name, after.get(name, 0)) for name in unit.binds if self._stands(name)]
            for one in same[1:]:
                self._parent[self._find(one)] = self._find(same[0])

    def _find(self, version: _Version) -> _Version:
        while (parent := self._parent.get(version, version)) != version:
            self._parent[version] = version = self._parent.get(parent, parent)
        return version


def _names_of(units: Sequence[Unit], modules: Collection[str]) -> frozenset[str]:
    """Names that stand for these modules, or for parts of them."""
    return frozenset(name for name, package in _imported(units) if package in modules)


def _packages(units: Sequence[Unit]) -> Iterator[tuple[str, str]]:
    """Names that stand for others' packages or parts of them, and which; settings of the rest are looked for apart."""
    for name, package in _imported(units):
        if package not in _SETTABLE | {"gpumem_nb"} | sys.stdlib_module_names:
            yield name, package


def _imported(units: Sequence[Unit]) -> Iterator[tuple[str, str]]:
    """Names that are imported, and each one's package."""
    for unit in units:
        for name, what in imported_in(unit.text) if unit.imports else ():
            yield name, what.partition(".")[0]
