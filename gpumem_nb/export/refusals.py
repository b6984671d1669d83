"""Refusals of what cannot be exported, and notes on what is not carried over."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ..shared.errors import WorkloadError
from ..shared.knobs import KNOBS
from ..shared.knobs.step import checkpointing_of
from ..shared.questions import Cell, Facts
from ..shared.settings import OWN, Settings
from ..shared.workload import Adopted
from .imports import brought_by_all
from .plain import defining_magic
from .statements import NOTEBOOK

_DTYPES = {"float32", "float64"}
_AGAIN = "Train a step first (press Play, or %hvd_train 1)"


def check(settings: Settings, facts: Facts, own: bool, ddp: bool) -> None:
    """Refuse what a plain script cannot do.

    Args:
        settings: what to train under.
        facts: what is trained.
        own: whether that is the user's own, and not a ready-made workload.
        ddp: whether the script is for DistributedDataParallel.

    Raises:
        WorkloadError: saying why, and what to do.
    """
    for reason in (*_knobs(settings, ddp), *_kept(settings, facts), *(_own(settings, facts, ddp) if own else ())):
        raise WorkloadError(reason)


def of_trainer(adopted: Adopted, settings: Settings) -> str:
    """Return why what a trainer holds is not exported, and how its own program gets what was found here."""
    found = [
        f"{argument} ({name}={KNOBS[name].text(getattr(settings, name))})"
        for name, argument in adopted.arguments
        if getattr(settings, name) != KNOBS[name].default or name in ("batch_size", "accumulation_steps")
    ]
    return (
        f"{adopted.kind} brings a training loop of its own, so the program that makes it is the script: it trains on "
        f"several GPUs when torchrun starts it. Set there what was found here: {', '.join(found)}."
    )


def left_out(settings: Settings, ddp: bool) -> list[str]:
    """Return a sentence for each knob that a script does otherwise."""
    told = ((knob, knob.left_out(getattr(settings, name), ddp)) for name, knob in KNOBS.items() if knob.left_out)
    return [f"{knob.name}={knob.text(getattr(settings, knob.name))}: {text}" for knob, text in told if text]


def of_model(facts: Facts) -> Iterator[str]:
    """Yield a sentence for each thing about the user's own model that a script does otherwise."""
    if facts.absent:
        more = f" and {len(facts.absent) - 1} more" if len(facts.absent) > 1 else ""
        yield (
            f"training of {facts.absent[0]}{more}, which had a gradient in no step so far: the script freezes what "
            "none reaches. If later steps do, train until then and export again"
        )
    if facts.unsteady:
        yield (
            "samples that follow from when they were read (a generator or a counter of the data's own, or a cache of "
            "what was drawn): a session has read more of them than the script does, which trains on others. Let them "
            "follow from random numbers of torch, NumPy or Python, each time anew"
        )
    if facts.eval_changes:
        yield (
            f"{facts.eval_changes}: evaluating changes it, which a session puts back and the script does not. Let "
            "forward change it only while self.training is true"
        )


def _knobs(settings: Settings, ddp: bool) -> Iterator[str]:
    for name, knob in KNOBS.items():
        value = getattr(settings, name)
        if knob.exported is None and value != knob.default:
            yield (
                f"{name}={knob.text(value)} is a knob that was registered here, which scripts do not know. Set it to "
                f"{knob.text(knob.default)}, and write what it does into the script."
            )
        elif knob.exported and (why_not := knob.exported(value, ddp)):
            yield why_not

    if settings.reduction == "adasum" and settings.compression != "none":
        yield (
            f"reduction=adasum of gradients that travel with compression={settings.compression} is what a plain script "
            "does not do. Set compression=none first, or reduction=average."
        )


def _kept(settings: Settings, facts: Facts) -> Iterator[str]:
    """Refusals about what blocks keep, which a step has shown."""
    if checkpointing_of(settings) == "selective" and len(facts.kept) != len(facts.blocks):
        yield f"{_AGAIN}: that shows what blocks keep under this budget."


def _own(settings: Settings, facts: Facts, ddp: bool) -> Iterator[str]:
    """Refusals about the user's own model and data."""
    if not facts.stepped or facts.loss == "unknown":
        yield f"{_AGAIN}: that shows what the loss is called with, and which weights get a gradient."
    if facts.metric == "unknown":
        yield "Evaluate first (%hvd_eval): that shows what the metric is called with."
    yield from _data(facts)
    yield from _weights(facts, ddp)
    yield from _optimizer(facts, settings, ddp)
    if settings.checkpointing != "none" and not all(facts.blocks):
        yield (
            f"checkpointing={settings.checkpointing} recomputes a block that is not part of the model, which a script "
            "does not find. Make it part of the model, or set checkpointing=none first."
        )
    if settings.compile != "off" and not all(facts.blocks):
        yield (
            "compile=blocks compiles a block that is not part of the model, which a script does not find. Make it part "
            "of the model, or set compile=off first."
        )
    if settings.loss_head == "chunked" and not facts.head:
        yield (
            "loss_head=chunked computes the loss from a layer that is not part of the model, which a script does not "
            "find. Make it part of the model, or set loss_head=full first."
        )
    if settings.checkpointing != "none" and facts.changed_by_blocks is None:
        yield f"{_AGAIN}: that shows what blocks change when they run, which checkpointing does once more."
    if settings.checkpointing != "none" and facts.changed_by_blocks:
        yield (
            f"a block changes {facts.changed_by_blocks} when it runs, which recomputing would do again in a plain "
            "script. Set checkpointing=none first, and train a step."
        )


