"""The categories of the ledger, from what stays to what comes and goes, and what each of them is."""

from __future__ import annotations

PARAMETERS = "parameters"
OPTIMIZER_STATE = "optimizer state"
GRADIENTS = "gradients"
COMMUNICATION = "communication"
INPUTS = "inputs"
CASTS = "16-bit casts"
LOGITS = "logits"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
INSIDE_OPERATORS = "inside operators"
OTHER = "other"

MEANING = {
    PARAMETERS: "the model's weights",
    OPTIMIZER_STATE: "what the optimizer remembers of each weight, such as Adam's two moments",
    GRADIENTS: "one number for each weight, from backward to the update; with accumulation during forward too",
    COMMUNICATION: "Horovod's fusion buffer and copies of gradients on their way to other ranks",
    INPUTS: "the micro-batch",
    CASTS: "16-bit copies of the weights that autocast keeps until forward is over",
    LOGITS: "what a last layer with more classes than features gives, what the loss keeps of it, and its gradient",
    ACTIVATIONS: "results of forward that were saved for backward",
    TEMPORARIES: "tensors that live for a moment: results not saved, gradients of activations on their way back",
    INSIDE_OPERATORS: "memory that an operator takes and gives back before it returns",
    OTHER: "buffers of the model, tensors that code holds, and all that was there before training",
}

CATEGORIES = tuple(MEANING)
