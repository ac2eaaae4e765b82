"""Train a GPT. README.md tells how.

    python train_gpt.py [CONFIG.yaml] [--section.field=value ...]
    torchrun --standalone --nproc_per_node=4 train_gpt.py [CONFIG.yaml] [--section.field=value ...]
    python -m mingpt.launch --nnodes=1:4 --nproc-per-node=4 --rdzv-endpoint=HOST:PORT train_gpt.py [...]

Exit codes: 0 done; 1 failure; 2 wrong use; 75 stopped on request with everything kept (start again to go on).
"""

from mingpt import distributed  # first: it does what cannot wait until torch is loaded

# isort: split
import hashlib
import logging
import math
import shlex
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

import mingpt
from mingpt import election, metrics, newcomer, slots, snapshot, storage
from mingpt.config import Config, ConfigError, flatten, load_config, to_yaml, warnings
from mingpt.corpus import open_corpus
from mingpt.dashboard import END_SECONDS, HURRY_SECONDS, Dashboard
from mingpt.data import Validation
from mingpt.distributed import UnlikeError, World
from mingpt.elastic import STOP_EXIT_CODE, Notes, StopSignals
from mingpt.election import Found
from mingpt.faults import redact
from mingpt.grid import Grid, mix, share
from mingpt.lease import Run, TakenOverError, record_run
from mingpt.metrics import duration
from mingpt.model import GPT, GPTConfig, check_causal
from mingpt.remote import open_store
from mingpt.resume import CURE, changes_on_resume
from mingpt.snapshot import Manifest, Snapshots
from mingpt.storage import Store
from mingpt.tokenizer import CharTokenizer, tokenizer_from_dict
from mingpt.tokens import TokenFile
from mingpt.trainer import Trainer

log = logging.getLogger("mingpt.train_gpt")

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "shakespeare_char.yaml"
SAMPLE_TOKENS = 300
WORTHWHILE = 0.8  # of the time that is used; where it is less, better shares are named


@dataclass(frozen=True)
class Plan:
    """What the run is: derived by every rank for itself, the same on all, and checked to be."""

    config: Config
    world: World
    corpus: TokenFile
    n_train: int  # the first tokens, all others are for validation
    grid: Grid
    max_steps: int
    shape: GPTConfig
    dtype: torch.dtype
    threads: int
    hardware: str
    description: dict[str, Any]  # flat, by dotted names: as it is written down, and compared with what was


