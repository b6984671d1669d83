"""Optimizers by name, and switching how torch computes them without losing their state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from ...internals import bitsandbytes_internals
from ...internals.fake_internals import modes_set_aside
from ...internals.torch_internals import has_step_hooks, keep_scale_from
from ...internals.torch_scaler_internals import found_by_others, may_step_again
from ...memory.tensors import tensors_in
from ...shared.errors import WorkloadError
from ...shared.knobs.update import NO_8_BIT, NO_MUON, no_matrices
from ...shared.settings import Settings
from .muon import MuonAndAdamW
from .parts import in_groups

_BUILD: dict[str, Callable[[list[Tensor], float], Optimizer]] = {
    "sgd": lambda params, lr: SGD(params, lr=lr),
    "momentum": lambda params, lr: SGD(params, lr=lr, momentum=0.9),
    "adam": lambda params, lr: Adam(params, lr=lr),
    "adamw": lambda params, lr: AdamW(params, lr=lr),
    "adamw8bit": lambda params, lr: _in_8_bits(params, lr),
    "adafactor": lambda params, lr: Adafactor(params, lr=lr),
    "muon": lambda params, lr: MuonAndAdamW(params, lr=lr),
}

# torch's own flags; both False is the loop over single tensors. By default an optimizer keeps those it was made with.
_IMPLEMENTATION_FLAGS: dict[str, dict[str, bool]] = {
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
    "loop": {"foreach": False, "fused": False},
}
_OF_8_BITS = (torch.float32, torch.float16, torch.bfloat16)  # types of weights
_UPDATE_COPIES = 3  # of what it writes: more than any of torch's optimizers but Muon allocates in an update
_MUON_COPIES = 8  # of one matrix after the other: in 16 bits the CPU takes up to 7, a GPU 4
_SPARSE = (
    "{} needs dense gradients, and an embedding with sparse=True has sparse ones. Use {}, or build the embedding "
    "without sparse=True"
)


def build(params: Iterable[Tensor], settings: Settings, matrices: Callable[[], list[Tensor]] = list) -> Optimizer:
    """Return a fresh optimizer of the kind that the settings name (any but ``own``).

    Args:
        params: what it trains.
        settings: name it, its learning rate and how torch computes it.
        matrices: gives :func:`hidden_matrices` of the model, for which Muon asks.

    Raises:
        WorkloadError: a library is missing, or there is no matrix that is trained.
    """
    params = list(params)
    of_muon = _of_muon(params, matrices()) if settings.optimizer == "muon" else []
    optimizer = _BUILD[settings.optimizer](params, settings.learning_rate)
    tell_matrices(optimizer, of_muon)
    set_implementation(optimizer, settings.optimizer_impl)
    return optimizer


def hidden_matrices(model: nn.Module, head: nn.Module | None) -> list[Tensor]:
    """Return the weights of a model that Muon is made for: the matrices of its hidden layers.

    They have two dimensions, and more than one row and column. The embeddings and the output layer ``head`` are left
    out, and what lies beside other layers in a module of theirs, such as a table of positions.
    """
    apart = {id(weight) for weight in head.parameters()} if head else set[int]()
    found: dict[int, Tensor] = {}
    for module in model.modules():
        weights = module.parameters(recurse=False)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            apart |= set(map(id, weights))
        elif isinstance(module, nn.MultiheadAttention) or not any(map(_has_weights, module.children())):
            found |= {id(weight): weight for weight in weights if weight.dim() == 2 and min(weight.shape) > 1}
    return [weight for key, weight in found.items() if key not in apart and not weight.is_complex()]


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def tell_matrices(optimizer: Optimizer, matrices: Iterable[Tensor]) -> None:
    """Let Muon update these of its weights and no others, frozen or not; any other optimizer has no use for them."""
    if isinstance(optimizer, MuonAndAdamW):
        ids = set(map(id, matrices))
        for group in optimizer.param_groups:
            group["matrices"] = tuple(place for place, one in enumerate(group["params"]) if id(one) in ids)


def _of_muon(params: list[Tensor], matrices: list[Tensor]) -> list[Tensor]:
    if not hasattr(torch.optim, "Muon"):
        raise WorkloadError(NO_MUON)
    if {id(one) for one in params if one.requires_grad}.isdisjoint(map(id, matrices)):
        raise WorkloadError(no_matrices("this model"))
    return matrices


def _in_8_bits(params: list[Tensor], lr: float) -> Optimizer:
    trained = [param for param in params if param.requires_grad]
    if (odd := next((param for param in trained if param.dtype not in _OF_8_BITS), None)) is not None:
        raise WorkloadError(
            f"optimizer=adamw8bit computes in fp32 at most, and a weight of shape {tuple(odd.shape)} is "
            f"{str(odd.dtype).removeprefix('torch.')}. Use optimizer=adamw."
        )
    # It lays such weights out anew in its first update, but not the moments that it has of them already.
    if (odd := next((param for param in trained if not param.is_contiguous()), None)) is not None:
        raise WorkloadError(
            "optimizer=adamw8bit needs weights that lie in memory in the order of their indices, and one of shape "
            f"{tuple(odd.shape)} lies otherwise, such as in channels_last. Attach the model without channels_last, or "
            "use optimizer=adafactor."
        )
    try:
        with modes_set_aside():  # its tables of numbers are real ones in a dry run, too
            return bitsandbytes_internals.adamw8bit(params, lr)
    except ImportError as error:
        raise WorkloadError(f"{NO_8_BIT} ({error}), and start the ranks again.") from None


CONVERT: dict[tuple[str, str], Callable[[Optimizer, dict[Tensor, dict[str, Any]], Collection[int]], None]] = {
    ("adamw", "adamw8bit"): lambda optimizer, state, wide: bitsandbytes_internals.in_8_bits(optimizer, state),
    ("adamw8bit", "adamw"): bitsandbytes_internals.in_32_bits,
}
"""By the names of one before and a new one: lets the new one go on from the other's state, which it is given.

