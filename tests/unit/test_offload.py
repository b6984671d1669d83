"""``offload_activations=on``: gradients to the bit, the device's bytes without what waits in host memory."""

from __future__ import annotations

import gc
import sys
import weakref
from itertools import count
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpumem_nb.engine.replay.recomputing import Recomputing
from gpumem_nb.memory import host_pool
from gpumem_nb.memory.host_pool import HostMemory, HostPool
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_selective import CASES

MIB = 2**20


def recomputing(
    model: nn.Module, offload: str, checkpointing: str = "none", host: HostMemory | None = None
) -> Recomputing:
    def none(*_: Any) -> Any:
        raise AssertionError("nothing is made anew")

    parts = Recomputing(model, Workload("plain", none, none, none), host)
    parts.set_checkpointing(Settings(checkpointing=checkpointing))
    parts.set_offload(offload)
    return parts


def gradients(case: str, offload: str, checkpointing: str = "none", precision: str = "fp32") -> list[Tensor]:
    """Return what two steps give: losses, gradients, and buffers afterwards."""
    make, batch, loss = CASES[case]()
    torch.manual_seed(1)
    model = make().train()
    parts = recomputing(model, offload, checkpointing)
    torch.manual_seed(7)
    losses = []
    for _ in range(2):
        with parts.on():
            parts.stays(batch)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                value = loss(model, batch)
            value.backward()
            losses.append(value.detach())
            del value
        assert offload == "off" or parts.host_bytes[0] > 0
    trained = [param.grad for param in model.parameters() if param.grad is not None]
    return [*losses, *trained, *(buffer.clone() for buffer in model.buffers())]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("checkpointing", ["none", "blocks", "sqrt"])
def test_losses_gradients_and_buffers_are_the_same_to_the_bit(case: str, checkpointing: str) -> None:
    expected, found = (gradients(case, offload, checkpointing) for offload in ("off", "on"))
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("case", ["dropout", "convolutions", "bert", "llama"])
def test_they_are_the_same_with_16_bits(case: str) -> None:
    expected, found = (gradients(case, offload, precision="bf16") for offload in ("off", "on"))
    assert all(map(torch.equal, found, expected))


