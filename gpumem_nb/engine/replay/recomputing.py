"""What knobs put around a model's forward: parts of it are computed again, wait in host memory, or are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from ...memory.host_pool import HostMemory, HostUse
from ...memory.tensors import tensors_in
from ...shared.errors import WorkloadError
from ...shared.knobs.step import checkpointing_of
from ...shared.settings import Settings
from ...shared.workload import Workload
from .checkpointing import Checkpointing, find_blocks
from .compiling import Compiled, refuse_frozen, why_not
from .loss_head import ChunkedHead, find_head, is_wide
from .offload import Offload
from .operators import Kept
from .selective import Selection


class Recomputing:
    """Of one model: nothing at first; on inside of its steps only, so that cells have a plain model.

    Args:
        model: which.
        workload: which may name its blocks and its head.
        host: the host memory of this rank, in which others may have something wait, too.
    """

    def __init__(self, model: nn.Module, workload: Workload, host: HostMemory | None = None) -> None:
        self._model, self._workload, self._host = model, workload, host or HostMemory()
        self._mode = "none"
        self._checkpointing: Checkpointing | None = None
        self._selection = Selection()
        self._chunked: ChunkedHead | None = None
        self._offload: Offload | None = None
        self._compiled: Compiled | None = None
        self._compiles = False

    @property
    def blocks(self) -> list[nn.Module]:
        """Return what checkpointing wraps, in the order in which forward calls them."""
        return self._workload.blocks(self._model) if self._workload.blocks else find_blocks(self._model)

    @property
    def head(self) -> nn.Module | None:
        """Return the layer that makes logits, if there is one."""
        return self._workload.head(self._model) if self._workload.head else find_head(self._model)

    @property
    def wide_head(self) -> nn.Linear | None:
        """Return the layer that makes logits, if it makes enough of them to be worth having in parts."""
        head = self.head
        return head if is_wide(head) else None

    def set_checkpointing(self, settings: Settings) -> None:
        """Compute activations again instead of keeping them, in segments and as many as the settings say.

        Blocks that came into the model since the last time are found.

        Raises:
            WorkloadError: the model has no blocks, or none that can be computed again so; nothing is checkpointed then.
        """
        mode = checkpointing_of(settings)
        selection = self._selection if mode == "selective" else None
        if mode != self._mode or self._others_came:
            if self._checkpointing:
                self._checkpointing.remove()
            self._mode, self._checkpointing = "none", None
            if mode != "none":
                self._checkpointing = Checkpointing(self._model, self.blocks, mode, selection, lambda: self._offload)
                self._checkpointing.take_off()
            self._mode = mode
        if selection:
            selection.follow(settings.activation_budget, settings.precision)

    @property
    def _others_came(self) -> bool:
        known = self._checkpointing.blocks if self._checkpointing else None
        return known is not None and list(map(id, known)) != list(map(id, self.blocks))

    def forward_ended(self) -> None:
        """The loss was computed.

        Raises:
            Learned: only to find out what blocks give; the step is to be taken from its beginning.
        """
        if self._mode == "selective":
            self._selection.forward_ended()

    def set_loss_head(self, how: str) -> None:
        """Have logits whole, or in parts; a head that came into the model since the last time is found.

        Raises:
            WorkloadError: the model has no head that gives them in parts; they stay as they were then.
        """
        self._chunked = None if how == "full" else ChunkedHead(self._model, self.head)

    def set_offload(self, how: str) -> None:
        """Have what forward saves for backward wait in host memory, or on the device."""
        if (how == "on") != (self._offload is not None):
            self._offload = Offload(self._model, self._host.pool()) if how == "on" else None

    def stays(self, batch: Any) -> None:
        """The tensors of a micro-batch live until it is done with."""
        if self._offload:
            self._offload.stays(tensors_in(batch))

    @property
    def host_bytes(self) -> HostUse:
        """Return how many bytes waited in host memory in the latest step, and how many may."""
        return self._host.use

    def set_compile(self, how: str) -> None:
        """Have forward of blocks compiled, or plain; blocks that came into the model since the last time are found.

        What was compiled is kept until :meth:`settled`, for settings that are tried.

        Raises:
            WorkloadError: they cannot be compiled; they are plain then.
        """
        self._compiles = False
        if self._compiled and not self._compiled.follow(self.blocks):
            self._compiled = None
        if how == "off":
            return
        blocks = self.blocks
        if reason := why_not(self._model, blocks, on_gpu=any(one.is_cuda for one in self._model.parameters())):
            raise WorkloadError(reason)
        refuse_frozen(blocks)
        self._compiled = self._compiled or Compiled(self._model, blocks)
        self._compiles = True

    def meet_new(self, settings: Settings) -> None:
        """Find what came into the model meanwhile; raises ``WorkloadError`` as the three do."""
        self.set_checkpointing(settings)
        self.set_loss_head(settings.loss_head)
        self.set_compile(settings.compile)

    def settled(self, only_tried: bool = False) -> None:
        """Training goes on under the settings that were set last, unless they are tried and left again."""
        if not self._compiles and not only_tried:
            self._compiled = None

    @property
    def compiled(self) -> Compiled | None:
        """Return the compiled blocks, where they are in use."""
        return self._compiled if self._compiles else None

    @property
    def compiled_s(self) -> float:
        """Return how long these were compiled so far, in seconds."""
        return self.compiled.seconds if self.compiled else 0.0

    def told(self) -> tuple[str, ...]:
        """Return what there is to say once of a step that was done."""
        return self.compiled.told() if self.compiled else ()

    @property
    def applied(self) -> dict[str, str]:
        """Return what the knobs are at, also after one could not be set."""
        return {
            "checkpointing": self._mode,
            "loss_head": "chunked" if self._chunked else "full",
            "offload_activations": "on" if self._offload else "off",
            "compile": "blocks" if self._compiles else "off",
        }

    @property
    def kept(self) -> list[Kept]:
        """Return what each block keeps of what its operators give; nothing before a step was taken."""
        return self._selection.kept if self._mode == "selective" else []

    @property
    def changed(self) -> list[str] | None:
        """Return the same as :attr:`Checkpointing.changed`; nothing without checkpointing."""
        return self._checkpointing.changed if self._checkpointing else []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have all of them on inside."""
        aside, compiled = self._offload, self.compiled
        if pool := self._host.in_use:
            pool.begin()
        with (
            aside.on() if aside else nullcontext(),
            compiled.on() if compiled else nullcontext(),
            self._checkpointing.on() if self._checkpointing else nullcontext(),
            self.head_on(),
        ):
            yield

    @contextmanager
    def head_on(self) -> Iterator[None]:
        """Have logits in parts inside, if they are; an evaluation checkpoints nothing."""
        with self._chunked.on() if self._chunked else nullcontext():
            yield

    def finished(self) -> None:
        """Forward and backward of a step are over.

        Raises:
            WorkloadError: something is on and had no effect.
        """
        if self._checkpointing:
            self._checkpointing.finished()
        if self._chunked:
            self._chunked.finished()
        if compiled := self.compiled:
            compiled.finished()

    def abandon(self) -> None:
        """A forward or backward was left half way."""
        if self._checkpointing:
            self._checkpointing.abandon()

    def remove(self) -> None:
        """Take everything off the model for good."""
        if self._checkpointing:
            self._checkpointing.remove()
        self._mode, self._checkpointing, self._chunked, self._offload = "none", None, None, None
        self._compiles, self._compiled = False, None
