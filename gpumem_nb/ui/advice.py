"""What may make a category of the peak smaller, in words."""

from __future__ import annotations

from ..kernel.history import History
from ..report.differences import typed
from ..shared import categories as c
from ..shared.knobs import Need
from ..shared.knobs.easing import strongest_first
from ..shared.units import format_bytes

_MOST_HINTS = 2

# What no knob changes.
FIXED = {
    c.PARAMETERS: "No knob changes what the weights take; a smaller model does.",
    c.GRADIENTS: "No knob changes what the gradients take: they are as large as the weights.",
    c.OPTIMIZER_STATE: "No knob makes this optimizer's state smaller.",
    c.COMMUNICATION: "No knob changes how many gradients are on their way at once.",
    c.OTHER: "Training did not make it: look for tensors that cells and buffers of the model hold.",
}


def what_helps(category: str, phase: str, history: History, blocks: int) -> str:
    """Knobs that may free some of it; of those already tried, only what made the peak smaller."""
    if not history.tried:
        return ""
    now = history.tried[-1]
    of_this_model = [tried for tried in reversed(history.tried) if tried.model_version == now.model_version]
    maybe, measured = [], []
    for changes in strongest_first(Need(category, phase, now.settings, blocks)):
        changed = now.settings.replace(**changes)
        tried = next((t for t in of_this_model if t.settings == changed), None)
        if tried is None or tried.peak_bytes is None:
            maybe.append(typed(now.settings, changed))
        elif now.peak_bytes and tried.peak_bytes < now.peak_bytes:
            peak = format_bytes(tried.peak_bytes)
            measured.append(f"{typed(now.settings, changed)} had a peak of {peak} when it was tried")
    sentences = [f"{'; '.join(measured[:_MOST_HINTS])}."] if measured else []
    if maybe and len(measured) < _MOST_HINTS:
        sentences.append(f"{' or '.join(maybe[: _MOST_HINTS - len(measured)])} may free some of it.")
    return " ".join(sentences)