class Wide(nn.Module):
    """Its activations are 8 tensors of 4 MiB each, two of them views of a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x


def peak(gpu: VirtualGPU, model: nn.Module, parts: Recomputing, batch: Tensor) -> int:
    gc.collect()
    gpu.reset_peak()
    before = gpu.reading().live_bytes
    with parts.on():
        parts.stays([batch])
        model(batch).square().mean().backward()
    return gpu.reading().live_peak_bytes - before


def test_what_waits_in_host_memory_is_not_the_devices(gpu: VirtualGPU) -> None:
    model, batch = Wide(), torch.randn(4096, 256)
    size = batch.nbytes
    plain = peak(gpu, model, recomputing(model, "off"), batch)
    model.zero_grad()
    parts = recomputing(model, "on")
    aside = peak(gpu, model, parts, batch)
    assert plain > 11 * size
    assert aside < 7 * size, "a result, what is fetched, what is fetched ahead, and gradients on their way"
    assert parts.host_bytes[0] >= 11 * size
    again = parts.host_bytes
    model.zero_grad()
    assert peak(gpu, model, parts, batch) == aside
    assert parts.host_bytes == again, "buffers are used again"
    left = gpu.reading().live_bytes
    del parts
    gc.collect()
    assert gpu.reading().live_bytes == left, "host memory is never the device's"


def test_weights_buffers_and_the_micro_batch_stay(gpu: VirtualGPU) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    batch = torch.randn(32, 64)
    parts = recomputing(model, "on")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        peak(gpu, model, parts, batch)
    linear, cast = 32 * 64 * 4, 32 * 64 * 2
    assert parts.host_bytes[0] <= 2 * linear + 2 * cast + 4096, "no weight and no cast of one"


def test_views_of_one_tensor_wait_once_and_come_back_with_their_strides(gpu: VirtualGPU) -> None:
    weight = nn.Linear(64, 192)
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *parts: Tensor) -> Tensor:
            ctx.save_for_backward(*parts)
            return sum(part.sum() for part in parts)  # type: ignore[return-value]

        @staticmethod
        def backward(ctx: Any, given: Tensor) -> Any:
            seen.extend(ctx.saved_tensors)
            return tuple(torch.ones_like(part) for part in ctx.saved_tensors)

    parts = recomputing(weight, "on")
    with parts.on():
        batch = torch.randn(128, 64)
        parts.stays([batch])
        made = weight(batch).chunk(3, 1)
        expected = [part.detach().clone() for part in made]
        strides = [part.stride() for part in made]
        loss: Tensor = Look.apply(*made)  # type: ignore[no-untyped-call]
        del made
        loss.backward()
    assert all(map(torch.equal, seen, expected))
    assert [part.stride() for part in seen] == strides
    assert len({part.untyped_storage().data_ptr() for part in seen}) == 1
    assert parts.host_bytes[0] < 1.5 * 128 * 192 * 4


def test_a_short_pool_is_one_sentence_and_leaves_nothing(gpu: VirtualGPU) -> None:
    model, batch = Wide(), torch.randn(4096, 256)
    host = HostMemory()
    parts = recomputing(model, "on", host=host)
    pool = host.in_use
    assert pool
    pool.limit_bytes = 10 * MIB
    gc.collect()
    live = gpu.reading().live_bytes
    with pytest.raises(WorkloadError, match=r"Host memory is short: 12\.0 MiB .* may use 10\.0 MiB"):
        peak(gpu, model, parts, batch)
    gc.collect()
    assert gpu.reading().live_bytes == live
    assert pool.used_bytes == 0


def test_what_was_put_aside_ends_without_python_code_in_which_an_interrupt_would_be_lost() -> None:
    host, called = HostMemory(), list[str]()
    parts = recomputing(Wide(), "on", host=host)
    pool = host.in_use
    assert pool

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    with parts.on():
        loss = Wide()(torch.ones(8, 256)).sum()
        loss.backward(retain_graph=True)
        assert pool.used_bytes > 0
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            del loss
        finally:
            sys.setprofile(before)
    assert called == []
    assert pool.used_bytes == 0


def test_buffers_of_other_sizes_leave_when_host_memory_would_be_short() -> None:
    pool, device = HostPool(1), torch.device("cpu")
    pool.limit_bytes, held = 10 * MIB, list[weakref.ref[Any]]()
    for size in range(1, 7):  # as micro-batches of one step, each of another length
        user = nn.Identity()
        held.append(weakref.ref(pool.take(size * MIB, device, user)))
        del user
        assert sum(buffer.nbytes for one in held if (buffer := one()) is not None) <= pool.limit_bytes
    assert pool.used_bytes == 0
    assert pool.peak_bytes == 6 * MIB


class Interrupting:
    """Raises ``KeyboardInterrupt`` at one of the lines that Python runs in the pool's file, counted from 0."""

    def __init__(self, at: int) -> None:
        self._left, self.came = at, False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Interrupting | None:
        if frame.f_code.co_filename != host_pool.__file__:
            return None
        if event == "line":
            self._left -= 1
            if self._left == -1:
                self.came = True
                raise KeyboardInterrupt
        return self


