"""Draw the clinic's picture: what each case looks like, and which instrument finds it."""

from __future__ import annotations

from tests.course.pictures.svg import BLUE, GREEN, ORANGE, PALE, PINK, WIDTH, Drawing

LEFT, TOP, ROW = 20, 44, 31
LOOK, TYPE = 250, 540  # where the columns begin
MEMORY, EXPERIMENT, SYNC, TIME = BLUE, PINK, GREEN, ORANGE
CASES = (
    ("a graph kept across steps", "live bytes grow in training", "%hvd_doctor", MEMORY),
    ("a list of losses", "live bytes grow in your own loop", "%%hvd --memory", MEMORY),
    ("validation without no_grad", "a variable holds activations", "%hvd_memory", MEMORY),
    ("wrong accumulation", "steps grow with the micro-batches", "an experiment", EXPERIMENT),
    ("clipping of scaled gradients", "steps shrink with the scale", "an experiment", EXPERIMENT),
    ("a sampler that is not sharded", "ranks see the same samples", "%hvd_check --sync", SYNC),
    ("unseeded ranks", "ranks hold different weights", "%hvd_check --sync", SYNC),
    ("frozen layers in the optimizer", "state of weights that rest", "%hvd_doctor", MEMORY),
    ("logits kept alive", "live bytes between two steps", "%hvd_memory", MEMORY),
    ("fragmentation", "reserved is far above live", "%hvd_doctor", MEMORY),
    ("a slow rank", "the others wait in reduction", "%hvd_time", TIME),
    ("batch-norm statistics", "ranks hold different buffers", "%hvd_check --sync", SYNC),
)


def main() -> None:
    """Draw it and print its path."""
    page = Drawing("Twelve cases of the clinic: what each looks like, and which instrument finds it")
    for x, words in ((LEFT, "case"), (LOOK, "what you see"), (TYPE, "what you type")):
        page.text((x, TOP - 18), words, colour=PALE)
    for place, (title, look, instrument, colour) in enumerate(CASES):
        y = TOP + place * ROW
        page.area([(LEFT, y), (LEFT + 6, y), (LEFT + 6, y + ROW - 7), (LEFT, y + ROW - 7)], colour)
        page.text((LEFT + 14, y + 17), f"{place + 1}  {title}")
        page.text((LOOK, y + 17), look)
        page.text((TYPE, y + 17), instrument, colour=colour, bold=True)
        page.line([(LEFT, y + ROW - 3), (WIDTH - 20, y + ROW - 3)], "#dddddd", width=1)
    print(page.write("clinic_instruments.svg"))


if __name__ == "__main__":
    main()
