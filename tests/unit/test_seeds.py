"""What can be a seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.units import LARGEST_SEED, checked_seed


@pytest.mark.parametrize(("given", "seed"), [(0, 0), ("7", 7), (np.int64(3), 3), (LARGEST_SEED, 2**32 - 1)])
def test_whole_numbers_that_numpy_takes_are_seeds(given: Any, seed: int) -> None:
    assert checked_seed(given) == seed
    np.random.RandomState(seed)


@pytest.mark.parametrize("given", [-1, "-1", 2**32, "many", "", 1.5, "1.5", True, None, [1]])
def test_anything_else_gets_a_sentence(given: Any) -> None:
    with pytest.raises(InvalidInput, match="whole number from 0 to 4294967295") as caught:
        checked_seed(given)
    assert "\n" not in str(caught.value)
