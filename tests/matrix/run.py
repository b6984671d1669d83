"""``make matrix``: every model and everything that people do against the plain loop; writes docs/compatibility.md.

Ends with an error when a case does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from pathlib import Path

import gpumem_nb
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import GpumemError
from tests.matrix import cases
from tests.matrix.case import Case
from tests.matrix.compare import Comparison, Result
from tests.matrix.page import page

REPORT = Path(__file__).parents[2] / "docs" / "compatibility.md"
RANKS = 2


def main() -> int:
    """Hold all cases, or those that are named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only cases with one of these words in their names; writes no page")
    words = [word.lower() for word in parser.parse_args().words]
    chosen = [
        case
        for case in (*cases.of_models(), *cases.of_deeds(), *cases.of_refused())
        if not words or any(word in case.name.lower() for word in words)
    ]
    began_s = time.monotonic()
    results = hold_all(chosen)
    failures = [result for result in results if not result.held]
    print(f"{len(results) - len(failures)} of {len(results)} cases hold ({time.monotonic() - began_s:.0f} s).")
    for failure in failures:
        print(f"- {failure.case.name}: {failure.sentence}")
    if not words:
        REPORT.write_text(page(results, RANKS))
        print(f"written to docs/{REPORT.name}")
    return 1 if failures else 0


def hold_all(chosen: list[Case]) -> list[Result]:
    """All of them, one after another on the same ranks; those that do not hold say in their sentence what was seen."""
    results = []
    session = started()
    comparison = Comparison(session)
    try:
        for number, case in enumerate(chosen, 1):
            if session.ended:
                session = started()
                comparison = Comparison(session)
            result = held(comparison, case)
            print(
                f"[{number}/{len(chosen)}] {case.name}: {result.held or 'DOES NOT HOLD'} {result.sentence}", flush=True
            )
            results.append(result)
    finally:
        with suppress(GpumemError):
            session.stop()
    return results


def started() -> Session:
    """New ranks, one thread each."""
    session = gpumem_nb.start(RANKS, device="cpu", memory_limit="96MiB", threads=1)
    session.set(stall_limit_s=10, snapshot_steps="never")
    return session


def held(comparison: Comparison, case: Case) -> Result:
    """How a case was held, or what was seen instead."""
    try:
        return comparison.hold(case)
    except Exception as error:  # a case that breaks something says so and does not hide the others
        return Result(case, "", " ".join(f"{type(error).__name__}: {error}".split())[:300])


if __name__ == "__main__":
    sys.exit(main())
