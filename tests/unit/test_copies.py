"""What is put aside comes back with its bits and its layout, and a checksum sees each of them in its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from gpumem_nb.engine import copies
from gpumem_nb.engine.copies import Layout, Shelf, changed_since, checksum, host_copy, quick_checksum, refill
from gpumem_nb.engine.step.buckets import arrived, outgoing
from gpumem_nb.engine.step.optimizer_state import Parked
from gpumem_nb.engine.undo.step_undo import UpdateUndo

CPU = torch.device("cpu")
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(2, 3, 4, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(3, 4).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "part of a larger one": lambda: torch.randn(4, 6)[:, 1:4],
    "expanded": lambda: torch.randn(4, 1).expand(4, 3),
    "empty": lambda: torch.randn(0, 3),
    "scalar": lambda: torch.randn(()),
    "bf16": lambda: torch.randn(2, 3, 4, 5).bfloat16().to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_copy_lies_as_torch_itself_would_lay_it(kind: str) -> None:
    tensor = LAYOUTS[kind]()
    copied, made = host_copy(tensor), Layout.of(tensor).made(CPU)
    expected = torch.empty_like(tensor).stride()
    assert (copied.stride(), made.stride(), made.dtype) == (expected, expected, tensor.dtype)
    assert torch.equal(copied, tensor)


def test_state_that_was_given_up_is_paired_with_the_same_elements_by_fused_kernels() -> None:
    def trained(put_aside: bool) -> Tensor:
        torch.manual_seed(0)
        net = nn.Conv2d(3, 4, 3)
        net.weight.data = net.weight.data.to(memory_format=torch.channels_last)
        optimizer = Adam(net.parameters(), lr=0.1, fused=True)
        for _ in range(4):
            net(torch.randn(2, 3, 5, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if put_aside:
                Parked(optimizer).restore()
        weight: Tensor = net.weight.detach()
        return weight

    assert torch.equal(trained(True), trained(False))


def test_weights_that_an_undone_update_laid_out_anew_lie_as_before() -> None:
    net = nn.Conv2d(3, 4, 3)
    net.weight.data = net.weight.data.to(memory_format=torch.channels_last)
    before, strides = net.weight.detach().clone(), net.weight.stride()
    undo = UpdateUndo(net.parameters(), Adam(net.parameters(), lr=0.1, fused=True))
    net.weight.data = net.weight.data.contiguous().add_(1)  # as bitsandbytes' optimizers do
    undo.undo()
    assert torch.equal(net.weight, before)
    assert net.weight.stride() == strides


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_lies_as_it_did_is_filled_where_it_lies(kind: str) -> None:
    tensor = LAYOUTS[kind]()
    content, strides, place = host_copy(tensor), tensor.stride(), tensor.data_ptr()
    refill(tensor, content + 1)
    assert torch.equal(tensor, content + 1)
    assert (tensor.stride(), tensor.data_ptr()) == (strides, place)


def test_buffers_that_are_laid_out_anew_between_two_steps_stay_so() -> None:
    shelf, tensor = Shelf(), LAYOUTS["contiguous"]()
    shelf.copies([tensor])
    tensor.data = tensor.data.to(memory_format=torch.channels_last)
    strides = tensor.stride()
    refill(tensor, shelf.copies([tensor])[0])
    assert tensor.stride() == strides


def test_options_that_are_tensors_are_put_back_in_place() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = Adam([weight], lr=torch.tensor(0.1))
    rate = optimizer.param_groups[0]["lr"]
    undo = UpdateUndo([weight], optimizer)
    rate.fill_(7.0)
    undo.undo()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == torch.tensor(0.1)


def test_a_gradient_that_this_rank_lacked_lies_as_its_weight_does() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    wires = outgoing(weight, sparse=False, compressed=False)
    wires[0].copy_(torch.randn(4, 3, 2, 2))
    arrived(weight, wires)
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    assert torch.equal(weight.grad, wires[0])


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows in reverse": lambda w: w.flip(0),
    "columns in reverse": lambda w: w.flip(1),
    "two rows exchanged": lambda w: torch.cat([w[[1, 0]], w[2:]]),
    "two neighbours exchanged": lambda w: torch.cat([w[:, [1, 0]], w[:, 2:]], 1),
    "rolled": lambda w: w.roll(1),
    "rolled by a power of two": lambda w: w.roll(2**11),
    "another shape": lambda w: w.reshape(32, -1),
    "all signs": lambda w: -w,
    "the signs of every other column": lambda w: w * torch.tensor([1.0, -1.0]).repeat(w.shape[1] // 2),
    "two signs": lambda w: torch.cat([w[:, :1], -w[:, 1:2], w[:, 2:3], -w[:, 3:4], w[:, 4:]], 1),
    "one bit": lambda w: torch.cat([w[:-1], torch.nextafter(w[-1:], w[-1:] + 1)]),
    "moved from row to row": lambda w: torch.cat([w[:1] + 1, w[1:2] - 1, w[2:]]),
}


@pytest.mark.parametrize("rows", [64, 640, 4096])
@pytest.mark.parametrize("change", CHANGES)
def test_a_checksum_sees_what_changed_and_what_moved(change: str, rows: int) -> None:
    weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    assert checksum(weight) == checksum(weight.clone()) == checksum(weight.t().contiguous().t())
    assert checksum(CHANGES[change](weight)) != checksum(weight)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.complex64])
def test_a_checksum_is_of_any_type_and_place_in_memory(dtype: torch.dtype) -> None:
    tensor = (torch.arange(77) % 3).to(dtype)
    assert checksum(tensor[3:]) == checksum(tensor[3:].clone())
    assert checksum(tensor.roll(1)) != checksum(tensor)


@pytest.mark.parametrize("on_device", [False, True])
def test_what_changed_is_found_by_checksums_and_a_gpu_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    if on_device:  # whose sums stay there
        monkeypatch.setattr(copies, "quick_checksum", lambda tensor: torch.tensor(quick_checksum(tensor)))
    tensors = [torch.full((4,), float(place)) for place in range(5)]
    before = [(tensor, copies.quick_checksum(tensor)) for tensor in tensors]
    assert changed_since(before) == []
    tensors[1][0], tensors[4] = 7, tensors[4].neg_()
    fetched, usual = [], Tensor.tolist

    def fetch(tensor: Tensor) -> list[bool]:
        fetched.append(tensor)
        return usual(tensor)

    monkeypatch.setattr(Tensor, "tolist", fetch)
    assert [id(one) for one in changed_since(before)] == [id(tensors[1]), id(tensors[4])]
    assert len(fetched) == on_device
    assert changed_since([]) == []