The third argument are the ids of weights whose state is in fp32, whatever they are in themselves.
"""


def is_torchs(optimizer: Optimizer) -> bool:
    """Return whether it is one of torch's own, or of two of them."""
    kind = type(optimizer)
    return kind is MuonAndAdamW or f"{kind.__module__}.".startswith("torch.optim.")  # of some without the file


def from_torch(optimizer: Optimizer) -> bool:
    """Return whether its update is torch's own code alone, which fails for want of memory only.

    So is that of bitsandbytes on a GPU, whose kernels take no memory; on the CPU it takes copies of a weight.
    """
    in_place = bitsandbytes_internals.is_adamw8bit(optimizer) and all(one.is_cuda for one in in_groups(optimizer))
    return (is_torchs(optimizer) or in_place) and not has_step_hooks(optimizer)


def may_write(optimizer: Optimizer) -> list[Tensor]:
    """Return the weights that its updates may write: torch's own leave alone what has no gradient.

    One that is frozen on this rank alone gets one from the others.
    """
    params = in_groups(optimizer)
    if not from_torch(optimizer):
        return params
    return [param for param in params if param.requires_grad or param.grad is not None]


def update_bytes(optimizer: Optimizer, written: int) -> int:
    """Return more bytes than an update by torch's own code allocates that writes so many, once there is its state."""
    groups = optimizer.param_groups if isinstance(optimizer, MuonAndAdamW) else []
    matrices = (group["params"][place].nbytes for group in groups for place in group["matrices"])
    return max(_UPDATE_COPIES * written, _MUON_COPIES * max(matrices, default=0))


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer, and those that it is around."""
    return [optimizer, *(one for one in vars(optimizer).values() if isinstance(one, Optimizer))]


def beside_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return what only this optimizer has, by name; nothing for torch's own, which make it again."""
    if is_torchs(optimizer):
        return {}
    usual = vars(SGD([torch.zeros(1, device="cpu")], lr=0.1)).keys() | {"step"}  # which schedulers wrap
    return {name: value for name, value in vars(optimizer).items() if name not in usual}


