"""Several ranks on one GPU."""

from __future__ import annotations

from ..shared.errors import StartError


def check_sharing(ranks: int, gpus: int, nccl: bool) -> None:
    """Refuse more ranks than GPUs on a host where Horovod was built on NCCL, which allows one rank a GPU.

    Raises:
        StartError: there are more ranks than GPUs.
    """
    if nccl and ranks > gpus:
        raise StartError(
            f"{ranks} ranks cannot share {gpus} GPU{'s' * (gpus != 1)} with this Horovod, because NCCL allows one rank "
            f"on each. Start {max(1, gpus)}, or build Horovod so that ranks can share a GPU: "
            "python -m gpumem_nb.install.horovod_build --gpu staged"
        )
