"""The cells that ran on ranks, as parts of a script: each is kept as a whole or not at all."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ..shared.questions import Cell
from .effects import ANY, IMPORTING, OF_CLASS
from .files import doing_more, makes_files
from .imports import PLOTTING, brought_by_all, imported_in, imported_inside
from .names import last
from .plain import PlainCell, plain_cell
from .shown import READING_METHODS
from .statements import BUILTIN, LOOKS, NOTEBOOK, Statement, statement
from .unseen import harmless, may_call, unseen_changes

OFFERED = frozenset({"hvd", "torch", "rank", "size", "device"})
"""What cells find defined when the ranks start."""
_OURS = {"horovod", "gpumem_nb"}
_OF_RANKS = {"device", "is_available", "rank", "size", "local_rank", "get_rank", "get_world_size"}
_NOTHING = PlainCell("", (), "", "")

_Version = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Part:
    """A cell in plain Python, or what the notebook or the ranks defined.

    Attributes:
        number: of the cell among all that are looked at.
        plain: its code for a script.
        statements: of that code.
        binds: names that it defines, those that it may define included.
        surely: those of them that are defined whatever happens in it.
        fresh: those of them that stand for something else after it.
        reads: names that it uses, and that may stand for something from before it.
        first: those of them that it uses before it may have defined them.
        late: names that its functions use when they are called, perhaps after it.
        acts: whether anything runs in it but definitions.
        looks: whether it only shows something.
        unseen: whether it may call methods that change something, such as properties, without a call that is written.
    """

    number: int
    plain: PlainCell = _NOTHING
    statements: tuple[Statement, ...] = ()
    binds: frozenset[str] = frozenset()
    surely: frozenset[str] = frozenset()
    fresh: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    first: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    acts: bool = False
    looks: bool = False
    unseen: bool = False

    @property
    def imports(self) -> frozenset[str]:
        """Names that it imports."""
        return frozenset(name for one in self.statements if one.imports for name in one.binds)


def parts_of(cells: Sequence[Cell]) -> list[Part]:
    """Return the parts that some cells are, in the order in which they ran."""
    meant = {name: what for cell in cells for name, what in imported_in(cell.source)}
    ran = [ast.parse(cell.source) for cell in cells]
    quiet = harmless(ran)
    more = doing_more(ran, meant, quiet)
    held, parts = set[str](), list[Part]()  # names that people hold themselves, which ranks do not offer anything under
    for number, cell in enumerate(cells):
        for name, variable in cell.offered:
            if variable not in ("", name) and name not in held:
                parts.append(_part(PlainCell(f"{name} = {variable}", (), "", ""), number))
            elif not variable and name not in held:
                parts.append(Part(number, binds=frozenset({name})))
        if cell.opaque or cell.pushed:
            parts.append(Part(number, binds=frozenset(cell.pushed)))
        elif cell.source:
            part = _part(plain_cell(cell.source, meant, more, quiet), number)
            parts.append(part if cell.known else replace(part, fresh=frozenset()))  # it may not have come to that
        if not cell.offered and (cell.source or cell.opaque or cell.pushed):
            deleted = {name for one in parts[-1].statements for name in one.deletes}
            late = {name for one in parts[-1].statements for name in one.binds_late}
            held = (held | parts[-1].binds | late) - deleted
    own = {name for part in parts for one in part.statements if not one.imports for name in one.binds}
    trees = [ast.parse(part.plain.text) for part in parts]
    changing = unseen_changes(trees, READING_METHODS)
    unseen = [bool(LOOKS & own) or may_call(tree, changing) for tree in trees]
    return [replace(part, unseen=it, looks=part.looks and not it) for part, it in zip(parts, unseen, strict=True)]


def _brought(node: ast.stmt) -> Collection[str]:
    """Return what imports of ``*`` bring, of Python's own modules."""
    return (brought_by_all(ast.unparse(node)) or ()) if isinstance(node, ast.ImportFrom | ast.Try | ast.If) else ()


