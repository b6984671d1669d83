"""Colours and CSS of the panel: JupyterLab's theme variables, so that a change of theme shows at once."""

from __future__ import annotations

from dataclasses import dataclass

from ..shared import categories as c

# Okabe and Ito's palette, told apart by people who are colour-blind (https://jfly.uni-koeln.de/color/).
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"
VERMILION = "#D55E00"  # limits and failures only
YELLOW = "#F0E442"
GREY = "#888888"  # readable on white and on black
TEXT = "#787878"  # the same, for text of figures that do not follow the theme: 4.3 to 1 on both of JupyterLab's
HATCH = "rgba(0,0,0,0.6)"


@dataclass(frozen=True, slots=True)
class Look:
    """How a category is drawn; ``pattern`` is one of plotly's shapes, for categories that share a hue."""

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
# Seven hues for ten categories: stripes mean a short-lived relative of what has the same hue.
LOOKS = {
    c.PARAMETERS: Look(BLUE),
    c.OPTIMIZER_STATE: Look(PURPLE),
    c.GRADIENTS: Look(GREEN),
    c.COMMUNICATION: Look(GREEN, "x"),
    c.INPUTS: Look(YELLOW),
    c.CASTS: Look(BLUE, "/"),
    c.ACTIVATIONS: Look(ORANGE),
    c.TEMPORARIES: Look(ORANGE, "/"),
    c.INSIDE_OPERATORS: Look(SKY),
    c.OTHER: Look(GREY),
}
UNKNOWN = Look(GREY, "\\")
RANK_COLOURS = (SKY, ORANGE, GREEN, PURPLE, BLUE)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

CSS = """<style>
.gpumem-panel { color: var(--jp-ui-font-color1, inherit); font-size: 16px; line-height: 1.35; padding: 4px 8px 8px; }
.gpumem-panel .gpumem-status { font-size: 24px; font-weight: 600; margin: 4px 0; min-height: 34px; }
.gpumem-panel .gpumem-status small { font-size: 17px; font-weight: 400; color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-alert > div, .gpumem-panel .gpumem-effect > div {
  border-left: 6px solid; padding: 6px 12px; margin: 4px 0; background: var(--jp-layout-color2, transparent);
  font-size: 18px; }
.gpumem-panel .gpumem-alert > div { border-color: #D55E00; }
.gpumem-panel .gpumem-alert h4 { margin: 0 0 2px; font-size: 20px; }
.gpumem-panel .gpumem-alert p { margin: 2px 0; font-size: 16px; }
.gpumem-panel .gpumem-alert span { margin-right: 20px; display: inline-block; }
.gpumem-panel .gpumem-effect > div { border-color: #009E73; }
.gpumem-panel .gpumem-effect b { font-size: 20px; font-variant-numeric: tabular-nums; white-space: nowrap; }
.gpumem-panel .gpumem-effect span { margin-right: 20px; display: inline-block; }
.gpumem-panel .gpumem-tiles { display: flex; flex-wrap: wrap; gap: 8px; margin: 6px 0; }
.gpumem-panel .gpumem-tiles > div { flex: 1 1 0; min-width: 112px;
  border: 1px solid var(--jp-border-color2, currentColor);
  border-radius: 4px; padding: 4px 10px; }
.gpumem-panel .gpumem-tiles b { display: block; white-space: nowrap;
  font-size: 28px; line-height: 1.2; font-variant-numeric: tabular-nums; }
.gpumem-panel .gpumem-tiles span { font-size: 14px; color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-controls { display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr));
  gap: 4px 12px; overflow: visible; }
.gpumem-panel .gpumem-controls .widget-inline-hbox { flex-direction: column; align-items: stretch; height: auto;
  width: auto; margin: 0; overflow: visible; }
.gpumem-panel .gpumem-controls .widget-label { width: auto; text-align: left; font-size: 14px; height: 20px;
  line-height: 20px; color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-controls select, .gpumem-panel .gpumem-controls input { font-size: 17px; width: 100%;
  flex: 0 0 34px; height: 34px; }
.gpumem-panel .gpumem-controls select { appearance: auto; background-image: none; }
.gpumem-panel .gpumem-buttons { overflow: visible; flex-wrap: wrap; }
.gpumem-panel .gpumem-buttons button { font-size: 17px; height: 36px; line-height: 36px; width: 104px; }
.gpumem-panel button:focus-visible, .gpumem-panel select:focus-visible, .gpumem-panel input:focus-visible {
  outline: 3px solid #E69F00; outline-offset: 1px; }
.gpumem-panel .gpumem-filling p { margin: 6px 0 4px; font-size: 18px; }
.gpumem-panel .gpumem-key { display: flex; flex-wrap: wrap; gap: 2px 18px; list-style: none; margin: 0; padding: 0;
  font-size: 15px; font-variant-numeric: tabular-nums; }
.gpumem-panel .gpumem-key li { white-space: nowrap; }
.gpumem-panel .gpumem-key i { display: inline-block; width: 22px; height: 14px; margin-right: 6px;
  vertical-align: -1px; }
.gpumem-panel .gpumem-none { color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-strip { margin: 8px 0 2px; }
.gpumem-panel .gpumem-strip span { font-size: 14px; color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-strip div { display: grid; grid-template-columns: repeat(auto-fill, minmax(30px, 1fr));
  gap: 2px; }
.gpumem-panel .gpumem-strip i { height: 26px; line-height: 26px; font-size: 12px; font-style: normal;
  text-align: center; box-sizing: border-box; }
.gpumem-panel .gpumem-strip .gpumem-higher { outline: 3px solid #D55E00; outline-offset: -1px; }
.gpumem-panel .gpumem-truths { font-size: 14px; color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-truths summary { cursor: pointer; }
.gpumem-panel .gpumem-truths p { margin: 2px 0; }
.gpumem-panel .gpumem-css { display: none; }
.gpumem-panel .modebar { display: none; }
.gpumem-panel .js-plotly-plot text { fill: var(--jp-ui-font-color1, inherit) !important; }
.gpumem-panel .js-plotly-plot .annotation .bg { fill: var(--jp-layout-color0, #fff) !important; }
.gpumem-panel .js-plotly-plot .gridlayer path, .gpumem-panel .js-plotly-plot .zerolinelayer path {
  stroke: var(--jp-border-color2, #888) !important; }
.gpumem-panel .js-plotly-plot .hoverlayer path { fill: var(--jp-layout-color2, #eee) !important;
  stroke: var(--jp-border-color1, #888) !important; }
</style>"""


def theme_line_css(subplot: str) -> str:
    """A style sheet that gives the lines of one of plotly's subplots, such as ``x2y2``, the colour of the text."""
    lines = f".gpumem-panel .js-plotly-plot .{subplot} .js-line"
    return f"<style>{lines} {{ stroke: var(--jp-ui-font-color1, #888) !important; }}</style>"
