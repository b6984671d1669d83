"""All that tests reach inside the toolkit, by what they need: a test says what it wants, here is where it lies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ipywidgets.widgets import widget

from gpumem_nb import session as session_module
from gpumem_nb.cluster import ranks, resources, watch
from gpumem_nb.cluster.launchers import ipyparallel_cluster
from gpumem_nb.cluster.ranks import Ranks
from gpumem_nb.kernel import foreground
from gpumem_nb.kernel.questions import predicting
from gpumem_nb.kernel.snapshot_plan import SnapshotPlan
from gpumem_nb.kernel.training import stalls
from gpumem_nb.planning import instead
from gpumem_nb.planning.prediction import Prediction
from gpumem_nb.session import Session
from gpumem_nb.shared import cluster_records
from gpumem_nb.shared.messages import RankInfo
from gpumem_nb.shared.processes import Identity
from gpumem_nb.shared.units import DEFAULT_SEED

# Sessions -------------------------------------------------------------------------------------------------------------


def running() -> Session | None:
    """The session of this process, also one whose ranks are gone; ``None`` when there is none."""
    return session_module._current


def stop_running() -> None:
    """End the session of this process, if there is one."""
    session = running()
    if session is not None:
        session.stop()


def forget_sessions() -> None:
    """Make this process one in which none was started."""
    stop_running()
    session_module._latest = None


def end_by(monkeypatch: pytest.MonkeyPatch, session: Session, instead: Callable[[Callable[[], None]], None]) -> None:
    """Let the session's ranks be ended by something else, which is given the usual way."""
    usual = session._life._shut_down
    monkeypatch.setattr(session._life, "_shut_down", lambda: instead(usual))


def claim(monkeypatch: pytest.MonkeyPatch, session: Session, infos: list[RankInfo]) -> None:
    """Let the notebook believe this of its ranks."""
    monkeypatch.setattr(session._life.ranks, "infos", infos)
    monkeypatch.setattr(session._life.cluster.inspection, "_ranks", tuple(infos))


def predicted_by_small_steps(session: Session, knobs: dict[str, Any]) -> Prediction:
    """What is said before a whole step has confirmed it, or where that would take too long."""
    predicting = session._life.cluster.predicting
    settings = predicting._checked(knobs)
    return predicting.by_small_steps(settings, [settings.batch_size])[0]


def give_time(patch: pytest.MonkeyPatch, times: float) -> None:
    """Multiply the time limits after which this process goes on without an answer."""
    for module, name in (
        (ranks, "INTERRUPT_TIMEOUT_S"),
        (ranks, "REJOIN_TIMEOUT_S"),
        (foreground, "_OUTPUT_TIMEOUT_S"),
        (foreground, "_AHEAD_TIMEOUT_S"),
        (stalls, "LATE_TIMEOUT_S"),
        (watch, "VERDICT_TIMEOUT_S"),
        (ipyparallel_cluster, "EXIT_CODE_TIMEOUT_S"),
        (instead, "TIMEOUT_S"),
        (predicting, "LONGEST_S"),
        (predicting, "LONGEST_GUESSED_S"),
    ):
        patch.setattr(module, name, times * getattr(module, name))


# Processes and what they leave on disk --------------------------------------------------------------------------------


def processes_of(session: Session) -> tuple[Identity, ...]:
    """Everything that the session started and that is recorded by now: controller, mpiexec, its helpers, ranks."""
    session._life.ranks._launched.record_all()
    return session._life.ranks._launched.processes


def mpiexec_of(session: Session) -> int:
    """The launcher's pid."""
    mpiexec = session._life.ranks._launched.starter
    assert mpiexec is not None
    return mpiexec.pid


def controller_of(session: Session) -> int:
    """The pid of ipyparallel's controller."""
    controller = session._life.ranks._launched.controller
    assert controller is not None
    return controller.pid


