"""Notes on a model, given once at its load, and the description of the loaded workload for the notebook."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...internals.torch_internals import has_step_hooks, stepped_by_others
from ...memory.device import Device
from ...shared.knobs.shards import ONE_RANK
from ...shared.workload import Workload, WorkloadInfo
from ..data.stream import Stream
from ..link.settings import why_flat
from ..replay.compiling import why_not
from ..undo.python_state import PythonState
from .live_model import LiveModel
from .optimizers import beside_state, with_inner
from .parts import as_given, in_groups
from .rates import named_rate

_KEEPING = (Tensor, nn.Module, list, dict, set, deque)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def has_batch_norm(live: LiveModel) -> bool:
    """Return whether the model takes statistics from micro-batches; a batch norm in evaluation mode does not."""
    frozen = set(live.modes.evaluating())
    return any(isinstance(module, _BATCH_NORMS) and name not in frozen for name, module in live.parts.named_modules())


def model_notes(live: LiveModel, loss: Callable[..., Any], ranks: int) -> tuple[str, ...]:
    """Sentences about this model and its loss on that many ranks."""
    said = []
    if ranks > 1 and has_batch_norm(live):
        said.append(
            "Batch norm takes its statistics from each rank's own micro-batches, so running means and variances differ "
            "from rank to rank; weights do not. Another batch_size changes them, also where accumulation_steps makes "
            "up for it."
        )
    trained = set(map(id, live.parts.parameters()))
    given = as_given(loss)
    state = PythonState(lambda: (given,))
    state.take()
    used = [weight for _, weight in state.weights() if weight.requires_grad]
    if strangers := [weight for weight in used if id(weight) not in trained]:
        said.append(
            f"The loss uses weights that nothing trains here ({len(strangers)}, the first of shape "
            f"{tuple(strangers[0].shape)}). If they are to be trained, make what holds them a part of the model, or "
            "give them to the optimizer."
        )
    if live.own_optimizer:
        held = set(map(id, in_groups(live.own_optimizer)))
        left_out = [
            name for name, param in live.parts.named_parameters() if param.requires_grad and id(param) not in held
        ]
        if left_out:
            others = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
            said.append(f"The optimizer does not hold {left_out[0]}{others}: what it does not hold is not trained.")
        if kept := _unseen(live.own_optimizer):
            said.append(
                f"The optimizer keeps values outside of its state ({', '.join(kept)}): they are in no saved state. "
                "Keep them in state[param]."
            )
        if stepped_by_others(live.own_optimizer):
            said.append(
                "The optimizer's step was replaced by another function: what that keeps is in no saved state. "
                "register_step_post_hook runs a function after each update that counts."
            )
        elif has_step_hooks(live.own_optimizer):
            said.append(
                "The optimizer has step hooks: they run for updates that count, and what they keep is in no saved "
                "state. A scheduler is saved when it is named: scheduler=."
            )
    return tuple(said)


def _unseen(optimizer: Optimizer) -> list[str]:
    """Names of what an optimizer, or one in it, keeps beside its state, which files do not hold."""
    kept = (pair for one in with_inner(optimizer) for pair in beside_state(one).items())
    return [name for name, value in kept if isinstance(value, _KEEPING) or getattr(value, "__closure__", None)]


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
        blocks=len(live.recomputing.blocks),
        logits=live.recomputing.wide_head is not None,
        matrices=any(one.requires_grad for one in live.matrices),
        own_optimizer=type(own).__name__ if own else None,
        own_learning_rate=named_rate(own) if own else None,
        notes=(*notes, *model_notes(live, workload.loss, stream.size)),
        data=data,
        eval_len=eval_len,
        own_scheduler=type(live.scheduler).__name__ if live.scheduler else None,
        why_flat=why_flat(),
        batch_norm=has_batch_norm(live),
        trained_before=live.trained_before,
        adopted=workload.adopted,
        why_whole=_why_whole(live, stream.size),
        why_uncompiled=why_not(live.model, live.recomputing.blocks, device.kind == "cuda"),
    )


def _why_whole(live: LiveModel, ranks: int) -> str:
    """Return why ranks cannot share any optimizer's state of this model; empty where they can."""
    if ranks == 1:
        return ONE_RANK
    if live.sparse_places():
        return (
            "shard_optimizer=on cannot divide the sparse gradients of an embedding with sparse=True. Use "
            "shard_optimizer=off, or build the embedding without sparse=True."
        )
    return ""
