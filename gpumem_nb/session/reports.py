"""A session as a page to hand on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..install.environment import versions
from ..report.freed import leak_in_words
from ..report.tables import BEGIN, notes_html
from ..report.written import Written, check_over, write_over
from ..shared.answers import Progress
from ..shared.errors import GpumemError, InvalidInput
from ..shared.state_file import as_path

if TYPE_CHECKING:
    from . import Session


def write_report(session: Session, path: str | os.PathLike[str], progress: Progress) -> Written:
    """Write the page; as :meth:`Session.report`.

    Raises:
        InvalidInput: not a path of a page, or the file cannot be written or is of something else.
    """
    from ..ui.report_page import report_page  # plotly takes long to import

    target = as_path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(f"{target.name} cannot be written: a report is a page. Name a file such as report.html.")
    check_over(target, BEGIN)  # before the ranks are asked
    text = report_page(session, _findings(session, progress), session.score(), versions())
    data = text.encode("utf-8", "backslashreplace")  # of a name that is not text, for example
    return write_over(target, data, BEGIN, "It opens in any browser, without a network and without a kernel.")


def _findings(session: Session, progress: Progress) -> str:
    """HTML of what is wrong, and what would help; where the ranks could not be asked, why, and what was known before.

    An interrupt leaves them out.
    """
    try:
        return session.doctor(progress)._repr_html_()
    except KeyboardInterrupt:
        why = "Not examined: interrupted."
    except GpumemError as error:
        why = f"Could not be examined: {error}"
    history = session.history
    sentences = [str(history.rescue)] if history.rescue else []
    sentences += [leak_in_words(found) for found in list(history.leaks.values())]
    return notes_html([why, *sentences])
