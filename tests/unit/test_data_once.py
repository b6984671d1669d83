"""Every sample exactly once over all ranks."""

from __future__ import annotations

import pytest

from gpumem_nb.engine.data.held_out import batches_once


@pytest.mark.parametrize(("length", "size", "batch_size"), [(10, 3, 2), (7, 2, 4), (1, 2, 4), (12, 4, 3)])
def test_every_sample_occurs_once_over_all_ranks(length: int, size: int, batch_size: int) -> None:
    shares = [list(batches_once(range(length), list, rank, size, batch_size)) for rank in range(size)]
    assert sorted(sample for share in shares for batch, _ in share for sample in batch) == list(range(length))
    assert all(len(batch) == count <= batch_size for share in shares for batch, count in share)
    assert all(count == batch_size for share in shares for _, count in share[:-1])


def test_samples_come_together_where_the_dataset_can_do_that() -> None:
    class Table:
        def __len__(self) -> int:
            return 5

        def __getitems__(self, indices: list[int]) -> list[str]:
            return [f"row {index}" for index in indices]

    assert list(batches_once(Table(), list, 1, 2, 2)) == [(["row 1", "row 3"], 2)]
