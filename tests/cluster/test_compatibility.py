"""Anybody's model, whatever is done to it, trains to the bit as a plain loop would, or is refused in one sentence.

The whole matrix is held by ``make matrix``, which writes docs/compatibility.md.
"""

from __future__ import annotations

import pytest

from gpumem_nb.session import Session
from tests.matrix.case import Case
from tests.matrix.cases import of_selective, selected
from tests.matrix.compare import Comparison
from tests.tiers import every, first_tier

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    "case", [*first_tier(selected(), every(20)), *first_tier(of_selective(), every(40))], ids=lambda case: case.name
)
def test_it_trains_as_the_plain_loop_does(two_ranks: Session, case: Case) -> None:
    Comparison(two_ranks).hold(case)
