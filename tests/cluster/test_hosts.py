"""Ranks on two hosts: they train together, are reached, and end together; only named doors are open."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpumem_nb
from gpumem_nb.cluster.resources import Host, share_out
from gpumem_nb.shared.errors import InvalidInput
from tests.cluster.two_hosts import missing, run_on_a, two_hosts
from tests.internals import here_is
from tests.tiers import every, first_tier


@pytest.fixture
def two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is called ``a``, no other name is known."""
    here_is(monkeypatch, "a")


@pytest.mark.usefixtures("two_places")
@pytest.mark.parametrize(
    ("text", "n", "places"),
    [
        ("a:2,b:2", None, [("a", 2), ("b", 2)]),
        (" b:3 , a ", None, [("a", 1), ("b", 3)]),
        ("a:2,b:2", 3, [("a", 2), ("b", 1)]),
        ("a:2,b:2", 2, [("a", 2)]),
    ],
)
def test_hosts_are_filled_one_after_the_other_from_this_machine_on(
    text: str, n: int | None, places: list[tuple[str, int]]
) -> None:
    assert share_out(text, n) == tuple(Host(name, ranks, name == "a") for name, ranks in places)


@pytest.mark.usefixtures("two_places")
@pytest.mark.parametrize(
    ("text", "n", "sentence"),
    [
        ("a:two", None, "'a:two' is not a host with its number of ranks"),
        ("a:0", None, "not a host"),
        ("a:", None, "not a host"),
        ("a,,b", None, "'' is not a host"),
        ("-oProxyCommand=x", None, "not a host"),
        ("a:1,a:2", None, "names one host twice"),
        ("b:1,c:1", None, "leaves out the machine that this notebook runs on"),
        ("a:2,b:2", 5, "5 ranks do not fit.*room for 4"),
        ("a:2,b:2", 0, "at least 1"),
        (7, None, "must be text"),
    ],
)
def test_what_is_no_list_of_hosts_gets_a_sentence(text: str, n: int | None, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as caught:
        gpumem_nb.start(n, hosts=text, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.cluster
@pytest.mark.skipif(missing() != "", reason=missing())
@pytest.mark.parametrize(
    "scenario",
    first_tier(
        [
            "trains_is_closed_to_others_and_can_be_interrupted",
            "dies_with_a_rank_or_a_host_and_says_which",
            "ends_with_its_kernel",
            "lives_on_when_processes_are_silent",
        ],
        every(2),
    ),
)
def test_a_cluster_on_two_hosts(scenario: str, tmp_path: Path) -> None:
    with two_hosts(tmp_path) as on_host_a:
        done = run_on_a(on_host_a, scenario)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