@record  # under torchrun the first failing rank's own message ends its report
def train(argv: Sequence[str], notes: Notes, preflight: bool = False) -> int:
    """One run, from its description to its last snapshot; returns the exit code.

    `preflight` ends it before the ranks meet; `notes` are for the launcher.
    """
    config = load_config(argv, DEFAULT_CONFIG, distributed.device_type)
    world = distributed.locate(config.device)
    if world.local_rank == 0 and not preflight:
        notes.began(distributed.started(), world.world_size)
    for warning in [*(f"warning: {it}" for it in warnings(config)), *distributed.launch_warnings()]:
        if world.is_main and not preflight:
            log.warning("%s", warning)
    plan = make_plan(config, world)
    store = open_store(config.snapshot_uri)
    if preflight:
        resume, ours = config.snapshot.resume, shared(config, plan.description)
        newcomer.check(config.name, config.run_dir, store, plan.description, resume, ours)
        return 0
    if config.log.all_ranks:
        metrics.open_log(config.run_dir / "logs", world.rank)
    distributed.seed_process(mix(config.seed))
    model = GPT(plan.shape).to(world.device)
    self_check(model, plan)
    connect(plan, store)
    beat = distributed.Beat(world, config.elastic.timeout_seconds)
    notes.mark("start")
    trainer: Trainer | None = None
    snapshots: Snapshots | None = None
    book = metrics.Metrics()
    try:
        with StopSignals(config.elastic.grace_seconds, notes) as signals:
            # Which run it continues, and from where: every node tells what it knows and has.
            ram_dir = slots.folder(config.elastic.ram_image, config.elastic.ram_dir)
            run, snapshots = open_run(world, config, store, ram_dir)
            found, start = find_start(plan, run, snapshots, ram_dir, model)
            if found and found.is_kept and start["step"] >= plan.max_steps:
                log.info("finished already: %d of %d steps; a larger --train.max_steps goes on", start["step"],
                         plan.max_steps)  # fmt: skip
                if found.manifest:
                    show_result(config, found.manifest)
                slots.remove_files(ram_dir, run.run_id)
                return 0
            entries, past = look_back(plan, run, notes)
            book = open_books(plan, run, snapshots, entries)
            steps_lost = max(0, past.step - start["step"])
            trainer = make_trainer(plan, run, snapshots, ram_dir, model, book, steps_lost)
            # A changed setting changes the losses: then there is nothing to see again.
            replayed = {} if start["changes"] else losses_after(start["step"], entries)
            image, manifest, owner = (found.image, found.manifest, found.holding.rank) if found else (None, None, 0)
            trainer.restore(image, manifest, replayed, owner)
            notes.mark("restored")
            found = image = None  # else the file stays mapped, and on disk, until the run ends
            facts = start_facts(plan, run, steps_lost, start["changes"])
            book.event("start", start["step"], **facts)
            if world.is_main:
                show_start(plan, run, trainer, facts)
                check_shares(plan, trainer.step, book)
            trainer.fit(signals, notes)  # which ends on all ranks together, after the last manifest
            balance = {"best_val_loss": trainer.best_val_loss, "goodput": trainer.ledger.goodput}
            book.event("stop" if trainer.stopped else "end", trainer.step, **balance)
            if trainer.stopped:
                log.info("stopped on request at step %d; the same command goes on from there", trainer.step)
            # A world that only forms anew has saved nothing here: the sums of an older step would mislead.
            if (manifest := trainer.keeper.last_manifest) and manifest.facts["step"] == trainer.step:
                show_balance(trainer, run, past.steps_lost + steps_lost)
                show_result(config, manifest)
            return STOP_EXIT_CODE if trainer.stopped else 0
    except RuntimeError:
        notes.mark("noticed")
        if beat.is_lost():  # which has said so
            return 1
        raise
    finally:
        if trainer:
            trainer.close()
        if snapshots:
            snapshots.release()
        beat.close()
        distributed.leave()
        notes.mark("stopped")
        # The agent waits to form the world anew, but for an end, or a node that leaves.
        goes_on = notes.is_leaving is False and not (trainer and trainer.step == plan.max_steps)
        book.close(HURRY_SECONDS if goes_on else END_SECONDS)


def make_plan(config: Config, world: World) -> Plan:
    """Opens the text and derives everything from it and the config; raises ValueError where they do not go together."""
    exact = config.train.reduction == "exact"
    if exact:
        distributed.make_deterministic(config.compile)
    threads = distributed.set_threads(config.train.num_threads or int(exact), world)
    dtype = distributed.pick_dtype(config.dtype, world.device)
    corpus = open_corpus(config.data.path, config.data.tokenizer, config.data.vocab_size, config.data.cache_gb)
    check_tokens(config, corpus)
    n_train = corpus.split(config.data.val_fraction)
    grid = Grid(
        n_train, config.model.block_size, config.train.global_batch_size, config.train.micro_batch_size, config.seed
    )
    max_steps = config.train.max_steps or grid.steps(config.train.max_epochs or 1)
    shape = GPTConfig(
        vocab_size=corpus.tokenizer.vocab_size,
        block_size=config.model.block_size,
        **config.model.shape,
        dropout=config.model.dropout,
        bias=config.model.bias,
        activation_checkpointing=config.model.activation_checkpointing,
    )
    check_size(shape, grid, max_steps, world)
    # No password of a URI goes into any file.
    description = {key: redact(value) if isinstance(value, str) else value for key, value in flatten(config).items()}
    description |= {f"model.{key}": value for key, value in config.model.shape.items()}
    description |= {
        "dtype": str(dtype).removeprefix("torch."),
        "train.num_threads": threads,
        "train.max_steps": max_steps,
        "data.fingerprint": digest(corpus.fingerprint, n_train),
    }
    hardware = distributed.hardware(world.device)
    return Plan(config, world, corpus, n_train, grid, max_steps, shape, dtype, threads, hardware, description)


