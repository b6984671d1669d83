"""Losses, criteria, optimizers and schedulers of people's own, and what parameters get of them."""

from __future__ import annotations

from tests.matrix.case import Subject
from tests.matrix.models import BLOCKS, OWN_OPTIMIZER, SCHEDULED

TEMPERATURE = (
    BLOCKS
    + """
class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3) + 1)
    def forward(self, outputs, targets):
        return F.cross_entropy(outputs * self.scale, targets)
criterion = Temperature()
"""
)
TRAINING = (
    Subject(
        "several losses",
        BLOCKS
        + """
del criterion
net.aside = nn.Linear(8, 1)
def loss(model, batch):
    inputs, targets = batch
    main = F.cross_entropy(model(inputs), targets)
    return main + 0.1 * model.aside(inputs).square().mean() + 0.01 * sum(p.abs().sum() for p in model.parameters())
""",
    ),
    Subject("a criterion with weights", TEMPERATURE),
    Subject(
        "a criterion with weights in an optimizer of one's own",
        TEMPERATURE
        + """
optimizer = torch.optim.AdamW([{"params": net.parameters()}, {"params": criterion.parameters(), "lr": 0.1}], lr=0.01)
""",
    ),
    Subject(
        "a parameter without gradients, weight decay",
        BLOCKS + "net.unused = nn.Linear(8, 8)\n" + OWN_OPTIMIZER,
    ),
    Subject(
        "a parameter with gradients on some ranks only",
        BLOCKS
        + """
del criterion
net.sometimes = nn.Linear(8, 3)
def loss(model, batch):
    outputs = model(batch[0])
    if rank == 1 and batch[1][0] > 0:
        outputs = outputs + model.sometimes(batch[0])
    return F.cross_entropy(outputs, batch[1])
""",
    ),
    Subject(
        "a loss of shape (1,)",
        BLOCKS + "del criterion\nloss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])[None]",
    ),
    Subject(
        "a loss function with other names",
        BLOCKS + "del criterion\nloss = lambda net, b: F.cross_entropy(net(b[0]), b[1])",
    ),
    SCHEDULED,
    Subject(
        "a learning rate of 0",
        BLOCKS + "optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)",
    ),
    Subject("a criterion that is a function", BLOCKS + "criterion = F.cross_entropy"),
    Subject(
        "a loose weight in the optimizer",
        BLOCKS
        + """
del criterion
scale = nn.Parameter(torch.rand(1) + 1)
optimizer = torch.optim.AdamW([*net.parameters(), scale], lr=0.01)
def loss(model, batch):
    return F.cross_entropy(model(batch[0]) * scale, batch[1])
""",
    ),
)
