"""The plain loop that simulates N ranks in one process: what the toolkit's training is held against.

Written with torch and NumPy alone. Each simulated rank has objects of its own, made by the code that real ranks run in
a cell, and they take each step one after another. Of the toolkit it knows what is documented: the order of samples,
the seeds, that ranks begin with what rank 0 has, and what trains where the code names no optimizer.

The code defines ``net`` and ``data``, and where it wants to ``loss`` (a function of model and batch) or ``criterion``
(called with outputs and targets), ``optimizer`` and ``scheduler``.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, default_collate

STATE = """
{
    f"{part}.{name}": (tensor.view(torch.int16) if tensor.dtype is torch.uint16 else tensor).detach().clone()
    for part in ("net", "criterion", "ema")
    if hasattr(globals().get(part), "named_parameters")
    for named in (globals()[part].named_parameters(), globals()[part].named_buffers())
    for name, tensor in named
}
"""
"""An expression, of ranks and of this reference alike: all weights and buffers by name.

torch 2.13 cannot read a tensor of uint16 that pickle wrote.
"""

DEFAULTS: dict[str, Any] = {"batch_size": 32, "accumulation_steps": 1, "precision": "fp32", "clip_norm": None}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_OPTIMIZERS: dict[str, Callable[[list[Tensor], float], Optimizer]] = {
    "sgd": lambda params, lr: SGD(params, lr=lr),
    "momentum": lambda params, lr: SGD(params, lr=lr, momentum=0.9),
    "adam": lambda params, lr: Adam(params, lr=lr),
    "adamw": lambda params, lr: AdamW(params, lr=lr),
    "adafactor": lambda params, lr: Adafactor(params, lr=lr),
}


def training_numbers(seed: int, rank: int) -> RandomNumbers:
    """Those that a rank's training draws (dropout, say): they begin at the documented seed of each rank."""
    return RandomNumbers(int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))


def numbers_from(*numbers: int) -> RandomNumbers:
    """Those that a sample of some seed and place draws, or a sampler for some seed and epoch."""
    return RandomNumbers(zlib.crc32(repr(numbers).encode()))


def epoch_order(seed: int, epoch: int, dataset: Any, sampler: Any) -> list[int]:
    """Which sample stands at which place of an epoch: shuffled, or as a ``DataLoader``'s sampler has it."""
    if sampler is None or isinstance(sampler, RandomSampler):
        return [int(index) for index in np.random.default_rng([seed, epoch]).permutation(len(dataset))]
    if generator := getattr(sampler, "generator", None):
        generator.manual_seed(generator.initial_seed() + (epoch > 0))  # its own seed, then the next one and so on
        return list(sampler)
    with numbers_from(seed, epoch).drawn():
        return list(sampler)


class RandomNumbers:
    """Random numbers of torch, NumPy and Python that nobody else draws from."""

    def __init__(self, seed: int) -> None:
        self._state: Any = None
        with self.drawn():
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Inside, whoever draws random numbers draws these."""
        outside = _random_state()
        if self._state is not None:
            _set_random_state(self._state)
        try:
            yield
        finally:
            self._state = _random_state()
            _set_random_state(outside)


class Reference:
    """N ranks of plain data-parallel training.

    Args:
        code: defines what is trained, as the module says; it may read ``rank`` and ``size``.
        size: number of ranks.
        seed: of the order of samples and of the random numbers that training draws.
    """

    def __init__(self, code: str, size: int, seed: int = 0) -> None:
        self._ranks = [PlainRank(code, rank, size, seed) for rank in range(size)]
        first, *others = self._ranks
        for other in others:
            _copy(first, other)
        for rank in self._ranks:
            rank.attach()

    @property
    def variables(self) -> dict[str, Any]:
        """What rank 0's code sees."""
        return self._ranks[0].variables

    def cell(self, code: str) -> None:
        """Run code on all ranks."""
        for rank in self._ranks:
            rank.cell(code)

    def set(self, **knobs: Any) -> None:
        """Change settings, named as the toolkit's knobs; ``optimizer`` makes a new one."""
        for rank in self._ranks:
            rank.set(knobs)

    def train(self, steps: int) -> list[list[float]]:
        """Take steps; returns each rank's loss of each of them."""
        for rank in self._ranks:
            rank.restore_modes()
        return [self._step() for _ in range(steps)]

    def state(self) -> list[dict[str, Tensor]]:
        """All weights and buffers of each rank, by name."""
        return [eval(STATE, rank.variables) for rank in self._ranks]

    def _step(self) -> list[float]:
        losses = [rank.forward_backward() for rank in self._ranks]
        for params in zip(*(rank.parameters for rank in self._ranks), strict=True):
            _average(params)
        for rank in self._ranks:
            rank.update()
        return losses


