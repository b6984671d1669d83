"""What the panel says: what is happening, the numbers, what a flip did, what went wrong."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from .. import leaks
from ..history import Effect, format_rate
from ..memory.units import format_bytes
from ..rescue import Rescue
from ..sample import Leak, Reading, Sample
from ..session import Session
from .series import GOOD

PATIENCE_S = 2.0  # an answer that takes longer is worth a word
_LATEST_STEPS = 10  # what "now" means for speed and step time


def status(session: Session, silent_s: float) -> str:
    """What is happening, and what is being waited for; ``silent_s`` is the time since ranks were last heard of."""
    ranks = f"{session.size} ranks" if session.size > 1 else "1 rank"
    workload, steps = session.workload, session.history.steps
    if session.ended:
        again = "%hvd_start" if session.ended == "stopped" else "%hvd_restart"
        return f"{_sentence(session.ended)} Start again with {again}."
    if scene := session.scene:
        # Seconds are for the eyes: a screen reader would announce every one of them.
        return f'{_sentence(scene.text)} <small aria-hidden="true">{scene.seconds:.0f} s</small>'
    if (waiting := session.waiting_for) and silent_s > PATIENCE_S:
        named = ", ".join(map(str, waiting))
        why = "their step takes long, or a cell runs there" if len(waiting) > 1 else "it may be busy with a cell"
        return (
            f"Waiting for rank{'s' * (len(waiting) > 1)} {named}: {why} "
            f'<small aria-hidden="true">{silent_s:.0f} s</small>'
        )
    if workload is None:
        return f"{ranks} ready. Load a workload: %hvd_load digits-resnet"
    if session.playing:
        return f"Training {escape(workload.name)} on {ranks}"
    if waiting:
        return "Finishing the steps under way"
    return _sentence(session.doing) if steps or session.doing[:6] != "paused" else "Ready to train: press Play"


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{escape(text[:1].upper() + text[1:])}."


def tiles(session: Session, samples: Sequence[Sequence[Sample]], readings: Sequence[Reading | None]) -> str:
    """The numbers to read from the back row."""
    latest = [[sample for sample in of_rank if sample.event in GOOD][-_LATEST_STEPS:] for of_rank in samples]
    now = latest[0][-1].settings_id if latest and latest[0] else None
    latest = [[sample for sample in of_rank if sample.settings_id == now] for of_rank in latest]
    speed = step_s = loss = None
    if now is not None and all(latest):
        speed = statistics.median(sum(s.samples_per_s for s in at_once) for at_once in zip(*latest, strict=False))
        step_s = statistics.median(max(s.step_s for s in at_once) for at_once in zip(*latest, strict=False))
        losses = [of_rank[-1].loss for of_rank in latest]
        loss = None if None in losses else statistics.fmean(value for value in losses if value is not None)
    memory, of = _worst(readings)
    virtual = " (virtual)" if any(info.virtual for info in session.ranks) else ""
    return _tiles(
        (f"{format_rate(speed)}", "samples/s, all ranks"),
        (memory, f"worst rank's VRAM peak{virtual}{of}"),
        ("n/a" if loss is None else f"{loss:.4f}", "loss"),
        ("n/a" if step_s is None else f"{step_s * 1000:.0f} ms", "step time"),
        (f"{session.history.steps:,}", f"steps{_epochs(session)}"),
    )


def _worst(readings: Sequence[Reading | None]) -> tuple[str, str]:
    known = [reading for reading in readings if reading]
    if not known:
        return "n/a", ""
    worst = max(known, key=lambda reading: reading.live_peak / (reading.limit or 1))
    if not worst.limit:
        return format_bytes(worst.live_peak), ", limit n/a"
    return format_bytes(worst.live_peak), f", {worst.live_peak / worst.limit:.0%} of {format_bytes(worst.limit)}"


def _epochs(session: Session) -> str:
    history, workload = session.history, session.workload
    if workload is None:
        return ""
    tried = [entry for entry in history.tried if entry.settings_id >= history.loaded_as]
    seen = history.seen_before + sum(entry.steps * entry.settings.samples_per_rank for entry in tried) * session.size
    return f", {seen / workload.dataset_len:.1f} epochs"


def _tiles(*numbers: tuple[str, str]) -> str:
    body = "".join(f"<div><b>{escape(number)}</b><span>{escape(what)}</span></div>" for number, what in numbers)
    return f'<div class="gpumem-tiles">{body}</div>'


def effect(effect: Effect | None) -> str:
    """Before and after the latest flip."""
    if effect is None:
        return ""
    if not effect.after.steps:
        return f"<div><span>{escape(effect.flip)}</span> measured with the next step</div>"
    return (
        f"<div><span>{escape(effect.flip)}</span> <span>live peak <b>{escape(effect.memory)}</b></span> "
        f"<span><b>{escape(effect.speed)}</b></span></div>"
    )


def rescue(rescue: Rescue | None) -> str:
    """A card about the latest step that was discarded."""
    if rescue is None:
        return ""
    failure = rescue.failure
    what = "ran out of memory" if failure.kind == "oom" else "failed"
    facts = [("part of the step", failure.phase), ("module", failure.module)]
    if failure.kind == "oom":
        facts += [("asked for", format_bytes(failure.asked)), ("free", format_bytes(failure.free))]
    shown = "".join(f"<span>{escape(name)} <b>{escape(value)}</b></span> " for name, value in facts if value)
    message = "" if failure.kind == "oom" else f"<p>{escape(failure.message)}</p>"
    did = f"<p>The step was discarded on all ranks; {escape(rescue.did)}.</p>" if rescue.did else ""
    advice = f"<p>{escape(rescue.advice)}</p>" if rescue.advice else ""
    return f"<div><h4>Step {rescue.step}: rank {failure.rank} {what}</h4>{shown}{message}{did}{advice}</div>"


def leak(found: Sequence[Leak]) -> str:
    """A card about memory that ranks keep from step to step with one holder."""
    so_far = format_bytes(max(leak.bytes_so_far for leak in found))
    heading = leaks.headline(found)
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in (leaks.what(found[0]), found[0].fix))
    grown = f"<span>grown by <b>{escape(so_far)}</b></span>"
    return f"<div><h4>{escape(heading[:1].upper() + heading[1:])}</h4>{grown}{sentences}</div>"


def alert(text: str) -> str:
    """A sentence about something that could not be done."""
    return f"<div>{escape(text)}</div>" if text else ""