def make_trainer(
    plan: Plan,
    run: Run,
    snapshots: Snapshots,
    ram_dir: Path | None,
    model: GPT,
    book: metrics.Metrics,
    steps_lost: int,
) -> Trainer:
    """The trainer of the plan, at step 0."""
    config, corpus = plan.config, plan.corpus
    return Trainer(
        model,
        corpus.tokens[: plan.n_train],
        corpus.tokens[plan.n_train :],
        block_size=config.model.block_size,
        max_steps=plan.max_steps,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        seed=config.seed,
        reduction=config.train.reduction,
        on_nonfinite=config.train.on_nonfinite,
        **asdict(config.optim),
        dtype=plan.dtype,
        compile=config.compile,
        eval_interval=config.train.eval_interval,
        eval_sequences=config.train.eval_sequences,
        sample_interval=config.train.sample_interval,
        log_interval=config.log.interval,
        stall_seconds=config.log.stall_seconds,
        logs=config.run_dir / "logs",
        save_interval=config.snapshot.save_interval,
        save_interval_seconds=config.snapshot.save_interval_seconds,
        on_error=config.snapshot.on_error,
        world=plan.world,
        generation=run.generation,
        snapshots=snapshots,
        ram_dir=ram_dir,
        metrics=book,
        sample=lambda: sample_text(model, corpus, config.seed),
        description={
            "mingpt": mingpt.__version__,
            "run_id": run.run_id,
            "config": plan.description,
            "model": asdict(model.config),
            "tokenizer": corpus.tokenizer.to_dict(),
            "fingerprints": {
                "tokenizer": corpus.tokenizer.fingerprint,
                "data": plan.description["data.fingerprint"],
            },
            "hardware": plan.hardware,
        },
        flops_per_token=model.flops_per_token(),
        began=run.began,
        steps_lost=steps_lost if run.generation > 1 else None,
    )


def look_back(plan: Plan, run: Run, notes: Notes) -> tuple[list[dict[str, Any]], metrics.Past]:
    """The rows and events of this node's metrics.jsonl, and what all nodes know by theirs and by their launchers."""
    entries: list[dict[str, Any]] = []

    def look() -> dict[str, Any]:
        if plan.world.heads_node:
            entries.extend(metrics.read_metrics(book_file(plan.config), run.run_id))
        known = metrics.recall(entries)
        return known | {"last": max(filter(None, [known["last"], notes.last]), default=None)}

    return entries, metrics.look_back(distributed.gather(plan.world, look))


def start_facts(plan: Plan, run: Run, steps_lost: int, changes: dict[str, Any]) -> dict[str, Any]:
    """What the event of a start tells."""
    return {
        "world_size": plan.world.world_size,
        "run_id": run.run_id,
        "restarts": run.generation - 1,
        "hosts": [*Counter(distributed.hosts(plan.world)).items()],
        "steps_lost": steps_lost,
        "changes": changes,
        "config": plan.description,
    }


def book_file(config: Config) -> Path:
    return config.run_dir / "metrics.jsonl"


def shared(config: Config, description: dict[str, Any]) -> dict[str, Any]:
    """What all ranks of a world have in common."""
    # Threads change bits, which only exact mode promises.
    own = () if config.train.reduction == "exact" else ("train.num_threads",)
    return {key: value for key, value in {**description, **versions()}.items() if key not in own}


def connect(plan: Plan, store: Store) -> None:
    """Makes the process group, once all ranks have shown that they are about to do the same."""
    config = plan.config
    ours = shared(config, plan.description)
    hello = {**ours, "device": plan.world.device.type}
    if config.train.reduction == "exact":
        hello["hardware (which exact reduction needs equal)"] = plan.hardware
    try:
        distributed.connect(plan.world, hello, config.elastic.timeout_seconds)
    except UnlikeError as error:
        # Whoever is not as the run was begun is the one to go; the others form the world without it.
        if newcomer.is_as_recorded(config.run_dir, store, ours):
            raise ConnectionError(f"{error}; this rank is as the run's run.json says and goes on without") from error
        raise


