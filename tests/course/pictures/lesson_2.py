"""Draw lesson 2's picture: one step on four ranks, with the gradients that its loop really computes and averages."""

from __future__ import annotations

from collections.abc import Sequence

import gpumem_nb as gm
from tests.course.notebooks import COURSE, read
from tests.course.pictures.svg import BLUE, GREEN, HEIGHT, ORANGE, PALE, SKY, Drawing

RANKS = 4
LEFT, COLUMN, BAR, GAP = 146, 152, 13, 3
RATE = 0.1
TALL = 30  # of the largest bar
# The middle of each row of bars, and the top of each band between.
WEIGHTS_Y, OWN_Y, BAND_Y, MEAN_Y, STEP_Y, END_Y = 68, 158, 202, 268, 296, 376
MEASURE = """
def _step():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = new_net()
    picked = torch.randint(240, (6,), generator=torch.Generator().manual_seed(rank))
    cross_entropy(net(inputs[picked]), labels[picked]).backward()
    weight = net[0].weight
    return weight[0].tolist(), weight.grad[0].tolist(), hvd.allreduce(weight.grad)[0].tolist()
_step()
"""
Step = tuple[list[float], list[float], list[float]]


def main() -> None:
    """Take a step of lesson 2's loop on four ranks and draw it."""
    loop = next(cell.source for cell in read(COURSE / "2_four_ranks_one_model.ipynb").cells if cell.id == "loop")
    with gm.start(RANKS, device="cpu") as session:
        session.run(loop.removeprefix("%%hvd\n"))
        of_rank: list[Step] = session.run(MEASURE)
    print(draw(of_rank))


def draw(of_rank: Sequence[Step]) -> str:
    """Write the picture of a step and return its path."""
    page = Drawing("One step on four ranks: four gradients, one average, the same step everywhere")
    for y, lines in ((WEIGHTS_Y, ("the same", "weights")), (OWN_Y, ("gradients of", "its own samples"))):
        label(page, y, lines)
    label(page, MEAN_Y, ("the same", "gradient"))
    label(page, END_Y, ("the same", "weights again"))
    tallest = [max(abs(value) for step in of_rank for value in step[row]) for row in (0, 1)]
    right = LEFT + COLUMN * RANKS - 14
    for y, words, colour in (
        (BAND_Y, "all-reduce: the average of all four", SKY),
        (STEP_Y, "the same step on every rank: weight - rate × gradient", "#e4e4e4"),
    ):
        page.area([(LEFT, y), (right, y), (right, y + 28), (LEFT, y + 28)], colour)
        page.text(((LEFT + right) / 2, y + 19), words, "middle", bold=True)
    for rank, (weights, own, mean) in enumerate(of_rank):
        x = LEFT + COLUMN * rank
        middle = x + (COLUMN - 14) / 2
        page.text((middle, 24), f"rank {rank}", "middle", bold=True)
        bars(page, (x, WEIGHTS_Y), weights, tallest[0], BLUE)
        bars(page, (x, OWN_Y), own, tallest[1], ORANGE)
        bars(page, (x, MEAN_Y), mean, tallest[1], GREEN)
        stepped = [weight - RATE * slope for weight, slope in zip(weights, mean, strict=True)]
        bars(page, (x, END_Y), stepped, tallest[0], BLUE)
        arrow(page, middle, WEIGHTS_Y + TALL + 4, OWN_Y - TALL)
        arrow(page, middle, OWN_Y + 18, BAND_Y - 1)
        arrow(page, middle, BAND_Y + 29, MEAN_Y - 20)
        arrow(page, middle, MEAN_Y + 10, STEP_Y - 1)
        arrow(page, middle, STEP_Y + 29, END_Y - TALL + 4)
    page.text((right, HEIGHT - 6), f"{len(of_rank[0][0])} of the model's weights, as measured", "end", PALE)
    return str(page.write("2_one_step_on_four_ranks.svg"))


def label(page: Drawing, y: float, words: Sequence[str]) -> None:
    """Write what a row is, at its left."""
    for line, text in enumerate(words):
        page.text((12, y + 18 * line - 4), text)


def bars(page: Drawing, at: tuple[float, float], values: Sequence[float], tallest: float, colour: str) -> None:
    """Draw a bar for each value, up or down from a line."""
    left, middle = at
    for place, value in enumerate(values):
        x, y = left + place * (BAR + GAP) + 5, middle - TALL * value / tallest
        page.area([(x, middle), (x + BAR, middle), (x + BAR, y), (x, y)], colour)
    page.line([(left, middle), (left + len(values) * (BAR + GAP) + 7, middle)], PALE, width=1)


def arrow(page: Drawing, x: float, top: float, bottom: float) -> None:
    """Draw an arrow down."""
    page.line([(x, top), (x, bottom)], PALE)
    page.line([(x - 4, bottom - 6), (x, bottom), (x + 4, bottom - 6)], PALE)


if __name__ == "__main__":
    main()
