"""The optimizer: which parameters decay, AdamW with its state made at once, and the learning rate at a step."""

import math

import torch
from torch import Tensor, nn

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


def make_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov and Hutter 2019); matrices and embeddings decay, biases and norms do not.

    Call it after the model is on its device. The moments are made here and not in the first update, so that a state
    has the same tensors at every step, also before the first.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), fused=True)
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }
    return optimizer


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's live tensors by `<parameter name>.<state name>`; writing into them restores a state."""
    return {
        f"{name}.{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }
