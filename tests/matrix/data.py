"""Data as people hand it over."""

from __future__ import annotations

from tests.matrix.case import Subject
from tests.matrix.models import BLOCKS, DROPOUT

_STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(x, y))
"""
_NOISY = """
import random
class Noisy(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return x[index] * (1 + 0.1 * random.random()) + 0.1 * np.random.rand() + 0.1 * torch.randn(8), y[index]
"""

DATA = (
    Subject(
        "a DataLoader's sampler and batch size",
        BLOCKS
        + """
chosen = SubsetRandomSampler(range(10, 34), generator=torch.Generator().manual_seed(7))
data = DataLoader(data, batch_size=3, sampler=chosen)
""",
        batch_size=None,
    ),
    Subject(
        "a DataLoader's sampler without a generator",
        BLOCKS + "data = DataLoader(data, batch_size=3, sampler=SubsetRandomSampler(range(10, 34)))",
        batch_size=None,
    ),
    Subject("a DataLoader that does not shuffle", BLOCKS + "data = DataLoader(data, batch_size=5)", batch_size=None),
    Subject("a DataLoader with workers", BLOCKS + "data = DataLoader(data, batch_size=4, shuffle=True, num_workers=2)"),
    Subject("data as a pair of tensors", BLOCKS + "data = (x, y)"),
    Subject(
        "data as tensors by name",
        BLOCKS
        + """
del criterion
data = {"x": x, "y": y}
def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])
""",
    ),
    Subject("an IterableDataset", BLOCKS + _STREAM + "data = Stream()"),
    Subject("an IterableDataset in a DataLoader", BLOCKS + _STREAM + "data = DataLoader(Stream(), batch_size=4)"),
    Subject(
        "an iterable of batches",
        BLOCKS
        + """
class Batches:
    def __iter__(self):
        return ((x[i : i + 4], y[i : i + 4]) for i in range(0, 40, 4))
data = Batches()
""",
    ),
    Subject(
        "weights and a random split from the session's seed",
        DROPOUT.code
        + """
import random
chosen = random.sample(range(40), 32)
part, _ = torch.utils.data.random_split(TensorDataset(x[chosen], y[chosen]), [20, 12])
data = [(inputs + 0.1 * float(np.random.rand()), label) for inputs, label in part]
""",
        seed=7,
    ),
    Subject(
        "noise in the samples",
        BLOCKS + _NOISY + "data = Noisy()",
    ),
    Subject(
        "a DataLoader with workers and noise in the samples",
        BLOCKS + _NOISY + "data = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2)",
    ),
)
