"""Whether ranks share the state of an optimizer: the knob ``shard_optimizer``, and what goes with it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...shared.errors import WorkloadError, text_of
from ...shared.settings import Settings
from ..link.communicator import here, same_everywhere, together
from .buckets import ReductionConfig
from .optimizer_state import Parked, Replicas, hold_as, state_of
from .partition import Exchange, Partition, in_memory_order
from .shards import Shards, why_not


class Sharing:
    """Brings the state of optimizers to the form that settings ask for, on so many ranks.

    Sharing needs no word of other ranks: each keeps its part. For the whole they come together, before anything of the
    settings is applied, because that may fail on one of them. All of them know when: from the settings that they were
    given last, or that they came apart since.
    """

    def __init__(self, ranks: int, exempt: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """``exempt`` gives a context in which the device's limit is not enforced."""
        self._ranks, self._exempt = ranks, exempt
        self._may_be_shared = False

    def wanted(self, settings: Settings) -> bool:
        """Return whether ranks share the state under these settings. One by itself has all of it."""
        return settings.shard_optimizer == "on" and self._ranks > 1

    def form(self, optimizer: Optimizer, settings: Settings) -> Replicas:
        """Return how an optimizer's state would be held under these settings."""
        shares = self.wanted(settings) and not why_not(optimizer)
        return Shards(optimizer, self._ranks) if shares else Replicas(optimizer)

    def partition(self, optimizer: Optimizer, settings: Settings) -> Partition | None:
        """Return which rank has which elements of its state under these settings; ``None``: each has all."""
        held = state_of(optimizer).partition
        return held if self.wanted(settings) == (held is not None) else self.form(optimizer, settings).partition

    def apply(self, optimizer: Optimizer, settings: Settings, tried: bool) -> None:
        """Keep this rank's share of the state, if these settings ask for it and are not just ``tried``.

        Raises:
            WorkloadError: ranks cannot share it.
        """
        if not self.wanted(settings):
            return
        if problem := why_not(optimizer):
            raise WorkloadError(problem)
        if not tried:
            with self._exempt():
                self._share(optimizer)

    def joins(self, settings: Settings) -> bool:
        """Return whether all ranks must :meth:`join` before these settings are applied; the same on all of them."""
        self._may_be_shared |= self.wanted(settings)
        return self._may_be_shared and not self.wanted(settings)

    def end(self, names: str, held: Iterable[Optimizer], parked: Parked | None) -> None:
        """Give every rank the whole state of all of its optimizers. All ranks come here.

        Args:
            names: of those in use and put aside.
            held: the one in use, and the workload's own.
            parked: the one that was put aside, if there is one.

        Raises:
            WorkloadError: some rank cannot; raised on all of them. Each optimizer's state is then shared on all of them
                or whole on all of them; that of another one may be whole by then.
        """
        if not same_everywhere(zlib.crc32(names.encode()), "optimizers"):
            raise WorkloadError(
                "shard_optimizer cannot be switched off while ranks have different optimizers, after a flip that "
                "failed on some of them. Set the optimizer first, and shard_optimizer after a step"
            )
        with self._exempt(), ExitStack() as stack:
            restored = parked.restored() if parked else nullcontext(self)
            if together("room for a state that was put aside", lambda: stack.enter_context(restored)) is None:
                raise WorkloadError("another rank has no room for the state of the optimizer that was in use before")
            self.join([*held, *([parked.optimizer] if parked else [])])

    def join(self, held: Iterable[Optimizer]) -> None:
        """Give every rank the whole state of these optimizers, whichever ranks share it. All ranks call it together.

        Raises:
            WorkloadError: some rank cannot; raised on all of them.
        """
        for optimizer in dict.fromkeys(held):
            form = self.agreed(optimizer)
            if isinstance(form, Shards):
                form.join()
        self._may_be_shared = False

    def agreed(self, optimizer: Optimizer) -> Replicas:
        """Return how all ranks hold an optimizer's state, also after a flip that failed on some. All of them come here.

        Raises:
            WorkloadError: some rank has no room for its share; raised on all of them.
        """
        shared = self._may_be_shared and here().any_rank(state_of(optimizer).partition is not None, "shares")
        if shared and together("room for a share", lambda: self._share(optimizer)) is None:
            raise WorkloadError("another rank has no room for its share of the optimizer's state")
        return state_of(optimizer)

    def hand_back(self, optimizer: Optimizer) -> str:
        """Leave an optimizer with its whole state. All ranks come here.

        Returns:
            That it has none, in words, where ranks could not put it together; else nothing.
        """
        try:
            self.join([optimizer])
        except Exception as error:  # the same on all ranks, unless they came apart
            if here().is_separation(error):
                raise
            optimizer.state.clear()
            hold_as(optimizer, Replicas(optimizer))
            return (
                f"The state of the {type(optimizer).__name__} that you attached is gone: ranks had shares of it, and "
                f"could not put them together ({text_of(error)}). If you attach it again, it begins anew. To keep such "
                "a state, type %hvd_save before you load something else"
            )
        return ""

    def gather_s(self, params: Sequence[Tensor], settings: Settings) -> float | None:
        """Return how many seconds ranks take to give each other these weights; all of them do it, and keep theirs.

        ``None``: another rank has no room for it. One that has none itself raises what torch says of that.
        """
        trained = [param for param in params if param.requires_grad]
        if not (trained and self.wanted(settings) and here().size > 1):
            return 0.0
        partition, took_s = Partition.of(trained, here().size, here().rank), 0.0
        dtypes = {place: param.dtype for place, param in enumerate(trained)}
        most_bytes = ReductionConfig.under(settings).bucket_bytes
        rows = [in_memory_order(param) for param in trained]
        with self._exempt():
            exchange = together(
                "room for weights on trial",
                lambda: Exchange("weights on trial", partition, dtypes, most_bytes, trained[0].device),
            )
            if exchange is None:
                return None
            for _ in range(2):  # in the first one they agree on what is sent
                began_s = time.perf_counter()
                exchange.run(lambda span: rows[span.place][span.begin : span.end], lambda *_: None)
                took_s = time.perf_counter() - began_s
        return took_s

    def rejoined(self, optimizer: Optimizer, steps: int) -> None:
        """Give all ranks what each has updated, if they came apart in that. All of them come here.

        Not where they have done another number of ``steps``: a rank on which the vote on an update was lost has undone
        its share of it. Then their weights stay different, which is found when they are compared.
        """
        self._may_be_shared = self._ranks > 1
        form = state_of(optimizer)
        told = here().numbers([form.stale, steps], "updated weights")
        if any(stale for stale, _ in told) and len({count for _, count in told}) == 1:
            assert isinstance(form, Shards)
            with self._exempt():
                form.complete()

    def _share(self, optimizer: Optimizer) -> Replicas:
        form = state_of(optimizer)
        if form.partition is None:
            form = Shards(optimizer, self._ranks)
            form.partition.divide(optimizer)
            hold_as(optimizer, form)
        form.follow_groups()
        return form
