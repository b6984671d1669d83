"""The requests that the kernel can send to a rank. One process is one rank, so its state is the module's."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from ..internals.ipyparallel_internals import publish_beside
from ..memory.cuda import record_allocations as record_allocations
from ..memory.cuda import write_snapshot as write_snapshot
from ..memory.device import Device, open_device
from ..shared.allocator_settings import AllocatorSettings
from ..shared.answers import Apart, Pulse
from ..shared.errors import WorkloadError
from ..shared.forecast import Forecasts, Rehearsal
from ..shared.knobs import register_new
from ..shared.messages import (
    Chunk,
    ChunkReply,
    Freed,
    RankConfig,
    RankInfo,
    SnapshotOrder,
    Stored,
    Surroundings,
    Timeline,
)
from ..shared.questions import ModelFacts, StepsAmong, Sweep, SyncLook, TraceOrder, TracePart
from ..shared.settings import Settings
from ..shared.state_file import Header
from ..shared.step_times import StepLanes
from ..shared.workload import Workload, WorkloadInfo
from . import building, device_look, exporting, looks, surroundings
from .attach import attached, found_by_cells, load_objects, named, save_objects, to_keep
from .cells import OfferedNames, attached_names, taken
from .device_look import look as look
from .dry.hollow import of_trainer
from .link import collectives, horovod, pulse, signals
from .link.collectives import check_again as check_trace  # noqa: F401  # whether steps can be traced
from .link.communicator import here, use
from .link.group import among, sweep
from .plain_process import make_plain
from .random_state import seed_all
from .step.parts import as_given
from .step.trainer import Trainer
from .storing import capture, restore
from .storing.snapshots import Snapshots
from .tracing import Tracer

_session_started_s = 0.0  # on the clock of ``time.time``
_device: Device
_pulse: pulse.PulseThread | None = None
_trainer: Trainer | None = None
_names: OfferedNames
_snapshots = Snapshots()
_tracer: Tracer
_checked: restore.Checked | None = None  # between the two phases of resuming


def set_up(config: RankConfig) -> RankInfo:
    """Join the other ranks, take hold of the device, and prove the connection with a real all-reduce."""
    global _session_started_s, _device, _pulse, _names, _tracer
    register_new(config.knobs)
    if torch.get_num_threads() != config.threads:  # once it is set, MKL lets all threads share the smallest work
        torch.set_num_threads(config.threads)
    cpu = config.device == "cpu"
    link, horovod_threads = horovod.join(on_cpu=cpu)
    use(link)
    kernel = namespace()["get_ipython"]().kernel
    _session_started_s = config.epoch_time_s
    signals.take_over(kernel)
    signals.listen_for_nudges()
    if not cpu:
        device_look.check_sharing(link.local_size, torch.cuda.device_count(), horovod.on_nccl())
    _device = open_device("virtual" if cpu else "cuda", link.local_rank, config.memory_limit)
    _device.communicates_on(horovod_threads)
    collectives.greet(_device)

    def publish(request: Any, sent: Pulse) -> None:
        publish_beside(kernel, request, {pulse.KEY: sent})

    _pulse = pulse.PulseThread(
        publish, collectives, step, device_look.reading, device_look.device_use, config.stall_limit_s
    )
    _pulse.start()
    namespace().update(horovod.NAMES, torch=torch, rank=link.rank, size=link.size, device=_device.torch_device)
    make_plain(namespace())
    _names = OfferedNames(namespace())
    _tracer = Tracer(rejoin, on_gpu=not cpu)
    seed_all(config.seed)
    return device_look.rank_info(_device)


def rejoin() -> None:
    """Join the other ranks again after Horovod was shut down; what is trained stays as it is."""
    _device.communicates_on(here().rejoin())
    collectives.greet(_device)
    # Ranks may have come apart in a load, which some had begun with.
    if not here().any_rank(_trainer is None, "nothing loaded") and _trainer:
        _trainer.live.sharing.rejoined(_trainer.live.optimizer, _trainer.steps)


def apart(what: str) -> Apart | None:
    """Return what this rank does while it is apart from the others; ``None`` while it is joined to them.

    A chunk may have been sent before the ranks came apart in another one; of any other request it is told only where
    that happened in it.
    """
    if not (_pulse and here().separated()):
        return None
    return Apart(what or step()[0], collectives.left(pulse.began_s() if what else 0.0))


def step() -> tuple[str, float]:
    """Return the part of the step under way, in words, and when that step began."""
    return _trainer.doing() if _trainer else ("training", 0.0)


def set_stall_limit(seconds: float) -> None:
    """Wait for other ranks no longer than this."""
    if _pulse:
        _pulse.limit_s = seconds


def load(packed: bytes, seed: int) -> WorkloadInfo | None:
    """Build the workload here, as the notebook has packed it, and train it from now on."""
    return _train(lambda: cloudpickle.loads(packed), seed, {"model", "optimizer"}, {})


def attach(names: dict[str, str | None], seed: int) -> WorkloadInfo | None:
    """Train objects that already live here, by variable name."""
    return _train(lambda: attached(names, namespace()), seed, found_by_cells(names), names)


def seed(number: int) -> int | None:
    """Seed the random numbers of cells, and training's as long as it has done no step; says how many it has."""
    seed_all(number)
    if _trainer is None:
        return None
    _trainer.reseed(number)
    return _trainer.steps


