"""The code that ran on the ranks, from which a script can be put together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

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
        self._cells: deque[Cell] = deque()
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
        """Random numbers of cells begin anew on all ranks: they were seeded, or started."""
        self._add(Cell(seed=seed))

    def pushed(self, names: Iterable[str], everywhere: bool) -> None:
        """Variables were defined from the notebook."""
        self._add(Cell(everywhere=everywhere, pushed=tuple(names)))

    def loaded(self) -> None:
        """Something is trained now, perhaps what the cells so far have defined."""
        self._loaded = self._ever

    def before_load(self) -> list[Cell]:
        """Those that are kept and had run when something was loaded or attached last."""
        cells = list(self._cells)
        return cells[: max(0, len(cells) - (self._ever - self._loaded))]

    def since_load(self) -> int:
        """How many cells and functions have run since, of those that are kept."""
        later = list(self._cells)[len(self.before_load()) :]
        return sum(bool(cell.source) or cell.opaque for cell in later)

    def _add(self, cell: Cell) -> None:
        self._cells.append(cell)
        self._ever += 1
        self._characters += len(cell.source)
        while len(self._cells) > MOST_CELLS or (self._characters > MOST_CHARACTERS and len(self._cells) > 1):
            first = self._cells.popleft()
            self._characters -= len(first.source)
            self.seed = self.seed if first.seed is None else first.seed
            self.forgotten = True
