"""Cases of the clinic in which something is kept that training does not need."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...memory.device import opened
from .bench import Batch, Growth, Names, batches, flat, live_bytes, mlp, mse, numbers, off, seeded, whole_segments

STEPS, ROWS = 24, 64


def follow(names: Names) -> dict[str, Any]:
    """Train with a loss that also follows the error in ``average``."""
    was, names["average"] = names.get("average"), 0.0
    with seeded():
        model, data = mlp(), batches(STEPS, ROWS)
    grows, expected, wrong_average, wrong_gradient = Growth(STEPS), 0.0, 0.0, 0.0
    try:
        for inputs, targets in data:
            with torch.no_grad():
                expected = 0.9 * expected + 0.1 * float((model(inputs) - targets).abs().mean())
            true = torch.autograd.grad(mse(model(inputs), targets), list(model.parameters()))
            loss = names["follow"](model, (inputs, targets))
            learns = isinstance(loss, Tensor) and loss.requires_grad
            if learns:
                loss.backward()
                given = [weight.grad for weight in model.parameters() if weight.grad is not None]
                wrong_gradient = max(wrong_gradient, off(flat(given), flat(true)))
                del given
            model.zero_grad()
            del loss
            average = numbers([names.get("average")])
            wrong_average = max(wrong_average, abs(average[0] / expected - 1) if average else 1.0)
            grows.note()
        return {"grows": grows.each, "average": wrong_average, "learns": learns, "gradient": wrong_gradient}
    finally:
        names["average"] = was


def train_hard(names: Names) -> dict[str, Any]:
    """Train on what is harder than the mean alone."""
    with seeded():
        model = mlp()
        data = [(inputs, targets * (2.0 if place % 2 else 0.2)) for place, (inputs, targets) in enumerate(_data())]
    plain, was, grows = copy.deepcopy(model), flat(list(model.parameters())), Growth(STEPS)
    losses = numbers(names["train_hard"](model, torch.optim.SGD(model.parameters(), lr=0.1), grows.watching(data)))
    true = _on_hard_ones(plain, torch.optim.SGD(plain.parameters(), lr=0.1), data)
    return {
        "grows": grows.each,
        "losses": losses is not None and len(losses) == len(true),
        "same": losses is not None and off(torch.tensor(losses), torch.tensor(true)) < 1e-3,
        "trained": off(flat(list(model.parameters())) - was, flat(list(plain.parameters())) - was),
    }


def _data() -> list[Batch]:
    return batches(STEPS, ROWS)


def _on_hard_ones(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> list[float]:
    losses = list[float]()
    for inputs, targets in data:
        loss = mse(model(inputs), targets)
        losses.append(loss.item())
        if losses[-1] >= sum(losses) / len(losses):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses


def validate(names: Names) -> dict[str, Any]:
    """Compute the outputs for several batches."""
    with seeded():
        model, data = nn.Sequential(mlp(), nn.BatchNorm1d(64), nn.Dropout(0.5)).to(opened().torch_device), _data()
    model.train()
    plain, grows = copy.deepcopy(model).eval(), Growth(STEPS)
    before = live_bytes()
    outputs = names["validate"](model, grows.watching(data))
    given = isinstance(outputs, Tensor)
    held = live_bytes() - before
    with torch.no_grad():
        true = torch.cat([plain(inputs) for inputs, _ in data])
    return {
        "grows": grows.each,
        "held": held,
        "needed": true.nbytes,
        "each": true.nbytes // len(data),
        "given": given,
        "same": given and off(outputs.detach(), true) < 1e-4,
        "mode": model.training and all(module.training for module in model.modules()),
        "frozen": not all(weight.requires_grad for weight in model.parameters()),
        "enabled": torch.is_grad_enabled(),
    }


def freeze(names: Names) -> dict[str, Any]:
    """Freeze all but the last layer, when the optimizer has made its state."""
    with seeded():
        model, data = mlp(256), batches(6, 8, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _steps(model, optimizer, data[:2])
    before = live_bytes()
    optimizer = names["freeze"](model, optimizer) or optimizer
    body, head = [list(part.parameters()) for part in (model[:-1], model[-1])]
    was, head_was = flat(body), flat(head)
    _steps(model, optimizer, data[2:])
    expected = sum(weight.nbytes for weight in body)
    still = torch.equal(was, flat(body))
    moves = not torch.equal(head_was, flat(head))
    del was, head_was
    return {
        "trainable": sum(weight.requires_grad for weight in body),
        "still": still,
        "moves": moves and all(weight.requires_grad for weight in head),
        "freed": (before - live_bytes()) / expected,
    }


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    for inputs, targets in data:
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()


CLASSES = 2048


def loss_of(names: Names) -> dict[str, Any]:
    """Train with many classes, and ask for the accuracy after each step."""
    device = opened().torch_device
    with seeded():
        model = nn.Sequential(nn.Embedding(CLASSES, 32), nn.Linear(32, CLASSES)).to(device)
        tokens = torch.randint(0, CLASSES, (4, 256), device=device)
    names["loss_of"](model, (tokens[0][:2], tokens[0][:2])).backward()  # what is kept of a run before is gone
    model.zero_grad()
    before, held, wrong, learns = live_bytes(), 0, 0.0, True
    for each in tokens:
        targets = torch.where(torch.arange(256, device=device) % 3 > 0, each, model(each).argmax(-1))
        true = torch.autograd.grad(cross_entropy(model(each), targets), list(model.parameters()))
        loss = names["loss_of"](model, (each, targets))
        loss.backward()
        given = [weight.grad for weight in model.parameters() if weight.grad is not None]
        learns = learns and off(flat(given), flat(true)) < 1e-3
        model.zero_grad()
        expected = float((model(each).argmax(-1) == targets).float().mean())
        found = numbers([names["accuracy"]()])
        wrong = max(wrong, abs(found[0] - expected) if found else 1.0)
        del loss, given, true, targets
        held = max(held, opened().reading().live_bytes - before)
    return {"held": held, "logits": 256 * CLASSES * 4, "accuracy": wrong, "learns": learns}


LENGTHS, TEXTS, FEATURES = (704, 832, 960, 1088, 1216), 8, 512


def pad(names: Names) -> dict[str, Any]:
    """Pad texts that grow longer from one micro-batch to the next."""
    device = opened().torch_device
    names["pad"]([torch.ones(4, FEATURES, device=device)] * TEXTS)  # what it makes once and for all
    plugs = whole_segments()
    first = opened().reading()
    opened().reset_peak()
    filled, zeros = True, True
    for longest in LENGTHS:
        texts = [torch.ones(1, FEATURES, device=device).expand(longest - 8 * place, -1) for place in range(TEXTS)]
        padded = names["pad"](texts)
        lengths = [len(text) for text in texts]
        filled = filled and padded.dim() == 3 and padded.shape[1] >= longest
        filled = filled and all(bool((row[:n] == 1).all()) for row, n in zip(padded, lengths, strict=True))
        zeros = zeros and padded.sum().item() == FEATURES * sum(lengths)
        del padded
    last = opened().reading()
    least = TEXTS * LENGTHS[-1] * FEATURES * 4
    result = {
        "reserved": last.reserved_bytes - first.reserved_bytes,
        "peak": last.live_peak_bytes - first.live_bytes,
        "least": least,
        "filled": filled,
        "zeros": zeros,
    }
    del plugs
    opened().empty_cache()
    return result
