"""Checks of torch's private parts; tests/unit/test_internals.py runs them."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from gpumem_nb.internals import (
    torch_compile_internals,
    torch_dispatch_internals,
    torch_foreach_internals,
    torch_internals,
)
from tests.unit.private_parts import checks, must


@checks("torch", "Tensor._cdata and UntypedStorage._cdata")
def addresses() -> None:
    tensor = torch.ones(4)
    storages = tensor.untyped_storage(), tensor[1:].untyped_storage()
    must(torch_internals.address(storages[0]) == torch_internals.address(storages[1]), "views have other storages")
    must(torch_internals.address(tensor) != torch_internals.address(tensor[1:]), "views are the same tensor")
    must(torch_internals.address(storages[0]) != torch_internals.address(torch.ones(4).untyped_storage()), "all alike")


@checks("torch", "Tensor._base")
def bases() -> None:
    tensor = torch.ones(4)
    with torch.no_grad():
        must(torch_internals.base_of(tensor[1:]) is tensor, "a view does not know of what it is one")
    must(torch_internals.base_of(tensor) is None, "a tensor is a view")


@checks("torch", "Tensor._version")
def versions() -> None:
    tensor = torch.ones(2)
    before = torch_internals.version(tensor)
    tensor[:1].add_(1)
    must(torch_internals.version(tensor) == before + 1, "a change in place through a view is not counted")


@checks("torch", "_MultiProcessingDataLoaderIter._pin_memory_thread and what ends it")
def pinning() -> None:
    ended = inspect.getsource(torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers)
    for part in (
        'hasattr(self, "_pin_memory_thread")',
        "self._pin_memory_thread_done_event.set()",
        "self._worker_result_queue.put((None, None))",
        "self._pin_memory_thread.join()",
    ):
        must(part in ended, f"a loader's iterator ends without {part}")
    torch_internals.end_pinning(None, 1.0)


@checks("torch", "Module._buffers")
def buffers() -> None:
    norm = nn.BatchNorm1d(2)
    names = torch_internals.buffers_by_name(norm)
    must(set(names) == {"running_mean", "running_var", "num_batches_tracked"}, str(set(names)))
    names["running_mean"] = mean = torch.full((2,), 7.0)
    must(norm.running_mean is mean, "what is put into the dict is not the module's")


@checks("torch", "torch.nn.modules.batchnorm._NormBase")
def batch_norms() -> None:
    kinds = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.InstanceNorm1d(2)]
    must(torch_internals.batch_norms(nn.Sequential(nn.Linear(2, 2), *kinds)) == kinds, "other modules are meant")


@checks("torch", "Module._modules, _parameters and the dicts of hooks")
def module_dicts() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    must(list(torch_internals.children_by_name(net).values()) == [net[0]], "children lie elsewhere")
    must(set(torch_internals.weights_by_name(net[0])) == {"weight", "bias"}, "weights lie elsewhere")
    forward = net.register_forward_pre_hook, net.register_forward_hook
    backward = net.register_full_backward_pre_hook, net.register_full_backward_hook
    found = [register(lambda *_: None).id for register in (*forward, *backward)]
    must(
        sorted(key for hooks in torch_internals.hooks_of(net) for key in hooks) == sorted(found), "hooks lie elsewhere"
    )
    must("training" not in torch_internals.MODULES_OWN, "training is torch's own")
    must("_modules" in torch_internals.MODULES_OWN, "torch's own attributes are not known")


@checks("torch", "hooks of weight_norm and spectral_norm")
def weights_made_anew() -> None:
    with warnings.catch_warnings(action="ignore"):  # torch would rather see parametrizations
        norms = nn.utils.weight_norm(nn.Linear(2, 2)), nn.utils.spectral_norm(nn.Linear(2, 2))
    must([torch_internals.made_anew(norm) for norm in norms] == [{"weight"}] * 2, "the hooks do not tell their weight")


@checks("torch", "torch.autograd.grad_mode._unsafe_preserve_version_counter")
def changes_not_counted() -> None:
    tensor = torch.ones(2)
    with torch_internals.unversioned([tensor]):
        tensor.add_(1)
    must(torch_internals.version(tensor) == 0, "a change in place was counted")


@checks("torch", "torch.func looks up torch.autograd.graph.disable_saved_tensors_hooks, and its hooks' stack")
def transforms_under_hooks() -> None:
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: torch.ones(2))
    with hooks, torch_internals.func_transforms_allowed():
        slope = torch.func.grad(lambda x: (x * x).sum() * torch_internals.hooks_are_allowed())(torch.ones(2))
        must(not slope.any(), "saved-tensor hooks are allowed inside torch.func.grad")
        must(torch_internals.hooks_are_allowed() and not saved, "hooks were asked, or are not allowed afterwards")
        torch.ones(2, requires_grad=True).square()
    must(len(saved) == 1, "hooks are not asked after torch.func.grad")


@checks("torch", "Module._compiled_call_impl, OptimizedModule._orig_mod, _torchdynamo_orig_callable")
def compiled_modules() -> None:
    compiled, in_place, forward = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    must(not torch_internals.is_compiled(compiled), "every module is taken for compiled")
    in_place.compile(backend="eager")
    forward.forward = torch.compile(forward.forward, backend="eager")  # type: ignore[method-assign]
    for module in (torch.compile(compiled, backend="eager"), in_place, forward):
        must(torch_internals.is_compiled(module), "a compiled module is not known")  # type: ignore[arg-type]
    wrapped: Any = torch.compile(compiled, backend="eager")
    must(torch_internals.uncompiled(wrapped) is compiled, "what was compiled lies elsewhere")


@checks("torch", "torch._dynamo.callback_handler, its counters, and the limit of compilations")
def compilations() -> None:
    told = list[torch_compile_internals.Compilation]()
    function = torch_compile_internals.compiled(lambda x, word: x * len(word), "eager")
    with torch_compile_internals.listened(told.append), torch_compile_internals.strict(2):
        for size, word in ((3, "a"), (4, "a"), (4, "bb")):
            function(torch.ones(size), word)
        seen = [(one.again, one.graphs, one.breaks) for one in told]
        must(seen == [(False, 1, 0), (True, 1, 0)], f"of two compilations it is told {told}")
        try:
            function(torch.ones(4), "ccc")
        except torch_compile_internals.TOO_OFTEN:
            told.clear()
    must(not told, "a third compilation is none too many")
    function(torch.ones(4), "ccc")
    must(not told, "compilations are told of afterwards")


@checks("torch", "_schedulers of ChainedScheduler, and torch.utils.data._utils.signal_handling")
def schedulers_and_loaders() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
    inner = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    outer = torch.optim.lr_scheduler.ChainedScheduler([inner], optimizer)
    must(list(vars(outer)[torch_internals.CHAINED]) == [inner], "schedulers lie elsewhere")
    must(torch_internals.CHAINED in outer.state_dict(), "their states lie elsewhere")
    handler = torch.utils.data._utils.signal_handling._set_SIGCHLD_handler
    must(torch_internals.is_handler_of_loaders(handler), "the handler lies elsewhere")


class Doubled(torch.autograd.Function):
    """A node written in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@checks("torch", "_raw_saved_* of graph nodes")
