"""Problems from outside of the session."""

from __future__ import annotations

from ....shared.units import format_bytes
from ..evidence import Evidence, OnRank
from ..finding import MEMORY, Finding

# A process that only has a CUDA context, a notebook's for one, takes 200 to 700 MB, and a desktop's as much: nothing
# to be alarmed about on a device of which that is little.
_CONTEXT_BYTES, _OF_DEVICE = 700 * 10**6, 0.05


def other_processes(evidence: Evidence) -> Finding | None:
    """Other processes hold memory on a rank's device."""
    held = {rank.info.rank: _others(rank, evidence) for rank in evidence.ranks}
    worst = max(held, key=held.__getitem__)
    use = evidence.ranks[worst].use
    total = use.total_bytes if use else None
    if held[worst] <= max(_CONTEXT_BYTES, _OF_DEVICE * (total or 0)):
        return None
    return Finding(
        "other processes on the device",
        MEMORY,
        held[worst],
        f"Other processes hold {format_bytes(held[worst])} on the device of rank {worst}, which its steps lack; they "
        "compute there, too.",
        {
            "others_bytes": held[worst],
            "device_bytes": total,
            "utilisation in %": use.utilisation_percent if use else None,
        },
        do="%hvd_status names them, nvidia-smi in a terminal too. End what is yours, or take other devices "
        "(CUDA_VISIBLE_DEVICES before %hvd_start).",
    )


def _others(rank: OnRank, evidence: Evidence) -> int:
    """Return the bytes that processes other than this session's ranks hold on this rank's device; 0 if not known."""
    if rank.use is None or rank.use.other_bytes is None:
        return 0
    place = (rank.info.host, rank.info.device)
    beside = [one.use for one in evidence.ranks if one is not rank and (one.info.host, one.info.device) == place]
    return int(rank.use.other_bytes) - sum(int(use.own_bytes or 0) for use in beside if use)
