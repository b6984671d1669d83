"""What people do in cells of any notebook: copies of the model, forward passes, questions, children, exits."""

from __future__ import annotations

from typing import Any

import pytest

import gpumem_nb
from gpumem_nb.session import Session

pytestmark = pytest.mark.cluster

NET = """
import copy
from torch import nn
torch.manual_seed(0)
X = torch.randn(96, 8)
Y = X[:, :1] * 2
rows = torch.utils.data.TensorDataset(X, Y)
net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)], nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=.05)
loss = nn.MSELoss()
"""


def attached(session: Session, code: str = NET, loss: str = "loss", **knobs: Any) -> Session:
    """Attach what this code defines, and set these knobs."""
    session.run(code)
    session.attach(model="net", data="rows", loss=loss, optimizer="opt")
    default = gpumem_nb.Settings().replace(optimizer="own", learning_rate=0.05, batch_size=8, **knobs)
    session.set(**default.changed_from(session.settings))
    return session


# The model under checkpointing ----------------------------------------------------------------------------------------

LOOKS = {
    "a copy": "t = copy.deepcopy(net); l = loss(t(X[:8]), Y[:8]); l.backward(); float(l)",
    "a shallow copy": "t = copy.copy(net); l = loss(t(X[:8]), Y[:8]); l.backward(); float(l)",
    "an average": "t = torch.optim.swa_utils.AveragedModel(net); t.update_parameters(net); float(t(X[:8]).sum())",
    "a forward pass": "float(net(X[:8]).sum())",
    "a kept forward pass": "out = net(X[:8]); float(out.sum())",
    "a backward": "net.zero_grad(); l = loss(net(X[:8]), Y[:8]); l.backward(); float(l)",
    "a pickled copy": "import pickle; t = pickle.loads(pickle.dumps(net)); float(t(X[:8]).sum())",
    "a file": """
import io
file = io.BytesIO()
torch.save(net, file)
file.seek(0)
float(torch.load(file, weights_only=False)(X[:8]).sum())
""",
}


@pytest.mark.parametrize("checkpointing", ["blocks", "sqrt"])
def test_cells_find_a_plain_model_under_checkpointing(two_ranks: Session, checkpointing: str) -> None:
    plain, trained = list[Any](), list[float]()
    for mode, found in (("none", plain), (checkpointing, list[Any]())):
        attached(two_ranks, checkpointing=mode)
        losses = [two_ranks.train(2).frame().loss.iloc[-1]]
        for cell in LOOKS.values():
            found.append(two_ranks.run(cell))
            losses.append(two_ranks.train(1).frame().loss.iloc[-1])
        assert found == plain
        found_there = two_ranks.pull("net")[0]
        assert type(found_there).__name__ == "Sequential"
        assert trained in ([], losses)
        trained = losses


def test_a_teacher_copied_under_checkpointing_is_called_in_the_loss(two_ranks: Session) -> None:
    code = NET + (
        "teacher = None\n"
        "def loss(model, batch):\n"
        "    global teacher\n"
        "    teacher = teacher or copy.deepcopy(model)\n"
        "    out = model(batch[0])\n"
        "    return ((out - batch[1]) ** 2).mean() + .1 * ((out - teacher(batch[0]).detach()) ** 2).mean()\n"
    )
    plain = attached(two_ranks, code).train(4).frame().loss.tolist()
    assert attached(two_ranks, code, checkpointing="blocks").train(4).frame().loss.tolist() == plain
    two_ranks.run("import pickle; teacher = pickle.loads(pickle.dumps(copy.deepcopy(net)))")
    two_ranks.train(1)