def follow(notebook: Surroundings) -> None:
    """Work where the notebook works, and import from where it does."""
    surroundings.here.follow(notebook)


def offer_trained() -> Iterator[object]:
    """Let cells find what is trained under names that are free; gives the objects whose code training runs."""
    if _trainer is None:
        return iter(())
    _offer(_trainer)
    return chain(_trainer.live.parts.modules(), (as_given(_trainer.workload.loss), _trainer.stream.dataset))


def taken_over() -> str:
    """After code of the notebook: say which names of what is trained it has bound to something else."""
    return taken(names) if _trainer and (names := _names.taken_over()) else ""


def loaded() -> bool:
    """Return whether there is a workload."""
    return _trainer is not None


def run_chunk(chunk: Chunk) -> ChunkReply:
    """Train a chunk of the workload, after the snapshot that it may ask for."""
    trainer = _loaded_trainer()
    held_up_s = _snapshots.take(trainer, _device, chunk.snapshot) if chunk.snapshot else 0.0
    with _tracer.recording() if chunk.traced else nullcontext():
        reply = trainer.run(chunk)
    if reply.failure is not None and reply.failure.kind == "oom":
        with suppress(Exception):  # objects of cells may raise when they are looked into; the rescue goes on
            live = device_look.live_bytes(trainer, namespace())
            reply = dataclasses.replace(reply, failure=dataclasses.replace(reply.failure, live=live))
    if chunk.traced:
        trainer.stream.close()  # workers that began meanwhile have inherited the profiler, for good
        _tracer.took(reply.lanes)
    _offer(trainer)  # its optimizer, which a flip may have changed
    return dataclasses.replace(
        reply, snapshot_s=held_up_s, stored=_snapshots.stored(), device_use=device_look.latest_use()
    )


def facts() -> exporting.Facts:
    """Return what a script must know to train what is loaded."""
    return exporting.facts_of(_loaded_trainer(), _device)


def hollow() -> bytes:
    """Return what is trained as a dry run takes it."""
    return of_trainer(_loaded_trainer(), _device)


def sync() -> None:
    """Give all ranks what rank 0 holds of what is trained."""
    _loaded_trainer().sync()


def record_step() -> Timeline | None:
    """Record one step of the workload, which all ranks undo."""
    return _loaded_trainer().record()


def look_in_sync(model: str | None, data: str | None) -> SyncLook:
    """Return what this rank holds and sees: of what is loaded, or of the objects under these names."""
    with _device.exempt():  # what is compared may be copied
        if model is None:
            return looks.sync_of_loaded(_loaded_trainer())
        found = named({"model": model, "data": data}, namespace())
        return looks.sync_of_own(found["model"], found.get("data"))


def look_at_model(inputs: bool) -> ModelFacts:
    """Return what this rank may hold for nothing; with ``inputs`` all ranks take a step for it, which is undone."""
    return looks.model_facts(_loaded_trainer(), inputs)


def splits_to_mean() -> bool | None:
    """Find out whether a micro-batch can be split; all ranks take two small steps for it, which are undone."""
    return looks.splits_to_mean(_loaded_trainer())


def step_lanes() -> StepLanes | None:
    """Return the latest step that was done, part by part."""
    return _loaded_trainer().lanes()


def write_trace(order: TraceOrder) -> TracePart:
    """Write this rank's part of a trace, of the traced chunk that was done last."""
    return _tracer.write(order)


def read_trace(offset: int) -> bytes:
    """Return a piece of this rank's part, from there on."""
    return _tracer.read(offset)


def drop_trace() -> None:
    """Keep nothing of what was recorded."""
    _tracer.drop()


def forecast(
    settings: Settings, small: list[int], batch_sizes: list[int], most: int, longest: bool = True
) -> Forecasts:
    """Return what steps under other settings would need; all ranks take part in the small steps that tell."""
    return _loaded_trainer().trials.forecast(settings, small, batch_sizes, most, longest)


def rehearse(settings: Settings) -> Rehearsal:
    """Return what whole steps under other settings need, and how long they take; all ranks take part in them."""
    return _loaded_trainer().trials.rehearse(settings)


def steps_among(count: int, settings: Settings, steps: int) -> StepsAmong:
    """Take steps on the first so many ranks alone and undo them; all ranks take part."""
    return _loaded_trainer().trials.steps_among(count, settings, steps)


