"""Findings and their flips: when a flip is offered, what is said of it, and that each is explained on the page."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from gpumem_nb.kernel.questions.doctoring import _brings
from gpumem_nb.planning.doctor.explained import explanation
from gpumem_nb.planning.doctor.finding import FASTER, FIT, LESS, PAGE, ROOM, WRONG, Diagnosis, Finding, Flip, card
from gpumem_nb.planning.doctor.rules import findings
from gpumem_nb.planning.doctor.rules.time import CAUSES, TITLES
from gpumem_nb.planning.prediction import DOES_NOT_FIT, TIGHT
from gpumem_nb.shared import categories as c
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Splits
from tests.ledgers import MIB
from tests.unit.test_doctor import DEFAULT, MORE, evidence, prediction
from tests.unit.test_doctor import (
    test_each_rule_speaks_above_its_threshold_and_is_silent_below as each_rule,
)

ROOT = Path(__file__).parents[2]


def test_a_flip_is_offered_only_for_what_it_must_bring() -> None:
    def brings(wants: str, **of: Any) -> bool:
        flip = Flip(Settings(), MORE, {"batch_size": 16}, prediction(), prediction(MORE, **of), 100.0)
        return _brings(flip, wants)

    assert brings(FIT)
    assert not brings(FIT, verdict=TIGHT)
    assert brings(ROOM, live=90)
    assert not brings(ROOM, live=101), "more than now"
    assert not brings(ROOM, live=90, verdict=TIGHT), "it would barely fit again"
    assert brings(LESS, live=80)
    assert not brings(LESS, live=98), "less is not worth a button"
    assert brings(FASTER, samples_per_s=110.0)
    assert not brings(FASTER, samples_per_s=90.0)
    assert not brings(FASTER, samples_per_s=110.0, verdict=DOES_NOT_FIT)
    assert not _brings(Flip(Settings(), MORE, {}), FIT), "nobody knows"


def test_what_a_step_that_ran_out_on_trial_needs_is_not_known_so_nothing_is_said_to_be_saved() -> None:
    ran_out = prediction(categories={c.OTHER: 150 * MIB}, live=150, verdict=DOES_NOT_FIT, lower_bound=True)
    flip = Flip(Settings(), MORE, {"batch_size": 16}, ran_out, prediction(MORE), 100.0)
    assert flip.saves_bytes is None
    assert flip.brings.startswith("predicted: fits, live peak 100.0 MiB, ")


def test_what_changes_batch_norm_is_told_with_the_flip() -> None:
    after = DEFAULT.replace(batch_size=DEFAULT.batch_size // 2, accumulation_steps=2 * DEFAULT.accumulation_steps)
    said = [Flip(DEFAULT, after, {}, splits=Splits(norm, mean=True)).mathematics for norm in (False, True)]
    assert said[0] == "keeps the mathematics to rounding"
    assert said[1].startswith(f"{said[0]}, but for batch norm, whose statistics come from micro-batches of")


def test_a_flip_to_workers_says_that_they_must_keep_up() -> None:
    after = Settings(num_workers=2)
    flip = Flip(Settings(), after, {"num_workers": 2}, prediction(), prediction(after, samples_per_s=180.0), 100.0)
    assert flip.brings.endswith("180 samples/s (+80) if workers keep up")


def example() -> Diagnosis:
    flip = Flip(
        Settings(), MORE, {"batch_size": 16}, prediction(), prediction(MORE, live=40, samples_per_s=75.0), 100.0
    )
    found = Finding(
        "leak",
        "Memory’s growth, seen",
        WRONG,
        2,
        "It <grows>.",
        {"so far_bytes": MIB, "share": 0.25, "n": None},
        "Do.",
        flip=flip,
    )
    return Diagnosis((found,), ("Noted.",), "Came.")


def test_a_finding_says_its_evidence_its_flip_and_where_it_is_explained() -> None:
    text = str(example())
    assert "so far 1.0 MiB, share 25 %, n n/a" in text
    assert "%hvd_set batch_size=16: predicted: fits, live peak 40.0 MiB (60.0 MiB less), 75 samples/s (−25)" in text
    assert "changes the mathematics (batch_size). Do." in text
    assert f"more: {PAGE}#memorys-growth-seen" in text
    assert "1. Memory’s growth, seen (wrong): It <grows>." in text
    assert text.endswith("Came.\nNoted.")
    assert "It &lt;grows&gt;." in example()._repr_html_()
    [row] = example().frame().to_dict("records")
    assert (row["cause"], row["saves_bytes"], row["gains_samples_per_s"]) == ("leak", 60 * MIB, -25)
    assert row["mathematics"] == "changes"
    assert Diagnosis(()).frame().empty


def titles() -> list[str]:
    source = "".join(path.read_text() for path in (ROOT / "gpumem_nb/planning/doctor/rules").glob("*.py"))
    dominant = re.findall(r'_dominates\(\s*evidence,\s*c\.\w+,\s*"[^"]+",\s*"(.+)"', source)
    return [*re.findall(r'Finding\(\n\s+"[^"]+",\n\s+"(.+)",', source), *dominant, *TITLES.values()]


def test_every_finding_has_a_plain_title_and_its_heading_on_the_page() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / PAGE).read_text(), re.MULTILINE)
    assert len(titles()) >= 36
    assert set(titles()) == set(headings), "and no heading is left over"
    assert len(set(titles())) == len(titles())
    assert all(len(one.split()) >= 3 and one[0].isupper() for one in titles())
    assert set(CAUSES) == set(TITLES)


def test_the_page_is_named_with_the_anchor_that_its_heading_gets() -> None:
    [finding] = example().findings
    assert finding.page == f"{PAGE}#memorys-growth-seen"


def test_every_finding_says_what_to_press_or_to_type() -> None:
    """Those made by hand in the tests of rules: each has a flip to predict, or says what to do."""
    for above in [values[1] for mark in each_rule.pytestmark for values in mark.args[1]]:
        for found in findings(evidence(**above)):
            assert found.candidates or found.do, found
            assert found.measured, found


def test_more_shows_the_explanation_in_place_and_links_there_to_no_file() -> None:
    for title in titles():
        found = explanation(title)
        assert found.startswith("<p>"), title
        assert "](" not in found, title
        assert 'href="..' not in found, title
    shown = card(dataclasses.replace(example().findings[0], title=titles()[0]))
    assert f"<summary>more</summary>{explanation(titles()[0])}" in shown
    assert "<summary>" not in card(example().findings[0]), "of which nothing is explained"