def versions() -> dict[str, str]:
    """Of what computes: equal on all ranks."""
    return {"mingpt": f"{mingpt.__version__}, code {CODE}", "torch": torch.__version__}


def open_run(world: World, config: Config, store: Store, ram_dir: Path | None) -> tuple[Run, Snapshots]:
    """The run that all nodes know of, or a new one, and its snapshots in the store that this world writes into."""
    if storage.is_remote(config.snapshot_uri):  # a server that is down is told of in seconds; else a run waits longer
        distributed.decide(world, store.probe)
    run = election.agree_on_run(world, config.run_dir, store, ram_dir)
    return run, Snapshots(store, run.run_id, config.snapshot.keep_last, config.snapshot.keep_interval)


def find_start(
    plan: Plan, run: Run, snapshots: Snapshots, ram_dir: Path | None, model: GPT
) -> tuple[Found | None, dict[str, Any]]:
    """The newest image of all nodes to go on from (None: a new run), and the step and changes that all obey.

    A new run takes the weights of `snapshot.init_from`. Raises ValueError, on every rank, where the description is not
    the run's, or where the run was saved once and nothing of it is left.
    """
    config, corpus = plan.config, plan.corpus
    found = election.find_newest(plan.world, snapshots, ram_dir)

    def judge() -> dict[str, Any]:
        if found is None:
            uri = snapshots.store.uri
            if run.saved_in:
                raise ValueError(
                    f"run {run.run_id} was saved in {run.saved_in}, but no image of it is in {uri} or on a node here: "
                    "bring one back, start a node that has one as well, or give the right snapshot.uri; to start over: "
                    f"{CURE}"
                )
            if run.generation > 1:
                log.warning("nothing tells that this run was ever saved: starting over at step 0")
            if config.snapshot.resume == "must":
                raise ValueError(f"snapshot.resume=must, but no snapshot is in {uri}; take resume=auto")
            if config.snapshot.init_from:
                source, image = snapshot.find_image(config.snapshot.init_from)
                check_symbols(image.metadata, corpus, source)
                snapshot.load_weights(model, image, source)
            return {"step": 0, "changes": {}}
        saved = found.metadata
        if not found.is_kept:
            log.info("going on from %s", found.holding)
        check_symbols(saved, corpus, str(found.holding))
        changes = changes_on_resume(saved["config"], plan.description, config.snapshot.resume)
        began_on = saved["hardware"]
        if config.train.reduction == "exact" and began_on != plan.hardware:
            log.warning("warning: bits will differ: the run began on %s, this is %s", began_on, plan.hardware)
        return {"step": saved["step"], "changes": changes}

    return found, distributed.decide(plan.world, judge)


def check_tokens(config: Config, corpus: TokenFile) -> None:
    """Raises ValueError where the tokens were prepared by another kind than the config says; warns of what is idle."""
    kind, default = corpus.tokenizer.kind, Config().data
    if config.data.tokenizer != kind:
        raise ValueError(
            f"data.tokenizer={config.data.tokenizer}, but {corpus.path} was prepared with {kind}: give "
            f"--data.tokenizer={kind}, or another data.path"
        )
    if config.data.val_fraction != default.val_fraction and corpus.n_val is not None:
        log.warning("warning: data.val_fraction has no effect: %s has its own validation tokens", corpus.path)
    if config.data.vocab_size not in (default.vocab_size, corpus.tokenizer.vocab_size) and corpus.path.is_dir():
        log.warning("warning: data.vocab_size has no effect: %s was prepared before", corpus.path)


def check_symbols(saved: dict[str, Any], corpus: TokenFile, source: str) -> None:
    """Raises ValueError where the weights of `source` were trained on other tokens; it names other characters."""
    if not saved.get("tokenizer"):
        raise ValueError(f"{source} holds another kind of model, which the Trainer was given from Python")
    trained, tokenizer = tokenizer_from_dict(saved["tokenizer"]), corpus.tokenizer
    if trained.fingerprint == tokenizer.fingerprint:
        return
    if isinstance(trained, CharTokenizer) and isinstance(tokenizer, CharTokenizer):
        theirs, ours = set(trained.chars), set(tokenizer.chars)
        raise ValueError(
            f"{source} has other symbols than {corpus.path}: {''.join(sorted(theirs - ours))!a} are missing here, "
            f"{''.join(sorted(ours - theirs))!a} are new; take a text with the same characters, or start another run "
            "with --name=NEW and without snapshot.init_from"
        )
    raise ValueError(
        f"{source} was trained with another tokenizer ({trained.kind}, {trained.vocab_size} tokens) than {corpus.path} "
        f"({tokenizer.kind}, {tokenizer.vocab_size} tokens); take a text prepared with the same one, or start another "
        "run with --name=NEW and without snapshot.init_from"
    )


