"""The knobs of forward and backward: ``precision``, ``checkpointing``, ``batch_size`` and ``accumulation_steps``."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ..categories import ACTIVATIONS, CASTS, GRADIENTS, INPUTS, INSIDE_OPERATORS, LOGITS, PARAMETERS, TEMPORARIES
from ..values import Kind, Values, not_negative, whole
from ..workload import DataInfo, WorkloadInfo
from .knob import CHANGES, HALF, KEEPS, KEEPS_TO_ROUNDING, MOST, SOME, Changes, Knob, Need, Settings, carried

_BF16_WEIGHTS = "bf16_weights"


def has_narrow_weights(settings: Settings) -> bool:
    """Return whether weights and gradients lie in bf16 under these settings."""
    return bool(settings.precision == _BF16_WEIGHTS)


def _fewer_bits(need: Need) -> Iterator[Changes]:
    if has_narrow_weights(need.settings):
        return
    of_weights, sixteen_bit = need.category in (PARAMETERS, GRADIENTS), need.settings.precision != "fp32"
    if need.category == CASTS and sixteen_bit:
        yield {"precision": "fp32"}
    elif not (sixteen_bit or of_weights or need.category == CASTS or need.of_update):
        yield {"precision": "bf16"}
    if (of_weights or need.category == CASTS) and need.tried_out and need.settings.shard_optimizer == "off":
        yield {"precision": _BF16_WEIGHTS}


def _lie_in_shares(settings: Settings, ranks: int) -> str:
    if not has_narrow_weights(settings) or settings.shard_optimizer == "off":
        return ""
    return (
        "precision=bf16_weights cannot be used with shard_optimizer=on: random numbers for rounding follow from whole "
        "weights. Use shard_optimizer=off, or precision=bf16."
    )


_UNWRITTEN = (
    "precision=bf16_weights is not written into scripts, which would need its rounding. Set precision=bf16 first: a "
    "script then keeps weights in fp32, and has other losses from there on."
)

PRECISION = Knob(
    "precision",
    "fp32",
    "arithmetic of forward and backward: fp32, or autocast to fp16 (with loss scaling) or bf16; or weights in bf16 too",
    in_front=True,
    choices=("fp32", "fp16", "bf16", _BF16_WEIGHTS),
    means={
        "fp32": "32 bit everywhere",
        "fp16": "16 bit where that is safe; losses are scaled, because small gradients would become 0",
        "bf16": "16 bit where that is safe; the range of fp32, fewer digits",
        _BF16_WEIGHTS: "bf16, and weights and gradients lie in 16 bit as well; updates are rounded stochastically",
    },
    short="",
    moves={
        ACTIVATIONS: HALF,
        CASTS: MOST,
        LOGITS: SOME,
        TEMPORARIES: HALF,
        INSIDE_OPERATORS: HALF,
        PARAMETERS: HALF,
        GRADIENTS: HALF,
    },
    lighter=_fewer_bits,
    saves="more numbers take 16 bits instead of 32",
    conflicts=_lie_in_shares,
    exported=lambda value, ddp: _UNWRITTEN if value == _BF16_WEIGHTS else "",
)


def _recomputed(need: Need) -> Iterator[Changes]:
    # Whether √n blocks save more than single ones depends on the model.
    plain = need.settings.checkpointing == "none" and need.settings.compile == "off"
    if need.handles.blocks and plain and need.tried_out:  # else one hint is enough
        yield {"checkpointing": "selective"}
    if need.handles.blocks and need.settings.checkpointing in ("none", "selective"):
        yield {"checkpointing": "blocks"}


def _adapts_blocks(settings: Settings, workload: WorkloadInfo) -> Changes:
    return {} if workload.blocks else {"checkpointing": "none"}


CHECKPOINTING = Knob(
    "checkpointing",
    "none",
    "activation checkpointing: keep all activations, or recompute in backward some of them, or whole blocks",
    in_front=True,
    choices=("none", "selective", "blocks", "sqrt"),
    means={
        "none": "all activations are kept",
        "selective": "each block keeps those that take longest to compute, a share of activation_budget in all",
        "blocks": "each block keeps its input alone, and is computed again in backward",
        "sqrt": "√n blocks at a time do; sometimes less memory than blocks, at the same cost",
    },
    short="ckpt ",
    moves={ACTIVATIONS: MOST, CASTS: SOME},  # casts are made one segment at a time
    mathematics=KEEPS,
    apply=lambda live, settings: live.recomputing.set_checkpointing(settings),
    lighter=_recomputed,
    saves="backward recomputes activations that forward would keep",
    adapts=_adapts_blocks,
    retired={"all": "none"},  # one segment over all blocks, which saved nothing
    exported=carried,
)


def _share(value: Any) -> float:
    """Return a number from 0 to 1."""
    number = not_negative(value)
    if number > 1:
        raise ValueError(value)
    return number


def checkpointing_of(settings: Settings) -> str:
    """Return the checkpointing that is in effect: with a budget of 1 there is nothing to compute again."""
    keeps_all = settings.checkpointing == "selective" and settings.activation_budget == 1
    return "none" if keeps_all else str(settings.checkpointing)


def _budget_is_selective(before: Settings, after: Settings, named: Collection[str], ranks: int) -> Changes:
    if "activation_budget" in named and "checkpointing" not in named:
        return {"checkpointing": "selective"}
    return {}


ACTIVATION_BUDGET = Knob(
    "activation_budget",
    0.5,
    "the share of blocks' activations that checkpointing=selective keeps; setting it switches that on",
    parse=_share,
    allowed="a number from 0 to 1, such as 0.5",
    short="budget ",
    moves={ACTIVATIONS: HALF, CASTS: SOME},
    acts=lambda settings: settings.checkpointing == "selective",
    mathematics=KEEPS,
    settles=_budget_is_selective,
    exported=carried,
)


def _offloaded(need: Need) -> Iterator[Changes]:
    able = need.handles.offloads and need.settings.compile == "off" and not need.of_update
    if able and need.settings.offload_activations == "off":
        yield {"offload_activations": "on"}


OFFLOAD_ACTIVATIONS = Knob(
    "offload_activations",
    "off",
    "where what forward saves waits for backward: on the GPU, or in host memory",
    choices=("off", "on"),
    means={
        "off": "on the GPU",
        "on": "in host memory, copied there and back; the same numbers, to the bit",
    },
    short="offload ",
    moves={ACTIVATIONS: MOST, LOGITS: MOST},
    mathematics=KEEPS,
    apply=lambda live, settings: live.recomputing.set_offload(settings.offload_activations),
    lighter=_offloaded,
    saves="activations wait in host memory for backward",
    exported=carried,
)


def _compiled(need: Need) -> Iterator[Changes]:
    able = need.handles.compiles and need.settings.compile == "off" and not need.of_update
    if able and checkpointing_of(need.settings) != "selective":
        yield {"compile": "blocks"}


def _uncompiled(value: str, workload: WorkloadInfo | None) -> str:
    return (workload.why_uncompiled or "") if value == "blocks" and workload else ""


def _joined_operators(settings: Settings, ranks: int) -> str:
    if settings.compile == "off":
        return ""
    if settings.offload_activations == "on":
        return (
            "offload_activations=on follows each tensor that forward saves, and compile=blocks saves them by code of "
            "its own. Use one of the two."
        )
    if has_narrow_weights(settings):
        return (
            "compile=blocks takes weights as they are when it compiles, and precision=bf16_weights changes their type. "
            "Use precision=bf16, or compile=off."
        )
    if checkpointing_of(settings) != "selective":
        return ""
    return (
        "checkpointing=selective looks at each operator of a block, and compile=blocks joins them. Use compile=off, or "
        "checkpointing=blocks, sqrt or none."
    )


COMPILED_AT_MOST = 8
"""Times that a block may be compiled, for other types and kinds of what it is given: torch's own limit for a code."""
COMPILED = "compile=blocks compiled"
"""How a rank's report of what it compiled begins."""
UNCOMPILED = (
    "compile=blocks cannot be said without a session: what compiled blocks need is known only once they are compiled. "
    "Load the model on ranks and %hvd_predict compile=blocks, or ask about compile=off."
)
NOT_OFFLOADED = (
    "offload_activations=on cannot be said without a session: a step without memory does not tell what would wait in "
    "host memory. Load the model on ranks and %hvd_predict offload_activations=on there, or ask about off."
)
COMPILE = Knob(
    "compile",
    "off",
    "blocks: torch.compile joins the operators of each block; the first step compiles, for seconds to minutes",
    choices=("off", "blocks"),
    means={
        "off": "operators run one after the other",
        "blocks": "each block runs as compiled code; fewer results lie in memory, and sums round otherwise",
    },
    short="compile ",
    moves={ACTIVATIONS: SOME, TEMPORARIES: SOME},
    mathematics=KEEPS_TO_ROUNDING,
    refuses=_uncompiled,
    conflicts=_joined_operators,
    adapts=lambda settings, workload: {"compile": "off"} if workload.why_uncompiled else {},
    apply=lambda live, settings: live.recomputing.set_compile(settings.compile),
    lighter=_compiled,
    saves="compiled blocks keep fewer results",
    asked_alone="known only once it is compiled: %hvd_predict compile=blocks does that, and says so",
    exported=carried,
)


