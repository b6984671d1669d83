"""What the CUDA caching allocator would reserve, computed by hand from its rules."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.virtual_gpu import MIB, on_virtual_gpu, tensor

if TYPE_CHECKING:
    import torch

    from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU

pytestmark = pytest.mark.usefixtures("process_with_a_virtual_gpu")


@on_virtual_gpu
def test_small_tensors_share_segments_of_2_mib(gpu: VirtualGPU) -> None:
    kept = [tensor(1)]
    assert gpu.reading().reserved_bytes == 2 * MIB
    kept += [tensor(512) for _ in range(4095)]
    assert gpu.reading().reserved_bytes == 2 * MIB
    kept.append(tensor(1))
    assert gpu.reading().reserved_bytes == 4 * MIB
    assert gpu.reading().live_bytes == 1 + 4095 * 512 + 1


@on_virtual_gpu
def test_one_mib_is_still_small(gpu: VirtualGPU) -> None:
    kept = [tensor(MIB), tensor(MIB)]
    assert gpu.reading().reserved_bytes == 2 * MIB
    kept.append(tensor(MIB + 1))
    assert gpu.reading().reserved_bytes == 22 * MIB


@on_virtual_gpu
def test_medium_tensors_share_segments_of_20_mib(gpu: VirtualGPU) -> None:
    kept = [tensor(5 * MIB) for _ in range(4)]
    assert gpu.reading().reserved_bytes == 20 * MIB
    kept.append(tensor(5 * MIB))
    assert gpu.reading().reserved_bytes == 40 * MIB


@on_virtual_gpu
def test_large_tensors_get_multiples_of_2_mib(gpu: VirtualGPU) -> None:
    kept = [tensor(10 * MIB)]
    assert gpu.reading().reserved_bytes == 10 * MIB
    kept.append(tensor(10 * MIB + 1))
    assert gpu.reading().reserved_bytes == 22 * MIB
    kept.append(tensor(10 * MIB - 512))
    assert gpu.reading().reserved_bytes == 42 * MIB


@on_virtual_gpu
def test_a_rest_of_one_mib_in_a_large_segment_is_not_split_off(gpu: VirtualGPU) -> None:
    kept = [tensor(9 * MIB), tensor(9 * MIB)]  # leaves 2 MiB: split off
    kept.append(tensor(2 * MIB))
    assert gpu.reading().reserved_bytes == 20 * MIB
    kept.clear()
    kept += [tensor(19 * MIB // 2), tensor(19 * MIB // 2)]  # leaves 1 MiB: stays with the second
    assert gpu.reading().reserved_bytes == 20 * MIB
    kept.append(tensor(MIB + 1))
    assert gpu.reading().reserved_bytes == 40 * MIB


@on_virtual_gpu
def test_the_best_fitting_cached_block_is_taken(gpu: VirtualGPU) -> None:
    kept = [tensor(30 * MIB), tensor(12 * MIB)]
    kept.clear()
    assert gpu.reading().reserved_bytes == 42 * MIB
    kept += [tensor(11 * MIB), tensor(30 * MIB)]
    assert gpu.reading().reserved_bytes == 42 * MIB


@on_virtual_gpu
def test_freed_neighbours_merge(gpu: VirtualGPU) -> None:
    a, b, c, d = (tensor(5 * MIB) for _ in range(4))
    del b
    del d
    del c  # between two free ones
    assert gpu.reading().reserved_bytes == 20 * MIB
    wide = tensor(15 * MIB)
    assert gpu.reading().reserved_bytes == 20 * MIB
    del a, wide
    whole = tensor(20 * MIB)
    assert gpu.reading().reserved_bytes == 20 * MIB
    assert gpu.reading().live_bytes == whole.nbytes


@on_virtual_gpu
def test_fragments_do_not_serve_a_larger_tensor(gpu: VirtualGPU) -> None:
    import torch

    a, b, c, d = (tensor(5 * MIB) for _ in range(4))
    del a, c
    gpu.set_limit(20 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"10\.00 MiB is reserved but unallocated"):
        tensor(9 * MIB)
    gpu.set_limit(None)
    larger = tensor(9 * MIB)
    assert gpu.reading().reserved_bytes == 40 * MIB
    assert gpu.reading().live_bytes == b.nbytes + d.nbytes + larger.nbytes


@on_virtual_gpu
def test_free_segments_are_released_before_giving_up(gpu: VirtualGPU) -> None:
    gpu.set_limit(64 * MIB)
    first = tensor(40 * MIB)
    del first
    assert gpu.reading().reserved_bytes == 40 * MIB
    second = tensor(48 * MIB)
    assert gpu.reading().reserved_bytes == 48 * MIB
    assert gpu.reading().reserved_peak_bytes == 48 * MIB
    assert gpu.reading().live_bytes == second.nbytes


@on_virtual_gpu
def test_empty_cache_releases_only_what_no_tensor_holds(gpu: VirtualGPU) -> None:
    held, freed, small = tensor(5 * MIB), tensor(40 * MIB), tensor(100)
    del freed, small
    assert gpu.reading().reserved_bytes == 62 * MIB
    gpu.empty_cache()
    assert gpu.reading().reserved_bytes == 20 * MIB
    assert gpu.reading().device_used_bytes == 20 * MIB
    assert gpu.reading().live_bytes == held.nbytes


@on_virtual_gpu
def test_replaying_what_happened_reserves_the_same(gpu: VirtualGPU) -> None:
    from gpumem_nb.memory.virtual_gpu.gpu import replay

    chance = random.Random(4)
    events: list[int] = []
    held: dict[int, torch.Tensor] = {}
    for _ in range(3000):
        if held and chance.random() < 0.48:
            number = chance.choice(list(held))
            del held[number]
            events.append(-number)
        else:
            size = int(2 ** chance.uniform(0, 24))
            events.append(size)
            held[sum(event > 0 for event in events)] = tensor(size)
    now, replayed = gpu.reading(), replay(events)
    assert (replayed.live_bytes, replayed.live_peak_bytes) == (now.live_bytes, now.live_peak_bytes)
    assert (replayed.reserved_bytes, replayed.reserved_peak_bytes) == (now.reserved_bytes, now.reserved_peak_bytes)
    assert gpu.reading() == now, "a replay is no allocation"
    held.clear()


@on_virtual_gpu
def test_what_is_held_is_replayed_from_where_it_lies(gpu: VirtualGPU) -> None:
    from gpumem_nb.memory.virtual_gpu.gpu import replay

    chance = random.Random(7)
    held = [tensor(int(2 ** chance.uniform(4, 24))) for _ in range(600)]
    del held[::2], held[::3]
    log = gpu.event_log()
    layout = log.begin([]).layout.copy()
    log.end()
    number = {int(id_): place for place, id_ in enumerate(layout[layout[:, 1] > 0, 1], start=1)}
    layout[layout[:, 1] > 0, 1] = range(1, len(number) + 1)
    gpu.empty_cache()
    gpu.reset_peak()
    assert replay([], layout=layout).reserved_peak_bytes == gpu.reading().reserved_bytes
    numbers = {number[log.allocation(one)]: one for one in held}
    del held
    events: list[int] = []
    made = len(number)
    for _ in range(1500):
        if numbers and chance.random() < 0.48:
            events.append(-chance.choice(list(numbers)))
            del numbers[-events[-1]]
        else:
            made += 1
            events.append(int(2 ** chance.uniform(0, 24)))
            numbers[made] = tensor(events[-1])
    now, replayed = gpu.reading(), replay(events, layout=layout)
    assert (replayed.reserved_bytes, replayed.reserved_peak_bytes) == (now.reserved_bytes, now.reserved_peak_bytes)
    anew = replay([*layout[layout[:, 1] > 0, 0].tolist(), *events])
    assert anew.reserved_peak_bytes != now.reserved_peak_bytes, "or it would not matter where it lies"
    numbers.clear()


@on_virtual_gpu
def test_the_limit_is_met_by_the_allocation_that_meets_it_in_a_replay(gpu: VirtualGPU) -> None:
    from torch import OutOfMemoryError

    from gpumem_nb.memory.virtual_gpu.gpu import replay

    chance, limit = random.Random(1), 100 * MIB
    events: list[int] = []
    held: dict[int, torch.Tensor] = {}

    def fill() -> None:
        made = 0
        while True:
            if held and chance.random() < 0.45:
                events.append(-chance.choice(list(held)))
                del held[-events[-1]]
            else:
                events.append(int(2 ** chance.uniform(0, 18 if len(events) < 1500 else 23)))
                made += 1
                held[made] = tensor(events[-1])

    gpu.set_limit(limit)
    with pytest.raises(OutOfMemoryError):
        fill()
    assert len(events) > 1500, "many were followed later"
    before = replay(events[:-1], limit)
    assert before.within_limit
    assert not replay(events, limit).within_limit
    assert gpu.reading().live_bytes == before.live_bytes
    held.clear()
