"""Who holds a tensor, and what is no leak although live bytes grow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import gpumem_nb
from gpumem_nb.memory.leaks.births import Births
from gpumem_nb.memory.leaks.detector import LeakDetector
from gpumem_nb.memory.leaks.holders import Graphs, Holders, holder_on
from gpumem_nb.report.freed import leak_in_words
from gpumem_nb.shared.messages import Leak, Sample
from gpumem_nb.ui import wording

STEPS = 50


def test_a_function_that_torch_compiled_is_called_as_one_while_it_is_looked_who_makes_tensors() -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(len(args))
            return graph.forward(*args)

        return run

    function = torch.compile(lambda x: x.sin() + 1, backend=backend)
    with Births(torch.device("cpu")) as births:
        function(torch.ones(3))
    assert len(calls) == 1
    assert births.births


class Thing:
    """Somebody's own object."""

    shared: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.values: list[Any] = []


class Slotted:
    __slots__ = ("value",)


def name_of(tensor: torch.Tensor, **known: object) -> str:
    [way] = Holders(known).ways([tensor])
    return holder_on(way, len(way.objects) - 1).name if way else "nobody"


def test_a_tensor_is_named_as_people_would_write_it(module: Any) -> None:
    def kept() -> torch.Tensor:
        return torch.ones(3)

    module.plain = kept()
    module.nested = {"train": [(1, kept())]}
    module.thing = Thing()
    module.thing.values.append({3: kept()})
    module.slotted = Slotted()
    module.slotted.value = kept()
    Thing.shared["last"] = kept()
    assert name_of(module.plain) == "somebodys.plain"
    assert name_of(module.nested["train"][0][1]) == "somebodys.nested['train'][0][1]"
    assert name_of(module.thing.values[0][3]) == "somebodys.thing.values[0][3]"
    assert name_of(module.slotted.value) == "somebodys.slotted.value"
    assert name_of(Thing.shared.pop("last")) == "nobody"


def test_parts_of_a_model_have_its_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": nn.Linear(2, 2)}))
    seen = torch.ones(1)
    kept = [torch.ones(1)]
    vars(model[0])["seen"] = kept
    second = model[1]
    assert isinstance(second, nn.ModuleDict)
    weight = second["a"].weight
    assert isinstance(weight, nn.Parameter)
    weight.register_hook(lambda gradient, extra=seen: None)
    assert name_of(kept[0], model=model) == "model[0].seen[0]"
    assert name_of(seen, model=model) == "extra", "a default argument of the hook"


def test_what_nobody_holds_has_no_name() -> None:
    assert name_of(torch.ones(1)) == "nobody", "the frames that run now do not count"


def test_a_graph_names_the_outermost_tensor() -> None:
    weight = torch.ones(4, requires_grad=True)
    inner = (weight * 2).exp()
    outer = inner.square().sum()
    saved = inner.untyped_storage()._cdata
    assert Graphs([inner, outer]).root_of_storage(saved) is outer
    assert Graphs([outer, inner]).root_of_storage(saved) is outer
    outer.backward()
    assert Graphs([outer]).root_of_storage(saved) is None, "backward gave it up"


def test_a_graph_that_saved_a_sparse_tensor_names_its_root_too() -> None:
    inner = (torch.ones(4, 1, requires_grad=True) * 2).exp()
    outer = torch.sparse.mm(torch.eye(4).to_sparse(), inner).square()
    assert Graphs([outer]).root_of_storage(inner.untyped_storage()._cdata) is outer


def test_births_are_storages_that_operators_make_and_die_with_them() -> None:
    births = Births(torch.device("cpu"))
    before = torch.ones(8)
    with births:
        kept = before.view(2, 4) + 1
        before.add_(1)
        made = torch.tensor([1.0, 2.0])
        kept.t().square().sum()
    assert len(births.births) == 4
    births.prune()
    assert [birth.shape for birth in births.births] == [(2, 4), (2,)]
    assert births.births[0].made_at.startswith("test_leaks.py:")
    assert births.births[0].made_at.endswith("in test_births_are_storages_that_operators_make_and_die_with_them")
    del kept, made
    births.prune()
    assert births.births == []


def test_what_a_library_makes_is_said_to_be_made_there() -> None:
    births = Births(torch.device("cpu"))
    trainer = str(Path(gpumem_nb.__file__).parent / "engine" / "trainer.py")
    code = compile("with births: collate([row])", trainer, "exec")
    exec(code, {"births": births, "collate": default_collate, "row": torch.ones(2)})
    assert births.births[-1].made_at.startswith("collate.py:")


def watched(step: Callable[[int], None], live: Callable[[int], int], steps: int = STEPS, **known: object) -> list[Leak]:
    """What is told of steps after which live bytes are these."""
    watch = LeakDetector(3, torch.device("cpu"), known)
    found: list[Leak] = []
    watch.chunk_begins(0)
    for number in range(steps):
        with watch.step():
            step(number)
        watch.step_ended(sample(number, live(number)), numbers=0)
        found += watch.take()
    return found