def sweep_network(count: int, sizes: list[int]) -> Sweep | None:
    """Time all-reduces of these sizes in bytes on the first so many ranks; all ranks take part."""
    return among(count, _device, lambda: sweep(sizes, _device))


def forecast_allocators(settings: Settings, small: list[int], allocators: list[AllocatorSettings]) -> Forecasts:
    """Return what a step needs now and under each of these allocator settings; all ranks take part in it."""
    return _loaded_trainer().trials.allocators(settings, small, allocators)


def save(path: str, options: dict[str, float] | None, runs: bytes) -> Stored | None:
    """Write the training state and the kernel's record of runs; all ranks take part, rank 0 writes and answers."""
    captured = capture.capture(_loaded_trainer(), _device, options, runs)
    return Stored(path, captured.header.steps, captured.write(Path(path)), 0.0) if captured else None


def snapshot_now(order: SnapshotOrder) -> Stored | None:
    """Take a snapshot and wait for it; all ranks take part, rank 0 writes and answers."""
    return _snapshots.take_and_wait(_loaded_trainer(), _device, order)


def resume_check(path: str) -> tuple[Header, bytes]:
    """First phase of resuming: read a file and get everything ready that could fail, changing nothing.

    The file may be gone after the second phase, so what it says of itself is answered now; by rank 0 also its runs.
    """
    global _checked
    _checked = restore.Checked(Path(path), _loaded_trainer(), _device)
    return _checked.header, _checked.runs if here().rank == 0 else b""


def runs_in(path: str) -> bytes:
    """Return the runs that a file of training state holds."""
    return restore.runs_in(Path(path), _device)


def resume_apply(after_restart: bool) -> WorkloadInfo:
    """Second phase, once the first went well on all ranks; all of them take part."""
    trainer = _loaded_trainer()
    assert _checked is not None
    try:
        _checked.apply(trainer, after_restart)
    finally:
        resume_drop()
    _offer(trainer)
    return trainer.info()


def resume_drop() -> None:
    """Let go of what the first phase read."""
    global _checked
    _checked = None
    _device.empty_cache()


def save_attached(names: dict[str, str | None], path: str, space: int) -> str:
    """Keep the attached objects in a file, so that a restart can bring them back; says why that cannot be done."""
    return save_objects(to_keep(names.values(), namespace()), Path(path), space)


def load_attached(names: dict[str, str | None], path: str) -> None:
    """Define the kept objects again under their names."""
    namespace().update(load_objects(Path(path), _device))


def free() -> Freed:
    """Give cached memory that no tensor uses back to the device."""
    return device_look.free(_trainer, namespace())


def look_closer() -> device_look.CloserLook:
    """Return what :func:`look` does, and what holds the live bytes of this rank's device."""
    return *look(), device_look.live_bytes(_trainer, namespace())


def push(variables: dict[str, Any]) -> None:
    """Define variables for cells that run here."""
    namespace().update(variables)


def pull(name: str) -> Any:
    """Return the value of a variable here.

    Raises:
        WorkloadError: there is no such variable.
    """
    if name not in namespace():
        raise WorkloadError(f"There is no variable {name!r} on rank {here().rank}.")
    return namespace()[name]


def namespace() -> dict[str, Any]:
    """Return the variables that cells run on this rank see."""
    return vars(sys.modules["__main__"])


def _loaded_trainer() -> Trainer:
    if _trainer is None:
        raise WorkloadError("Nothing is loaded. Load a workload first, for example %hvd_load digits-resnet.")
    return _trainer


def _offer(trainer: Trainer) -> list[str]:
    """Let cells find what is trained; returns the names that people hold themselves."""
    return _names.offer({"model": trainer.live.model, "optimizer": trainer.live.optimizer})


def _train(make: Callable[[], Workload], seed: int, wanted: set[str], names: dict[str, Any]) -> WorkloadInfo | None:
    """Train another workload; ``None`` when some other rank could not load it, which then says why.

    ``wanted`` are the names without which cells could not find what is trained, ``names`` those that were attached.
    """
    global _trainer
    # Whatever is wrong with the data is found before the old workload is let go.
    if (prepared := building.prepare(make, seed)) is None:
        return None
    if _trainer is not None:
        surroundings.here.notes += [lost] if (lost := _trainer.close()) else []
        _trainer = None
        _names.withdraw()
    attached_names.attached({}, namespace())  # which would keep the old one
    gc.collect()
    _device.empty_cache()  # of what the old one needed, or one that could not be built
    workload, stream, held_out = prepared
    if (_trainer := building.build(workload, stream, _device, _session_started_s, held_out)) is None:
        return None
    attached_names.attached(names, namespace())
    if held := [name for name in _offer(_trainer) if name in wanted]:
        surroundings.here.notes.append(taken(held))
    return _trainer.info()