def _part(plain: PlainCell, number: int) -> Part:
    return replace(_looked_at(plain), number=number)


@lru_cache(maxsize=1000)  # cells run again, and scripts are written again
def _looked_at(plain: PlainCell) -> Part:
    statements = [statement(node, _brought(node)) for node in ast.parse(plain.text).body]
    binds, surely, fresh, reads, first, late = (set[str]() for _ in range(6))
    for one in statements:
        late |= one.late
        reads |= (one.reads | (late if one.acts else set())) - surely
        first |= one.first - binds
        binds |= one.binds | one.binds_late
        fresh |= one.fresh - first
        surely = (surely | one.surely) - one.deletes
    return Part(
        0,
        plain,
        tuple(statements),
        binds=frozenset(binds),
        surely=frozenset(surely),
        fresh=frozenset(fresh | surely),
        reads=frozenset(reads),
        first=frozenset(first),
        late=frozenset(late),
        acts=any(one.acts for one in statements),
        looks=all(one.looks for one in statements),
    )


@dataclass(slots=True)
class _Reached:
    """The effects of a part through the functions that it calls."""

    names: set[str] = field(default_factory=set)
    sets: set[str] = field(default_factory=set)
    effects: set[str] = field(default_factory=set)
    reaches: bool = False
    statements: list[Statement] = field(default_factory=list)


