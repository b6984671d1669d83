"""Which GPUs cold predictions know, how they are named, and how far a figure of them is trusted."""

from __future__ import annotations

from gpumem_nb.planning import cold, gpu_table

MIB, GB = 2**20, 10**9


def test_a_size_alone_is_trusted_less_than_a_gpu_that_was_measured() -> None:
    gpu = gpu_table.find(cold.GENERIC)
    errors = {
        (known, ranks): cold._asked(gpu, 24 * GB, ranks, known).limit_error_bytes
        for known in (True, False)
        for ranks in (1, 2)
    }
    assert errors == {(True, 1): 50 * MIB, (True, 2): 250 * MIB, (False, 1): 500 * MIB, (False, 2): 700 * MIB}
    assert cold._asked(gpu, None, 1, False).limit_error_bytes == 0  # of no limit
