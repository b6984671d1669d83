"""Policy: rules of the session, checked like knobs."""

from __future__ import annotations

import pytest

from gpumem_nb.kernel.policy import Policy
from gpumem_nb.shared.errors import InvalidInput


def test_values_given_as_text_are_read() -> None:
    policy = Policy().replace(stall_limit_s="5", idle_minutes="never", snapshot_steps="20", snapshot_space="1GiB")
    assert (policy.stall_limit_s, policy.idle_minutes, policy.snapshot_steps) == (5.0, None, 20)
    assert policy.snapshot_space == 2**30
    assert "snapshot_space=1GiB" in str(policy)
    words = policy.replace(snapshot_steps="auto", ledger_steps="never")
    assert (words.snapshot_steps, words.ledger_steps) == ("auto", "never")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("on_oom", "shrnk", "did you mean 'shrink'"),
        ("stall_limit_s", 0, "at least 1"),
        ("stall_limit_s", 0.5, "at least 1"),
        ("idle_minutes", "soon", "or never"),
        ("snapshot_steps", 1.5, "or auto"),
        ("ledger_steps", "often", "or auto, or never"),
        ("eval_every", 0, "or never"),
        ("snapshot_space", "much", "such as 4GiB"),
    ],
)
def test_a_value_that_cannot_be_used_says_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidInput, match=allowed):
        Policy().replace(**{name: value})
