"""Holds the toolkit on real ranks against the reference, one case at a time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import GpumemError
from tests.internals import gradients_in_many_pieces
from tests.matrix.case import CLEAN, Case
from tests.reference import STATE, Reference

STEPS = 3
_ROLES = {"net": "model", "data": "data", "loss": "loss", "criterion": "loss"}
_ROLES |= {name: name for name in ("optimizer", "scheduler", "eval_data")}
_FIRST = {"accumulation_steps": 1, "clip_norm": None}
EXACT, ROUNDED, REFUSED = "to the last bit", "to rounding", "refused"


class Differs(AssertionError):
    """The toolkit and the reference came to different numbers."""


@dataclass(frozen=True)
class Result:
    """How a case was held; ``sentence`` is what was said where it was refused."""

    case: Case
    held: str
    sentence: str = ""


@dataclass(frozen=True)
class _Expected:
    """What the reference came to: weights at the beginning and the end by rank, losses by step and rank."""

    begin: list[dict[str, Tensor]]
    losses: list[list[float]]
    end: list[dict[str, Tensor]]


class Comparison:
    """Cases against the reference on the ranks of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._expected: dict[Any, _Expected] = {}

    def hold(self, case: Case) -> Result:
        """Train a case on the ranks, and compare.

        Raises:
            Differs: in which number, at which step.
            GpumemError: what should work was refused.
        """
        with gradients_in_many_pieces(self._session), self._seeded(case.subject.seed):
            return Result(case, REFUSED, self._refusal(case)) if case.refused else self._held(case)

    def _held(self, case: Case) -> Result:
        expected = self._reference(case)
        self._attach(case)
        _compare_state("before the first step", expected.begin, self._session.run(STATE), exact=True)
        losses = self._train()
        self._do(case)
        losses += self._train()
        for step, (plain, trained) in enumerate(zip(expected.losses, losses, strict=True), 1):
            if not (plain == trained if case.exact else _close(torch.tensor(trained), torch.tensor(plain))):
                raise Differs(f"losses of step {step} by rank: {trained}, in the reference {plain}")
        _compare_state("after the last step", expected.end, self._session.run(STATE), case.exact)
        return Result(case, EXACT if case.exact else ROUNDED)

    def _reference(self, case: Case) -> _Expected:
        key = (case.subject, case.deed, case.precision)
        if key not in self._expected:
            with _as_many_threads(self._session.ranks[0].threads):
                self._expected[key] = _referred(case, self._session.size)
        return self._expected[key]

    def _refusal(self, case: Case) -> str:
        """Try it all the same: what is said of it."""
        try:
            self._attach(case)
            self._train()
            self._do(case)
            self._train()
        except GpumemError as error:
            for line in str(error).splitlines():
                if re.search(case.refused, line):
                    return re.sub(r"^.*part of the step: (WorkloadError: )?", "", line)
            raise
        raise Differs("it was not refused")

    def _attach(self, case: Case) -> None:
        session = self._session
        session.run(CLEAN)
        session.run(case.subject.cell)
        names = _named(case.subject.cell)
        session.attach(**names)
        own = {} if "optimizer" in names else {"optimizer": "adamw", "optimizer_impl": "default", "learning_rate": 1e-3}
        session.set(checkpointing=case.checkpointing, precision=case.precision, **_FIRST, **_batch(case), **own)

    @contextmanager
    def _seeded(self, seed: int | None) -> Iterator[None]:
        if seed is not None:
            self._session.seed(seed)
        yield
        if seed is not None:
            self._session.seed(0)

    def _train(self) -> list[list[float]]:
        frame = self._session.train(STEPS).frame()
        done = frame[frame.event.isin(["", "flip"])].sort_values(["step", "rank"])
        return [list(step.loss) for _, step in done.groupby("step")]

    def _do(self, case: Case) -> None:
        if case.deed.cell:
            self._session.run(f"{case.deed.cell}\nNone")
        if case.deed.knobs:
            self._session.set(**case.deed.knobs)
        if case.deed.detour:
            case.deed.detour(self._session)


def _named(cell: str) -> dict[str, str]:
    """What this cell defines and does not delete again, by its role; ranks may hold more under these names."""
    defined, deleted = set[str](), set[str]()
    for node in ast.walk(ast.parse(cell)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            (defined if isinstance(node.ctx, ast.Store) else deleted).add(node.id)
    return {role: name for name, role in _ROLES.items() if name in defined - deleted}


def _batch(case: Case) -> dict[str, Any]:
    return {"batch_size": case.subject.batch_size} if case.subject.batch_size else {}


def _referred(case: Case, size: int) -> _Expected:
    reference = Reference(case.subject.cell, size, case.subject.seed or 0)
    reference.set(precision=case.precision, **_batch(case))
    begin = reference.state()
    losses = reference.train(STEPS)
    if case.deed.cell:
        reference.cell(case.deed.cell)
    reference.set(**(case.deed.knobs if case.deed.plainly is None else case.deed.plainly))
    losses += reference.train(STEPS)
    return _Expected(begin, losses, reference.state())


def _compare_state(
    when: str, expected: list[dict[str, Tensor]], found: list[dict[str, Tensor]], exact: bool = True
) -> None:
    for rank, (plain, trained) in enumerate(zip(expected, found, strict=True)):
        if plain.keys() != trained.keys():
            raise Differs(f"{when} rank {rank} has other names: {sorted(plain.keys() ^ trained.keys())}")
        for name, tensor in plain.items():
            if not (_same_bits if exact else _close)(tensor, trained[name]):
                by = (tensor.to(torch.complex64) - trained[name].to(torch.complex64)).abs().max().item()
                raise Differs(f"{when} rank {rank} has another {name} (by {by:.2g})")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@contextmanager
def _as_many_threads(count: int) -> Iterator[None]:
    """Kernels sum in an order that depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
