"""The jobs that this project measured on an H200 with plain torch (README.md), as workloads.

Needs ``transformers``. T5 looks for its attention otherwise since 5.18 or so: its rows were measured with 5.17.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpumem_nb import Workload

GPU = "H200-141GB"
IMAGE, CLASSES, WORDS = 224, 1000, 20_000
_OPTIONS = ("batch", "precision", "checkpointing", "optimizer", "optimizer_impl", "accumulation")
Row = dict[str, str]


def workload(row: Row) -> Workload:
    """What a row trains; its checkpointed blocks are the longest list of modules of one class."""
    model, data, loss = _KINDS[row["model"]](json.loads(row["options"]))
    return Workload(row["id"], model, data, loss, blocks=longest)


def knobs(row: Row) -> dict[str, Any]:
    """The settings of a row."""
    given = {name: row[name] for name in _OPTIONS}
    sizes = {"batch_size": int(given.pop("batch")), "accumulation_steps": int(given.pop("accumulation"))}
    return sizes | given


def longest(model: nn.Module) -> list[nn.Module]:
    """The modules of the longest list of one class."""
    lists = [list(one) for one in model.modules() if isinstance(one, nn.ModuleList | nn.Sequential)]
    return max((one for one in lists if len(set(map(type, one))) == 1), key=len)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a model of Hugging Face's computes itself."""
    return model(**batch).loss  # type: ignore[no-any-return]


def mean_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Cross entropy of an (inputs, labels) batch."""
    return nn.functional.cross_entropy(getattr(found := model(batch[0]), "logits", found), batch[1])


Parts = tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[nn.Module, Any], Tensor]]


def _text(config: str, model: str, length: int, **given: Any) -> Parts:
    import transformers

    made = getattr(transformers, config)(**given)
    ids = torch.zeros(length, dtype=torch.long)
    return partial(getattr(transformers, model), made), lambda: [{"input_ids": ids, "labels": ids}] * 4, own_loss


def _images(config: str, model: str, **given: Any) -> Parts:
    import transformers

    made = getattr(transformers, config)(num_labels=CLASSES, **given)
    image = torch.zeros(3, IMAGE, IMAGE)
    return partial(getattr(transformers, model), made), lambda: [(image, torch.tensor(0))] * 4, mean_loss


def _gpt2(o: dict[str, int]) -> Parts:
    sizes = {"n_layer": o["layers"], "n_embd": o["width"], "n_head": o["heads"], "n_positions": o["length"]}
    return _text("GPT2Config", "GPT2LMHeadModel", o["length"], use_cache=False, **sizes)


def _llama(o: dict[str, int]) -> Parts:
    sizes = {
        "num_hidden_layers": o["layers"],
        "hidden_size": o["width"],
        "intermediate_size": o["ff"],
        "num_attention_heads": o["heads"],
        "num_key_value_heads": o["kv"],
        "max_position_embeddings": o["length"],
    }
    return _text("LlamaConfig", "LlamaForCausalLM", o["length"], use_cache=False, **sizes)


def _layers(o: dict[str, int]) -> dict[str, int]:
    names = {"num_hidden_layers": o["layers"], "hidden_size": o["width"], "num_attention_heads": o["heads"]}
    return names | {"intermediate_size": 4 * o["width"]}


def _bert(o: dict[str, int]) -> Parts:
    return _text("BertConfig", "BertForMaskedLM", o["length"], max_position_embeddings=o["length"], **_layers(o))


def _t5(o: dict[str, int]) -> Parts:
    sizes = {"d_model": o["width"], "d_ff": 4 * o["width"], "num_layers": o["layers"], "num_heads": o["heads"]}
    rest = {"d_kv": 64, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0}
    return _text("T5Config", "T5ForConditionalGeneration", o["length"], **sizes, **rest)


def _vit(o: dict[str, int]) -> Parts:
    return _images("ViTConfig", "ViTForImageClassification", image_size=IMAGE, patch_size=16, **_layers(o))


def _resnet(o: dict[str, Any]) -> Parts:
    sizes = {"depths": o["depths"], "hidden_sizes": o["widths"], "embedding_size": 64, "layer_type": "bottleneck"}
    return _images("ResNetConfig", "ResNetForImageClassification", **sizes)


def _convnext(o: dict[str, Any]) -> Parts:
    sizes = {"depths": o["depths"], "hidden_sizes": o["widths"]}
    return _images("ConvNextConfig", "ConvNextForImageClassification", **sizes)


def _unet(o: dict[str, int]) -> Parts:
    sample = torch.zeros(3, o["size"], o["size"]), torch.zeros(o["size"], o["size"], dtype=torch.long)
    return partial(UNet, o["width"]), lambda: [sample] * 4, mean_loss


def _lstm(o: dict[str, int]) -> Parts:
    words = torch.zeros(o["length"], dtype=torch.long)
    return partial(Tagger, o["width"]), lambda: [(words, words)] * 4, mean_loss


_KINDS: dict[str, Callable[[dict[str, Any]], Parts]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "resnet": _resnet,
    "convnext": _convnext,
    "unet": _unet,
    "lstm": _lstm,
}


class UNet(nn.Module):
    """Pairs of convolutions, four times down and up again."""

    def __init__(self, width: int, depth: int = 4, classes: int = 8) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList(map(_pair, [3, *widths[:-1]], widths))
        self.mid = _pair(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * one, one, 2, 2) for one in reversed(widths))
        self.dec = nn.ModuleList(_pair(2 * one, one) for one in reversed(widths))
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.mid(x)
        for up, pair in zip(self.up, self.dec, strict=True):
            x = pair(torch.cat([up(x), skips.pop()], 1))
        return self.out(x)  # type: ignore[no-any-return]


def _pair(of: int, to: int) -> nn.Module:
    def layer(of: int) -> list[nn.Module]:
        return [nn.Conv2d(of, to, 3, padding=1), nn.BatchNorm2d(to), nn.ReLU(inplace=True)]

    return nn.Sequential(*layer(of), *layer(to))


class Tagger(nn.Module):
    """An embedding, three layers of LSTM in both directions, and a label for each word."""

    def __init__(self, width: int, layers: int = 3, classes: int = 20) -> None:
        super().__init__()
        self.e = nn.Embedding(WORDS, width)
        self.r = nn.LSTM(width, width, layers, batch_first=True, bidirectional=True, dropout=0.1)
        self.o = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.r(self.e(x))[0]).transpose(1, 2)  # type: ignore[no-any-return]
