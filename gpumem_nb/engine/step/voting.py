"""The common end of a step on all ranks: gradients averaged, votes counted, weights compared."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.amp import GradScaler

from ...memory.device import Device
from ...shared.errors import WorkloadError
from ...shared.messages import Failure
from ...shared.step_times import REDUCTION, TOOLKIT
from ..link import signals
from ..link.communicator import here
from . import optimizers
from .ballot import Votes, WeightWatch, write_ballot
from .buckets import Reduced, ReductionConfig
from .failures import nonfinite_loss
from .gradients import FiniteCheck, GradientsHad, is_measured
from .live_model import LiveModel
from .optimizer_state import state_of
from .parts import in_groups
from .reduction import GradientReduction

if TYPE_CHECKING:
    from .step import Stepper

MOST_ATTEMPTS = 4  # at one step, before the user's code is taken to change what it trains each time
_RESTLESS = (
    f"the ranks did not come to agree in {MOST_ATTEMPTS} attempts at this step: which weights are trained, or get a "
    "gradient, changes every time it is tried. Let the model, the loss and their hooks leave requires_grad and the "
    "optimizer's groups as they are during a step."
)
_APART = (
    "forward itself writes {names}, and on each rank something else, so the ranks' weights would come apart in every "
    "step. torch.nn.functional.embedding does so with max_norm, to the rows that it looks up: leave max_norm out, or "
    "let forward compute with a changed copy of the weight."
)
_PARTIAL_NAMED = 3
_MEASURED_EVERY = 20  # steps, of which the first shows what compression takes from gradients


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Instructions for one step.

    ``step``: how many were done before. ``trial``: measure it and undo it. ``nudges``: those sent before; a newer one
    makes this step the chunk's last. ``proven``: an update was made under these settings before. ``recorded``: listen
    to every allocation. ``config``: how gradients travel, of the settings that all ranks were given: on one that could
    not apply them all, others are in effect.
    """

    step: int
    trial: bool
    nudges: int
    proven: bool
    recorded: bool
    config: ReductionConfig


