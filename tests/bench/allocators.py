"""What is said of other settings of the caching allocator against what comes of them, in new ranks on virtual GPUs.

``python -m tests.bench.allocators``; its figures stand in docs/memory.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import gpumem_nb
from gpumem_nb.planning.prediction import Prediction
from gpumem_nb.session import Session
from gpumem_nb.shared.allocator_settings import USUAL, VARIABLES, AllocatorSettings
from gpumem_nb.shared.units import format_bytes
from tests.bench.prediction import EMPTY, OTHERS, SEQUENCES

MODELS = ("text-gpt", "digits-resnet", "digits-separable", "GPT-2", "ViT", "Llama", "BERT")
LIMIT = "1GiB"


def main() -> int:
    """Print a line for each model and setting, and how many came as was said."""
    for variable in VARIABLES:
        os.environ.pop(variable, None)
    held = []
    for model in MODELS:
        said = ask(model)
        for settings, one in said:
            os.environ[VARIABLES[-1]] = str(settings)
            came = reserved(model)
            held.append(one.low_bytes <= came <= one.high_bytes)
            off = 100 * (one.reserved_peak_bytes / came - 1)
            words = f"said {format_bytes(one.reserved_peak_bytes)}, came {format_bytes(came)}, {off:+.1f} %"
            print(f"{model}, {settings or 'as it is'}: {words}", flush=True)
        os.environ.pop(VARIABLES[-1])
    print(f"{sum(held)} of {len(held)} within their bars")
    return 0


def ask(model: str) -> Sequence[tuple[AllocatorSettings, Prediction]]:
    """What is said in ranks whose allocator is set as torch sets it."""
    with gpumem_nb.start(2, device="cpu", memory_limit=LIMIT) as session:
        load(session, model)
        session.train(3)
        said = session.allocator_what_if(*map(str, USUAL))
        return [said.now, *said.others]


def reserved(model: str) -> int:
    """What is reserved at most by ranks that begin with an empty cache."""
    with gpumem_nb.start(2, device="cpu", memory_limit=LIMIT) as session:
        load(session, model)
        session.train(3)
        session.run(EMPTY)
        return int(session.train(6).frame().reserved_peak_bytes.max())


def load(session: Session, model: str) -> None:
    """Load a model with batches that make it large."""
    own = {name: (code, data) for name, code, data in OTHERS}
    if model in own:
        code, data = own[model]
        session.run(SEQUENCES)
        session.run(f"torch.manual_seed(0)\n{code}")
        session.attach(model="net", data=data)
    else:
        session.load(model)
    session.set(batch_size=64, optimizer="adamw")


if __name__ == "__main__":
    raise SystemExit(main())
