"""The description of the loaded workload for the notebook."""

from __future__ import annotations

from ...memory.device import Device
from ...shared.workload import Workload, WorkloadInfo
from ..data.stream import Stream
from ..link.settings import why_flat
from .live_model import LiveModel
from .notes import has_batch_norm, model_notes
from .rates import named_rate


def workload_info(
    workload: Workload, live: LiveModel, stream: Stream, eval_len: int | None, device: Device
) -> WorkloadInfo:
    """Sizes of it, and what there is to say.

    Args:
        workload, live, stream: what is trained on this rank.
        eval_len: samples that it is validated on; ``None`` without any.
        device: of this rank.
    """
    own, params = live.own_optimizer, list(live.parts.parameters())
    data, notes = stream.described(device.kind == "cuda")
    return WorkloadInfo(
        name=workload.name,
        parameters=sum(param.numel() for param in params),
        parameter_bytes=sum(param.nbytes for param in params),
        dataset_len=None if stream.info.batched else stream.length,
        blocks=len(live.blocks),
        own_optimizer=type(own).__name__ if own else None,
        own_learning_rate=named_rate(own) if own else None,
        notes=(*notes, *model_notes(live, workload.loss, stream.size)),
        data=data,
        eval_len=eval_len,
        own_scheduler=type(live.scheduler).__name__ if live.scheduler else None,
        why_flat=why_flat(),
        batch_norm=has_batch_norm(live),
        trained_before=live.trained_before,
    )
