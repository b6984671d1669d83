"""Lines and expressions of a script about data and recomputed blocks."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, sqrt

from ..shared.knobs.step import COMPILED_AT_MOST
from .order import Order, quoted

WIDTH = 120
DTYPES = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}
_ROWS = {"tuple": "TensorDataset(*map(torch.as_tensor, {}))", "dict": "Rows({})"}


class Batches:
    """The lines of a script that are about its data."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._settings, self._facts, self._source = order.settings, order.facts, order.source
        self._own = order.source.kind != "ready"

    def data(self) -> Iterator[str]:
        """Makes the data."""
        options, facts = self._source.options, self._facts
        if not self._own:
            digits = "resolution" in options
            made = f"Digits({options['resolution']}" if digits else f"Text({options['sequence_length']}"
            yield f"data = {made})"
            yield f"eval_data = {made}, train=False)"
            return
        if self._source.kind == "functions":
            yield "data = make_data()"
            if self._order.evaluates:
                yield "eval_data = make_eval_data()"
        if facts.loader:
            yield "dataset, collate = data.dataset, data.collate_fn"
        elif facts.columns:
            yield f"dataset = {_ROWS[facts.columns].format('data')}"
        if facts.draws:
            inner = self._dataset()
            yield f"samples = Seeded({inner}, {'collate' if facts.loader else 'default_collate'}, {self._facts.seed})"
        if self._order.evaluates and facts.eval_form == "loader":
            yield "eval_set, eval_collate = eval_data.dataset, eval_data.collate_fn"
        elif self._order.evaluates and facts.eval_form in _ROWS:
            yield f"eval_set = {_ROWS[facts.eval_form].format('eval_data')}"

    def _dataset(self) -> str:
        return "dataset" if self._own and (self._facts.loader or self._facts.columns) else "data"

    def loader(self, flags: frozenset[str]) -> Iterator[str]:
        """Fetches the micro-batches of this rank."""
        settings, dataset = self._settings, self._dataset()
        options = ["samples" if self._facts.draws else dataset]
        options += [f'batch_sampler=micro_batches(len({dataset}), args, start["position"])']
        if self._facts.draws:
            options += ["collate_fn=as_it_is"]
        elif self._facts.loader and self._own:
            options += ["collate_fn=collate"]
        if settings.num_workers:
            options += [f"num_workers={settings.num_workers}"]
            options += [f"prefetch_factor={settings.prefetch_factor}"] if settings.prefetch_factor != 2 else []
            options += ['multiprocessing_context="fork"'] if self._own else []
            options += [f"{name}=data.{name}" for name in self._facts.handed_on if name != "multiprocessing_context"]
        options += ["pin_memory=torch.cuda.is_available()"] if settings.pin_memory else []
        # The model's numbers are not drawn from.
        options += ["generator=torch.Generator()"] if "random_numbers" in flags else []
        yield from wrapped("batches = iter(DataLoader(", options, 4, close="))")

    def tokens(self) -> str:
        """Return how many labels of a batch count in the loss of a whole step."""
        if self._settings.accumulation_steps == 1 or not self._facts.tokens or not self._own:
            return ""
        labels = 'batch["labels"][..., 1:]' if self._facts.tokens == "shifted" else 'batch["labels"]'
        return f"{labels}.ne(-100).sum()"

    def called(self, model: str, loss: str, items: str = "") -> str:
        """Return the loss of ``batch``."""
        if not self._own:
            return self._cross_entropy(f"{model}(inputs).float()")
        if self._facts.loss == "model":
            output = f"{model}(**batch{items})" if self._facts.batch == "mapping" else f"{model}(batch)"
            return f'{output}["loss"]' if self._facts.loss_key else f"{output}.loss"
        return f"{loss}({model}(batch[0]), batch[1])" if self._facts.loss == "outputs" else f"{loss}({model}, batch)"

    def loss(self, flags: frozenset[str]) -> str:
        """Of a micro-batch, in training."""
        if "with_loss" in flags:
            return "ddp(batch)"
        items = ", num_items_in_batch=items" if self.tokens() else ""
        return self.called("ddp" if self._order.ddp else "model", "loss_of", items)

    def _cross_entropy(self, logits: str) -> str:
        """Of a ready-made workload; in fp32 under autocast too."""
        if self._source.template == "digits":
            return f"cross_entropy({logits}, targets)"
        return f"cross_entropy({logits}.flatten(0, 1), targets.flatten())"

    def found(self) -> Iterator[str]:
        """Yield what an evaluation finds in ``batch``."""
        if self._source.template == "digits":
            yield "logits = model(inputs).float()"
            yield f"loss = {self._cross_entropy('logits')}"
        else:
            yield f"loss = {self.called('model', 'loss_of')}"
        if self._own and self._facts.metric:
            called = "metric(model(batch[0]), batch[1])" if self._facts.metric == "outputs" else "metric(model, batch)"
            chunked = self._settings.loss_head == "chunked"
            yield from ([f"head = {_module(self._facts.head)}", 'parts = vars(head).pop("forward")'] if chunked else [])
            yield f"found = {called}"
            yield from (["head.forward = parts"] if chunked else [])
            name = quoted(self._source.names["metric"])
            yield f"found = found if isinstance(found, dict) else {{{name}: found}}"

    def around(self) -> Iterator[str]:
        """Yield what the forward of a micro-batch runs in."""
        if dtype := DTYPES.get(self._settings.precision):
            yield f"torch.autocast(device.type, dtype={dtype})"
        if self._settings.offload_activations == "on":  # with the weights, which torch does not leave out
            yield 'torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")'

    def moves(self) -> bool:
        """Return whether batches are more than two tensors."""
        return self._own and self._facts.batch != "pair"

    def moved(self, batch: str) -> str:
        """Brings a batch to the device."""
        if self.moves():
            return f"batch = batch_on({batch}, device)"
        copying = ", non_blocking=True" if self._settings.pin_memory else ""
        if self._own:
            return f"batch = [part.to(device{copying}) for part in {batch}]"
        return f"inputs, targets = (part.to(device{copying}) for part in {batch})"

    def eval_collate(self) -> str:
        """Return what makes batches of the validation data."""
        return "eval_collate" if self._own and self._facts.eval_form == "loader" else "default_collate"

    def eval_needs(self) -> Iterator[str]:
        """Yield the lines that give an evaluation the user's own objects."""
        if self._own and self._facts.loss != "model":
            yield "loss_of"
        if self._own and self._facts.metric:
            yield "metric"
        if self.eval_collate() == "eval_collate":
            yield "eval_collate"

    def over_modules(self) -> str:
        """Goes over all modules of an evaluation."""
        parts = ["loss_of"] if self._facts.criterion else []
        parts += ["metric"] if self._facts.metric_module else []
        if not (self._own and parts):
            return "for module in model.modules()"
        return f"for part in ({', '.join(['model', *parts])}) for module in part.modules()"


