"""The panel's sentences: what is happening, the numbers, what a flip did, what went wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernel.history import History
from ..kernel.lifecycle import RESTARTING
from ..kernel.snapshot_plan import notebook_name
from ..planning.instead import may_free
from ..planning.prediction import DOES_NOT_FIT, FITS, TIGHT, Prediction
from ..report.breakdown import place
from ..report.configurations import Effect, Tried
from ..report.freed import leak_headline, leak_what
from ..report.instead import BESIDES
from ..report.memory import why_they_differ
from ..report.rescue import Rescue
from ..report.step_time import TimeReport
from ..report.tables import marked
from ..shared.forecast import MOST_BATCH
from ..shared.knobs import CHANGES, KEEPS, KEEPS_TO_ROUNDING
from ..shared.messages import Leak, RankInfo, Reading
from ..shared.units import format_bytes, format_duration, format_rate
from ..shared.workload import Handles
from .pictures import common_limit
from .series import Peak, above_median, worst_first

if TYPE_CHECKING:
    from ..session import Session

TIMEOUT_S = 2.0  # the panel mentions an answer that takes longer
_WORTH_A_WORD = 0.1  # of the peak
_COMES = "…"
_VERDICTS = {FITS: ("✓", "will-fit"), TIGHT: ("≈", "tight"), DOES_NOT_FIT: ("✗", "too-large")}
_MATHEMATICS = {KEEPS: "same results", KEEPS_TO_ROUNDING: "same to rounding", CHANGES: "results differ"}
_SIGNS = {"trains": "▶", "rests": "❚❚", "waits": "…", "ended": "■"}


def status(session: Session, silent_s: float) -> str:
    """Return a sign of the state and :func:`_doing` in one line."""
    state = _state(session, silent_s)
    sign = f'<i class="gpumem-sign gpumem-{state}" aria-hidden="true">{_SIGNS[state]}</i>'
    return f"{sign}<span>{_doing(session, silent_s)}</span>"


def tab(session: Session) -> str:
    """Return what a docked panel's tab is called: after what is trained, and the notebook."""
    of = Path(notebook_name()).stem
    return " · ".join(filter(None, [session.workload.name if session.workload else "GPU memory", of]))


def starting(what: str) -> str:
    """Return how far the ranks are that are being started again."""
    return f'<i class="gpumem-sign gpumem-waits" aria-hidden="true">{_SIGNS["waits"]}</i><span>{_sentence(what)}</span>'


def _state(session: Session, silent_s: float) -> str:
    if session.ended:
        return "waits" if session.ended == RESTARTING else "ended"
    if session.wait_report or (session.waiting_for and silent_s > TIMEOUT_S):
        return "waits"
    return "trains" if session.playing else "rests"


def _doing(session: Session, silent_s: float) -> str:
    """Return what is happening, and what is being waited for; ``silent_s`` is the time since ranks last reported."""
    ranks = f"{session.size} ranks" if session.size > 1 else "1 rank"
    workload, steps = session.workload, session.history.steps
    if session.ended == RESTARTING:
        return _sentence(session.ended)
    if session.ended:
        anew = marked("Press Restart to go on with what was trained, or begin anew: %hvd_start")
        return f"{_sentence(session.ended)} {anew}"
    if wait_report := session.wait_report:
        # Seconds are for the eyes: a screen reader would announce every one of them.
        return f'{_sentence(wait_report.text)} <small aria-hidden="true">{wait_report.seconds:.0f} s</small>'
    if (waiting := session.waiting_for) and silent_s > TIMEOUT_S:
        named = ", ".join(map(str, waiting))
        why = "their step takes long, or a cell is running there" if len(waiting) > 1 else "it may be busy with a cell"
        return (
            f"Waiting for rank{'s' * (len(waiting) > 1)} {named}: {why} "
            f'<small aria-hidden="true">{silent_s:.0f} s</small>'
        )
    if workload is None:
        return marked(f"{ranks} ready. Load a workload: %hvd_load digits-resnet")
    if session.playing:
        return f"Training {escape(workload.name)} on {ranks}{', autotune' * session.policy.autotune}"
    if waiting:
        return "Finishing the steps under way"
    return _sentence(session.doing) if steps or session.doing[:6] != "paused" else "Ready to train: press Play"


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{marked(text[:1].upper() + text[1:])}."


