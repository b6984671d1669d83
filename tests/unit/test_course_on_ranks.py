"""What exercises try out on the ranks, without ranks: which functions of a student are taken, which get which hint."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpumem_nb.course.evidence import Evidence
from gpumem_nb.course.exercise import RIGHT
from gpumem_nb.course.lessons import LESSONS, lesson_4
from gpumem_nb.course.on_ranks import half_bits, twice

clip = torch.nn.utils.clip_grad_norm_


class Here(Evidence):
    """Calls harnesses in this process, without a session."""

    def __init__(self, **names: Any) -> None:
        self.names = names

    def of_function(self, name: str, harness: str, *given: int) -> list[Any]:
        return [getattr({"half_bits": half_bits, "twice": twice}[harness], name)(self.names, *given)]


def judged(exercise: str, name: str, function: Any) -> Any:
    """Judge a function that a student has defined under this name."""
    content = LESSONS[exercise.partition(".")[0]]
    return next(one for one in content.exercises if one.number == exercise).judge(None, Here(**{name: function}))


def test_types_round_as_the_lesson_says() -> None:
    assert half_bits.rounded(lesson_4.STEP, lesson_4.STEPS) == pytest.approx(
        {"float32": 2.0, "float16": 1.9765625, "bfloat16": 1.0}, abs=1e-4
    )


@pytest.mark.parametrize(("gradient", "skipped"), [(0.5, 0), (1.0, 1), (6.0, 3), (100.0, 7)])
def test_updates_are_skipped_until_the_scaled_gradient_fits(gradient: float, skipped: int) -> None:
    assert half_bits.skipped_updates(gradient) == skipped


def unscaled(net: Any, loss: Any, optimizer: Any, scaler: Any) -> None:
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def by_its_scale(net: Any, loss: Any, optimizer: Any, scaler: Any) -> None:
    scaler.scale(loss).backward()
    clip(net.parameters(), scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()


def scaled(net: Any, loss: Any, optimizer: Any, scaler: Any) -> None:
    scaler.scale(loss).backward()
    clip(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def never(net: Any, loss: Any, optimizer: Any, scaler: Any) -> None:
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def without_scaler(net: Any, loss: Any, optimizer: Any, scaler: Any) -> None:
    loss.backward()
    clip(net.parameters(), 1.0)
    optimizer.step()


def not_divided(net: Any, loss: Any, optimizer: Any, scaler: Any) -> None:
    scaler.scale(loss).backward()
    optimizer.step()


def without_update(net: Any, loss: Any, optimizer: Any, scaler: Any) -> None:
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip(net.parameters(), 1.0)
    scaler.step(optimizer)


def too_early(net: Any, loss: Any, optimizer: Any, scaler: Any) -> None:
    scaler.unscale_(optimizer)
    scaled(net, loss, optimizer, scaler)


def always_one(net: Any, loss: Any, optimizer: Any, scaler: Any) -> None:
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip(net.parameters(), float("inf"))
    for param in net.parameters():
        param.grad.div_(norm)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("update", [unscaled, by_its_scale])
def test_an_update_that_clips_true_gradients_is_taken(update: Any) -> None:
    assert judged("4.5", "update", update).state == RIGHT


@pytest.mark.parametrize(
    ("update", "hint"),
    [
        (scaled, "still multiplied by the loss scale"),
        (never, "Nothing is clipped"),
        (without_scaler, "reached the weights"),
        (not_divided, "moved by gradients that are multiplied by the loss scale"),
        (without_update, "there must be one scaler.update()"),
        (too_early, "they must be there"),
        (always_one, "shorter than 1 may not be changed"),
        (lambda *_: None, "did not change"),
        (lambda net: None, "Your function raised TypeError"),
    ],
)
def test_an_update_that_is_wrong_gets_the_hint_of_its_misconception(update: Any, hint: str) -> None:
    outcome = judged("4.5", "update", update)
    assert outcome.state != RIGHT
    assert hint in outcome.said


class Checkpointed(torch.nn.Module):
    """A layer that is computed again in backward."""

    def __init__(self, layer: Any, **how: Any) -> None:
        super().__init__()
        self.layer, self.how = layer, {"use_reentrant": False} | how

    def forward(self, inputs: Any) -> Any:
        return checkpoint(self.layer, inputs, **self.how)


def wrapped(net: Any) -> Any:
    net.layer1 = Checkpointed(net.layer1)
    return net


def in_place(net: Any) -> Any:
    net.layer1.forward = partial(checkpoint, net.layer1.forward, use_reentrant=False)
    return net


def in_forward(net: Any) -> Any:
    net.forward = lambda inputs: net.layer2(checkpoint(net.layer1, inputs, use_reentrant=False))
    return net


def as_guides_say(net: Any) -> Any:
    net.layer1 = checkpoint(net.layer1, use_reentrant=False)
    return net


def with_an_input(net: Any) -> Any:
    net.layer1 = checkpoint(net.layer1, torch.zeros(64, 32), use_reentrant=False)
    return net


def reentrant(net: Any) -> Any:
    net.layer1 = Checkpointed(net.layer1, use_reentrant=True)
    return net


def both_layers(net: Any) -> Any:
    net.layer1, net.layer2 = Checkpointed(net.layer1), Checkpointed(net.layer2)
    return net


def other_numbers(net: Any) -> Any:
    inner = net.layer1.forward
    net.layer1.forward = lambda inputs: checkpoint(inner, 2 * inputs, use_reentrant=False)
    return net


def test_a_checkpointed_step_is_one_forward_more() -> None:
    counted = twice.arithmetic()
    assert counted["blocks"] - counted["none"] == counted["forward"]
    assert counted["none"] == 3 * counted["forward"]


@pytest.mark.parametrize("function", [wrapped, in_place, in_forward])
def test_a_layer_that_is_computed_again_is_taken(function: Any) -> None:
    assert judged("5.5", "checkpointed", function).state == RIGHT


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (as_guides_say, "it calls the layer at once"),
        (with_an_input, "a tensor, and no layer"),
        (reentrant, "Some weights get no gradient"),
        (both_layers, "layer2 is computed twice as well"),
        (other_numbers, "not those of the plain net"),
        (lambda net: net, "layer1 is computed once"),
        (lambda net: net.requires_grad_(False), "The net must still train"),
        (lambda net: net.layer1[0].requires_grad_(False) and net, "Weights are frozen"),
        (lambda net: net.layer1, "leaves a layer out"),
        (lambda net: 3, "must return the net"),
        (lambda net: None, "must return the net"),
    ],
)
def test_a_checkpoint_that_is_none_gets_the_hint_of_its_misconception(function: Any, hint: str) -> None:
    outcome = judged("5.5", "checkpointed", function)
    assert outcome.state != RIGHT
    assert hint in outcome.said
