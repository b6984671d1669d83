"""A script for what is trained under some settings: which lines of the template it needs, and what stands in them."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

from ..shared.knobs.communication import VARIABLES
from ..shared.knobs.step import checkpointing_of
from ..shared.settings import OWN
from .imports import check_code, check_names, own_modules
from .lines import DTYPES, Batches, checkpointed, compiled, in_parts, of_muon, segment_length, selective, wrapped
from .order import MAKERS, PREPARED, ROLES, Order, quoted
from .templating import as_on_ranks, render

_OPTIMIZERS = {
    "sgd": "torch.optim.SGD({}, lr={}{})",
    "momentum": "torch.optim.SGD({}, lr={}, momentum=0.9{})",
    "adam": "torch.optim.Adam({}, lr={}{})",
    "adamw": "torch.optim.AdamW({}, lr={}{})",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit({}, lr={}{})",
    "adafactor": "torch.optim.Adafactor({}, lr={}{})",
    "muon": 'MuonAndAdamW([{{"params": {}, "matrices": matrices}}], lr={}{})',
}
_IMPLEMENTATIONS = {"foreach": ", foreach=True", "fused": ", fused=True", "loop": ", foreach=False", "default": ""}
_HELD = '[weight for group in {}.param_groups for weight in group["params"]]'
_GROUP_FLAGS = {
    "foreach": "foreach=True, fused=False",
    "fused": "foreach=False, fused=True",
    "loop": "foreach=False, fused=False",
}
_DEVICE = 'torch.device("cuda" if torch.cuda.is_available() else "cpu")'
_ON_GPU = '[device] if device.type == "cuda" else []'
_PARTS = {"hvd": ("hvd.rank()", "hvd.size()"), "ddp": ("dist.get_rank()", "dist.get_world_size()")}


def script(order: Order) -> str:
    """Return the text of the script.

    Raises:
        WorkloadError: the user's own code defines something under a name that the script needs.
    """
    values = Values(order)
    texts = values.all(values.flags)
    if order.source.kind != "ready":
        check_names(order, render("train", values.flags, texts | {"definitions": "", "imports": ""}))
    text = render("train", values.flags, texts)
    check_code(order.source.definitions, text)
    return text


class Values:
    """The values that fill the template of one script."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._settings, self._facts, self._source = order.settings, order.facts, order.source
        self._rank, self._size = _PARTS["ddp" if order.ddp else "hvd"]
        self._own = order.source.kind != "ready"
        self._checkpointing = checkpointing_of(order.settings)
        self._batches = Batches(order)
        self.flags = frozenset(name for name, holds in self._conditions() if holds)

    def _conditions(self) -> Iterator[tuple[str, Any]]:
        """Flags of the template, and whether each is set."""
        settings, facts, source, order = self._settings, self._facts, self._source, self._order
        ddp = order.ddp
        own_optimizer = settings.optimizer == OWN
        scheduler = settings.lr_schedule == OWN
        warmup = settings.warmup_steps > 0
        ends = settings.lr_schedule in ("cosine", "linear")
        scaled = settings.lr_scaling != "none"
        rated = warmup or ends or scaled
        several = own_optimizer and (facts.groups > 1 or facts.tensor_rate)
        rests = facts.own_scheduler and not scheduler  # which may have begun at 0
        sets_rate = not scheduler and (not several or rated or rests or settings.learning_rate != order.own_rate)
        dropout = bool(source.options.get("dropout"))
        own = self._own
        yield from {
            "ddp": ddp,
            "hvd": not ddp,
            "asks": ddp and "hvd" in source.uses,
            "own": own,
            "lazy_annotations": source.lazy_annotations,
            source.kind: True,
            source.template: not own,
            "separable": source.separable,
            "dropout": dropout,
            "checkpointing": self._checkpointing != "none",
            "selective": self._checkpointing == "selective",
            "in_8_bits": settings.optimizer == "adamw8bit",
            "chunked": settings.loss_head == "chunked",
            "muon": settings.optimizer == "muon",
            "shares": settings.shard_optimizer == "on",
            "state_waits": settings.offload_optimizer == "on",
            "joined": own and self._together() > 1,
            "statistics": (own or self._checkpointing == "selective") and self._checkpointing != "none" and facts.norms,
            "amp": settings.precision != "fp32",
            "offloads": settings.offload_activations == "on",
            "fp16": settings.precision == "fp16",
            "clip": settings.clip_norm is not None,
            "compression": settings.compression != "none",
            "sum": settings.reduction == "sum",
            "adasum": settings.reduction == "adasum",
            "buckets": not facts.partial and settings.reduction != "adasum",
            "own_optimizer": own_optimizer,
            "builds_optimizer": not own_optimizer or source.kind == "functions",
            "fused": settings.optimizer_impl == "fused",
            "warmup": warmup,
            "cosine": settings.lr_schedule == "cosine",
            "linear": settings.lr_schedule == "linear",
            "ends": ends,
            "scaled": scaled,
            "lr_linear": settings.lr_scaling == "linear",
            "lr_sqrt": settings.lr_scaling == "sqrt",
            "schedule": warmup or ends,
            "rated": rated,
            "eval_every": order.eval_every,
            "rates": several and sets_rate,
            "constant": sets_rate and not rated,
            "rate": sets_rate,
            "scheduler": scheduler,
            "shuffled": facts.order == "shuffled",
            "draws": facts.draws,
            "columns": facts.columns == "dict" or facts.eval_form == "dict",
            "moves": self._batches.moves(),
            "with_loss": self._with_loss(),
            "guarded": source.saves,
            "prepares": source.prepares,
            "own_device": self._own_device(),
            "criterion_weights": own and facts.criterion_weights,
            "counts_tokens": bool(self._batches.tokens()),
            "buffers": facts.buffers,
            "modes": facts.evaluating or (own and (facts.criterion or facts.metric_module)),
            "criterion": own and facts.criterion,
            "metric_module": own and facts.metric_module and order.evaluates,
            "evaluates": self._order.evaluates,
            "own_metric": own and bool(facts.metric),
            "seeds_ranks": own or dropout,
            "random_numbers": own or dropout,
            "math": settings.loss_head == "chunked"
            or source.template == "digits"
            or settings.lr_schedule == "cosine"
            or settings.lr_scaling == "sqrt",
            "os": ddp or self._variables(),
            "numpy": True,
            "nn": not own or self._with_loss(),
        }.items()

    def _with_loss(self) -> bool:
        """Return whether DistributedDataParallel gets model and loss as one: it looks for weights in tensors alone."""
        facts, chunked = self._facts, self._settings.loss_head == "chunked" and self._facts.loss == "outputs"
        return self._order.ddp and self._own and (facts.loss == "batch" or facts.criterion_weights or chunked)

    def all(self, flags: frozenset[str]) -> dict[str, str]:
        """Return all of them by name."""
        settings, source, facts, order = self._settings, self._source, self._facts, self._order
        ready = source.kind == "ready"
        resumed = {"model": "" if ready or facts.buffers else "never", "named": "own", "optimizer": ""}
        resumed |= {"scaler": "fp16", "scheduler": "scheduler"}
        texts: dict[str, Any] = {
            "header": order.header,
            "data_names": self._data_names(flags),
            "imports": "\n".join(sorted(source.imports)),
            "paths": self._paths(),
            "join": "\n".join(self._join()),
            "cell_seed": source.cell_seed,
            "hash_seed": quoted(facts.hash_seed),
            "logits": as_on_ranks("replay/logits.py", "PARTS = ") if "chunked" in flags else "",
            "around": ", ".join(self._batches.around()),
            "muon": as_on_ranks("step/muon.py", "class ") if "muon" in flags else "",
            "definitions": self._ready_made(flags) if ready else source.definitions,
            "rank": self._rank,
            "size": self._size,
            "wrapped_loss": self._batches.called("self.model", "self.loss"),
            "what_it_finds": _list("Loss", "accuracy" if "digits" in flags else "metric" if facts.metric else ""),
            "numbers": 3 if "digits" in flags else 2,
            "totals": "loss, accuracy, samples" if "digits" in flags else "loss, samples",
            "validation": 'f"validation: loss {loss / samples:.6g}'
            + (', accuracy {accuracy / samples:.6g}"' if "digits" in flags else '"'),
            "summands": "loss.double(), score" if "digits" in flags else "loss.double()",
            "numbers_aside": f", torch.random.fork_rng(devices={_ON_GPU})" if self._own else "",
            "eval_batch": self._batches.moved(f"{self._batches.eval_collate()}(chosen)"),
            "eval_more": "".join(f", {name}" for name in self._batches.eval_needs()),
            "over_modules": self._batches.over_modules(),
            "eval_set": "eval_set" if facts.eval_form in ("loader", "tuple", "dict") and self._own else "eval_data",
            "dtype": DTYPES.get(settings.precision, ""),
            "found": "\n".join(self._batches.found()),
            "resumed": ", ".join(name for name, flag in resumed.items() if not flag or flag in flags),
            "weights": "named.values()" if self._own else "model.parameters()",
            "cooling_steps": max(1, (settings.schedule_steps or 0) - settings.warmup_steps),
            "optimizer_name": settings.optimizer,
            "optimizer_key": "own_optimizer" if settings.optimizer == OWN else "optimizer",
            "steps": order.steps,
            "eval_every": order.eval_every,
            "seed": facts.seed,
            "roles": ", ".join(self._roles()),
            "prepared": "\n".join(self._unprepared()),
            "given": ", ".join(source.names.values()),
            "device": _DEVICE,
            "data": "\n".join(self._batches.data()),
            "model": self._model(),
            "prepare_model": "\n".join(self._prepared()),
            "frozen": "\n".join(self._frozen()),
            "broadcast": "named" if facts.uncommon or "criterion_weights" in flags else "model.state_dict()",
            "ddp_model": "\n".join(self._ddp_model(flags)),
            "comm_hook": "ddp.register_comm_hook(None, combine)" if flags & {"sum", "compression"} else "",
            "full_rate": "rate" if "scaled" in flags else "args.learning_rate",
            "matrices": "\n".join(self._matrices()),
            "optimizer": self._optimizer(flags),
            "implementation": "\n".join(self._implementation()),
            "distributed": "\n".join(self._distributed(flags)),
            "batches": "\n".join(self._batches.loader(flags)),
            "done": "done" if "schedule" in flags else "0",
            "tokens": self._batches.tokens(),
            "train_batch": self._batches.moved("next(batches)"),
            "loss": self._batches.loss(flags),
            "to_float": ".float()" if self._own else "",
            "clipped": _HELD.format("optimizer") if self._own else "model.parameters()",
        }
        return {name: str(text) for name, text in (settings.as_dict() | texts).items()}

    def _data_names(self, flags: frozenset[str]) -> str:
        own = flags & {"draws", "columns"}
        names = ["DataLoader", *(["Dataset"] if own or "ready" in flags else [])]
        names += ["TensorDataset"] if self._own and "tuple" in (self._facts.columns, self._facts.eval_form) else []
        plain = "evaluates" in flags and self._batches.eval_collate() == "default_collate"
        default = plain or ("draws" in flags and not self._facts.loader)
        return ", ".join([*names, *(["default_collate"] if default else [])])

    def _variables(self) -> dict[str, str]:
        """Return Horovod's variables under these settings; what autotune tries meanwhile does not count."""
        if self._order.ddp:
            return {}
        wanted = dict(self._facts.variables)
        for knob, variable in VARIABLES.items():
            if (value := getattr(self._settings, knob)) is not None:
                wanted[variable.name] = variable.written(value)
        defaults = {one.name: one.default for one in VARIABLES.values()}
        return {name: value for name, value in wanted.items() if value != defaults.get(name)}

    def _paths(self) -> str:
        """Let the script import what lies beside the notebook, wherever the script lies itself."""
        own, here = own_modules(self._order), self._order.folder
        if not {*own.values()} - {here}:
            return ""
        folders = [one for one in dict.fromkeys([*self._facts.modules.values(), *own.values()]) if one != here]
        return f"sys.path[:0] = [{', '.join(map(quoted, folders))}]  # where the session has {', '.join(own)} from"

    def _join(self) -> Iterator[str]:
        if self._source.plots:
            yield 'os.environ.setdefault("MPLBACKEND", "Agg")  # plots open no windows'
        for name, value in self._variables().items():
            yield f"os.environ.setdefault({quoted(name)}, {quoted(value)})  # as in the session"
        if self._order.ddp:
            one_each = 'torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])'  # which NCCL wants
            yield f'dist.init_process_group("nccl" if {one_each} else "gloo")'
        else:
            yield "hvd.init()"
        if self._order.threads is not None:
            yield f"torch.set_num_threads({self._order.threads})  # as in the session: others add up in another order"
        local = 'int(os.environ["LOCAL_RANK"])' if self._order.ddp else "hvd.local_rank()"
        yield "if torch.cuda.is_available():"
        yield f"    torch.cuda.set_device({local} % torch.cuda.device_count())  # shared if too few"
        yield f"device = {_DEVICE}"
        for name, value in (("rank", self._rank), ("size", self._size)):
            if name in self._source.uses:
                yield f"{name} = {value}"
        if "hvd" in self._source.uses and self._order.ddp:
            asked = ["rank=dist.get_rank", "size=dist.get_world_size", f"local_rank=lambda: {local}"]
            yield from wrapped("hvd = SimpleNamespace(", asked, 0)
        if "display" in self._source.uses:
            yield "display = print  # IPython's shows more than a terminal can"

    def _own_device(self) -> bool:
        """Return whether cells define a ``device``, which stays theirs: it may be text, or mean something else."""
        return self._source.kind == "cells" and "device" in self._source.defines

    def _ready_made(self, flags: frozenset[str]) -> str:
        options = self._source.options
        count = options["depth"] * (2 if "digits" in flags else 1)
        blocks = "\n".join(_calls_of_blocks(count, self._checkpointing))
        values = {"call_blocks": blocks, "dropout_argument": ", dropout" if "dropout" in flags else ""}
        return render(self._source.template, flags, values)

    def _roles(self) -> list[str]:
        names = MAKERS if self._source.kind == "functions" else {}
        return [names.get(role, ROLES[role]) for role in self._source.names]

    def _unprepared(self) -> Iterator[str]:
        """Take what accelerate was given out of what it made of that."""
        for role, inside in PREPARED.items() if self._source.prepares else ():
            if role in self._source.names:
                yield f'{role} = getattr({role}, "{inside}", {role})'

    def _model(self) -> str:
        if self._source.kind == "functions":
            return "make_model()"
        options = dict(self._source.options)
        if "resolution" in options:
            return f"ResNet(width={options['width']}, depth={options['depth']})"
        if not options:
            return ""
        options["length"] = options.pop("sequence_length")
        dropout = options.pop("dropout")
        options |= {"dropout": dropout} if dropout else {}
        return f"GPT(data.vocabulary, {', '.join(f'{name}={value}' for name, value in options.items())})"

    def _prepared(self) -> Iterator[str]:
        if self._settings.loss_head == "chunked":
            yield from in_parts(self._facts.head)
        compiles = self._settings.compile == "blocks"
        recomputes = self._own and self._checkpointing not in ("none", "selective")
        if self._facts.cache and (compiles or recomputes or self._checkpointing == "selective"):
            yield "for module in model.modules():"
            yield '    if getattr(getattr(module, "config", None), "use_cache", False):'
            yield "        module.config.use_cache = False  # of generation: recomputation would add to it again"
        if compiles:
            yield from compiled(self._facts.blocks)
        if self._checkpointing == "selective":
            yield from selective(self._facts.blocks, self._facts.norms, self._facts.kept)
        elif recomputes:
            yield from checkpointed(self._facts.blocks, self._facts.norms, self._together())

    def _together(self) -> int:
        """Return how many blocks of the user's own model are recomputed together."""
        return segment_length(len(self._facts.blocks), self._checkpointing)

    def _frozen(self) -> Iterator[str]:
        for name in self._facts.absent if self._own else ():
            yield f"named[{quoted(name)}].requires_grad_(False)  # it gets no gradient"

    def _ddp_model(self, flags: frozenset[str]) -> Iterator[str]:
        module = "WithLoss(model, loss_of)" if "with_loss" in flags else "model"
        options = [module, f"bucket_cap_mb={self._settings.bucket_mib:g}", "gradient_as_bucket_view=True"]
        options += ["broadcast_buffers=False"] if self._facts.buffers else []
        unused = self._facts.partial or self._facts.sometimes
        options += ["find_unused_parameters=True"] if unused else []
        yield from wrapped("ddp = DistributedDataParallel(", options, 4)

    def _optimizer(self, flags: frozenset[str]) -> str:
        settings = self._settings
        if settings.optimizer == OWN:
            return "make_optimizer(named.values())"
        weights = "weights" if "muon" in flags else self._weights()
        rate = "rate_of_step(args, 0)" if "rated" in flags else "args.learning_rate"
        return _OPTIMIZERS[settings.optimizer].format(weights, rate, _IMPLEMENTATIONS[settings.optimizer_impl])

    def _weights(self) -> str:
        """Return an expression for what another optimizer than the own one trains."""
        if "optimizer" in self._source.names:  # whose order it keeps, and whose choice
            made = self._source.kind == "functions"
            return _HELD.format("make_optimizer(named.values())" if made else "optimizer")
        return "named.values()" if self._own else "model.parameters()"

    def _matrices(self) -> Iterator[str]:
        """Tells Muon's weights from those of AdamW."""
        if self._settings.optimizer != "muon":
            return
        named = "named.items()" if self._own else "model.named_parameters()"
        yield from of_muon(named, self._weights(), self._facts.not_hidden)

    def _distributed(self, flags: frozenset[str]) -> Iterator[str]:
        """Makes Horovod's optimizer of the plain one."""
        if "ddp" in flags or "adasum" in flags:
            return
        named = "named.items()" if self._own else "model.named_parameters()"
        options = ["optimizer", f"named_parameters={named}", "backward_passes_per_step=args.accumulation_steps"]
        options += ["compression=hvd.Compression.fp16"] if "compression" in flags else []
        options += ["op=hvd.Sum"] if "sum" in flags else []
        if "buckets" in flags:  # of about as many bytes as the session's
            options += [f"groups={ceil(self._order.parameter_bytes / (self._settings.bucket_mib * 2**20))}"]
        if "own_optimizer" in flags:
            yield "state = optimizer.state"
        yield from wrapped("optimizer = hvd.DistributedOptimizer(", options, 4)
        if "own_optimizer" in flags:
            yield "optimizer.state.update(state)  # the other one is another, with the same weights"

    def _implementation(self) -> Iterator[str]:
        settings = self._settings
        if settings.optimizer == OWN and settings.optimizer_impl != "default":
            yield "for group in optimizer.param_groups:"
            yield f"    group.update({_GROUP_FLAGS[settings.optimizer_impl]})"


def _calls_of_blocks(count: int, mode: str) -> Iterator[str]:
    length = segment_length(count, mode)
    if mode in ("none", "selective"):  # of which each block is told
        yield "features = self.blocks(features)"
    elif length == 1:
        yield "for block in self.blocks:"
        yield "    features = checkpoint(block, features, use_reentrant=False)"
    else:
        yield f"for first in range(0, len(self.blocks), {length}):"
        yield f"    features = checkpoint(self.blocks[first : first + {length}], features, use_reentrant=False)"


def _list(*words: str) -> str:
    return " and ".join(word for word in words if word)
