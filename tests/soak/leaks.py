"""``python -m tests.soak.leaks``: no false alarm over 1,000 steps of each ready-made workload under random flips."""

from __future__ import annotations

from gpumem_nb.workloads.catalog import CATALOG
from tests.cluster.test_leaks import flip_at_random
from tests.conftest import ranks

if __name__ == "__main__":
    for name in CATALOG:
        flip_at_random(ranks(2), name, steps=1000)
        print(f"{name}: no leak", flush=True)
    ranks(2).stop()
