"""What may change under a run that goes on: settings of who, where and how fast; others when it is said; some never."""

from collections.abc import Mapping
from typing import Any

# Who, where, how often and how fast: never what is computed.
_OPERATIONAL = (
    "name",
    "out_dir",
    "device",
    "compile",
    "model.preset",  # the shape it stands for is compared
    "model.activation_checkpointing",
    "data.path",  # the fingerprint of what it holds is compared, here and below
    "data.vocab_size",
    "data.cache_gb",
    "train.eval_interval",
    "train.eval_sequences",
    "train.sample_interval",
    "train.num_threads",
    "train.on_nonfinite",
    "train.max_epochs",  # the steps that it comes to are compared
    "snapshot.",
    "elastic.",
    "log.",
)
# The position counts in these, or the state has their shape, or the samples are cut from them.
_FIXED = (
    "seed",
    "train.global_batch_size",
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.block_size",
    "model.bias",
    "data.tokenizer",
    "data.fingerprint",
)
# With exact reduction the bits depend on these too.
_FIXED_IF_EXACT = ("train.micro_batch_size", "train.num_threads", "dtype", "compile")


CURE = "--name=NEW (and another out_dir or snapshot.uri, where they are set)"


def changes_on_resume(saved: Mapping[str, Any], now: Mapping[str, Any], resume: str) -> dict[str, tuple[Any, Any]]:
    """The settings (flat, by dotted name) that differ from the run's, each as (then, now), if all may differ.

    Raises ValueError, one line for all of them, for settings that never may change under a run, and for settings of the
    training unless `resume` is `must`.
    """
    changed = {key: (saved.get(key), now.get(key)) for key in {**saved, **now} if saved.get(key) != now.get(key)}
    exact = "exact" in (saved.get("train.reduction"), now.get("train.reduction"))
    fixed = _FIXED + _FIXED_IF_EXACT * exact
    never = {key: values for key, values in changed.items() if key in fixed}
    if never:
        raise ValueError(
            f"{_told(never)}: this cannot change under a run; go back to the old value, or start another run: {CURE}"
        )
    training = {}
    for key, (then, value) in changed.items():
        longer = key == "train.max_steps" and int(value or 0) > int(then or 0)
        if not longer and not key.startswith(_OPERATIONAL):
            training[key] = (then, value)
    if training and resume != "must":
        raise ValueError(
            f"{_told(training)}: go on with the change by --snapshot.resume=must, or start another run: {CURE}"
        )
    return {key: values for key, values in changed.items() if key in training or key == "train.max_steps"}


def _told(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} was {then} in this run and is {now} now" for key, (then, now) in sorted(changes.items()))
