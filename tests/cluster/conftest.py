"""In which order tests of ranks run: ranks are started again as rarely as can be; and the shell for magics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

import gpumem_nb
from tests import internals
from tests.cluster.stop_button import Stop
from tests.timing import patience


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that bring ranks of their own come first, then those that share two, then those that share four."""
    items.sort(key=_number_shared)


def _number_shared(item: pytest.Item) -> int:
    fixtures = getattr(item, "fixturenames", ())
    return 4 if "four_ranks" in fixtures else 2 if "two_ranks" in fixtures else 0


@pytest.fixture(autouse=True, scope="session")
def enough_time() -> Iterator[None]:
    """On a busy machine ranks and their launcher answer later, and messages depend on answers that come in time."""
    with pytest.MonkeyPatch.context() as patch:
        internals.give_time(patch, patience())
        yield


@pytest.fixture(autouse=True)
def stop_is_pressed_in_its_own_test() -> Iterator[None]:
    """What a test that failed has left must not press stop in the next one."""
    yield
    Stop.give_up()


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    """IPython with the magics."""
    shell = InteractiveShell.instance()
    gpumem_nb.load_ipython_extension(shell)
    yield shell
    InteractiveShell.clear_instance()
