"""What the virtual GPU counts, where it enforces its limit, and whose bytes are Horovod's."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from gpumem_nb.memory.device import open_device
from gpumem_nb.shared.errors import InvalidInput
from tests.virtual_gpu import MIB, gpu_and_older_tensor, on_virtual_gpu, tensor

if TYPE_CHECKING:
    import torch

    from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU

pytestmark = pytest.mark.usefixtures("process_with_a_virtual_gpu")


@on_virtual_gpu
def test_live_is_exactly_what_tensors_asked_for(gpu: VirtualGPU) -> None:
    import torch

    a = torch.empty(1001)
    assert gpu.reading().live_bytes == 4004
    b = a.double()
    assert gpu.reading().live_bytes == 4004 + 8008
    view = a[3:]
    assert gpu.reading().live_bytes == 4004 + 8008
    del a
    assert gpu.reading().live_bytes == 4004 + 8008
    del view, b
    assert gpu.reading().live_bytes == 0
    assert gpu.reading().live_peak_bytes == 4004 + 8008


@on_virtual_gpu
def test_peak_counts_from_the_last_reset(gpu: VirtualGPU) -> None:
    kept = tensor(5 * MIB)
    del kept
    kept = tensor(3 * MIB)
    gpu.reset_peak()
    assert gpu.reading().live_peak_bytes == 3 * MIB
    assert gpu.reading().reserved_peak_bytes == 20 * MIB
    del kept
    gpu.empty_cache()
    assert gpu.reading().live_peak_bytes == 3 * MIB
    assert gpu.reading().reserved_bytes == 0


@on_virtual_gpu
def test_empty_tensors_and_resized_ones_are_counted_right(gpu: VirtualGPU) -> None:
    import torch

    before = gpu._read().allocations
    nothing = torch.empty(0)
    assert (gpu.reading().live_bytes, gpu._read().allocations, nothing.data_ptr()) == (0, before, 0)
    grown = torch.arange(1000, dtype=torch.uint8)
    grown.resize_(5000)
    assert (gpu.reading().live_bytes, gpu._read().allocations) == (5000, before + 2)
    assert grown[:3].tolist() == [0, 1, 2]
    grown.untyped_storage().resize_(0)
    assert gpu.reading().live_bytes == 0


@on_virtual_gpu
def test_storages_made_by_python_are_counted_once_they_are_cloned(gpu: VirtualGPU) -> None:
    import copy
    import pickle

    original = tensor(1000)
    copies = [copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
    assert gpu.reading().live_bytes == 1000
    copies = [t.clone() for t in copies]
    assert gpu.reading().live_bytes == 3000
    assert [t.nbytes for t in copies] == [1000, 1000]


@on_virtual_gpu
def test_tensors_stay_aligned_for_vector_instructions(gpu: VirtualGPU) -> None:
    assert [tensor(n).data_ptr() % 64 for n in (1, 63, 64, 65, 5 * MIB)] == [0] * 5


@on_virtual_gpu
def test_memory_from_before_is_neither_counted_nor_harmed(gpu: VirtualGPU) -> None:
    _, older = gpu_and_older_tensor()
    assert older.sum().item() == 3 * MIB
    assert gpu.reading().live_bytes == 0
    older.untyped_storage().resize_(0)
    assert gpu.reading().live_bytes == 0


@on_virtual_gpu
def test_every_thread_is_counted(gpu: VirtualGPU) -> None:
    import torch

    def churn() -> None:
        for _ in range(2000):
            torch.empty(1000)
        kept.append(tensor(MIB))

    kept: list[torch.Tensor] = []
    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gpu.reading().live_bytes == 4 * MIB
    kept.clear()
    assert gpu.reading().live_bytes == 0


@on_virtual_gpu
def test_peak_of_a_training_step_equals_the_profilers(gpu: VirtualGPU) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = _small_training(batch_size=8)  # inside: the profiler misses releases of what it has not seen made
        step()
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert peak > live + MIB
    assert gpu.reading().live_peak_bytes == pytest.approx(peak, rel=1e-3)
    assert gpu.reading().live_bytes == live


def _small_training(batch_size: int) -> Callable[[], float]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batch = torch.randn(batch_size, 3, 32, 32)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


@on_virtual_gpu
def test_passing_the_limit_is_torchs_own_error_and_says_how_much_there_was(gpu: VirtualGPU) -> None:
    import torch

    gpu.set_limit(64 * MIB)
    held = tensor(30 * MIB + 1)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        tensor(40 * MIB)
    assert str(caught.value) == (
        "virtual GPU out of memory. Tried to allocate 40.00 MiB. The virtual GPU has a total capacity of 64.00 MiB of "
        "which 32.00 MiB is free. 30.00 MiB is allocated by tensors and 2.00 MiB is reserved but unallocated."
    )
    assert type(caught.value) is torch.OutOfMemoryError
    assert gpu.reading().live_bytes == held.nbytes
    assert gpu.reading().limit_bytes == 64 * MIB


@on_virtual_gpu
def test_training_goes_on_after_an_out_of_memory_error(gpu: VirtualGPU) -> None:
    import torch

    step = _small_training(batch_size=4)
    losses = [step()]
    too_large = _small_training(batch_size=512)
    before = gpu.reading().live_bytes
    gpu.set_limit(gpu.reading().reserved_bytes + 20 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="virtual GPU out of memory") as caught:
        too_large()
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    assert gpu.reading().live_bytes <= before
    losses += [step(), step()]
    assert losses[2] < losses[1] < losses[0]


@on_virtual_gpu
def test_other_threads_pass_the_limit_and_are_counted(gpu: VirtualGPU) -> None:
    import torch

    gpu.set_limit(8 * MIB)
    kept: list[torch.Tensor] = []
    before = gpu._read().over_limit
    thread = threading.Thread(target=lambda: kept.append(tensor(16 * MIB)))
    thread.start()
    thread.join()
    assert gpu.reading().live_bytes == 16 * MIB
    assert gpu._read().over_limit == before + 1
    with pytest.raises(torch.OutOfMemoryError):
        tensor(1)


@on_virtual_gpu
def test_exempt_makes_room_only_inside(gpu: VirtualGPU) -> None:
    import torch

    gpu.set_limit(8 * MIB)
    assert gpu.allowed_bytes == 8 * MIB
    with gpu.exempt():
        with gpu.exempt():
            pass
        zeros = torch.zeros(4 * MIB)
    assert gpu.reading().live_bytes == zeros.nbytes
    with pytest.raises(torch.OutOfMemoryError):
        tensor(16 * MIB)
    with pytest.raises(KeyError), gpu.exempt():
        raise KeyError
    with pytest.raises(torch.OutOfMemoryError):
        tensor(16 * MIB)


@on_virtual_gpu
def test_what_an_exemption_has_cached_is_no_room_beyond_the_limit(gpu: VirtualGPU) -> None:
    import torch

    gpu.set_limit(64 * MIB)
    held = tensor(30 * MIB)
    with gpu.exempt(), gpu.exempt():
        beyond = [tensor(20 * MIB) for _ in range(4)]
        beyond.clear()
    assert gpu.reading().reserved_bytes == held.nbytes, "given back with the end of the exemption"
    with pytest.raises(torch.OutOfMemoryError):
        beyond += [tensor(20 * MIB) for _ in range(4)]
    assert gpu.reading().reserved_bytes <= 64 * MIB


@on_virtual_gpu
def test_reserved_stays_within_the_limit_whoever_has_cached_something(gpu: VirtualGPU) -> None:
    import torch

    gpu.set_limit(64 * MIB)
    thread = threading.Thread(target=lambda: tensor(100 * MIB))  # Horovod's, say
    thread.start()
    thread.join()
    assert gpu.reading().reserved_bytes == gpu.releasable() == 100 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        tensor(80 * MIB)
    kept = [tensor(20 * MIB) for _ in range(3)]
    assert gpu.reading().reserved_bytes == 60 * MIB
    gpu.set_limit(40 * MIB)
    kept.pop()
    assert gpu.reading().reserved_bytes == 60 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        kept.append(tensor(20 * MIB))
    assert gpu.reading().reserved_bytes == 40 * MIB


@on_virtual_gpu
def test_where_live_tensors_alone_pass_the_limit_no_more_are_made_from_what_is_cached(gpu: VirtualGPU) -> None:
    import torch

    with gpu.exempt():
        held = [tensor(MIB) for _ in range(8)]
    gpu.set_limit(4 * MIB)
    held.pop()
    with pytest.raises(torch.OutOfMemoryError):
        tensor(MIB)
    with gpu.exempt():
        held.append(tensor(MIB))
    assert gpu.reading().reserved_bytes == 8 * MIB, "inside, what is cached is used before more is reserved"
    held.clear()
    assert tensor(MIB).nbytes == MIB


@on_virtual_gpu
def test_releasable_is_what_emptying_the_cache_gives_back(gpu: VirtualGPU) -> None:
    kept = [tensor(30 * MIB), tensor(MIB), tensor(MIB), tensor(12 * MIB)]
    del kept[2], kept[0]
    reserved, releasable = gpu.reading().reserved_bytes, gpu.releasable()
    assert (reserved, releasable) == (44 * MIB, 30 * MIB), "half a segment of the small ones is in use"
    gpu.empty_cache()
    assert gpu.reading().reserved_bytes == reserved - releasable
    assert gpu.releasable() == 0


@on_virtual_gpu
def test_a_forked_data_worker_is_not_on_the_device(gpu: VirtualGPU) -> None:
    gpu.set_limit(8 * MIB)
    child = os.fork()
    if child == 0:
        try:
            tensor(16 * MIB)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert gpu.reading().live_bytes == 0


@on_virtual_gpu
def test_the_default_limit_is_2_gib_and_the_name_says_so(gpu: VirtualGPU) -> None:
    device = open_device("virtual", 3, None)
    assert device.reading().limit_bytes == 2 * 2**30
    assert device.name == "virtual GPU 3 (2.0 GiB)"
    assert (device.kind, str(device.torch_device), device.note) == ("virtual", "cpu", "")


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="virtual"):
        open_device("virtul", 0, None)


@on_virtual_gpu
def test_only_the_threads_of_horovod_are_foreign(gpu: VirtualGPU) -> None:
    kept: list[torch.Tensor] = []
    known, go_on = threading.Event(), threading.Event()

    def communicate() -> None:
        known.set()
        go_on.wait(60)
        kept.append(tensor(3 * MIB))

    horovod = threading.Thread(target=communicate)
    horovod.start()
    known.wait(60)
    gpu.communicates_on({horovod.native_id or 0})
    helper = threading.Thread(target=lambda: kept.append(tensor(5 * MIB)))
    log = gpu.event_log()
    log.begin([])
    helper.start()
    helper.join()
    go_on.set()
    horovod.join()
    events = log.end()
    assert {int(nbytes) for nbytes in events.bytes[events.foreign]} == {3 * MIB}
    assert log.begin([]).foreign_bytes == 3 * MIB
    log.end()
    gpu.communicates_on(())


@on_virtual_gpu
def test_threads_that_help_an_operator_are_within_it(gpu: VirtualGPU) -> None:
    import torch

    def allocated_outside_operators(threads: int) -> int:
        torch.set_num_threads(threads)
        log = gpu.event_log()
        tokens = torch.randn(8, 4, 64, 16, dtype=torch.bfloat16, requires_grad=True)
        log.begin([])
        torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens).sum().backward()
        events = log.end()
        assert not events.foreign.any()
        return int(((events.bytes > 0) & (events.call == 0)).sum())

    try:
        assert allocated_outside_operators(2) == allocated_outside_operators(1)
    finally:
        torch.set_num_threads(1)


@on_virtual_gpu
def test_a_log_that_ends_before_the_step_says_so(gpu: VirtualGPU) -> None:
    from unittest import mock

    log, exact = gpu.event_log(), []
    with mock.patch("gpumem_nb.memory.virtual_gpu.gpu.LONGEST_LOG", 20):
        for made in (3, 30):
            log.begin([])
            for _ in range(made):
                tensor(1)
            log.end()
            exact.append(log.exact)
    assert exact == [True, False]
