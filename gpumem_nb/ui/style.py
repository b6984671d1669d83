"""Colours of the panel and of figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..shared import categories as c
from ..shared.step_times import BACKWARD, COPY, DATA, FORWARD, REDUCTION, TOOLKIT, UPDATE

# Okabe and Ito's palette, told apart by people who are colour-blind (https://jfly.uni-koeln.de/color/).
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"
VERMILION = "#D55E00"  # limits and failures only
YELLOW = "#F0E442"
GREY = "#888888"  # readable on white and on black
TEXT = "#787878"  # the same, for text of figures that do not follow the theme: 4.3 to 1 on both of JupyterLab's
HATCH = "rgba(0,0,0,0.6)"


# From plotly's Cividis, which is told apart by people who are colour-blind.
HEAT = ((0, 34, 78), (65, 77, 107), (124, 123, 120), (188, 174, 108), (254, 232, 56))
SHADES = ((255, 255, 255), (86, 180, 233))  # from white to sky blue; black can be read on them


def mixed(colours: Sequence[tuple[int, int, int]], share: float) -> str:
    """Return the colour that lies at a share, between 0 and 1, of the way through these."""
    at = min(max(share, 0.0), 1.0) * (len(colours) - 1)
    low = min(int(at), len(colours) - 2)
    return "#" + "".join(
        f"{round(a + (b - a) * (at - low)):02x}" for a, b in zip(colours[low], colours[low + 1], strict=True)
    )


@dataclass(frozen=True, slots=True)
class Look:
    """The look of a category; ``pattern`` is one of plotly's shapes, for categories that share a hue."""

    colour: str
    pattern: str = ""

    @property
    def filling(self) -> dict[str, object]:
        """The pattern as plotly wants it."""
        return {"shape": self.pattern, "fillmode": "replace", "bgcolor": self.colour, "fgcolor": HATCH, "size": 6}

    @property
    def css(self) -> str:
        """The same as a background."""
        stripes = f"{HATCH} 0 1px, transparent 1px 5px"
        layers = [f"repeating-linear-gradient({angle}deg, {stripes})" for angle in _ANGLES[self.pattern]]
        return ", ".join([*layers, self.colour])


_ANGLES = {"": (), "/": (135,), "\\": (45,), "x": (45, 135)}
# Seven hues for eleven categories: stripes mean a short-lived relative of what has the same hue.
LOOKS = {
    c.PARAMETERS: Look(BLUE),
    c.OPTIMIZER_STATE: Look(PURPLE),
    c.GRADIENTS: Look(GREEN),
    c.COMMUNICATION: Look(GREEN, "x"),
    c.INPUTS: Look(YELLOW),
    c.CASTS: Look(BLUE, "/"),
    c.LOGITS: Look(ORANGE, "x"),
    c.ACTIVATIONS: Look(ORANGE),
    c.TEMPORARIES: Look(ORANGE, "/"),
    c.INSIDE_OPERATORS: Look(SKY),
    c.OTHER: Look(GREY),
}
UNKNOWN = Look(GREY, "\\")
# Parts of a step's time have colours of their own: Paul Tol's muted scheme (https://sronpersonalpages.nl/~pault/).
TIME_COLOURS = {
    DATA: "#DDCC77",
    COPY: "#999933",
    FORWARD: "#88CCEE",
    BACKWARD: "#AA4499",
    REDUCTION: "#CC6677",
    UPDATE: "#44AA99",
    TOOLKIT: "#BBBBBB",
}

BIG = 1.5  # times as large as usual: for a room


def theme_line_css(subplot: str) -> str:
    """Return CSS that gives the lines of a plotly subplot, such as ``x2y2``, the colour of the text."""
    lines = f".gpumem-panel .js-plotly-plot .{subplot} .js-line"
    return f"{lines} {{ stroke: var(--jp-ui-font-color1, #888) !important; }}\n"
