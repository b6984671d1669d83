"""The panel's doctor: what is wrong, what could be better, and buttons that mend it."""

from __future__ import annotations

from ..shared.progress import Progress
from .diagnosis_view import DiagnosisView
from .search_view import Ask, SearchView
from .steered import Steered


class DoctorView(SearchView):
    """Asks the session what is wrong with it.

    Args:
        session: whom to ask.
        search: has something done that may take long.
        ask: the same of what is done at once.
    """

    def __init__(self, session: Steered, search: Ask, ask: Ask) -> None:
        self._findings: DiagnosisView | None = None
        tip = "what is wrong with this session, what could be better, and what mends it"
        super().__init__(session, [], [("Examine", "stethoscope", tip, self._examine)], search, ask)

    def was_opened(self) -> None:
        """There is nothing to fill in: the first time it examines at once."""
        if self._findings is None:
            self.press()

    def follow(self, why_not: str) -> None:
        """Switch the button off, for a reason, or on; and say what came of flips that were taken."""
        super().follow(why_not)
        if self._findings is not None:
            self._findings.follow()

    def _examine(self, progress: Progress) -> str:
        self._findings = None
        found = DiagnosisView(self._session, self._session.doctor(progress=progress), self.ask)
        self.show([found.view])
        self._findings = found
        return ""
