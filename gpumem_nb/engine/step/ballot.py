"""The votes of a rank in the reduction of a step, and the digest of its weights that travels with them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...shared.units import name_ranks
from .. import cells
from ..copies import checksum
from ..link.communicator import here, same_everywhere
from .parts import Parts

if TYPE_CHECKING:
    from .optimizer_state import Replicas

EVERY_STEPS = 40
DIGITS = 16  # of 4 bits each: the sums of their squares over a thousand ranks are exact in float32
_BITS = 4
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2**64 divided by the golden ratio: far from any small multiple


class WeightWatch:
    """Compares what one rank holds with what the others do.

    Buffers count too, unless steps change them: batch norm's statistics are each rank's own.

    Args:
        parts: of this rank.
        form: gives how the optimizer's state is held. Of one that ranks share, what each updates its share by counts,
            too: the ranks would have the same weights, which come of several ways to train.
    """

    def __init__(self, parts: Parts, form: Callable[[], Replicas | None] = lambda: None) -> None:
        self._parts = parts
        self._form = form
        self._partition: object = None  # by which the state was shared when they were compared last
        self._moving: set[str] = set()
        self._ids: dict[str, int] = {}
        self._before: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}  # of buffers, when all ranks held the same
        self._found: dict[str, Tensor] = {}
        self._cells = self._cells_before = cells.ran()  # when they were compared last, and before any that may tell
        self._agreed_step = 0
        self._asked = True

    def due(self, steps: int) -> bool:
        """Return whether to compare in the step after so many."""
        flipped = self._partition is not self._shared_by()
        return self._asked or flipped or steps % EVERY_STEPS == 0 or cells.ran() != self._cells

    def ask(self) -> None:
        """Compare in the next step, whatever else is the case."""
        self._asked = True

    def begin_anew(self) -> None:
        """Note that the model was overwritten: compare in the next step, and not with what was there before."""
        self._asked, self._last = True, {}

    def begin(self) -> None:
        """A step in which they are compared begins: what changes from here on is the step's own doing."""
        # By their content: torch's own batch norm changes its statistics without counting that as a change.
        still = {name: buffer for name, buffer in self._parts.named_buffers() if name not in self._moving}
        self._ids = {name: id(buffer) for name, buffer in still.items()}
        self._before = {name: checksum(buffer) for name, buffer in still.items()}

    def digest(self) -> Tensor:
        """Of all that must agree: ``2 × DIGITS`` small numbers in float32, digits and their squares."""
        sums = {name: checksum(tensor) for name, tensor in self._compared().items() if name not in self._moving}
        for name in self._moved_since(sums):
            self._moving.add(name)
            sums.pop(name, None)
        self._ids, self._before = {}, {}
        self._found = {name: sums[name] for name, _ in self._parts.named_buffers() if name in sums}
        words = _stacked(sums.values())
        places = torch.arange(1, len(sums) + 1, device=words.device)
        total = (words * (places * _ODD + 1)).sum()
        digits = (total >> torch.arange(0, _BITS * DIGITS, _BITS, device=words.device)) & (2**_BITS - 1)
        return torch.cat([digits, digits * digits]).float()

    def agreed(self, steps: int) -> None:
        """The ranks held the same after so many steps.

        What a cell did to the optimizer shows after the next one, so then they are compared once more.
        """
        self._asked = cells.ran() != self._cells
        self._cells_before = self._cells if self._asked else cells.ran()
        self._agreed_step, self._cells, self._partition = steps, cells.ran(), self._shared_by()
        self._last, self._found = self._found, {}

    def examine(self) -> str:
        """Find out together what differs; empty if it is only what a step may change on each rank. A collective.

        What differs stays to be compared in the next step.
        """
        self._asked = True
        compared = self._compared()
        if not same_everywhere(zlib.crc32(repr(list(compared)).encode()), "weights by name"):
            return (
                "the ranks hold weights or buffers of different names: a cell added or removed some on one rank alone. "
                "Run it on all ranks, or attach the model again"
            )
        mine = [int(checksum(tensor)) for tensor in compared.values()]
        moving = [int(name in self._moving) for name in compared]
        rows = here().numbers([cells.ran() - self._cells_before, *mine, *moving], "weights")
        ran = [row[0] for row in rows]
        for place, name in enumerate(compared, start=1):
            if any(row[place + len(compared)] for row in rows):
                self._moving.add(name)
            elif len({row[place] for row in rows}) > 1:
                return self._sentence(name, [row[place] for row in rows], ran)
        return ""

    def _moved_since(self, sums: Mapping[str, Tensor]) -> list[str]:
        """The buffers that this step has changed or bound anew, or those before it where no cell has run since."""
        ids = {name: id(buffer) for name, buffer in self._parts.named_buffers() if name not in self._moving}
        moved = [name for name in ids.keys() | self._ids.keys() if ids.get(name) != self._ids.get(name)]
        same = [name for name in ids if name not in moved]
        if same:
            last = self._last if cells.ran() == self._cells else {}
            before, now, then = ([content[name] for name in same] for content in (self._before, sums, {**sums, **last}))
            changed = (_stacked(before) != _stacked(now)) | (_stacked(then) != _stacked(now))
            moved += [name for name, differs in zip(same, changed.tolist(), strict=True) if differs]
        return moved

    def _compared(self) -> Mapping[str, Tensor]:
        return dict([*self._parts.named_parameters(), *self._parts.named_buffers()]) | self._of_shares()

    def _of_shares(self) -> dict[str, Tensor]:
        form = self._form()
        return form.compared() if form else {}

    def _shared_by(self) -> object:
        form = self._form()
        return form and form.partition

    def _sentence(self, name: str, found: Sequence[int], ran: Sequence[int]) -> str:
        others = [rank for rank, words in enumerate(found) if words != found[0]]
        after = f"after step {self._agreed_step}" if self._agreed_step else "since it was loaded"
        if len(set(ran)) > 1:
            fewest = min(ran)
            where = name_ranks([rank for rank, count in enumerate(ran) if count > fewest])
            cause = f"A cell ran on {where} alone meanwhile, which may be why"
        elif any(ran):
            cause = (
                "A cell ran meanwhile; perhaps what it did depends on the rank or on random numbers. It may also be "
                "code of the model, a hook or the optimizer"
            )
        else:
            cause = "No cell ran meanwhile: code of the model, a hook or the optimizer seems to depend on the rank"
        what = "the ranks hold different weights"
        if name in self._of_shares():
            what = "the ranks share the optimizer's state and would update their shares in different ways"
        return (
            f"{what}: {name} is not the same on {name_ranks(others)} as on rank 0, and that "
            f"came about {after}. {cause}. Type %hvd_sync to go on with the weights and optimizer state of rank 0"
        )


