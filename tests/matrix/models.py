"""Models that people write themselves, each with what makes it special."""

from __future__ import annotations

from tests.matrix.case import Subject

BLOCKS = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

net, data, criterion = Net(), TensorDataset(x, y), nn.CrossEntropyLoss()
"""
OWN_OPTIMIZER = "optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)\n"

PLAIN = Subject("residual blocks", BLOCKS)
OWN = Subject("residual blocks, an optimizer of one's own", BLOCKS + OWN_OPTIMIZER)
MOMENTUM = Subject(
    "residual blocks, momentum and weight decay",
    BLOCKS + "optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)\n",
)
FROZEN = Subject(
    "frozen parts",
    BLOCKS
    + """
for param in net.blocks[:2].parameters():
    param.requires_grad_(False)
"""
    + OWN_OPTIMIZER,
)
HEAD_LATER = Subject(
    "a head that the optimizer lacks",
    BLOCKS + "optimizer = torch.optim.AdamW(net.blocks.parameters(), lr=0.01)\n",
)
DROPOUT = Subject(
    "dropout",
    """
net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3)) for _ in range(3)), nn.Linear(8, 3))
data, criterion = TensorDataset(x, y), nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
""",
)
EVALUATED = Subject("dropout, with data for evaluation", DROPOUT.code + "eval_data = TensorDataset(x[:11], y[:11])")
BATCH_NORM = Subject(
    "batch norm",
    """
def block():
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(*(block() for _ in range(3))), nn.Flatten(), nn.LazyLinear(3))
net(images[:2])
data, criterion = TensorDataset(images, y), nn.CrossEntropyLoss()
""",
)
SCHEDULED = Subject(
    "a scheduler that warms up from 0",
    BLOCKS
    + OWN_OPTIMIZER
    + "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 4))\n",
)

_WORDS = """
class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(97, 16, **options)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 97, bias=False)
    def forward(self, words):
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)

def loss(model, batch):
    words = batch[0]
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

data = TensorDataset(tokens)
"""

MODELS = (
    PLAIN,
    OWN,
    FROZEN,
    DROPOUT,
    BATCH_NORM,
    Subject("tied weights", _WORDS + "net = Words()\nnet.head.weight = net.embedding.weight"),
    Subject(
        "an embedding with sparse gradients, SGD",
        _WORDS + "net = Words(sparse=True)\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
    ),
    Subject(
        "an LSTM with packed sequences",
        """
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(97, 8), nn.Linear(12, 3)
        self.lstm = nn.LSTM(8, 12, 2, batch_first=True)
    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])

def padded(samples):
    words, labels = zip(*samples)
    return pad_sequence(words, batch_first=True), torch.tensor([len(w) for w in words]), torch.stack(labels)

def loss(model, batch):
    words, lengths, labels = batch
    return F.cross_entropy(model(words, lengths), labels)

net = Reader()
texts = [(row[: 3 + i % 9], label) for i, (row, label) in enumerate(zip(tokens, y))]
data = DataLoader(texts, batch_size=4, shuffle=True, collate_fn=padded)
""",
    ),
    Subject(
        "gradient penalty",
        BLOCKS
        + """
del criterion
def loss(model, batch):
    inputs = batch[0].requires_grad_()
    outputs = model(inputs)
    slope, = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return F.cross_entropy(outputs, batch[1]) + (slope.norm(dim=1) - 1).square().mean()
""",
    ),
    Subject(
        "weight norm",
        BLOCKS
        + """
for block in net.blocks:
    nn.utils.parametrizations.weight_norm(block.wide)
""",
    ),
    Subject(
        "spectral norm",
        BLOCKS
        + """
for block in net.blocks:
    nn.utils.parametrizations.spectral_norm(block.wide)
""",
    ),
    Subject("a model in bf16", BLOCKS + "net.to(torch.bfloat16)\ndata = TensorDataset(x.bfloat16(), y)"),
    Subject(
        "torch.compile'd",
        BLOCKS + "net = torch.compile(net, backend='aot_eager')",
        refused_checkpointed="compiled as a whole. Compile its blocks instead",
    ),
    Subject(
        "a block that is torch.compile'd",
        BLOCKS + "net.blocks[1] = torch.compile(net.blocks[1], backend='aot_eager')",
    ),
    Subject(
        "reentrant checkpoints of a layer called several times",
        """
from torch.utils.checkpoint import checkpoint

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=True)
        return self.head(x)
net, data, criterion = Recurrent(), TensorDataset(x, y), nn.CrossEntropyLoss()
""",
    ),
    Subject(
        "buffers that no state dict holds",
        BLOCKS
        + """
class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.randn(8), persistent=False)
    def forward(self, x):
        return x + self.noise
net.blocks[0] = nn.Sequential(Noise(), net.blocks[0])
""",
    ),
    Subject(
        "buffers of odd types",
        BLOCKS
        + """
net.register_buffer("mask", torch.rand(8) > 0.5)
net.register_buffer("wave", torch.randn(4, dtype=torch.complex64))
net.register_buffer("brief", torch.randn(4).bfloat16())
net.register_buffer("short", torch.randint(99, (4,)).to(torch.uint16))
net.register_parameter("nothing", nn.Parameter(torch.empty(0)))
""",
    ),
    Subject(
        "frozen batch norm",
        BATCH_NORM.code + "for layer in net[1]: layer[1].eval()",
    ),
    Subject("a model that comes in evaluation mode", DROPOUT.code + "net.eval()"),
    Subject(
        "statistics of one's own in the blocks",
        BLOCKS
        + """
class Centred(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0
        self.register_buffer("mean", torch.zeros(8))
    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.inner(x - self.mean) / self.calls
for i in range(4):
    net.blocks[i] = Centred(net.blocks[i])
""",
    ),
    Subject(
        "Python's and NumPy's random numbers in the blocks",
        BLOCKS
        + """
import random
class Jitter(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return self.inner(x) * (1 + 0.1 * random.random()) * (1 + 0.1 * np.random.rand())
for i in range(4):
    net.blocks[i] = Jitter(net.blocks[i])
""",
    ),
    Subject(
        "a model in fp16",
        BLOCKS
        + """
net.to(torch.float16)
data = TensorDataset(x.half(), y)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
""",
        refused_in_fp16="precision=fp16 scales the loss for weights in fp32, and .* is in fp16 itself",
    ),
    Subject(
        "extra state",
        BLOCKS
        + """
class Counting(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.seen = inner, 3 + rank
    def forward(self, x):
        self.seen += len(x)
        return self.inner(x)
    def get_extra_state(self):
        return {"seen": self.seen}
    def set_extra_state(self, state):
        self.seen = state["seen"]
net.blocks[0] = Counting(net.blocks[0])
""",
    ),
)
