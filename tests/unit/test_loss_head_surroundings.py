"""``loss_head=chunked`` beside what else models do: logits are made as the layer was called, or not at all."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpumem_nb.shared.errors import WorkloadError
from tests.unit.test_loss_head import LOSSES, PER_WORD, WIDTH, WORDS, Loss, Model, alike, batch, recomputing, taken


class OwnAutocast(Model):
    """Whose head is called under autocast, or not, whatever the loss is computed under."""

    head_under: torch.dtype | None = None

    def forward(self, words: Tensor) -> Any:
        hidden = self.layers[0](self.words(words)).float()
        with torch.autocast("cpu", dtype=self.head_under or torch.bfloat16, enabled=self.head_under is not None):
            return self.head(hidden)


def test_the_head_is_computed_as_it_was_called_whatever_autocast_is_when_the_loss_is() -> None:
    model = OwnAutocast()
    parts, whole = (taken(model, LOSSES["flat"], how, torch.bfloat16) for how in ("chunked", "full"))
    assert parts[0].item() == pytest.approx(whole[0].item(), rel=1e-6), "the head is in fp32"
    alike(parts, whole, 2**-9)
    model.head_under = torch.bfloat16
    alike(taken(model, LOSSES["flat"], "chunked"), taken(model, LOSSES["flat"], "full"), 2**-7)


def multiplied_in_place(logits: Any, targets: Tensor) -> Tensor:
    scaled = logits
    scaled *= 2
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


ARITHMETIC: list[Loss] = [
    multiplied_in_place,
    lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()) + (logits == 0),
    lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()) + (logits >= 0).float().mean(),
    lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()) if logits else targets.sum(),
]


@pytest.mark.parametrize("loss", ARITHMETIC)
def test_what_would_change_logits_elsewhere_or_compare_them_is_refused(loss: Loss) -> None:
    with pytest.raises(WorkloadError, match="asks for their arithmetic"):
        taken(Model(), loss, "chunked")


def test_numbers_for_rows_are_not_taken_for_those_of_classes() -> None:
    """Where there are as many rows as classes, both would go."""
    rows = torch.arange(WORDS) % 65

    def scaled(logits: Any, targets: Tensor) -> Tensor:
        second = logits.flatten(0, 1)[rows][None].transpose(1, 2)
        return cross_entropy(second * PER_WORD, targets.flatten()[rows][None])

    with pytest.raises(WorkloadError, match="asks for their mul"):
        taken(Model(), scaled, "chunked")


class Twice(Model):
    """Gives logits, and what else makes a loss."""

    def forward(self, words: Tensor) -> Any:
        hidden = self.words(words)
        with torch.no_grad():
            teacher = self.head(hidden)
        return self.head(input=self.layers[0](hidden)), teacher, hidden


def test_gradients_stop_where_they_are_told_to_and_are_none_of_gradients() -> None:
    def plain(given: Any, targets: Tensor) -> Tensor:
        return LOSSES["flat"](given[0], targets)

    def distilled(given: Any, targets: Tensor) -> Tensor:
        return plain(given, targets) + LOSSES["flat"](given[1], targets)

    def penalty(given: Any, targets: Tensor) -> Tensor:
        loss = plain(given, targets)
        (slope,) = torch.autograd.grad(loss, given[2], create_graph=True)
        total: Tensor = loss + slope.square().sum()
        return total

    for loss, asked in ((distilled, "values without a gradient"), (penalty, "gradient in a form")):
        with pytest.raises(WorkloadError, match=f"asks for their {asked}"):
            taken(Twice(), loss, "chunked")
    model = Twice()
    alike(taken(model, plain, "chunked"), taken(model, plain, "full"))


def test_a_layer_s_input_that_changes_before_the_loss_is_refused() -> None:
    class InPlace(Model):
        def forward(self, words: Tensor) -> Any:
            hidden = self.words(words) + 1
            logits = self.head(hidden)
            hidden.mul_(2)
            return logits

    model = InPlace()
    model.head.requires_grad_(False)
    assert taken(model, LOSSES["flat"], "full")
    with pytest.raises(WorkloadError, match="the input of the layer was changed in place"):
        taken(model, LOSSES["flat"], "chunked")


def test_what_else_changes_the_head_is_refused() -> None:
    hooked, replaced = Model(), Model()
    for one in (hooked, hooked.head):
        handle = one.register_full_backward_pre_hook(lambda *_: None)
        with pytest.raises(WorkloadError, match=r"a backward hook of a (Model|Linear) that returns logits"):
            taken(hooked, LOSSES["flat"], "chunked")
        handle.remove()
    taken(hooked, LOSSES["flat"], "chunked")
    vars(replaced.head)["forward"] = replaced.layers[0].forward
    with pytest.raises(WorkloadError, match="something else has replaced that already"):
        taken(replaced, LOSSES["flat"], "chunked")
    assert "forward" in vars(replaced.head)


def test_a_copy_made_inside_of_a_step_gives_whole_logits() -> None:
    model = Model()
    parts = recomputing(model)
    parts.set_loss_head("chunked")
    words, _ = batch()
    whole = model(words)
    with parts.on():
        for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(one(words), whole)
            one.head.weight.data.zero_()
            assert torch.equal(one(words)[0, 0], one.head.bias), "by its own weight"
        assert not isinstance(model(words), Tensor)


def test_a_head_that_a_cell_replaced_is_found_again() -> None:
    model = Model()
    parts = recomputing(model)
    parts.set_loss_head("chunked")
    model.head = nn.Linear(WIDTH, WORDS)
    parts.set_loss_head("chunked")
    words, targets = batch()
    with parts.on():
        LOSSES["flat"](model(words), targets).backward()
        parts.finished()
    del model.head, model.layers
    with pytest.raises(WorkloadError, match="this is a model without one"):
        parts.set_loss_head("chunked")
