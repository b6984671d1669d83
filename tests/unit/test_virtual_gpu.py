"""The real allocator, in a process of its own: once installed it stays, and other tests' tensors would be counted."""

from __future__ import annotations

import functools
import gc
import importlib
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpumem_nb.memory.device import open_device
from gpumem_nb.memory.virtual_gpu import build
from gpumem_nb.shared.errors import InvalidInput, SetupError

if TYPE_CHECKING:
    import torch

    from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU

MIB = 2**20
_processes: list[ProcessPoolExecutor] = []


@pytest.fixture(scope="module", autouse=True)
def process_with_a_virtual_gpu() -> Iterator[None]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        _processes.append(process)
        yield
        _processes.clear()


def on_virtual_gpu(test: Callable[[VirtualGPU], None]) -> Callable[[], None]:
    """Run ``test(gpu)`` in that process, on an empty virtual GPU without limit."""

    def in_that_process() -> None:
        _processes[0].submit(_run, test.__module__, test.__name__).result()

    functools.update_wrapper(in_that_process, test)
    del in_that_process.__wrapped__  # type: ignore[attr-defined]  # pytest would look for a fixture named gpu
    in_that_process.body = test  # type: ignore[attr-defined]
    return in_that_process


@functools.cache
def _gpu() -> tuple[VirtualGPU, torch.Tensor]:
    import torch

    from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU

    torch.set_num_threads(1)
    older = torch.ones(3 * MIB)
    return VirtualGPU(0), older


def _run(module: str, name: str) -> None:
    gpu, _ = _gpu()
    gc.collect()
    gpu.set_limit(None)
    gpu.empty_cache()
    gpu.reset_peak()
    assert gpu.reading().live_bytes == 0, "an earlier test left tensors behind"
    getattr(importlib.import_module(module), name).body(gpu)


def tensor(nbytes: int) -> torch.Tensor:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8)


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

    before = gpu.allocations
    nothing = torch.empty(0)
    assert (gpu.reading().live_bytes, gpu.allocations, nothing.data_ptr()) == (0, before, 0)
    grown = torch.arange(1000, dtype=torch.uint8)
    grown.resize_(5000)
    assert (gpu.reading().live_bytes, gpu.allocations) == (5000, before + 2)
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
    _, older = _gpu()
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
    before = gpu.over_limit
    thread = threading.Thread(target=lambda: kept.append(tensor(16 * MIB)))
    thread.start()
    thread.join()
    assert gpu.reading().live_bytes == 16 * MIB
    assert gpu.over_limit == before + 1
    with pytest.raises(torch.OutOfMemoryError):
        tensor(1)


@on_virtual_gpu
def test_exempt_makes_room_only_inside(gpu: VirtualGPU) -> None:
    import torch

    gpu.set_limit(8 * MIB)
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


# What the CUDA caching allocator would reserve, computed by hand from its rules.


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
def test_the_default_limit_is_2_gib_and_the_name_says_so(gpu: VirtualGPU) -> None:
    device = open_device("virtual", 3, None)
    assert device.reading().limit_bytes == 2 * 2**30
    assert device.name == "virtual GPU 3 (2.0 GiB)"
    assert (device.kind, str(device.torch_device), device.note) == ("virtual", "cpu", "")


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="virtual"):
        open_device("virtul", 0, None)


# Building it.


@pytest.fixture
def empty_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("empty_cache_folder")
def test_two_builds_at_once_leave_one_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\necho once >> {tmp_path}/compiled\nsleep 1\nwhile [ "$1" != -o ]; do shift; done\n> "$2"'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build.extension_path() is None
    command = [sys.executable, "-m", "gpumem_nb.memory.virtual_gpu.build"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    path = build.extension_path()
    assert path is not None
    assert all(line.startswith("virtual GPU: ") and str(path) in line and line.count("\n") == 1 for line in lines)
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".lock", ".so"]
    assert (tmp_path / "compiled").read_text() == "once\n"


@pytest.mark.usefixtures("empty_cache_folder")
@pytest.mark.parametrize(("compiler", "words"), [("no-such-c++", "not found: install"), ("false", "failed .*set CXX")])
def test_a_compiler_that_does_not_work_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, compiler: str, words: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(SetupError, match=f"{compiler.replace('+', '.')}.*{words}"):
        build.build()
    assert build.extension_path() is None


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SetupError, match=r"cannot be stored in .*XDG_CACHE_HOME"):
        build.build()


def test_the_library_links_no_python() -> None:
    text = build.build().read_bytes()
    assert b"libc10.so" in text
    assert b"libtorch_python" not in text


@on_virtual_gpu
def test_replaying_what_happened_reserves_the_same(gpu: VirtualGPU) -> None:
    from gpumem_nb.memory.virtual_gpu.replay import replay

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
    assert (replayed.live, replayed.live_peak) == (now.live_bytes, now.live_peak_bytes)
    assert (replayed.reserved, replayed.reserved_peak) == (now.reserved_bytes, now.reserved_peak_bytes)
    assert gpu.reading() == now, "a replay is no allocation"
    held.clear()


@on_virtual_gpu
def test_only_the_threads_of_horovod_are_foreign(gpu: VirtualGPU) -> None:
    kept: list[torch.Tensor] = []
    known, go_on = threading.Event(), threading.Event()

    def communicate() -> None:
        known.set()
        go_on.wait(10)
        kept.append(tensor(3 * MIB))

    horovod = threading.Thread(target=communicate)
    horovod.start()
    known.wait(10)
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
    assert log.begin([]).foreign == 3 * MIB
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