def _in_parts(need: Need) -> Iterator[Changes]:
    if need.handles.logits and need.settings.loss_head == "full" and not need.of_update:
        yield {"loss_head": "chunked"}


def _small_logits(value: str, workload: WorkloadInfo | None) -> str:
    if value == "full" or workload is None or workload.logits:
        return ""
    return (
        f"loss_head={value} frees nothing here: no torch.nn.Linear with more outputs than inputs makes the logits of "
        f"{workload.name}. Use loss_head=full, or name the layer that does in Workload(head=...)."
    )


def _no_parts(settings: Settings, workload: WorkloadInfo) -> Changes:
    return {} if workload.logits else {"loss_head": "full"}


LOSS_HEAD = Knob(
    "loss_head",
    "full",
    "a language model's logits: of all tokens at once, or of a sixteenth at a time, which backward computes again",
    choices=("full", "chunked"),
    means={
        "full": "logits of all tokens lie in memory, and their gradients beside them",
        "chunked": "logits of a sixteenth of the tokens do; backward computes each part again",
    },
    short="logits ",
    moves={LOGITS: MOST, TEMPORARIES: HALF},
    mathematics=KEEPS_TO_ROUNDING,
    apply=lambda live, settings: live.recomputing.set_loss_head(settings.loss_head),
    lighter=_in_parts,
    saves="the loss has logits of a sixteenth of the tokens at a time",
    refuses=_small_logits,
    adapts=_no_parts,
    exported=carried,
)


