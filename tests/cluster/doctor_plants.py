"""What can be wrong with a session, planted for real on two ranks, and what the doctor must find first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import TrainingFailed
from tests.internals import DEVICE
from tests.timing import until

MIB = 2**20
ROOM = 256 * MIB
TIMED = 20  # steps, from which on time is judged
KNOWN: dict[str, Any] = {
    **{"batch_size": 8, "accumulation_steps": 1, "precision": "fp32", "checkpointing": "none", "clip_norm": None},
    **{"learning_rate": 1e-3, "num_workers": 0, "lr_scaling": "none", "optimizer_impl": "default"},
    **{"fusion_threshold_mib": None, "bucket_mib": 4},
}

# A model on so few samples that no larger micro-batch can be asked about: what is planted is all there is to find.
MODEL = """
import time
from torch import nn
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
rows = torch.utils.data.TensorDataset(torch.randn(32, 64))
def loss(model, batch):
    return model(batch[0]).square().mean()
"""
WIDE = """
net = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
rows = torch.utils.data.TensorDataset(torch.randn(16, 1024))
"""
IMAGES = """
net = nn.Sequential(nn.Conv2d(1, 16, 1), *(nn.Tanh() for _ in range(12)))
rows = torch.utils.data.TensorDataset(torch.randn(32, 1, 64, 64))
"""


OWN_ATTENTION = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT / 4).softmax(-1) @ v
net = nn.Sequential(Attention(), nn.Linear(16, 1))
rows = torch.utils.data.TensorDataset(torch.randn(32, 256, 16))
"""
LONG_TEXTS = """
class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.ones(3000 if index == 30 else 300 + index)
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1, 64), nn.Linear(64, 1)
    def forward(self, x):
        return self.down(self.up(x.unsqueeze(-1)).tanh())
net = Reader()
rows = torch.utils.data.DataLoader(
    Texts(), batch_size=4, collate_fn=lambda rows: nn.utils.rnn.pad_sequence(rows, batch_first=True))
def loss(model, batch):
    return model(batch).square().mean()
"""


@dataclass(frozen=True)
class Plant:
    """One fault.

    Attributes:
        cause: of the finding that must come first.
        code: defines ``net``, ``rows`` and ``loss`` where they differ from ``MODEL``; ``own`` is an optimizer.
        knobs: that differ from ``KNOWN``.
        optimizer: of the settings; ``own`` attaches the variable of that name.
        train: brings it about, once the workload is attached.
        filled: the share of a limit, moved there, that a step needs; else there is a lot of room.
        flip: the changes that must be offered.
        words: that must be in the sentence, or in what to do.
    """

    cause: str
    code: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    train: Callable[[Session], None] = lambda session: steps(session, 4)
    filled: float | None = None
    flip: Mapping[str, Any] | None = None
    words: str = ""


def planted(session: Session, plant: Plant) -> None:
    """Bring a fault about."""
    set_limit(session, ROOM)  # for what is loaded, too
    session.run_cell(MODEL + plant.code, title="<planted>")
    own = "own" if plant.optimizer == "own" else None
    session.attach(model="net", data="rows", loss="loss", optimizer=own)
    session.set(fusion_threshold_mib=1)  # Horovod's buffer of the plant before lies in a segment of its own size
    set_limit(session, ROOM)
    session.set(**{**KNOWN, "optimizer": plant.optimizer, **plant.knobs})
    plant.train(session)
    if plant.filled:
        needed = session.predict().reserved_peak_bytes
        set_limit(session, math.ceil(needed / plant.filled))
        steps(session, 2)


def set_limit(session: Session, size: int) -> None:
    """Of all ranks; cached segments are given back."""
    session.run(f"{DEVICE}.empty_cache(); {DEVICE}.set_limit({size})")


def steps(session: Session, count: int) -> None:
    """Train."""
    session.train(count)


def timed(code: str = "", ranks: list[int] | None = None) -> Callable[[Session], None]:
    """Train until time is judged, after this has run."""

    def train(session: Session) -> None:
        if code:
            session.train(2)
            session.run(code, ranks=ranks)
        session.train(TIMED)

    return train


def fails(count: int) -> Callable[[Session], None]:
    """Train until a step fails."""

    def train(session: Session) -> None:
        with suppress(TrainingFailed):
            session.train(count)

    return train


def too_large(session: Session) -> None:
    """A flip that runs out of memory, until it was tried out what would have fit."""
    session.train(3)
    set_limit(session, 64 * MIB)
    session.set(batch_size=16)
    with suppress(TrainingFailed):
        session.train(2)
    until(lambda: session.history.rescue and not session.history.rescue.looking)


