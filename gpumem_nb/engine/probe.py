"""What a rank of this environment would find: run as a process, because the notebook imports neither Horovod nor CUDA.

``python -m gpumem_nb.engine.probe`` says it in JSON: torch, Horovod, the virtual GPU. ``gpumem_nb.check()`` runs it.

``python -m gpumem_nb.engine.probe DEVICE``, run under mpiexec by the Horovod builder, does one real all-reduce on
``cpu``, ``each`` (a GPU for each rank) or ``shared`` (one for all); it fails loudly when the sum is wrong.
"""

from __future__ import annotations

import json
import sys

ELEMENTS = 1000


def torch_facts() -> dict[str, str | None]:
    """Torch's version and the CUDA version it was built for."""
    import torch

    return {"version": torch.__version__, "cuda": torch.version.cuda}


def horovod_facts() -> dict[str, str | bool]:
    """Horovod's version and what it was built with. The import fails when it was built against another torch."""
    import horovod
    import horovod.torch as hvd

    return {
        "version": horovod.__version__,
        "mpi": bool(hvd.mpi_built()),
        "gloo": bool(hvd.gloo_built()),
        "nccl": bool(hvd.nccl_built()),
    }


def extension_facts() -> dict[str, str | None]:
    """Return where the compiled virtual GPU is, if it has been built."""
    from ..memory.virtual_gpu.build import extension_path

    path = extension_path()
    return {"path": str(path) if path else None}


def main() -> None:
    """Print one JSON object; a part that cannot be had is ``{"error": reason}``."""
    answers: dict[str, object] = {}
    for name, ask in {"torch": torch_facts, "horovod": horovod_facts, "extension": extension_facts}.items():
        try:
            answers[name] = ask()
        except (Exception, SystemExit) as error:  # whatever a broken library raises is the answer
            answers[name] = {"error": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(answers))


def prove(device_policy: str) -> None:
    """Sum rank + 1 over all ranks on the device that the policy names."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    device = {"cpu": "cpu", "each": f"cuda:{hvd.local_rank()}", "shared": "cuda:0"}[device_policy]
    summed = hvd.allreduce(torch.full((ELEMENTS,), hvd.rank() + 1.0, device=device), op=hvd.Sum)
    expected = hvd.size() * (hvd.size() + 1) / 2
    if hvd.size() < 2 or not torch.equal(summed.cpu(), torch.full((ELEMENTS,), expected)):
        raise SystemExit(f"rank {hvd.rank()} of {hvd.size()}: expected {expected}, got {summed[0].item()}")
    hvd.shutdown()


if __name__ == "__main__":
    prove(sys.argv[1]) if sys.argv[1:] else main()