class Voting:
    """One rank's part in the votes, which travel with its gradients.

    Attributes:
        reduction: of its gradients.
        watch: compares the ranks' weights.
        had: which weights had gradients in the steps that counted.
        squares: of the latest step, if it was measured, the squared norms of a rank's gradient (the mean of all ranks)
            and of the averaged one, which is still on the device.
    """

    def __init__(self, live: LiveModel, rank: int, ranks: int, device: Device) -> None:
        """Begin to average the gradients of what is trained."""
        self._live = live
        self._rank, self._ranks = rank, ranks
        self._device = device
        self._config = ReductionConfig.under(live.settings)
        self.reduction = self._reduce_all()
        self._partial: tuple[Tensor, ...] = ()
        self._told_partial: set[int] = set()
        self.had = GradientsHad()
        self.watch = WeightWatch(live.parts, lambda: state_of(live.optimizer))
        self.squares: tuple[float, Tensor] | None = None
        self._apart = False  # they came to differ in the attempt before
        self._agreed = False  # the ranks' weights were compared in the step under way, and are the same
        self._measured_at = -_MEASURED_EVERY

    def attempt_begins(self, order: StepOrder) -> None:
        """A step begins, perhaps for another time."""
        self.squares, self._agreed = None, False
        self._config = order.config
        measured = False
        if not self._config.compressed:
            self._measured_at = self._measured_at if order.trial else -_MEASURED_EVERY
        elif not (order.trial or order.recorded):  # where measuring would be among what is recorded
            measured = not 0 <= order.step - self._measured_at < _MEASURED_EVERY
            self._measured_at = order.step if measured else self._measured_at
        spans = self._kept_of_gradients() if self._config.shared and here().size > 1 else {}
        self.reduction.begin(self._config, measured, not order.trial and is_measured(order.step, self._ranks), spans)

    def _kept_of_gradients(self) -> dict[int, tuple[int, int]]:
        """Return what this rank keeps of the gradients under the settings that are tried, or in use."""
        with suppress(WorkloadError):  # which fails the step elsewhere
            optimizer = self._live.optimizer_in_question()
            if partition := self._live.sharing.partition(optimizer, self._live.settings):
                return partition.kept(in_groups(optimizer))
        return {}

    def begin(self, order: StepOrder) -> None:
        """Forward begins."""
        if self._compares(order):
            self.watch.begin()

    def vote(
        self, order: StepOrder, loss: Tensor | None, failure: Failure | None, step: Stepper
    ) -> tuple[Votes, Failure | None]:
        """Average the gradients over all ranks, and learn what any of them votes for; this rank may fail in it."""
        try:
            with self._device.exempt():
                compared, checked, failure = self._write_ballot(order, loss, failure, step)
                step.enter(REDUCTION)
                reduced = self.reduction.finish(failure is not None)
                if reduced.error is not None:
                    failure = step.failure(reduced.error)
                votes = Votes.counted(reduced.sums, self._ranks, reduced.missed)
                if failure is not None and not votes.failed:
                    raise reduced.error or RuntimeError(failure.message)  # the others do not know of it
                step.enter(TOOLKIT, idle=True)  # the votes were read, and but for copies back nothing came after them
                return self._seen(order, loss, votes, reduced, compared, checked, failure)
        except BaseException as error:
            # Either the ranks came apart already, or this one cannot take part: then no rank may wait for it.
            failure = failure or step.failure(error)
            self.watch.ask()
            here().leave(f"{REDUCTION} of a step")
            self.reduction.forget()
            return Votes(failed=True, leave=True), failure

    def _seen(
        self,
        order: StepOrder,
        loss: Tensor | None,
        votes: Votes,
        reduced: Reduced,
        compared: bool,
        checked: bool,
        failure: Failure | None,
    ) -> tuple[Votes, Failure | None]:
        """Return what follows from the votes, and this rank's failure if it has one."""
        average = None if votes.failed else self.reduction.average_square()
        self._partial = reduced.partial
        self.squares = None if average is None else (reduced.square, average)
        self._agreed = compared and not (votes.compare or votes.differ)
        if votes.nonfinite and failure is None and loss is not None:
            bad_loss = None if loss.isfinite() else nonfinite_loss(self._rank, loss)
            told = checked and not votes.failed  # a rank that failed sends whatever its memory holds
            failure = bad_loss or (self._of_gradients(self.reduction.finite) if told else None)
        elif self._config.compressed and here().size > 1 and not (votes.failed or votes.nonfinite or votes.unsure):
            failure = self._overflow()
            votes = replace(votes, nonfinite=failure is not None)
        return votes, failure

    def _overflow(self) -> Failure | None:
        """Return what became too large for fp16 when it was sent: all ranks have the same average and find the same."""
        check = FiniteCheck(self._device.torch_device)
        norms = self._live.shares.norms(self._live.parameters)
        check.look(norms or [param.grad for param in self._live.parameters])
        if not check.nonfinite(torch.zeros((), dtype=torch.float32, device=self._device.torch_device), self._scaler):
            return None
        failure = self._of_gradients(check)
        assert failure is not None
        message = (
            f"a gradient was too large for compression=fp16, whose largest number is 65,504, on the way to the "
            f"other ranks or in the sum of all ranks: {failure.message.partition(',')[0]}. Set compression=none, or "
            "let the loss be smaller"
        )
        return replace(failure, phase="reduction", message=message)

    def _of_gradients(self, check: FiniteCheck) -> Failure | None:
        return check.failure(self._rank, self._live.parameters, self._live.parts, self._live.shares.norm)

    @property
    def _scaler(self) -> GradScaler | None:
        """Return what has scaled gradients; the loss is without its scale."""
        return self._live.scaler if self._live.settings.precision == "fp16" else None

    def agree_anew(self, votes: Votes, step: Stepper) -> Failure | None:
        """Return what all ranks do before they take a step again, because they would not have stayed the same in it."""
        self._apart = votes.differ
        try:
            with self._device.exempt():
                if votes.compare:
                    self.watch.ask()
                if votes.torn:
                    self.reduction.wait_for_backward()
                if votes.missed:
                    self.reduction.regroup()
                if votes.relisted:
                    self._live.relist()
                    self.reduction.remove()
                    self.reduction = self._reduce_all()
                if votes.differ and (message := self.watch.examine()):
                    return Failure(self._rank, "diverged", "reduction", message)
        except BaseException as error:  # a rank that left here would keep the others waiting in the next try
            return step.failure(error)
        return None

    def restless(self, written: Sequence[Tensor]) -> str:
        """Say why the ranks could not agree on a step; ``written`` are the weights that forward is known to write."""
        ids = set(map(id, written))
        names = [name for name, param in self._live.parts.named_parameters() if id(param) in ids]
        return _APART.format(names=_named(names)) if self._apart and names else _RESTLESS

    def counted(self, order: StepOrder) -> None:
        """The step counts."""
        self.had.note(*self.reduction.gradients)
        if self._agreed:
            self.watch.agreed(order.step)

    def newly_partial(self) -> tuple[str, ...]:
        """Return a sentence on weights that got a gradient on some ranks only, if it was not said before."""
        new = {id(param) for param in self._partial} - self._told_partial
        if not new:
            return ()
        self._told_partial |= new
        names = [name for name, param in self._live.parts.named_parameters() if id(param) in new]
        return (f"{_named(names)}: some ranks had no gradient, which counts as zero in the {self._config.reduction}",)

    def _write_ballot(
        self, order: StepOrder, loss: Tensor | None, failure: Failure | None, step: Stepper
    ) -> tuple[bool, bool, Failure | None]:
        """Vote; what goes wrong in asking fails the step.

        Returns whether this rank's weights are compared, and whether its gradients were looked at.
        """
        nonfinite, digest, checked = None, None, False
        careful, relisted = True, False
        try:
            relisted = self._live.relisted()
            if loss is not None:
                self.reduction.look_at_rest()
                nonfinite, checked = self.reduction.finite.nonfinite(loss, self._scaler), True
                digest = self.watch.digest() if self._compares(order) else None
            careful = self.update_may_fail(order)
        except BaseException as error:
            failure = failure or step.failure(error)
        left = signals.nudged_since(order.nudges)
        flags = failure is not None, left, careful, self.reduction.torn, relisted
        write_ballot(self.reduction.ballot, flags, nonfinite, digest)
        return digest is not None, checked, failure

    def update_may_fail(self, order: StepOrder) -> bool:
        """Return whether this update could end half way: short of memory, or in the user's own code."""
        if not order.proven or not optimizers.from_torch(self._live.optimizer):
            return True
        if self.had.is_news(self.reduction.gradients[0], self.reduction.there):  # whose state is made in it
            return True
        room = self._device.room()
        if room is None:
            return True
        pieces = self._live.pieces(self._live.optimizer)
        copies = pieces.room(self._live.optimizer) if pieces else 0
        if room >= copies + optimizers.update_bytes(self._live.optimizer, self.reduction.nbytes):
            return False
        # What is cached is room as well. Asked for only when it matters, because it takes a look at all blocks.
        weights = optimizers.may_write(self._live.optimizer)
        needed = copies + optimizers.update_bytes(self._live.optimizer, sum(weight.nbytes for weight in weights))
        return room < needed and room + self._device.releasable() < needed

    def _compares(self, order: StepOrder) -> bool:
        """Return whether the ranks' weights are compared in this step; not in trials, of which questions take many."""
        return here().size > 1 and not order.trial and self.watch.due(order.step)

    def _reduce_all(self) -> GradientReduction:
        """Return the reduction of all that the optimizer trains."""
        live, device = self._live, self._device.torch_device
        places = live.sparse_places()
        return GradientReduction(live.parameters, places, self._ranks, self._config, device, live.shares)


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _PARTIAL_NAMED} more" if len(names) > _PARTIAL_NAMED else ""
    return ", ".join(names[:_PARTIAL_NAMED]) + more
