"""Checkpointing of Hugging Face models that keep caches, route tokens or call one block several times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from gpumem_nb.engine.replay.checkpointing import SEGMENT_BLOCKS, Checkpointing, find_blocks

WORDS, WIDTH = 64, 16
_DECODER: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0,
}  # fmt: skip


def t5() -> Any:
    config = T5Config(vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    config.decoder_start_token_id = config.pad_token_id = 0
    return T5ForConditionalGeneration(config)


def bart() -> Any:
    sizes: dict[str, Any] = {
        f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")
    }
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=WORDS, d_model=WIDTH, max_position_embeddings=32, decoder_layerdrop=0.3, **sizes)
    )


def mixtral() -> Any:
    config = MixtralConfig(**_DECODER, num_local_experts=4, output_router_logits=True, router_jitter_noise=0.2)
    return MixtralForCausalLM(config)


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**_DECODER, attention_dropout=0.1))


def albert() -> Any:
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    return AlbertForMaskedLM(
        AlbertConfig(vocab_size=WORDS, embedding_size=8, hidden_size=WIDTH, hidden_dropout_prob=0.1, **sizes)
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are too small to be shared between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("make", [t5, bart, mixtral, llama, albert])
def test_gradients_are_those_without_checkpointing(make: Callable[[], Any], cache: bool) -> None:
    """With a cache that the call asks for; one that only the configuration asks for is off under checkpointing."""

    def run(mode: str | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = make().train()
        for module in model.modules():
            if hasattr(module, "config") and not cache:
                module.config.use_cache = False
        checkpointing = Checkpointing(model, find_blocks(model), mode) if mode else None
        found: list[Tensor | None] = []
        for _ in range(2):
            words = torch.randint(3, WORDS, (2, 6))
            asked = {"use_cache": True} if cache and make is not albert else {}
            loss = model(input_ids=words, labels=words.flip(0), **asked).loss
            loss.backward()
            found += [loss.detach(), *(param.grad for param in model.parameters())]
            model.zero_grad()
        if checkpointing:
            checkpointing.finished()
            checkpointing.remove()
        return found

    expected = run(None)
    for mode in SEGMENT_BLOCKS:
        for one, other in zip(run(mode), expected, strict=True):
            assert one is other or (one is not None and other is not None and torch.equal(one, other))


def test_the_cache_of_an_encoder_decoder_is_off_only_while_checkpointing() -> None:
    model = t5()
    configs = [model.config, model.decoder.config, model.encoder.config]
    before = [config.use_cache for config in configs]
    checkpointing = Checkpointing(model, find_blocks(model), "blocks")
    assert not any(config.use_cache for config in configs)
    checkpointing.remove()
    assert [config.use_cache for config in configs] == before == [True, True, False]
