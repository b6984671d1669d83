"""What a rank sends of its gradients, when what is trained changes between steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine import cells
from gpumem_nb.engine.link.communicator import Communicator
from gpumem_nb.engine.step.buckets import ReductionConfig, into_buckets
from gpumem_nb.engine.step.reduction import GradientReduction
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.categories import COMMUNICATION
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.links import Overheard
from tests.threads import Meeting
from tests.unit.test_one_rank import alone as alone
from tests.unit.test_one_rank import loss, rows, stream, workload

SETTINGS = Settings(batch_size=2)


def test_a_layer_that_was_frozen_for_a_while_is_averaged_again(alone: Overheard) -> None:
    trainer = Trainer(workload(), stream(), opened(), time.time())
    for trained in (True, False, True):
        trainer.live.model.get_parameter("weight").requires_grad_(trained)
        assert trainer.run(Chunk(SETTINGS, 1, 2)).failure is None
        assert len(alone.buckets[-1]) == 2 + trained  # weight, bias, ballot


def test_the_ballot_travels_as_before_where_a_cell_changed_types_perhaps_on_one_rank_alone(alone: Overheard) -> None:
    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        weight = next(model.parameters())
        output: Tensor = model(batch[0].to(weight.dtype))
        return output.square().mean()

    trainer = Trainer(Workload("w", lambda: nn.Linear(4, 4), rows, loss), stream(), opened(), time.time())
    assert trainer.run(Chunk(SETTINGS.replace(optimizer="sgd"), 1, 1)).failure is None
    trainer.live.model.double()
    cells.one_more()
    assert trainer.run(Chunk(SETTINGS.replace(optimizer="sgd"), 1, 1)).failure is None
    assert [len(tensors) for tensors in alone.buckets] == [3, 3]
    assert "gpumem_nb.ballot" not in [name for name, _ in alone.sent]


def test_a_hook_that_a_cell_adds_changes_a_gradient_before_it_is_sent(alone: Overheard) -> None:
    sent: list[float] = []

    def note(name: str, tensors: Sequence[Tensor]) -> None:
        if name.startswith("gpumem_nb.bucket"):
            sent.extend(tensor.abs().max().item() for tensor in tensors[:-1])  # without the ballot

    alone.on_send = note
    settings = SETTINGS.replace(bucket_mib=1e-6)  # every gradient leaves as soon as it is there
    trainer = Trainer(workload(), stream(), opened(), time.time())
    assert trainer.run(Chunk(settings, 1, 1)).failure is None
    assert max(sent) > 1e-6

    def clamp(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(-1e-6, 1e-6)

    for param in trainer.live.parameters:
        param.register_post_accumulate_grad_hook(clamp)
    sent.clear()
    cells.one_more()
    assert trainer.run(Chunk(settings, 1, 1)).failure is None
    assert max(sent) <= 1.1e-6


@pytest.mark.parametrize("change", [Tensor.sign_, Tensor.sign])
def test_a_gradient_that_a_hook_of_another_layer_changes_after_it_has_left_is_sent_again(
    alone: Overheard, change: Callable[[Tensor], Tensor]
) -> None:
    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)

        def change_last(_: Tensor) -> None:
            assert second.bias.grad is not None
            second.bias.grad = change(second.bias.grad)

        first.weight.register_post_accumulate_grad_hook(change_last)
        return nn.Sequential(first, second)

    plain, steps = layers(), 2
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(steps):
        loss(plain, [torch.ones(2, 4)]).backward()
        optimizer.step()
        optimizer.zero_grad()
    trainer = Trainer(Workload("w", layers, rows, loss), stream(), opened(), time.time())
    settings = SETTINGS.replace(bucket_mib=1e-6, optimizer="sgd", learning_rate=0.1)
    assert trainer.run(Chunk(settings, 1, steps)).failure is None
    assert len(alone.buckets) == (steps + 1) * len(list(plain.parameters()))  # the first step was taken twice
    assert all(map(torch.equal, trainer.live.model.parameters(), plain.parameters()))


def test_buckets_are_as_large_as_the_knob_says(alone: Overheard) -> None:
    trainer = Trainer(workload(), stream(), opened(), time.time())
    for settings_id, (mib, buckets) in enumerate(((4, 1), (1e-6, 2), (4, 1)), 1):
        alone.sent.clear()
        assert trainer.run(Chunk(SETTINGS.replace(bucket_mib=mib), settings_id, 1)).failure is None
        assert len(alone.buckets) == buckets
        assert sum(map(len, alone.buckets)) == 3  # weight, bias, ballot


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_compression_rounds_what_is_wider_than_16_bit_and_no_ballot(alone: Overheard, dtype: torch.dtype) -> None:
    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        output: Tensor = model(batch[0].to(dtype))
        return output.float().square().mean()

    made = Workload("small", lambda: nn.Linear(4, 4, dtype=dtype), rows, loss)
    trainer = Trainer(made, stream(), opened(), time.time())
    reply = trainer.run(Chunk(SETTINGS.replace(compression="fp16"), 1, 2))
    assert reply.failure is None
    wide = dtype in (torch.float32, torch.float64)
    carried = torch.float16 if wide else torch.float32
    sent, ballots = alone.buckets, [tensors[0] for name, tensors in alone.sent if name == "gpumem_nb.ballot"]
    gradients = [tensor for tensors in sent for tensor in tensors if tensor.dim() == 2 or len(tensor) == 4]
    assert {tensor.dtype for tensor in gradients} == {carried}
    assert {ballot.dtype for ballot in (ballots if wide else [tensors[-1] for tensors in sent])} == {torch.float32}
    errors = [sample.compression_error for sample in reply.samples]
    assert errors[1] is None  # one step in twenty is measured
    assert errors[0] is not None
    assert (1e-6 < errors[0] < 2**-11) if wide else errors[0] == 0


def test_what_compression_takes_is_not_told_of_steps_that_the_loss_scaler_skips(alone: Overheard) -> None:
    trainer = Trainer(workload(), stream(), opened(), time.time())
    scaler = trainer.live.scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**126})  # gradients overflow
    settings = SETTINGS.replace(compression="fp16", precision="fp16")
    [sample] = trainer.run(Chunk(settings, 1, 1)).samples
    assert (sample.skipped, sample.compression_error) == (True, None)


def test_what_overflows_on_its_way_discards_the_step_and_is_told(alone: Overheard) -> None:
    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        output: Tensor = model(batch[0])
        return 1e6 * output.square().mean()

    trainer = Trainer(Workload("small", lambda: nn.Linear(4, 4), rows, loss), stream(), opened(), time.time())
    before = [param.detach().clone() for param in trainer.live.parameters]
    reply = trainer.run(Chunk(SETTINGS.replace(compression="fp16"), 1, 1))
    assert reply.failure is not None
    assert [sample.compression_error for sample in reply.samples] == [None]
    assert reply.failure.phase == "reduction"
    assert "65,504" in reply.failure.message
    assert "weight" in reply.failure.message
    assert "compression=none" in reply.failure.message
    assert all(map(torch.equal, before, trainer.live.parameters))
    assert trainer.run(Chunk(SETTINGS, 2, 1)).failure is None


def test_weights_of_two_types_that_take_turns_travel_in_two_buckets() -> None:
    params = [nn.Parameter(torch.ones(4, dtype=(torch.bfloat16, torch.float32)[number % 2])) for number in range(10)]
    assert [len(bucket.params) for bucket in into_buckets(params, 2**20)] == [5, 5]


def test_weights_on_another_device_do_not_travel_in_the_same_bucket() -> None:
    here, there = torch.device("cpu"), torch.device("meta")
    params = [nn.Parameter(torch.ones(4, device=device)) for device in (here, here, there, here)]
    buckets = into_buckets(params, 2**20)
    assert [[param.device for param in bucket.params] for bucket in buckets] == [[here, here, here], [there]]


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_of_16_bits_come_back_beside_others_also_where_a_rank_fails_half_way(fails: bool) -> None:
    config = ReductionConfig(1, False, "average")  # a bucket for each weight

    def of_rank(link: Communicator) -> tuple[int, list[list[float]]]:
        kinds = [torch.bfloat16 if number % 3 else torch.float32 for number in range(12)]
        params = [nn.Parameter(torch.ones(8, dtype=kind)) for kind in kinds]
        reduction = GradientReduction(params, (), 2, config, torch.device("cpu"))
        reduction.begin(config, False, False)
        reduction.arm()
        failed = fails and link.rank == 1
        for param in reversed(params[4:] if failed else params):
            (param * (1 + link.rank)).sum().backward()
        reduction.look_at_rest()
        reduction.ballot[0] = float(failed)
        reduced = reduction.finish(failed)
        return reduced.sums[0], [] if fails else [param.grad.tolist() for param in params if param.grad is not None]

    for failures, gradients in Meeting(2).run(of_rank):
        assert failures == fails
        assert gradients == ([] if fails else [[1.5] * 8] * 12)


def test_copies_of_gradients_of_16_bits_are_held_for_a_bucket_at_a_time(alone: Overheard) -> None:
    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        output: Tensor = model(batch[0].bfloat16())
        return output.float().square().mean()

    alone.keeps = False
    layers = [nn.Linear(4, 512, dtype=torch.bfloat16), *(nn.Linear(512, 512, dtype=torch.bfloat16) for _ in range(8))]
    made = Workload("small", lambda: nn.Sequential(*layers), rows, loss)
    trainer = Trainer(made, stream(), opened(), time.time())
    [sample] = trainer.run(Chunk(SETTINGS.replace(bucket_mib=0.1), 1, 1, ledger_steps=1)).samples
    trained = trainer.record()
    assert sample.ledger is not None
    assert trained is not None
    most = max(trained.live_bytes[COMMUNICATION])
    assert 2 * 512 * 512 * 4 <= most < 3 * 512 * 512 * 4
