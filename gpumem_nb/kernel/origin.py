"""Origin of what is trained, and the code that ran: state that outlives the ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..shared.questions import Cell
from ..shared.settings import Settings
from ..shared.units import DEFAULT_SEED
from ..shared.workload import Workload


@dataclass(frozen=True)
class Unrestored:
    """The training at the moment when the ranks ended; kept until it is back, because a fault may cut a restart short.

    Attributes:
        generation: of the workload.
        snapshots: what can be gone back to, the newest first.
        named: the one of them that was named by hand: which weights are frozen is not for it to say.
        steps, settings: how far training was, and under what.
        up_to_date: whether the newest snapshot is of that very step.
    """

    generation: int
    snapshots: tuple[Path, ...]
    named: Path | None
    steps: int
    settings: Settings
    up_to_date: bool


@dataclass
class Origin:
    """The origin of the workload; outlives the ranks, so that a restart can load it again.

    Attributes:
        workload: what was loaded, with ``sent`` as it travelled then: a restart loads that again.
        options: those of a ready-made workload; ``None`` for any other.
        attached: the variables of what was attached instead, by their roles.
        trained_before: steps that their weights had been trained for then.
        not_kept: why the attached objects cannot be brought back.
        resumed_from: the file that training went on from.
        named: that file, if it was named by hand and no restart took it.
        unrestored: what a restart has yet to bring back.
        seed: of the initial weights, the order of the data and dropout.
        default_seed: of cells' random numbers, and of what is loaded next.
        cells: the code that ran.
    """

    workload: Workload | None = None
    sent: bytes = b""
    options: dict[str, float] | None = None
    attached: dict[str, str | None] | None = None
    trained_before: int = 0
    not_kept: str = ""
    resumed_from: Path | None = None
    named: Path | None = None
    unrestored: Unrestored | None = None
    seed: int = DEFAULT_SEED
    default_seed: int = DEFAULT_SEED
    cells: CellRecord = field(default_factory=lambda: CellRecord())

    @property
    def loaded(self) -> bool:
        """Return whether there is something to load again; unlike training, this knows while ranks come and go."""
        return self.workload is not None or self.attached is not None


MOST_CELLS = 500
MOST_CHARACTERS = 2**20


class CellRecord:
    """The latest cells, in the order in which they ran; outlives the ranks.

    Attributes:
        seed: of the random numbers of cells when the first of those that are kept ran.
        forgotten: whether there were earlier ones.
    """

    def __init__(self) -> None:
        self._cells: deque[tuple[int, Cell]] = deque()  # each with how many there had been before it
        self._characters = 0
        self.seed = DEFAULT_SEED
        self.forgotten = False
        self._loaded = 0  # how many there had been when something was loaded or attached last
        self._ever = 0

    def ran(self, source: str, everywhere: bool, finished: bool, drew: bool) -> None:
        """A cell ran."""
        self._add(Cell(source, everywhere, finished, drew))

    def called(self, everywhere: bool, drew: bool) -> None:
        """A function of the notebook ran on ranks."""
        self._add(Cell(everywhere=everywhere, drew=drew, opaque=True))

    def seeded(self, seed: int) -> None:
        """Random numbers of cells begin anew on all ranks."""
        self._add(Cell(seed=seed))

    def started(self, seed: int) -> None:
        """The ranks are new processes, where nothing is of what cells did before; their random numbers begin here."""
        self._add(Cell(seed=seed, started=True))

    def pushed(self, names: Iterable[str], everywhere: bool) -> None:
        """Variables were defined from the notebook."""
        self._add(Cell(everywhere=everywhere, pushed=tuple(names)))

    def loaded(self, attached: Mapping[str, str | None] | None = None) -> None:
        """Something is trained now: these variables by their roles, or what no cell has made.

        Cells after this, and functions that are called from now on, find it under the names that the ranks offer.
        """
        for role in ("model", "optimizer"):
            self._add(Cell(offered=((role, (attached or {}).get(role) or ""),)))
        self._loaded = self._ever

    def before_load(self) -> list[Cell]:
        """Those that are kept and had run on these processes when something was loaded or attached last, and its names.

        Where the ranks were started again since, those that had run on the processes of that time.
        """
        cells = self._all_before()
        return cells[max((place for place, cell in enumerate(cells) if cell.started), default=0) :]

    def since_load(self) -> list[Cell]:
        """Cells and functions that have run since, what was pushed, and starts of the ranks, of those that are kept."""
        later = (cell for number, cell in list(self._cells) if number >= self._loaded)
        return [cell for cell in later if cell.source or cell.opaque or cell.pushed or cell.started]

    @property
    def gone(self) -> bool:
        """Return whether cells that had run before what :meth:`before_load` gives are not there any more."""
        return self.forgotten or len(self.before_load()) < len(self._all_before())

    def _all_before(self) -> list[Cell]:
        return [cell for number, cell in list(self._cells) if number < self._loaded]

    def _add(self, cell: Cell) -> None:
        self._cells.append((self._ever, cell))
        self._ever += 1
        self._characters += len(cell.source)
        while len(self._cells) > MOST_CELLS or (self._characters > MOST_CHARACTERS and len(self._cells) > 1):
            _, first = self._cells.popleft()
            self._characters -= len(first.source)
            self.seed = self.seed if first.seed is None else first.seed
            self.forgotten = True
