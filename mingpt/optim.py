"""The optimizer: which parameters decay, AdamW with its state made at once, and the learning rate at a step."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

SCHEDULES = ("cosine", "linear", "constant", "wsd")


def learning_rate_at(
    step: int,
    *,
    schedule: str,
    learning_rate: float,
    min_lr: float,
    warmup_steps: int,
    max_steps: int,
    decay_fraction: float = 0.2,
) -> float:
    """Learning rate of update `step` (from 0): a function of the step alone, so a resume cannot shift it.

    Linear warm-up to `learning_rate` over `warmup_steps`, then by `schedule`: `cosine` (Loshchilov and Hutter 2017,
    eq. 5, one period) or `linear` down to `min_lr` at `max_steps`, `constant`, or `wsd` (warm-up, stable, decay: Hu et
    al. 2024): constant until the last `decay_fraction` of the steps, then linear to `min_lr`. Beyond `max_steps` the
    rate stays where it ended.
    """
    assert schedule in SCHEDULES
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    if schedule == "constant":
        return learning_rate
    start = warmup_steps
    if schedule == "wsd":
        start = max(warmup_steps, round(max_steps * (1 - decay_fraction)))
    progress = min(1.0, max(0.0, (step - start) / max(1, max_steps - start)))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return min_lr + (learning_rate - min_lr) * remaining


class AdamW:
    """Fused AdamW (Loshchilov and Hutter 2019): torch's own function, with what `torch.amp.GradScaler` asks of one.

    Not torch's class of that name: making one imports torch._dynamo, up to three seconds of every start. The moments
    are made here and not in the first update, so that a state has the same tensors at every step.
    """

    # A GradScaler sets both on the object for its step, and deletes them; it does not wait for the device then.
    found_inf: Tensor | None = None  # 1.0: the next update changes nothing; the fused kernels look at it
    grad_scale: Tensor | None = None
    _step_supports_amp_scaling = True

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        self.param_groups = [{"lr": lr, **group} for group in groups]
        self.state = {
            p: {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
            }
            for group in groups
            for p in group["params"]
        }
        self._betas = betas

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            live = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in live]
            adamw(
                live,
                [p.grad for p in live],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=1e-8,
                maximize=False,
            )


def make_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
) -> AdamW:
    """AdamW of which matrices and embeddings decay, biases and norms do not; once the model is on its device."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], learning_rate, (beta1, beta2))


def optimizer_tensors(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """The optimizer's live tensors by `<parameter name>.<state name>`; writing into them restores a state."""
    return {
        f"{name}.{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }
