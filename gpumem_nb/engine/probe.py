"""Says in JSON what a rank of this environment would find: torch, Horovod, the virtual GPU.

``gpumem_nb.check()`` runs it as its own process (``python -m gpumem_nb.engine.probe``), because the notebook kernel
imports neither Horovod nor CUDA.
"""

from __future__ import annotations

import json


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


if __name__ == "__main__":
    main()
