"""A session as one page for people who were not there: charts, runs, findings, versions."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from plotly.io import to_html

from ..kernel.history import History
from ..planning.score import Scoreboard
from ..report.answered import answers_table
from ..report.tables import Table, page
from ..shared.messages import RankInfo
from ..shared.units import format_bytes
from . import legend
from .charts import Assembly, View
from .pictures import common_limit, picture
from .widgets import text_of

if TYPE_CHECKING:
    from ..session import Session

_SCALE = 1.3  # of the charts: a page has more room than a panel
_CSS = ".gpumem-report > div { max-width: none; } .gpumem-runs table { margin-top: 1em; }"


def report_page(session: Session, findings: str, scoreboard: Scoreboard, versions: Mapping[str, str]) -> str:
    """HTML that needs neither a network nor a kernel; plotly is in it, once.

    Args:
        session: of which all is shown that is known in this process by now.
        findings: HTML of what is wrong and what would help, for which the ranks were asked before.
        scoreboard: what was predicted beside what came.
        versions: by name.
    """
    name = session.workload.name if session.workload else "no workload"
    words = ["<h2>Runs</h2>" + _runs(session), f"<h2>Findings</h2>{findings}"]
    if answers := session.runs.answers:
        words.append(f"<h2>Answers of doctor and tuner</h2>{answers_table(answers).html()}")
    if scoreboard.scored:
        words.append(f"<h2>Predicted and measured</h2>{scoreboard._repr_html_()}")
    words.append("<h2>Ranks and versions</h2>" + _ranks(session.ranks) + _versions(versions))
    charts, css = _charts(session)
    # Sentences of errors may name files; the page does not tell whose folder they lie in.
    sections = [without_home(_facts(session)), charts, *map(without_home, words)]
    return page(f"Session report: {name}", sections, css)


def without_home(text: str) -> str:
    """Return the same, with the home folder written as people do."""
    home = os.path.expanduser("~")
    for path in {home, os.path.realpath(home)} - {os.sep}:
        text = re.sub(rf"(?:(?<![\w.-])|(?<=\s-[A-Za-z])){re.escape(escape(path))}(?![\w.-])", "~", text)
    return text


def _facts(session: Session) -> str:
    size, history = session.size, session.history
    when = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
    what = f"{history.steps:,} steps on {size} rank{'s' * (size > 1)}" if history.steps else "No step was done"
    facts = [f"{what}. Written {when}."]
    if workload := session.workload:
        samples = "n/a" if workload.dataset_len is None else f"{workload.dataset_len:,}"
        facts.append(
            f"{workload.name}: {workload.parameters:,} parameters ({format_bytes(workload.parameter_bytes)}), "
            f"{samples} samples."
        )
        facts.append(f"Settings at the end: {session.settings.in_short.splitlines()[0]}")
        facts.append(_learned(history))
    return "".join(f"<p>{escape(fact)}</p>" for fact in facts if fact)


def _learned(history: History) -> str:
    """Return the loss of the latest step, and what the latest evaluation of what is loaded found."""
    tried = history.now()
    said = [] if tried is None or tried.loss is None else [f"Loss of the latest step: {tried.loss:.4g}."]
    of_loaded = [one for one in list(history.evaluations) if one.settings_id >= history.loaded_as]
    said += [f"{text[:1].upper()}{text[1:]}." for text in map(str, of_loaded[-1:])]
    return " ".join(said)


def _charts(session: Session) -> tuple[str, str]:
    """Return the panel's charts as they are now, and the style that they need."""
    view = View.of_session(session, session.ranks)
    if not view.has_steps:
        return "<h2>Charts</h2><p>There is nothing to draw: no step was done of what is loaded.</p>", ""
    assembly = Assembly(session.ranks, _SCALE)
    drawn = to_html(
        assembly.still(view),
        full_html=False,
        include_plotlyjs=True,
        config={"displayModeBar": False, "responsive": True},
    )
    key = legend.key(view.worst, view.time) + legend.strip(view.peaks)
    return f"<h2>Charts</h2><div class='gpumem-panel gpumem-report'>{drawn}{key}</div>", text_of(
        "panel.css"
    ) + assembly.css + _CSS


def _runs(session: Session) -> str:
    runs = session.runs
    svg = picture(runs.rows, common_limit(session.history.readings), session.ranks[0].device_name) if len(runs) else ""
    alone = replace(runs, answers=())  # which have a section of their own
    return f"<div class='gpumem-runs'>{svg}{alone._repr_html_()}</div>"


def _ranks(ranks: tuple[RankInfo, ...]) -> str:
    headings = ("rank", "device", "memory limit", "driver", "threads")
    rows = tuple(
        (
            str(info.rank),
            info.device_name,
            format_bytes(info.memory_limit),
            info.driver or ("none" if info.virtual else "n/a"),
            str(info.threads),
        )
        for info in ranks
    )
    hosts = len({info.host for info in ranks})
    title = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {hosts} host{'s' * (hosts > 1)}"
    return Table(title, headings, rows, frozenset({"device"})).html()


def _versions(versions: Mapping[str, str]) -> str:
    return Table("", ("what", "version"), tuple(versions.items()), frozenset({"what", "version"})).html()