def silent_ones_of(session: Session) -> list[Identity]:
    """Processes on this host that a session must survive the silence of: all that must live, but the launcher."""
    launched = session._life.ranks._launched
    return [*(who for who in launched.essential if who != launched.starter), *launched.remote_hosts.connections]


def folders_of(session: Session) -> list[Path]:
    """Those of the session's processes: connection files, Open MPI's own."""
    return [Path(folder) for folder in session._life.ranks._launched._record.folders]


def record_of(session: Session) -> Path:
    """The file that says to other notebooks what runs, and to the next one what to clean up."""
    return session._life.ranks._launched._record_path


def connection_files_of(session: Session) -> Path:
    """The folder with the keys of the session's engines and clients."""
    return session._life.ranks._launched.profile / "security"


def records_of_this_process() -> list[cluster_records.Record]:
    """What the records on this machine say that this process has started."""
    return [record for _, record in cluster_records._here() if record.kernel.pid == os.getpid()]


def here_is(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let this machine have that name."""
    monkeypatch.setattr(resources, "_is_here", lambda host: host == name)


# For kernels of their own, which cannot import tests: expressions for the session of that name.


def folders_expression(session: str) -> str:
    """As :func:`folders_of`, as strings."""
    return f"list({session}._life.ranks._launched._record.folders)"


def traces_expression(session: str) -> str:
    """The record's path, the folders and ``(pid, started)`` of every process."""
    launched = f"{session}._life.ranks._launched"
    return (
        f"({launched}.record_all(), str({launched}._record_path), {launched}._record.folders, {launched}.processes)[1:]"
    )


def latest_snapshot_expression(session: str) -> str:
    """The newest automatic snapshot that is whole, or ``None``."""
    return f"{session}._life.snapshots.latest"


# What is under way ----------------------------------------------------------------------------------------------------


def ranks_have_requests(session: Session) -> bool:
    """Whether a rank has not answered something, be it in the background."""
    return any(call.pending() for call in list(session._life.ranks._calls))


def somebody_waits_for_ranks(session: Session) -> bool:
    """Whether a rank has a request of somebody who waits for its answer."""
    return session._life.foreground.busy and ranks_have_requests(session)


def printed_so_far(session: Session) -> str:
    """What the ranks printed in requests that are not answered yet."""
    return "".join(text for call in list(session._life.ranks._calls) for text in call.outputs())


def wait_for_steps(session: Session, steps: int) -> None:
    """Wait until training has got that far."""
    while session.history.steps < steps:
        assert not session.ended, session.ended
        time.sleep(0.005)


def now_and_under_way(session: Session) -> tuple[int, float, int]:
    """Of one moment: steps done, the session's clock in seconds, and steps that the ranks have been asked for."""
    with session._life.training._state.locked():
        return session.history.steps, session.history.now_s(), session._life.training._in_flight.steps


# Automatic snapshots --------------------------------------------------------------------------------------------------


def snapshots_of(session: Session) -> SnapshotPlan:
    """When they are taken, where they lie, and of which load."""
    return session._life.snapshots


def cost_of(plan: SnapshotPlan) -> tuple[float, float]:
    """Seconds for which snapshots held training up, and seconds of training."""
    return plan._cost_s, plan._trained_s


# Inside a rank: expressions and code for Session.run ------------------------------------------------------------------

_RANK = "__import__('gpumem_nb.engine.rank', fromlist=['_trainer'])"
TRAINER = f"{_RANK}._trainer"
DEVICE = f"{_RANK}._device"
# Behind a barrier: Horovod's thread holds the votes of the latest step (232 bytes with 18 weights) for a moment longer.
_READING = "__import__('gpumem_nb.engine.device_look', fromlist=['reading']).reading()"
LIVE = f"(hvd.barrier(), {_READING}.live_bytes)[1]"
RESERVED = f"{_READING}.reserved_bytes"
RANDOM = f"{TRAINER}.random.state.torch.numpy().tobytes()"
POSITION = f"{TRAINER}.stream.position"
STEPS = f"{TRAINER}.steps"


COLLECT = "__import__('gc').collect() and None"
"""What was loaded before hangs together in circles: until this, its bytes are live."""


def hooks_expression(model: str) -> str:
    """How many hooks there are on the modules of the model of that name, and on its parameters."""
    on_modules = f"sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in {model}.modules())"
    return f"{on_modules}, sum(len(p._post_accumulate_grad_hooks or ()) for p in {model}.parameters())"


FORGET_DEVICE_USE = "import gpumem_nb.engine.device_look as _look; _look._use = None"
"""What was last read of the device by NVML is not known any more."""

INSIDE = """
import functools
from gpumem_nb.engine import device_look, rank as of_ranks
from gpumem_nb.engine.step.trainer import Trainer

def the_trainer():
    return of_ranks._trainer

def random_bytes():
    state = the_trainer().random.state
    _, keys, *rest = state.numpy
    return state.torch.numpy().tobytes() + keys.tobytes() + repr((state.python, rest)).encode()

def live_bytes():
    return device_look.reading().live_bytes

def after_each_step(note):
    original = getattr(Trainer._step, "__wrapped__", Trainer._step)

    @functools.wraps(original)
    def step(trainer, *arguments):
        outcome, sample = original(trainer, *arguments)
        if not outcome.discarded:
            note(trainer)
        return outcome, sample

    Trainer._step = step
"""
"""Code that defines ``the_trainer()``, ``random_bytes()``, ``live_bytes()`` and ``after_each_step(note)``.

``random_bytes()`` is the state of the random numbers that training draws.

``note(trainer)`` is called after each step that is not undone.
"""


run_unrecorded = eval("lambda code: exec(code, __import__('gpumem_nb.engine.rank', fromlist=['rank']).namespace())")
"""Runs code among a rank's variables, but as a function does: an export knows nothing of it."""


def forget_cells(session: Session) -> None:
    """Let exports know that nothing is left on the ranks of what cells have defined."""
    session._life._origin.cells.started(DEFAULT_SEED)


def put_back(names: Iterable[str]) -> str:
    """Code that undoes ``after_each_step``, deletes all variables but those of these names, and sets rank and size."""
    return f"""
from gpumem_nb.engine.step.trainer import Trainer
Trainer._step = getattr(Trainer._step, "__wrapped__", Trainer._step)
for _name in {{*globals()}} - {set(names)!r}:
    del globals()[_name]
_link = __import__("gpumem_nb.engine.link.communicator", fromlist=["here"]).here()
rank, size = _link.rank, _link.size  # which a cell may have used for something else
del _link
__import__("gc").unfreeze()
{COLLECT}
"""


@contextmanager
def gradients_in_many_pieces(session: Session) -> Iterator[None]:
    """The gradients of what is loaded inside are sent in many buckets, as those of a large model are."""
    usual = session.settings.bucket_mib
    session.set(bucket_mib=256 / 2**20)
    try:
        yield
    finally:
        session.set(bucket_mib=usual)


# Parts driven by hand -------------------------------------------------------------------------------------------------


def ranks_without_processes(calls: list[Any], post: Callable[..., Any]) -> Ranks:
    """Ranks with these requests under way; ``post`` takes the place of sending one more."""
    ranks = object.__new__(Ranks)
    ranks.size = 2
    ranks._calls, ranks._joining, ranks._death, ranks._watch = calls, None, None, None
    ranks._sending = threading.RLock()
    ranks._entry = SimpleNamespace(call=None)
    ranks._launched = SimpleNamespace(stop=lambda: None)  # type: ignore[assignment]
    ranks._post = post  # type: ignore[method-assign]
    return ranks


def shown_widget(bundle: dict[str, Any]) -> Any:
    """The widget that an output refers to."""
    model = bundle["application/vnd.jupyter.widget-view+json"]["model_id"]
    return widget._instances[model]


def widgets_in(view: Any) -> list[Any]:
    """A widget and all that lie in it."""
    return [view, *(one for child in getattr(view, "children", ()) for one in widgets_in(child))]