def held_for_a_while(session: Session) -> None:
    """A cell needs much memory, and lets go of it: the steps before it never needed as much."""
    session.train(4)
    session.run("held = torch.zeros(64 * 2**20, dtype=torch.uint8)\ndel held")


def made_again(session: Session) -> None:
    """The cell of the model runs once more, without attach."""
    session.train(2)
    session.run("net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))")
    session.train(2)


def on_rank_1(code: str) -> Callable[[Session], None]:
    """Something runs on rank 1 alone."""

    def train(session: Session) -> None:
        session.train(2)
        session.run(code, ranks=[1])
        with suppress(TrainingFailed):
            session.train(4)

    return train


def batch_grows(session: Session) -> None:
    """The global batch, and nothing with it."""
    session.set(batch_size=2)
    session.train(3)
    session.set(batch_size=16)
    session.train(3)


CROWDED = f"""
from gpumem_nb.shared.messages import DeviceUse
{DEVICE}.use = lambda: DeviceUse(used_bytes=30 * 2**30, total_bytes=40 * 2**30, other_bytes=20 * 2**30, own_bytes=2**30)
"""
LET_GO = f"vars({DEVICE}).pop('use', None); held = hook = own = kept = None"
"""What plants have left on ranks."""


def crowded(session: Session) -> None:
    """A device on which NVML sees another process: this machine has none, so its answer is given here."""
    session.train(3)
    session.run(CROWDED)


PLANTS: dict[str, Plant] = {
    "a flip that does not fit": Plant("does not fit", IMAGES, train=too_large, words="batch_size=16"),
    "memory nearly full": Plant("barely fits", IMAGES, filled=0.97),
    "activations": Plant("activations dominate", IMAGES, filled=0.9),
    "optimizer state": Plant(
        "optimizer state dominates",
        WIDE,
        {"batch_size": 2, "fusion_threshold_mib": 1},
        optimizer="adamw",
        filled=0.9,
        flip={"optimizer": "adafactor"},
    ),
    "a fat fusion buffer": Plant(
        "communication buffers dominate",
        knobs={"fusion_threshold_mib": 48},
        filled=0.9,
        flip={"fusion_threshold_mib": 4},
    ),
    "convolutions that unfold their inputs": Plant(
        "memory inside operators",
        "net = nn.Conv2d(32, 2, 3, padding=1)\nrows = torch.utils.data.TensorDataset(torch.randn(32, 32, 32, 32))\n"
        "def loss(model, batch):\n"
        "    with torch.backends.mkldnn.flags(enabled=False):\n        return model(batch[0]).square().mean()",
        {"fusion_threshold_mib": 1},
        filled=0.9,
    ),
    "tensors that fit into no gap": Plant(
        "fragmentation",
        "def loss(model, batch):\n    for mib in range(11, 21, 2):\n"
        "        torch.empty(mib * 2**20, dtype=torch.uint8)\n    return model(batch[0]).square().mean()",
        words="%hvd_memory --what-if",
    ),
    "a cell that held much for a while": Plant("free memory in the cache", IMAGES, train=held_for_a_while),
    "tensors on rank 1 alone": Plant(
        "uneven memory", train=on_rank_1("held = torch.empty(64 * 2**20, dtype=torch.uint8)"), words="Rank 1"
    ),
    "a leak": Plant(
        "leak",
        "kept = []\ndef loss(model, batch):\n    kept.append(batch[0] * 2)\n    return model(batch[0]).square().mean()",
        train=lambda session: steps(session, 50),
        words="kept",
    ),
    "state of frozen weights": Plant(
        "state of frozen weights",
        WIDE + "own = torch.optim.AdamW(net.parameters(), lr=1e-3)",
        {"batch_size": 2},
        optimizer="own",
        train=lambda session: freeze(session),
        words="0.weight",
    ),
    "weights in float64": Plant(
        "weights in float64",
        WIDE + "net.double()\ndef loss(model, batch):\n    return model(batch[0].double()).square().mean()",
        {"batch_size": 2},
    ),
    "inputs in float64": Plant(
        "inputs in needless types",
        "rows = torch.utils.data.TensorDataset(torch.randn(32, 64 * 1024, dtype=torch.float64))\n"
        "def loss(model, batch):\n    return model(batch[0][:, :64].float()).square().mean()",
        words="float32 would do",
    ),
    "images in int64": Plant(
        "inputs in needless types",
        "rows = torch.utils.data.TensorDataset(torch.randint(0, 256, (32, 64 * 1024)))\n"
        "def loss(model, batch):\n    return model(batch[0][:, :64].float() / 255).square().mean()",
        words="uint8 would do",
    ),
    "a loss too large for fp16": Plant(
        "fp16 scale collapses",
        "def loss(model, batch):\n    return (model(batch[0]).float() - 1).square().mean() * 1e12",
        {"precision": "fp16"},
        train=lambda session: steps(session, 12),
        flip={"precision": "bf16"},
    ),
    "a rate that is too large": Plant(
        "a step fails", knobs={"learning_rate": 1e9}, train=fails(12), words="the loss became"
    ),
    "a batch eight times as large": Plant(
        "learning rate unscaled", train=batch_grows, flip={"lr_scaling": "linear", "reference_batch": 4}
    ),
    "a step that raises": Plant(
        "a step fails",
        "def loss(model, batch):\n    raise ValueError('planted')",
        train=fails(2),
        words="planted",
    ),
    "weights changed on rank 1": Plant(
        "ranks differ", train=on_rank_1("with torch.no_grad():\n    net[0].weight.add_(1)"), words="%hvd_sync"
    ),
    "a dataset that sleeps": Plant(
        "waiting for data",
        "class Rows(torch.utils.data.Dataset):\n    def __len__(self):\n        return 32\n"
        "    def __getitem__(self, index):\n        time.sleep(0.004)\n        return torch.ones(64)\n"
        "rows = Rows()\ndef loss(model, batch):\n    return model(batch).square().mean()",
        train=timed(),
        words="reading samples is slow",
        flip={"num_workers": 2},
    ),
    "a rank that sleeps": Plant(
        "a slow rank",
        train=timed("hook = net[0].register_forward_hook(lambda *_: time.sleep(0.02))", [1]),
        words="Rank 1 is slow",
    ),
    "ranks that sleep in turn": Plant(
        "uneven steps",
        "turn = [0]\ndef loss(model, batch):\n    turn[0] += 1\n    time.sleep(0.03 * (turn[0] % 2 == rank))\n"
        "    return model(batch[0]).square().mean()",
        train=timed(),
    ),
    "many weights and little to do": Plant(
        "reduction not hidden",
        "net = nn.Embedding(16 * 1024, 256)\nrows = torch.utils.data.TensorDataset(torch.arange(8))\n",
        {"bucket_mib": 64, "batch_size": 2},
        train=timed(),
    ),
    "an optimizer that takes long": Plant(
        "a long update",
        "own = torch.optim.SGD(net.parameters(), lr=1e-3)\nown.register_step_pre_hook(lambda *_: time.sleep(0.02))",
        optimizer="own",
        train=timed(),
    ),
    "single samples, whatever a step costs": Plant(
        "a small batch",
        "rows = torch.utils.data.TensorDataset(torch.randn(512, 64))\n"
        "def loss(model, batch):\n    time.sleep(0.03)\n    return model(batch[0]).square().mean()",
        {"batch_size": 1},
        train=timed(),
        flip={"batch_size": 4},
    ),
    "attention of one's own": Plant("eager attention", OWN_ATTENTION, words="scaled_dot_product_attention"),
    "one sample ten times as long": Plant("barely fits", LONG_TEXTS, {"batch_size": 4}, filled=0.6, words="Sample 30"),
    "more threads than cores": Plant(
        "threads of one's own", train=timed("torch.set_num_threads(16)"), words="torch.set_num_threads("
    ),
    "another process on the device": Plant("other processes on the device", train=crowded, words="19.0 GiB"),
    "a model that a cell makes again": Plant(
        "other objects than attached", train=made_again, words="net is another object than the one attached"
    ),
}


