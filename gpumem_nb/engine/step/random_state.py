"""Where the random numbers that training draws stand, to be put back bit by bit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .copies import host_copy


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of this rank's random numbers, each in the form that its library takes back.

    ``cuda`` is that of the current device; ``None`` when CUDA is not in use.
    """

    torch: Tensor
    cuda: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def take(cls) -> RandomState:
        """As it is now."""
        return cls(
            torch=host_copy(torch.get_rng_state()),
            cuda=torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
            python=random.getstate(),
            numpy=np.random.get_state(),
        )

    def put_back(self) -> None:
        """Let the numbers go on from here."""
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(self.cuda)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
