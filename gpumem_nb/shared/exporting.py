"""The facts that a script needs to train as a session does: about the ranks' training, and about the cells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a rank about its training.

    Attributes:
        seed: of the data's order and of training's random numbers.
        stepped: whether a step was done since it was loaded, which shows what a loss takes, and gradients.
        order: of the samples: ``shuffled``, ``in turn``, or what decides it, in words.
        iterable, batched: whether the data can be iterated only, and brings micro-batches of its own.
        draws: whether samples or their collation draw random numbers.
        loader: whether the data was handed over in a ``DataLoader``, with ``handed_on`` its options for workers.
        columns: ``tuple`` or ``dict`` of tensors, else empty.
        batch: what a micro-batch is: ``pair``, ``mapping`` or ``other``.
        eval_form: how the validation data was handed over; see ``HeldOut``. Empty without any.
        loss, metric: what they are called with: ``batch`` (the model and the batch), ``outputs`` (the model's, and
            targets); ``model`` where the model returns its own loss, ``unknown`` where that shows when it is called.
        loss_key: whether the model returns its own loss in a plain dict.
        tokens: how an own loss counts labels over a step: ``shifted``, ``labels``, or empty where it does not.
        criterion, metric_module: whether they are modules (of a criterion: other than torch's, which have no modes).
        criterion_weights: whether the criterion is a module, with weights or buffers.
        optimizer: the knob as the rank has it: settings that were just changed may not have reached it.
        own_optimizer, own_scheduler: whether it came with one.
        groups: of parameters, in the optimizer.
        optimizer_hooks: whether the user registered hooks around the optimizer's update.
        optimizer_needs: names of what an optimizer's class must be given besides weights.
        own_rate: the learning rate that people knew the own optimizer by when it was loaded.
        optimizer_keeps: names of what an optimizer that is not torch's keeps beside its groups and state.
        loose: how many weights only the optimizer knows.
        dtypes: of what is trained.
        uncommon: whether there are weights or buffers whose type Horovod's broadcast does not take, or empty ones.
        unsent: a weight, frozen or not, whose type Horovod's broadcast does not take; empty without any.
        strided: a weight or buffer that is not contiguous in memory; empty without any.
        sparse: whether there are sparse gradients.
        absent: weights that had a gradient on no rank in any step since it was loaded, though they are not frozen.
        sometimes: those that had one in some of these steps, and in others on no rank.
        partial: whether some ever had one on some ranks only.
        evaluating: whether modules train in evaluation mode.
        buffers: whether the model has any.
        norms: whether blocks hold batch norms with statistics.
        changed_by_blocks: what else checkpointed blocks change when they run: the first of its names, or nothing;
            ``None`` before there was a step to see it in.
        blocks: names of those that checkpointing wraps.
        cache: whether the model has a configuration with a cache for generation.
        rate: of the optimizer's first group just now.
        asked_rate: what the settings asked for last.
        variables: Horovod's that the rank was started with, by name, where they are not its own defaults.
        hash_seed: ``PYTHONHASHSEED``, which is alike on all ranks.
        folder: in which the rank works.
        modules: top-level modules that were imported from outside of Python's environment, each with its folder, in
            the order in which Python looks into these.
        torch, horovod: versions.
    """

    seed: int
    stepped: bool
    order: str
    iterable: bool
    batched: bool
    draws: bool
    loader: bool
    handed_on: tuple[str, ...]
    columns: str
    batch: str
    eval_form: str
    loss: str
    metric: str
    loss_key: bool
    tokens: str
    criterion: bool
    metric_module: bool
    criterion_weights: bool
    optimizer: str
    own_optimizer: bool
    groups: int
    own_scheduler: bool
    optimizer_hooks: bool
    optimizer_needs: tuple[str, ...]
    own_rate: float
    optimizer_keeps: tuple[str, ...]
    loose: int
    dtypes: tuple[str, ...]
    uncommon: bool
    unsent: str
    strided: str
    sparse: bool
    absent: tuple[str, ...]
    sometimes: tuple[str, ...]
    partial: bool
    evaluating: bool
    buffers: bool
    norms: bool
    changed_by_blocks: str | None
    blocks: tuple[str, ...]
    cache: bool
    rate: float
    asked_rate: float
    variables: dict[str, str]
    hash_seed: str
    folder: str
    modules: dict[str, str]
    torch: str
    horovod: str


@dataclass(frozen=True, slots=True)
class Cell:
    """Code that ran on the ranks, or what changed their random numbers or variables from outside.

    Attributes:
        source: plain Python; empty for what is not a cell.
        everywhere: whether it ran on all ranks.
        finished: whether it ended well.
        drew: whether it moved the random numbers that cells draw.
        seed: what these begin at from here on, for a seeding or a start of the ranks.
        pushed: variables that were defined from the notebook.
        opaque: whether it was a function of the notebook, whose code is not known.
        started: whether the ranks are new processes from here on.
        offered: names under which cells find what was attached, each with the variable that holds it; or with none, for
            what no cell has made.
    """

    source: str = ""
    everywhere: bool = True
    finished: bool = True
    drew: bool = False
    seed: int | None = None
    pushed: tuple[str, ...] = ()
    opaque: bool = False
    started: bool = False
    offered: tuple[tuple[str, str], ...] = ()

    @property
    def known(self) -> bool:
        """Return whether doing it again gives what it gave: its code is there, and succeeded on all ranks."""
        unmade = self.pushed or self.opaque or any(not variable for _, variable in self.offered)
        return self.everywhere and self.finished and not unmade
