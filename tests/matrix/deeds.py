"""What people do between two chunks, on which models."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import TrainingFailed
from tests.matrix.case import Deed, Subject
from tests.matrix.models import BATCH_NORM, DROPOUT, EVALUATED, FROZEN, HEAD_LATER, MOMENTUM, OWN, SCHEDULED
from tests.matrix.transformers_models import BERT, GPT2

_HUNGRY = """
def run_out(module, arguments):
    hook.remove()
    torch.empty(2**30, dtype=torch.uint8)
hook = net.register_forward_pre_hook(run_out) if rank == 1 else None
"""


def _run_out_of_memory(session: Session) -> None:
    session.run(_HUNGRY)
    try:
        session.train(1)
    except TrainingFailed as failed:
        if "ran out of memory" in str(failed):
            return
        raise
    raise AssertionError("memory did not run out")


def _record_a_step(session: Session) -> None:
    session.timeline()


def _evaluate(session: Session) -> None:
    session.evaluate()


def _sync(session: Session) -> None:
    session.sync()


def _save_and_resume(session: Session) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "saved.state")
        session.save(path)
        session.train(2)
        session.resume(path)


def _flip_there_and_back(session: Session) -> None:
    settings = session.settings
    session.set(checkpointing="none" if settings.checkpointing != "none" else "blocks", clip_norm=1.0)
    session.set(checkpointing=settings.checkpointing, clip_norm=settings.clip_norm)


_EMA = """
class Average(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.count = 0
        for name, param in net.named_parameters():
            self.register_buffer(name.replace(".", "_"), param.detach().clone())
    def update(self, optimizer, args, kwargs):
        self.count += 1
        with torch.no_grad():
            for buffer, param in zip(self.buffers(), net.parameters()):
                buffer.lerp_(param, 1 / (1 + self.count))
ema = Average(net)
optimizer.register_step_post_hook(ema.update)
"""

_SOME = (OWN, GPT2)
DEEDS: tuple[tuple[Deed, tuple[Subject, ...]], ...] = (
    (Deed("unfreezes layers", "net.requires_grad_(True)"), (FROZEN,)),
    (Deed("freezes layers", "for param in list(net.parameters())[:4]: param.requires_grad_(False)"), (MOMENTUM, GPT2)),
    (Deed("adds a group of parameters", "optimizer.add_param_group({'params': net.head.parameters()})"), (HEAD_LATER,)),
    (Deed("calls net.eval()", "net.eval()"), (DROPOUT, BATCH_NORM)),
    (Deed("calls backward()", "net(x[:4]).sum().backward()"), (OWN,)),
    (Deed("draws random numbers", "torch.rand(3); np.random.rand(); __import__('random').random()"), (DROPOUT, GPT2)),
    (Deed("seeds random numbers", "torch.manual_seed(0)"), (DROPOUT,)),
    (Deed("averages weights in an optimizer hook", _EMA), (OWN,)),
    (
        Deed("averages weights in an optimizer hook; a step is recorded", _EMA, detour=_record_a_step),
        (OWN, DROPOUT),
    ),
    (
        Deed(
            "sets the learning rate, then flips another knob",
            "optimizer.param_groups[0]['lr'] = 0.03",
            {"clip_norm": 9.0},
        ),
        (OWN,),
    ),
    (Deed("flips another knob under a scheduler", knobs={"clip_norm": 9.0}), (SCHEDULED,)),
    (Deed("clips gradients", knobs={"clip_norm": 0.1}), _SOME),
    (Deed("sets the batch size", knobs={"batch_size": 6}), (OWN, BATCH_NORM)),
    (Deed("sets the learning rate", knobs={"learning_rate": 0.003}), _SOME),
    (Deed("changes the optimizer", knobs={"optimizer": "momentum", "learning_rate": 0.01}), _SOME),
    (Deed("goes to bf16", knobs={"precision": "bf16"}), _SOME),
    (Deed("goes to fp16, with loss scaling", knobs={"precision": "fp16"}), _SOME),
    (Deed("accumulates gradients", knobs={"batch_size": 2, "accumulation_steps": 2}), (OWN, BERT, BATCH_NORM)),
    (
        Deed(
            "accumulates gradients, against one batch",
            knobs={"batch_size": 2, "accumulation_steps": 2},
            plainly={},
        ),
        (OWN, MOMENTUM),
    ),
    (Deed("flips checkpointing there and back", detour=_flip_there_and_back), (OWN, DROPOUT, GPT2)),
    (Deed("records a step", detour=_record_a_step), (DROPOUT, BATCH_NORM, GPT2, SCHEDULED)),
    (Deed("runs out of memory on one rank", detour=_run_out_of_memory), (DROPOUT, BATCH_NORM, GPT2, SCHEDULED)),
    (Deed("evaluates", detour=_evaluate), (EVALUATED,)),
    (Deed("gives rank 0's weights to all", detour=_sync), (OWN, GPT2)),
    (Deed("saves, trains on and resumes", detour=_save_and_resume), (DROPOUT, BATCH_NORM, GPT2, SCHEDULED)),
)