def sample(step: int, live: int) -> Sample:
    return Sample(3, step, 0.0, None, 0.1, 1.0, live, live, live, live, None, 1)


def test_a_leak_says_what_where_and_whose(module: Any) -> None:
    module.kept = []

    def step(number: int) -> None:
        module.kept.append(torch.ones(10, 100))

    [leak] = watched(step, lambda number: 4000 * number)
    assert (leak.rank, leak.name, leak.shape, leak.dtype) == (3, "somebodys.kept", (10, 100), "torch.float32")
    assert (leak.bytes_per_step, leak.tensor_bytes) == (4000, 4000)
    assert leak.holder == f"list `somebodys.kept`, {len(module.kept) - (STEPS - 1 - leak.step)} elements"
    assert leak_in_words([leak]) == (
        f"rank 3 keeps 3.9 KiB more after every step. The largest part of that is a float32 tensor of 10×100 (3.9 KiB, "
        f"made at {leak.made_at}), held by {leak.holder}. Clear it once its contents were used, "
        "or bound it, for example with collections.deque(maxlen=10)."
    )


def test_two_leaks_are_two(module: Any) -> None:
    module.first, module.second = [], {}

    def step(number: int) -> None:
        module.first.append(torch.ones(1000))
        module.second[number] = torch.ones(2000)

    found = watched(step, lambda number: 12000 * number)
    assert {leak.name: leak.bytes_per_step for leak in found} == {"somebodys.first": 4000, "somebodys.second": 8000}


@pytest.mark.parametrize(
    "keep",
    [
        lambda module, number: module.ring.append(torch.ones(1000)),
        lambda module, number: setattr(module, "latest", torch.ones(1000)),
        lambda module, number: module.numbers.append(torch.ones(())),
        lambda module, number: module.slots.__setitem__(number % 4, torch.ones(1000)),
        lambda module, number: circle(),
    ],
    ids=["bounded", "the latest", "detached numbers", "overwritten", "garbage in a circle"],
)
def test_what_is_meant_to_stay_or_goes_by_itself_is_no_leak(module: Any, keep: Callable[[Any, int], None]) -> None:
    module.ring, module.numbers, module.slots = deque(maxlen=1000), [], {}
    assert watched(lambda number: keep(module, number), lambda number: 4000 * number) == []


@pytest.mark.parametrize("goes_at", [27, 33, 38])
def test_a_dict_that_grows_is_told_though_garbage_from_before_goes_meanwhile(module: Any, goes_at: int) -> None:
    def step(number: int) -> None:
        module.seen[number] = torch.ones(1000)

    module.seen = {}
    [leak] = watched(step, lambda number: 4000 * number + 6000 * (number < goes_at), module=module)
    assert leak.step < 50


@pytest.mark.parametrize("late", [3, 12, 20, 27, 33, 38])
def test_a_dict_that_grows_is_told_though_something_lives_into_the_next_step_once(module: Any, late: int) -> None:
    def step(number: int) -> None:
        module.seen[number] = torch.ones(1000)

    module.seen = {}
    [leak] = watched(step, lambda number: 4000 * number + 6000 * (number == late), module=module)
    assert leak.step < 50


@pytest.mark.parametrize("seed", range(20))
def test_a_dict_that_grows_is_told_though_something_often_lives_into_the_next_step(module: Any, seed: int) -> None:
    """As gradients do, which the reduction's thread lets go of sooner or later."""
    dice = random.Random(seed)
    late = {number for number in range(STEPS) if dice.random() < 0.2}

    def step(number: int) -> None:
        module.seen[number] = torch.ones(1000)

    module.seen = {}
    [leak] = watched(step, lambda number: 4000 * number + 6000 * (number in late), module=module)
    assert leak.step < 50


@pytest.mark.parametrize("keys", [20, 60, 200])
def test_a_cache_that_fills_is_no_leak(module: Any, keys: int) -> None:
    dice, module.cache = random.Random(keys), {}

    def step(number: int) -> None:
        module.cache.setdefault(dice.randrange(keys), torch.ones(1000))

    assert watched(step, lambda number: 4000 * len(module.cache), steps=600) == []


@pytest.mark.parametrize("places", [{}, [None] * (STEPS + 1)])
def test_a_dataset_that_remembers_its_samples_is_no_leak(places: Any, module: Any) -> None:
    module.rows = Thing()
    module.rows.samples = places.copy()

    def step(number: int) -> None:
        module.rows.samples[number] = torch.ones(1000)

    assert watched(step, lambda number: 4000 * number, dataset=module.rows) == []
    assert watched(step, lambda number: 4000 * number) != []


def circle() -> None:
    pair: list[Any] = [torch.ones(1000)]
    pair.append(pair)


def test_one_card_for_all_ranks_that_keep_the_same() -> None:
    leak = Leak(1, 30, 2048, 61440, 2048, (), "torch.float32", "", "x<y>", "list `x<y>`, 30 elements", "Clear it.")
    card = wording.leak([leak])
    assert "Rank 1 keeps 2.0 KiB more after every step" in card
    assert "60.0 KiB" in card
    assert "x&lt;y&gt;" in card
