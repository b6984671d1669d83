"""Colours and CSS of the panel: JupyterLab's theme variables, so that a change of theme shows at once."""

from __future__ import annotations

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


def shade(share: float) -> str:
    """Return a background from white to sky blue, on which black can be read; ``share`` is between 0 and 1."""
    ends = ((255, 255, 255), (86, 180, 233))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*ends, strict=True))


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
# Sizes are in em of the panel's own type, so that one number makes all of it larger. The width of the panel decides its
# layout, not that of the window. What comes and goes has a place of its own: nothing below it moves.
CSS = """<style>
.gpumem-panel { container-type: inline-size; color: var(--jp-ui-font-color1, inherit); font-size: 14px;
  line-height: 1.35; padding: 2px 8px 8px; overflow: visible; }
.gpumem-panel.gpumem-big { font-size: 21px; }
.gpumem-panel .widget-box { overflow: visible; }
/* JupyterLab sets this class when the kernel is gone. */
.gpumem-panel.jupyter-widgets-disconnected > * { display: none !important; }
.gpumem-panel.jupyter-widgets-disconnected::before { display: block; width: auto; height: auto; margin: 0.4em 0;
  padding: 0.6em 0.9em; border-left: 5px solid #D55E00; background: var(--jp-layout-color2, #eee); font-family: inherit;
  font-size: 1.2em; font-weight: 600; white-space: normal;
  content: "The kernel that drew this panel has ended, and its ranks with it. Run %hvd_start and %hvd_panel again."; }
.gpumem-panel .gpumem-top { display: flex; align-items: center; justify-content: space-between; gap: 0.6em;
  min-height: 2.7em; }
.gpumem-panel .gpumem-status { flex: 1 1 0; min-width: 0; font-size: 1.2em; font-weight: 600; line-height: 1.2;
  display: flex; align-items: center; gap: 0.5em; }
.gpumem-panel .gpumem-status > span { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2;
  overflow: hidden; }
.gpumem-panel .gpumem-status small { font-size: 0.8em; font-weight: 400; color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-sign { flex: none; font-style: normal; font-size: 0.75em; width: 2em; height: 2em;
  line-height: 2em; text-align: center; border-radius: 50%; color: #fff; background: #888888; }
.gpumem-panel .gpumem-sign.gpumem-trains { background: #009E73; }
.gpumem-panel .gpumem-sign.gpumem-waits { background: #E69F00; color: #000; }
.gpumem-panel .gpumem-sign.gpumem-ended { background: #D55E00; }
.gpumem-panel .gpumem-buttons { flex: none; gap: 0.3em; }
.gpumem-panel .gpumem-buttons button { font-size: 1em; height: 2.3em; line-height: 2.3em; width: auto;
  min-width: 5.4em; padding: 0 0.7em; margin: 0; }
.gpumem-panel button:focus-visible, .gpumem-panel select:focus-visible, .gpumem-panel input:focus-visible {
  outline: 3px solid #E69F00; outline-offset: 1px; }
.gpumem-panel .gpumem-knobs { display: grid; grid-template-columns: repeat(5, minmax(0, 1fr)); gap: 0.2em 0.6em; }
.gpumem-panel .gpumem-knob { position: relative; display: block; }
.gpumem-panel .gpumem-knob .widget-inline-hbox { flex-direction: column; align-items: stretch; height: auto;
  width: auto; margin: 0; overflow: visible; }
.gpumem-panel .gpumem-knob .widget-label { width: auto; text-align: left; font-size: 0.86em; height: 1.5em;
  line-height: 1.5em; color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-knob select, .gpumem-panel .gpumem-knob input { font-size: 1em; width: 100%;
  flex: 0 0 2em; height: 2em; }
.gpumem-panel .gpumem-knob select { appearance: auto; background-image: none; }
.gpumem-panel .gpumem-error > div { position: absolute; z-index: 6; top: 3.4em; left: 0; min-width: 100%; width: 20em;
  padding: 0.3em 0.6em; background: var(--jp-layout-color1, #fff); border: 2px solid #D55E00; font-size: 0.9em;
  box-shadow: 0 2px 6px rgba(0,0,0,0.4); }
.gpumem-panel .gpumem-knob:has(.gpumem-error > div) input, .gpumem-panel .gpumem-knob:has(.gpumem-error > div) select {
  outline: 2px solid #D55E00; }
.gpumem-panel .gpumem-knob:nth-child(5n) .gpumem-error > div,
.gpumem-panel .gpumem-knob:nth-child(5n + 4) .gpumem-error > div { left: auto; right: 0; }
.gpumem-panel .gpumem-critical { position: absolute; top: 2.1em; right: 0.7em; width: auto; height: auto; margin: 0;
  font-size: 0.82em; line-height: 1.3; color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-what-if { display: block; margin-top: 0.2em; }
.gpumem-panel .gpumem-flip { display: grid; grid-template-columns: 1em minmax(0, 1fr) auto; gap: 0 0.2em;
  font-size: 0.82em; line-height: 1.4; font-variant-numeric: tabular-nums; white-space: nowrap; }
.gpumem-panel .gpumem-flip span { overflow: hidden; text-overflow: ellipsis; }
.gpumem-panel .gpumem-flip em { font-style: normal; }
.gpumem-panel .gpumem-flip u { text-decoration: none; text-align: right; color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-flip i { grid-column: 1 / 3; align-self: center; height: 0.35em;
  border: 1px solid var(--jp-border-color1, #888); background: linear-gradient(to right, var(--look) var(--live),
  color-mix(in srgb, var(--look) 40%, transparent) var(--live) var(--reserved), transparent var(--reserved)); }
.gpumem-panel .gpumem-will-fit { --look: #009E73; }
.gpumem-panel .gpumem-tight { --look: #E69F00; }
.gpumem-panel .gpumem-too-large { --look: #D55E00; }
.gpumem-panel .gpumem-what-if-key p { margin: 0.1em 0; font-size: 0.82em; color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-foreseen { display: block; }
.gpumem-panel .gpumem-batch-lines > svg { display: block; width: 100%; max-width: 60em; font-size: 12px; }
.gpumem-panel .gpumem-batch-lines text { fill: var(--jp-ui-font-color1, currentColor); }
.gpumem-panel .gpumem-batch-lines .gpumem-axis { stroke: var(--jp-border-color1, #888); }
.gpumem-panel .gpumem-tiles { display: grid; grid-template-columns: repeat(5, minmax(0, 1fr)); gap: 0.4em;
  margin: 0.3em 0; }
.gpumem-panel .gpumem-tiles > div { border: 1px solid var(--jp-border-color2, currentColor); border-radius: 4px;
  padding: 0.1em 0.5em; min-height: 4.1em; }
.gpumem-panel .gpumem-tiles b { display: block; white-space: nowrap; line-height: 1.25;
  font-size: min(1.45em, 3.4cqi - 0.26em); /* ten characters, such as 1000.0 KiB */
  font-variant-numeric: tabular-nums; }
.gpumem-panel .gpumem-tiles span { display: block; font-size: 0.82em; line-height: 1.2;
  color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-effect > div { border-left: 5px solid #009E73; padding: 0.2em 0.7em; min-height: 2.8em;
  background: var(--jp-layout-color2, transparent); }
.gpumem-panel .gpumem-effect b { font-variant-numeric: tabular-nums; white-space: nowrap; }
.gpumem-panel .gpumem-effect span { margin-right: 1.2em; display: inline-block; }
.gpumem-panel .gpumem-message { position: relative; display: flex; align-items: flex-start; height: 5.8em;
  margin: 0.3em 0; overflow-y: auto; }
.gpumem-panel .gpumem-message .gpumem-alert { flex: 1 1 0; }
.gpumem-panel .gpumem-message .gpumem-usual { flex: 1 1 auto; display: block; min-width: 0; }
.gpumem-panel .gpumem-lost { display: flex; align-items: center; gap: 0.6em; }
.gpumem-panel .gpumem-lost .gpumem-verdict { flex: 1 1 0; min-width: 0; }
.gpumem-panel .gpumem-lost button { flex: none; width: auto; height: 2em; line-height: 2em; margin: 0; padding: 0 0.6em;
  font-size: 0.9em; }
.gpumem-panel .gpumem-message:not(:has(.gpumem-alert > div)) .gpumem-alert { flex: none; }
.gpumem-panel .gpumem-fits { flex: 0 1 auto; display: block; max-width: 40%; }
.gpumem-panel .gpumem-fits button { display: block; width: 100%; height: auto; margin: 0 0 0.2em; padding: 0.15em 0.5em;
  white-space: normal; text-align: left; font-size: 0.86em; line-height: 1.3; }
.gpumem-panel .gpumem-message p { margin: 0.1em 0; }
.gpumem-panel .gpumem-alert > div { border-left: 5px solid #D55E00; padding: 0.1em 0.7em; min-height: 5.4em;
  background: var(--jp-layout-color2, transparent); }
.gpumem-panel .gpumem-alert h4 { margin: 0; font-size: 1.1em; }
.gpumem-panel .gpumem-alert span { margin-right: 1.2em; display: inline-block; }
.gpumem-panel .gpumem-message:has(.gpumem-alert > div) .gpumem-usual { display: none; }
.gpumem-panel .gpumem-dismiss { flex: none; order: 3; width: 2em; height: 2em; font-size: 1em; line-height: 2em;
  padding: 0; margin: 0 0 0 0.3em; }
.gpumem-panel .gpumem-key, .gpumem-panel .gpumem-pins { display: flex; flex-wrap: wrap; gap: 0 1em; list-style: none;
  margin: 0 0 0.3em; padding: 0; font-size: 0.88em; font-variant-numeric: tabular-nums; }
.gpumem-panel .gpumem-key li, .gpumem-panel .gpumem-pins li { white-space: nowrap; }
.gpumem-panel .gpumem-key .gpumem-of { color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-key i { display: inline-block; box-sizing: border-box; width: 1.4em; height: 0.9em;
  margin-right: 0.4em; vertical-align: -1px; }
.gpumem-panel .gpumem-key .gpumem-limit { border-top: 4px solid #D55E00; height: 4px; vertical-align: 3px; }
.gpumem-panel .gpumem-key .gpumem-live { width: 0.9em; border: 2px solid #000; border-radius: 50%; background: #fff; }
.gpumem-panel .gpumem-key .gpumem-reserved { border: 2px solid #888888; }
.gpumem-panel .gpumem-pins b { display: inline-block; border: 1px solid #888888; min-width: 1.4em; text-align: center; }
.gpumem-panel .gpumem-pins .gpumem-bad b { border-color: #D55E00; }
.gpumem-panel .gpumem-pins small { color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-none { color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-strip { margin: 0.4em 0 0.2em; }
.gpumem-panel .gpumem-strip span { font-size: 0.88em; color: var(--jp-ui-font-color2, inherit); }
.gpumem-panel .gpumem-strip div { display: grid; grid-template-columns: repeat(auto-fill, minmax(2em, 1fr));
  gap: 2px; }
.gpumem-panel .gpumem-strip i { height: 1.8em; line-height: 1.8em; font-size: 0.86em; font-style: normal;
  text-align: center; box-sizing: border-box; }
.gpumem-panel .gpumem-strip .gpumem-higher { outline: 3px solid #D55E00; outline-offset: -1px; }
.gpumem-panel .gpumem-answers { display: flex; flex-wrap: wrap; gap: 0.3em; margin: 0.1em 0; }
.gpumem-panel .gpumem-answers button { width: auto; height: 1.8em; line-height: 1.8em; padding: 0 0.8em; margin: 0; }
.gpumem-panel .gpumem-form { display: flex; flex-wrap: wrap; align-items: center; gap: 0.3em 0.8em; margin: 0.3em 0; }
.gpumem-panel .gpumem-form .widget-text { width: auto; margin: 0; }
.gpumem-panel .gpumem-form .widget-text .widget-label { width: auto; }
.gpumem-panel .gpumem-form .widget-text input { width: 6.5em; flex: none; }
.gpumem-panel .gpumem-form button { width: auto; padding: 0 0.8em; margin: 0; }
.gpumem-panel .gpumem-form .widget-checkbox { width: auto; }
.gpumem-panel .gpumem-searching { min-height: 1.4em; }
.gpumem-panel .gpumem-searching p { margin: 0.2em 0; }
.gpumem-panel .gpumem-fits-map { display: grid; gap: 3px; max-width: 48em; margin: 0.3em 0; align-items: center; }
.gpumem-panel .gpumem-fits-map button { width: 100%; height: 3.4em; margin: 0; line-height: 1.3; white-space: pre-line;
  font-variant-numeric: tabular-nums; }
.gpumem-panel .gpumem-fits-map .gpumem-frontier { outline: 3px solid #009E73; outline-offset: -3px; }
.gpumem-panel .gpumem-notes p { margin: 0.1em 0; font-size: 0.88em; line-height: 1.4; }
.gpumem-panel .gpumem-choices { display: flex; flex-wrap: wrap; gap: 0.3em; margin: 0.2em 0; }
.gpumem-panel .gpumem-choices button { font-size: 0.9em; height: 2em; line-height: 2em; width: auto; padding: 0 0.6em;
  margin: 0; }
.gpumem-panel .gpumem-truths { font-size: 0.88em; color: var(--jp-ui-font-color2, inherit); }
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
@container (max-width: 52em) {
  .gpumem-panel .gpumem-knob .widget-label { font-size: 0.72em; letter-spacing: -0.03em; }
  .gpumem-panel .gpumem-critical .gpumem-wide { display: none; }
  .gpumem-panel .gpumem-flip span { grid-column: 2 / -1; }
  .gpumem-panel .gpumem-flip i { grid-area: 3 / 1 / 4 / 4; margin-bottom: 0.4em; }
  .gpumem-panel .gpumem-flip em { grid-area: 2 / 1 / 3 / 3; }
  .gpumem-panel .gpumem-flip u { grid-area: 2 / 3; }
}
@container (max-width: 46em) {
  .gpumem-panel > * { font-size: 0.93em; } /* 13 px, as in JupyterLab's own side bars */
  .gpumem-panel .gpumem-top { flex-wrap: wrap; gap: 0.2em; }
  .gpumem-panel .gpumem-top .gpumem-status { flex: 1 0 100%; }
  .gpumem-panel .gpumem-buttons { flex: 1 1 100%; flex-wrap: wrap; }
  .gpumem-panel .gpumem-knob select { padding: 0 0.1em; }
  .gpumem-panel .gpumem-effect > div { min-height: 4.1em; }
  .gpumem-panel .gpumem-key { font-size: 0.82em; line-height: 1.2; }
  .gpumem-panel .gpumem-message { height: 6.9em; }
  .gpumem-panel .gpumem-critical { font-size: 0.72em; top: 2.6em; }
}
@container (max-width: 40em) {
  .gpumem-panel .gpumem-knob .widget-label { font-size: 0.68em; letter-spacing: -0.05em; }
  .gpumem-panel .js-plotly-plot .annotation-text { font-size: 0.8em !important; } /* titles side by side */
}
@container (max-width: 36em) {
  .gpumem-panel .gpumem-knobs, .gpumem-panel .gpumem-tiles { grid-template-columns: repeat(3, minmax(0, 1fr)); }
  .gpumem-panel .gpumem-tiles b { font-size: 1.2em; }
  .gpumem-panel .gpumem-message { height: 8.2em; }
}
</style>"""


def theme_line_css(subplot: str) -> str:
    """Return a style sheet that gives the lines of a plotly subplot, such as ``x2y2``, the colour of the text."""
    lines = f".gpumem-panel .js-plotly-plot .{subplot} .js-line"
    return f"<style>{lines} {{ stroke: var(--jp-ui-font-color1, #888) !important; }}</style>"
