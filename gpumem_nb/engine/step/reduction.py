"""Gradient reduction: Horovod all-reduces in buckets, while backward still runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from ...memory.ledger.recorder import Recorder
from ...shared.categories import COMMUNICATION
from ...shared.step_times import BACKWARD, REDUCTION
from ..link.communicator import AVERAGE, Transfer, here
from ..link.signals import postponed
from .ballot import NUMBERS
from .buckets import (
    COPIES_AT_ONCE,
    Bucket,
    Reduced,
    ReductionConfig,
    arrived,
    carried_dtype,
    copies_back,
    in_turn,
    into_buckets,
    outgoing,
    rounding,
    share_lost,
    stand_ins,
    unsent,
    widened,
)
from .gradient_shares import GradientShares, Spans
from .gradients import FiniteCheck, Presence, marks, square_of
from .step_clock import BucketTransfer, event_here


class GradientReduction:
    """Averages the gradients of weights over all ranks (or does to them what is wanted), and adds up what they vote.

    The ballot travels in the last bucket, so agreement costs no round trip of its own; with another reduction than
    average, or where that bucket does not travel in fp32, it travels by itself. It also says which weights have a
    gradient: one that has none on any rank is left alone, as torch leaves it; one that only some ranks have is
    averaged with zeros. A rank that failed takes part with no more memory than its largest gradient needs, which it
    has because it lets go of its own first, or with none of its GPU's where gradients travel through the host. All
    ranks discard that step, so what it sends does not matter.

    Attributes:
        finite: whether the gradients of this rank are, as far as they were looked at in the step under way.
        there: which weights had a gradient when :meth:`look_at_rest` was called.
        nbytes: of all weights that are not frozen on all ranks.
        torn: a gradient changed after it had left, as reentrant checkpoints and hooks can do: the step must be taken
            again, on all ranks after :meth:`wait_for_backward`.
        transfers: the buckets that have arrived since :meth:`begin`.
        shares: what this rank keeps of averaged gradients, where it does not keep all.
        ballot: what this rank votes, to be written before :meth:`finish`: ``NUMBERS`` whole numbers in float32, whose
            sums over all ranks stay below 2**24. The first one says whether the rank failed.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        sparse: Collection[int],
        ranks: int,
        config: ReductionConfig,
        device: torch.device,
        shares: GradientShares | None = None,
    ) -> None:
        """Reduce these weights.

        Args:
            params: in the same order on all ranks, frozen ones included.
            sparse: places of those that embeddings give sparse gradients.
            ranks: how many there are.
            config: how gradients travel, until :meth:`begin` says otherwise.
            device: where the ballot lies.
            shares: takes in what this rank keeps, if not all.
        """
        self.shares, self._config = shares or GradientShares(), config
        self._had: set[int] = set()  # weights whose gradients have left in this step
        self._params = [param for param in params if param.numel()]
        self._sparse = {id(params[place]) for place in sparse}
        self._ranks = ranks
        self._presence = Presence(self._params, ranks)
        self._early = True
        self._enter: Callable[[str], object] | None = None  # while backward may send
        self._buckets, self._grouped = list[Bucket](), list[bool]()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.finite, self.there = FiniteCheck(device), list[bool]()
        self._under_way: deque[Bucket] = deque()
        self.transfers: list[BucketTransfer] = []
        self.torn = self._measures = False
        self._rounded: list[tuple[Tensor, Tensor]] | None = None
        # Made ahead of time: the ballot, the squared norm, and which gradients there are.
        self._row = torch.zeros(NUMBERS + 1 + len(self._params), dtype=torch.float32, device=device)
        self.ballot = self._row[:NUMBERS]
        self.regroup()

    def regroup(self) -> None:
        """Send from now on what is not frozen on all ranks."""
        if self._grouped == self._presence.frozen:
            return
        self._grouped = self._presence.frozen
        self._group()

    def _group(self) -> None:
        grouped = [param for param, is_frozen in zip(self._params, self._grouped, strict=True) if not is_frozen]
        self._buckets = into_buckets(grouped, self._config.bucket_bytes)
        self.nbytes = sum(bucket.bytes for bucket in self._buckets)
        self.come_last()

    def come_last(self) -> None:
        """Send gradients after whatever hooks there are by now have changed them. One rank by itself sends none."""
        self.remove()
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(self._gradient_ready, bucket))
            for bucket in (self._buckets if max(self._ranks, here().size) > 1 else ())
            for param in bucket.params
            if param.requires_grad
        ]

    def wait_for_backward(self) -> None:
        """From now on send nothing before backward has ended, or before a gradient of this step that came too late."""
        self._early, self.torn = self._early and self._presence.came_back, False

    @property
    def gradients(self) -> tuple[list[Tensor], set[int], bool]:
        """Return the weights, the ids of those without a gradient on any rank, and whether some ranks alone had one."""
        return self._params, self._presence.absent, bool(self._presence.partial)

    def begin(self, config: ReductionConfig, rounding: bool, squares: bool, spans: Spans | None = None) -> None:
        """A step begins, perhaps for another time; it tells :attr:`lost` and squared norms if these are measured."""
        self.shares.begin(spans or {})
        self._had.clear()
        self.transfers.clear()
        self.finite.begin()
        self._rounded = [] if rounding else None
        self._measures = squares and config.reduction != "adasum"  # which makes no average
        before, self._config = self._config, config
        if (config.bucket_bytes, config.narrow) != (before.bucket_bytes, before.narrow):
            self._group()
        for bucket in self._buckets:
            bucket.square, bucket.travelled = None, False

    @property
    def lost(self) -> Tensor | None:
        """The share of this step's gradients that compression took (2-norms), on the device, if it was measured."""
        return share_lost(self._rounded, self._row.device) if self._rounded else None

    def arm(self, enter: Callable[[str], object] = lambda _: None) -> None:
        """From now on gradients are final: send each bucket as soon as it is full; waiting and going on is told."""
        for bucket in self._buckets:
            bucket.ready.clear()
        self._enter = enter

    def look_at_rest(self) -> None:
        """Look whether the gradients that were not sent yet are finite, and measure them if the step is measured."""
        gradients = [param.grad for param in self._params]
        self.there = [param.grad is not None or id(param) in self._had for param in self._params]
        rest = unsent(self._buckets)
        left = [bucket for bucket in self._buckets if bucket.transfer or bucket.travelled]
        self.torn |= any(bucket.left_as != marks(bucket.params) for bucket in left)
        of_rest = (param.grad for bucket in rest for param in bucket.params)
        self.finite.look(gradients if len(rest) == len(self._buckets) else of_rest)
        for bucket in rest:
            self._measure(bucket)

    def average_square(self) -> Tensor | None:
        """Return the squared norm of the averaged gradients, on the device; ``None`` if the step is not measured."""
        if not (self._measures and self._buckets):
            return None
        times = 1 if self._config.averaged else self._ranks  # of the average, that a gradient now is
        squares = [self.shares.square(bucket.params).to(self._row.device) for bucket in self._buckets]
        return torch.stack(squares).sum() / times**2

    def finish(self, failed: bool) -> Reduced:
        """Send what was not sent, wait for all of it, and add up the ballot.

        Afterwards every ``grad`` is the average over all ranks (or their sum, or Adasum), the same bits on each; unless
        some were ``missed``, or a rank failed.

        Args:
            failed: this rank has no gradients to send; otherwise :meth:`look_at_rest` comes before.

        Raises:
            BaseException: what keeps this rank from taking part at all; the others wait for it.
        """
        self._enter = None
        self._notice_arrivals()
        error = None if failed else self._counting()
        if here().size > 1:
            error = self.exchange(failed or error is not None) or error
        numbers: list[float] = self._row.tolist()
        sums = [round(number * self._ranks) for number in numbers[:NUMBERS]]
        if sums[0]:  # some rank failed: nothing is learned from what it sent
            self._let_go()
            return Reduced(sums, False, (), 0.0, error)
        missed = self._presence.learn(numbers[NUMBERS + 1 :], self._grouped)
        try:
            if not missed:
                self.take_back(self._presence.absent)
        except BaseException as raised:
            error = raised
        self._let_go()
        if not missed:
            self.regroup()
        return Reduced(sums, missed, self._presence.partial, numbers[NUMBERS], error)

    def exchange(self, failed: bool) -> BaseException | None:
        """Give the others what they wait for, and get what they send; says what kept gradients from being sent."""
        carrier, error = self._carrier(), None
        # All ranks send in this order what has not left yet: a rank that waits for a bucket has sent those before it.
        order = sorted(self._buckets, key=lambda one: (one is carrier, self._goes_late(one)))
        if not failed:
            try:
                self.send_rest(order, carrier)
            except BaseException as raised:
                error = raised
                self.ballot[0].fill_(1)
        if failed or error is not None:
            self._take_part(order, carrier)
        if carrier is None:
            here().all_reduce([self._row], "gpumem_nb.ballot", AVERAGE)
        for bucket in self._buckets:
            self._wait_for(bucket)
        return error

    def send_rest(self, order: Sequence[Bucket], carrier: Bucket | None) -> None:
        """Send what was not sent yet."""
        for bucket, first in in_turn(unsent(order), self._config.compressed):
            if self.shares.wanted:
                self._cut_all_but(COPIES_AT_ONCE - 1)
            elif first is not None:
                self._wait_for(first)
                copies_back(first)
            self._send(bucket, self._row if bucket is carrier else None)

    def _cut_all_but(self, most: int) -> None:
        """Wait until so many buckets are under way, and keep this rank's share; all ranks send them in one order."""
        sent = [bucket for bucket in self._buckets if bucket.transfer is not None]
        for bucket in sent[: max(0, len(sent) - most)]:
            if self._enter:
                self.torn |= bucket.left_as != marks(bucket.params)  # of which a share would not tell
                self._enter(REDUCTION)
            self._wait_for(bucket)
            if self._enter:
                self._enter(BACKWARD)
            self.shares.cut(bucket)

    def _carrier(self) -> Bucket | None:
        """Return the bucket that the ballot travels in, if it can."""
        last = self._buckets[-1] if self._buckets else None
        fits = last and self._config.averaged and self._carried(last) == self._row.dtype
        return last if last and fits and last.params[0].device == self._row.device else None

    def _counting(self) -> BaseException | None:
        """Write behind the ballot what else all ranks add up; returns what kept this rank from it."""
        try:
            squares = [bucket.square.to(self._row.device) for bucket in self._buckets if bucket.square is not None]
            if squares:
                self._row[NUMBERS].copy_(torch.stack(squares).sum())
            else:
                self._row[NUMBERS].fill_(0)
            self._row[NUMBERS + 1 :].copy_(self._presence.codes(self.there, self._row.device))
        except BaseException as error:
            self.ballot[0].fill_(1)
            return error
        return None

    def _take_part(self, order: list[Bucket], carrier: Bucket | None) -> None:
        """Send what others wait for, bucket by bucket, through memory that each of them uses again."""
        self.shares.begin({})
        for param in self._params:
            param.grad = None
        rest = unsent(order)
        places = stand_ins(rest, self._sparse, self._config.compressed, here().on_host)
        for bucket in order:
            if bucket in rest:
                wires = next(places)
                self._start(bucket, wires if bucket is not carrier else [*wires, self._row])
            self._wait_for(bucket)
            bucket.wires, bucket.places = [], {}

    def _wait_for(self, bucket: Bucket) -> None:
        transfer, bucket.transfer = bucket.transfer, None
        if transfer is not None:
            transfer.wait()
            bucket.travelled = True
            self._arrived(bucket, transfer)

    def take_back(self, absent: Collection[int]) -> None:
        """Let what came be the gradients, or keep this rank's share; but those that are ``absent`` on all ranks."""
        for bucket in self._buckets:
            if self.shares.wanted:
                self.shares.cut(bucket)
            for param, wires in zip(bucket.params, bucket.wires, strict=bool(bucket.wires)):
                if id(param) in absent:
                    continue
                if param.grad is None:
                    param.grad = bucket.places.get(id(param))
                if wires:
                    arrived(param, wires)
        self.shares.drop(absent)

    def _let_go(self) -> None:
        for bucket in self._buckets:
            bucket.wires, bucket.places = [], {}

    def forget(self) -> None:
        """Let go of what was sent: Horovod was shut down, and nothing will come back."""
        self._enter = None
        for bucket in self._buckets:
            bucket.transfer = None
        self._let_go()
        self._under_way.clear()

    def remove(self) -> None:
        """Take the hooks off the weights again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _gradient_ready(self, bucket: Bucket, param: Tensor) -> None:
        if self._enter is None or here().size == 1:
            return
        self._notice_arrivals()
        if id(param) in bucket.ready:  # it comes in several pieces, and how many is not known
            self._early = False
            return
        bucket.ready.add(id(param))
        if not self._early:
            return
        if self.shares.wanted:
            complete = self._presence.complete
            for one in takewhile(lambda one: complete(one.params, one.ready), unsent(self._buckets[:-1])):
                self._send_early(one)
        elif len(bucket.ready) == len(bucket.params) and not (bucket is self._buckets[-1] or self._goes_late(bucket)):
            self._send_early(bucket)

    def _goes_late(self, bucket: Bucket) -> bool:
        return not self._config.shared and widened(bucket, self._config.compressed)

    def _send_early(self, bucket: Bucket) -> None:
        self.finite.look(param.grad for param in bucket.params)
        self._measure(bucket)
        with postponed():  # what Horovod has begun must be known: it would be sent a second time
            if self.shares.wanted:
                self._cut_all_but(COPIES_AT_ONCE - 1)
            bucket.left_as = marks(bucket.params)
            self._send(bucket, None)

    def _measure(self, bucket: Bucket) -> None:
        if self._measures:
            bucket.square = square_of(bucket.params)

    def _send(self, bucket: Bucket, ballot: Tensor | None) -> None:
        compressed = self._config.compressed
        self._had.update(id(param) for param in bucket.params if param.grad is not None)
        bucket.wires = [outgoing(param, id(param) in self._sparse, compressed) for param in bucket.params]
        # What comes must find its place: this rank could not say any more that it has none.
        bucket.places = {
            id(param): torch.empty_like(param)
            for param, wires in zip(bucket.params, bucket.wires, strict=True)
            if param.grad is None and len(wires) == 1 and not (wires[0].dtype == param.dtype and param.is_contiguous())
        }
        wires = [wire for wires in bucket.wires for wire in wires]
        if ballot is not None:
            wires.append(ballot)
        if Recorder.current:
            gradients = {id(param.grad) for param in bucket.params}
            Recorder.current.claim(COMMUNICATION, (wire for wire in wires if id(wire) not in gradients))
        if self._rounded is not None:
            self._rounded += [rounding(param, sent) for param, sent in zip(bucket.params, bucket.wires, strict=True)]
        self._start(bucket, wires)

    def _start(self, bucket: Bucket, wires: list[Tensor]) -> None:
        bucket.sent_s, bucket.sent_bytes = time.perf_counter(), sum(wire.nbytes for wire in wires)
        device = wires[0].device
        bucket.sent = event_here(device) if device == self._row.device else None  # events of two GPUs have two clocks
        name = bucket.name if self._config.averaged else f"{bucket.name}.{self._config.reduction}"
        bucket.transfer = here().start_reduction(wires, name, self._config.reduction)
        self._under_way.append(bucket)

    def _carried(self, bucket: Bucket) -> torch.dtype:
        return carried_dtype(bucket.dtype, self._config.compressed)

    def _notice_arrivals(self) -> None:
        """Look which buckets have arrived by now; Horovod brings one after the other."""
        while self._under_way and ((sent := self._under_way[0].transfer) is None or sent.done()):
            self._arrived(self._under_way[0], sent)

    def _arrived(self, bucket: Bucket, transfer: Transfer | None) -> None:
        if bucket in self._under_way:
            self._under_way.remove(bucket)
            came_s = (transfer and transfer.arrived_s) or time.perf_counter()
            self.transfers.append(BucketTransfer(bucket.sent_bytes, bucket.sent_s, came_s, bucket.index, bucket.sent))