def test_bytes_in_use_are_those_of_what_lives_wherever_an_interrupt_came() -> None:
    device = torch.device("cpu")
    for at in count():
        pool, users, held = HostPool(1), dict[nn.Module, int](), list[Tensor]()
        for size in range(1, 9):
            user = nn.Identity()
            pool.take(size, device, user)
            users[user] = size
        held.append(pool.hold(32, device))
        del user, users[next(iter(users))]
        interrupt, before, new = Interrupting(at), sys.gettrace(), nn.Identity()
        sys.settrace(interrupt)
        try:
            pool.take(64, device, new)
            users[new] = 64
            del users[next(iter(users))]
            held.append(pool.hold(128, device))
            held.pop(0)
            pool.begin()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        lives = pool.used_bytes
        if new not in users:  # lent, or not yet
            del new
            assert pool.used_bytes in (lives, lives - 64)
        assert pool.held_bytes == sum(one.nbytes for one in held)
        assert pool.used_bytes == sum(users.values()) + pool.held_bytes
        if not interrupt.came:
            assert at > 20
            return


def test_host_memory_that_could_not_be_had_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise MemoryError

    host = HostMemory()
    parts = recomputing(nn.Identity(), "on", host=host)
    pool = host.in_use
    assert pool
    monkeypatch.setattr(np, "empty", refuse)
    with parts.on(), pytest.raises(MemoryError):
        torch.ones(64, 64, requires_grad=True).exp().exp()
    assert pool.used_bytes == 0


def test_a_weight_that_is_changed_before_backward_needs_it_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parts = recomputing(model, "on")
    with parts.on():
        loss = model(torch.ones(2, 4)).sum()
        with torch.no_grad():
            next(model[1].parameters()).add_(1)
        with pytest.raises(WorkloadError, match=r"shape \(4, 4\) .* changed in place"):
            loss.backward()


def test_it_leaves_no_trace_when_it_is_off() -> None:
    model = nn.Linear(4, 4)
    parts = recomputing(model, "on")
    with parts.on():
        model(torch.ones(2, 4)).sum().backward()
    parts.set_offload("off")
    assert parts.applied["offload_activations"] == "off"
    assert parts.host_bytes == (0, 0, 0)
    with parts.on():
        kept = model(torch.ones(2, 4)).exp()
        saved: Any = kept.grad_fn
        assert saved._saved_result.data_ptr() == kept.data_ptr()


def test_functions_that_take_gradients_of_their_own_run_inside_as_without_it() -> None:
    weight, batch = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    found = list[Tensor]()
    for how in ("off", "on"):
        parts, weight.grad = recomputing(nn.Identity(), how), None
        with parts.on():
            slope = torch.func.grad(lambda rows: (rows @ weight).square().sum())(batch)
            (slope.square().sum() + (batch @ weight).exp().sum()).backward()
        assert weight.grad is not None
        found.append(weight.grad)
    assert torch.equal(found[0], found[1])


def test_gradients_in_forward_mode_come_back_with_their_zeros() -> None:
    batch, found = torch.randn(4, 8), list[list[Tensor]]()
    for how in ("off", "on"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        with recomputing(model, how).on():
            slopes = torch.func.jacfwd(lambda rows, model=model: model(rows).exp().sum(0))(batch)
            slopes.square().sum().backward()
        found.append([param.grad for param in model.parameters() if param.grad is not None])
    assert all(map(torch.equal, *found))


def test_nested_tensors_stay_as_they_are() -> None:
    rows, found = torch.randn(5, 8), list[list[Tensor]]()
    for how in ("off", "on"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        with recomputing(model, how).on():
            made = model(torch.nested.as_nested_tensor([rows[:2], rows[2:]], layout=torch.strided))
            torch.nested.to_padded_tensor(made, 0.0).square().sum().backward()
        found.append([param.grad for param in model.parameters() if param.grad is not None])
    assert all(map(torch.equal, *found))


def test_a_result_that_is_changed_before_backward_needs_it_is_refused() -> None:
    parts = recomputing(nn.Identity(), "on")
    with parts.on():
        made = (torch.ones(64, 64, requires_grad=True) * 2).exp()
        loss = made.sum()
        made.detach().add_(1)
        with pytest.raises(WorkloadError, match=r"shape \(64, 64\) that backward needs was changed in place"):
            loss.backward()
