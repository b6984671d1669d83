"""A transformers ``Trainer`` that is attached trains as it does by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpumem_nb.engine.trainers.transformers_trainer import of_trainer
from gpumem_nb.report.adopted import AdoptedReport
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.messages import Chunk
from tests.trainers import PAIRS, TEXT, alone, differing, logged, made, settings_of

CELL = (
    TEXT
    + PAIRS
    + """
# As the installed version calls it.
CHECKPOINTING = "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else (
    "gradient_checkpointing"
)

def function(outputs, labels, num_items_in_batch=None):
    summed = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return summed / num_items_in_batch

class Once(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(rows)

def by_batch(prediction, compute_result):
    return {}

class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **others):
        labels = inputs.pop("labels")
        logits = model.layers(inputs["x"])
        loss = nn.functional.cross_entropy(logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, {"logits": logits}) if return_outputs else loss

def classified(kind=Trainer, given=None, **arguments):
    arguments = dict(per_device_train_batch_size=4, max_steps=6, learning_rate=1e-2, max_grad_norm=0.0) | arguments
    arguments = TrainingArguments(**SILENT, remove_unused_columns=False, **arguments)
    return kind(Net(), arguments, train_dataset=pairs, **(given or {}))
"""
)

ALIKE = {
    "tokens of two micro-batches": "trained_by(gradient_accumulation_steps=2)",
    "a warm-up and a decay": "trained_by(warmup_steps=2, lr_scheduler_type='cosine', weight_decay=0.1)",
    "a constant rate": "trained_by(lr_scheduler_type='constant')",
    "another optimizer": "trained_by(optim='sgd', learning_rate=0.5)",
    "the order of another seed": "trained_by(data_seed=7)",
    "in turn": "trained_by(train_sampling_strategy='sequential')",
    "two epochs": "trained_by(max_steps=-1, num_train_epochs=2)",
    "smoothed labels": "trained_by(label_smoothing_factor=0.1, gradient_accumulation_steps=2)",
    "a loss function": "trained_by(given={'compute_loss_func': function}, gradient_accumulation_steps=2)",
    "a loss of its class": "classified(Weighted, gradient_accumulation_steps=2)",
    "a mean over samples": "classified(gradient_accumulation_steps=2)",
    "an optimizer of one's own": "own_optimizer()",
    "an optimizer and a schedule of its class, not returned": "trained_by(Own, lr_scheduler_type='constant')",
    "gradients that a negative norm leaves as they are": "trained_by(max_grad_norm=-1.0)",
    "a part in evaluation mode, which its steps end": "with_a_part_in_evaluation_mode()",
}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def cell() -> dict[str, Any]:
    return made(
        CELL
        + """