MICRO_BATCHES = 2  # show a step's peak: from the second one on, gradients lie beside the activations


SILLY = 5
"""Times as many micro-batches at once as a split may have: 173 × 1 becomes 87 × 2, and not 1 × 173."""


def shrunk(settings: Kind) -> Kind | None:
    """Return the same global batch in smaller micro-batches, half as large if possible; ``None`` below one sample."""
    size = settings.batch_size
    factor = next((divisor for divisor in range(2, size + 1) if size % divisor == 0), None)
    if factor is None:
        return None
    return settings.replace(batch_size=size // factor, accumulation_steps=settings.accumulation_steps * factor)


def halved(settings: Kind, of: Kind | None = None) -> Kind | None:
    """Return about the same global batch in micro-batches of half the size; ``None`` below one sample.

    The same to the sample where micro-batches of a half to a fifth divide it, such as 9 × 1 in 3 × 3; else some more,
    such as 87 × 2 for 173 × 1.

    Args:
        of: the settings whose samples per step are kept, where these are some that were split already.
    """
    whole, size = of or settings, settings.batch_size
    exact = shrunk(settings)
    if size == 1 or exact is None:
        return None
    if whole.samples_per_rank == settings.samples_per_rank and size <= SILLY * exact.batch_size:
        return exact
    half = (size + 1) // 2
    return settings.replace(batch_size=half, accumulation_steps=max(1, round(whole.samples_per_rank / half)))


def shortened(settings: Kind) -> Kind:
    """Return the same with as few micro-batches as show a step's peak."""
    return settings.replace(accumulation_steps=min(settings.accumulation_steps, MICRO_BATCHES))


def _as_many_samples(before: Values, after: Values) -> str:
    """Samples of one step split into other micro-batches are the same samples, added up in another order."""
    return KEEPS_TO_ROUNDING if before.samples_per_rank == after.samples_per_rank else CHANGES


def why_fixed(value: int, data: DataInfo) -> str:
    """Return why micro-batches that the data brings cannot be of another size."""
    return (
        f"batch_size={value} cannot be used: the data already comes in micro-batches of {data.batch_size} samples. "
        "Change accumulation_steps, or let the data give single samples."
    )


def _refuses(value: int, workload: WorkloadInfo | None) -> str:
    fixed = workload and workload.data.batched and workload.data.batch_size not in (None, value)
    return why_fixed(value, workload.data) if workload and fixed else ""


def _adapts(settings: Settings, workload: WorkloadInfo) -> Changes:
    return {} if workload.data.batch_size is None else {"batch_size": workload.data.batch_size}


def _fewer_at_once(need: Need) -> Iterator[Changes]:
    smaller = None if need.of_update else halved(need.settings)
    if smaller:
        yield {"batch_size": smaller.batch_size, "accumulation_steps": smaller.accumulation_steps}


def _no_accumulation(need: Need) -> Iterator[Changes]:
    # From the second micro-batch on gradients are alive during forward too.
    if need.settings.accumulation_steps > 1:
        yield {"accumulation_steps": 1}


BATCH_SIZE = Knob(
    "batch_size",
    32,
    "samples in one micro-batch on one rank",
    in_front=True,
    parse=whole,
    allowed="a whole number of at least 1, such as 32",
    short="batch ",
    moves={ACTIVATIONS: HALF, LOGITS: HALF, INPUTS: HALF, TEMPORARIES: HALF, INSIDE_OPERATORS: HALF},
    mathematics=_as_many_samples,
    lighter=_fewer_at_once,
    saves="fewer samples are in memory at once",
    refuses=_refuses,
    adapts=_adapts,
    exported=carried,
)

ACCUMULATION_STEPS = Knob(
    "accumulation_steps",
    1,
    "micro-batches per optimizer step; other micro-batches of as many samples in all are the same to rounding",
    in_front=True,
    parse=whole,
    allowed="a whole number of at least 1, such as 4",
    label="accumulation",  # the name is too long for a narrow panel
    short="accum ",
    moves={GRADIENTS: SOME},
    mathematics=_as_many_samples,
    lighter=_no_accumulation,
    saves="no gradients lie beside the activations",
    exported=carried,
)