class PlainRank:
    """One rank: its own objects, random numbers and place in the data."""

    def __init__(self, code: str, number: int, size: int, seed: int) -> None:
        self.variables: dict[str, Any] = {"rank": number, "size": size, "torch": torch}
        self._number, self._size, self._seed = number, size, seed
        self._cells = RandomNumbers(seed)
        self._knobs = dict(DEFAULTS)
        self._position = 0
        self._orders: list[list[int]] = []
        self.cell(code)

    def attach(self) -> None:
        """From now on this is trained."""
        data = self.variables["data"]
        self._numbers = training_numbers(self._seed, self._number)
        loaded = isinstance(data, DataLoader)
        if loaded and data.batch_size:
            self._knobs["batch_size"] = data.batch_size
        self._dataset = _dataset(data.dataset if loaded else data)
        self._collate = data.collate_fn if loaded else default_collate
        self._iterated = isinstance(self._dataset, IterableDataset) or not hasattr(self._dataset, "__getitem__")
        self._batched = self._iterated and not isinstance(self._dataset, IterableDataset)
        self._sampler = data.sampler if loaded and not self._iterated else None
        own = self.variables.get("optimizer")
        self._optimizer: Optimizer = own or AdamW([param for part in self._parts for param in part.parameters()], 1e-3)
        self._scaler = torch.amp.GradScaler("cpu")
        for part in self._parts:
            if not part.training:
                part.train()
        self._modes = self._modes_now()

    @property
    def parameters(self) -> list[Tensor]:
        """Of model and criterion, and whatever else the optimizer has; each once."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        return list(
            dict.fromkeys(param for part in [part.parameters() for part in self._parts] + groups for param in part)
        )

    @property
    def _parts(self) -> list[nn.Module]:
        return [part for name in ("net", "criterion") if isinstance(part := self.variables.get(name), nn.Module)]

    def tensors(self) -> list[Tensor]:
        """What ranks begin alike with."""
        buffers = [buffer for part in self._parts for buffer in part.buffers()]
        own = self.variables.get("optimizer")
        groups = [param for group in own.param_groups for param in group["params"]] if own else []
        return [*(param for part in self._parts for param in part.parameters()), *groups, *buffers]

    def cell(self, code: str) -> None:
        with self._cells.drawn():
            exec(code, self.variables)

    def set(self, knobs: Mapping[str, Any]) -> None:
        self._knobs.update(knobs)
        if name := knobs.get("optimizer"):
            self._optimizer = _OPTIMIZERS[name](self.parameters, knobs["learning_rate"])
        elif rate := knobs.get("learning_rate"):
            factor = rate / self._optimizer.param_groups[0]["lr"]
            for group in self._optimizer.param_groups:
                group["lr"] *= factor

    def restore_modes(self) -> None:
        """Training goes on in the modes it had; those of single modules are whoever's that set them."""
        for part in self._parts:
            if not part.training:
                for module in part.modules():
                    module.training = self._modes[module]
        self._modes = self._modes_now()

    def _modes_now(self) -> dict[nn.Module, bool]:
        return {module: module.training for part in self._parts for module in part.modules()}

    def forward_backward(self) -> float:
        """The mean loss of this rank's micro-batches; leaves its own gradients."""
        count, precision = self._knobs["accumulation_steps"], self._knobs["precision"]
        total = torch.zeros(())
        for param in self.parameters:
            param.grad = None
        with self._numbers.drawn():
            for batch in self._batches():
                with torch.autocast("cpu", _DTYPES.get(precision), enabled=precision != "fp32"):
                    loss = self._loss(batch) / count
                (self._scaler.scale(loss) if precision == "fp16" else loss).backward()
                total += loss.detach().float().reshape(())
        return total.item()

    def update(self) -> None:
        optimizer, scaled = self._optimizer, self._knobs["precision"] == "fp16"
        with self._numbers.drawn():
            if scaled:
                self._scaler.unscale_(optimizer)
            if self._knobs["clip_norm"]:
                params = [param for group in optimizer.param_groups for param in group["params"]]
                nn.utils.clip_grad_norm_(params, self._knobs["clip_norm"])
            if scaled:
                self._scaler.step(optimizer)
                self._scaler.update()
            else:
                optimizer.step()
            if scheduler := self.variables.get("scheduler"):
                scheduler.step()
        for param in self.parameters:
            param.grad = None

    def _loss(self, batch: Any) -> Tensor:
        net, loss, criterion = (self.variables.get(name) for name in ("net", "loss", "criterion"))
        assert net is not None
        if loss:
            return loss(net, batch)  # type: ignore[no-any-return]
        if criterion:
            inputs, targets = batch
            return criterion(net(inputs), targets)  # type: ignore[no-any-return]
        return (net(**batch) if isinstance(batch, Mapping) else net(batch)).loss  # type: ignore[no-any-return]

    def _batches(self) -> Iterator[Any]:
        """A step takes consecutive places of an endless stream of epochs; each rank has a run of them.

        Of data that is iterated each rank has every N-th place, which may hold a whole micro-batch.
        """
        size, count = self._knobs["batch_size"], self._knobs["accumulation_steps"]
        places = 1 if self._batched else size
        start = self._position
        self._position += self._size * places * count
        for first in range(0, places * count, places):
            batch = range(first, first + places)
            if self._iterated:
                items = [self._iterated_item(start + place * self._size + self._number) for place in batch]
            else:
                items = [self._sample(start + self._number * places * count + place) for place in batch]
            yield items[0] if self._batched else self._collate(items)

    def _sample(self, place: int) -> Any:
        epoch, offset = divmod(place, len(self._dataset if self._sampler is None else self._sampler))
        while len(self._orders) <= epoch:
            self._orders.append(epoch_order(self._seed, len(self._orders), self._dataset, self._sampler))
        with numbers_from(self._seed, place).drawn():
            return self._dataset[self._orders[epoch][offset]]

    def _iterated_item(self, place: int) -> Any:
        items = list(self._dataset)
        return items[place % len(items)]


def _copy(source: PlainRank, target: PlainRank) -> None:
    with torch.no_grad():
        for here, there in zip(target.tensors(), source.tensors(), strict=True):
            here.copy_(there)


def _average(params: tuple[Tensor, ...]) -> None:
    """Each rank gets the mean of all gradients, of zeros where a rank has none; of 16-bit ones in fp32."""
    if all(param.grad is None for param in params):
        return
    wide = torch.promote_types(params[0].dtype, torch.float32)
    grads = [torch.zeros_like(param) if param.grad is None else param.grad.to(wide) for param in params]
    mean = reduce(torch.add, [grad.coalesce() if grad.is_sparse else grad for grad in grads]) * (1 / len(params))
    for param in params:
        param.grad = mean.to(param.dtype).clone()


def _dataset(data: Any) -> Any:
    """What people hand over in place of a dataset: arrays side by side, alone or by name."""
    if isinstance(data, tuple):
        return TensorDataset(*data)
    if isinstance(data, Mapping):
        return [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]
    return data


def _random_state() -> Any:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_random_state(state: Any) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])