def tiles(session: Session, readings: Sequence[Reading | None], time: TimeReport | None = None) -> str:
    """Return the few numbers that are shown large: those of the latest configuration, as ``%hvd_runs`` has them."""
    tried = session.history.now()
    speed = tried.samples_per_s if tried else None
    batch = tried.settings.samples_per_rank * session.size if tried else 0
    memory, of = _peak(tried, readings)
    unknown = "n/a" if tried and tried.steps else _COMES  # with the next step
    steps = f'<i class="gpumem-steps">{session.history.steps:,}</i>'
    return _tiles(
        (memory if tried and tried.peak_bytes else unknown, f"peak{escape(of)}"),
        (format_rate(speed) if speed else unknown, "samples/s, all ranks" if session.size > 1 else "samples/s"),
        (format_duration(batch / speed) if speed else unknown, f"step{escape(_waiting(time))}"),
        (
            unknown if tried is None or tried.loss is None else f"{tried.loss:.4f}",
            f"loss, step {steps}{_epochs(session)}",
        ),
    )


def _waiting(time: TimeReport | None) -> str:
    """Return how much of a step the ranks wait, and for whom, if that is one of them."""
    if time is None or len(time.ranks) < 2:
        return ""
    if time.straggler:
        return f", {100 * time.straggler.share:.0f} % waiting for rank {time.straggler.rank}"
    return f", {100 * time.waiting:.0f} % waiting"


def _peak(tried: Tried | None, readings: Sequence[Reading | None]) -> tuple[str, str]:
    """Return the peak of the rank nearest to its own limit, and its share of that; n/a before a step was done."""
    if tried is not None and tried.fullest:
        peak, limit = tried.fullest
        return format_bytes(peak), f", {peak / limit:.0%} of {format_bytes(limit)}"
    limit_bytes = common_limit(readings)
    of = f", of {format_bytes(limit_bytes)}" if limit_bytes else ", limit n/a"
    return format_bytes(tried.peak_bytes if tried else None), of


def _epochs(session: Session) -> str:
    history, workload = session.history, session.workload
    if workload is None:
        return ""
    tried = [entry for entry in history.tried if entry.settings_id >= history.loaded_as]
    seen_by_rank = sum((one.steps + one.steps_beside) * one.settings.samples_per_rank for one in tried)
    seen = history.seen_before + seen_by_rank * session.size
    return f", {seen / workload.dataset_len:.1f} epochs" if workload.dataset_len else ", epochs n/a"


def _tiles(*numbers: tuple[str, str]) -> str:
    """Return numbers, each above what it is, which is HTML."""
    body = "".join(f"<div><b>{escape(number)}</b><span>{what}</span></div>" for number, what in numbers)
    return f'<div class="gpumem-tiles">{body}</div>'


_CLOSE = '<button class="gpumem-close" data-press="close" title="close (Esc)" aria-label="close">×</button>'


def effect(effect: Effect | None, foretold: Prediction | None = None) -> str:
    """Before and after the latest flip, or the pinned configuration and the latest; and what was predicted for it."""
    if effect is None:
        return ""
    flip = f"{'pinned: ' if effect.pinned else ''}{effect.flip}"
    if not effect.after.steps:
        return f"<div>{_CLOSE}<span>{escape(flip)}</span> will be measured with the next step</div>"
    peaks = f"<span>live peak <b>{escape(effect.memory)}</b></span>"
    if foretold:
        came = format_bytes(effect.after.peak_bytes)
        peaks += f" <span>predicted <b>{foretold.in_words(foretold.live_peak_bytes)}</b>, measured <b>{came}</b></span>"
    measured = "".join(
        f" <span>{escape(told)}</span>" for told in (effect.speed, effect.communication, effect.caveat) if told
    )
    return f"<div>{_CLOSE}<span>{escape(flip)}</span> {peaks}{measured}</div>"


def tip(knob: str, about: Sequence[str], rows: Sequence[str]) -> str:
    """Return what a knob does, and a row for each of its values."""
    said = " ".join(_sentence(one) for one in about if one)
    return f"<div>{_CLOSE}<p><b>{escape(knob)}</b> {said}</p><table>{''.join(rows)}</table></div>"


