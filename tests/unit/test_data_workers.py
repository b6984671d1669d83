"""Worker processes fetch what the rank would fetch, in the same order, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from gpumem_nb.engine import cells
from gpumem_nb.engine.data.iterables import stream_of
from gpumem_nb.engine.data.stream import Stream
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.settings import Settings
from tests.timing import HANG_S


class Numbered(Dataset[Any]):
    """Samples with some noise, and the process that fetched them."""

    bad = -1
    factor = 1

    def __len__(self) -> int:
        return 31

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        if index == self.bad:
            raise OSError("unreadable")
        return self.factor * (index + torch.rand(())), index, os.getpid()


Make = Callable[..., Stream]


@pytest.fixture
def make() -> Iterator[Make]:
    """A stream of rank 1 of 2; its workers are ended."""
    made = []

    def stream(data: Any = None, **knobs: Any) -> Stream:
        stream = stream_of(data or Numbered(), 1, 2)
        stream.draws = True
        stream.load_with(Settings(**knobs))
        made.append(stream)
        return stream

    yield stream
    for one in made:
        one.close()
    assert not multiprocessing.active_children()


def take(stream: Stream, batch_size: int = 2, count: int = 2, done: bool = True) -> tuple[list[float], set[int]]:
    """One step: its values, and the processes that fetched them."""
    stream.make_ready(batch_size, count)
    batches = list(stream.micro_batches(batch_size, count))
    if done:
        stream.advance(batch_size, count)
    values = [float(value) for batch in batches for value in batch[0]]
    return values, {int(pid) for batch in batches for pid in batch[2]}


def test_samples_are_the_same_however_many_workers_fetch_them(make: Make) -> None:
    plain, one, two = make(), make(num_workers=1), make(num_workers=2, prefetch_factor=4)
    for batch_size, count in [(2, 2)] * 6 + [(3, 1)] * 4 + [(2, 2)] * 3:
        expected, here = take(plain, batch_size, count)
        assert here == {os.getpid()}
        assert take(one, batch_size, count)[0] == take(two, batch_size, count)[0] == expected
    assert len(take(two)[1] - {os.getpid()}) == 2, "workers take turns, a micro-batch each"


class OnHost(Numbered):
    def __getitem__(self, index: int) -> Any:
        return torch.full((), float(os.getpid()), device="cpu")


def test_workers_draw_numbers_of_their_own_on_each_rank_and_after_each_cell() -> None:
    class DrawsLater(Numbered):  # after it was looked at, or in few samples
        def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
            return torch.rand((), dtype=torch.float64), index, os.getpid()

    drawn: list[float] = []
    for rank in range(2):
        stream = stream_of(DrawsLater(), rank, 2)
        stream.load_with(Settings(num_workers=1))
        try:
            for _ in range(2):
                take(stream)
                drawn += take(stream)[0]
                cells.one_more()
        finally:
            stream.close()
    assert len(set(drawn)) == len(drawn)


def test_workers_begin_where_a_cell_has_made_a_gpu_torchs_default_device(make: Make) -> None:
    stream = make(OnHost(), num_workers=1)
    torch.set_default_device("meta")
    try:
        for _ in range(2):
            stream.make_ready(2, 1)
            [batch] = stream.micro_batches(2, 1)
            stream.advance(2, 1)
    finally:
        torch.set_default_device(None)
    assert os.getpid() not in set(map(int, batch))


def test_the_first_step_of_a_size_is_the_ranks_own_because_it_may_be_a_trial(make: Make) -> None:
    stream = make(num_workers=1)
    first, second = take(stream)[1], take(stream)[1]
    assert os.getpid() in first
    assert os.getpid() not in second
    assert take(stream, 4, 2, done=False)[1] == {os.getpid()}
    assert take(stream)[1] == second, "the workers are where they were"


def test_trials_are_the_ranks_own_and_leave_the_workers_where_they_are(make: Make) -> None:
    plain, stream = make(), make(num_workers=1)
    workers = [take(one)[1] for one in (stream, stream)][1]
    take(plain), take(plain)
    expected = take(plain, done=False)[0]
    stream.make_ready(2, 2, trial=True)
    batches = list(stream.micro_batches(2, 2))
    assert {int(pid) for batch in batches for pid in batch[2]} == {os.getpid()}
    assert [float(value) for batch in batches for value in batch[0]] == expected
    assert not stream.foreign
    assert take(stream) == (expected, workers)


def test_a_step_that_was_undone_comes_again(make: Make) -> None:
    plain, stream = make(), make(num_workers=2)
    for done in (True, True, False, False, True, False, True):
        assert take(stream, done=done)[0] == take(plain, done=done)[0]
    stream.make_ready(2, 2)
    next(stream.micro_batches(2, 2))  # left half way
    assert take(stream)[0] == take(plain)[0]
    stream.go_to(8, 0, 0)
    plain.go_to(8, 0, 0)
    assert take(stream)[0] == take(plain)[0]


def test_workers_change_with_their_knobs(make: Make) -> None:
    stream, plain = make(num_workers=1), make()
    for workers in (1, 1, 2, 0, 0, 1):
        stream.load_with(Settings(num_workers=workers))
        assert take(stream)[0] == take(plain)[0]
        expected = workers if stream.position > 8 else 0
        assert len(multiprocessing.active_children()) == expected


def test_what_a_cell_changes_in_the_data_reaches_the_workers(make: Make) -> None:
    data = Numbered()
    stream = make(data, num_workers=2)
    for _ in range(3):
        take(stream)
    before = multiprocessing.active_children()
    cells.one_more()
    data.factor = 100
    values, by = take(stream)
    assert sorted(values)[1] >= 100, "of all samples but the first"
    assert by.isdisjoint({os.getpid(), *(process.pid for process in before)})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_named_or_skipped_by_workers_too(workers: int, make: Make) -> None:
    data = Numbered()
    data.bad = 7
    stream = make(DataLoader(data), num_workers=workers)
    take(stream, 2, 1)
    with pytest.raises(WorkloadError, match=r"^sample 7 of the data failed: OSError: unreadable") as caught:
        take(stream, 2, 1)
    assert "unreadable" in str(caught.value.__cause__)
    stream.load_with(Settings(num_workers=workers, on_bad_sample="skip"))
    values, _ = take(stream, 2, 1)
    assert [int(value) for value in values] == [6]
    assert [int(value) for value in take(stream, 2, 1)[0]] == [10, 11]
    assert stream.take_skipped() == ("sample 7 of the data failed: OSError: unreadable",)


def test_a_worker_is_named_whose_connection_broke_a_moment_before_it_has_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = make(num_workers=1)
    for _ in range(2):
        take(stream)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    pid = worker.pid

    def broken(iterator: Any) -> None:
        os.kill(pid, signal.SIGKILL)
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._next_data", broken)
    with pytest.raises(WorkloadError, match=rf"A data worker \(pid {pid}\) was ended by SIGKILL"):
        take(stream)


def test_a_worker_that_dies_is_named_and_the_next_step_has_new_ones(make: Make) -> None:
    stream, plain = make(num_workers=1, prefetch_factor=1), make()
    for _ in range(2):
        take(stream)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    handler = signal.getsignal(signal.SIGCHLD)
    os.kill(worker.pid, signal.SIGKILL)

    def go_on() -> None:  # what had been fetched before is still used
        while True:
            take(stream)

    with pytest.raises(WorkloadError, match=rf"A data worker \(pid {worker.pid}\) was ended by SIGKILL"):
        go_on()
    plain.go_to(stream.position, 0, 0)
    assert signal.getsignal(signal.SIGCHLD) == handler == signal.SIG_DFL
    assert take(stream)[0] == take(plain)[0]
    assert take(stream)[0] == take(plain)[0]


def test_an_interrupt_while_workers_are_waited_for_loses_no_sample(make: Make) -> None:
    class Interrupting(Numbered):
        calm = False

        def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
            if get_worker_info() and not self.calm:
                os.kill(os.getppid(), signal.SIGINT)
                time.sleep(1000)
            return super().__getitem__(index)

    data = Interrupting()
    stream, plain = make(data, num_workers=1), make()
    assert take(stream)[0] == take(plain)[0]
    with pytest.raises(KeyboardInterrupt):
        take(stream)
    assert not multiprocessing.active_children()
    data.calm = True
    assert take(stream)[0] == take(plain)[0]
    assert len(multiprocessing.active_children()) == 1


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_pinning_changes_no_sample(workers: int, make: Make) -> None:
    stream, plain = make(pin_memory=True, num_workers=workers), make()
    for done in (True, True, False, True):
        assert take(stream, done=done)[0] == take(plain, done=done)[0]


def test_what_a_loader_says_of_its_workers_is_handed_on(make: Make) -> None:
    class Asking(Numbered):
        begun = -1

        def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
            return torch.tensor(float(self.begun)), index, os.getpid()

    def begin(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is data
        info.dataset.begun = 100 + worker
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    data = Asking()
    stream = make(DataLoader(data, num_workers=1, worker_init_fn=begin), num_workers=1)
    assert take(stream)[0] == [-1.0] * 4
    assert take(stream)[0] == [100.0] * 4


RANK = """
import os, sys, time
import torch
from gpumem_nb.engine import cells
from gpumem_nb.engine.data.iterables import stream_of
from gpumem_nb.shared.settings import Settings

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info():
            time.sleep(1000)
        return index

