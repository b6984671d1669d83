"""Why a model cannot be run without memory: the operator, and the line of your code that calls it."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import torch

from ...internals.fake_internals import refused_operator
from ...shared.errors import WorkloadError, text_of

_OURS = Path(__file__).parents[2]
_ROOMS = (Path(torch.__file__).parent, _OURS / "engine", _OURS / "memory", _OURS / "internals")
_NOT_THEIRS = tuple(str(room) + os.sep for room in _ROOMS)


def refused(error: BaseException, phase: str, how: str = "run without memory") -> WorkloadError:
    """Return an exception of a dry step as a sentence."""
    operator = refused_operator(error)
    said = f"{type(error).__name__}: {text_of(error).strip().splitlines()[0] if text_of(error).strip() else ''}"
    what = f"{operator} needs the values of a tensor, which a dry run does not have" if operator else said
    return WorkloadError(f"The {phase} cannot be {how}: {what}{_place(error)}.")


def _place(error: BaseException) -> str:
    """Return the innermost line that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    if not theirs or theirs[-1].filename.startswith("<frozen"):
        return ""
    last = theirs[-1]
    code = f": {last.line.strip()}" if last.line else ""
    return f" ({Path(last.filename).name}, line {last.lineno}, in {last.name}{code})"
