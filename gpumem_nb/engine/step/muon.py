"""``optimizer=muon``: torch's Muon for hidden matrices and torch's AdamW for all other weights, as one optimizer.

Exported scripts have the class as it stands here, so it knows torch alone. torch 2.8 has no Muon, and imports this.
"""

from __future__ import annotations

from typing import Any

import torch


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon updates the weights at the places ``matrices`` of each group, and AdamW the others, with torch's own code.

    One learning rate and weight decay serve both, because Muon's updates are scaled to be as large as AdamW's.
    """

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        defaults = {"lr": lr, "weight_decay": 0.01, "foreach": None, "fused": None, "matrices": ()}
        super().__init__(params, defaults | options)

    def step(self, closure: Any = None) -> Any:
        """Update what has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            weights, places = group["params"], set(group["matrices"])
            matrices = [weight for place, weight in enumerate(weights) if place in places]
            others = [weight for place, weight in enumerate(weights) if place not in places]
            both: Any = (
                torch.optim.Muon([{**group, "params": matrices}], adjust_lr_fn="match_rms_adamw"),
                torch.optim.AdamW([{**group, "params": others}]),
            )
            for optimizer in both:
                optimizer.state = self.state
                optimizer.step()
        return loss
