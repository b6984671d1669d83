"""What helps and is no knob, in words: the same on the card after memory ran out and in the doctor's findings."""

from __future__ import annotations

from ..shared.messages import LOGITS, SCORES

ON_SOME_ROWS = (
    "With loss_head=chunked the loss has the logits of a sixteenth of the rows at a time. Where that is refused, "
    "compute the last layer and the loss on some rows at a time."
)
SET_SDPA = (
    'In a %%hvd cell on all ranks: model.set_attn_implementation("sdpa"), or build the model with '
    'attn_implementation="sdpa". It computes the same, to rounding.'
)
CALL_SDPA = (
    "Call torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) in their place, with attn_mask= "
    "for other masks, and attach again; of nn.MultiheadAttention, pass need_weights=False. It computes the same, to "
    "rounding."
)
OF_FILLED = {
    LOGITS: f"It ran out in the loss, for its logits. {ON_SOME_ROWS}",
    SCORES: "It ran out in the softmax of attention, for a score of every pair of tokens; "
    "torch.nn.functional.scaled_dot_product_attention keeps none (in a Hugging Face model: "
    'attn_implementation="sdpa").',
}
"""By what memory ran out for, what to do about it."""
