"""Measures the example of docs/learning-rate.md again, into it: ``python docs/learning_rate_examples.py``."""

from __future__ import annotations

import statistics
from pathlib import Path

import gpumem_nb
from gpumem_nb.session import Session

PAGE = Path(__file__).with_name("learning-rate.md")
RATES = (0.005, 0.02)
FIRST = {"optimizer": "sgd", "batch_size": 4}
RUNS: tuple[dict[str, object], ...] = (
    {},
    {"batch_size": 16},
    {"batch_size": 16, "lr_scaling": "linear"},
    {"batch_size": 64, "lr_scaling": "linear"},
)
SAMPLES = 4 * 2 * 640
LATEST = 1 / 8  # of the steps, whose loss is shown


def row(session: Session, rate: float, flip: dict[str, object]) -> str:
    """One run from the same beginning, over as many samples."""
    session.load("digits-resnet", seed=1)
    fresh = gpumem_nb.Settings(**FIRST, learning_rate=rate)
    session.set(**fresh.changed_from(session.settings))
    session.set(**flip)
    batch = session.settings.samples_per_rank * session.size
    frame = session.train(SAMPLES // batch).frame()
    loss = statistics.fmean(frame.loss[frame.step > frame.step.max() * (1 - LATEST)])
    critical = frame.noise_scale.dropna()
    cells = (len(frame) // session.size, batch, f"{frame.learning_rate.max():g}", f"{loss:.3f}")
    name = ", ".join(f"`{knob}={value}`" for knob, value in ({"learning_rate": rate} | flip).items())
    return f"| {name} | {' | '.join(map(str, cells))} | {critical.iloc[-1]:.0f} |"


def main() -> None:
    """Measure and write."""
    lines = ["|  | steps | global batch | rate | loss at the end | critical batch |", f"|---|{'---:|' * 5}"]
    with gpumem_nb.start(2, device="cpu") as session:
        lines += [row(session, rate, flip) for rate in RATES for flip in RUNS]
    before, _, rest = PAGE.read_text().partition("<!-- measured -->\n")
    after = rest.partition("<!-- end -->")[2]
    PAGE.write_text("\n".join([f"{before}<!-- measured -->", *lines, f"<!-- end -->{after}"]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
