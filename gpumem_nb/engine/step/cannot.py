"""Messages about a block that cannot be recomputed."""

from __future__ import annotations

from ...shared.errors import WorkloadError

OTHERWISE = "Use checkpointing=none, or make the block depend on nothing but its inputs."
SOMETHING_ELSE = "run a second time it did something else than the first time"
OTHER_BLOCKS = "Use checkpointing=none, or name other blocks in Workload(blocks=...)."


def cannot(why: str, otherwise: str = OTHERWISE) -> WorkloadError:
    """Return the refusal, to be raised."""
    return WorkloadError(f"checkpointing cannot recompute a block: {why}. {otherwise}")