def open_books(plan: Plan, run: Run, snapshots: Snapshots, entries: Sequence[dict[str, Any]]) -> metrics.Metrics:
    """Makes the run's folders and files; its metrics. Fails here and not at the first save where it may not write."""
    world, config, out_dir = plan.world, plan.config, plan.config.run_dir
    facts = {"name": config.name, "config": plan.description, "versions": versions()}

    def write() -> None:
        try:
            snapshots.store.probe()
            snapshots.claim(run, out_dir, facts)
            storage.remove_leftovers(out_dir)
            storage.replace_file(out_dir / "config.yaml", [redact(to_yaml(config)).encode()])
        except OSError as error:
            # Without a file's name it is told already.
            cure = "; see to it, or give another out_dir or snapshot.uri" if error.filename else ""
            raise OSError(told(error) + cure) from error

    distributed.decide(world, write)

    def note() -> None:
        if world.heads_node and not world.is_main:
            record_run(run, out_dir, None, facts)

    distributed.gather(world, note)  # on every node, which may be another run's first rank next time
    if not world.is_main:
        return metrics.Metrics()
    dashboard = open_dashboard(config, run, entries) if config.log.wandb != "disabled" else None
    return metrics.Metrics(book_file(config), run.generation, metrics.Bar(sys.stdout), dashboard)


def open_dashboard(config: Config, run: Run, entries: Sequence[dict[str, Any]]) -> Dashboard:
    """The run's page on wandb; online only where there is a key."""
    server, has_key = distributed.wandb_server()
    if config.log.wandb == "online" and not has_key:
        log.warning("warning: log.wandb=online, but there is no key for %s: wandb is offline; `wandb login`", server)
    return Dashboard(
        run.run_id,
        name=config.name,
        project=config.log.wandb_project,
        folder=config.run_dir,
        mode="online" if has_key and config.log.wandb != "offline" else "offline",
        server=server,
        began=min([run.began, *(entry["time"] for entry in entries)]),  # run.json of an older version does not tell
        earlier=entries,
    )


def losses_after(step: int, entries: Sequence[dict[str, Any]]) -> dict[int, float]:
    """What was logged beyond `step` before a restart, by step."""
    return {
        row["step"]: row["train/loss"] for row in entries if row["step"] > step and type(row.get("train/loss")) is float
    }


def check_size(shape: GPTConfig, grid: Grid, max_steps: int, world: World) -> None:
    """Raises ValueError for what no machine of this kind holds, such as a mistyped power of ten."""
    host = distributed.memory_bytes(torch.device("cpu")) // world.local_world_size
    device = distributed.memory_bytes(world.device) if world.device.type == "cuda" else host
    cells = len(share(world.rank, world.world_size, grid.cells))
    sizes = {
        # float32 weights, gradients and AdamW's two moments
        f"a model of {shape.num_parameters:,} parameters (model.n_layer={shape.n_layer}, model.n_embd={shape.n_embd}, "
        f"model.block_size={shape.block_size})": (16 * shape.num_parameters, device),
        # ids and targets as int64, of a step and of the next; also the order of the whole step
        f"a batch of train.global_batch_size={grid.global_batch_size}": (
            32 * cells * grid.micro_batch_size * grid.block_size + 64 * grid.global_batch_size,
            host,
        ),
    }
    for what, (needed, there) in sizes.items():
        if needed > there:
            raise ValueError(f"{what} needs {needed / 1e9:,.1f} GB a worker, of {there / 1e9:,.1f} GB: make it smaller")
    if max_steps >= 2**31:
        raise ValueError(f"train.max_epochs comes to {max_steps} steps, more than 2**31 - 1: make it smaller")