def raw() -> None:
    x = torch.ones(2, requires_grad=True)
    doubled: Callable[[Tensor], Tensor] = Doubled.apply
    for result in (x.exp(), doubled(x)):
        saved = list(torch_internals.saved_raw(result.grad_fn))
        must([one.data.tolist() for one in saved] in ([result.tolist()], [x.tolist()]), f"{saved} is saved")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: "packed", lambda packed: x):
        result = x.sin()
    (hooked,) = torch_internals.saved_raw(result.grad_fn)
    must(hooked.data == "packed" and hooked.unpack_hook("packed") is x, "hooks do not show")


@checks("torch", "torch._C._current_graph_task_id")
def backward() -> None:
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(torch_internals.in_backward()))
    x.sum().backward()
    must((seen, torch_internals.in_backward()) == ([True], False), f"inside {seen}, outside the opposite")


@checks("torch", "torch._C._current_autograd_node")
def node() -> None:
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(torch_internals.backward_node()))
    (x.sin() * 2).sum().backward()
    (x.sin() * 2).sum().backward()
    must(len(set(seen)) == 2 and None not in seen, f"{seen} are nodes of two backwards")
    must(torch_internals.backward_node() is None, "a node is under way outside of backward")


@checks("torch", "saved_tensors_hooks.__enter__")
def entering() -> None:
    entered = []

    def enter(own: Any, hooks: Any) -> None:
        entered.append(hooks.pack_hook("x"))
        own(hooks)

    with (
        torch_internals.hooks_entered_by(enter),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x),
    ):
        must(torch_internals.innermost_hooks() is not None, "torch's own function did not enter them")
    must(entered == ["xx"], "nobody asked")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 3, lambda x: x):
        must(entered == ["xx"], "it was not put back")


