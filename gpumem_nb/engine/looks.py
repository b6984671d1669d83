"""Looks into what is trained, and into a step that is undone: facts of the model, and whether ranks are in step.

Whether ranks are in step is told by checksums of what they hold, and by which samples they see: of what is loaded, or
of the user's own loop by the names of its variables. Of that loop each rank says what it sees without the others, so
that one that is out of step is heard as well.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from ..internals.torch_internals import batch_norms
from ..memory.tensors import attributes, tensors_in
from ..shared.errors import WorkloadError
from ..shared.knobs.step import has_narrow_weights
from ..shared.messages import Chunk
from ..shared.questions import MOST_SAMPLES, InputFacts, ModelFacts, SeenSamples, SyncLook, TensorTotal
from ..shared.settings import Settings
from .cells import attached_names
from .copies import checksum
from .data.stream import ShardedStream
from .link.communicator import here
from .random_state import RandomState, begin_at, seeded, set_aside
from .seen_shapes import SeenShapes
from .step.parts import evaluating
from .step.samples import Looks
from .step.trials import NO_CONFIGURATION

if TYPE_CHECKING:
    from .step.trainer import Trainer

Norms = list[tuple[float, float]]
_OTHER_SEED = 1
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_WHOLE_BATCH, _PARTS = 8, (2, 4)  # samples, and parts: classes and lengths hardly ever come out alike in all of them
# Of a gradient's norm: more than fp32, or TF32 on a GPU, loses by adding up in another order; the same for 16 bits.
_ROUNDING, _ROUNDING_16_BIT = 0.01, 0.05
_WHOLE = (torch.uint8, torch.int16, torch.int32)  # from the smallest: what images, labels and tokens come in


def model_facts(trainer: Trainer, inputs: bool) -> ModelFacts:
    """Return facts of the loaded model; for ``inputs`` all ranks take a step, which is undone."""
    live, found, batches = trainer.live, list[InputFacts](), 0

    def look(batch: Any) -> None:
        nonlocal batches
        batches += 1
        if not found:
            content = list(batch.values()) if isinstance(batch, Mapping) else batch
            found.extend(map(_facts, tensors_in(content)))

    shapes = SeenShapes()
    if inputs:
        with shapes:
            trainer.look_into_step(Looks(batch=look), live.settings)
    names = {id(param): name for name, param in live.parts.named_parameters()}
    state = [pair for pair in live.optimizer.state.items() if isinstance(pair[0], Tensor) and not pair[0].requires_grad]
    frozen = [(names.get(id(param), ""), sum(one.nbytes for one in tensors_in(kept))) for param, kept in state]
    wide = [(name, param.nbytes) for name, param in live.parts.named_parameters() if param.dtype == torch.float64]
    groups = live.optimizer.param_groups
    weights = sum(len(group["params"]) for group in groups)
    eager = _eager(live.model)
    scores = [] if eager is None else shapes.scores[: len(shapes.scores) // max(1, batches)]  # of one micro-batch
    return ModelFacts(
        _held(frozen),
        _held(wide),
        tuple(found),
        bool(eager),
        tuple(scores),
        shapes.logits,
        len(groups),
        weights,
        attached_names.others(vars(sys.modules["__main__"])),
        torch.get_num_threads(),
    )


def _eager(model: nn.Module) -> bool | None:
    """Return whether a model of Hugging Face computes attention eagerly and could leave that to SDPA.

    ``None`` for one that cannot.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", "") != "eager":
            continue
        able = getattr(module, "_supports_sdpa", False) and not getattr(config, "output_attentions", False)
        return True if able else None  # SDPA gives no attentions
    return False


