"""How the caching allocator may be set, and what it reserves then: the model against torch's rules, read once more."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from gpumem_nb.memory.virtual_gpu.gpu import replay
from gpumem_nb.shared import allocator_settings
from gpumem_nb.shared.allocator_settings import DEFAULT, NAMES, USUAL, VARIABLES, AllocatorSettings, in_force, variable
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.version import torch_version
from tests.allocator_reference import Reference

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", DEFAULT),
        ("expandable_segments", AllocatorSettings(expandable_segments=True)),
        ("expandable_segments:False", DEFAULT),
        ("max_split_size_mb=64, roundup_power2_divisions:8", AllocatorSettings(False, 64, None, 8)),
        ("backend:native,garbage_collection_threshold:0.6", AllocatorSettings(False, None, 0.6, 1)),
        ("pinned_use_background_threads:True", DEFAULT),
    ],
)
def test_settings_are_read_as_torch_writes_them_and_as_people_do(text: str, settings: AllocatorSettings) -> None:
    assert AllocatorSettings.parse(text) == settings
    assert AllocatorSettings.parse(str(settings)) == settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("expandable_segment", "did you mean 'expandable_segments'"),
        ("expandable_segments:1", "True or False, such as expandable_segments:True"),
        ("max_split_size_mb:20", "a whole number of MiB from 21 on"),
        ("max_split_size_mb:19", "a whole number of MiB from 21 on"),
        ("max_split_size_mb:64MB", "a whole number of MiB from 21 on"),
        ("garbage_collection_threshold:80", "between 0 and 1"),
        ("garbage_collection_threshold:nan", "between 0 and 1"),
        ("roundup_power2_divisions:3", "a power of two"),
        (f"roundup_power2_divisions:{2**55}", "a power of two"),
        (f"max_split_size_mb:{2**44}", "a whole number of MiB from 21 on"),
        ("roundup_power2_divisions:[256:1,>:4]", "a power of two"),
        ("backend:cudaMallocAsync", "allowed: " + ", ".join(NAMES)),
    ],
)
def test_what_is_not_known_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        AllocatorSettings.parse(text)
    assert said in str(refused.value)


def test_what_is_in_force_is_what_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert in_force() == (AllocatorSettings(expandable_segments=True), "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,roundup_power2_divisions:[256:1,>:4],new:1")
    settings, note = in_force()
    assert settings == AllocatorSettings(expandable_segments=True), "what is understood counts"
    assert "Of PYTORCH_CUDA_ALLOC_CONF, roundup_power2_divisions:[256:1,>:4], new:1 is left out" in note
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert variable() == "PYTORCH_CUDA_ALLOC_CONF", "the other one is not looked at while there is this one"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    for torch, name in (("2.8.0+cu128", VARIABLES[0]), ("2.13.0+cpu", VARIABLES[1]), ("2.13.0a0+git", VARIABLES[1])):
        monkeypatch.setattr("importlib.metadata.version", lambda package, torch=torch: torch)
        monkeypatch.setattr(allocator_settings, "torch_version", torch_version.__wrapped__)
        assert variable() == name


def test_torch_looks_at_the_variables_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    for name, size in zip(VARIABLES, (64, 96), strict=True):
        monkeypatch.setenv(name, f"max_split_size_mb:{size}")
    answer = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == os.environ[variable()] == "max_split_size_mb:64"


@pytest.mark.parametrize(
    ("setting", "events", "limit", "reserved"),
    [
        ("expandable_segments", [30 * MIB, 31 * MIB], None, 80 * MIB),  # pages of 20 MiB, one after another
        ("expandable_segments", [100, MIB, MIB], None, 4 * MIB),  # small ones have pages of 2 MiB
        ("expandable_segments", [30 * MIB, -1, 45 * MIB], None, 60 * MIB),  # what is free grows; 76 MiB without
        ("expandable_segments", [30 * MIB, -1, 900, 45 * MIB], 62 * MIB, 62 * MIB),
        ("max_split_size_mb:32", [40 * MIB, -1, 12 * MIB], None, 52 * MIB),  # is not broken for a smaller one
        ("max_split_size_mb:32", [60 * MIB, -1, 50 * MIB], None, 60 * MIB),  # less than 20 MiB larger: taken whole
        ("max_split_size_mb:32", [72 * MIB, -1, 50 * MIB], None, 122 * MIB),
        ("garbage_collection_threshold:0.5", [60 * MIB, -1, 70 * MIB], 100 * MIB, 70 * MIB),
        ("garbage_collection_threshold:0.9", [60 * MIB, -1, 70 * MIB], 200 * MIB, 130 * MIB),
        ("roundup_power2_divisions:4", [33 * MIB], None, 40 * MIB),
        ("roundup_power2_divisions:4", [32 * MIB], None, 32 * MIB),
    ],
)
def test_each_setting_by_hand(setting: str, events: list[int], limit: int | None, reserved: int) -> None:
    assert replay(events, limit, AllocatorSettings.parse(setting)).reserved_bytes == reserved


SETTINGS = [
    DEFAULT,
    *USUAL,
    AllocatorSettings.parse("max_split_size_mb:24"),
    AllocatorSettings.parse("garbage_collection_threshold:0.3,max_split_size_mb:40"),
    AllocatorSettings.parse("expandable_segments,roundup_power2_divisions:2"),
]


@pytest.mark.parametrize("limit", [None, 700 * MIB], ids=["no limit", "a limit"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings) or "torch's default")
def test_the_model_does_what_the_rules_say(settings: AllocatorSettings, limit: int | None) -> None:
    for seed in range(12):
        chance = random.Random(seed)
        reference = Reference(settings, limit)
        held = dict[int, tuple[object, object]]()
        events: list[int] = []
        made = 0
        while len(events) < 400:
            if held and chance.random() < 0.49:
                number = chance.choice(list(held))
                reference.release(*held.pop(number))  # type: ignore[arg-type]
                events.append(-number)
            else:
                size = int(2 ** chance.uniform(4, 27))
                made += 1
                held[made] = reference.allocate(size)
                events.append(size)
            now = replay(events, limit, settings) if len(events) % 20 == 0 else None
            if now:
                assert (now.reserved_bytes, now.reserved_peak_bytes) == (reference.reserved, reference.peak), seed
                assert now.within_limit == (reference.over_limit == 0)


def test_what_is_held_is_rounded_as_torch_would() -> None:
    four = AllocatorSettings.parse("roundup_power2_divisions:4")
    assert [four.rounded([size]) for size in (512, 33 * MIB, 32 * MIB, 2560)] == [512, 40 * MIB, 32 * MIB, 2560]
    assert DEFAULT.rounded([512, 33 * MIB]) == 512 + 33 * MIB


def test_pieces_that_other_settings_have_left_are_no_segments() -> None:
    whole, free, begins = 2, 0, 4
    layout = np.array([[50 * MIB, 1, begins], [150 * MIB, free, 0], [50 * MIB, whole, begins], [150 * MIB, free, 0]])
    events = [200 * MIB, -1, -2, -3]
    for settings in SETTINGS:
        found = replay(events, 420 * MIB, settings, layout)
        assert found.live_bytes == 0
        assert 600 * MIB <= found.reserved_peak_bytes <= 660 * MIB, "400, and up to 256 in pages of 20"
        assert not found.within_limit
