"""The facts that a script needs to train as this rank does."""

from __future__ import annotations

import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..internals.torch_internals import batch_norms, buffers_by_name, has_step_hooks
from ..memory.device import Device
from ..shared.questions import Facts as Facts
from .attach import takes
from .data.handed import Columns, collated_copies, samples_at
from .data.orders import InTurn, Shuffled
from .data.stream import ShardedStream, Stream
from .link import horovod
from .link import settings as link_settings
from .random_state import set_aside
from .replay.operators import Kept
from .step.optimizers import beside_state
from .step.own_loss import OwnLoss, labels_counted
from .step.parts import CRITERION, LOOSE, as_given, in_groups
from .step.trainer import Trainer

# What Horovod's broadcast takes.
_COMMON = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8}


def facts_of(trainer: Trainer, device: Device) -> Facts:
    """Look at what is trained; changes nothing."""
    with device.exempt():  # a batch is made
        return _facts(trainer)


def _facts(trainer: Trainer) -> Facts:
    live, stream, workload = trainer.live, trainer.stream, trainer.workload
    loss, criterion = workload.loss, live.parts.named.get(CRITERION)
    names = {id(param): name for name, param in live.parts.named_parameters()}
    named = (*live.parts.named_parameters(), *live.parts.named_buffers())
    had, hidden = trainer.stepper.voting.had, set(map(id, live.matrices))
    modules = {id(module): name for name, module in live.model.named_modules()}
    return Facts(
        seed=stream.seed,
        stepped=had.any_step,
        order=_order(stream),
        iterable=stream.info.iterable,
        batched=stream.info.batched,
        draws=stream.draws,
        unsteady=stream.unsteady,
        loader=stream.info.num_workers is not None,
        handed_on=tuple(stream.handed_on) if isinstance(stream, ShardedStream) else (),
        columns=("tuple" if stream.dataset.names is None else "dict") if isinstance(stream.dataset, Columns) else "",
        batch=_kind_of_batch(stream),
        eval_form=trainer.evaluator.held_out.form if trainer.evaluator else "",
        eval_changes=trainer.evaluator.changed if trainer.evaluator else "",
        loss=takes(loss),
        metric=takes(workload.metric) if workload.metric else "",
        loss_key=isinstance(loss, OwnLoss) and loss.by_key,
        tokens=labels_counted(live.model) if isinstance(loss, OwnLoss) else "",
        criterion=criterion is not None and type(criterion).__module__ != nn.CrossEntropyLoss.__module__,
        metric_module=isinstance(as_given(workload.metric), nn.Module),
        criterion_weights=criterion is not None and bool(criterion.state_dict()),
        optimizer=live.settings.optimizer,
        own_optimizer=live.own_optimizer is not None,
        groups=len(live.optimizer.param_groups),
        own_scheduler=live.scheduler is not None,
        optimizer_hooks=has_step_hooks(live.optimizer),
        optimizer_keeps=_kept_beside(live.own_optimizer) if live.own_optimizer else (),
        optimizer_needs=_needed_besides_weights(live.own_optimizer) if live.own_optimizer else (),
        own_rate=live.own_rate,
        tensor_rate=any(isinstance(group["lr"], Tensor) for group in live.optimizer.param_groups),
        loose=sum(name.startswith(LOOSE) for name in names.values()),
        dtypes=tuple(sorted({str(param.dtype).removeprefix("torch.") for param in in_groups(live.optimizer)})),
        uncommon=any(tensor.dtype not in _COMMON or not tensor.numel() for _, tensor in named)
        or not all(isinstance(part, Tensor) for part in live.model.state_dict().values()),
        unsent=next((name for name, param in live.parts.named_parameters() if param.dtype not in _COMMON), ""),
        strided=next((name for name, tensor in named if not tensor.is_contiguous()), ""),
        sparse=bool(live.sparse_places()),
        absent=tuple(names[id(param)] for param in had.never(live.parameters)),
        sometimes=tuple(names[id(param)] for param in had.sometimes(live.parameters)),
        partial=had.partial,
        evaluating=bool(live.modes.evaluating()),
        buffers=any(True for _ in live.model.buffers()),
        norms=any(buffers_by_name(norm) for block in live.recomputing.blocks for norm in batch_norms(block)),
        changed_by_blocks=None if live.recomputing.changed is None else next(iter(live.recomputing.changed), ""),
        blocks=tuple(modules.get(id(block), "") for block in live.recomputing.blocks),
        kept=tuple(map(_calls_by_name, live.recomputing.kept)),
        head=modules.get(id(live.recomputing.head), ""),
        not_hidden=tuple(names[id(one)] for one in live.parts.parameters() if one.dim() == 2 and id(one) not in hidden),
        cache=any(hasattr(getattr(module, "config", None), "use_cache") for module in live.model.modules()),
        rate=live.learning_rate,
        asked_rate=live.asked_rate,
        variables=link_settings.started_with(),
        hash_seed=os.environ.get("PYTHONHASHSEED", "random"),
        folder=os.getcwd(),
        modules=_own_modules(),
        torch=str(torch.__version__),
        horovod=horovod.VERSION,
    )


