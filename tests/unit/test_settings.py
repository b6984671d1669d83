"""Knobs are checked on the way in, and errors name the way out."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumem_nb.report.differences import arrows, mathematics, short, typed
from gpumem_nb.shared.errors import InvalidInput, StateFileError, WorkloadError
from gpumem_nb.shared.knobs import KNOBS, Knob, additional, register
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.values import whole


def test_text_and_numbers_mean_the_same() -> None:
    typed = Settings().replace(batch_size="16", learning_rate="3e-4", clip_norm="none", accumulation_steps="2")
    given = Settings(batch_size=16, learning_rate=3e-4, clip_norm=None, accumulation_steps=2)
    assert typed == given
    assert typed.samples_per_rank == 32


@pytest.mark.parametrize("name", [name for name, knob in KNOBS.items() if knob.choices])
def test_every_word_that_a_knob_lists_is_accepted_and_others_are_not(name: str) -> None:
    for choice in KNOBS[name].choices:
        assert getattr(Settings().replace(**{name: choice}), name) == choice
    with pytest.raises(InvalidInput, match=f"^{name}='nonsense' is not known: .*{KNOBS[name].choices[0]}"):
        Settings().replace(**{name: "nonsense"})


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"batch_size": 0}, "whole number of at least 1"),
        ({"batch_size": 1.5}, "whole number of at least 1"),
        ({"batch_size": True}, "whole number of at least 1"),
        ({"batch_size": None}, "whole number of at least 1"),
        ({"batch_size": "1e99"}, "whole number of at least 1"),
        ({"batch_size": 2**40}, "whole number of at least 1"),
        ({"learning_rate": -1e-3}, "number of at least 0"),
        ({"learning_rate": "inf"}, "number of at least 0"),
        ({"learning_rate": True}, "number of at least 0"),
        ({"clip_norm": -1}, "above 0, such as 1.0, or none"),
        ({"lerning_rate": 1}, "did you mean 'learning_rate'"),
        ({"gradient_clip": 1}, "did you mean 'clip_norm'"),
        ({"qqqq": 1}, "allowed: precision, checkpointing"),
        ({"precision": ["fp32"]}, "is not known"),
        ({"checkpointing": "all"}, "allowed: none, selective, blocks, sqrt"),
    ],
)
def test_bad_values_name_what_is_allowed(knobs: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        Settings().replace(**knobs)


def test_settings_are_values() -> None:
    settings = Settings(precision="bf16")
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert len({settings, Settings(precision="bf16"), Settings(), Settings().replace(precision="fp32")}) == 2
    assert Settings(**settings.as_dict()) == settings
    assert json.loads(json.dumps(settings.as_dict())) == settings.as_dict()
    assert len(pickle.dumps(settings)) < 200, "they go with every chunk"
    with pytest.raises(AttributeError, match="no attribute 'precison'"):
        settings.precison  # noqa: B018
    assert settings.changed_from(Settings()) == {"precision": "bf16"}
    with pytest.raises(AttributeError):
        settings.precision = "fp32"


def test_a_saved_state_that_names_a_retired_value_is_read_as_what_it_came_to() -> None:
    saved = Settings(batch_size=8).as_dict() | {"checkpointing": "all"}
    assert Settings.from_saved(saved, Path("a.state")) == Settings(batch_size=8, checkpointing="none")
    with pytest.raises(StateFileError, match=r"^a\.state holds settings .* There is no knob 'unheard'"):
        Settings.from_saved({"unheard": 1}, Path("a.state"))


def test_a_rate_that_a_schedule_computed_is_rounded_where_settings_are_shown() -> None:
    settings = Settings(learning_rate=1.200000000000002e-05)
    assert "learning_rate=1.2e-05\n" in settings.in_short
    assert typed(Settings(), settings) == "learning_rate=1.2e-05"
    assert typed(settings, settings.replace(learning_rate=1.0)) == "learning_rate=1.0"
    assert settings.learning_rate == 1.200000000000002e-05


def test_a_difference_reads_as_typed_as_arrows_and_short() -> None:
    before, after = Settings(clip_norm=1.0), Settings(precision="bf16", batch_size=64)
    assert typed(before, after) == "precision=bf16 batch_size=64 clip_norm=none"
    assert arrows(before, after) == "precision fp32 → bf16, batch_size 32 → 64, clip_norm 1.0 → none"
    assert short(before, after) == "bf16, batch 64, clip none"
    assert Settings().replace(**dict(pair.split("=") for pair in typed(Settings(), after).split())) == after


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "keeps the mathematics"),
        ({"checkpointing": "sqrt", "num_workers": 2, "schedule_steps": 9}, "keeps the mathematics"),
        ({"checkpointing": "sqrt", "optimizer_impl": "fused"}, "keeps the mathematics to rounding"),
        (
            {"batch_size": 8, "accumulation_steps": 4},
            "keeps the mathematics to rounding if the loss is a mean over samples",
        ),
        ({"batch_size": 8}, "changes the mathematics (batch_size)"),
        ({"checkpointing": "sqrt", "precision": "bf16"}, "changes the mathematics (precision)"),
        ({"optimizer": "sgd", "batch_size": 2}, "changes the mathematics (batch_size, optimizer)"),
        ({"lr_schedule": "linear", "schedule_steps": 9}, "changes the mathematics (lr_schedule, schedule_steps)"),
    ],
)
def test_what_a_change_does_to_the_mathematics_is_known(changes: dict[str, object], sentence: str) -> None:
    assert mathematics(Settings(), Settings(**changes)) == sentence
    assert Settings(**changes).same_mathematics(Settings()) is sentence.startswith("keeps")


@pytest.fixture
def registered() -> Iterator[Knob]:
    knob = Knob("frozen_layers", 1, "layers that are not trained", parse=whole, allowed="a whole number")
    before = Settings(precision="bf16")
    register(knob)
    assert Settings(precision="bf16") == before
    assert before.replace(frozen_layers="2").changed_from(before) == {"frozen_layers": 2}
    yield knob
    del KNOBS[knob.name]


def test_a_knob_needs_a_name_of_its_own_and_a_default_that_it_accepts(registered: Knob) -> None:
    for name, sentence in (("precision", "already"), ("two words", "Python identifier"), ("_hidden", "identifier")):
        with pytest.raises(InvalidInput, match=sentence):
            register(Knob(name, 1, "", parse=whole, allowed="a whole number"))
    with pytest.raises(InvalidInput, match="a whole number"):
        register(Knob("other", "much", "", parse=whole, allowed="a whole number"))
    assert "other" not in KNOBS


@pytest.mark.parametrize(
    ("knob", "sentence"),
    [
        (Knob("lambda", "a", "", choices=("a", "b")), "Python identifier"),
        (Knob("self", "a", "", choices=("a", "b")), "'self' cannot name a knob"),
        (Knob("replace", "a", "", choices=("a", "b")), "'replace' cannot name a knob"),
        (Knob("samples_per_rank", 1, "", parse=whole), "'samples_per_rank' cannot name a knob"),
        (Knob("table", 1, "", parse=whole), "'table' cannot name a knob"),
        (Knob("other", 1, ""), "'other' accepts no value: give it choices or parse"),
        (Knob("other", "2", "", parse=whole, allowed="a number"), "stores its default '2' as 2: give it that"),
        (Knob("other", [1], "", parse=list, allowed="a list"), r"default \[1\] .* cannot be hashed"),
    ],
)
def test_a_knob_that_settings_could_not_hold_is_refused(knob: Knob, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        register(knob)
    assert knob.name not in KNOBS


def test_a_saved_state_names_an_additional_knob_only_where_it_says_something(registered: Knob) -> None:
    plain, special = Settings(batch_size=8).saved(), Settings(frozen_layers=2).saved()
    assert plain == {name: value for name, value in Settings(batch_size=8).as_dict().items() if name != "frozen_layers"}
    assert special == Settings(frozen_layers=2).as_dict()
    assert Settings.from_saved(special, Path("a.state")) == Settings(frozen_layers=2)
    del KNOBS[registered.name]
    assert Settings.from_saved(plain, Path("a.state")) == Settings(batch_size=8)
    register(registered)


def test_knobs_registered_besides_the_built_in_ones_are_known(registered: Knob) -> None:
    assert additional() == (registered,)


def test_a_knob_without_a_short_label_is_marked_by_its_name(registered: Knob) -> None:
    assert short(Settings(), Settings(frozen_layers=3)) == "frozen layers 3"


def test_settings_that_name_a_knob_this_process_lacks_are_refused_when_they_are_applied(registered: Knob) -> None:
    sent = pickle.dumps(Settings(frozen_layers=3))
    pickle.loads(sent).check_known()
    del KNOBS[registered.name]
    arrived = pickle.loads(sent)
    with pytest.raises(WorkloadError, match="knob 'frozen_layers' was registered in the notebook, but not on the rank"):
        arrived.check_known()
    assert arrived.replace(batch_size=8) == Settings(batch_size=8), "a knob taken out of the table is gone"
    register(registered)