def present(value: str, means: str, now: Prediction | None) -> str:
    """Return the row of the present value; ``now``: what is predicted of the present settings."""
    memory = now.in_words(now.live_peak_bytes) if now else ""
    speed = f"{format_rate(now.samples_per_s)}/s" if now and now.samples_per_s else ""
    return _row("", value, means, memory, speed, "now", "gpumem-present")


def flip(
    value: str, means: str, foreseen: Prediction | None, now: Prediction | None, why_not: str, mathematics: str
) -> str:
    """Return what a flip to this value would change from now, with a button that makes it.

    ``why_not``: why nothing can be said, empty while it is looked for, a dash where there is nothing to say.
    """
    does = f'<button data-press="{escape(value)}" title="{_MATHEMATICS[mathematics]}">flip</button>'
    same = _MATHEMATICS[mathematics]
    if foreseen is None:
        size = "" if why_not == "-" else "n/a" if why_not else "…"
        title = "" if why_not == "-" else why_not or "being predicted"
        return _row("", value, means, size, "", f"{same} {does}", "", title)
    sign, look = _VERDICTS.get(foreseen.verdict, ("", "will-fit"))
    verdict = f'<b role="img" aria-label="{escape(foreseen.verdict)}">{sign}</b>'
    memory, speed = foreseen.in_words(foreseen.live_peak_bytes), _speed(foreseen, now)
    if now and not (now.lower_bound or foreseen.lower_bound):
        memory = _signed_bytes(foreseen.live_peak_bytes - now.live_peak_bytes)
    return _row(verdict, value, means, memory, speed, f"{same} {does}", f"gpumem-{look}", str(foreseen))


def _row(verdict: str, value: str, means: str, memory: str, speed: str, does: str, look: str, title: str = "") -> str:
    return (
        f'<tr class="gpumem-flip {look}" title="{escape(title)}"><td>{verdict}</td><td><b>{escape(value)}</b> '
        f"<small>{escape(means)}</small></td><td><em>{escape(memory)}</em></td><td><u>{escape(speed)}</u></td>"
        f"<td>{does}</td></tr>"
    )


def _signed_bytes(size: int) -> str:
    return "± 0" if not size else f"{'+' if size > 0 else '−'}{format_bytes(abs(size))}"


def _speed(foreseen: Prediction, now: Prediction | None) -> str:
    """Return by how much faster or slower than now it will be, or that this lies within what steps differ by."""
    if foreseen.samples_per_s is None:
        return ""
    if now is None or now.samples_per_s is None:
        return f"{format_rate(foreseen.samples_per_s)}/s"
    (low, high), (now_low, now_high) = (
        (one.low_samples_per_s or 0.0, one.high_samples_per_s or math.inf) for one in (foreseen, now)
    )
    if low <= now_high and now_low <= high:
        return "≈ as fast"
    return f"{100 * (foreseen.samples_per_s / now.samples_per_s - 1):+.0f} %".replace("-", "−")


def critical(session: Session) -> str:
    """Return up to which global batch more samples a step still pay; empty without a workload."""
    if session.workload is None:
        return ""
    batch, scale = session.settings.samples_per_rank * session.size, session.history.noise_scale
    known = f"about {float(f'{scale:.2g}'):,.0f} samples" if scale else "not known: it is measured every 20 steps"
    if scale is None and session.size == 1:
        known = "not known: one rank alone does not show it"
    return (
        "Twice the samples nearly halve the steps up to the critical batch; far above it they hardly save any. "
        f"Critical batch {known}; the global batch is {batch:,} (gradient noise scale, McCandlish et al. 2018)."
    )


def largest(batch_size: int, samples: int | None, now: int) -> str:
    """Return the last row of the batch size; ``samples``: how many the data has, if known."""
    if batch_size == (samples or MOST_BATCH):
        said = f"{batch_size:,} is the most that the data has" if samples else "any micro-batch fits"
    else:
        said = f"{batch_size:,} is the largest that fits" if batch_size else "not even 1 fits"
    flips = batch_size not in (0, now, MOST_BATCH)
    does = f'<button data-press="{batch_size}">flip</button>' if flips else ""
    return f'<tr class="gpumem-flip gpumem-largest"><td></td><td colspan="3">{said}</td><td>{does}</td></tr>'


