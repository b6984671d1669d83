"""Autotune against Horovod's own tuner, ``HOROVOD_AUTOTUNE``, which a plain script has."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.bench.figures import Figure, say, take_turns
from tests.bench.sides import Notebook, Script

_SCORE_STEPS = 50  # for each setting Horovod takes the median of five times ten steps
_MOST_SCORES = 100
COLUMNS = {"cycle_time_ms": "cycle_time_ms", "fusion_threshold_mib": "tensor_fusion_threshold"}  # of its log
DEFAULT = {"bucket_mib": 4, "compression": "none"}  # which it does not have


def against_horovods_own(notebook: Notebook, ranks: int, workload: str, rounds: int, slot_s: float) -> list[Figure]:
    """What both find, by its samples/s, and the steps that it takes them, on the session that is running."""
    notebook.thaw()
    notebook.run(f"session.load('{workload}'); display(session.panel())")
    notebook.train(20)
    notebook.run("session.set(autotune='on'); taken = 0")
    notebook.run("while session.policy.autotune: taken += session.train(5).steps")
    ours = notebook.run("", "taken")
    found = notebook.run(
        "", "[event.text for event in session.history.events if event.text.startswith('Autotune')][-1]"
    )
    say(f"  {found}")
    notebook.freeze()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "autotune.csv"
        own = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(log)}
        tuned_by_it = {"HOROVOD_FUSION_THRESHOLD": None, "HOROVOD_CYCLE_TIME": None}  # what is set, it leaves alone
        script = Script("plain Horovod with HOROVOD_AUTOTUNE", "plain_horovod", ranks, workload, **own, **tuned_by_it)
        try:
            theirs, best = _tuned(script, log)
            say(f"  HOROVOD_AUTOTUNE: {theirs} steps, {best}")
            notebook.thaw()
            live, plain = take_turns([notebook, script], rounds, slot_s, global_batch=32 * ranks)
        finally:
            script.close()
            notebook.thaw()
    about = f"{workload}, {ranks} ranks"
    ratios = [a / b for a, b in zip(live, plain, strict=True)]
    return [
        Figure(f"live loop with autotune ÷ plain with HOROVOD_AUTOTUNE, {about}", "≥ 1.00", "", ratios, found),
        in_one_loop(notebook, about, best, rounds, slot_s, 32 * ranks),
        Figure(
            f"steps of autotune ÷ of HOROVOD_AUTOTUNE, {about}", "≤ 0.50", "", [ours / theirs], f"{ours} ÷ {theirs}"
        ),
    ]


def in_one_loop(
    notebook: Notebook, about: str, theirs: dict[str, float], rounds: int, slot_s: float, global_batch: int
) -> Figure:
    """The live loop under the settings that autotune has set, and under those that Horovod's tuner found."""
    notebook.run(f"ours = session.settings.as_dict(); theirs = {theirs | DEFAULT!r}")
    steps = max(10, round(slot_s * notebook.train(30) / global_batch))
    ratios = []
    for number in range(rounds):
        rates = []
        for settings in ("ours", "theirs")[:: 1 if number % 2 else -1]:
            notebook.run(f"session.set(**{settings})")
            rates.append((settings, notebook.train(steps)))
        of = dict(rates)
        ratios.append(of["ours"] / of["theirs"])
        say(f"  round {number + 1} of {rounds}, {steps} steps: {of['ours']:.0f} and {of['theirs']:.0f} samples/s")
    notebook.run("session.set(**gpumem_nb.Settings().as_dict())")
    name = f"samples/s with what autotune found ÷ with what HOROVOD_AUTOTUNE found, both in the live loop, {about}"
    return Figure(name, "≥ 1.00", "", ratios, ", ".join(f"{knob} {value:g}" for knob, value in theirs.items()))


def _tuned(script: Script, log: Path) -> tuple[int, dict[str, float]]:
    """Train until its log has no more lines: after how many steps that was, and the last one, which is the best."""
    lines: list[str] = []
    steps = last = 0
    while steps - last < 3 * _SCORE_STEPS and steps < _MOST_SCORES * _SCORE_STEPS:
        script.train(_SCORE_STEPS)
        steps += _SCORE_STEPS
        known, lines = lines, log.read_text().splitlines() if log.exists() else []
        last = steps if len(lines) > len(known) or len(lines) < 2 else last
    values = dict(zip(map(str.strip, lines[0].split(",")), lines[-1].split(","), strict=False))
    return last, {knob: float(values[name]) for knob, name in COLUMNS.items()}
