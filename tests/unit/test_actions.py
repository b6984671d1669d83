"""What a panel's controls ask for is done in order, and a refusal ends nothing."""

from __future__ import annotations

from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.ui.actions import Actions


def test_actions_are_done_in_order_and_refusals_are_told() -> None:
    told: list[str] = []
    actions = Actions(told.append, lambda: told.append("done"))

    def refuse() -> None:
        raise InvalidInput("There is no such knob.")

    actions.submit(lambda: told.append("first"))
    actions.submit(refuse)
    actions.submit(lambda: 1 // 0)
    actions.submit(lambda: told.append("last"))
    actions.close()
    assert not told, "nothing is done before somebody works"
    actions.work()
    assert told[:4] == ["first", "done", "There is no such knob.", "done"]
    assert told[4].startswith("That did not work: ZeroDivisionError")
    assert told[5:] == ["done", "last", "done"]
