"""What a rank answers, packed so that a process without a GPU can read it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from gpumem_nb.engine import packing


class OnDevice(torch.Tensor):
    """A tensor that says it lies on a GPU, for machines without one; its ``cpu()`` is a tensor like any other."""

    device = torch.device("cuda", 0)

    def cpu(self, memory_format: Any = torch.preserve_format) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def on_device(*values: float, requires_grad: bool = False) -> torch.Tensor:
    return torch.tensor(values).as_subclass(OnDevice).requires_grad_(requires_grad)


@dataclass
class Holder:
    what: Any


def there_and_back(value: Any) -> Any:
    return pickle.loads(packing.packed(value))


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [{"a": t}], Holder, lambda t: (1, Holder([t]))])
def test_tensors_on_a_device_come_back_on_the_cpu_however_deep_they_lie(wrap: Any) -> None:
    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        inner = [value.what] if isinstance(value, Holder) else value.values() if isinstance(value, dict) else value
        return [] if isinstance(value, int) else [tensor for item in inner for tensor in tensors(item)]

    (tensor,) = tensors(there_and_back(wrap(on_device(1.0, 2.0))))
    assert type(tensor) is torch.Tensor
    assert tensor.device.type == "cpu"
    assert tensor.tolist() == [1.0, 2.0]


def test_one_tensor_held_twice_stays_one() -> None:
    tensor = on_device(1.0)
    first, second = there_and_back([tensor, tensor])
    assert first is second


def test_whether_a_gradient_is_wanted_travels_along() -> None:
    assert there_and_back(on_device(1.0, requires_grad=True)).requires_grad
    assert not there_and_back(on_device(1.0)).requires_grad


def test_tensors_and_parameters_of_the_cpu_travel_as_ever() -> None:
    parameter, plain, double = there_and_back([nn.Parameter(torch.ones(2)), torch.arange(3), torch.ones(1).double()])
    assert isinstance(parameter, nn.Parameter)
    assert (plain.tolist(), double.dtype) == ([0, 1, 2], torch.float64)
    layer = nn.Linear(2, 1)
    assert torch.equal(there_and_back(layer).weight, layer.weight)


def test_what_was_defined_here_can_be_read_elsewhere() -> None:
    factor = 3
    assert there_and_back(lambda x: x * factor)(2) == 6


def test_the_answer_says_what_it_was() -> None:
    kinds = [packing.returned(value, apart=None).kind for value in (None, 3, [1], Holder(1))]
    assert kinds == ["None", "an int", "a list", f"a {__name__}.Holder"]
