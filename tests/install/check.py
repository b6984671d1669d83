"""What an environment that was set up can do, as one line of JSON: two ranks train, and Horovod says what it holds."""

from __future__ import annotations

import json
import platform

import gpumem_nb

STEPS = 5
BEGIN = "found: "
PARTS = """
import torch, horovod.torch as hvd
{"torch": torch.__version__, "MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(), "NCCL": bool(hvd.nccl_built()),
 "CUDA": bool(hvd.cuda_built())}
"""


def main() -> None:
    """Train on two virtual GPUs."""
    with gpumem_nb.start(2, device="cpu") as session:
        parts = session.run(PARTS, ranks=0)[0]
        session.load("digits-resnet")
        steps = session.train(STEPS).steps
    built = [name for name in ("MPI", "Gloo", "CUDA", "NCCL") if parts[name]]
    found = {"python": platform.python_version(), "torch": parts["torch"], "horovod": built, "steps": steps}
    print(f"{BEGIN}{json.dumps(found)}")


if __name__ == "__main__":
    main()
