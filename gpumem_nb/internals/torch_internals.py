"""Undocumented parts of torch. Only for ranks.

- Storages and tensors: ``_cdata`` (where the C++ object lies: Python makes a new storage object each time one asks),
  ``_version`` (counts changes in place), ``_base`` (what a view is one of), ``_unsafe_preserve_version_counter``,
  ``_is_zerotensor`` (gradients in forward mode that nothing was written of).
- Modules: ``_buffers`` (binding a buffer's name anew leaves ``buffers()`` no trace of the old one), ``_modules``,
  ``_parameters`` and the dicts of hooks (read for all modules at once, in each step), ``_NormBase`` (what batch norms
  have in common), the hooks of ``weight_norm`` and ``spectral_norm`` that make a weight anew in each call, and what
  ``torch.compile`` leaves on a module (``_compiled_call_impl``, ``_orig_mod``, ``_torchdynamo_orig_callable``).
- Autograd: ``_raw_saved_*`` of graph nodes (what is saved, without unpacking it, which could run the model again),
  ``torch._C._current_graph_task_id`` (whether a backward runs on this thread), ``torch._C._current_autograd_node``
  and ``_sequence_nr`` of nodes (which of them it has come to), the stack of saved-tensor hooks,
  ``saved_tensors_hooks.__enter__`` (autograd asks the innermost hooks only), and that ``torch.func`` looks up
  ``disable_saved_tensors_hooks`` when it needs it.
- Autocast's depth and cache, and which operators it has rules for (``_dispatch_has_kernel_for_dispatch_key``).
- Optimizers: the dicts of step hooks, of one optimizer and of all (to hold hooks back and run them later),
  ``_step_supports_amp_scaling`` (whether a gradient scaler hands its scale to a fused kernel), and the attributes in
  which it does so.
- Schedulers of schedulers: ``_schedulers``, in them and in their state. Data loaders: the module of their handler of
  SIGCHLD.
- Fake tensors: ``torch._subclasses.FakeTensorMode``, the errors with which it refuses an operator, and
  ``Module._apply``, which cannot convert them. What keeps a kernel written in Python from calling itself:
  ``_ExcludeDispatchKeyGuard``.
- The profiler: ``torch.autograd.profiler._is_profiler_enabled`` (a second one that begins ends the first without a
  word), and what its file says about its clock: times count from ``baseTimeNanoseconds``.
- The CUDA allocator's history (``torch.cuda.memory._record_memory_history``, ``_dump_snapshot``), which torch documents
  as it is, underscore and all.

What is called for each tensor or operator is as fast as the attribute.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _autograd, _current_autograd_node, _current_graph_task_id
from torch.autograd import profiler as _profiler
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer

CHECKED_WITH = ("2.13.0",)

_Function = TypeVar("_Function", bound=Callable[..., Any])
Update = tuple[tuple[Any, ...], dict[str, Any]]
"""What an optimizer hands to its step hooks: the arguments of ``step``."""

CHAINED = "_schedulers"
"""Under which a scheduler of schedulers keeps them, and their states in its own."""

_OUTSIDE_BACKWARD = -1
_TORCH = Path(torch.__file__).parent

FILES_AROUND_MODES = tuple(str(_TORCH / name) for name in ("_dynamo", "_compile.py", "utils/_python_dispatch.py"))
"""Where the code lies that torch puts between an operator's caller and a dispatch mode: files and folders."""

address: Callable[[Tensor | torch.UntypedStorage], int] = attrgetter("_cdata")
"""Where the C++ object of a tensor or storage lies: the same for every Python object of it, while it lives."""

base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor of which one is a view, also where no graph is made; that lives as long as the view."""

buffers_by_name: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""A module's own buffers, without those of its children: the dict in which it keeps them."""

children_by_name: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""A module's direct children: the dict in which it keeps them."""

weights_by_name: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_parameters")
"""A module's own parameters: the dict in which it keeps them."""

hooks_of: Callable[[nn.Module], tuple[dict[int, Any], ...]] = attrgetter(
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""The dicts in which a module keeps what is called around its forward and backward, and in which way."""

hooks_of_tensor: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
"""The dict of what is called with the gradient of a tensor; ``None`` before there was anything."""

MODULES_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has for torch's own use."""


_version_of: Callable[[Tensor], int] = attrgetter("_version")


def is_all_zero(tensor: Tensor) -> bool:
    """Return whether a tensor is known to be zero and so has no bytes, though its storage has a size."""
    return tensor._is_zerotensor()


def version(tensor: Tensor) -> int:
    """Return how often a tensor, or another view of its storage, has been changed in place; 0 where torch counts none.

    It does not in ``torch.inference_mode()``.
    """
    try:
        return _version_of(tensor)
    except RuntimeError:
        return 0


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the same of many tensors."""
    try:
        return list(map(_version_of, tensors))
    except RuntimeError:
        return list(map(version, tensors))


def made_anew(module: nn.Module) -> set[str]:
    """Return the attributes that torch's own ``weight_norm`` and ``spectral_norm`` compute before each forward."""
    hooks = module._forward_pre_hooks.values()
    return {hook.name for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)}


