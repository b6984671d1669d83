"""Every private part of another package that is used is there and does what is relied on; what moved is named."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ipyparallel
import ipyparallel.engine.kernel
import pytest
import torch
from horovod.torch import mpi_ops
from ipyparallel.client.asyncresult import AsyncResult
from ipyparallel.engine.datapub import ZMQDataPublisher
from jupyter_client.session import Session
from torch import Tensor, nn

import gpumem_nb
from gpumem_nb.internals import (
    horovod_internals,
    ipykernel_internals,
    ipyparallel_internals,
    plotly_internals,
    torch_internals,
)

PACKAGE = Path(gpumem_nb.__file__).parent
Check = Callable[[], Any]
CHECKS: list[tuple[str, str, Check]] = []


def checks(package: str, what: str) -> Callable[[Check], Check]:
    """What stands below checks this part of that package."""

    def add(check: Check) -> Check:
        CHECKS.append((package, what, check))
        return check

    return add


@contextmanager
def moved(package: str, what: str) -> Iterator[None]:
    """Whatever goes wrong inside means that this part of that package moved."""
    checked_with = ", ".join(globals()[f"{package}_internals"].CHECKED_WITH)
    try:
        yield
    except Exception as error:
        raise AssertionError(
            f"{package} {version(package)}: {what} has moved ({type(error).__name__}: {error}). "
            f"gpumem_nb/internals/{package}_internals.py was checked with {checked_with}."
        ) from error


def must(condition: object, why: str) -> None:
    if not condition:
        raise AssertionError(why)


# torch ----------------------------------------------------------------------------------------------------------


@checks("torch", "Tensor._cdata and UntypedStorage._cdata")
def addresses() -> None:
    tensor = torch.ones(4)
    storages = tensor.untyped_storage(), tensor[1:].untyped_storage()
    must(torch_internals.address(storages[0]) == torch_internals.address(storages[1]), "views have other storages")
    must(torch_internals.address(tensor) != torch_internals.address(tensor[1:]), "views are the same tensor")
    must(torch_internals.address(storages[0]) != torch_internals.address(torch.ones(4).untyped_storage()), "all alike")


@checks("torch", "Tensor._version")
def versions() -> None:
    tensor = torch.ones(2)
    before = torch_internals.version(tensor)
    tensor[:1].add_(1)
    must(torch_internals.version(tensor) == before + 1, "a change in place through a view is not counted")


@checks("torch", "Module._buffers")
def buffers() -> None:
    norm = nn.BatchNorm1d(2)
    names = torch_internals.buffers_by_name(norm)
    must(set(names) == {"running_mean", "running_var", "num_batches_tracked"}, str(set(names)))
    names["running_mean"] = mean = torch.full((2,), 7.0)
    must(norm.running_mean is mean, "what is put into the dict is not the module's")


@checks("torch", "torch.nn.modules.batchnorm._NormBase")
def norms() -> None:
    kinds = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.InstanceNorm1d(2)]
    must(torch_internals.batch_norms(nn.Sequential(nn.Linear(2, 2), *kinds)) == kinds, "other modules are meant")


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


class Mode(torch_internals.TorchDispatchMode):
    """Counts operators."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@checks("torch", "torch.utils._python_dispatch")
def modes() -> None:
    before, mode = torch_internals.count_modes(), Mode()  # type: ignore[no-untyped-call]  # torch's
    mode.__enter__()  # type: ignore[no-untyped-call]
    torch.ones(1)
    inside = torch_internals.count_modes()
    torch_internals.leave_mode()
    torch.ones(1)
    must((mode.seen, inside, torch_internals.count_modes()) == (1, before + 1, before), "modes are counted otherwise")


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
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
        must(not torch_internals.has_step_hooks(optimizer), "hooks are seen where none are")
        getattr(optimizer, register)(lambda *_: None)
        must(torch_internals.has_step_hooks(optimizer), f"what {register} registers is not seen")


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


