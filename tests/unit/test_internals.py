"""Every private part of another package that is used is there and does what is relied on; what moved is named."""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import cloudpickle
import ipyparallel
import ipyparallel.cluster.launcher
import ipyparallel.engine.kernel
import pytest
import torch
from horovod.torch import mpi_ops
from ipyparallel.client.asyncresult import AsyncResult
from ipyparallel.engine.datapub import ZMQDataPublisher
from jupyter_client.session import Session
from plotly import graph_objects

import gpumem_nb
from gpumem_nb.internals import accelerate_internals as accelerate_internals
from gpumem_nb.internals import (
    bitsandbytes_internals,
    cloudpickle_internals,
    horovod_internals,
    ipykernel_internals,
    ipyparallel_internals,
    plotly_internals,
    torch_internals,
)
from gpumem_nb.internals import lightning_internals as lightning_internals
from gpumem_nb.internals import transformers_internals as transformers_internals
from tests.unit import trainers_private_parts as trainers_private_parts
from tests.unit.private_parts import CHECKS, Check, checks, must
from tests.unit.torchs_private_parts import step_hooks

PACKAGE = Path(gpumem_nb.__file__).parent


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


# bitsandbytes ---------------------------------------------------------------------------------------------------


@checks("bitsandbytes", "the state of an 8-bit AdamW")
def _eight_bits() -> None:
    weight = torch.nn.Parameter(torch.ones(64, 64))
    weight.grad = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
    torchs = torch.optim.AdamW([weight])
    torchs.step()
    eight = bitsandbytes_internals.adamw8bit([weight], 1e-3)
    must(bitsandbytes_internals.is_adamw8bit(eight), f"it is a {type(eight)}")
    bitsandbytes_internals.in_8_bits(eight, dict(torchs.state))
    eight.step()
    back = torch.optim.AdamW([weight])
    bitsandbytes_internals.in_32_bits(back, dict(eight.state))
    torchs.step()
    off = (back.state[weight]["exp_avg"] - torchs.state[weight]["exp_avg"]).abs().max()
    must(off < 0.02 * torchs.state[weight]["exp_avg"].abs().max(), f"its mean is off by {off}")
    must(back.state[weight]["step"] == 2, "it counts otherwise")


# cloudpickle ----------------------------------------------------------------------------------------------------


@checks("cloudpickle", "how functions are made anew")
def _made_functions() -> None:
    cells = {"__name__": "__main__", "scale": 2}
    exec("def scaled(x): return x * scale", cells)
    made = cloudpickle.dumps(cells["scaled"])
    main = vars(sys.modules["__main__"])
    try:
        scaled = cloudpickle_internals.IntoMain(io.BytesIO(made)).load()
        must(scaled.__globals__ is main and main["scale"] == 2, "its variables are those of __main__")
    finally:
        main.pop("scale", None)


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


TIMELINE = """
from mpi4py import MPI  # which keeps Horovod from ending MPI with its first shutdown
import os, sys, time
from pathlib import Path
import torch, horovod.torch as hvd
from gpumem_nb.internals import horovod_internals as internals
hvd.init()
threads = len(os.listdir("/proc/self/task"))
hvd.shutdown()
file = Path(sys.argv[1])
os.environ["HOROVOD_TIMELINE"] = str(file)
hvd.init()
began_us = 1e6 * time.perf_counter()
hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], name="both")
ended_us = 1e6 * time.perf_counter()
hvd.stop_timeline()
text = file.read_text()
hvd.allreduce(torch.ones(2), name="later")
del os.environ["HOROVOD_TIMELINE"]
hvd.shutdown()
hvd.init()
assert file.read_text() == text, "it goes on after its end"
until_s = time.monotonic() + 60  # one that was joined may be there for a moment
while len(os.listdir("/proc/self/task")) != threads:
    assert time.monotonic() < until_s, "a thread is left"
    time.sleep(0.01)
zero_s = max(time.time() - time.perf_counter() for _ in range(5))  # it may be paused between the two
found = list(internals.read_timeline(text, 1e6 * zero_s))
assert {one.tensor for one in found} == {f"grouped_allreduce.both_{number}of2" for number in (1, 2)}, found
assert {"NEGOTIATE_ALLREDUCE", "rank 0 is ready", "ALLREDUCE"} <= {one.name for one in found}, found
assert all(began_us - 100 < one.began_us <= one.ended_us < ended_us + 100 for one in found), (began_us, found, ended_us)
"""


@checks("horovod", "HOROVOD_TIMELINE and the file of a timeline")
def timeline() -> None:
    alone = os.environ | {"OMPI_MCA_btl": "self", "PYTHONPATH": str(PACKAGE.parent)}
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-c", TIMELINE, f"{folder}/timeline.json"]
        answer = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
    must(answer.returncode == 0, answer.stderr)


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