def splits_to_mean(trainer: Trainer) -> bool | None:
    """Find out whether the gradient of a micro-batch is the mean of its parts' gradients.

    It is not for losses over pairs of samples, sums, means over tokens, and classes with weights. All ranks take small
    steps, which are undone. Dropout and batch norms are in evaluation mode: they would tell parts apart. So is all the
    rest if random numbers are drawn all the same; if not, it is in training mode, in which models may compute something
    else. ``None`` if a step fails, or if the whole one once more, with other random numbers, has another gradient, too.
    """
    live = trainer.live
    modules = list(live.parts.modules())
    norms = [norm for part in live.parts.named.values() for norm in batch_norms(part)]
    calm = [*norms, *(one for one in modules if isinstance(one, _DROPOUTS))]
    wide = "fp32" if not has_narrow_weights(live.settings) else live.settings.precision  # there may be no room for fp32
    whole = live.settings.replace(
        batch_size=_WHOLE_BATCH,
        accumulation_steps=1,
        precision=wide,
        checkpointing="none",
        reduction="average",
        shard_gradients="off",
    )
    narrow = any(param.dtype.itemsize < torch.float32.itemsize for param in live.parameters)
    rounding = _ROUNDING_16_BIT if narrow else _ROUNDING

    def alike(one: Norms | None, other: Norms | None) -> bool | None:
        """Agreed upon by all ranks, which go on together; ``None`` if a gradient is missing on any."""
        if here().any_rank(one is None or other is None, "splits"):
            return None
        return not here().any_rank(not _alike(one or [], other or [], rounding), "splits alike")

    first, drew = _gradients_of(trainer, whole, calm)
    if here().any_rank(drew, "splits drawn"):
        calm = modules
        first, _ = _gradients_of(trainer, whole, calm)
    for parts in _PARTS:
        split = whole.replace(batch_size=_WHOLE_BATCH // parts, accumulation_steps=parts)
        found = alike(first, _gradients_of(trainer, split, calm)[0])
        if found is False and not alike(first, _gradients_of(trainer, whole, calm, _OTHER_SEED)[0]):
            found = None
        if not found:
            return found
    return True


def _gradients_of(
    trainer: Trainer, settings: Settings, calm: Iterable[nn.Module], seed: int | None = None
) -> tuple[Norms | None, bool]:
    """Take a step that is undone, with some modules in evaluation mode; with a ``seed``, it draws other numbers.

    Returns:
        The gradients, ``None`` if it fails here; and whether forward or backward drew random numbers.
    """
    seen, drew, chunk = list[Norms](), False, Chunk(settings, NO_CONFIGURATION, 1, trial=True)

    def look() -> None:
        nonlocal drew
        drew = before.moved_anywhere()
        seen.append(_gradients(trainer.live.parameters))

    trainer.stepper.looks = Looks(gradients=look)
    try:
        with ExitStack() as stack:
            stack.enter_context(trainer.aside(settings))
            why_not = stack.enter_context(trainer.trying(chunk))
            stack.enter_context(evaluating(calm))
            if seed is not None:
                stack.enter_context(seeded(seed))
            before = RandomState.take()
            trainer.try_step(why_not, chunk)
    finally:
        trainer.stepper.looks = Looks()
    return (seen[0] if seen else None), drew


def _gradients(params: Iterable[Tensor]) -> Norms:
    """Return each gradient's norm, and its product with its weight, which tells apart those of the same norm."""
    numbers = []
    for param in params:
        if param.grad is None:
            continue
        grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
        norm = torch.linalg.vector_norm(grad)
        numbers.append(torch.stack([norm, (grad * param.detach()).sum().abs() / (1e-12 + param.detach().norm())]))
    return [(float(norm), float(along)) for norm, along in torch.stack(numbers).tolist()] if numbers else []


def _alike(one: Norms, other: Norms, rounding: float) -> bool:
    if len(one) != len(other):
        return False
    largest = max((norm for norm, _ in one), default=0.0)
    if not math.isfinite(largest):
        return False
    return all(
        abs(a - b) <= rounding * max(norm, 1e-3 * largest)
        for (norm, along), (norm_b, along_b) in zip(one, other, strict=True)
        for a, b in ((norm, norm_b), (along, along_b))
    )


def _held(sizes: Iterable[tuple[str, int]]) -> TensorTotal:
    ordered = sorted(((size, name) for name, size in sizes if size), reverse=True)
    return TensorTotal(sum(size for size, _ in ordered), len(ordered), ordered[0][1]) if ordered else TensorTotal()


def _facts(tensor: Tensor) -> InputFacts:
    enough = _enough(tensor)
    spare = tensor.nbytes - tensor.numel() * enough.itemsize
    return InputFacts(tuple(tensor.shape), _name(tensor.dtype), tensor.nbytes, _name(enough), spare)


def _enough(tensor: Tensor) -> torch.dtype:
    """Return the smallest type that its values are commonly kept in."""
    if tensor.dtype == torch.float64:
        return torch.float32
    if tensor.dtype not in (torch.int64, torch.int32) or not tensor.numel():
        return tensor.dtype
    low, high = (int(value) for value in tensor.aminmax())
    fits = (kind for kind in _WHOLE if torch.iinfo(kind).min <= low and high <= torch.iinfo(kind).max)
    smaller = next(fits, tensor.dtype)
    return smaller if smaller.itemsize < tensor.dtype.itemsize else tensor.dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if TYPE_CHECKING:
    from .step.trainer import Trainer

_BATCHES = 20  # of data without numbered samples
_PLAIN = (str, bytes, int, float, bool, type(None))


def sync_of_own(model: Any, data: Any) -> SyncLook:
    """Return the same of the user's own loop, as it is now.

    Args:
        model: whose weights and gradients are meant; may be wrapped for data parallelism.
        data: what this rank goes through in an epoch, or ``None``. Its order is asked for, or a few micro-batches are
            read; random numbers are put back.

    Raises:
        WorkloadError: ``model`` is not a module, or ``data`` can be iterated only once.
    """
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"A {type(model).__name__} is not a model: name a torch.nn.Module, such as model=net.")
    params = dict(model.named_parameters())
    grads = {name: param.grad for name, param in params.items() if param.grad is not None}
    samples = None if data is None else _samples(data)
    return SyncLook(_checksums(params), _checksums(dict(model.named_buffers())), _checksums(grads), samples)