class Relations:
    """Which names of some parts may stand for parts of the same objects, each by its version; and what parts change.

    Attributes:
        bound: all names that parts define.
        imported: names that are never anything but imported modules, parts of them, and constants.
        meant: what names were imported for.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        statements = [one for part in parts for one in part.statements]
        self.bound = frozenset(name for part in parts for name in part.binds)
        plain = [one for one in statements if one.imports or one.constant]
        others = {name for one in statements if not (one.imports or one.constant) for name in one.binds}
        others |= {name for one in statements for name in one.binds_late}
        others |= {name for part in parts if not part.statements for name in part.binds}
        self.imported = frozenset(name for one in plain for name in one.binds) - others  # modules and constants
        changing_otherwise = {name for one in statements if not _names_ranks(one) for name in one.binds}
        changing = {
            name for one in statements if not (one.imports or one.constant or one.defines) for name in one.binds
        } | {name for one in statements for name in one.binds_late}
        self._defined = self.bound - changing - self.imported - {n for p in parts if not p.statements for n in p.binds}
        offered = {name for one in statements if _names_ranks(one) for name in one.binds} & OFFERED - changing_otherwise
        self._fixed = self.imported | self._defined | ((OFFERED | BUILTIN | NOTEBOOK) - self.bound) | offered
        self._let_go_of_holders([one for one in statements if one.defines])
        self.meant = {name: what for one in statements if one.imports for name, what in imported_in(one.text)}
        inside = {
            name: what for one in statements if one.late or one.defines for name, what in imported_inside(one.text)
        }
        self.meant = inside | self.meant
        self._package = {name: what.partition(".")[0] for name, what in self.meant.items()}
        used = {name for one in statements for name in one.reads | one.late | one.binds_late}
        used |= {name for one in statements if not one.imports for name in one.binds}
        self._silent = {name for name, package in self._package.items() if self._is_others(package)} - used
        self._aliases = set[str]()
        packages = self._package.keys() | IMPORTING | {"torch"}
        while (
            more := {n for one in statements if one.parts_of & (packages | self._aliases) for n in one.aliases}
            - self._aliases
        ):
            self._aliases |= more
        self._others: dict[str, set[str]] = defaultdict(set)
        for one in statements:
            for name in one.aliases:
                self._others[name] |= one.parts_of & self._defined
        self._definitions: dict[str, list[Statement]] = defaultdict(list)
        for one in statements:
            for name in one.binds if one.defines or one.late or one.effects_late or one.sets_late else ():
                self._definitions[name].append(one)
            for name, method in one.methods:
                self._definitions[name].append(method)
        self._used = {name for one in statements for name in one.reads | one.late}
        self._reached = [self._reach(part) for part in parts]
        self._parent: dict[_Version, _Version] = {}
        self._before: list[dict[str, int]] = []
        self._after: list[dict[str, int]] = []
        self._relate()

    def _let_go_of_holders(self, definitions: Sequence[Statement]) -> None:
        """Count functions and classes that hold other objects, as defaults or attributes, among what changes."""
        self._holders = frozenset[str]()
        setting = [one for one in definitions if one.keeps or one.sets_given or not one.late <= self._fixed]
        keeping = {name for one in setting for name in one.binds}
        while True:
            holding = [
                one
                for one in definitions
                if one.holds or one.effects & keeping or not one.reads <= self._fixed | (one.adds_to - self._holders)
            ]
            holders = {name for one in holding for name in one.binds}
            if holders <= self._holders:
                return
            self._holders |= holders
            self._defined -= self._holders
            self._fixed -= self._holders

    def touches(self, place: int, live: Collection[str]) -> bool:
        """Return whether a part uses something that may be part of what is needed after it."""
        after = self._after[place]
        wanted = {self._find((name, after.get(name, 0))) for name in live if self._stands(name)}
        return any(self._find(one) in wanted for one in self._nodes(place))

    def pokes(self, place: int, names: Collection[str]) -> bool:
        """Return whether a part may change functions, classes or packages of these names: calls alone do not."""
        statements = self._parts[place].statements
        values = {name for one in statements if one.acts for name in one.values | self._called_by(one).sets}
        values |= {name for one in statements if one.acts for name in self._reach_from(one.sets).names}
        changed = self._defined.intersection(values.union(*(self._others[name] for name in values)))
        return not changed.union(*(one.adds_to for one in statements)).isdisjoint(names)

    def alters(self, place: int, names: Collection[str]) -> bool:
        """Return whether a part sets, or calls for an effect, what functions and classes of these names have."""
        statements = self._parts[place].statements
        roots = {name for one in statements if one.acts for name in (one.sets | one.effects) & one.values}
        roots |= {name for one in statements if one.effects - LOOKS for *_, name in one.gives}
        changed = self._defined.intersection(roots.union(*(self._others[name] for name in roots)))
        return not changed.isdisjoint(names)

    def doubtful(self, place: int) -> list[Statement]:
        """Return the statements of a part that may change something whatever names are needed."""
        return [one for one in self._parts[place].statements if self._is_doubtful(one)]

    def settings(self, place: int) -> list[Statement]:
        """Return the statements of a part that set something of the whole process, or of what they import."""
        found = [one for one in self._parts[place].statements if not one.defines]
        return [one for one in found if self._settable(self._sets(one))]

    def may_reach(self, one: Statement) -> bool:
        """Return whether a statement may use and define anything, by functions that it calls too."""
        return one.reaches or (one.acts and self._called_by(one).reaches)

    def reaches(self, place: int) -> bool:
        """Return whether a part may use and define anything, by ``exec``, ``globals()`` and the like."""
        return self._reached[place].reaches

    def files_of(self, place: int) -> list[str]:
        """Return the statements of a part that make files, in functions that they call too."""
        found = []
        for one in self._parts[place].statements:
            called = [] if one.defines else [one, *self._called_by(one).statements]
            if any(makes_files(node, self.meant) for it in called for node in _not_classes(it)):
                found.append(one.text)
        return found

    def _is_doubtful(self, one: Statement) -> bool:
        silent = one.imports and bool(one.binds & self._silent)
        reached = self._called_by(one) if one.acts else _Reached()
        by_others = {name for name in one.effects if self._package.get(name, "") in sys.stdlib_module_names}
        effects = one.effects | reached.effects | ({name for *_, name in one.gives} if by_others else set())
        changed = self._settable(self._sets(one)) or effects & self._effective()
        return silent or one.reaches or reached.reaches or bool(changed and one.acts)

    def _effective(self) -> set[str]:
        """Return names of what may change by being called: other packages, parts of them, and torch."""
        others = {name for name, package in self._package.items() if self._is_others(package)}
        return others | self._aliases | IMPORTING | {"torch"}

    def _package_of(self, name: str) -> str:
        return self._package.get(name, name)

    def _is_others(self, package: str) -> bool:
        return package not in sys.stdlib_module_names | PLOTTING | _OURS

    def _sets(self, one: Statement) -> set[str]:
        reached = self._called_by(one) if one.acts else _Reached()
        setters = [it for it in (*reached.statements, *([] if one.defines else [one])) if it.sets_given and one.acts]
        return {*one.sets, *reached.sets} | {
            name
            for function, place, name in one.gives
            if any(function not in it.binds or not it.sets_given.isdisjoint((place, ANY)) for it in setters)
        }

    def _settable(self, names: Collection[str]) -> bool:
        modules = {name for name, package in self._package.items() if package not in PLOTTING | _OURS}
        return bool((modules | {"torch", OF_CLASS} | self._aliases | IMPORTING) & {*names})

    def _reach(self, part: Part) -> _Reached:
        found = self._reach_from(part.reads | {name for one in part.statements for name in one.reads})
        found.reaches |= any(map(self.may_reach, part.statements))
        return found

    def _called_by(self, one: Statement) -> _Reached:
        """Return what functions and methods do that a statement may call."""
        return self._reach_from(one.reads | one.calls, by_methods=True)

    def _reach_from(self, names: Collection[str], by_methods: bool = False) -> _Reached:
        """Return what functions of these names do, and those that they call; ``by_methods`` of objects too."""
        found, waiting = _Reached(), list(names)
        while waiting:
            name = waiting.pop()
            if name in found.names:
                continue
            found.names.add(name)
            if name.endswith("()") and name[:-2] not in self._fixed:
                waiting.extend((".__call__", ".forward"))
            for one in self._definitions.get(name, ()):
                found.statements.append(one)
                found.sets |= one.sets_late
                found.effects |= {it for it in one.effects_late if name[0] != "." or self._package_of(it) != "torch"}
                found.reaches |= one.reaches
                waiting.extend(one.late | one.reads | (one.calls_late if by_methods else frozenset()))
        return found

    def _stands(self, name: str) -> bool:
        """Return whether a name may stand for an object that changes."""
        return name not in self._fixed

    def _nodes(self, place: int) -> Iterator[_Version]:
        """Yield what a part uses and defines."""
        part, before, after = self._parts[place], self._before[place], self._after[place]
        for name in filter(self._stands, self._reached[place].names | part.reads):
            if name in part.first or name not in part.fresh:
                yield name, before.get(name, 0)
            yield name, after.get(name, 0)
        reached = self._used | self.bound if self._reached[place].reaches else part.binds
        yield from ((name, after.get(name, 0)) for name in reached if self._stands(name))

    def _relate(self) -> None:
        now: dict[str, int] = {}
        for place, part in enumerate(self._parts):
            self._before.append(dict(now))
            for name in part.fresh:
                now[name] = now.get(name, 0) + 1
            self._after.append(dict(now))
            if (part.acts and not part.looks) or not part.binds.isdisjoint(self._holders):
                same = [*self._nodes(place)]
                for one in same[1:]:
                    self._parent[self._find(one)] = self._find(same[0])

    def _find(self, version: _Version) -> _Version:
        while (parent := self._parent.get(version, version)) != version:
            self._parent[version] = version = self._parent.get(parent, parent)
        return version


def _names_ranks(one: Statement) -> bool:
    """Return whether a statement only gives names to constants, devices, or who a rank is."""
    called = {last(node.func) for node in ast.walk(ast.parse(one.text)) if isinstance(node, ast.Call)}
    return one.constant or one.imports or bool(called and called <= _OF_RANKS)


def _not_classes(one: Statement) -> Iterator[ast.AST]:
    return (node for node in ast.parse(one.text).body if not isinstance(node, ast.ClassDef))