def self_check(model: GPT, plan: Plan) -> None:
    """Before anything is spent: raises ValueError where the model sees the future, data leaks or does not suffice."""
    config, grid, val_tokens = plan.config, plan.grid, plan.corpus.tokens[plan.n_train :]
    check_causal(model, model.config.vocab_size, model.config.block_size, next(model.parameters()).device)
    if len(val_tokens) or config.data.val_fraction:
        Validation(val_tokens, config.model.block_size, config.train.micro_batch_size, config.train.eval_sequences)
    for step in (0, plan.max_steps - 1):
        starts = grid.starts(step)
        if starts.min() < 0 or starts.max() + grid.block_size >= grid.n_tokens:
            raise ValueError(f"update {step} would read beyond the {grid.n_tokens} training tokens; report this")


def sample_text(model: GPT, corpus: TokenFile, seed: int) -> str:
    """A short text from an empty prompt; its own generator leaves the training's random numbers alone."""
    tokenizer, device = corpus.tokenizer, next(model.parameters()).device
    prompt = torch.tensor([[tokenizer.start_token]], device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return tokenizer.decode([int(token) for token in model.generate(prompt, SAMPLE_TOKENS, generator=generator)])


def show_start(plan: Plan, run: Run, trainer: Trainer, facts: dict[str, Any]) -> None:
    """What the world is and what it is about to do."""
    config, world, grid, shape, corpus = plan.config, plan.world, plan.grid, plan.shape, plan.corpus
    shares = [len(share(rank, world.world_size, grid.cells)) for rank in range(world.world_size)]
    log.info("run %s (%s), generation %d: %s", config.name, run.run_id, run.generation, distributed.describe(world))
    log.info(
        "device %s, dtype %s, %d CPU thread(s) a rank, %s reduction",
        world.device, plan.description["dtype"], plan.threads, config.train.reduction,
    )  # fmt: skip
    log.info(
        "model %s parameters, %d layers, %d heads, %d wide, block %d, vocabulary %d",
        f"{shape.num_parameters:,}", shape.n_layer, shape.n_head, shape.n_embd, shape.block_size, shape.vocab_size,
    )  # fmt: skip
    log.info(
        "data %s: %s tokens, %s for training, %d windows an epoch", corpus.path, f"{len(corpus.tokens):,}",
        f"{grid.n_tokens:,}", grid.windows,
    )  # fmt: skip
    balance = max(shares) * world.world_size / grid.cells
    log.info(
        "grid %d sequences a step in %d cells of %d, %s tokens a step; %d to %d cells a rank, %.0f %% of the time used",
        grid.global_batch_size, grid.cells, grid.micro_batch_size, f"{grid.tokens_per_step:,}", min(shares),
        max(shares), 100 / balance,
    )  # fmt: skip
    if grid.windows < grid.global_batch_size:
        log.warning("warning: an epoch has %d windows, fewer than a step's %d", grid.windows, grid.global_batch_size)
    for key, (then, now) in facts["changes"].items():
        log.info("changed since the last start: %s was %s, is %s now", key, then, now)
    verb = "going on" if trainer.step else "starting"
    log.info("%s at step %d of %d; snapshots in %s", verb, trainer.step, trainer.max_steps, redact(config.snapshot_uri))


def check_shares(plan: Plan, step: int, book: metrics.Metrics) -> None:
    """Warns where some ranks are idle while others work, of what would use them."""
    whole, ranks = plan.grid.global_batch_size, plan.world.world_size

    def used(micro: int) -> float:
        """The share of the time that the ranks have something to do, in cells of `micro` sequences."""
        cells = whole // micro
        return cells / (ranks * math.ceil(cells / ranks))

    now = used(plan.grid.micro_batch_size)
    sizes = [size for size in range(1, min(plan.grid.micro_batch_size, 10_000) + 1) if whole % size == 0]
    better = max(sizes, key=lambda size: (whole // size >= ranks, round(used(size), 2), size))
    cells = whole // better
    if idle := max(0, ranks - plan.grid.cells):
        book.warn(
            "idle", step,
            f"{idle} of {ranks} ranks have nothing to do; train.micro_batch_size={better} makes {cells} cells for them",
        )  # fmt: skip
    elif now < WORTHWHILE and used(better) > now:
        book.warn(
            "uneven", step,
            f"the ranks wait for each other: {now:.0%} of the time is used, as some have a cell more; "
            f"train.micro_batch_size={better} makes {cells} cells and uses {used(better):.0%}",
        )  # fmt: skip


def show_balance(trainer: Trainer, run: Run, steps_lost: int) -> None:
    """What the run came to, through all its starts, and what it cost."""
    best, ledger = trainer.best_val_loss, trainer.ledger
    log.info("best val loss   %s", "none" if best is None else f"{best:.4f}")
    log.info("goodput         %.1f %% of the %s since it began", 100 * ledger.goodput, duration(ledger.seconds))
    log.info("restarts        %d, %d steps done again", run.generation - 1, steps_lost)


def show_result(config: Config, manifest: Manifest) -> None:
    """Where everything is, and the two sums that tell whether two runs came to the same bits."""
    log.info("weights_sha256  %s", manifest.facts["weights_sha256"])
    log.info("state_sha256    %s", manifest.facts["state_sha256"])
    log.info("snapshot        %s", manifest.image_uri)
    log.info("metrics         %s", config.run_dir / "metrics.jsonl")
    place = redact(config.snapshot.uri or str(config.run_dir))
    log.info("sample from it  python -m mingpt.sample %s", shlex.quote(place))


def digest(*values: object) -> str:
    """A short sha256 of values."""
    return hashlib.sha256("\n".join(map(str, values)).encode()).hexdigest()[:16]


def code_fingerprint() -> str:
    """Of the sources, while they are what was loaded: two ranks of one version but other lines are not alike."""
    files = [*sorted(Path(mingpt.__file__).parent.glob("*.py")), Path(__file__)]
    return digest(*(file.read_text(encoding="utf-8") for file in files))


def report(error: Exception, rank: int) -> int:
    """Tells the user in one line and returns the exit code.

    Rank 0 speaks for all; another rank only where rank 0 did not end the run by then.
    """
    if rank and not isinstance(error, ConnectionError | UnlikeError):
        time.sleep(3)
    problems = error.problems if isinstance(error, ConfigError) else [" ".join(told(error).split())]
    for problem in problems:
        print(f"error: {f'[rank {rank}] ' if rank else ''}{redact(problem)}", file=sys.stderr, flush=True)
    return 2 if isinstance(error, ValueError | FileNotFoundError) else 1


def told(error: Exception) -> str:
    """What an error says; one of the system without its number and the quotes around the file."""
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


def is_meant(error: Exception) -> bool:
    """Whether the error is told by our own lines, or by the system: a defect deserves its traceback."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    ours = Path(mingpt.__file__).parent.resolve(), Path(__file__).resolve()  # not the folder: it may hold a .venv
    return isinstance(error, OSError) or any(raised_in.is_relative_to(place) for place in ours)


def main() -> int:
    rank = distributed.rank()
    metrics.open_console(rank)
    notes = Notes(distributed.launch_folder(), distributed.restart_count())
    argv = [word for word in sys.argv[1:] if word != "--preflight"]
    preflight = len(argv) < len(sys.argv) - 1
    try:
        return train(argv, notes, preflight) or 0
    except (ValueError, OSError, ArithmeticError, TakenOverError) as error:
        if not is_meant(error):
            notes.fail(rank, 1, f"{type(error).__name__}: {error}")
            raise
        code = report(error, rank)
        if preflight:
            return 2  # whatever it is, this node cannot take part now
        if code == 2:
            notes.reject(code, " ".join(told(error).split()))
            distributed.end_agent()
        elif not isinstance(error, ConnectionError):
            notes.fail(rank, code, " ".join(told(error).split()))
        return code
    except Exception as error:
        notes.fail(rank, 1, f"{type(error).__name__}: {error}")
        raise
    except KeyboardInterrupt:  # before the training, which takes it for a wish to stop
        return 130


CODE = code_fingerprint()

if __name__ == "__main__":
    distributed.leave_process(main())