def unversioned(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Do not count changes made to these tensors inside: the caller takes them back."""
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    guard: AbstractContextManager[None] = _unsafe_preserve_version_counter(counted)
    return guard


def is_compiled(module: nn.Module) -> bool:
    """Return whether this module, or its forward, was compiled by ``torch.compile`` or ``module.compile()``."""
    return (
        hasattr(module, "_orig_mod")
        or module._compiled_call_impl is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether backward of this module calls hooks of its own."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return what ``torch.compile`` was applied to; any other module itself."""
    inside: nn.Module = getattr(module, "_orig_mod", module)
    return inside


def is_handler_of_loaders(handler: object) -> bool:
    """Return whether a handler of a signal is the one by which torch's data loaders notice workers that ended."""
    return str(getattr(handler, "__module__", "")).startswith("torch.utils.data._utils.signal_handling")


def end_pinning(iterator: object, timeout_s: float) -> None:
    """End the thread with which an iterator over a loader pins memory, if it has one, before its workers end.

    It reads what they send: one that is ended in the middle of a message would leave it reading for ever, and torch
    waiting for it.
    """
    thread = getattr(iterator, "_pin_memory_thread", None)
    if thread is not None:
        iterator._pin_memory_thread_done_event.set()  # type: ignore[attr-defined]
        iterator._worker_result_queue.put((None, None))  # type: ignore[attr-defined]
        thread.join(timeout_s)


def dynamo_is_there() -> bool:
    """Return whether anything may be compiled. Importing dynamo takes seconds; if no code did, nothing is compiled."""
    return "torch._dynamo" in sys.modules


def not_compiled(function: _Function) -> _Function:
    """Return the function, kept out of what ``torch.compile`` compiles."""
    return torch.compiler.disable(function) if dynamo_is_there() else function


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the module itself and those below it that keep running statistics."""
    return [one for one in module.modules() if isinstance(one, nn.modules.batchnorm._NormBase)]


def saved_raw(node: Any) -> Iterator[Any]:
    """Yield what a graph's node has saved for backward, as it lies there: ``data`` and ``unpack_hook`` of each.

    What comes points into the node: who reads it after the node is gone ends the process.
    """
    for name in _raw_names(type(node)):  # type: ignore[arg-type]
        with suppress(RuntimeError):  # a node written in Python says that a backward has been there
            found = getattr(node, name)
            yield from (item for item in (found if isinstance(found, list | tuple) else [found]) if item is not None)


@cache
def _raw_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread."""
    return _current_graph_task_id() != _OUTSIDE_BACKWARD


def backward_node() -> tuple[int, int] | None:
    """Return which node of which backward runs on this thread; ``None`` outside, and where the graph goes on."""
    if torch.is_grad_enabled() or (node := _current_autograd_node()) is None:
        return None
    return _current_graph_task_id(), node._sequence_nr()


@contextmanager
def hooks_entered_by(
    enter: Callable[[Callable[[saved_tensors_hooks], None], saved_tensors_hooks], None],
) -> Iterator[None]:
    """Inside, code that enters saved-tensor hooks calls ``enter(torch's own function, the hooks)`` instead."""
    own = saved_tensors_hooks.__enter__
    saved_tensors_hooks.__enter__ = lambda hooks: enter(own, hooks)  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = own  # type: ignore[method-assign]


@contextmanager
def func_transforms_allowed() -> Iterator[None]:
    """Inside, ``torch.func.grad`` and its like suspend saved-tensor hooks, instead of refusing to run under them."""
    own = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    def suspend(error_message: str) -> Iterator[None]:
        entered = []
        while (top := innermost_hooks()) is not None:
            entered.append(top)
            leave_hooks()
        try:
            with own(error_message):
                yield
        finally:
            for pack, unpack in reversed(entered):
                _autograd._push_saved_tensors_default_hooks(pack, unpack)

    torch.autograd.graph.disable_saved_tensors_hooks = suspend
    try:
        yield
    finally:
        torch.autograd.graph.disable_saved_tensors_hooks = own


def hooks_are_allowed() -> bool:
    """Return whether saved-tensor hooks may be entered on this thread: inside ``torch.func.grad`` they may not."""
    return bool(_autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def innermost_hooks() -> Any:
    """Return the saved-tensor hooks that autograd asks on this thread; ``None`` when there are none."""
    return _autograd._top_saved_tensors_default_hooks(True)


def leave_hooks() -> None:
    """Leave the innermost saved-tensor hooks, which were never left."""
    _autograd._pop_saved_tensors_default_hooks()


def leave_autocast() -> None:
    """Leave every autocast that was never left, and drop its copies of the weights."""
    for _ in range(torch.autocast_increment_nesting()):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


@cache
def cast_on_cpu_alone() -> list[str]:
    """Return the names of operators for which autocast has a rule on the CPU and none on CUDA, without ``aten::``."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    on_cpu = (name for name in names if has(name, "AutocastCPU") and not has(name, "AutocastCUDA"))
    return [name.removeprefix("aten::") for name in on_cpu]


def without_autocast_on_cpu() -> AbstractContextManager[Any]:
    """Inside, operators are not cast by the CPU's autocast."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(keys)
    return guard


def stepped_by_others(optimizer: Optimizer) -> bool:
    """Return whether the object's ``step`` was replaced by something else than a scheduler's counter around it."""
    step = vars(optimizer).get("step")
    counts = getattr(step, "_wrapped_by_lr_sched", False) and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is not None and not counts


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks around this optimizer's update, or any optimizer's, are registered, or its step replaced."""
    return any((*_pre_hooks(optimizer), *_post_hooks(optimizer), stepped_by_others(optimizer)))


def step_pre_hooks(optimizer: Optimizer) -> tuple[Any, ...]:
    """Return the hooks registered before this optimizer's update, or any optimizer's, in torch's order."""
    return tuple(hook for hooks in _pre_hooks(optimizer) for hook in hooks.values())


@contextmanager
def step_hooks_held_back(optimizer: Optimizer, pre: bool) -> Iterator[list[Update]]:
    """Inside, no hook runs after this optimizer's update, with ``pre`` none before it either.

    The list gets what each update hands to its hooks, for :func:`run_post_hooks`.
    """
    updates: list[Update] = []
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    of_all = _optimizer._global_optimizer_pre_hooks, _optimizer._global_optimizer_post_hooks
    optimizer._optimizer_step_post_hooks = OrderedDict({0: lambda _, *update: updates.append(update)})
    _optimizer._global_optimizer_post_hooks = OrderedDict()
    if pre:
        optimizer._optimizer_step_pre_hooks = OrderedDict()
        _optimizer._global_optimizer_pre_hooks = OrderedDict()
    try:
        yield updates
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = own
        _optimizer._global_optimizer_pre_hooks, _optimizer._global_optimizer_post_hooks = of_all


def run_post_hooks(optimizer: Optimizer, updates: list[Update]) -> None:
    """Run what was held back after these updates; whatever it raises comes as it is."""
    for args, kwargs in updates:
        for hook in (hook for hooks in _post_hooks(optimizer) for hook in list(hooks.values())):
            hook(optimizer, args, kwargs)


def _pre_hooks(optimizer: Optimizer) -> tuple[Mapping[int, Any], ...]:
    return _optimizer._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks


def _post_hooks(optimizer: Optimizer) -> tuple[Mapping[int, Any], ...]:
    return optimizer._optimizer_step_post_hooks, _optimizer._global_optimizer_post_hooks


def keep_scale_from(optimizer: Optimizer) -> None:
    """Let a gradient scaler unscale by itself and skip updates by itself, instead of leaving both to fused kernels."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def forget_scaler(optimizer: Optimizer) -> None:
    """Remove what a gradient scaler hands to an optimizer and leaves there when the update raises."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


def record_allocations(enabled: bool, most_entries: int) -> None:
    """Let the CUDA allocator keep a history of that many entries, with their Python stacks, or forget it."""
    torch.cuda.memory._record_memory_history("all" if enabled else None, stacks="python", max_entries=most_entries)


def dump_allocations(path: str) -> None:
    """Write the CUDA allocator's state and history. Raises ``OSError``."""
    torch.cuda.memory._dump_snapshot(path)


def profiles() -> bool:
    """Return whether a profiler is on."""
    return bool(_profiler._is_profiler_enabled)


def read_profile(text: str, zero_ns: int) -> list[dict[str, Any]]:
    """Return the events of a profile that was exported; ``ts`` is then in microseconds since the zero of a clock.

    Args:
        text: of the file.
        zero_ns: where that zero lies, in nanoseconds since 1970.
    """
    profile = json.loads(text)
    later_us = (profile.get("baseTimeNanoseconds", 0) - zero_ns) / 1000
    events: list[dict[str, Any]] = profile["traceEvents"]
    return [event | {"ts": round(event["ts"] + later_us, 3)} for event in events]
