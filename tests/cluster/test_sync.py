"""Whether ranks are in step, of what is loaded and of somebody's own loop: what is planted is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from tests.conftest import weights
from tests.tiers import every, first_tier

pytestmark = pytest.mark.cluster

LOOP = """
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
rows = TensorDataset(torch.randn(96, 8), torch.arange(96.0))
sampler = DistributedSampler(rows, size, rank)
loader = DataLoader(rows, batch_size=8, sampler=sampler)
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
sgd = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
def step():
    inputs, labels = next(iter(loader))
    net(inputs).square().mean().backward()
    sgd.synchronize()
"""


@pytest.fixture
def loop(two_ranks: Session) -> Iterator[Session]:
    """Somebody's own loop, as Horovod's documentation has it."""
    two_ranks.run_cell(LOOP, title="<loop>")
    yield two_ranks
    two_ranks.run("del sgd, net, loader, sampler, rows")


def test_a_loop_that_is_right_has_no_fault(loop: Session) -> None:
    assert "gradients: there are none now" in str(loop.check_sync("net", "loader"))
    loop.run("step()")
    report = loop.check_sync("net", "loader")
    assert report.ok
    assert "weights: 6 are the same on all ranks" in str(report)
    assert "Buffers: 1.running_mean is not the same on rank 1 as on rank 0" in str(report)
    assert "statistics that each rank gathers" in str(report)
    assert "gradients: 6 are the same" in str(report)
    assert "no two ranks see the same of 96 samples" in str(report)


@pytest.mark.parametrize(
    ("planted", "ranks", "said"),
    [
        ("net[2].weight.data[0, 3] += 1e-7", [1], "weights: 2.weight is not the same on rank 1 as on rank 0"),
        ("net[0].bias.grad[3] *= 1 + 1e-6", [1], "gradients: 0.bias is not the same on rank 1"),
        ("loader = DataLoader(rows, batch_size=8)", [0, 1], "96 of 96 samples are seen by several ranks: number 0, 1"),
        ("loader = [rows.tensors[0][:8], rows.tensors[0][rank * 8 :][:8]]", [0, 1], "micro-batches are seen by"),
        ("net.add_module('head', nn.Linear(2, 2))", [1], "rank 1 and rank 0 have not the same ones, head.bias"),
    ],
)
def test_what_is_planted_is_named(loop: Session, planted: str, ranks: list[int], said: str) -> None:
    loop.run("step()")
    loop.run(planted, ranks=ranks)
    report = loop.check_sync("net", "loader")
    assert not report.ok
    assert f"WRONG: {report.faults[0]}" in str(report)
    assert said in report.faults[0]
    assert len(report.faults) == 1


@pytest.mark.full
def test_samplers_that_fill_up_or_draw_twice_are_no_fault(loop: Session) -> None:
    loop.run(
        "rows = TensorDataset(torch.randn(95, 8))\n"
        "loader = DataLoader(rows, sampler=DistributedSampler(rows, size, rank))"
    )
    report = loop.check_sync("net", "loader")
    assert report.ok
    assert "1 of 95 samples are seen by several ranks" in str(report)


@pytest.mark.full
@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("DataLoader(torch.utils.data.Subset(rows, range(rank, 96, size)), shuffle=True)", "no two ranks see the same"),
        ("DataLoader(TensorDataset(torch.randn(48, 8) + rank), shuffle=True)", "each rank has a dataset of its own"),
        ("[UserDict(x=rows.tensors[0][i :: 8]) for i in range(rank, 8, size)]", "no two ranks see the same of 8 micro"),
        ("[object(), object()]", ""),
    ],
)
def test_shards_of_any_kind_are_no_fault(loop: Session, data: str, said: str) -> None:
    loop.run(f"from collections import UserDict\nloader = {data}")
    report = loop.check_sync("net", "loader")
    assert report.ok
    assert ("data: " in str(report)) == bool(said)
    assert said in str(report)


def test_looking_draws_no_random_numbers(loop: Session) -> None:
    loop.run(
        "own = torch.Generator(); loader = DataLoader(rows, batch_size=8, shuffle=True, generator=own)\n"
        "before = torch.get_rng_state(), own.get_state()"
    )
    loop.check_sync("net", "loader")
    assert loop.run("torch.equal(before[0], torch.get_rng_state()), torch.equal(before[1], own.get_state())") == [
        (True, True),
        (True, True),
    ]


def test_a_step_that_cannot_be_taken_is_told(two_ranks: Session) -> None:
    two_ranks.load("digits-resnet", width=8, depth=1, resolution=8)
    two_ranks.train(1)
    two_ranks.run("def fail(*_):\n    raise ValueError('no')\nhook = model.register_forward_pre_hook(fail)", ranks=[1])
    with pytest.raises(WorkloadError, match=r"gradients would be compared could not be taken: .*no"):
        two_ranks.check_sync()
    two_ranks.run("hook.remove()", ranks=[1])
    assert two_ranks.check_sync().ok


@pytest.mark.parametrize("shared", first_tier(["on", "off"], every(2)))
def test_of_what_is_loaded_nothing_is_changed(two_ranks: Session, shared: str) -> None:
    def after_steps(look: bool) -> object:
        two_ranks.load("digits-resnet", seed=5, width=8, depth=1, resolution=8)
        two_ranks.set(batch_size=16, shard_optimizer=shared, shard_gradients=shared)
        losses = [two_ranks.train(3).frame().loss.tolist()]
        if look:
            report = two_ranks.check_sync()
            assert report.ok
            assert "gradients: 18 are the same" in str(report)
            assert "no two ranks see the same of" in str(report)
        return [*losses, two_ranks.train(3).frame().loss.tolist(), weights(two_ranks)]

    assert after_steps(True) == after_steps(False)


def test_of_what_is_loaded_a_weight_that_differs_is_named(two_ranks: Session) -> None:
    two_ranks.load("digits-resnet", width=8, depth=1, resolution=8)
    two_ranks.train(1)
    two_ranks.run("with torch.no_grad(): next(model.parameters()).add_(1)", ranks=[1])
    assert "weights: " in two_ranks.check_sync().faults[0]
    assert "%hvd_sync" in str(two_ranks.check_sync())


def test_what_cannot_be_checked_is_refused(loop: Session, shell: InteractiveShell) -> None:
    with pytest.raises(InvalidInput, match="name the model too"):
        loop.check_sync(data="loader")
    with pytest.raises(WorkloadError, match=r"there is no variable 'nett' on the ranks\. Did you mean 'net'"):
        loop.check_sync("nett")
    with pytest.raises(WorkloadError, match="is not a model"):
        loop.check_sync("loader")
    loop.run("once = iter([1, 2])")
    with pytest.raises(WorkloadError, match="iterated only once"):
        loop.check_sync("net", "once")
    with pytest.raises(UsageError, match="are checked with --sync"):
        shell.run_line_magic("hvd_check", "model=net")
    with pytest.raises(UsageError, match="modle cannot be checked: did you mean 'model'"):
        shell.run_line_magic("hvd_check", "--sync modle=net")