@checks("torch", "the stack of saved-tensor hooks (torch._C._autograd)")
def hook_stack() -> None:
    before = torch_internals.innermost_hooks()
    torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x).__enter__()
    must(torch_internals.innermost_hooks() != before, "hooks that were entered are not seen")
    torch_internals.leave_hooks()
    must(torch_internals.innermost_hooks() == before, "they were not left")


class Mode(torch_dispatch_internals.TorchDispatchMode):
    """Counts operators."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@checks("torch", "torch.utils._python_dispatch")
def modes() -> None:
    before, mode = torch_dispatch_internals.count_modes(), Mode()  # type: ignore[no-untyped-call]  # torch's
    mode.__enter__()  # type: ignore[no-untyped-call]
    torch.ones(1)
    inside = torch_dispatch_internals.count_modes()
    torch_dispatch_internals.leave_mode()
    torch.ones(1)
    must(
        (mode.seen, inside, torch_dispatch_internals.count_modes()) == (1, before + 1, before),
        "modes are counted otherwise",
    )


@checks("torch", "the code around dispatch modes")
def files() -> None:
    missing = [file for file in torch_internals.FILES_AROUND_MODES if not Path(file).exists()]
    must(not missing, f"{missing} is not there")


@checks("torch", "autocast's depth and cache")
def autocast() -> None:
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    try:
        x @ weight
        torch_internals.leave_autocast()
        must(torch.autocast_increment_nesting() == 1, "autocast's depth did not go back to zero")
        torch.autocast_decrement_nesting()
    finally:
        torch.set_autocast_enabled("cpu", False)


@checks("torch", "hooks of an optimizer")
def step_hooks() -> None:
    globally = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    for register, of_all in zip(("register_step_pre_hook", "register_step_post_hook"), globally, strict=True):
        optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
        must(not torch_internals.has_step_hooks(optimizer), "hooks are seen where none are")
        getattr(optimizer, register)(lambda *_: None)
        must(torch_internals.has_step_hooks(optimizer), f"what {register} registers is not seen")
        handle = of_all(lambda *_: None)
        try:
            must(torch_internals.has_step_hooks(torch.optim.SGD([torch.ones(1)])), f"{register} for all is not seen")
        finally:
            handle.remove()


@checks("torch", "step hooks that are held back")
def held_back_hooks() -> None:
    ran: list[str] = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    handles = [
        optimizer.register_step_pre_hook(lambda *_: ran.append("before")),
        optimizer.register_step_post_hook(lambda *_: ran.append("after")),
        register_optimizer_step_pre_hook(lambda *_: ran.append("before all")),
        register_optimizer_step_post_hook(lambda *_: ran.append("after all")),
    ]
    try:
        optimizer.step()
        inside, ran[:] = list(ran), []
        with torch_internals.step_hooks_held_back(optimizer, pre=False) as updates:
            optimizer.step()
        must(ran == ["before all", "before"], f"held back, these ran: {ran}")
        torch_internals.run_post_hooks(optimizer, updates)
        must(ran == inside == ["before all", "before", "after", "after all"], f"in other order: {ran}, {inside}")
        ran.clear()
        with torch_internals.step_hooks_held_back(optimizer, pre=True):
            optimizer.step()
        must(not ran, f"all held back, these ran: {ran}")
        optimizer.step()
        must(ran == inside, "hooks did not come back")
    finally:
        for handle in handles:
            handle.remove()


@checks("torch", "torch._foreach_norm")
def norms() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([float("nan")]), torch.tensor([[3.0, 4.0]]).bfloat16()]
    values = [norm.item() for norm in torch_foreach_internals.norms_of(tensors)]
    must(values[::2] == [5.0, 5.0] and values[1] != values[1], f"the norms are {values}")
    large = [torch.full((16,), 3e4).half(), torch.ones(4, dtype=torch.float64), torch.full((16,), 3e4).half()]
    values = [round(norm.item()) for norm in torch_foreach_internals.norms_of(large) if norm.isfinite()]
    must(values == [120_000, 2, 120_000], f"the norms are {values}")
    must(torch_foreach_internals.norms_of([]) == (), "nothing has norms")


@checks("torch", "torch.utils._foreach_utils._group_tensors_by_device_and_dtype")
def order_of_clipping() -> None:
    tensors = [torch.ones(3, dtype=kind) for kind in (torch.float32, torch.float64, torch.float32, torch.complex64)]
    found = torch_foreach_internals.type_by_type(tensors)
    places = [next(place for place, one in enumerate(tensors) if one is other) for other in found]
    must(sorted(places) == [0, 1, 2, 3], f"tensors are gone: {places}")
    must(places.index(2) == places.index(0) + 1, f"the order is {places}")
    must(torch_foreach_internals.type_by_type([]) == [], "nothing has an order")


@checks("torch", "torch._amp_foreach_non_finite_check_and_unscale_")
def nonfinite() -> None:
    found, one = torch.zeros(()), torch.ones(())
    large = torch.full((2, 2), 1e300, dtype=torch.float64)
    tensors = [torch.tensor([-0.0, 1e-42, 3e38]), torch.full((4,), 6e4).half(), large.t()]
    before = [tensor.clone() for tensor in tensors]
    torch_foreach_internals.note_nonfinite(tensors, found, one)
    must(found.item() == 0, "large numbers are taken for infinite ones")
    for bad in (math.nan, math.inf, -math.inf):
        torch_foreach_internals.note_nonfinite([*tensors, torch.tensor([0.0, bad]).bfloat16()], found.zero_(), one)
        must(found.item() == 1, f"{bad} is not seen")
    torch_foreach_internals.note_nonfinite(tensors, found, one)
    must(found.item() == 1, "what was found is forgotten")
    pairs = list(zip(tensors, before, strict=True))
    same = [torch.equal(now, then) and torch.equal(now.signbit(), then.signbit()) for now, then in pairs]
    must(all(same), "the tensors hold other bits")


@checks("torch", "_step_supports_amp_scaling, grad_scale and found_inf of optimizers")
def scaling() -> None:
    source = Path(torch.amp.grad_scaler.__file__).read_text()
    for name in ("_step_supports_amp_scaling", "optimizer.grad_scale", "optimizer.found_inf"):
        must(name in source, f"the gradient scaler does not know {name}")
    optimizer = torch.optim.AdamW([torch.ones(1)], lr=1.0, fused=True)
    must(optimizer._step_supports_amp_scaling, "fused kernels take no scale")
    torch_internals.keep_scale_from(optimizer)
    vars(optimizer).update(grad_scale=torch.ones(1), found_inf=torch.ones(1))
    torch_internals.forget_scaler(optimizer)
    must(not {"grad_scale", "found_inf"} & vars(optimizer).keys(), "they stay")
    known = torch.amp.GradScaler("cpu")._per_optimizer_states[id(optimizer)]
    must(known.keys() >= {"stage", "found_inf_per_device"}, "a gradient scaler keeps other things of a step")


@checks("torch", "_is_profiler_enabled, and the clock of a profile that was exported")
def profile_clock() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        began_us = time.perf_counter_ns() / 1000
        torch.ones(2).square()
        ended_us = time.perf_counter_ns() / 1000
        must(torch_internals.profiles(), "it is not seen that one is on")
    must(not torch_internals.profiles(), "one is on for ever")
    zero_ns = max(time.time_ns() - time.perf_counter_ns() for _ in range(5))  # it may be paused between the two
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/profile.json")
        events = torch_internals.read_profile(Path(f"{folder}/profile.json").read_text(), zero_ns)
    (square,) = [event for event in events if event["name"] == "aten::square"]
    must(began_us - 100 < square["ts"] <= square["ts"] + square["dur"] < ended_us + 100, f"{began_us} {square}")


@checks("torch", "torch.cuda.memory._record_memory_history and _dump_snapshot")
def allocations() -> None:
    signature(torch.cuda.memory._record_memory_history).bind("all", stacks="python", max_entries=1)
    signature(torch.cuda.memory._dump_snapshot).bind("file")