@checks("torch", "torch.cuda.memory._record_memory_history and _dump_snapshot")
def allocations() -> None:
    signature(torch.cuda.memory._record_memory_history).bind("all", stacks="python", max_entries=1)
    signature(torch.cuda.memory._dump_snapshot).bind("file")


# Horovod --------------------------------------------------------------------------------------------------------

ALONE = """
import json, torch, horovod.torch as hvd
from gpumem_nb.internals import horovod_internals as internals
seen = []
def noted(what, value):
    seen.append(what)
    return value
internals.wrap_starts(lambda start, own_name, kind: lambda *a, **k: noted(kind, start(*a, **k)))
internals.wrap_nameless_starts(lambda start, kind: lambda *a: noted(kind, start(*a)))
internals.wrap_wait(lambda wait, done: lambda handle: noted(f"wait {done(handle) in (0, 1)}", wait(handle)))
internals.wrap_shutdown(lambda shutdown: lambda: noted("shutdown", shutdown()))
hvd.init()
hvd.allreduce(torch.ones(2)), hvd.grouped_allreduce([torch.ones(2)]), hvd.broadcast(torch.ones(1), 0)
hvd.allgather(torch.ones(1)), hvd.grouped_allgather([torch.ones(1)]), hvd.alltoall(torch.ones(1))
hvd.reducescatter(torch.ones(1)), hvd.grouped_reducescatter([torch.ones(1)])
hvd.barrier(), hvd.join()
internals.end_threads()
try:
    hvd.allreduce(torch.ones(1))
except Exception as error:
    seen.append(f"says so: {internals.says_shut_down(error)}")
print("\\n" + json.dumps(seen))
"""


@checks("horovod", "what starts a collective in horovod.torch.mpi_ops")
def starts() -> None:
    for start in horovod_internals.KINDS:
        must("name" in signature(getattr(mpi_ops, start)).parameters, f"{start} takes no name")


@checks("horovod", "what waits in a collective and what ends Horovod's threads")
def alone() -> None:
    alone = os.environ | {"OMPI_MCA_btl": "self", "PYTHONPATH": str(PACKAGE.parent)}
    answer = subprocess.run([sys.executable, "-c", ALONE], env=alone, capture_output=True, text=True, check=False)
    must(answer.returncode == 0, answer.stderr)
    seen = json.loads(answer.stdout.splitlines()[-1])
    for kind in (*horovod_internals.KINDS.values(), *horovod_internals.NAMELESS, "shutdown", "says so: True"):
        must(kind in seen, f"{kind} is not noticed: {seen}")
    must("wait False" not in seen and seen.count("wait True") >= 9, f"not every wait is noticed: {seen}")


# ipyparallel ----------------------------------------------------------------------------------------------------


