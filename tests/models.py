"""Small models and one recorded training step of them: what tests and the benchmark hold the ledger against."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import default_collate

from gpumem_nb.engine.replay.checkpointing import Checkpointing, find_blocks
from gpumem_nb.memory.ledger.account import Account
from gpumem_nb.memory.ledger.recorder import Recorder
from gpumem_nb.memory.tensors import tensors_in
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU
from gpumem_nb.shared.categories import INPUTS
from gpumem_nb.shared.messages import Ledger
from gpumem_nb.workloads import catalog

SEQUENCE, BATCH = 32, 4
SETTINGS = [("fp32", "none"), ("bf16", "none"), ("fp32", "blocks"), ("bf16", "blocks")]


class Training:
    """A model, what it learns from, and one optimizer step as the trainer does it."""

    def __init__(self, model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        self.model, self.batch, self.loss = model.train(), batch, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(self, precision: str, recorder: Recorder | None = None) -> None:
        batch = {name: value.clone() for name, value in self.batch.items()}
        if recorder:
            recorder.claim(INPUTS, tensors_in(batch))
            recorder.mark("forward")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = self.loss(self.model, batch)
        if recorder:
            recorder.mark("backward")
        loss.backward()
        self.optimizer.step()
        if recorder:
            recorder.claim_model(self.model.parameters(), self.optimizer.state)
        self.optimizer.zero_grad()


def ready_made(name: str, **options: int) -> Training:
    workload = catalog.make(name, **options)
    data = workload.data()
    batch = default_collate([data[index] for index in range(BATCH)])
    return Training(
        workload.model(),
        dict(enumerate(batch)),
        lambda model, batch: workload.loss(model, [batch[key] for key in sorted(batch)]),
    )


def of_transformers(name: str) -> Training:
    import transformers

    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3}
    small |= {"num_attention_heads": 2, "intermediate_size": 64}
    model: nn.Module
    if name == "GPT-2":
        gpt = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=97, n_positions=SEQUENCE)
        model = transformers.GPT2LMHeadModel(gpt)
    elif name == "BERT":
        bert = transformers.BertConfig(vocab_size=97, max_position_embeddings=SEQUENCE, **small)
        model = transformers.BertForMaskedLM(bert)
    else:
        labels: dict[str, Any] = {"num_labels": 5}  # every configuration takes it; only some declare it
        vit = transformers.ViTConfig(image_size=32, patch_size=8, **small, **labels)
        model = transformers.ViTForImageClassification(vit)
    if name == "ViT":
        batch = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.arange(BATCH)}
    else:
        tokens = torch.randint(97, (BATCH, SEQUENCE))
        batch = {"input_ids": tokens, "labels": tokens.clone()}
    return Training(model, batch, lambda model, batch: model(**batch).loss)


MODELS: dict[str, Callable[[], Training]] = {
    "digits-resnet": lambda: ready_made("digits-resnet", width=8, depth=2, resolution=16),
    "digits-separable": lambda: ready_made("digits-separable", width=8, depth=2, resolution=16),
    "text-gpt": lambda: ready_made("text-gpt", width=32, depth=2, heads=2, sequence_length=32),
    "GPT-2": lambda: of_transformers("GPT-2"),
    "BERT": lambda: of_transformers("BERT"),
    "ViT": lambda: of_transformers("ViT"),
}


def checkpointed(training: Training, mode: str) -> Checkpointing | None:
    return None if mode == "none" else Checkpointing(training.model, find_blocks(training.model), mode)


def recorded(gpu: VirtualGPU, training: Training, precision: str) -> Account:
    recorder = Recorder(gpu, training.model)
    with recorder.watching():
        training.step(precision, recorder)
        return recorder.end()


def ledger_of(gpu: VirtualGPU, training: Training, precision: str) -> Ledger:
    return recorded(gpu, training, precision).ledger()


@dataclass
class Profiled:
    """A second step that both counted: its ledger, live bytes before there was a model, the profiler's peak above."""

    training: Training
    ledger: Ledger
    before_bytes: int
    profiler_bytes: int


def profiled(gpu: VirtualGPU, name: str, precision: str, checkpointing: str) -> Profiled:
    gc.collect()
    before = gpu.reading().live_bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training = MODELS[name]()  # inside: the profiler misses releases of what it has not seen made
        checkpointed(training, checkpointing)
        training.step(precision)
        ledger = ledger_of(gpu, training, precision)
    live = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return Profiled(training, ledger, before, peak)
