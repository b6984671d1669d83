"""Draw lesson 3's picture: the live bytes of 16 samples in one piece, and in four parts one after another."""

from __future__ import annotations

import gpumem_nb as gm
from gpumem_nb.shared.messages import Timeline
from tests.course.pictures.lesson_1 import FIXED, PARTS, stack
from tests.course.pictures.svg import HEIGHT, PALE, WIDTH, Drawing

TOP, BOTTOM, LEFT, GAP = 58, HEIGHT - 40, 60, 36
PANEL = (WIDTH - 16 - LEFT - GAP) / 2
SETTINGS = ({"batch_size": 16, "accumulation_steps": 1}, {"batch_size": 4, "accumulation_steps": 4})


def main() -> None:
    """Measure a step of lesson 3's model in both ways and draw them."""
    lines = []
    with gm.start(2, device="cpu", memory_limit="160MiB") as session:
        session.load("text-gpt", width=256, depth=4)
        for settings in SETTINGS:
            session.set(**settings)
            session.train(4)
            line = session.memory(timeline=True).worst_timeline
            assert line is not None
            lines.append(line)
    print(draw(lines))


def draw(lines: list[Timeline]) -> str:
    """Write the picture of two steps and return its path."""
    stacks = [[part[: computed(line)] for part in stack(line)] for line in lines]
    top = 20 * (int(max(max(one[-1]) for one in stacks)) // 20 + 1)
    page = Drawing("Live bytes of one step: one hill of activations, or four small ones on top of gradients")

    def y(mib: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * mib / top

    for mib in range(0, top + 1, 20):
        page.line([(LEFT, y(mib)), (WIDTH - 16, y(mib))], "#dddddd", width=1)
        page.text((LEFT - 8, y(mib) + 5), str(mib), "end", PALE)
    page.text((16, TOP - 34), "live MiB of one rank", colour=PALE)
    for place, (settings, stacked) in enumerate(zip(SETTINGS, stacks, strict=True)):
        left = LEFT + place * (PANEL + GAP)
        across = [left + PANEL * number / (len(stacked[0]) - 1) for number in range(len(stacked[0]))]
        for (_, _, colour), low, high in zip(PARTS, stacked, stacked[1:], strict=False):
            below = reversed([(x, y(mib)) for x, mib in zip(across, low, strict=True)])
            page.area([*((x, y(mib)) for x, mib in zip(across, high, strict=True)), *below], colour)
        for (name, _, _), low, high in zip(PARTS[:FIXED], stacked, stacked[1:], strict=False):
            page.text((left + 10, y((low[0] + high[0]) / 2) + 5), name)
        highest = max(stacked[-1])
        page.line([(left, y(highest)), (left + PANEL, y(highest))], dashed=True)
        words = " ".join(f"{name}={value}" for name, value in settings.items() if value > 1)
        page.text((left + PANEL, y(highest) - 24), words, "end", bold=True)
        page.text((left + PANEL, y(highest) - 7), f"live peak {highest:.1f} MiB", "end")
        page.text((left + PANEL, BOTTOM + 22), "forward and backward, by allocations →", "end", PALE)
    page.text((LEFT + 0.42 * PANEL, y(80)), "activations", "middle", bold=True)
    at_end = [part[-1] for part in stacks[1][FIXED : FIXED + 2]]
    page.text((LEFT + PANEL + GAP + 0.62 * PANEL, y(sum(at_end) / 2) + 5), "gradients", "middle", bold=True)
    return str(page.write("3_one_batch_in_four_parts.svg"))


def computed(line: Timeline) -> int:
    """Return how many of a step's moments lie before its update."""
    end_ms = max(span.end_ms for span in line.spans if span.phase == "backward")
    return sum(ms <= end_ms for ms in line.time_ms)


if __name__ == "__main__":
    main()
