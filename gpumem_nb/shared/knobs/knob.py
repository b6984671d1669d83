"""A knob: an option of training, with everything that the rest of the house needs to know about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..categories import INSIDE_OPERATORS, TEMPORARIES
from ..values import Option
from ..workload import Handles, WorkloadInfo

Changes = dict[str, Any]
Settings = Any
""":class:`gpumem_nb.shared.settings.Settings`, which is made of the knobs and therefore lies above them."""

# How much of a category a knob moves, roughly: next to all of it, about half of it, or less.
MOST, HALF, SOME = 3, 2, 1

# What a change does to the mathematics of training: training goes on as it would have bit for bit (where torch computes
# alike twice), as it would have but for rounding, or another way. From the mildest.
KEEPS, KEEPS_TO_ROUNDING, CHANGES = MATHEMATICS = ("keeps", "keeps to rounding", "changes")


class LiveModel(Protocol):
    """The parts of a rank that a knob may change. Every method does nothing when what it asks for is in place already.

    Attributes:
        model: the ``torch.nn.Module`` that is trained.
        optimizer: the ``torch.optim.Optimizer`` in use.
        parameters: what is trained, in the optimizer's order.
        loss: what steps and evaluations compute of the model and a micro-batch.
        recomputing: what of forward backward computes again.
    """

    model: Any
    optimizer: Any
    parameters: Any
    loss: Any
    recomputing: Any

    def set_optimizer(self, settings: Settings) -> None:
        """Train with the optimizer that these settings name."""

    def set_optimizer_impl(self, name: str) -> None:
        """Compute the same update in another way."""

    def set_shard_optimizer(self, settings: Settings) -> None:
        """Keep all of the optimizer's state, or a share of it."""

    def set_offload_optimizer(self, settings: Settings) -> None:
        """Let the optimizer's state wait in host memory, or have it on the device."""

    def set_learning_rate(self, settings: Settings) -> None:
        """Bring the rate to what these settings ask of it at this step, in all parameter groups alike."""


def carried(value: Any, ddp: bool) -> str:
    """Return no objection: an exported script keeps every value of the knob."""
    return ""


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that should become smaller, and the settings to start from.

    Attributes:
        category: what fills the memory.
        phase: the part of the step that it fills the memory in.
        settings: as they are.
        handles: what of the model can be taken hold of.
        tried_out: whether changes are tried out on the ranks before the user sees them.
    """

    category: str
    phase: str
    settings: Settings
    handles: Handles
    tried_out: bool = False

    @property
    def of_update(self) -> bool:
        """Return whether it is what the update takes for a moment, in which forward and backward have no part."""
        return self.phase == "update" and self.category in (TEMPORARIES, INSIDE_OPERATORS)


@dataclass(frozen=True, slots=True, eq=False)
class Knob(Option):
    """An option of training that can be switched between two steps.

    Attributes:
        in_front: whether the panel shows it at once, or with those of its fold.
        fold: the panel's button that shows this knob and others; ``None``: the panel does not show it, `%hvd_set` does.
        label: what stands over its control in the panel; by default the name.
        short: what stands before the value in a chart's marks; by default the name.
        moves: the categories of memory that it makes smaller or larger, and roughly how much of each.
        acts: whether a value matters under these settings; ``None``: under all.
        mathematics: what a change of it does to them (``KEEPS``, ``KEEPS_TO_ROUNDING`` or ``CHANGES``), or a function
            of settings before and after that says so.
        apply: what it does to a live model on a rank when settings are applied; called with every change of any knob,
            so a second time must do nothing. ``None``: each step reads the value by itself.
        lighter: the changes that may make a category in ``moves`` smaller; none where they are in use already.
        saves: why these need less memory, as a clause such as ``fewer activations are kept at once``.
        refuses: why a value cannot be used with what is loaded (``None``: nothing is), or nothing.
        conflicts: why settings cannot be used together on so many ranks, or nothing.
        adapts: what to change when a workload is loaded under these settings.
        settles: what else to set when the user sets knobs; gets settings before and after, the knobs that were
            named, and the number of ranks.
        exported: why an exported script cannot do a value, or nothing; gets whether it is for DistributedDataParallel.
            ``None``: scripts do not know the knob, so its default alone can be exported.
        left_out: what an exported script does otherwise, in words, or nothing; gets the same.
        asked_alone: why no value of it is predicted unless you ask for that, and how; by default all are.
        retired: values that states saved by earlier versions may name, and what they are read as.
    """

    in_front: bool = False
    fold: str | None = "more"
    label: str = ""
    short: str | None = None
    moves: Mapping[str, int] = field(default_factory=dict)
    acts: Callable[[Settings], bool] | None = None
    mathematics: str | Callable[[Settings, Settings], str] = CHANGES
    apply: Callable[[LiveModel, Settings], None] | None = None
    lighter: Callable[[Need], Iterable[Changes]] | None = None
    saves: str = ""
    refuses: Callable[[Any, WorkloadInfo | None], str] | None = None
    conflicts: Callable[[Settings, int], str] | None = None
    adapts: Callable[[Settings, WorkloadInfo], Changes] | None = None
    settles: Callable[[Settings, Settings, Collection[str], int], Changes] | None = None
    exported: Callable[[Any, bool], str] | None = None
    left_out: Callable[[Any, bool], str] | None = None
    asked_alone: str = ""
    retired: Mapping[Any, Any] = field(default_factory=dict)

    def from_saved(self, value: Any) -> Any:
        """Return the value that a file holds, perhaps of an earlier version; tuples come back from it as lists."""
        value = _tuples(value)
        return self.retired.get(value, value)

    def offered(self, now: Any, workload: WorkloadInfo | None) -> list[str]:
        """Return the choices that can be used with what is loaded, and the one that is set now."""
        return [one for one in self.choices if one == now or not (self.refuses and self.refuses(one, workload))]

    def mark(self, value: Any) -> str:
        """Return a value in a few letters."""
        before = f"{self.name.replace('_', ' ')} " if self.short is None else self.short
        return before + self.text(value)

    def mathematics_of(self, before: Settings, after: Settings) -> str:
        """Return what this knob's part of a change does to the mathematics."""
        return self.mathematics(before, after) if callable(self.mathematics) else self.mathematics