@checks("ipyparallel", "a launcher's _wait_thread")
def waiting() -> None:
    launcher = ipyparallel.cluster.launcher.LocalProcessLauncher
    must("self._wait_thread = Thread(" in inspect.getsource(launcher._start_waiting), "there is none")
    thread = threading.Thread(target=lambda: None)
    thread.start()
    ipyparallel_internals.await_exit_code(SimpleNamespace(_wait_thread=thread), 60.0)
    must(not thread.is_alive(), "it was not waited for")


@checks("ipyparallel", "Client.history")
def history() -> None:
    must("history" in ipyparallel.Client.class_traits(), "there is none")
    client = SimpleNamespace(history=["a", "b"])
    ipyparallel_internals.forget_sent(client)
    must(client.history == [], "it is not forgotten")


@checks("ipyparallel", "Client.metadata")
def late() -> None:
    client = ipyparallel.client.client
    must("self.metadata[msg_id]" in inspect.getsource(client.Client._dispatch_iopub), "output is kept elsewhere")
    must("metadata.pop(" in inspect.getsource(AsyncResult) + inspect.getsource(client), "complete answers keep theirs")
    kept = {"a": client.Metadata(stdout="late\n"), "b": client.Metadata(stdout="another\n")}
    answer = SimpleNamespace(_client=SimpleNamespace(metadata=kept), msg_ids=["a"], done=lambda: True)
    found = [ipyparallel_internals.late_output(answer) for _ in range(2)]
    must(found == ["late\n", ""], f"{found} was found")


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


@checks("ipykernel", "Kernel._allow_stdin")
def allow_stdin() -> None:
    from ipykernel.kernelbase import Kernel

    must("_allow_stdin" in Kernel.class_own_traits(), "a page with a person cannot be told from a program")


@checks("ipykernel", "Kernel._shutdown_message")
def shutdown_message() -> None:
    from ipykernel.kernelbase import Kernel

    source = inspect.getsource(Kernel.shutdown_request)
    made, ended = source.find("self._shutdown_message ="), source.find("_at_shutdown()")
    must(Kernel._shutdown_message is None and 0 <= made < ended, "a kernel that ends cannot be told from others")


@checks("ipykernel", "OutStream.set_thread_parent")
def set_thread_parent() -> None:
    from ipykernel.iostream import OutStream

    must(callable(OutStream.set_thread_parent), "what a thread prints cannot be ascribed")


@checks("ipykernel", "asyncio._set_running_loop")
def running_loop() -> None:
    async def other() -> int:
        with ipykernel_internals.with_running_loop(None):
            return asyncio.run(asyncio.sleep(0, 3))

    must(asyncio.run(other()) == 3, "no other loop runs")


@checks("ipykernel", "Kernel.set_parent")
def set_parent() -> None:
    from ipykernel.kernelbase import Kernel

    kernel = Kernel()  # type: ignore[no-untyped-call]  # ipykernel's
    ipykernel_internals.speak_for_no_request(kernel)
    parent = kernel.get_parent()  # type: ignore[no-untyped-call]
    must(parent == {}, "the thread speaks for a request")


# plotly ---------------------------------------------------------------------------------------------------------


@checks("plotly", "FigureWidget's _esm, a function that makes what initializes and renders")
def script() -> None:
    figure = plotly_internals.LiveFigure()
    must((bundle := figure._plotly.script) == str(graph_objects.FigureWidget._esm), "not plotly's own script")
    must("as default}" in bundle, "it has no default export")
    must(len(figure._esm) < 10_000, "the page cannot load it in an instant")
    must(figure._config["responsive"] and "_responsiveChartHandler" in bundle, "it does not follow its place")


@checks("plotly", "FigureWidget's get_state, _data and _layout_obj")
def figure() -> None:
    figure = plotly_internals.LiveFigure(data=[{"type": "scatter", "y": [1]}])
    figure.plotly_update({"y": [[1, 2, 3]]}, {"title.text": "now"})
    state = figure.get_state()
    must(list(state["_widget_data"][0]["y"]) == [1, 2, 3], f"the page gets {state['_widget_data']}")
    must(state["_widget_layout"]["title"]["text"] == "now", f"the page gets {state['_widget_layout']}")
    must("_widget_data" not in figure.get_state(key="_view_name"), "more than was asked for")
    must(not figure.acknowledged, "no page has drawn it")
    figure.set_state({"_js2py_traceDeltas": {"trace_deltas": [], "trace_edit_id": figure._last_trace_edit_id}})
    must(figure.acknowledged, "a page has said that it drew it")


@checks("plotly", "the version of nbformat, which is all that showing a figure asks of it")
def nbformat_alone() -> None:
    code = """if True:
        import sys, gpumem_nb.ui.panel, plotly.io
        print('jsonschema' in sys.modules)
        plotly.io.renderers.default = 'plotly_mimetype'
        plotly.graph_objects.Figure().show()"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    must(told.startswith("False"), "the panel brings jsonschema, whose import takes as long as all others")
    must("application/vnd.plotly" in told, "a figure cannot be shown")


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


@pytest.mark.parametrize(
    "package", ["accelerate", "bitsandbytes", "ipykernel", "ipyparallel", "lightning", "plotly", "transformers"]
)
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