def _calls_by_name(kept: Kept) -> dict[str, list[int]]:
    """Return calls by operators' names, without what torch cannot keep: what is drawn, or written in place later."""
    found: dict[str, list[int]] = {}
    for (name, number), result in kept.items():
        if not (result.draws or result.finished_by):
            found.setdefault(name, []).append(number)
    return {name: sorted(found[name]) for name in sorted(found)}


def _kept_beside(optimizer: Optimizer) -> tuple[str, ...]:
    """Names of what a script's optimizer would not have."""
    return tuple(sorted(name for name in beside_state(optimizer) if not name.startswith("_")))


def _needed_besides_weights(optimizer: Optimizer) -> tuple[str, ...]:
    """Names of arguments without which an optimizer's class makes none."""
    _, *others = inspect.signature(type(optimizer)).parameters.values()
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(one.name for one in others if one.default is inspect.Parameter.empty and one.kind not in many)


def _kind_of_batch(stream: Stream) -> str:
    """Return what a micro-batch looks like, from the first sample."""
    if not isinstance(stream, ShardedStream) or stream.info.batched:
        return "other"
    first: Any = stream.order(stream.seed, 0)[0]
    with set_aside():
        try:
            index = int(first) if isinstance(first, np.integer) else first
            batch = collated_copies(stream.collate, samples_at(stream.dataset, [index]))
        except Exception:  # a step has said it, or will
            return "other"
    if isinstance(batch, Mapping):
        return "mapping"
    pair = type(batch) is list and len(batch) == 2  # of which a script makes a list
    return "pair" if pair and all(isinstance(part, Tensor) for part in batch) else "other"


def _order(stream: Stream) -> str:
    if not isinstance(stream, ShardedStream):
        return ""
    known = {Shuffled: "shuffled", InTurn: "in turn"}
    return known.get(type(stream.order), getattr(stream.order, "name", "a DistributedSampler"))


def _own_modules() -> dict[str, str]:
    """Return the folders of top-level modules that people have written beside their notebook."""
    installed = {sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages()}
    installed |= {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    ours, found = __name__.partition(".")[0], dict[str, str]()
    for name, module in list(sys.modules.items()):
        known: dict[str, Any] = {}
        with suppress(Exception):  # some stand in for modules, or are loaded when they are looked at
            known = object.__getattribute__(module, "__dict__")
        file, package = known.get("__file__"), list(known.get("__path__") or ())
        place = file or next(iter(package), None)  # a package without an __init__.py
        if "." in name or name in (ours, "__main__", "__mp_main__") or not isinstance(place, str):
            continue
        folder = Path(place).parent.parent if file and package else Path(place).parent
        if not any(folder.is_relative_to(one) for one in installed if one):
            found[name] = str(folder)
    order = [os.path.abspath(entry) for entry in sys.path]
    places_of = {folder: order.index(folder) if folder in order else len(order) for folder in found.values()}
    return dict(sorted(found.items(), key=lambda one: places_of[one[1]]))
