"""What is known of gradients over all steps that counted."""

from __future__ import annotations

import torch

from gpumem_nb.engine.step.gradients import GradientsHad


def test_a_weight_that_any_step_gave_a_gradient_is_not_one_without() -> None:
    weights = [torch.ones(1, requires_grad=True) for _ in range(3)]
    always, sometimes, never = weights
    had = GradientsHad()
    assert not had.any_step
    had.note(weights, {id(never)}, False)
    had.note(weights, {id(sometimes), id(never)}, True)
    had.note(weights, {id(sometimes), id(never)}, False)
    assert list(map(id, had.never(weights))) == [id(never)]
    assert list(map(id, had.sometimes(weights))) == [id(sometimes)]
    assert had.any_step
    assert had.partial
    assert always.grad is None


def test_what_was_frozen_for_a_while_did_not_lack_its_gradient() -> None:
    weight, had = torch.ones(1), GradientsHad()
    had.note([weight], {id(weight)}, False)
    weight.requires_grad_()
    assert had.never([weight]) == []
    had.note([weight], set(), False)
    assert had.sometimes([weight]) == []


def test_a_weight_is_news_while_no_step_that_counted_had_a_gradient_of_it() -> None:
    weights, had = [torch.ones(1) for _ in range(3)], GradientsHad()
    late = weights[2]
    assert had.is_news(weights, [True, True, False])
    had.note(weights, {id(late)}, False)
    assert not had.is_news(weights, [True, True, False])
    assert not had.is_news(weights, [True, False, False])
    for _ in range(2):
        assert had.is_news(weights, [True, True, True]), "the step was undone"
    had.note(weights, set(), False)
    assert not had.is_news(weights, [True, True, True])
    assert had.is_news([*weights[:2], torch.ones(1)], [True, True, True]), "the optimizer was given another one"