def field_error(value: str, why: str) -> str:
    """Say why a typed value cannot be used."""
    return f"<div><b>{escape(value)}</b>: {marked(why)}</div>"


def filling(found: Sequence[Peak], history: History, handles: Handles) -> str:
    """Return what fills the worst rank's peak most, and which knobs may make that smaller."""
    if not found:
        return ""
    peak = worst_first(found)[0]
    outlier = _outlier(peak, found)
    if peak.ledger is None:
        of = f", {peak.share * 100:.0f} % of its limit" if peak.limit else ""
        return f"Rank {peak.rank} peaks at {format_bytes(peak.bytes)}{of}. {outlier}Its categories are not known yet."
    ledger = peak.ledger
    parts = sorted(ledger.at_peak.items(), key=lambda entry: -entry[1])
    category, size = parts[0]
    whose = f"rank {peak.rank}'s" if len(found) > 1 else "the"
    fill = "fill" if category.endswith("s") else "fills"
    now, tried = history.now(), history.tried
    helps = may_free(category, ledger.phase, now, tried, handles)
    if not helps:
        helps = BESIDES.get(category, "")
        for other, part in parts[1:]:
            worth = part >= _WORTH_A_WORD * ledger.peak_bytes
            hint = may_free(other, ledger.phase, now, tried, handles) if worth else ""
            if hint:
                helps += f" {_sentence(other)[:-1]}: {100 * part / ledger.peak_bytes:.0f} %; {hint}"
                break
    return escape(
        f"{_sentence(category)[:-1]} {fill} {100 * size / max(1, ledger.peak_bytes):.0f} % of {whose} peak "
        f"({format_bytes(size)} of {format_bytes(ledger.peak_bytes)}), in {place(ledger)}. {outlier}{helps}",
        quote=False,
    )


def _outlier(worst: Peak, found: Sequence[Peak]) -> str:
    more = above_median(worst, found)
    return f"It needs {more * 100:.0f} % more than the median rank. " if more else ""


def rescue(rescue: Rescue | None) -> str:
    """Return a card about the latest step that was discarded."""
    if rescue is None:
        return ""
    failure = rescue.failure
    what = {"oom": f"rank {failure.rank} ran out of memory", "diverged": "the ranks' weights differ"}.get(
        failure.kind, f"rank {failure.rank} failed"
    )
    if failure.kind != "diverged" and failure.phase:
        what += f" in the {failure.phase} part"
    facts = [] if failure.kind == "diverged" else [("module", failure.module)]
    if failure.kind == "oom":
        facts += [
            ("asked for", format_bytes(failure.asked_bytes)),
            ("free at that moment", format_bytes(failure.free_bytes)),
        ]
    facts_said = " ".join(f"<span>{escape(name)} <b>{escape(value)}</b></span>" for name, value in facts if value)
    shown = f"<p>{facts_said}</p>" if facts_said else ""
    message = "" if failure.kind == "oom" else f"<p>{marked(failure.message)}</p>"
    did = f"<p>The step was discarded on all ranks; {marked(rescue.did)}.</p>" if rescue.did else ""
    reason = f"<p>{marked(rescue.reason)}</p>" if rescue.reason else ""
    return f"<div>{_CLOSE}<h4>Step {rescue.step}: {what}</h4>{shown}{message}{did}{reason}</div>"


def leak(found: Sequence[Leak]) -> str:
    """Return a card about memory that one holder keeps from step to step."""
    so_far = format_bytes(max(leak.bytes_so_far for leak in found))
    heading = leak_headline(found)
    sentences = "".join(f"<p>{marked(sentence)}</p>" for sentence in (leak_what(found[0]), found[0].fix))
    grown = f"<span>grown by <b>{escape(so_far)}</b></span>"
    return f"<div><h4>{escape(heading[:1].upper() + heading[1:])}</h4>{grown}{sentences}</div>"


def truths(ranks: Sequence[RankInfo]) -> str:
    """Return why live, reserved and device bytes differ, for those who want to know."""
    body = "".join(f"<p>{escape(sentence)}</p>" for sentence in why_they_differ(ranks))
    return f"<details><summary>live, reserved and device bytes: why they differ</summary>{body}</details>"


def alert(text: str) -> str:
    """Return a sentence about something that could not be done."""
    return f"<div>{_CLOSE}{marked(text)}</div>" if text else ""