def _data(facts: Facts) -> Iterator[str]:
    if facts.iterable:
        yield (
            "The data can only be iterated, so a plain script would share it out among ranks otherwise. Attach a "
            "dataset with __len__ and __getitem__."
        )
    elif facts.batched:
        yield "The data brings micro-batches of its own. Attach a dataset of single samples."
    elif facts.order not in ("shuffled", "in turn"):
        yield (
            f"{facts.order} decides the order of samples, which a plain script would share out otherwise. Attach the "
            "dataset itself, or a DataLoader with shuffle=True or without it."
        )
    if facts.eval_form == "chosen":
        yield (
            "The validation data is a part that a sampler chooses. Give eval_data that part: "
            "torch.utils.data.Subset(dataset, indices)."
        )


def _weights(facts: Facts, ddp: bool) -> Iterator[str]:
    if facts.sometimes and not ddp:
        yield (
            f"In some steps {facts.sometimes[0]} has a gradient on no rank. A session leaves it alone then, and "
            "hvd.DistributedOptimizer makes zeros of that, which weight decay and momentum act on. Export with --ddp "
            "(ddp=True)."
        )
    if odd := [dtype for dtype in facts.dtypes if dtype not in _DTYPES]:
        yield (
            f"Weights are in {odd[0]}, whose gradients Horovod and DistributedDataParallel do not add up as a session "
            "does. Keep the weights in float32 and set precision=bf16 or fp16."
        )
    if facts.unsent and not ddp:
        yield (
            f"{facts.unsent} is of a type that Horovod's broadcast does not take. Export with --ddp (ddp=True), or "
            "keep it in float32."
        )
    if facts.strided and not ddp:
        yield (
            f"{facts.strided} is not contiguous in memory (channels_last, for example), which Horovod's broadcast does "
            "not take. Export with --ddp (ddp=True), or leave the model as it is and give its inputs that layout."
        )
    if facts.sparse:
        yield "Gradients of an embedding are sparse, which a plain script averages otherwise. Set sparse=False in it."
    if facts.loose:
        yield "The optimizer trains a weight that neither the model nor the criterion has. Make it part of the model."


def _optimizer(facts: Facts, settings: Settings, ddp: bool) -> Iterator[str]:
    if facts.optimizer_hooks and not ddp:
        yield (
            "Hooks are registered around the optimizer's update, or its step was replaced, which "
            "hvd.DistributedOptimizer does not take over. Export with --ddp (ddp=True), or undo that first."
        )
    if facts.optimizer_needs and settings.optimizer == OWN and not ddp:
        yield (
            f"The optimizer's class cannot be made without {facts.optimizer_needs[0]}, which hvd.DistributedOptimizer "
            "does not give it. Export with --ddp (ddp=True), or give it a default."
        )
    if facts.optimizer_keeps and settings.optimizer == OWN and not ddp:
        yield (
            f"The optimizer keeps {facts.optimizer_keeps[0]} beside its groups and state, which "
            "hvd.DistributedOptimizer does not take over. Export with --ddp (ddp=True), or keep it in the groups."
        )
    if facts.groups > 1 and not facts.own_rate and settings.optimizer == OWN and _sets_rate(settings, facts.own_rate):
        yield (
            "The optimizer's first group has a learning rate of 0, so a script cannot tell how the others relate to "
            "the one that knobs set. Put another group first, and attach again."
        )
    if facts.tensor_rate and settings.optimizer == OWN and _sets_rate(settings, facts.own_rate):
        yield (
            "The optimizer's learning rate is a tensor, which knobs fill and a script would replace by a number. Make "
            "the optimizer with the number that it shall have, and attach again."
        )
    if settings.lr_schedule == OWN and not _alike(settings.learning_rate, facts.own_rate):
        yield (
            f"learning_rate={settings.learning_rate:g} was set over that of the own scheduler, which begins at "
            f"{facts.own_rate:g} in a script. Make the optimizer with that rate and attach again, or "
            f"%hvd_set learning_rate={facts.own_rate:g}."
        )
    if settings.lr_schedule != "own" and not _alike(facts.rate, facts.asked_rate):
        yield (
            f"A cell has set the learning rate to {facts.rate:g}, and the settings say otherwise. Say it by the knob: "
            f"%hvd_set learning_rate={facts.rate:g}."
        )


