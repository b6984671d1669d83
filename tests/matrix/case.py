"""What a case of the matrix is made of: what is trained, and what somebody does in the middle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpumem_nb.session import Session

PREAMBLE = """
import warnings
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

numbers = torch.Generator().manual_seed(1)
x = torch.randn(40, 8, generator=numbers)
y = torch.randint(3, (40,), generator=numbers)
tokens = torch.randint(1, 97, (40, 12), generator=numbers)
images = torch.randn(40, 3, 16, 16, generator=numbers)
"""
"""Before every subject's code. Steps of four samples on two ranks reach the second epoch of forty in the sixth."""

APART = "torch.manual_seed(3 + rank)\n"
"""After that: ranks build different weights, of which those of rank 0 count."""

_NAMES = ("net", "data", "loss", "criterion", "optimizer", "scheduler", "eval_data", "ema")
CLEAN = f"for name in {_NAMES}: globals().pop(name, None)"
"""Before that: nothing of the case before is taken for this one's."""


@dataclass(frozen=True)
class Subject:
    """What is trained: code of a cell that defines it, as :mod:`tests.reference` says.

    Attributes:
        refused: a pattern of the sentence with which it is refused, whatever is done.
        refused_checkpointed: the same, under checkpointing alone.
        refused_in_fp16: the same, under precision=fp16 alone.
        seed: given to the session before; what cells draw follows from it.
        batch_size: on each rank; ``None`` for that of its ``DataLoader``.
    """

    name: str
    code: str
    seed: int | None = None
    batch_size: int | None = 4
    refused: str = ""
    refused_checkpointed: str = ""
    refused_in_fp16: str = ""

    @property
    def cell(self) -> str:
        """All that is run to define it."""
        return f"{PREAMBLE}{APART if self.seed is None else ''}{self.code}\nNone"


@dataclass(frozen=True)
class Deed:
    """What somebody does between two chunks.

    Attributes:
        cell: code that runs on all ranks.
        knobs: settings that are flipped.
        plainly: what the reference sets in their place, where that is the same to rounding only.
        detour: done with the session alone, because it must leave no trace.
        refused: a pattern of the sentence with which it is refused.
    """

    name: str
    cell: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    plainly: Mapping[str, Any] | None = field(default=None, hash=False)
    detour: Callable[[Session], None] | None = None
    refused: str = ""


NOTHING = Deed("nothing")


@dataclass(frozen=True)
class Case:
    """One square of the matrix: three steps, the deed, three more steps."""

    subject: Subject
    deed: Deed = NOTHING
    checkpointing: str = "none"
    precision: str = "fp32"

    @property
    def name(self) -> str:
        deed = () if self.deed is NOTHING else (self.deed.name,)
        return ", ".join((self.subject.name, *deed, self.checkpointing, self.precision))

    @property
    def refused(self) -> str:
        """The pattern of the sentence with which it is refused, if it is."""
        checkpointed = self.subject.refused_checkpointed if self.checkpointing != "none" else ""
        in_fp16 = self.subject.refused_in_fp16 if self.precision == "fp16" else ""
        return self.subject.refused or checkpointed or in_fp16 or self.deed.refused

    @property
    def exact(self) -> bool:
        """Whether it agrees with the reference to the last bit."""
        return self.deed.plainly is None
