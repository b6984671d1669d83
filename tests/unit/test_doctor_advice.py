"""What the doctor says of memory and time given for nothing: on evidence made by hand, and through its asking."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
from torch import einsum, nn, softmax
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.optim import SGD

from gpumem_nb.engine import looks
from gpumem_nb.engine.cells import attached_names
from gpumem_nb.engine.seen_shapes import SeenShapes
from gpumem_nb.install.environment import EnvironmentReport, Item
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from gpumem_nb.planning.doctor.checklist import checklist
from gpumem_nb.planning.doctor.evidence import OnRank
from gpumem_nb.planning.doctor.finding import MEMORY, WRONG
from gpumem_nb.planning.doctor.rules import findings
from gpumem_nb.planning.doctor.rules.time import larger
from gpumem_nb.planning.prediction import DOES_NOT_FIT, TIGHT
from gpumem_nb.report.bottleneck import Bottleneck
from gpumem_nb.report.instead import Fit
from gpumem_nb.report.sync import SyncReport
from gpumem_nb.shared import categories as c
from gpumem_nb.shared.allocator_settings import AllocatorSettings
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.questions import ModelFacts, SeenSamples, SyncLook, TensorTotal
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.step_times import FORWARD, UPDATE, StepTimes
from tests.ledgers import MIB, info, reading
from tests.unit.test_doctor import LEAK, LIMIT, LOADED, causes, evidence, prediction, ran_out, rank
from tests.unit.test_doctor_asks import Session
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.test_questions import trainer

CHECKPOINTED = Settings(checkpointing="blocks")


def kept(**of: Any) -> dict[str, Any]:
    """Evidence of a session with checkpointing, and what is predicted of it without."""
    values = {"live": 300, "samples_per_s": 140.0, "high_samples_per_s": 150.0}
    return {"settings": CHECKPOINTED, "all_kept": prediction(**values | of)}


def test_checkpointing_that_is_not_needed_is_found_where_all_activations_fit_with_room_and_steps_are_faster() -> None:
    assert causes(**kept()) == ["checkpointing is not needed"]
    assert causes(**kept(limit_bytes=None, verdict="n/a")) == ["checkpointing is not needed"]
    assert causes(**kept(live=860)) == [], "memory would be scarce"
    assert causes(**kept(verdict=TIGHT)) == []
    assert causes(**kept(verdict=DOES_NOT_FIT)) == []
    assert causes(**kept(high_samples_per_s=106.0)) == [], "without what disturbs they are as fast"
    assert causes(**kept(samples_per_s=103.0)) == [], "hardly faster"


@pytest.mark.parametrize("mode", ["blocks", "sqrt"])
def test_the_doctor_asks_what_steps_need_without_checkpointing_and_offers_that(mode: str) -> None:
    session = Session(settings=Settings(checkpointing=mode))

    def predicts(settings: Settings) -> Any:
        faster = {"samples_per_s": 150.0, "high_samples_per_s": 160.0, "live": 200}
        return prediction(settings, **faster if settings.checkpointing == "none" else {})

    session.predicts = predicts
    found = session.finding()
    assert found.cause == "checkpointing is not needed"
    assert found.flip
    assert found.flip.changes == {"checkpointing": "none"}
    assert "150 samples/s (+50)" in found.helps
    session.verdicts = [Bottleneck("no core", 0.4, "Others.")]
    both = {one.cause for one in session.examine().findings}
    assert both == {"checkpointing is not needed", "no core"}, "steps on trial took turns while others used cores"
    session.verdicts = []
    session.predicts = lambda settings: dataclasses.replace(predicts(settings), verdict=TIGHT)
    assert "checkpointing is not needed" not in [one.cause for one in session.examine().findings]


def attending(*scores_mib: int, **of: Any) -> OnRank:
    """A rank whose model keeps scores of so many MiB in each of its attentions."""
    return rank(0, facts=ModelFacts(scores=tuple(one * MIB for one in scores_mib), **of))


def test_eager_attention_is_named_where_its_scores_matter_and_sdpa_is_what_to_type() -> None:
    [found] = findings(evidence(ranks=(attending(*[48] * 12, eager=True),)))
    assert found.cause == "eager attention"
    assert "576.0 MiB" in found.sentence
    assert 'model.set_attn_implementation("sdpa")' in found.do
    [own] = findings(evidence(ranks=(attending(*[48] * 12),)))
    assert "scaled_dot_product_attention(q, k, v, is_causal=True)" in own.do
    assert causes(ranks=(attending(1, eager=True),)) == [], "few tokens have few pairs"
    one_layer = findings(evidence(settings=CHECKPOINTED, ranks=(attending(*[48] * 12),)))
    assert "48.0 MiB" in one_layer[0].sentence
    unseen = rank(0, facts=ModelFacts(eager=True))
    assert causes(ranks=(unseen,)) == []
    assert "eager attention" in causes(ranks=(unseen,), needs=prediction(live=870))


def test_logits_are_named_where_they_fill_a_scarce_limit() -> None:
    ranks = (rank(0, facts=ModelFacts(logits=(2048, 50_000))),)
    language = dataclasses.replace(LOADED, logits=True)
    named = findings(evidence(ranks=ranks, needs=prediction(live=870), workload=language))
    [found] = [one for one in named if one.cause == "logits dominate"]
    assert "2,048×50,000 logits, 390.6 MiB" in found.sentence
    assert "loss_head=chunked" in found.do
    assert found.candidates[0] == {"loss_head": "chunked"}
    assert found.candidates.count({"loss_head": "chunked"}) == 1
    assert {"batch_size": 16, "accumulation_steps": 2} in found.candidates
    assert "logits dominate" not in causes(ranks=ranks), "there is room"
    few = (rank(0, facts=ModelFacts(logits=(2048, 1000))),)
    assert "logits dominate" not in causes(ranks=few, needs=prediction(live=870))


LONG = "Sample 333 of the data has 900 values, 12 × the median sample."


def test_samples_that_are_much_larger_are_named_where_a_micro_batch_with_one_may_not_fit() -> None:
    roomy = prediction(live=100, high_bytes=700 * MIB, sample=LONG)
    assert causes(needs=roomy) == []
    [found] = findings(evidence(needs=prediction(live=100, high_bytes=900 * MIB, sample=LONG)))
    assert (found.cause, found.level) == ("long samples", MEMORY)
    assert "A micro-batch with the largest may need 900.0 MiB, most others 100.0 MiB." in found.sentence
    assert "batch_sampler" in found.do
    tight = prediction(live=100, high_bytes=1200 * MIB, sample=LONG, verdict=TIGHT)
    assert causes(needs=tight) == ["barely fits", "long samples"]
    rescue = ran_out()
    rescue.failure = dataclasses.replace(rescue.failure, sample=LONG)
    assert causes(rescue=rescue, needs=prediction()) == ["does not fit", "long samples"]


@pytest.mark.parametrize(
    ("of_rank", "said"),
    [
        ({"virtual": True}, False),
        ({"virtual": False}, True),
        ({"virtual": False, "allocator": AllocatorSettings.parse("expandable_segments:True")}, False),
    ],
)
def test_segments_that_grow_are_advised_where_there_is_an_allocator_to_set(of_rank: Any, said: bool) -> None:
    one = OnRank(info(0, **of_rank), rank().samples, reading(limit=LIMIT), None, ModelFacts())
    pieces = prediction(live=100, reserved=250)
    [found] = findings(evidence(ranks=(one,), needs=pieces))
    assert ("expandable_segments" in found.do) is said
    assert "%hvd_restart" in found.do
    [predicted] = findings(evidence(ranks=(one,), needs=pieces, expandable=prediction(live=110)))
    assert ("predicted to reserve 110.0 MiB" in predicted.do) is said


def computing(threads: int, number: int = 0) -> OnRank:
    """A rank that was started with one thread, of two on a host with two cores."""
    of_rank = info(number, cores=(0, 1))
    return OnRank(of_rank, rank(number).samples, reading(100 * MIB, LIMIT), None, ModelFacts(threads=threads))


def test_threads_that_a_cell_asked_for_are_named_in_place_of_other_programs() -> None:
    busy = (Bottleneck("no core", 0.4, "Others."),)
    assert causes(ranks=(computing(1), computing(1, 1)), verdicts=busy) == ["no core"]
    [found] = findings(evidence(ranks=(computing(8), computing(1, 1)), verdicts=busy))
    assert larger(evidence(ranks=(computing(8), computing(1, 1)))) == {}, "its speed is not known"
    assert found.cause == "threads of one's own"
    waits = (Bottleneck("no core", 0.2, "Others."), Bottleneck("reduction", 0.4, "Waits."))
    assert causes(ranks=(computing(8), computing(1, 1)), verdicts=waits) == [found.cause, "reduction not hidden"]
    assert "Rank 0 computes with 8 threads, where it was started with 1" in found.sentence
    assert "the 2 ranks of this host have 9 threads on 2 cores. 40 % of a step is waiting" in found.sentence
    assert "torch.set_num_threads(1)" in found.do
    assert causes(ranks=(computing(2),)) == [], "alone on two cores"


def test_where_the_state_dominates_fewer_trained_weights_are_advised() -> None:
    [found] = findings(evidence(needs=prediction(live=870, most=c.OPTIMIZER_STATE)))
    assert "LoRA" in found.do
    assert "requires_grad_(False)" in found.do


def grouped(groups: int, weights: int, update_s: float) -> OnRank:
    times = StepTimes.of({FORWARD: 0.1 - update_s, UPDATE: update_s}, 0.0)
    return rank(0, steps={"times": times}, facts=ModelFacts(groups=groups, weights=weights))


def test_an_optimizer_with_a_group_for_each_weight_is_named_where_its_update_takes_time() -> None:
    assert causes(ranks=(grouped(50, 50, 0.02),)) == ["a group for each weight"]
    assert causes(ranks=(grouped(50, 50, 0.002),)) == [], "nothing to gain"
    assert causes(ranks=(grouped(2, 50, 0.02),)) == []
    assert causes(ranks=(grouped(24, 200, 0.02),)) == [], "a rate for each layer"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_model_is_asked_what_its_attention_is(implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 100, "n_positions": 32}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, **special, attn_implementation=implementation)
    model = nn.ModuleDict({"net": transformers.GPT2LMHeadModel(config)})
    assert looks._eager(model) is (implementation == "eager")
    tokens = torch.randint(0, 100, (3, 32))
    with SeenShapes() as seen:
        model["net"](input_ids=tokens, labels=tokens).loss.backward()
    assert seen.scores == ([3 * 4 * 32 * 32 * 4] * 2 if implementation == "eager" else [])
    assert seen.logits in ((3 * 32, 100), (3 * 31, 100))
    if implementation == "eager":
        config.output_attentions = True
        assert looks._eager(model) is None, "SDPA gives none"


@pytest.mark.parametrize(
    ("attend", "scores"),
    [
        (lambda q, k, v: (q @ k.mT / 8).softmax(-1) @ v, 1),
        (lambda q, k, v: einsum("bhqk,bhkd->bhqd", softmax(einsum("bhqd,bhkd->bhqk", q, k), -1), v), 1),
        (lambda q, k, v: dropout((q @ k.mT).masked_fill(torch.ones(32, 32).triu(1) > 0, -9.0).softmax(-1)) @ v, 1),
        (lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True), 0),
        (lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(32, 32)), 0),
        (lambda q, k, v: q.softmax(-1) @ (k.mT @ v), 0),
        (lambda q, k, v: (q @ torch.ones(16, 32)).softmax(-1), 0),
    ],
    ids=["softmax", "einsum", "masked", "sdpa with dropout", "sdpa with a mask", "linear attention", "a gate"],
)
def test_scores_of_all_pairs_are_told_from_other_softmaxes(attend: Any, scores: int) -> None:
    q, k, v = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3))
    with SeenShapes() as seen:
        attend(q, k, v).sum().backward()
    assert seen.scores == [2 * 4 * 32 * 32 * 4] * scores


def test_scores_that_are_transposed_before_their_softmax_are_those_of_attention() -> None:
    queries, keys = torch.randn(2, 32, 16), torch.randn(2, 24, 16)
    with SeenShapes() as seen:
        (keys @ queries.mT).mT.softmax(-1) @ keys
    assert seen.scores == [2 * 32 * 24 * 4]


@pytest.mark.usefixtures("alone")
def test_a_rank_says_how_many_groups_its_optimizer_has(gpu: VirtualGPU) -> None:
    trained = trainer(gpu, lambda params: SGD([{"params": [one]} for one in params], lr=0.1))
    settings = Settings(batch_size=2, optimizer="own", learning_rate=0.1)
    assert trained.run(Chunk(settings, 1, 1)).failure is None
    facts = looks.model_facts(trained, True)
    assert (facts.groups, facts.weights, facts.eager, facts.scores, facts.logits) == (6, 6, False, (), ())
    assert facts.threads == torch.get_num_threads()
    assert facts.replaced == ""


@pytest.mark.usefixtures("alone")
def test_a_rank_says_that_its_model_was_made_again_and_not_attached(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, cells = trainer(gpu, lambda params: SGD(params, lr=0.1)), sys.modules["__main__"]
    attached_names.attached({"model": "net"}, {"net": trained.live.model})
    monkeypatch.setattr(cells, "net", nn.Linear(1, 1), raising=False)
    assert "net is another object than the one attached" in looks.model_facts(trained, False).replaced
    monkeypatch.setattr(cells, "net", trained.live.model)
    assert looks.model_facts(trained, False).replaced == ""
    attached_names.attached({}, {})


def test_training_that_goes_on_with_objects_of_an_earlier_cell_is_named_until_they_are_attached_again() -> None:
    said = "net and loss are other objects than those attached; attach again to train with these: …"
    [found] = findings(evidence(ranks=(rank(0), rank(1, facts=ModelFacts(replaced=said)))))
    assert (found.cause, found.level, found.evidence) == ("other objects than attached", WRONG, {"on ranks": "1"})
    assert found.sentence.startswith("net and loss are other objects than those attached: training still uses the old.")
    assert "attach" in found.do


def test_the_checklist_tells_builds_apart_and_what_cannot_be_checked() -> None:
    ranks = [info(0, versions=("torch 2.13.0",)), info(1, versions=("torch 2.12.0",))]
    installed = EnvironmentReport((Item("Horovod", False, "not installed", "build it"),))
    empty = checklist(ranks, installed, None, [], 0, "")
    assert [one.ok for one in empty.checks] == [False, False, None, None, None, None]
    assert not empty.ok
    assert "rank 1: torch 2.12.0" in str(empty)
    assert "build it" in str(empty)
    seen = [SyncLook({"w": 1}, {}, {"w": 2}, SeenSamples((1, 2))) for _ in range(2)]
    full = checklist(ranks[:1], EnvironmentReport(()), SyncReport(seen), [[LEAK]], 99, "digits-resnet")
    assert [one.ok for one in full.checks] == [True, True, True, False, False, True]
    assert "the variable `kept`" in full._repr_html_().replace("&#x27;", "'")


def test_what_would_have_fit_barely_is_named_before_a_smaller_model_is() -> None:
    barely = Fit(Settings(batch_size=16), 90, barely=True)
    [found] = findings(evidence(rescue=ran_out(Fit(Settings(), None), barely)))
    assert "only this would have fit, barely: batch_size=16" in found.do
    assert "smaller model" not in found.do


def test_where_a_trial_step_ran_out_the_live_peak_is_a_lower_bound_in_every_finding() -> None:
    held = ModelFacts(state_of_frozen=TensorTotal(90 * MIB, 2, "embedding"))
    ran_out = prediction(live=1100, lower_bound=True, verdict=DOES_NOT_FIT)
    diagnosis = findings(evidence(needs=ran_out, ranks=(rank(0, samples=(), facts=held),), now=None))
    [one] = [found for found in diagnosis if found.cause == "state of frozen weights"]
    assert "live peak at least 1.1 GiB" in one.measured