def agree(sums: Sequence[int], ranks: int) -> bool:
    """Return whether all ranks sent the same digits, by the sums of digits and squares: they have no variance then."""
    digits, squares = sums[:DIGITS], sums[DIGITS:]
    return all(ranks * square == digit * digit for digit, square in zip(digits, squares, strict=True))


def _stacked(sums: Iterable[Tensor]) -> Tensor:
    """Return where the first one lies: weights that the optimizer alone knows may lie elsewhere than the model's."""
    first, *others = sums
    return torch.stack([first, *(one.to(first.device) for one in others)])


_FLAGS = 6
NUMBERS = _FLAGS + 1 + 2 * DIGITS  # on a ballot


def write_ballot(into: Tensor, flags: Sequence[bool], nonfinite: Tensor | None, digest: Tensor | None) -> None:
    """Write what a rank votes for, in the order in which :meth:`Votes.counted` reads the sums; takes no memory.

    Args:
        into: ``NUMBERS`` numbers in float32.
        flags: the first five of :class:`Votes`.
        nonfinite: whether its loss is not a finite number; on the device, because asking would wait for it.
        digest: that of its weights, if it compares them in this step.
    """
    into.zero_()
    for place, flag in enumerate((*flags, digest is not None)):
        if flag:
            into[place].fill_(1)
    if nonfinite is not None:
        into[_FLAGS].copy_(nonfinite)
    if digest is not None:
        into[_FLAGS + 1 :].copy_(digest)


@dataclass(frozen=True, slots=True)
class Votes:
    """The votes of any rank; the same on all ranks.

    Attributes:
        failed: it could not finish forward and backward.
        leave: it was nudged to end the chunk.
        careful: its update may fail half way.
        torn: a gradient changed after it had left.
        relisted: its optimizer trains other weights than in the step before.
        nonfinite: its loss is not a finite number.
        compare: only some ranks found a reason to compare weights, such as a cell that ran there alone, so all must.
        differ: the ranks' weights are not the same.
        missed: a weight has a gradient that was not sent.
    """

    failed: bool
    leave: bool
    careful: bool = False
    torn: bool = False
    relisted: bool = False
    nonfinite: bool = False
    compare: bool = False
    differ: bool = False
    missed: bool = False

    @property
    def unsure(self) -> bool:
        """Return whether the ranks would not be, or might not stay, the same in this step."""
        return self.torn or self.relisted or self.compare or self.differ or self.missed

    @classmethod
    def counted(cls, sums: Sequence[int], ranks: int, missed: bool) -> Votes:
        """Read the votes from the ballots of all ranks, added up."""
        failed, leave, careful, torn, relisted, compared, nonfinite = (count > 0 for count in sums[: _FLAGS + 1])
        everywhere = sums[_FLAGS - 1] == ranks
        differ = everywhere and not agree(sums[_FLAGS + 1 :], ranks)
        return cls(failed, leave, careful, torn, relisted, nonfinite, compared and not everywhere, differ, missed)