class Own(Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

def with_a_part_in_evaluation_mode():
    trainer = classified()
    trainer.model.layers.insert(1, nn.BatchNorm1d(8).eval())
    return trainer

def own_optimizer():
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return trained_by(model=model, given={"optimizers": (optimizer, schedule)})
"""
    )


def of(cell: dict[str, Any], code: str) -> Any:
    return eval(code, cell)


@pytest.mark.parametrize("what", ALIKE)
def test_it_trains_as_the_trainer_does_bit_for_bit(cell: dict[str, Any], what: str) -> None:
    plain = of(cell, ALIKE[what])
    plain.train()
    steps = plain.state.max_steps
    ours = alone({"trainer": of(cell, ALIKE[what])}, steps)
    assert ours.losses == logged(plain)
    assert ours.rates == logged(plain, "learning_rate")
    assert differing(ours.model, plain.model) == []


def test_clipping_is_that_of_the_trainer_to_rounding(cell: dict[str, Any]) -> None:
    """Its norm adds up weights in the model's order, and ours in the optimizer's."""
    plain = of(cell, "trained_by(max_grad_norm=0.5, optim='sgd')")
    plain.train()
    ours = alone({"trainer": of(cell, "trained_by(max_grad_norm=0.5, optim='sgd')")}, 6)
    assert ours.trainer.live.settings.clip_norm == 0.5
    torch.testing.assert_close(dict(ours.model.named_parameters()), dict(plain.model.named_parameters()))


def test_a_trainer_that_has_trained_goes_on_with_its_optimizer(cell: dict[str, Any]) -> None:
    plain, ours = (of(cell, "trained_by(bf16=True, learning_rate=1e-3)") for _ in range(2))
    for trainer in (plain, ours):
        trainer.train()
    assert "_original_forward" in vars(ours.model), "accelerate has put bf16 around it"
    found = alone({"trainer": ours}, 2)
    assert "trainer.optimizer" in {one.source for one in found.adopted.taken if one.what == "optimizer"}
    assert "_original_forward" not in vars(found.model)
    assert found.trainer.live.settings.precision == "bf16"
    assert found.trainer.live.optimizer is ours.optimizer
    assert {int(state["step"]) for state in ours.optimizer.state.values()} == {8}
    assert found.rates == logged(plain, "learning_rate")[:2], "each train() begins its schedule anew"


def test_an_evaluation_of_its_own_leaves_the_precision_to_the_knob(cell: dict[str, Any]) -> None:
    trainer = of(cell, "trained_by(bf16=True, given={'eval_dataset': rows[:4]})")
    ours = alone({"trainer": trainer}, 1)
    trainer.evaluate()
    assert "_original_forward" in vars(ours.model)
    assert ours.trainer.run(Chunk(settings_of(ours.trainer, precision="fp32"), 3, 1)).failure is None
    assert "_original_forward" not in vars(ours.model)


OF_OTHER_KINDS = {
    "adapters": "adapted()",
    "adapters with checkpointing": "adapted(**{CHECKPOINTING: True})",
    "a loader of its class": "trained_by(Loading)",
    "workers": "trained_by(dataloader_num_workers=1)",
    "data that can only be iterated": "streamed()",
}


@pytest.mark.parametrize("what", OF_OTHER_KINDS)
def test_other_models_and_data_are_trained_alike(cell: dict[str, Any], what: str) -> None:
    cell = made(
        CELL
        + """
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(rows)

def streamed():
    trainer = trained_by()
    trainer.train_dataset = Endless()
    return trainer

class Loading(Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(rows, batch_size=3, collate_fn=self.data_collator)

def adapted(**arguments):
    import peft
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return trained_by(model=peft.get_peft_model(gpt2(), adapters), **arguments)
"""
    )
    plain, ours = (of(cell, OF_OTHER_KINDS[what]) for _ in range(2))
    plain.train()
    found = alone({"trainer": ours}, 6)
    found.trainer.close()
    assert found.losses == logged(plain)
    assert differing(found.model, plain.model) == []


METRICS = """
import numpy as np

def of_all(prediction):
    guessed = prediction.predictions.argmax(-1)
    found = {"size": len(guessed), "right": (guessed == prediction.label_ids).mean()}
    hits = [(guessed[prediction.label_ids == one] == one).mean() for one in range(3)]
    return found | {"worst class": min(hits), "first": float(prediction.label_ids[0])}

def halved(logits, labels):
    return logits / 2

def tokens(prediction):
    known = prediction.label_ids != -100
    right = (prediction.predictions.argmax(-1) == prediction.label_ids)[known].mean()
    return {"right": right, "shape": float(prediction.predictions.shape[1]), "inputs": float(prediction.inputs.sum())}

class Padded(torch.utils.data.Dataset):
    def __len__(self): return 10
    def __getitem__(self, place):
        return {name: value[: 6 + place // 4] for name, value in rows[place].items()}

def collate(samples):
    return {
        name: nn.utils.rnn.pad_sequence([one[name] for one in samples], batch_first=True, padding_value=value)
        for name, value in {"input_ids": 0, "labels": -100}.items()
    }
"""


@pytest.mark.parametrize(
    "code",
    [
        "classified(given=dict(eval_dataset=pairs[:21], compute_metrics=of_all))",
        "classified(given=dict(eval_dataset=pairs[:21], compute_metrics=of_all, preprocess_logits_for_metrics=halved))",
        "trained_by(given=dict(eval_dataset=Padded(), compute_metrics=tokens, data_collator=collate),"
        " include_for_metrics=['inputs'], per_device_eval_batch_size=4)",
    ],
)
def test_metrics_see_the_whole_of_the_validation_data(code: str, cell: dict[str, Any]) -> None:
    cell = cell | made(CELL + METRICS)
    plain = of(cell, code)
    plain.train()
    ours = alone({"trainer": of(cell, code)}, 6)
    expected = {name.removeprefix("eval_"): value for name, value in plain.evaluate().items()}
    found = ours.evaluated()
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-6)
    assert {"loss", "right"} < found.keys()


KNOBS: dict[str, dict[str, Any]] = {
    "trained_by(max_grad_norm=1.5, bf16=True, gradient_accumulation_steps=3)": {
        "clip_norm": 1.5,
        "precision": "bf16",
        "accumulation_steps": 3,
        "batch_size": 4,
        "optimizer": "own",
        "learning_rate": 1e-2,
        "lr_schedule": "own",
        "checkpointing": "none",
    },
    "trained_by(fp16=True, **{CHECKPOINTING: True}, dataloader_num_workers=2, dataloader_prefetch_factor=3,"
    " lr_scheduler_type='constant')": {
        "clip_norm": None,
        "precision": "fp16",
        "checkpointing": "blocks",
        "num_workers": 2,
        "prefetch_factor": 3,
        "lr_schedule": "constant",
    },
    "trained_by(max_grad_norm=None)": {"clip_norm": None},
}


@pytest.mark.parametrize("code", KNOBS)
def test_arguments_become_the_first_values_of_knobs(code: str, cell: dict[str, Any]) -> None:
    ours = alone({"trainer": of(cell, code)}, 0)
    settings = ours.trainer.live.settings
    assert {name: getattr(settings, name) for name in KNOBS[code]} == KNOBS[code]
    told = {one.what: one.value for one in ours.adopted.taken}
    assert told["precision"] == settings.precision
    assert told["batch_size"] == "4"


def test_a_models_own_checkpointing_is_left_to_the_knob(cell: dict[str, Any]) -> None:
    trainer = of(cell, "trained_by()")
    getattr(trainer.model, f"{cell['CHECKPOINTING']}_enable")()
    ours = alone({"trainer": trainer}, 1)
    assert ours.trainer.live.settings.checkpointing == "blocks"
    assert not getattr(trainer.model, f"is_{cell['CHECKPOINTING']}")
    plain = of(cell, "trained_by()")
    plain.train()
    assert ours.losses == logged(plain)[:1]


def test_what_was_taken_from_where_is_told_in_a_table(cell: dict[str, Any]) -> None:
    arguments = "max_steps=-1, num_train_epochs=3, gradient_accumulation_steps=2, data_seed=7"
    report = AdoptedReport(alone({"trainer": of(cell, f"trained_by({arguments})")}, 0).adopted)
    lines = [line.split("  ") for line in str(report).splitlines()]
    rows = {line[0]: [part.strip() for part in line[1:] if part.strip()] for line in lines}
    assert rows["steps"] == ["18, with %hvd_train 18", "num_train_epochs=3, on 1 rank"]
    assert rows["accumulation_steps"] == ["2", "gradient_accumulation_steps"]
    assert rows["order of samples"] == ["SeedableRandomSampler", "seed=7, train_dataset"]
    assert rows["loss"][0] == "the model's own, divided by num_items_in_batch of all ranks"
    assert set(report.frame().columns) == {"what", "value", "from"}


NOT_KEPT = {
    "trained_by(given={'callbacks': [transformers.EarlyStoppingCallback()]}, eval_strategy='no')": (
        "callbacks, which no step here calls: EarlyStoppingCallback"
    ),
    "trained_by(type('Mine', (Trainer,), {'log': print, '__module__': '__main__'}))": (
        "methods of Mine that no step here calls: log"
    ),
    "trained_by(given={'eval_dataset': Once()})": "eval_dataset, which can only be iterated: name eval_data=",
    "trained_by(neftune_noise_alpha=5)": "neftune_noise_alpha=5: embeddings get no noise",
    "trained_by(eval_strategy='steps', eval_steps=20, given={'eval_dataset': rows[:4]})": "%hvd_set eval_every=20",
    "trained_by(given={'eval_dataset': {'near': rows[:4], 'far': rows}})": "2 sets, of which evaluations see 'near'",
    "trained_by(lr_scheduler_type='reduce_lr_on_plateau', eval_strategy='steps', given={'eval_dataset': rows[:4]})": (
        "lr_scheduler_type=reduce_lr_on_plateau, which waits for a metric"
    ),
    "trained_by(batch_eval_metrics=True, given={'eval_dataset': rows[:4], 'compute_metrics': by_batch})": (
        "compute_metrics, which with batch_eval_metrics=True"
    ),
}


@pytest.mark.parametrize("code", NOT_KEPT)
def test_what_is_not_kept_is_named(code: str, cell: dict[str, Any]) -> None:
    left_out = alone({"trainer": of(cell, code)}, 0).adopted.left_out
    assert any(NOT_KEPT[code] in sentence for sentence in left_out), left_out


def test_nothing_is_said_of_what_is_as_usual(cell: dict[str, Any]) -> None:
    assert alone({"trainer": of(cell, "trained_by()")}, 0).adopted.left_out == ()


REFUSED = {
    "a step of its own": (
        "own('training_step')",
        r"^trainer=: this Mine defines training_step, which no step here calls\. Put what it does into compute",
    ),
    "clipping of its own": ("own('_clip_grad_norm')", r"defines _clip_grad_norm, .* or leave it out\.$"),
    "a precision of its own": ("own('compute_loss_context_manager')", r"compute_loss_context_manager, which no step"),
    "both made at once": ("own('create_optimizer_and_scheduler')", r"Define create_optimizer and create_scheduler\.$"),
    "no data": ("lambda model, args, **_: Trainer(model, args)", "has no train_dataset. Make it with one"),
    "batches put together": (
        "Trainer",
        r"The DataLoader's batch sampler \(BatchRebalanceSampler\) decides which samples come together",
    ),
    "no end": (
        "lambda model, args, **_: Trainer(model, args, train_dataset=Endless())",
        "has no length, so the length of the schedule is not known. Make TrainingArguments with max_steps=",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_trainer_that_cannot_be_kept_is_refused_in_a_sentence(what: str, cell: dict[str, Any]) -> None:
    code = f"""
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(rows)

def own(method): return type("Mine", (Trainer,), dict([(method, lambda *_: None), ("__module__", "__main__")]))

kind = {REFUSED[what][0]}
"""
    cell = made(CELL + code)
    arguments = {"no end": "max_steps=-1", "batches put together": "train_sampling_strategy='batch_rebalance'"}.get(
        what, ""
    )
    original = cell["TrainingArguments"]
    if what == "no end":  # which the Trainer itself would refuse when it is made
        cell["TrainingArguments"] = lambda **given: original(**{**given, "max_steps": 5})
    trainer = of(cell, f"trained_by(kind, {arguments})")
    trainer.args.max_steps = -1 if what == "no end" else trainer.args.max_steps
    with pytest.raises(WorkloadError, match=REFUSED[what][1]):
        alone({"trainer": trainer}, 0)


@pytest.mark.parametrize(
    ("thing", "sentence"),
    [
        (7, r"^trainer= is of type int\. Allowed: a Trainer of transformers, .*with model=\.$"),
        (torch.nn.Linear(2, 2), r"^trainer= is of type Linear\. .* Name it as model= and its data as data=\."),
        ([1, 2], r"^trainer= is of type list"),
    ],
)
def test_what_is_no_trainer_is_told_what_is(thing: Any, sentence: str) -> None:
    with pytest.raises(WorkloadError, match=sentence):
        alone({"trainer": thing}, 0)


def test_a_model_beside_a_trainer_is_refused_and_validation_data_are_taken(cell: dict[str, Any]) -> None:
    trainer = of(cell, "trained_by(given={'eval_dataset': rows})")
    with pytest.raises(WorkloadError, match=r"^trainer= brings a model of its own\. Leave model= out"):
        alone({"trainer": trainer, "model": cell["gpt2"]()}, 0)
    ours = alone({"trainer": trainer, "model": trainer.model, "eval_data": cell["rows"][:8]}, 1)
    assert ours.evaluated().keys() == {"loss"}
    assert ours.trainer.evaluator is not None
    assert ours.trainer.evaluator.length == 8
    rows = [(one.value, one.source) for one in ours.adopted.taken if one.what == "eval_data"]
    assert rows == [("list", "eval_data=, named beside trainer=")]


def test_batches_that_several_ranks_would_share_are_refused(cell: dict[str, Any]) -> None:
    trainer = of(cell, "trained_by(accelerator_config={'split_batches': True})")
    of_trainer(trainer, 1, torch.device("cpu"))
    with pytest.raises(WorkloadError, match=r"split_batches=True.* make batches 1/2 as large"):
        of_trainer(trainer, 2, torch.device("cpu"))
