"""How far the ledger's peak is from the profiler's, for each model and setting: one JSON list of percent on stdout."""

from __future__ import annotations

import json

from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from tests.models import MODELS, SETTINGS, ledger_and_profiler

if __name__ == "__main__":
    gpu = VirtualGPU(0, 4 * 2**30)
    off = []
    for name in MODELS:
        for precision, checkpointing in SETTINGS:
            ledger, before, profilers = ledger_and_profiler(gpu, name, precision, checkpointing)
            off.append(100 * abs(ledger.peak_bytes - before - profilers) / profilers)
    print(json.dumps(off))