def wrapped(opening: str, options: list[str], indent: int, close: str = ")") -> Iterator[str]:
    """Yield a call in one line, or with its arguments in lines of their own, as ruff formats it."""
    line = f"{opening}{', '.join(options)}{close}"
    if indent + len(line) <= WIDTH:
        yield line
        return
    inner = ", ".join(options)
    if len(close) == 1 and indent + 4 + len(inner) <= WIDTH:
        yield from (opening, f"    {inner}", close)
        return
    if len(close) > 1:
        outer, _, call = opening.rpartition("iter(")
        yield f"{outer}iter("
        yield from (f"    {one}" for one in wrapped(call, options, indent + 4))
        yield ")"
        return
    yield opening
    yield from (f"    {one}," for one in options)
    yield close


_AGAIN = (
    "    again = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)",
    "    block.forward = functools.partial(again, block.forward)",
)
_NUMBERED = re.compile(r"(.*)\.(\d+)")


def segment_length(blocks: int, mode: str) -> int:
    """Return how many blocks are recomputed together."""
    return ceil(sqrt(blocks)) if mode == "sqrt" else 1


Calls = Mapping[str, Sequence[int]]


def selective(names: Sequence[str], norms: bool, kept: Sequence[Calls]) -> Iterator[str]:
    """Lines that recompute these modules of ``model`` in backward, but for what these calls of operators gave."""
    alike: dict[str, tuple[Calls, list[str]]] = {}
    for name, calls in zip(names, kept, strict=True):
        alike.setdefault(repr(calls), (calls, []))[1].append(name)
    for calls, of in alike.values():
        if not calls:
            yield from checkpointed(of, norms, 1)
            continue
        yield f"for block in {_which(of)}:"
        listed = [f"{quoted(name)}: {numbers}" for name, numbers in calls.items()]
        yield from ("    " + line for line in wrapped("kept = {", listed, 4, "}"))
        yield "    contexts = functools.partial(keeping, block, kept)"
        yield from _AGAIN


