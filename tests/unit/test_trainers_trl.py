"""TRL's ``SFTTrainer`` trains as it does by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.shared.errors import WorkloadError
from tests.trainers import alone, differing, logged, made

pytest.importorskip("trl", reason="make test-full installs it")
pytestmark = pytest.mark.full  # importing TRL takes as long as ten of the other tests

CELL = """
import torch, transformers, trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

words = {"<pad>": 0, "<eos>": 1, **{f"w{place}": place + 2 for place in range(40)}}
plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
numbers = torch.Generator().manual_seed(1)
said = [torch.randint(0, 40, (5 + place % 9,), generator=numbers) for place in range(48)]
rows = Dataset.from_dict({"text": [" ".join(f"w{int(one)}" for one in ids) for ids in said]})

def trained_by(**arguments):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(vocab_size=48, num_key_value_heads=1, max_position_embeddings=32, **sizes)
    model = transformers.LlamaForCausalLM(config)
    usual = dict(output_dir="out", use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no")
    usual |= dict(per_device_train_batch_size=4, max_steps=6, learning_rate=1e-2, max_grad_norm=0.0, bf16=False)
    given = trl.SFTConfig(**(usual | arguments))
    data = dict(train_dataset=rows, eval_dataset=rows.select(range(8)))
    return trl.SFTTrainer(model, given, **data, processing_class=tokenizer)
"""

ALIKE = {
    "as it comes": "trained_by()",
    "two micro-batches": "trained_by(gradient_accumulation_steps=2)",
    "without checkpointing": "trained_by(gradient_checkpointing=False, lr_scheduler_type='cosine', warmup_steps=2)",
    "DFT": "trained_by(loss_type='dft', gradient_accumulation_steps=2)",
}


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return made(CELL)


@pytest.mark.parametrize("what", ALIKE)
def test_it_trains_as_it_does_by_itself_bit_for_bit(cell: dict[str, Any], what: str) -> None:
    plain = eval(ALIKE[what], cell)
    plain.train()
    trainer = eval(ALIKE[what], cell)
    ours = alone({"trainer": trainer}, 6)
    assert ours.losses == logged(plain)
    assert differing(ours.model, plain.model) == []
    checkpointed = what != "without checkpointing"
    assert ours.trainer.live.settings.checkpointing == ("blocks" if checkpointed else "none")
    assert not any(trainer._metrics[mode] for mode in ("train", "eval")), "what it would log does not pile up"
    assert ours.evaluated()["loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=0.2)


def test_another_trainer_of_trls_is_refused(cell: dict[str, Any]) -> None:
    trainer = eval("trained_by()", cell)
    trainer.__class__ = type("Other", (trainer.__class__.__mro__[1],), {"__module__": "trl.trainer.other"})
    with pytest.raises(WorkloadError, match=r"of TRL's trainers SFTTrainer can be attached. Other holds more"):
        alone({"trainer": trainer}, 0)
