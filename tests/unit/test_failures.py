"""What an exception in a step is told as."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from gpumem_nb.engine.step.ambient import let_go
from gpumem_nb.engine.step.failures import failure_of
from gpumem_nb.kernel.training.stalls import cause_of
from gpumem_nb.report.rescue import Rescue
from gpumem_nb.shared.messages import LOGITS, SCORES, ChunkReply, Failure, Reading
from gpumem_nb.shared.settings import Settings


def told(error: BaseException, phase: str = "forward", model: nn.Module | None = None, **room: Any) -> Failure:
    device = Mock(**{"room.return_value": None, **{f"room.{name}": value for name, value in room.items()}})
    return failure_of(error, 0, phase, model or nn.Linear(1, 1), (), device)


def chained(cause: BaseException, *, context: bool) -> BaseException:
    outer = RuntimeError("layer 3 failed")
    outer.__cause__, outer.__context__ = (None, cause) if context else (cause, None)
    return outer


OOM = torch.OutOfMemoryError("Tried to allocate 2.00 MiB")


@pytest.mark.parametrize(
    "error",
    [
        OOM,
        chained(OOM, context=True),
        chained(OOM, context=False),
        chained(chained(OOM, context=True), context=False),
        ExceptionGroup("several", [ValueError("one"), OOM]),
    ],
)
def test_memory_that_ran_out_is_found_behind_what_was_raised(error: BaseException) -> None:
    failure = told(error)
    assert (failure.kind, failure.message, failure.asked_bytes) == ("oom", str(OOM), 2 * 2**20)


def test_what_another_process_has_taken_is_not_free() -> None:
    assert told(OOM, return_value=2**20).free_bytes == 2**20
    assert told(OOM, return_value=-5).free_bytes == 0
    assert told(OOM, side_effect=RuntimeError("CUDA error: unspecified launch failure")).free_bytes is None
    assert told(ValueError("another"), return_value=2**20).free_bytes is None


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "CUDA error: CUSPARSE_STATUS_NOT_INITIALIZED when calling `cusparseCreate(handle)`",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "CUDA driver error: out of memory",
        "CUDA out of memory. Tried to allocate 2.00 MiB",
        "Triton Error [CUDA]: out of memory",
        "NCCL error in: NCCLUtils.hpp, unhandled cuda error.\nLast error:\nCuda failure 2 'out of memory'",
        "ncclCommInitRank failed: unhandled cuda error.\nLast error: Failed to CUDA calloc 4194304 bytes",
    ],
)
def test_memory_that_ran_out_in_cuda_itself_is_known_by_its_words(text: str) -> None:
    assert told(RuntimeError(text)).kind == "oom"
    assert told(ValueError(text)).kind == "error"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
        "CUDA error: an illegal memory access was encountered",
        "NCCL error: remote process exited or there was a network error",
        "my queue is out of memory of what it saw",
    ],
)
def test_other_errors_of_cuda_are_no_want_of_memory(text: str) -> None:
    assert told(RuntimeError(text)).kind == "error"


def test_an_interrupt_stays_one_while_memory_had_run_out() -> None:
    interrupt = KeyboardInterrupt()
    interrupt.__context__ = OOM
    assert told(interrupt).kind == "interrupted"


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_frames_of_all_that_is_behind_an_exception_are_let_go() -> None:
    cause, context, member = raised(ValueError()), raised(KeyError()), raised(OSError())
    group = raised(ExceptionGroup("several", [member]))  # type: ignore[type-var]
    group.__cause__, group.__context__ = cause, context
    cause.__context__ = group  # a circle
    let_go(group)
    assert [error.__traceback__ for error in (cause, context, member, group)] == [None] * 4


def test_an_exception_that_cannot_say_anything_is_told_by_its_type() -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise ValueError

    assert told(Mute()).message == "Mute: Mute"
    assert told(chained(Mute(), context=True)).message == "RuntimeError: layer 3 failed"


def test_an_operator_that_a_backend_lacks_is_named_without_those_that_have_it() -> None:
    with pytest.raises(NotImplementedError) as caught:
        torch.linalg.vector_norm(torch.eye(2).to_sparse())
    failure = told(caught.value)
    assert failure.message.endswith("arguments from the 'SparseCPU' backend.")
    assert "aten::linalg_vector_norm" in failure.message


def test_an_error_in_backward_is_told_where_the_model_is_frozen_and_its_criterion_trains() -> None:
    failure = told(OOM, "backward", nn.Linear(1, 1).requires_grad_(False))
    assert (failure.kind, failure.module) == ("oom", "")


def run_out(*_: Any, **__: Any) -> Any:
    raise OOM


class Attends(nn.Module):
    """Attention of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x


def own_loss(logits: torch.Tensor) -> torch.Tensor:
    return -torch.log_softmax(logits, -1)[:, 0].mean()


@pytest.mark.parametrize(
    ("owner", "operator", "call", "filled"),
    [
        (torch._C._nn, "cross_entropy_loss", lambda x: nn.CrossEntropyLoss()(x, torch.tensor([0, 1])), LOGITS),
        (torch, "log_softmax", own_loss, LOGITS),
        (torch.Tensor, "softmax", Attends(), SCORES),
        (torch.nn.functional, "softmax", lambda x: nn.MultiheadAttention(2, 1)(x, x, x), SCORES),
        (torch.nn.functional, "linear", lambda x: nn.MultiheadAttention(2, 1)(x, x, x), ""),
        (torch.nn.functional, "linear", nn.Linear(2, 2), ""),
        (torch.nn.functional, "relu", nn.ReLU(), ""),
    ],
)
def test_what_memory_ran_out_for_is_told_by_the_line_that_ran(
    owner: Any, operator: str, call: Any, filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, operator, run_out)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        call(torch.randn(2, 2))
    frames = traceback.extract_tb(caught.tb)[:-1]  # an operator that runs out in truth is no frame
    monkeypatch.setattr(traceback, "extract_tb", lambda _: frames)
    assert told(caught.value).filled == filled


def test_settings_that_not_all_ranks_can_use_are_told_with_the_rank_that_cannot() -> None:
    short, other = (Failure(rank, "error", "settings", f"Host memory is short: {rank} MiB.") for rank in (1, 2))
    replies = [
        ChunkReply(rank, (), Reading(0, 0, 0, 0, None, None), failure)
        for rank, failure in enumerate([None, short, other])
    ]
    told = cause_of(replies)
    assert told == short
    assert (
        Rescue(told, 1, Settings()).headline == "These settings cannot be used on rank 1: Host memory is short: 1 MiB."
    )
    alike = [replace(reply, failure=replace(short, rank=reply.rank, message="no blocks.")) for reply in replies]
    told = cause_of(alike)
    assert told
    assert Rescue(told, 1, Settings()).headline == "These settings cannot be used: no blocks."
    assert cause_of([replies[0]]) is None
