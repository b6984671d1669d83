"""Knobs are checked on the way in, and errors name the way out."""

from __future__ import annotations

import pickle

import pytest

from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.settings import KNOBS, Settings


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
        ({"learning_rate": 0}, "number above 0"),
        ({"learning_rate": "inf"}, "number above 0"),
        ({"learning_rate": True}, "number above 0"),
        ({"clip_norm": -1}, "above 0, such as 1.0, or none"),
        ({"lerning_rate": 1}, "did you mean 'learning_rate'"),
        ({"qqqq": 1}, "allowed: precision, checkpointing"),
        ({"precision": ["fp32"]}, "is not known"),
    ],
)
def test_bad_values_name_what_is_allowed(knobs: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        Settings().replace(**knobs)


def test_settings_are_values() -> None:
    settings = Settings(precision="bf16")
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert settings.changed_from(Settings()) == {"precision": "bf16"}
    with pytest.raises(AttributeError):
        settings.precision = "fp32"  # type: ignore[misc]