def sync_of_loaded(trainer: Trainer) -> SyncLook:
    """Return checksums of the loaded model; the gradients are of a step that all ranks take and undo.

    Raises:
        WorkloadError: this rank could not take it.
    """
    live, stream, gradients = trainer.live, trainer.stream, dict[str, int]()

    def look() -> None:
        params = live.parts.named_parameters()
        found = _checksums({name: param.grad for name, param in params if param.grad is not None})
        gradients.update(found)

    whole = live.settings.replace(shard_gradients="off")
    if failure := trainer.look_into_step(Looks(gradients=look), whole):
        raise WorkloadError(f"The step whose gradients would be compared could not be taken: {failure.message}")
    samples = None
    if isinstance(stream, ShardedStream):
        numbers, repeats = stream.left_of_epoch(
            live.settings.batch_size, live.settings.accumulation_steps, MOST_SAMPLES
        )
        what = "micro-batches" if stream.info.batched else "samples"
        taken, numbered = _as_numbers(numbers)
        samples = SeenSamples(taken, what, numbered, repeats)
    weights, buffers = dict(live.parts.named_parameters()), dict(live.parts.named_buffers())
    return SyncLook(_checksums(weights), _checksums(buffers), gradients, samples)


def _checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: _checksum(tensor) for name, tensor in tensors.items()}


def _checksum(tensor: Tensor, before: int = 0) -> int:
    """Return a checksum of all bits, which also changes when they change places."""
    if tensor.is_sparse:
        tensor = tensor.detach().coalesce()
        return _checksum(tensor.values(), _checksum(tensor.indices(), before))
    return zlib.crc32(int(checksum(tensor)).to_bytes(8, "little", signed=True), before)


def _samples(data: Any) -> SeenSamples | None:
    with set_aside(), _generators_put_back(data):
        if isinstance(data, DataLoader):
            with suppress(TypeError):  # of an iterable dataset
                return _of_loader(data)
        try:
            iterator = iter(data)
        except TypeError:
            raise WorkloadError(
                f"data ({type(data).__name__}) cannot be iterated: name a DataLoader or a list."
            ) from None
        if iterator is data:
            raise WorkloadError(
                "data can be iterated only once, so no rank can look ahead: name the DataLoader itself."
            )
        found = [_content(batch) for batch in islice(iterator, _BATCHES)]
    known = tuple(one for one in found if one is not None)
    return SeenSamples(known, "micro-batches", numbered=False) if len(known) == len(found) else None


def _of_loader(loader: DataLoader[Any]) -> SeenSamples:
    order: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    keys: Any = (key for entry in order for key in (entry if isinstance(entry, list) else [entry]))
    keys, dataset = list(islice(keys, MOST_SAMPLES)), loader.dataset
    while isinstance(dataset, Subset):
        keys, dataset = [dataset.indices[key] for key in keys], dataset.dataset
    numbers, numbered = _as_numbers(keys)
    return SeenSamples(numbers, "samples", numbered, len(set(numbers)) < len(numbers), _of_dataset(dataset))


def _as_numbers(keys: Any) -> tuple[tuple[int, ...], bool]:
    """Return the keys if all are whole numbers, else checksums of them; and whether they were."""
    if all(isinstance(key, (int, np.integer)) for key in keys):
        return tuple(map(int, keys)), True
    return tuple(zlib.crc32(repr(key).encode()) for key in keys), False


def _of_dataset(dataset: Any) -> int | None:
    """Return a checksum of its first, middle and last sample."""
    with suppress(Exception):  # it need not be indexed by numbers
        begin_at(0, 0)  # what is random in a sample is then the same for all
        return _content([dataset[place] for place in (0, len(dataset) // 2, len(dataset) - 1)])
    return None


def _content(batch: Any) -> int | None:
    """A checksum of anything made of tensors, arrays and plain values; ``None`` where it has something else in it."""
    found = 0
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            found = _checksum(leaf, found)
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:  # which has addresses in it
            found = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), found)
        elif isinstance(leaf, _PLAIN):
            found = zlib.crc32(repr(leaf).encode(), found)
        else:
            return None
    return found


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif (found := attributes(batch)) is not None:
        batch = list(found.values())
    if isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _leaves(part)
    else:
        yield batch


@contextmanager
def _generators_put_back(data: Any) -> Iterator[None]:
    """Inside, samplers may draw from generators of their own."""
    batches = getattr(data, "batch_sampler", None)
    owners = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    found = {id(one): one for owner in owners if isinstance(one := getattr(owner, "generator", None), torch.Generator)}
    with ExitStack() as stack:
        for generator in found.values():
            stack.callback(generator.set_state, generator.get_state())
        yield
