"""Reserved bytes of other settings, on a GPU that is simulated: right because it is known where everything lies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In a process of its own, whose torch.cuda is another one.
CODE = """
import time, torch
torch.set_num_threads(1)
from gpumem_nb.engine.data.handed import as_dataset
from gpumem_nb.engine.data.stream import ShardedStream
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory import device
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.workloads.catalog import CATALOG
from tests.simulated_cuda import SimulatedCuda

gpu = device._opened = SimulatedCuda(2**32)
entry = CATALOG["text-gpt"]
workload = entry.build("text-gpt", entry.values({"width": 192, "depth": 8, "heads": 4, "sequence_length": 64}))
stream = ShardedStream(*as_dataset(workload.data()), rank=0, size=1)
trainer, now, number = Trainer(workload, stream, gpu, time.time()), Settings(batch_size=8), 1
assert trainer.run(Chunk(now, number, 3)).failure is None
for flip in ({"precision": "bf16"}, {"checkpointing": "blocks"}, {"batch_size": 12}):
    settings = now.replace(**flip)
    predicted = trainer.trials.forecast(settings, [settings.batch_size], [settings.batch_size], 0).of[0]
    reply = trainer.run(Chunk(settings, number + 1, 3))
    came = max(sample.reserved_peak_bytes for sample in reply.samples)
    number += 2
    assert trainer.run(Chunk(now, number, 2)).failure is None
    print(predicted.reserved_peak_bytes, came)
"""


@pytest.mark.full
def test_reserved_bytes_are_right_to_the_segment() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    pairs = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    assert len(pairs) == 3
    assert all(predicted == came for predicted, came in pairs), pairs
