"""What IPython offers after a ``%hvd_`` magic."""

from __future__ import annotations

import re

import pytest

from gpumem_nb.magics import MAGICS as CLASSES
from gpumem_nb.magics import complete_hvd

MAGICS = {name: getattr(magics, name) for magics in CLASSES for of_kind in magics.magics.values() for name in of_kind}


def complete(line: str) -> list[str]:
    return complete_hvd.offered(line)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("%hvd_set prec", ["precision="]),
        ("%hvd_set precision=", ["precision=fp32", "precision=fp16", "precision=bf16", "precision=bf16_weights"]),
        ("%hvd_set precision=b", ["precision=bf16", "precision=bf16_weights"]),
        ("%hvd_set batch_size=4 clip_norm=n", ["clip_norm=none"]),
        ("%hvd_set snapshot_steps=", ["snapshot_steps=auto", "snapshot_steps=never"]),
        ("%hvd_load digits-s", ["digits-separable"]),
        ("%hvd_load digits-resnet wi", ["width="]),
        ("%hvd_start --device c", ["cuda", "cpu"]),
        ("%hvd_start --launcher ", ["mpi"]),
        ("%hvd_start --mem", ["--memory-limit"]),
        ("%hvd_start --timeout ", []),
        ("%hvd_attach lo", ["loss="]),
        ("%hvd_attach se", ["seed="]),
        ("%hvd_load digits-resnet se", ["seed="]),
        ("%hvd_attach ev", ["eval_data="]),
        ("%hvd_attach tr", ["trainer="]),
        ("%hvd_set eval_every=", ["eval_every=never"]),
        ("%hvd_log runs/a --to t", ["tensorboard", "trackio"]),
        ("%%hvd --r", ["--ranks"]),
        ("%%hvd --quiet --r", ["--ranks"]),
        ("%hvd_memory --by m", ["module"]),
        ("%hvd_set", []),
        ("%hvd_stop ", []),
        ("%lesson che", ["check"]),
        ("%lesson check 1.1", ["1.1"]),
        ("%lesson reset 1", ["1"]),
        ("%hvd_unknown ", []),
    ],
)
def test_completion_offers_names_and_values(line: str, found: list[str]) -> None:
    assert complete(line) == found


@pytest.mark.parametrize("name", MAGICS)
def test_every_flag_that_a_magic_explains_is_offered(name: str) -> None:
    explained = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", MAGICS[name].parser.format_usage()))
    assert {word for word in complete(f"%{name} ") if word.startswith("-")} == explained


def test_help_names_magics_as_they_are_typed() -> None:
    for name, magic in MAGICS.items():
        said = f"{magic.__doc__}\n{magic.parser.format_help()}" if hasattr(magic, "parser") else magic.__doc__ or ""
        assert not re.search(r"%%hvd_", said), name
