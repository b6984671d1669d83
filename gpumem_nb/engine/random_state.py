"""Random numbers: where they stand, put back bit for bit; and training's own, apart from those that cells draw."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..internals.fake_internals import in_fake_mode


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of this rank's random numbers, each in the form that its library takes back.

    ``cuda`` is that of the current device; ``None`` when CUDA is not in use. ``python`` and ``numpy`` are ``None`` if
    they were not asked for, which takes a tenth of a millisecond.
    """

    torch: Tensor
    cuda: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def take(cls, slow: bool = True) -> RandomState:
        """Note where they stand now; those of Python and NumPy only if ``slow``."""
        state = torch.get_rng_state()
        return cls(
            # Memory of NumPy's, of which the virtual GPU counts nothing.
            torch=state if in_fake_mode() else torch.from_numpy(state.numpy().copy()),
            cuda=torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
            python=random.getstate() if slow else None,
            numpy=np.random.get_state() if slow else None,
        )

    def put_back(self) -> None:
        """Let the numbers go on from here."""
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(self.cuda)
        if self.python is not None:
            random.setstate(self.python)
            np.random.set_state(self.numpy)

    def moved(self) -> bool:
        """Return whether any number was drawn on the host since."""
        now = RandomState.take()
        (_, key, *place), (_, key_now, *place_now) = self.numpy, now.numpy
        same = torch.equal(self.torch, now.torch) and self.python == now.python
        return not (same and place == place_now and np.array_equal(key, key_now))

    def moved_anywhere(self) -> bool:
        """Return the same, or on the current GPU."""
        now = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        on_gpu = now is not None and (self.cuda is None or not torch.equal(self.cuda, now))
        return on_gpu or self.moved()


def seed_all(seed: int) -> None:
    """Begin the random numbers of torch (CUDA's too), NumPy and Python anew."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def seed_of(*numbers: object) -> int:
    """Return a seed made of these numbers."""
    return zlib.crc32(repr(numbers).encode())


def begin_at(*numbers: object) -> None:
    """Let random numbers, which samples and their order draw, begin at a seed made of these numbers.

    Those of the current GPU too: samplers draw there once a cell has made it torch's default device.
    """
    seed = seed_of(*numbers)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def set_aside() -> Iterator[None]:
    """Whatever is drawn or seeded inside, random numbers go on afterwards as if it had not been."""
    before = RandomState.take()
    try:
        yield
    finally:
        before.put_back()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, random numbers begin at this seed; afterwards they go on as if nothing had been drawn."""
    with set_aside():
        seed_all(seed)
        yield


class OwnNumbers:
    """Random numbers that one rank's training alone draws: cells neither move them nor are moved by them.

    Different on every rank, because dropout must be; rank r's begin at ``SeedSequence([seed, r])``, NumPy's way to make
    seeds that have nothing to do with one another.
    """

    def __init__(self, seed: int, rank: int) -> None:
        with seeded(int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])):
            self._aside = RandomState.take()
        self._in_place = False

    @property
    def state(self) -> RandomState:
        """Return where they stand."""
        return RandomState.take() if self._in_place else self._aside

    def go_on_from(self, state: RandomState) -> None:
        """Let them go on from there; not while they are in place."""
        self._aside = state

    def exchange(self) -> None:
        """Put them in the place of those that are drawn now, which are kept until the next exchange."""
        now = RandomState.take()
        self._aside.put_back()
        self._aside, self._in_place = now, not self._in_place
