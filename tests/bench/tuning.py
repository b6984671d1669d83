"""The tuner against the exhaustive grid, on two ranks, of ready-made and other people's models at three limits each.

``python -m tests.bench.tuning`` writes docs/tuning.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpumem_nb
from gpumem_nb.planning.tuning.result import TuneResult
from gpumem_nb.report.differences import short
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import GpumemError
from gpumem_nb.shared.forecast import SEGMENT_BYTES
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.units import format_bytes
from tests.bench.figures import Figure, say
from tests.bench.prediction import EMPTY, OTHERS, SEQUENCES

REPORT = Path(__file__).parents[2] / "docs" / "tuning.md"
MARKER = "<!-- the rest is written by python -m tests.bench.tuning -->\n"
RANKS = 2
MOST_MIB = 1024  # the grid's limit
READY = ("digits-resnet", "digits-separable", "text-gpt")
TRANSFORMERS = ("GPT-2", "BERT", "ViT")
SPLITS = ((32, 1), (16, 2), (8, 4), (4, 8))
# fp16 is left out of the grid, which it would make many times longer: the tuner has to find that out by itself.
GRID: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16"),
    "checkpointing": ("none", "blocks", "sqrt"),
    "optimizer_impl": ("default", "foreach", "fused", "loop"),
}
GRID_S, WARM_UP = 1.0, 2  # of steps that are timed under each setting, and how many before
QUARTILES = (0.2, 0.5, 0.8)  # of the grid's peaks, that are the limits
SHARE = 0.24  # of the grid's time, so that the answer is there within a quarter
ROUNDS, ROUND_S = 5, 0.8  # in which the answer and the grid's best take turns
SURVIVES = 500  # steps
ROOM_BYTES = SEGMENT_BYTES  # between a peak and the limit: steps may need as much more one day, says the toolkit
ENOUGH = 0.95  # of the grid's best; where it is less, it is tried whether the best lasts


@dataclass(frozen=True)
class Measured:
    """A setting of the grid."""

    settings: Settings
    samples_per_s: float
    reserved_bytes: int


@dataclass(frozen=True)
class Case:
    """One model at one limit: what was found, and how it compares with the best of the grid, and of what has room."""

    model: str
    limit_bytes: int
    best: Measured
    bests: str
    found: str
    ratio: float
    seconds: float
    grid_s: float
    failures: int
    survived: str
    best_survived: str = ""
    roomy: str = ""
    roomy_ratio: float | None = None

    @property
    def of_roomy(self) -> float:
        """The ratio to what has room: to the best, where that has."""
        return self.ratio if self.roomy_ratio is None else self.roomy_ratio


def main() -> int:
    """Measure all and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one model, and no page")
    only = parser.parse_args().only
    if only:
        print(report(of_model(only)))
    else:
        figures()
        print(REPORT.read_text().partition(MARKER)[2])
    return 0


def figures() -> list[Figure]:
    """What comes of all models, of which a page is written."""
    cases: list[Case] = []
    for name in (*READY, *TRANSFORMERS):
        cases += of_model(name)
        REPORT.write_text(REPORT.read_text().partition(MARKER)[0] + MARKER + report(cases))
    lasted = [float(one.survived == "yes") for one in cases if one.survived]
    of = f"{len(READY) + len(TRANSFORMERS)} models at 3 limits, {RANKS} ranks, docs/{REPORT.name}"
    return [
        Figure(
            "tune: samples/s ÷ those of the exhaustive grid's best", f"≥ {ENOUGH}", "", [one.ratio for one in cases], of
        ),
        Figure("tune: the same, of the best with room", f"≥ {ENOUGH}", "", [one.of_roomy for one in cases], of),
        Figure("tune: time ÷ the grid's", "≤ 0.25", "", [one.seconds / one.grid_s for one in cases], of),
        Figure("tune: steps that ran out of memory", "≤ 0", "", [float(one.failures) for one in cases], of),
        Figure(f"tune: answers that last {SURVIVES} steps", "≥ 1", "", lasted, of),
    ]


def of_model(name: str) -> list[Case]:
    """The grid of one model, and what the tuner finds at each limit."""
    with gpumem_nb.start(RANKS, device="cpu", memory_limit=f"{MOST_MIB}MiB") as session:
        load(session, name)
        began_s = time.monotonic()
        grid = measure_grid(session)
        grid_s = time.monotonic() - began_s
    say(f"{name}: {len(grid)} settings in {grid_s:.0f} s")
    peaks = sorted({one.reserved_bytes for one in grid})
    cases = []
    for share in QUARTILES:
        limit = peaks[int(share * len(peaks))] + 2**20
        cases.append(tuned(name, grid, grid_s, limit, survive=share == QUARTILES[1]))
        say(f"  {words(cases[-1])}")
    return cases


def load(session: Session, name: str) -> None:
    """Load a model, with small micro-batches."""
    session.set(batch_size=4, accumulation_steps=8)
    if name in READY:
        session.load(name)
        return
    code, data = next((code, data) for model, code, data in OTHERS if model == name)
    session.run(SEQUENCES)
    session.run(f"torch.manual_seed(0)\n{code}")
    session.attach(model="net", data=data)


