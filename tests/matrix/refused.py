"""What cannot be trained here, each with a pattern of the sentence that says so."""

from __future__ import annotations

from tests.matrix.case import Subject
from tests.matrix.models import BLOCKS

_GAN = """
net = nn.ModuleDict({"generator": nn.Linear(4, 8), "critic": nn.Linear(8, 1)})
data = TensorDataset(x)
optimizers = [torch.optim.Adam(part.parameters(), lr=0.001) for part in net.values()]
"""

REFUSED = (
    Subject(
        "a GAN with its two optimizers",
        _GAN
        + """
optimizer = optimizers
def loss(model, batch):
    return model["critic"](model["generator"](batch[0][:, :4])).mean() - model["critic"](batch[0]).mean()
""",
        refused=r"One optimizer trains here; .* groups .* GAN",
    ),
    Subject(
        "a GAN whose loss updates by itself",
        _GAN
        + """
def loss(model, batch):
    made = model["generator"](batch[0][:, :4])
    gap = model["critic"](made.detach()).mean() - model["critic"](batch[0]).mean()
    slopes = torch.autograd.grad(gap, list(model["critic"].parameters()))
    for param, slope in zip(model["critic"].parameters(), slopes):
        param.grad = slope
    optimizers[1].step()
    optimizers[1].zero_grad()
    return -model["critic"](made).mean()
""",
        refused=r"The loss calls Adam\.step\(\) by itself",
    ),
    Subject(
        "a loss that calls backward() by itself",
        BLOCKS
        + """
del criterion
def loss(model, batch):
    value = F.cross_entropy(model(batch[0]), batch[1])
    value.backward()
    return F.cross_entropy(model(batch[0]), batch[1])
""",
        refused=r"The loss calls backward\(\) by itself",
    ),
    Subject(
        "LBFGS", BLOCKS + "optimizer = torch.optim.LBFGS(net.parameters())", refused="LBFGS .* Use another optimizer"
    ),
    Subject(
        "SparseAdam",
        "net = nn.EmbeddingBag(97, 3, sparse=True)\ndata, criterion = TensorDataset(tokens, y), nn.CrossEntropyLoss()\n"
        "optimizer = torch.optim.SparseAdam(net.parameters())",
        refused="SparseAdam takes sparse gradients.* Use Adam, or SGD",
    ),
    Subject(
        "sparse gradients, SGD with momentum",
        "net = nn.EmbeddingBag(97, 3, sparse=True)\ndata, criterion = TensorDataset(tokens, y), nn.CrossEntropyLoss()\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)",
        refused="SGD keeps a sparse momentum_buffer in its state",
    ),
    Subject(
        "an optimizer of another instance of the model",
        BLOCKS + "optimizer = torch.optim.AdamW(Net().parameters(), lr=0.01)",
        refused="AdamW holds none of this model's weights: it was built on another instance",
    ),
    Subject(
        "ReduceLROnPlateau as the scheduler",
        BLOCKS
        + "optimizer = torch.optim.AdamW(net.parameters())\n"
        + "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)",
        refused="ReduceLROnPlateau waits for a metric",
    ),
    Subject(
        "SyncBatchNorm",
        "net = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8), nn.Linear(8, 3))\n"
        "data, criterion = TensorDataset(x, y), nn.CrossEntropyLoss()",
        refused="SyncBatchNorm .*Use nn.BatchNorm",
    ),
    Subject(
        "a lazy layer that has seen no batch",
        "net = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))\n"
        "data, criterion = TensorDataset(x, y), nn.CrossEntropyLoss()",
        refused="lazy layer .* Run one batch through the model first",
    ),
    Subject(
        "a loss for each sample",
        BLOCKS + "criterion = nn.CrossEntropyLoss(reduction='none')",
        refused=r"The loss must return one number .* Take its mean",
    ),
    Subject(
        "samples of different lengths",
        "net, criterion = nn.EmbeddingBag(97, 3), nn.CrossEntropyLoss()\n"
        "data = [(row[: 3 + i % 9], label) for i, (row, label) in enumerate(zip(tokens, y))]",
        refused="differ in shape .* collate_fn",
    ),
    Subject(
        "a batch sampler of one's own",
        BLOCKS + "data = DataLoader(data, batch_sampler=[[i, i + 1] for i in range(0, 40, 2)])",
        refused="batch sampler .*cannot be shared out among the ranks",
    ),
    Subject(
        "data that can be iterated over only once",
        BLOCKS + "data = iter([(x[i : i + 4], y[i : i + 4]) for i in range(0, 40, 4)])",
        refused="can be iterated over only once",
    ),
    Subject(
        "other data on each rank",
        BLOCKS + "data = TensorDataset(x[: 36 + rank], y[: 36 + rank])",
        refused="The ranks hold different data",
    ),
    Subject(
        "other models on each rank", BLOCKS + "net.other = nn.Linear(8, 1 + rank)", refused="hold different models"
    ),
    Subject(
        "a model without trainable parameters",
        BLOCKS + "net.requires_grad_(False)",
        refused="no trainable parameters: every requires_grad is False",
    ),
    Subject(
        "weights on the meta device",
        BLOCKS + "net.later = nn.Linear(8, 3, device='meta')",
        refused="is on the meta device .* Load the model's weights first",
    ),
    Subject(
        "a sparse buffer",
        BLOCKS + "net.register_buffer('graph', torch.eye(3).to_sparse())",
        refused="graph is a sparse tensor.* Keep it dense",
    ),
    Subject(
        "hvd.DistributedOptimizer",
        BLOCKS + "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))",
        refused="averages the gradients over the ranks, and so does every step here",
    ),
    Subject(
        "an optimizer around another one",
        BLOCKS
        + """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.slow = inner, [p.detach().clone() for p in net.parameters()]
    def step(self, closure=None):
        self.inner.step()
optimizer = Lookahead(torch.optim.AdamW(net.parameters(), lr=0.01))
""",
        refused=r"Lookahead keeps a state of its own beside that of the AdamW in it.* Attach the AdamW",
    ),
    Subject(
        "a scheduler of another optimizer",
        BLOCKS
        + "optimizer = torch.optim.AdamW(net.parameters())\n"
        + "scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.AdamW(net.parameters()), 2)",
        refused="StepLR changes an optimizer that is not trained with",
    ),
    Subject(
        "no loss", BLOCKS + "del criterion\ndata = list(x)", refused="No loss was named and the model returned none"
    ),
    Subject("no loss for pairs", BLOCKS + "del criterion", refused="given the whole micro-batch.* Name the loss"),
    Subject(
        "a loss that does not depend on the weights",
        BLOCKS + "del criterion\nloss = lambda model, batch: F.cross_entropy(model(batch[0]).detach(), batch[1])",
        refused=r"does not depend on the model's weights.* Remove detach\(\)",
    ),
    Subject(
        "a complex loss",
        BLOCKS + "del criterion\nloss = lambda model, batch: model(batch[0]).mean() * (1 + 1j)",
        refused="must be a real number; it is complex",
    ),
    Subject(
        "an empty dataset", BLOCKS + "data = TensorDataset(x[:0], y[:0])", refused="empty|gives no sample|fewer than"
    ),
    Subject(
        "parts of different lengths",
        BLOCKS + "data = (x, y[:30])",
        refused="have different lengths: 0 has 40, 1 has 30 rows",
    ),
    Subject(
        "data that is neither a dataset nor iterable",
        BLOCKS + "data = 7",
        refused="has neither __len__ and __getitem__ nor __iter__",
    ),
    Subject(
        "a sampler without a length",
        BLOCKS
        + """
class Endless(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(40))
data = DataLoader(data, batch_size=4, sampler=Endless())
""",
        batch_size=None,
        refused=r"\(Endless\) has no length.* Give it __len__",
    ),
    Subject(
        "a sampler whose order cannot be repeated",
        BLOCKS
        + """
import random
class Restless(torch.utils.data.Sampler):
    def __len__(self):
        return 40
    def __iter__(self):
        return iter(random.SystemRandom().sample(range(40), 40))
data = DataLoader(data, batch_size=4, sampler=Restless())
""",
        batch_size=None,
        refused=r"\(Restless\) gives another order each time it is asked",
    ),
    Subject(
        "validation data that repeats samples",
        BLOCKS
        + """
sampler = torch.utils.data.RandomSampler(data, replacement=True)
eval_data = DataLoader(data, batch_size=4, sampler=sampler)
del sampler
""",
        refused="chooses samples more than once, and each is to be seen exactly once",
    ),
)