stream = stream_of(Slow(), 0, 1)
stream.load_with(Settings(num_workers=2))
list(stream.micro_batches(1, 1))
stream.advance(1, 1)
stream.make_ready(1, 1)
import multiprocessing
print(*[process.pid for process in multiprocessing.active_children()], flush=True)
time.sleep(1000)
"""


def test_no_worker_outlives_a_rank_that_is_killed(tmp_path: Path) -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
        assert len(workers) == 2
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()  # type: ignore[union-attr]
    _, alive = psutil.wait_procs(workers, timeout=HANG_S)
    assert not [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE]


def test_workers_that_are_busy_end_at_once_with_the_trainer(make: Make) -> None:
    class Slow(Numbered):
        def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
            if get_worker_info():
                time.sleep(1000)
            return super().__getitem__(index)

    stream = make(Slow(), num_workers=2)
    take(stream)
    stream.make_ready(2, 2)
    assert len(multiprocessing.active_children()) == 2
    stream.close()
    assert not multiprocessing.active_children()


def test_a_batch_of_a_worker_is_copied_to_where_the_device_counts(make: Make) -> None:
    from gpumem_nb.engine.data.fetching import to_device

    stream = make(num_workers=1)
    take(stream, 2, 1)
    assert not stream.foreign
    stream.make_ready(2, 1)
    batch = next(stream.micro_batches(2, 1))
    assert stream.foreign
    assert batch[0].is_shared()
    assert not to_device(batch, torch.device("cpu"), copy=True)[0].is_shared()
