"""Selective checkpointing at each budget, beside torch's own with policies written by hand, and torch's memory budget.

``python -m tests.bench.budgets`` writes its table into docs/ladder.md; ``--quick`` prints that of one model, soon.
Both sides compute the same model in one process, which a virtual GPU counts: live bytes above those before the pass,
and CPU time of forward and backward in turns, in times of that without checkpointing.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch._functorch import config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gpumem_nb
from gpumem_nb.engine.replay.checkpointing import find_blocks
from gpumem_nb.engine.replay.recomputing import Recomputing
from gpumem_nb.engine.replay.selective import Learned
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "docs" / "ladder.md"
BEGIN = "<!-- this table is written by python -m tests.bench.budgets -->\n"
END = "<!-- end of the budgets -->\n"
BUDGETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TORCHS = (0.1, 0.3, 0.5, 0.7, 0.9)
WORDS, LENGTH, SAMPLES, WIDTH, LAYERS = 512, 256, 4, 256, 6
TURNS = 7
Row = tuple[str, float, float]
Pass = Callable[[], None]


def models() -> dict[str, Callable[[], Any]]:
    """Small language models of transformers, built alike each time."""
    transformers: Any = importlib.import_module("transformers")

    def gpt2() -> Any:
        torch.manual_seed(0)
        sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, use_cache=False, **sizes))

    def llama() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 688, "num_hidden_layers": LAYERS}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes, **heads)
        )

    return {"GPT-2": gpt2, "Llama": llama}


def measured(name: str, turns: int, torchs: Sequence[float]) -> list[Row]:
    """What each way needs above what was there, in bytes, and its time; runs in a rank."""
    torch.set_num_threads(1)
    device = next(one for one in gc.get_objects() if {"reset_peak", "set_limit"} <= set(dir(type(one))))
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH))
    sides = {
        how: (model, passing(functools.partial(model, input_ids=words, labels=words)))
        for how, model, passing in ways(models()[name], torchs)
    }
    times: dict[str, list[float]] = {how: [] for how in sides}
    peaks: dict[str, int] = {}
    for turn in range(turns + 1):  # the first one warms up, and learns
        for how, (model, take) in sides.items():
            model.zero_grad(set_to_none=True)
            device.reset_peak()
            before = device.reading().live_bytes
            began_s = time.process_time()
            take()
            times[how] += [time.process_time() - began_s] if turn else []
            peaks[how] = device.reading().live_peak_bytes - before
    plain = times["none"]
    ratios = {how: [one / of for one, of in zip(took, plain, strict=True)] for how, took in times.items()}
    return [(how, peaks[how], statistics.median(ratios[how])) for how in sides]


def ways(make: Callable[[], Any], torchs: Sequence[float]) -> Iterator[tuple[str, Any, Callable[[Any], Pass]]]:
    """Each way with a model of its own, and what makes a pass of its forward."""
    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default, aten.bmm.default}
    attention = {aten._scaled_dot_product_flash_attention_for_cpu.default}
    yield "none", make(), plain
    yield "torch, nothing kept", by_hand(make(), set()), plain
    yield "torch, attention kept", by_hand(make(), attention), plain
    yield "torch, matrix products kept", by_hand(make(), products), plain
    yield "torch, matrix products and attention kept", by_hand(make(), products | attention), plain
    for budget in BUDGETS:
        model = make()
        parts = Recomputing(model, Workload("one", make, make, cast(Any, make)))
        parts.set_checkpointing(Settings(checkpointing="selective", activation_budget=budget))
        yield f"`activation_budget={budget:g}`", model, functools.partial(ours, parts)
    for budget in torchs:
        model = make()
        compiled = torch.compile(called(model), backend="aot_eager_decomp_partition")
        yield f"torch's memory budget {budget:g}, compiled", model, functools.partial(within, compiled, budget)


def plain(forward: Any) -> Pass:
    """One without anything around it."""
    return lambda: forward().loss.backward()


def ours(parts: Recomputing, forward: Any) -> Pass:
    """One under a budget; it begins anew where it was only to learn."""

    def take() -> None:
        while True:
            try:
                with parts.on():
                    loss = forward().loss
                    parts.forward_ended()
                    loss.backward()
                return
            except Learned:
                parts.abandon()

    return take


def called(model: Any) -> Any:
    """Return a function that calls the model and has code of its own: what is compiled is known by the code."""
    names = {"model": model}
    exec("def call(*args, **kwargs):\n    return model(*args, **kwargs)", names)
    return names["call"]


def within(compiled: Any, budget: float, forward: Any) -> Pass:
    """One of a compiled model within torch's own budget, which counts when it is compiled."""

    def take() -> None:
        with config.patch(activation_memory_budget=budget):
            compiled(*forward.args, **forward.keywords).loss.backward()

    return take


def by_hand(model: Any, kept: set[Any]) -> Any:
    """The model with torch's checkpointing around its blocks, which keep what these operators give."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    options: dict[str, Any] = {"context_fn": contexts} if kept else {}
    for block in find_blocks(model):
        forward: Any = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
        block.forward = forward
    return model


def report(found: dict[str, list[Row]]) -> str:
    """Return the table as Markdown."""
    names = list(found)
    rows = []
    for index, (how, *_) in enumerate(found[names[0]]):
        cells = [f"{found[name][index][1] / 2**20:.1f} MiB | {found[name][index][2]:.2f}" for name in names]
        rows.append(f"| {how} | {' | '.join(cells)} |")
    return "\n".join(
        [
            f"{time.strftime('%d %B %Y')}, torch {importlib.metadata.version('torch')}, Python "
            f"{platform.python_version()}, one thread, virtual GPU: {LAYERS} layers of {WIDTH}, {SAMPLES} sequences of "
            f"{LENGTH}, fp32, as transformers configures them; bytes that live for a pass, and its CPU time, in times "
            "of that without checkpointing.",
            "",
            "| what is kept | " + " | ".join(f"{name} | time" for name in names) + " |",
            "| --- |" + " --- | --- |" * len(names),
            *rows,
            "",
        ]
    )


def main() -> int:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one model, fewer turns, and no page")
    args = parser.parse_args()
    found = {}
    with gpumem_nb.start(1, device="cpu", memory_limit="3GiB", threads=1) as session:
        for name in list(models())[: 1 if args.quick else None]:
            how = (2, ()) if args.quick else (TURNS, TORCHS)
            # By name: torch.ops, of which it asks for operators, cannot be sent to a rank.
            code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests.bench import budgets\n"
            found[name] = session.run(f"{code}budgets.measured({name!r}, *{how})")[0]
    text = report(found)
    print(text)
    if not args.quick:
        page = REPORT.read_text()
        before, _, rest = page.partition(BEGIN)
        REPORT.write_text(before + BEGIN + text + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