def freeze(session: Session) -> None:
    """The first layer, after the optimizer has made its state."""
    session.train(3)
    session.run("for p in net[0].parameters():\n    p.requires_grad_(False)")
    session.train(4)


TRANSFORMERS = {
    "GPT-2": """
from transformers import GPT2Config, GPT2LMHeadModel
net = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=128, n_head=4, vocab_size=500, n_positions=32))
tokens = torch.randint(0, 500, (512, 32))
rows = [{"input_ids": row, "labels": row} for row in tokens]
""",
    "BERT": """
from transformers import BertConfig, BertForSequenceClassification
net = BertForSequenceClassification(BertConfig(
    vocab_size=500, hidden_size=128, num_hidden_layers=1, num_attention_heads=4, intermediate_size=512,
    max_position_embeddings=32))
rows = [{"input_ids": row, "labels": row[0] % 2} for row in torch.randint(0, 500, (512, 32))]
""",
}
"""Nothing is wrong with these, nor with the ready-made workloads, by the settings that they are loaded with."""


def healthy(session: Session, name: str) -> None:
    """Train one of them, or a ready-made workload, with room for it."""
    set_limit(session, 1024 * MIB)
    if code := TRANSFORMERS.get(name):
        session.run_cell(code, title="<healthy>")
        session.attach(model="net", data="rows")
    else:
        session.load(name)
    session.set(**KNOWN, optimizer="adamw")
    session.set(batch_size=32)
    session.train(TIMED)
