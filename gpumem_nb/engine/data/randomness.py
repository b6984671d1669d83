"""Random numbers of the host, as samples draw them: begun from given seeds, and put back afterwards."""

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

from ..step.copies import host_copy


@dataclass(frozen=True, slots=True, eq=False)
class HostRandom:
    """Where the random numbers of torch (on the CPU), Python and NumPy are."""

    torch: Tensor
    python: Any
    numpy: Any

    @classmethod
    def take(cls) -> HostRandom:
        """As they are now."""
        return cls(host_copy(torch.get_rng_state()), random.getstate(), np.random.get_state())

    def put_back(self) -> None:
        """Let them go on from here."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def moved(self) -> bool:
        """Whether any number was drawn since."""
        now = HostRandom.take()
        (_, key, *place), (_, key_now, *place_now) = self.numpy, now.numpy
        same = torch.equal(self.torch, now.torch) and self.python == now.python
        return not (same and place == place_now and np.array_equal(key, key_now))


def begin(*numbers: object) -> None:
    """Let the host's random numbers begin from a seed made of these numbers."""
    seed = zlib.crc32(repr(numbers).encode())
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def set_aside() -> Iterator[None]:
    """Whatever is drawn or seeded inside, random numbers go on afterwards as if it had not been."""
    before = HostRandom.take()
    try:
        yield
    finally:
        before.put_back()
