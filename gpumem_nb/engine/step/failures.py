"""From an exception to a failure that can be sent: what it was, where in the model, and how much memory was missing."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

import torch
from torch import Tensor, nn

from ...memory.device import Device
from ...shared.errors import InvalidInput, WorkloadError, text_of
from ...shared.messages import LOGITS, SCORES, Failure
from ...shared.settings import Settings
from ...shared.units import parse_size
from ..data.stream import Stream
from ..link.communicator import here
from ..replay.segment import Segment
from .ambient import behind, let_go

# What CUDA and its libraries say where torch raises no error of its own for it. A library that cannot make its handle
# calls itself "not initialized": it asks the device for memory past torch's allocator, which had left it none.
_OUT_OF_MEMORY = (
    r"(?is)(cuda|hip|nccl|cudnn|cublas|cusolver|cusparse|cufft|triton).*out of memory",
    r"CU(BLAS|SOLVER|SPARSE|DNN|FFT|RAND)_\w*ALLOC\w*_FAILED",
    r"CU(BLAS|SOLVER|SPARSE|DNN)_STATUS_NOT_INITIALIZED",
    r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|Failed to CUDA \w*alloc|Cuda failure 2\b",
)
# What torch says after it has named an operator that a backend lacks: pages of all backends that have it.
_LISTS_BACKENDS = " This could be because the operator doesn't exist for this backend"


_OF_SAMPLES = ("data", "forward", "backward", "recomputation")  # parts of a step that need more for larger samples


def explained(failure: Failure | None, stream: Stream, settings: Settings, device: Device) -> Failure | None:
    """Name the sample that a discarded step may have run out of memory for.

    Args:
        stream: where the step was about to take its samples.
    """
    if failure is None or failure.kind != "oom":
        return failure
    with device.exempt(), suppress(Exception):
        sample = stream.large_sample(settings) if failure.phase in _OF_SAMPLES else ""
        return replace(failure, sample=sample)
    return failure


def failure_of(
    error: BaseException, rank: int, phase: str, model: nn.Module, came: Iterable[Tensor], device: Device
) -> Failure:
    """Describe an exception and let go of what it keeps alive: the frames of its traceback hold activations.

    Args:
        error: what was raised in the step.
        rank: this one, which Horovod forgets when it is shut down.
        phase: the part of the step.
        model: where modules are looked up.
        came: in backward, the parameters that have got their gradient.
        device: read before anything is let go.
    """
    interrupted = isinstance(error, KeyboardInterrupt)
    oom = None if interrupted else next(filter(_out_of_memory, behind(error)), None)
    kind = "oom" if oom else "interrupted" if interrupted else "error"
    if here().is_separation(error) and here().separated():
        kind = "stall"
    told = oom or error
    words = text_of(told).split(_LISTS_BACKENDS)[0]
    message = words if oom or isinstance(error, WorkloadError) else f"{type(error).__name__}: {words}"
    module = _innermost_module(told.__traceback__, model) or _innermost_module(error.__traceback__, model)
    if phase == "backward":
        if any(_replays(one.__traceback__) for one in behind(error)):
            phase = "recomputation"
        else:
            module = _next_backward(model, came)
    free = None
    with suppress(RuntimeError):  # of a device that answers nothing any more
        free = device.room() if oom else None
    text = "".join(traceback.format_exception(error))
    filled = _filled(oom.__traceback__) if oom else ""
    let_go(error)
    asked, left = _asked(message) if oom else None, free and max(0, free)
    return Failure(rank, kind, phase, message, text, module, asked, left, filled=filled)


_LOSSES = frozenset({"cross_entropy", "log_softmax", "nll_loss"})
_ATTENTION = frozenset({"softmax", "eager_attention_forward"})  # torch's function, and Hugging Face's
_SOFTMAX = re.compile(r"(?<!log_)softmax\(")


def _filled(trace: TracebackType | None) -> str:
    """Return what memory ran out for, by the functions that were running and the line that ran; empty if unknown."""
    frames = traceback.extract_tb(trace)
    names, line = {frame.name for frame in frames}, frames[-1].line or "" if frames else ""
    if names & _LOSSES or any(f"{name}(" in line for name in _LOSSES):
        return LOGITS
    return SCORES if names & _ATTENTION or _SOFTMAX.search(line) else ""


def nonfinite_loss(rank: int, loss: Tensor) -> Failure:
    """Return the failure of a rank whose loss is not a number or infinite; reading it waits for the device."""
    message = f"the loss became {loss.item()}. Look at its data on this rank, lower learning_rate or set clip_norm"
    return Failure(rank, "error", "forward", message)


def _out_of_memory(error: BaseException) -> bool:
    told = isinstance(error, RuntimeError) and any(re.search(words, text_of(error)) for words in _OUT_OF_MEMORY)
    return told or isinstance(error, torch.OutOfMemoryError)


def _innermost_module(trace: TracebackType | None, model: nn.Module) -> str:
    """Return the module of the model whose method was running deepest in the stack."""
    names = {id(module): _named(name, module) for name, module in model.named_modules()}
    found = ""
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


def _replays(trace: TracebackType | None) -> bool:
    while trace is not None:
        if trace.tb_frame.f_code is Segment.replay.__code__:
            return True
        trace = trace.tb_next
    return False


def _next_backward(model: nn.Module, came: Iterable[Tensor]) -> str:
    """The module whose gradients were due next; backward meets parameters in about the reverse of their order."""
    owners = [
        (param, _named(name, module)) for name, module in model.named_modules() for param in module.parameters(False)
    ]
    owners = [(param, name) for param, name in reversed(owners) if param.requires_grad]
    there = set(map(id, came))
    done = max((index + 1 for index, (param, _) in enumerate(owners) if id(param) in there), default=0)
    return owners[min(done, len(owners) - 1)][1] if owners else ""  # a criterion may have all that is trained


def _named(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def _asked(message: str) -> int | None:
    """Return what torch's own message says that it wanted, in bytes."""
    wanted = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", message)
    try:
        return parse_size(wanted[1]) if wanted else None
    except InvalidInput:
        return None
