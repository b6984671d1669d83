"""Hugging Face's models from tiny configurations, and what they learn from."""

from __future__ import annotations

from tests.matrix.case import Subject


def _of(name: str, config: str, model: str, data: str) -> Subject:
    return Subject(name, f"import transformers\nnet = transformers.{model}(transformers.{config})\n{data}")


_SIZES = "vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64"
_CODERS = "encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64"
_LAYERS = f"d_model=32, encoder_layers=2, decoder_layers=2, {_CODERS}"
_TEXT = "data = [{'input_ids': row, 'labels': row} for row in tokens]"
_PAIRS = "data = [{'input_ids': row, 'labels': row.flip(0)} for row in tokens]"
_IMAGES = "data = [{'pixel_values': image, 'labels': label} for image, label in zip(images, y)]"

BERT = _of("BERT", f"BertConfig({_SIZES}, max_position_embeddings=16)", "BertForMaskedLM", _TEXT)
GPT2 = _of(
    "GPT-2", "GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=97, n_positions=16)", "GPT2LMHeadModel", _TEXT
)
LORA = Subject(
    "PEFT LoRA on GPT-2",
    GPT2.code
    + """
import peft
with warnings.catch_warnings(action="ignore"):
    net = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1))
""",
)

TRANSFORMERS = (
    BERT,
    GPT2,
    _of("Llama", f"LlamaConfig({_SIZES}, num_key_value_heads=1)", "LlamaForCausalLM", _TEXT),
    _of(
        "T5",
        "T5Config(vocab_size=97, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)",
        "T5ForConditionalGeneration",
        _PAIRS,
    ),
    _of(
        "BART",
        f"BartConfig(vocab_size=97, max_position_embeddings=16, {_LAYERS})",
        "BartForConditionalGeneration",
        _PAIRS,
    ),
    _of(
        "Mixtral",
        f"MixtralConfig({_SIZES}, num_key_value_heads=1, num_local_experts=4, output_router_logits=True)",
        "MixtralForCausalLM",
        _TEXT,
    ),
    _of(
        "ViT",
        f"ViTConfig(image_size=16, patch_size=8, num_labels=3, {_SIZES.removeprefix('vocab_size=97, ')})",
        "ViTForImageClassification",
        _IMAGES,
    ),
    _of(
        "Whisper",
        f"WhisperConfig(vocab_size=97, num_mel_bins=8, max_source_positions=10, max_target_positions=16, {_LAYERS}, "
        "pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[])",
        "WhisperForConditionalGeneration",
        "sound = torch.randn(40, 8, 20, generator=numbers)\n"
        "data = [{'input_features': heard, 'labels': said} for heard, said in zip(sound, tokens)]",
    ),
    _of(
        "Wav2Vec2",
        f"Wav2Vec2Config({_SIZES}, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), "
        "num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, mask_time_prob=0.2, mask_time_length=2, "
        "ctc_zero_infinity=True)",
        "Wav2Vec2ForCTC",
        "sound = torch.randn(40, 400, generator=numbers)\n"
        "data = [{'input_values': heard, 'labels': said[:5]} for heard, said in zip(sound, tokens)]",
    ),
    _of(
        "ALBERT",
        f"AlbertConfig({_SIZES}, embedding_size=16, max_position_embeddings=16)",
        "AlbertForMaskedLM",
        _TEXT,
    ),
    _of(
        "ResNet",
        "ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type='basic', num_labels=3)",
        "ResNetForImageClassification",
        _IMAGES,
    ),
    LORA,
)