def numbers_beside(optimizer: Optimizer) -> dict[str, Any]:
    """Return the plain numbers that it and its inner ones keep beside their state, such as a count of steps.

    Files hold them, by the optimizer's place in :func:`with_inner` and their names: ``0.count``. A rank's own number,
    which some optimizers keep too, is not among them.
    """
    return {
        f"{place}.{name}": value
        for place, one in enumerate(with_inner(optimizer))
        for name, value in beside_state(one).items()
        if type(value) in (bool, int, float) and "rank" not in name
    }


def put_numbers(optimizer: Optimizer, numbers: Mapping[str, Any]) -> None:
    """Let it keep what :func:`numbers_beside` has returned; what has no place in it is left out."""
    for place, one in enumerate(with_inner(optimizer)):
        mine = f"{place}."
        vars(one).update({key.removeprefix(mine): value for key, value in numbers.items() if key.startswith(mine)})


def set_implementation(optimizer: Optimizer, name: str) -> None:
    """Compute the same update in another way from the next step on; the state stays.

    Raises:
        WorkloadError: this optimizer has no such implementation.
    """
    check_implementation(optimizer, name)
    made_with = {flag: optimizer.defaults.get(flag) for flag in ("foreach", "fused")}
    flags = _IMPLEMENTATION_FLAGS.get(name, made_with)
    for group in optimizer.param_groups:
        group.update({flag: value for flag, value in flags.items() if flag in group})
        if not flags.keys() <= group.keys():
            continue
        # Only fused kernels take overflows from the scaler, and those of SGD then keep an unfilled momentum:
        # the scaler skips such an update by itself.
        keep_scale_from(optimizer)
        on_device = flags["fused"] or group.get("capturable")
        for param in group["params"]:
            step = optimizer.state.get(param, {}).get("step")
            if isinstance(step, Tensor):
                # torch keeps the counter on the device for fused and captured kernels and on the host for the others.
                optimizer.state[param]["step"] = step.to(param.device if on_device else "cpu")


def check_implementation(optimizer: Optimizer, name: str) -> None:
    """Refuse an implementation that an optimizer does not have.

    Raises:
        WorkloadError: this is one.
    """
    flag = "fused" if name == "fused" else "foreach"  # by which the loop is asked for too
    if name in _IMPLEMENTATION_FLAGS and any(flag not in group for group in optimizer.param_groups):
        raise WorkloadError(
            f"{type(optimizer).__name__} has no {name} implementation. Use optimizer_impl=default with it."
        )


def check_state(optimizer: Optimizer) -> None:
    """Refuse state that cannot be put aside, saved or sent to other ranks, once it is there.

    Raises:
        WorkloadError: some of it is no weight's, or holds a sparse tensor.
    """
    if odd := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        raise WorkloadError(
            f"{type(optimizer).__name__} keeps a state that belongs to no weight ({odd[0]!r}), which ranks cannot hold "
            "alike. Keep numbers in attributes and tensors in state[param], or use another optimizer, such as AdamW."
        )
    check_dense(optimizer)


def check_dense(optimizer: Optimizer) -> None:
    """Refuse state that holds a sparse tensor; raises ``WorkloadError``."""
    for kept in optimizer.state.values():
        for name, value in kept.items() if isinstance(kept, Mapping) else ():
            if any(tensor.layout != torch.strided for tensor in tensors_in(value)):
                raise WorkloadError(
                    f"{type(optimizer).__name__} keeps a sparse {name} in its state, which could not be saved or put "
                    "back. Use an optimizer that keeps none, such as SGD without momentum or Adagrad, or build the "
                    "embedding without sparse=True."
                )


