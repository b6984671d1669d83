"""Without a virtual GPU that can be built, ranks without a GPU do not start, and people read how to mend it."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpumem_nb
from gpumem_nb.shared.errors import SetupError

pytestmark = pytest.mark.cluster


@pytest.mark.full
def test_a_start_without_a_compiler_names_it_and_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(SetupError) as caught:
        gpumem_nb.start(2, device="cpu")
    assert str(caught.value) == (
        "The virtual GPU needs the C++ compiler '/nonexistent/c++', which was not found: "
        "install g++ (Debian: apt install g++) or set CXX to another compiler."
    )
    assert caught.value._render_traceback_() == [f"SetupError: {caught.value}"]
