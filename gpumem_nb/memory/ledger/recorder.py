"""Listening to one step: every allocation and release, and who says whose it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...internals.torch_internals import func_transforms_allowed, hooks_entered_by, in_backward, not_compiled
from ...shared.categories import ACTIVATIONS, CASTS, GRADIENTS, LOGITS, OPTIMIZER_STATE, PARAMETERS
from ...shared.messages import Reading
from ..device import Listened
from ..tensors import tensors_in
from .account import Account, Claim, Mark, Observed
from .events import Events, Foreseen

_Pack = Callable[[Tensor], Any]
_Unpack = Callable[[Any], Tensor]


class Recorder:
    """Records the events of one step from construction to :meth:`end`, and who claims which allocation.

    Args:
        device: whose memory it is.
        models: what is trained; the first is the model itself.
        head: the layer of it that makes logits; ``None`` where they are no larger than other results.

    Attributes:
        current: the one that records now, for code that cannot be handed it.
    """

    current: Recorder | None = None

    def __init__(self, device: Listened, *models: nn.Module, head: nn.Linear | None = None) -> None:
        # What belongs to a loss is called by its class.
        self._names = {id(module): name for model in models[:1] for name, module in model.named_modules()}
        params = [named for model in models for named in model.named_parameters()]
        self._homes = [name.rpartition(".")[0] for name, _ in params]  # the modules that parameters lie in
        self._home_of = {id(param): home for (_, param), home in zip(params, self._homes, strict=True)}
        self._head = head
        self._classes = 0  # once the head was called
        self._device = device
        self._claims: dict[int, Claim] = {}  # by the number of the allocation
        self._running: list[str] = []
        self._marks: list[Mark] = []
        self._paused: tuple[Reading, Events, int] | None = None
        device.reset_peak()
        self._log = device.event_log()
        self._began_ns = time.perf_counter_ns()
        self._base = self._log.begin([param for _, param in params])
        self.mark("data")

    def claim(self, category: str, tensors: Iterable[Tensor], module: str = "") -> None:
        """Say what the storages of these tensors are."""
        for tensor in tensors:
            if number := self._log.allocation(tensor):
                self._claim(number, Claim(category, module or self._here, tensor.untyped_storage().nbytes()))

    def _claim(self, number: int, claim: Claim) -> None:
        if number not in self._claims or self._claims[number].yields_to(claim.category):
            self._claims[number] = claim

    def claim_model(self, params: Iterable[Tensor], state: dict[Any, dict[str, Any]]) -> None:
        """Claim what lives from step to step: weights, their gradients and the optimizer's state of them."""
        for param in params:
            module = self._home_of.get(id(param), "")
            self.claim(PARAMETERS, [param], module)
            if param.grad is not None:
                self.claim_gradients(param, [param.grad])
            values = state.get(param, {}).values()
            self.claim(OPTIMIZER_STATE, (value for value in values if isinstance(value, Tensor)), module)

    def claim_gradients(self, param: Tensor, gradients: Iterable[Tensor]) -> None:
        """Claim what is, or was, a weight's gradient, or a share of it."""
        self.claim(GRADIENTS, gradients, self._home_of.get(id(param), ""))

    def saved(self, tensor: Tensor) -> None:
        """A tensor is kept for backward."""
        of_classes = self._classes and self._classes in (tensor.shape[-1:] + tensor.shape[1:2])
        self.claim(LOGITS if of_classes else ACTIVATIONS, [tensor])

    def mark(self, phase: str, module: str = "") -> None:
        """From now on this part of the step runs, in this module."""
        if not self._marks or (self._marks[-1].phase, self._marks[-1].module) != (phase, module):
            self._marks.append(Mark(time.perf_counter_ns(), phase, module))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, see every operator's tensors, what is saved for backward, and which module runs."""
        with ExitStack() as stack:
            stack.callback(self._stop)
            Recorder.current = self
            stack.callback(self._look_away)
            self._look_at_modules()
            stack.enter_context(saved_tensors_hooks(*self._telling(Tensor.detach, lambda tensor: tensor)))
            stack.enter_context(self._inner_hooks_told())
            stack.enter_context(func_transforms_allowed())
            stack.enter_context(self._log.watching())
            yield

    @contextmanager
    def not_inside(self) -> Iterator[None]:
        """Inside, modules run whose code is compiled as a whole: hooks on each of them would take it apart."""
        self._look_away()
        try:
            yield
        finally:
            self._look_at_modules()

    def pause(self, held: Iterable[Tensor]) -> Callable[[Tensor], int]:
        """Listen no more, before :meth:`end`; gives the number of the allocation in which one of these tensors lies."""
        numbers = {id(tensor): self._log.allocation(tensor) for tensor in held}
        reading = self._device.reading()
        self._paused = reading, self._log.end(), time.perf_counter_ns()
        return lambda tensor: numbers.get(id(tensor), 0)

    def end(self, update: Foreseen | None = None, update_s: float = 0.0) -> Account:
        """Stop recording and work out where the bytes were.

        Args:
            update: what was not taken after a pause, and is foreseen to follow.
            update_s: how long it would take.
        """
        reading, events, ended_ns = self._paused or (self._device.reading(), self._log.end(), time.perf_counter_ns())
        live_peak = reading.live_peak_bytes
        if update:
            events = update.after(events, self._base.live_bytes, ended_ns, update_s)
            live_peak = max(live_peak, reading.live_bytes + update.highest_bytes)
            ended_ns += int(update_s * 1e9)
            for number, nbytes, weight in update.owned:
                self._claim(number, Claim(OPTIMIZER_STATE, self._home_of.get(id(weight), ""), nbytes))
        for number, param in events.casts.items():
            self._claim(number, Claim(CASTS, self._homes[param], 0))
        return Account(
            Observed(
                began_ns=self._began_ns,
                ended_ns=ended_ns,
                base=self._base,
                events=events,
                claims=self._claims,
                marks=self._marks,
                live_peak_bytes=live_peak,
                virtual=self._device.kind == "virtual",
                exact=self._log.exact,
                host_state_bytes=update.waiting_bytes if update else 0,
            )
        )

    def _look_at_modules(self) -> None:
        self._hooks = (
            register_module_forward_pre_hook(not_compiled(self._enter)),
            register_module_forward_hook(not_compiled(self._leave), always_call=True),
        )

    def _look_away(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _stop(self) -> None:
        Recorder.current = None
        self._log.end()  # a step that could not be finished has not done it

    @property
    def _here(self) -> str:
        return self._running[-1] if self._running else ""

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names.get(id(module), type(module).__name__))
        self.mark(self._marks[-1].phase, self._here)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()
        self.mark(self._marks[-1].phase, self._here)
        if module is self._head:
            self._logits_made(output, module.out_features)

    def _logits_made(self, logits: Any, classes: int) -> None:
        """From now on what has a number for each class is logits: what the loss keeps of them, and their gradient."""
        self._classes = classes
        if isinstance(logits, Tensor):
            self.claim(LOGITS, [logits])
            if logits.grad_fn:
                logits.grad_fn.register_prehook(_gradient_made)

    def _telling(self, pack: _Pack, unpack: _Unpack) -> tuple[_Pack, _Unpack]:
        """Saved-tensor hooks that do what these two do, and tell this recorder.

        What ``pack`` returns must not be the tensor itself: a result that a node saves refers to the node, and together
        they would outlive a step that is given up.
        """

        def told_pack(tensor: Tensor) -> tuple[Any, str]:
            try:
                packed = pack(tensor)
            except Exception:  # torch.utils.checkpoint ends a recomputation so, having kept the last tensor
                self.saved(tensor)
                raise
            for part in tensors_in(packed):
                self.saved(part)
            return packed, self._here

        def told_unpack(saved: tuple[Any, str]) -> Tensor:
            packed, module = saved
            tensor = unpack(packed)
            self.mark("backward", module)
            return tensor

        return not_compiled(told_pack), not_compiled(told_unpack)

    def _inner_hooks_told(self) -> AbstractContextManager[None]:
        """Autograd asks the innermost hooks only: those of any checkpointing or offloading inside tell as well."""

        def told_enter(enter: Callable[[saved_tensors_hooks], None], hooks: saved_tensors_hooks) -> None:
            if in_backward():
                self.mark("recomputation")
            enter(saved_tensors_hooks(*self._telling(hooks.pack_hook, hooks.unpack_hook)))

        return hooks_entered_by(told_enter)


def _gradient_made(gradients: Sequence[Tensor | None]) -> None:
    """Claim the gradient of the logits, unless recording has ended."""
    if Recorder.current:
        Recorder.current.claim(LOGITS, (one for one in gradients if one is not None))
