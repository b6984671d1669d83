"""Draw lesson 5's picture: the live bytes of a step without checkpointing, with single blocks, with segments of 4."""

from __future__ import annotations

import gpumem_nb as gm
from gpumem_nb.shared.messages import Timeline
from tests.course.pictures.lesson_1 import BOTTOM, LEFT, MIB, RIGHT, TOP, places
from tests.course.pictures.svg import BLUE, GREEN, HEIGHT, ORANGE, PALE, Drawing

# What is drawn, in which colour, and where its name stands: a share of the width, and MiB.
CURVES = (("none", BLUE, 0.46, 93.0), ("sqrt", GREEN, 0.87, 50.0), ("blocks", ORANGE, 0.7, 18.0))


def main() -> None:
    """Measure a step of lesson 5's model under each checkpointing and draw them."""
    lines: dict[str, Timeline] = {}
    with gm.start(2, device="cpu", memory_limit="128MiB") as session:
        session.load("text-gpt", width=64, depth=16)
        session.set(batch_size=16)
        for name, *_ in CURVES:
            session.set(checkpointing=name)
            session.train(3)
            timeline = session.memory(timeline=True).worst_timeline
            assert timeline is not None
            lines[name] = timeline
    print(draw(lines))


def draw(lines: dict[str, Timeline]) -> str:
    """Write the picture of these steps and return its path."""
    live = {
        name: [sum(now) / MIB for now in zip(*line.live_bytes.values(), strict=True)] for name, line in lines.items()
    }
    top = 20 * (int(max(map(max, live.values()))) // 20 + 1)

    def y(mib: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * mib / top

    page = Drawing(
        "The live bytes of one step without checkpointing, with single blocks, and with segments of 4 blocks"
    )
    for mib in range(0, top + 1, 20):
        page.line([(LEFT, y(mib)), (RIGHT, y(mib))], "#dddddd", width=1)
        page.text((LEFT - 8, y(mib) + 5), str(mib), "end", PALE)
    page.text((LEFT - 44, TOP - 20), "live MiB of one rank", colour=PALE)
    for name, colour, share, height in CURVES:
        points = [(x, y(mib)) for x, mib in zip(places(lines[name])[0], live[name], strict=True)]
        page.line(points, colour, width=2)
        at = LEFT + share * (RIGHT - LEFT), y(height)
        page.text(at, f"{name}: {max(live[name]):.1f} MiB", "middle", colour, bold=True)
    for phase, (begin, end) in places(lines["none"])[1].items():
        page.line([(begin, BOTTOM), (begin, BOTTOM + 26)], PALE, width=1)
        page.text(((begin + end) / 2, BOTTOM + 20), phase, "middle")
    page.text((RIGHT, HEIGHT - 8), "one step, allocation by allocation →", "end", PALE)
    return str(page.write("5_live_bytes_with_checkpointing.svg"))


if __name__ == "__main__":
    main()
