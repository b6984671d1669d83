"""The votes of a rank in the reduction of a step, and what all ranks learn from the sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .weight_watch import DIGITS, agree

_FLAGS = 6
NUMBERS = _FLAGS + 1 + 2 * DIGITS  # on a ballot


@dataclass(frozen=True, slots=True)
class Ballot:
    """The votes of one rank.

    Attributes:
        failed: it could not finish forward and backward.
        leave: it was nudged to end the chunk.
        careful: its update may fail half way.
        torn: a gradient changed after it had left.
        relisted: its optimizer trains other weights than in the step before.
        nonfinite: its loss is not a finite number; on the device, because asking would wait for it.
        digest: that of its weights, if it compares them in this step.
    """

    failed: bool
    leave: bool
    careful: bool
    torn: bool
    relisted: bool
    nonfinite: Tensor | None
    digest: Tensor | None

    def write(self, into: Tensor) -> None:
        """Write it in the order in which :meth:`Votes.counted` reads the sums; takes no memory.

        Args:
            into: ``NUMBERS`` numbers in float32, the first of which says whether the rank failed.
        """
        into.zero_()
        flags = (self.failed, self.leave, self.careful, self.torn, self.relisted, self.digest is not None)
        for place, flag in enumerate(flags):
            if flag:
                into[place].fill_(1)
        if self.nonfinite is not None:
            into[_FLAGS].copy_(self.nonfinite)
        if self.digest is not None:
            into[_FLAGS + 1 :].copy_(self.digest)


@dataclass(frozen=True, slots=True)
class Votes:
    """The votes of any rank, in the words of :class:`Ballot`; the same on all ranks.

    ``differ``: the ranks' weights are not the same. ``compare``: only some ranks found a reason to compare weights,
    such as a cell that ran there alone, so that all must. ``missed``: a weight has a gradient that was not sent.
    """

    failed: bool
    leave: bool
    careful: bool
    torn: bool
    relisted: bool
    nonfinite: bool
    compare: bool
    differ: bool
    missed: bool

    @property
    def unsure(self) -> bool:
        """Return whether the ranks would not be, or might not stay, the same in this step."""
        return self.torn or self.relisted or self.compare or self.differ or self.missed

    @classmethod
    def of_one_that_left(cls) -> Votes:
        """Of a rank that the others cannot reach any more: it failed, and ends the chunk."""
        return cls(
            failed=True,
            leave=True,
            careful=False,
            torn=False,
            relisted=False,
            nonfinite=False,
            compare=False,
            differ=False,
            missed=False,
        )

    @classmethod
    def counted(cls, sums: Sequence[int], ranks: int, missed: bool) -> Votes:
        """Of the sums over all ranks."""
        failed, leave, careful, torn, relisted, compared, nonfinite = (count > 0 for count in sums[: _FLAGS + 1])
        everywhere = sums[_FLAGS - 1] == ranks
        differ = everywhere and not agree(sums[_FLAGS + 1 :], ranks)
        return cls(failed, leave, careful, torn, relisted, nonfinite, compared and not everywhere, differ, missed)