def checkpointed(names: Sequence[str], norms: bool, length: int) -> Iterator[str]:
    """Lines that recompute these modules of ``model`` in backward, ``length`` of them together.

    With ``norms``, recomputing is no other batch for statistics of batch norms.
    """
    if length > 1:
        yield f"recompute_together({_which(names)}, {length})"
        return
    yield f"for block in {_which(names)}:"
    if norms:
        yield "    contexts = functools.partial(once_in_statistics, block)"
        yield from _AGAIN
    else:
        yield "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"


def compiled(names: Sequence[str]) -> Iterator[str]:
    """Lines that compile these modules of ``model``, once for batches of all sizes, with the same random numbers."""
    yield f"torch._dynamo.config.recompile_limit = {COMPILED_AT_MOST * len(names)}  # of all blocks together"
    yield "torch._dynamo.config.use_numpy_random_stream = True"
    yield "torch.fx.experimental._config.use_duck_shape = False  # for other sizes, too, where two are the same"
    yield f"for block in {_which(names)}:"
    yield '    block.forward = torch.compile(block.forward, dynamic=True, options={"fallback_random": True})'


def in_parts(head: str) -> Iterator[str]:
    """Lines that have the logits of this module of ``model`` in parts."""
    yield f"head = {_module(head)}"
    yield "head.forward = functools.partial(logits_of, head)"


def of_muon(named: str, weights: str, others: Sequence[str]) -> Iterator[str]:
    """Lines that find the places of hidden matrices among ``weights``; ``others`` have two dimensions and are none."""
    yield "# Muon is made for the matrices of hidden layers: AdamW updates all else."
    yield from wrapped("others = [", list(map(quoted, others)), 4, close="]")
    yield f"hidden = {{weight for name, weight in {named} if weight.ndim == 2 and name not in others}}"
    yield f"weights = {weights if weights.startswith('[') else f'[*{weights}]'}"
    yield "matrices = tuple(place for place, weight in enumerate(weights) if weight in hidden)"


def _module(name: str) -> str:
    plain = all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split("."))
    return f"model.{name}" if plain else f"model.get_submodule({quoted(name)})"


def _which(names: Sequence[str]) -> str:
    """Return an expression for the modules: the list that holds them, where they are all of it."""
    found = [_NUMBERED.fullmatch(name) for name in names]
    parents = {match[1] if match else "" for match in found}
    if len(parents) == 1 and all(found) and [match and match[2] for match in found] == [*map(str, range(len(names)))]:
        parent = parents.pop()
        return f"{_module(parent)}[: {len(names)}]"
    listed = ", ".join(map(quoted, names))
    return f"map(model.get_submodule, [{listed}])"