class Socket:
    """Takes what is sent, as a ZMQ socket would."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []

    def send_multipart(self, parts: list[Any], **options: Any) -> None:
        self.sent.append(parts)


@checks("ipyparallel", "the engine's data_pub")
def publishing() -> None:
    session, socket = Session(key=b"key"), Socket()
    shell = SimpleNamespace(data_pub=ZMQDataPublisher(session=session, pub_socket=socket))
    asked = session.msg("apply_request")
    shell.data_pub.set_parent(session.msg("another_request"))
    ipyparallel_internals.publish_beside(SimpleNamespace(shell=shell), asked, {"pulse": 1})
    (parts,) = socket.sent
    message = session.deserialize(session.feed_identities(parts)[1])
    must(message["parent_header"]["msg_id"] == asked["header"]["msg_id"], "it belongs to another request")
    must(message["content"] == {"keys": ["pulse"]}, f"{message['content']} was sent")
    source = Path(ipyparallel.engine.kernel.__file__).read_text()
    must("self.shell.data_pub = " in source, "the shell has no data_pub")


@checks("ipyparallel", 'AsyncResult.metadata["data"]')
def beside() -> None:
    client = ipyparallel.client.client
    must(client.Metadata()["data"] == {}, "metadata hold no data")
    must(isinstance(AsyncResult.metadata, property), "an answer has no metadata")
    answer = SimpleNamespace(metadata=client.Metadata(data={"pulse": 1}))
    must(ipyparallel_internals.published_beside(answer) == {"pulse": 1}, "data are not found")


@checks("ipyparallel", "Client.history")
def history() -> None:
    must("history" in ipyparallel.Client.class_traits(), "there is none")
    client = SimpleNamespace(history=["a", "b"])
    ipyparallel_internals.forget_sent(client)
    must(client.history == [], "it is not forgotten")


# ipykernel ------------------------------------------------------------------------------------------------------


@checks("ipykernel", "shell.parent_header")
def parent() -> None:
    from ipykernel.zmqshell import ZMQInteractiveShell

    must(isinstance(ZMQInteractiveShell.parent_header, property), "the shell does not tell who asked")


@checks("ipykernel", "Kernel.pre_handler_hook and post_handler_hook")
def hooks() -> None:
    from ipykernel import kernelbase

    source = Path(kernelbase.__file__).read_text()
    for name in ("pre_handler_hook", "post_handler_hook"):
        must(hasattr(kernelbase.Kernel, name) and f"self.{name}()" in source, f"{name} is not called")


@checks("ipykernel", "Kernel.set_parent")
def set_parent() -> None:
    from ipykernel.kernelbase import Kernel

    kernel = Kernel()  # type: ignore[no-untyped-call]  # ipykernel's
    ipykernel_internals.speak_for_no_request(kernel)
    parent = kernel.get_parent()  # type: ignore[no-untyped-call]
    must(parent == {}, "the thread speaks for a request")


# plotly ---------------------------------------------------------------------------------------------------------


@checks("plotly", "FigureWidget's get_state, _data and _layout_obj")
def figure() -> None:
    figure = plotly_internals.LiveFigure(data=[{"type": "scatter", "y": [1]}])
    figure.plotly_update({"y": [[1, 2, 3]]}, {"title.text": "now"})
    state = figure.get_state()
    must(list(state["_widget_data"][0]["y"]) == [1, 2, 3], f"the page gets {state['_widget_data']}")
    must(state["_widget_layout"]["title"]["text"] == "now", f"the page gets {state['_widget_layout']}")
    must("_widget_data" not in figure.get_state(key="_view_name"), "more than was asked for")


@pytest.mark.parametrize(
    ("package", "what", "check"), CHECKS, ids=[f"{package}: {what}" for package, what, _ in CHECKS]
)
def test_nothing_has_moved(package: str, what: str, check: Check) -> None:
    with moved(package, what):
        check()


def test_what_moved_is_named_with_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim.Optimizer, "register_step_pre_hook")
    checked_with = ", ".join(torch_internals.CHECKED_WITH)
    with pytest.raises(AssertionError, match="hooks of an optimizer has moved") as caught:
        test_nothing_has_moved("torch", "hooks of an optimizer", step_hooks)
    assert f"torch {version('torch')}" in str(caught.value)
    assert f"checked with {checked_with}" in str(caught.value)


@pytest.mark.parametrize("package", ["ipykernel", "ipyparallel", "plotly"])
def test_the_version_that_the_checks_install_was_checked(package: str) -> None:
    constraints = (PACKAGE.parent / "constraints.txt").read_text().splitlines()
    (wanted,) = [line.partition("==")[2] for line in constraints if line.startswith(f"{package}==")]
    assert wanted in globals()[f"{package}_internals"].CHECKED_WITH


def test_nobody_else_imports_a_private_part() -> None:
    """What ``ruff`` (SLF001) sees of attributes, for imports."""
    foreign = ("torch", "horovod", "ipyparallel", "ipykernel", "plotly")
    private = []
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name == "internals":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            private += [
                f"{file.relative_to(PACKAGE)}: {name}"
                for name in names
                if name.partition(".")[0] in foreign and "._" in name
            ]
    assert private == []
