"""Draw lesson 1's picture: who holds the live bytes while one step goes by, allocation by allocation."""

from __future__ import annotations

import gpumem_nb as gm
from gpumem_nb.shared.messages import Timeline
from tests.course.pictures.svg import BLUE, GREEN, HEIGHT, ORANGE, PALE, SKY, WIDTH, Drawing

LEFT, RIGHT, TOP, BOTTOM = 60, WIDTH - 20, 46, HEIGHT - 58
MIB = 2**20
# From the bottom to the top: what is drawn, of which categories, in which colour.
PARTS = (
    ("parameters", ("parameters",), BLUE),
    ("optimizer state", ("optimizer state",), SKY),
    ("Horovod's buffer", ("communication", "other"), PALE),
    ("gradients", ("gradients",), ORANGE),
    ("activations", ("activations", "logits", "inputs", "temporaries", "inside operators", "16-bit casts"), GREEN),
)
FIXED = 3  # so many of them are there all the time
SHARES = {"forward": 0.35, "backward": 0.5, "update": 0.15}  # of the width


def main() -> None:
    """Measure a step of lesson 1's model and draw it."""
    with gm.start(2, device="cpu", memory_limit="160MiB", timeout=400) as session:
        session.load("text-gpt", width=256, depth=4)
        session.set(batch_size=8)
        session.train(4)
        timeline = session.memory(timeline=True).worst_timeline
    assert timeline is not None
    print(draw(timeline))


def draw(line: Timeline) -> str:
    """Write the picture of a step and return its path."""
    stacked = stack(line)
    across, marks = places(line)
    highest = stacked[-1]
    top = 20 * (int(max(highest)) // 20 + 1)

    def y(mib: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * mib / top

    page = Drawing("The live bytes of one training step: activations rise in forward and fall in backward")
    for mib in range(0, top + 1, 20):
        page.line([(LEFT, y(mib)), (RIGHT, y(mib))], "#dddddd", width=1)
        page.text((LEFT - 8, y(mib) + 5), str(mib), "end", PALE)
    page.text((LEFT - 44, TOP - 20), "live MiB of one rank", colour=PALE)
    for (_, _, colour), low, high in zip(PARTS, stacked, stacked[1:], strict=False):
        below = reversed([(x, y(mib)) for x, mib in zip(across, low, strict=True)])
        page.area([*((x, y(mib)) for x, mib in zip(across, high, strict=True)), *below], colour)
    for (name, _, _), low, high in zip(PARTS[:FIXED], stacked, stacked[1:], strict=False):
        page.text((LEFT + 12, y((low[0] + high[0]) / 2) + 5), f"{name} {high[0] - low[0]:.1f} MiB")
    peak = max(range(len(highest)), key=highest.__getitem__)
    page.text((across[peak], y((stacked[-2][peak] + highest[peak]) / 2)), "activations", "middle", bold=True)
    page.text((RIGHT - 8, y((stacked[FIXED][-1] + stacked[FIXED + 1][-1]) / 2) + 5), "gradients", "end", bold=True)
    page.line([(LEFT, y(highest[peak])), (RIGHT, y(highest[peak]))], dashed=True)
    page.text((LEFT + 6, y(highest[peak]) - 7), f"live peak {highest[peak]:.1f} MiB", bold=True)
    for phase, (begin, end) in marks.items():
        page.line([(begin, BOTTOM), (begin, BOTTOM + 26)], PALE, width=1)
        page.text(((begin + end) / 2, BOTTOM + 20), phase, "middle")
    page.text((RIGHT, HEIGHT - 8), "one step, allocation by allocation →", "end", PALE)
    return str(page.write("1_live_bytes_of_a_step.svg"))


def stack(line: Timeline) -> list[list[float]]:
    """MiB at each moment below the first part, and below and with each further one."""
    stacked = [[0.0] * len(line.time_ms)]
    for _, categories, _ in PARTS:
        of_part = [line.live_bytes[name] for name in categories if name in line.live_bytes]
        stacked.append([below + sum(now) / MIB for below, *now in zip(stacked[-1], *of_part, strict=True)])
    return stacked


def places(line: Timeline) -> tuple[list[float], dict[str, tuple[float, float]]]:
    """Where each moment lies across the page, and from where to where each phase goes.

    In time, or by allocations alone, one phase would be all that is seen.
    """
    ends = {phase: max(span.end_ms for span in line.spans if span.phase == phase) for phase in SHARES}
    across, marks, left = list[float](), dict[str, tuple[float, float]](), float(LEFT)
    for phase, share in SHARES.items():
        width = share * (RIGHT - LEFT)
        last = phase == list(SHARES)[-1]
        inside = [ms for ms in line.time_ms[len(across) :] if last or ms <= ends[phase]]
        marks[phase] = left, left + width
        across += [left + width * place / max(1, len(inside) - 1) for place in range(len(inside))]
        left += width
    return across, marks


if __name__ == "__main__":
    main()
