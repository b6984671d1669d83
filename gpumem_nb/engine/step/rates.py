"""The learning rates of an optimizer's groups: what knobs ask for is set when it changes, and left alone otherwise.

Momentum correction (Goyal et al. 2017, section 2.1, remark 3) is for momentum that has the rate in it, v = m v + lr g
and w -= v: when the rate jumps, v is scaled by new over old rate. torch's SGD is the form that this correction brings
back, v = m v + g and w -= lr v: its v knows no rate, so a jump needs none, and scaling v would be the mistake. The same
holds for Adam, whose averages are of gradients. So nothing is corrected here; a test holds both forms together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...shared.settings import OWN, Schedule, Settings, learning_rate, schedule_of

STEADY: Schedule = ("constant", 0)


class Course:
    """The position of training in its schedule; the same on all ranks.

    Another schedule begins with the next step. Until a step was done under it, going back goes back to where it was.

    Attributes:
        done: steps that were done since the schedule began; those that were undone, or skipped by the loss scaler, do
            not count.
    """

    def __init__(self, settings: Settings, ranks: int, done: int = 0) -> None:
        self.done = done
        self.schedule = schedule_of(settings)
        self._ranks = ranks
        self._before: tuple[Schedule, int] | None = None

    def follow(self, settings: Settings) -> None:
        """Begin the schedule of these settings, if it is another one."""
        schedule = schedule_of(settings)
        if schedule == self.schedule:
            return
        now = self.schedule, self.done
        if self._before and self._before[0] == schedule:
            (self.schedule, self.done), self._before = self._before, None
        else:
            self._before = self._before or now
            self.schedule, self.done = schedule, 0

    @property
    def moves(self) -> bool:
        """Return whether the step after the next one may have another rate than that."""
        name, warmup = self.schedule
        return name in ("cosine", "linear") or (name != OWN and self.done < warmup)

    def rate(self, settings: Settings) -> float:
        """Return what these settings ask for in the next step."""
        return learning_rate(settings, self.done, self._ranks)

    def step_counted(self, skipped: bool) -> None:
        """A step was done, perhaps without an update."""
        self._before = None
        self.done += not skipped


class Rates:
    """The rates of one optimizer. Cells and schedulers change them too, so a knob acts only when *it* changes.

    Until a step was done under a change it can be taken back exactly: going back to what was asked for before puts back
    the rates that there were then.

    Attributes:
        knob: ``learning_rate`` while this optimizer was in use.
    """

    def __init__(self, optimizer: Optimizer, rate: float, schedule: Schedule = STEADY) -> None:
        self.knob = rate
        self._optimizer = optimizer
        self._asked = rate, schedule
        self._nonzero = self._now()  # what the proportions of the groups are taken from once a rate is 0
        self._left: list[float] = []  # what was set here last; other rates are of a cell or a scheduler
        self._before: tuple[tuple[float, Schedule], list[float], list[float], list[float]] | None = None
        self._of_own: tuple[float, list[float]] | None = None  # where the own scheduler rests, and the knob then

    @property
    def memory(self) -> dict[str, Any]:
        """Return what a file must hold so that :meth:`remember` goes on from here, beside the rates themselves."""
        return {
            "knob": self.knob,
            "asked": self._asked,
            "nonzero": self._nonzero,
            "left": self._left,
            "of_own": self._of_own,
        }

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Go on from an earlier moment, whose rates the groups have already."""
        self.knob, self._asked = memory["knob"], memory["asked"]
        self._nonzero, self._left, self._of_own = memory["nonzero"], memory["left"], memory["of_own"]

    @property
    def first(self) -> float:
        """The rate of the first group; NaN without one."""
        return next(iter(self._now()), math.nan)

    @property
    def asked(self) -> float:
        """The rate that was asked for last."""
        return self._asked[0]

    def follow(self, rate: float, schedule: Schedule = STEADY) -> None:
        """Bring the first group to what is asked for now, and scale the rates of the others by the same factor.

        When another schedule begins, that is done even if the rate is the same; when the own scheduler goes on, it does
        so from where it rested.
        """
        asked = rate, schedule
        if asked == self._asked:
            return
        now = self._now()
        if self._before and self._before[0] == asked and len(self._before[1]) == len(now):
            _, rates, self._nonzero, self._left = self._before
            self._set(rates)
            self._before = None
        else:
            self._before = self._before or (self._asked, now, self._nonzero, self._left)
            self._set(self._for(rate, schedule, now))
            self._left = self._now()
        self._asked = asked

    def advance(self, rate: float) -> None:
        """The schedule asks for another rate. Many such steps do not add up rounding errors."""
        if rate == self.asked:
            return
        if (now := self._now()) != self._left:
            self._look_at(now)
        self._set(self._scaled(now, rate))
        self._asked, self._left = (rate, self._asked[1]), self._now()

    def settle(self) -> None:
        """A step was done: what was before does not come back."""
        self._before = None

    def forget(self) -> None:
        """The groups were given rank 0's rates: take proportions from those, as all ranks do."""
        self._look_at(self._now())

    def leave(self) -> None:
        """Training is over: no schedule of the knobs goes on. What a cell or the own scheduler has set stays."""
        if self._asked[1][0] != OWN and self._now() == self._left:
            self.follow(self.knob, (OWN, 0))

    def _for(self, rate: float, schedule: Schedule, now: list[float]) -> list[float]:
        was, of_own = self._asked, self._of_own
        if was[1][0] == OWN != schedule[0]:
            self._of_own = was[0], now
        elif schedule[0] == OWN != was[1][0]:
            if of_own and of_own[0] == rate and len(of_own[1]) == len(now):
                return of_own[1]
            if was[0] == rate:
                return now
        self._look_at(now)
        return self._scaled(now, rate)

    def _look_at(self, now: list[float]) -> None:
        """Note that the user's code may have changed how the groups relate."""
        if now[0] and not any(map(math.isnan, now)):
            self._nonzero = now

    def _scaled(self, now: list[float], first: float) -> list[float]:
        known = len(self._nonzero) == len(now) and self._nonzero[0] != 0
        base = self._nonzero if known else _initial(self._optimizer)
        if not base[0]:  # how the groups relate is not known
            return [first, *now[1:]]
        return [first, *(rate * first / base[0] for rate in base[1:])]

    def _now(self) -> list[float]:
        return list(map(rate_of, self._optimizer.param_groups))

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if not (math.isnan(rate) or math.isnan(rate_of(group))):  # what a cell has put there, steps refuse
                _set(group, rate)


def rate_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a group; NaN where a cell has put something else there."""
    try:
        return float(group["lr"])
    except (LookupError, TypeError, ValueError):
        return math.nan


def named_rate(optimizer: Optimizer) -> float:
    """The rate that people know an optimizer by: its first group's, or while that is 0 (a warm-up) the one to come."""
    first = float(optimizer.param_groups[0]["lr"])
    return first or _initial(optimizer)[0]


def _initial(optimizer: Optimizer) -> list[float]:
    # Schedulers note in each group what it was made with.
    return [float(group["initial_lr"]) if "initial_lr" in group else rate_of(group) for group in optimizer.param_groups]


def _set(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
