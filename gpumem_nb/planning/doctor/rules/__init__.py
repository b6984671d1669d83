"""The rules: each looks at the evidence and finds one thing, or nothing. A rule is a function and its line here.

What a rule finds is explained on the doctor's page, under a heading that is the finding's cause.
"""

from __future__ import annotations

from collections.abc import Callable

from ..evidence import Evidence
from ..finding import Finding
from . import limits, mathematics, memory, needless, time

Rule = Callable[[Evidence], Finding | None]

RULES: tuple[Rule, ...] = (
    limits.does_not_fit,
    limits.step_fails,
    limits.paused,
    limits.ranks_differ,
    limits.barely_fits,
    mathematics.scale_collapses,
    mathematics.other_objects,
    mathematics.rate_unscaled,
    memory.held_by_cells,
    memory.leak,
    memory.activations,
    memory.optimizer_state,
    memory.communication,
    memory.inside_operators,
    memory.temporaries,
    memory.fragmentation,
    memory.cached,
    memory.uneven,
    needless.state_of_frozen,
    needless.wide_weights,
    needless.inputs,
    needless.eager_attention,
    memory.logits,
    memory.long_samples,
    memory.other_processes,
    time.own_threads,
    *time.OF_VERDICTS,
    time.small_batch,
    time.needless_checkpointing,
    time.many_groups,
)


def findings(evidence: Evidence) -> list[Finding]:
    """All that the rules find, the worst first, as far as that is known before flips were predicted."""
    found = [finding for rule in RULES if (finding := rule(evidence))]
    return sorted(found, key=lambda finding: finding.order)
