"""A knob is one object and one registration: nothing else has to know its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpumem_nb.magics import complete_hvd
from gpumem_nb.session import Session
from gpumem_nb.shared.categories import OTHER
from gpumem_nb.shared.errors import InvalidInput, StateFileError, TrainingFailed
from gpumem_nb.shared.knobs import KNOBS, Knob, LiveModel, register
from gpumem_nb.shared.knobs.knob import MOST
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.values import whole
from tests.internals import widgets_in

pytestmark = pytest.mark.cluster


def test_a_throw_away_knob_works_everywhere(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    def hold(live: LiveModel, settings: Settings) -> None:
        if getattr(live.model, "ballast", torch.empty(0)).nbytes != settings.ballast_mib * 2**20:
            live.model.ballast = torch.empty(settings.ballast_mib * 2**20, dtype=torch.uint8)

    knob = Knob("ballast_mib", 1, "MiB that are held", parse=whole, allowed="a number", moves={OTHER: MOST}, apply=hold)
    session = fresh(two_ranks, "digits-resnet", width=16, depth=6, resolution=16)
    register(knob)
    session.run(lambda: register(knob))
    session.panel().close()  # one that is open was made before the knob
    panel = session.panel()
    try:
        controls = {w.description: w for w in widgets_in(panel.view) if hasattr(w, "description")}
        assert controls["ballast_mib"].value == "1"
        assert complete_hvd.offered("%hvd_set ballast") == ["ballast_mib="]
        with pytest.raises(InvalidInput, match="ballast_mib='much' cannot be used: it must be a number"):
            session.set(ballast_mib="much")
        session.set(ballast_mib="8")
        assert session.run("model.ballast.nbytes") == [8 * 2**20] * 2
        session.train(2)
        session.set(ballast_mib=500)
        assert "training went back to ballast_mib=8" in str(session.history.rescue)
        assert (session.settings.ballast_mib, session.run("model.ballast.nbytes")) == (8, [8 * 2**20] * 2)
        session.train(2)
        assert list(session.runs.frame().ballast_mib)[-3:] == [8, 500, 8]
    finally:
        panel.close()
        session.set(ballast_mib=1)
        session.run(lambda: KNOBS.pop("ballast_mib") and None)
        del KNOBS["ballast_mib"]


def test_a_knob_that_only_the_notebook_knows_is_refused(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.train(1)
    register(Knob("unheard_of", 1, "registered here alone", parse=whole, allowed="a number"))
    try:
        with pytest.raises(TrainingFailed, match="'unheard_of' was registered in the notebook, but not on the ranks"):
            session.set(unheard_of=2)
        assert session.settings.unheard_of == 1
        assert session.train(1).steps == 1
    finally:
        del KNOBS["unheard_of"]


@pytest.mark.full
def test_a_restart_tells_the_ranks_of_the_notebooks_knobs(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)

    def note(live: LiveModel, settings: Settings) -> None:
        live.model.noted = settings.noted

    knob = Knob("noted", 1, "a number", parse=whole, allowed="a number", apply=note)
    register(knob)
    session.run(lambda: register(knob))
    try:
        session.set(noted=2)
        assert session.run("model.noted") == [2, 2]
        session.train(2)
        session.restart()
        assert "step 2 restored" in session.restored
        assert (session.settings.noted, session.run("model.noted")) == (2, [2, 2])
        session.save(tmp_path / "b.state")
        del KNOBS["noted"]  # as in a notebook that lacks what the ranks have
        with pytest.raises(StateFileError, match=r"b\.state holds settings .* no knob 'noted'"):
            session.resume(tmp_path / "b.state")
        register(knob)
        assert session.train(1).steps == 1
        session.set(noted=1)
        session.save(tmp_path / "a.state")
    finally:
        session.run(lambda: KNOBS.pop("noted") and None)
        del KNOBS["noted"]
    session.resume(tmp_path / "a.state")
    assert session.train(1).steps == 1