def measure_grid(session: Session) -> list[Measured]:
    """Every setting, one after the other."""
    found = []
    for (batch_size, accumulation_steps), *values in itertools.product(SPLITS, *GRID.values()):
        knobs = dict(zip(GRID, values, strict=True))
        session.set(batch_size=batch_size, accumulation_steps=accumulation_steps, **knobs)
        session.run(EMPTY)
        first = session.train(WARM_UP).frame()
        frame = session.train(max(3, math.ceil(GRID_S / first.step_s.min()))).frame()
        found.append(Measured(session.settings, rate(frame), int(frame.reserved_peak_bytes.max())))
    return found


def rate(frame: Any) -> float:
    """Samples/s of all ranks: the median of the steps."""
    return float(frame.groupby("step").samples_per_s.sum().median())


def tuned(name: str, grid: Sequence[Measured], grid_s: float, limit: int, survive: bool) -> Case:
    """Tune at this limit, which ranks really have, and hold the answer against the best of the grid that fits."""
    best, roomy = fastest(grid, limit), fastest(grid, limit - ROOM_BYTES)
    with gpumem_nb.start(RANKS, device="cpu", memory_limit=limit) as session:
        load(session, name)
        result = session.tune(seconds=SHARE * grid_s, same_mathematics=False)
        failures = sum(
            event.kind != "load" for event in session.history.events if event.kind in ("oom", "error", "stall")
        )
        if result.best is None:
            return Case(name, limit, best, "", result.why, 0.0, result.seconds, grid_s, failures, "")
        found, bests = flip(result, result.best.settings), flip(result, best.settings)
        ratio = compared(session, result, best)
        survived = lasts(session, result.best.settings) if survive else ""
        best_survived = lasts(session, best.settings) if ratio < ENOUGH else ""
        case = Case(name, limit, best, bests, found, ratio, result.seconds, grid_s, failures, survived, best_survived)
        if ratio >= ENOUGH or roomy is None or roomy is best:
            return case
        return replace(case, roomy=flip(result, roomy.settings), roomy_ratio=compared(session, result, roomy))


def fastest(grid: Sequence[Measured], limit: int) -> Any:
    """What does most samples/s within so many bytes; ``None`` where nothing fits."""
    return max((one for one in grid if one.reserved_bytes <= limit), key=lambda one: one.samples_per_s, default=None)


def lasts(session: Session, settings: Settings) -> str:
    """Whether so many steps can be trained under these settings."""
    try:
        session.set(**settings.as_dict())
        session.train(SURVIVES)
    except GpumemError as error:
        return f"no: {error}".partition("\n")[0]
    return "yes" if session.settings == settings else f"no: {session.history.events[-1].text}"


def flip(result: TuneResult, settings: Settings) -> str:
    """What differs from the settings that tuning began with, in a few letters."""
    return short(result.present, settings) or "as it is"


def compared(session: Session, result: TuneResult, best: Measured) -> float:
    """Samples/s of the answer beside those of the grid's best, in alternation: the median of the ratios."""
    assert result.best
    sides: list[Callable[[], object]] = [
        lambda: session.set(**result.best.settings.as_dict()) if result.best else None,
        lambda: session.set(**best.settings.as_dict()),
    ]
    ratios = []
    for number in range(ROUNDS):
        rates = {}
        try:
            for side in (0, 1)[:: 1 if number % 2 else -1]:
                sides[side]()
                first = session.train(WARM_UP).frame()
                rates[side] = rate(session.train(max(3, math.ceil(ROUND_S / first.step_s.min()))).frame())
        except GpumemError as error:  # what the grid could train once, just below the limit, may not fit again
            say(f"  {error}")
            break
        ratios.append(rates[0] / rates[1])
    return statistics.median(ratios) if ratios else (result.best.samples_per_s or 0.0) / best.samples_per_s


def words(case: Case) -> str:
    """One line of the log."""
    limit = format_bytes(case.limit_bytes)
    return f"{limit}: {case.found}; {case.ratio:.2f} of {case.bests} in {case.seconds:.0f} s {case.survived}"


def report(cases: Sequence[Case]) -> str:
    """The figures as Markdown."""
    headings = (
        *("model", "limit", "found", "time ÷ grid's", "failed steps", "500 steps"),
        *("best of the grid", "ratio", "its 500 steps", "best with room", "ratio"),
    )
    rows = [f"| {' | '.join(headings)} |", "| --- " * len(headings) + "|"]
    for one in cases:
        ran = [f"{one.seconds / one.grid_s:.2f}", str(one.failures), one.survived or "not run"]
        best = [one.bests, f"{one.ratio:.2f}", one.best_survived or "not run"]
        roomy = [one.roomy or "the same, or slower", f"{one.of_roomy:.2f}"]
        rows.append(f"| {' | '.join([one.model, format_bytes(one.limit_bytes), one.found, *ran, *best, *roomy])} |")
    enough, with_room = sum(one.ratio >= ENOUGH for one in cases), sum(one.of_roomy >= ENOUGH for one in cases)
    return "\n".join(
        [
            f"{time.strftime('%d %B %Y')}, torch {importlib.metadata.version('torch')}, Python "
            f"{platform.python_version()}, {RANKS} ranks, virtual GPUs, {len(SPLITS) * 24} settings in each grid.",
            "",
            *rows,
            "",
            f"{enough} of {len(cases)} answers reach 95 % of the grid's best, {with_room} of the best with room; the "
            f"median is {statistics.median(one.ratio for one in cases):.2f}. "
            f"{sum(one.failures for one in cases)} steps failed.",
            "",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