def _sets_rate(settings: Settings, own_rate: float) -> bool:
    """Return whether knobs give an own optimizer another rate than its own."""
    if settings.lr_schedule == OWN:
        return False
    moves = settings.lr_schedule != "constant" or settings.warmup_steps or settings.lr_scaling != "none"
    return bool(moves) or settings.learning_rate != own_rate


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * max(abs(one), abs(other))


_SHOWN = 70  # characters


def missing(cells: Sequence[Cell], names: Collection[str], forgotten: bool) -> WorkloadError:
    """Names that are needed, and that no known cell defines."""
    name = min(names)
    magic = next(filter(None, (defining_magic(cell.source, name) for cell in cells)), "")
    if name in NOTEBOOK:
        what = "display() is" if name == "display" else "lines with % and ! are"
        return WorkloadError(
            f"A cell that made what is trained has something that a script cannot do: {what} IPython's own. Write that "
            "in plain Python, or in a cell of its own that draws no random numbers. Run %hvd_seed and the cells that "
            "made model and data again, and attach again."
        )
    where = (
        "it was pushed from the notebook"
        if any(name in cell.pushed for cell in cells)
        else f"code under {magic} does, which is not read. Write it without {magic}"
        if magic
        else "the cells that did are too long ago, or ran before the ranks were started again"
        if forgotten
        else "a cell imports * from a module, and that does not say what. Import it by its name"
        if any(cell.known and brought_by_all(cell.source) is None for cell in cells)
        else "no %%hvd cell that succeeded on all ranks defines it"
    )
    return WorkloadError(
        f"The script needs {name}, and cannot define it: {where}. Define it in a %%hvd cell, run those after it "
        "again, and attach again."
    )


def unclear_name(cell: Cell, name: str, defined: bool) -> WorkloadError:
    """Say that it cannot be told what a name is: a cell may have bound it."""
    if cell.offered:
        return WorkloadError(
            f"The script needs {name}, which was what the ranks offer of something that no cell made. Make it in a "
            "%%hvd cell, run those after it again, and attach again."
        )
    if cell.pushed and not defined:
        return missing([cell], [name], False)
    how = (
        "was defined or used in a cell that ran on some ranks only"
        if not cell.everywhere
        else "was pushed from the notebook"
        if cell.pushed
        else "is in a cell that failed"
    )
    return WorkloadError(
        f"What {name} is cannot be told: after its last cell it {how}. Run its %%hvd cell again on all ranks, and "
        "those that use it, and attach again."
    )


def unclear_setting(cell: Cell, text: str) -> WorkloadError:
    """Say that it cannot be told whether a setting of the whole process was made on all ranks."""
    how = "that ran on some ranks only" if not cell.everywhere else "that failed"
    return WorkloadError(
        f"Whether `{in_short(text)}` holds cannot be told: it is in a cell {how}. Run it again on all ranks, in a cell "
        "that ends well, then the cells that made model and data, and attach again."
    )


def replaced_by_all(text: str, name: str) -> WorkloadError:
    """Say that an import of ``*`` may have defined what is needed, or replaced it."""
    return WorkloadError(
        f"What {name} is cannot be told: a cell says `{in_short(text)}`, which may have defined or replaced it. Import "
        "what you need by its name, run that and the cells after it again, and attach again."
    )


def not_for_a_script(text: str, why: str) -> WorkloadError:
    """Say that a statement cannot stand in a script."""
    return WorkloadError(
        f"`{in_short(text)}` is in a cell that the script needs, and {why}. Take it out of that cell, run the cells "
        "that made model and data again, and attach again."
    )


def saved_with_more(text: str) -> WorkloadError:
    """Say that a file was written while a model was made, with something else that was done for that."""
    return WorkloadError(
        f"`{in_short(text)}` writes a file, which a script shall not do again, and calls something that may change "
        "model, data or random numbers. Do that in a statement of its own: run %hvd_seed and those cells again, and "
        "attach again."
    )


def in_short(text: str) -> str:
    """Return a statement as it is shown in a sentence: its first line that is no comment."""
    lines = [line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    shown = lines[0].strip()
    return shown if len(lines) == 1 and len(shown) <= _SHOWN else f"{shown[:_SHOWN]} …"


def unclear_numbers(cell: Cell) -> WorkloadError:
    """Say that random numbers cannot be drawn again."""
    how = (
        "A function that session.run brought to the ranks"
        if cell.opaque
        else "A cell that failed"
        if cell.everywhere
        else "A cell that ran on some ranks only"
    )
    return WorkloadError(
        f"{how} drew random numbers, and what was made after it follows from them. Run %hvd_seed and the cells that "
        "made model and data again, and attach again."
    )
