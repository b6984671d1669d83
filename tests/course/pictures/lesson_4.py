"""Draw lesson 4's picture: how far each type reaches, and where gradients lie without and with a loss scale."""

from __future__ import annotations

from collections.abc import Sequence

import gpumem_nb as gm
from tests.course.pictures.svg import BLUE, GREEN, HEIGHT, ORANGE, PALE, SKY, WIDTH, YELLOW, Drawing

LEFT, RIGHT, BOTTOM = 20, WIDTH - 20, HEIGHT - 48
LEAST, MOST = -42, 22  # powers of two on the axis
SCALE = 16  # 65,536 as a power of two
BAR, TALLEST = 30, 150
# What is drawn of each type: its digits, and from which power of two to which it holds all of them, and some of them.
TYPES = (
    ("fp32: 24 bits for the digits", (-126, 128), None, BLUE),
    ("bf16: 8 bits for the digits", (-126, 128), None, SKY),
    ("fp16: 11 bits for the digits", (-14, 16), (-24, -14), ORANGE),
)
GRADIENTS = """
def sizes_of_gradients():
    counts = torch.zeros(MOST - LEAST)

    def look(layer, of_inputs, of_outputs):
        powers = of_outputs[0][of_outputs[0] != 0].abs().log2()
        counts.add_(torch.histc(powers, MOST - LEAST, LEAST, MOST))

    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    hooks = [layer.register_full_backward_hook(look) for layer in layers]
    text = torch.randint(100, (8, 65))
    logits = model(text[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
    for hook in hooks:
        hook.remove()
    return counts.tolist()

sizes_of_gradients()
"""


def main() -> None:
    """Measure what backward of lesson 4's model hands from layer to layer, and draw it."""
    with gm.start(2, device="cpu", memory_limit="160MiB") as session:
        session.load("text-gpt", width=256, depth=4)
        session.set(batch_size=8)
        session.train(8)
        session.push({"LEAST": LEAST, "MOST": MOST})
        (counts, *_) = session.run(GRADIENTS)
    print(draw(counts))


def x(power: float) -> float:
    """Where a power of two lies across the page."""
    return LEFT + (RIGHT - LEFT) * (min(max(power, LEAST), MOST) - LEAST) / (MOST - LEAST)


def draw(counts: Sequence[float]) -> str:
    """Write the picture of so many gradients in each power of two and return its path."""
    page = Drawing("fp32 and bf16 reach far beyond all gradients; fp16 reaches them after a loss scale only")
    for place, (name, (low, high), some, colour) in enumerate(TYPES):
        top = 20 + place * (BAR + 8)
        box(page, (x(low), top), (x(high), top + BAR), colour)
        if some:
            box(page, (x(some[0]), top), (x(some[1]), top + BAR), YELLOW)
            page.text(((x(some[0]) + x(some[1])) / 2, top + 20), "fewer digits", "middle")
            page.text((x(some[0]) - 8, top + 20), "becomes 0", "end", PALE)
            page.text((x(high) + 8, top + 20), "infinite", colour=PALE)
            page.text(((x(low) + x(high)) / 2, top + 20), name, "middle")
        else:
            page.text(((LEFT + RIGHT) / 2, top + 20), f"{name}, reaches from 2⁻¹²⁶ to 2¹²⁸", "middle")
    for power in (-24, -14, 16):
        page.line([(x(power), 20 + 2 * (BAR + 8)), (x(power), BOTTOM)], PALE, dashed=True, width=1)
    histogram(page, counts, 0, BLUE, "gradients between layers")
    histogram(page, counts, SCALE, GREEN, "times 65,536")
    page.line([(LEFT, BOTTOM), (RIGHT, BOTTOM)])
    for power in range(-40, MOST, 10):
        page.line([(x(power), BOTTOM), (x(power), BOTTOM + 6)])
        page.text((x(power), BOTTOM + 22), f"2{superscript(power)}", "middle")
    page.text((RIGHT, HEIGHT - 6), "size of a number →", "end", PALE)
    return str(page.write("4_what_16_bits_reach.svg"))


def box(page: Drawing, low: tuple[float, float], high: tuple[float, float], colour: str) -> None:
    """Fill a box between two corners."""
    page.area([low, (high[0], low[1]), high, (low[0], high[1])], colour)


def histogram(page: Drawing, counts: Sequence[float], shift: int, colour: str, name: str) -> None:
    """Draw how many gradients have which size, multiplied by a power of two."""
    highest = max(counts)
    points = [(x(LEAST + shift), float(BOTTOM))]
    for place, count in enumerate(counts):
        y = BOTTOM - TALLEST * count / highest
        points += [(x(LEAST + place + shift), y), (x(LEAST + place + 1 + shift), y)]
    page.area([*points, (points[-1][0], float(BOTTOM))], colour)
    middle = x(LEAST + list(counts).index(highest) + 0.5 + shift)
    page.text((middle, BOTTOM - TALLEST - 10), name, "middle", bold=True)


def superscript(number: int) -> str:
    """Return a number as an exponent is written."""
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


if __name__ == "__main__":
    main()
