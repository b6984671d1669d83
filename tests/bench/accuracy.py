"""How far the ledger's peak is from the profiler's, for each model and setting: one JSON list of percent on stdout."""

from __future__ import annotations

import json

from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from tests.models import MODELS, SETTINGS, profiled

if __name__ == "__main__":
    gpu = VirtualGPU(0, 4 * 2**30)
    off = []
    for name in MODELS:
        for precision, checkpointing in SETTINGS:
            step = profiled(gpu, name, precision, checkpointing)
            counted = step.ledger.peak_bytes - step.before_bytes
            off.append(100 * abs(counted - step.profiler_bytes) / step.profiler_bytes)
    print(json.dumps(off))
