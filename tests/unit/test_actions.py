"""What a panel's controls ask for is done in order, and a refusal ends nothing."""

from __future__ import annotations

import threading

from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.ui.threads import Actions
from tests.timing import HANG_S, until


def test_actions_are_done_in_order_and_refusals_are_told() -> None:
    told: list[str] = []
    actions = Actions("test", told.append, lambda: told.append("done"))

    def refuse() -> None:
        raise InvalidInput("There is no such knob.")

    actions.submit(lambda: told.append("first"))
    actions.submit(refuse)
    actions.submit(lambda: 1 // 0)
    actions.submit(lambda: told.append("last"))
    assert not told, "nothing is done before it is started"
    actions.start()
    until(lambda: told[5:] == ["done", "last", "done"], lambda: told)
    assert told[:4] == ["first", "done", "There is no such knob.", "done"]
    assert told[4].startswith("That did not work: ZeroDivisionError")
    actions.close()


def test_its_thread_ends_with_what_was_asked_for_and_another_start_begins_anew() -> None:
    told: list[str] = []
    actions = Actions("anew", told.append, lambda: None)
    actions.start()
    [thread] = [one for one in threading.enumerate() if one.name == "gpumem_nb panel anew"]
    actions.submit(lambda: told.append("before"))
    actions.close()
    thread.join(HANG_S)
    assert told == ["before"]
    assert not thread.is_alive()
    actions.submit(lambda: told.append("after"))
    actions.start()
    until(lambda: told == ["before", "after"])
    actions.close()
