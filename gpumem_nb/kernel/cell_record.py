"""The code that ran on the ranks, from which a script can be put together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from ..shared.exporting import Cell
from ..shared.seeds import DEFAULT_SEED

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

        Cells after this find it under the names that the ranks offer.
        """
        self._loaded = self._ever
        for role in ("model", "optimizer"):
            self._add(Cell(offered=((role, (attached or {}).get(role) or ""),)))

    def before_load(self) -> list[Cell]:
        """Those that are kept and had run on these processes when something was loaded or attached last.

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