def put_state(optimizer: Optimizer, state: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
    """``load_state_dict`` without its casts: it would turn fp32 state of bf16 parameters into bf16."""
    filled = dict(state)
    optimizer.state.clear()  # in place: an optimizer around another one shares its state with that
    optimizer.state.update(filled)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})


def scaled_step(scaler: GradScaler | None, optimizer: Optimizer) -> Callable[[], Any]:
    """Return an optimizer's step as a scaler, which has unscaled the gradients, takes it any number of times."""
    if scaler is None:
        return optimizer.step

    def step() -> Any:
        may_step_again(scaler, optimizer)
        return scaler.step(optimizer)

    return step


Updating = Callable[[Mapping[int, Tensor] | None], AbstractContextManager[None]]


def update_share(
    optimizer: Optimizer,
    scaler: GradScaler | None,
    clip_norm: float | None,
    step: Callable[[], Any],
    updating: Updating,
    rows: Mapping[int, Tensor] | None,
    norms: Sequence[Tensor],
    foreach: bool | None = None,
) -> Tensor | None:
    """:func:`update` what this rank updates, of gradients that are whole, or of its share of them.

    Args:
        optimizer, scaler, clip_norm, step, foreach: as there.
        updating: inside of it the optimizer has what this rank updates.
        rows: its share of gradients by places of weights; ``None``: it has them whole.
        norms: those of the whole ones, where it has a share.
    """
    if rows is not None:
        with updating(rows):
            return update(optimizer, scaler, clip_norm, step, foreach, norms)

    def of_share() -> None:
        with updating(None):
            step()

    return update(optimizer, scaler, clip_norm, of_share, foreach)


def update(
    optimizer: Optimizer,
    scaler: GradScaler | None,
    clip_norm: float | None,
    step: Callable[[], Any],
    foreach: bool | None = None,
    norms: Sequence[Tensor] | None = None,
) -> Tensor | None:
    """Unscale, clip, update: in this order, because clipping is about true gradients.

    Args:
        optimizer: whose gradients they are.
        scaler: that has scaled the loss, ``None`` for none.
        clip_norm: scale all gradients down together when their 2-norm exceeds this, unless it is ``None``.
        step: does the update.
        foreach: whether norms are computed together; ``None`` for torch's own choice, which knows no fake tensors.
        norms: those of whole gradients, where the optimizer has a share of each; ``None``: it has them whole.

    Returns:
        The loss scale before and after the update, on the device; ``None`` without a scaler.

    Raises:
        WorkloadError: there are sparse gradients, which cannot be clipped, nor be taken by an optimizer of 8 bits.
    """
    in_8_bits = bitsandbytes_internals.is_adamw8bit(optimizer)
    dense = in_8_bits or clip_norm is not None
    params = in_groups(optimizer) if dense or scaler else []  # of thousands of weights, each list takes its time
    if scaler:
        one = torch.ones((), dtype=torch.float32, device=(params or norms or [torch.empty(0)])[0].device)
        before = scaler.scale(one)
        scaler.unscale_(optimizer)
        if norms:
            norms = [norm / before for norm in norms]
            found_by_others(scaler, optimizer, ~torch.stack(norms).isfinite().all())
    if dense and any(param.grad is not None and param.grad.is_sparse for param in params):
        instead = ("AdamW8bit", "optimizer=sgd") if in_8_bits else ("clip_norm", "clip_norm=none")
        raise WorkloadError(_SPARSE.format(*instead))
    if clip_norm is not None and norms is None:
        torch.nn.utils.clip_grad_norm_(params, clip_norm, foreach=foreach)
    elif clip_norm is not None and norms:
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        torch.nn.utils.clip_grads_with_norm_(params, clip_norm, total, foreach=foreach)
    step()
    if not scaler:
        return None
    scaler.update()
    return torch.stack((before, scaler.scale(one)))
