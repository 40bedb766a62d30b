"""Cases of runs: killed, continued, damaged, on several ranks, and by numbers that are none; letters E to M, and N."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tests.integration.conftest import (
    assert_same_training_state,
    fit_arguments,
    last_checkpoint,
    run,
    start,
    steps_logged,
)
from tests.integration.ranks import DDP, FSDP, run_ranks
from tests.integration.test_accumulation import accumulating, killed_at
from tests.integration.test_damaged_checkpoints import cut, flip
from tests.integration.test_empty_shards import GATED
from tests.integration.test_full_disk import BACKGROUND
from tests.integration.test_full_disk import arguments as on_full_disk
from tests.integration.test_metrics_on_resume import rows_of
from tests.integration.test_non_finite import poisoned
from tests.integration.test_strategies import assert_same_training
from tests.trust.place import NOTHING, Case, Outcome, Place

LAST = "--ckpt_path=last"


def killed_while_accumulating(place: Place) -> Outcome:
    """Micro-batches of which validation's interval is no multiple."""
    whole, parts = place.folder / "whole", place.folder / "parts"
    run(accumulating(place.shards, whole, 3))
    run(accumulating(place.shards, parts, 3, *killed_at(25)))
    saved = last_checkpoint(parts)["global_step"]

    def state() -> str:
        assert_same_training_state(last_checkpoint(whole), last_checkpoint(parts))
        return f"saved after step {saved}; weights, optimizer and random state as without the kill, to the bit"

    return place.command(*accumulating(place.shards, parts, 3, LAST), state=state)


def tiny(place: Place, run_dir: Path, *extra: str, model: str = "AnGPT") -> list[str]:
    """Six steps of two sequences."""
    own = ["--trainer.max_steps=6", "--trainer.val_check_interval=6", "--data.batch_size=2"]
    return fit_arguments(place.shards, run_dir, *own, *extra, model=model)


def more_ranks_than_heads(place: Place) -> Outcome:
    arguments = tiny(place, place.folder / "new", *GATED, *FSDP)
    return place.ranks(arguments, 3, lambda: place.status(place.folder / "new"))


def full_disk(place: Place, strategy: list[str], ranks: int) -> Outcome:
    new = place.folder / "new"
    rank = f"--trainer.callbacks.rank={ranks - 1}"
    return place.ranks(on_full_disk(place.shards, new, strategy, rank), ranks, lambda: place.status(new))


def documents_of_different_lengths(place: Place) -> Outcome:
    """One process with batches of 8 beside two with micro-batches of 2."""
    settings = ["--data.score_first_token=false", "--trainer.gradient_clip_val=0.03", "--trainer.limit_val_batches=1.0",
                "--data.val_batch_size=1"]  # fmt: skip
    alone, both = place.folder / "alone", place.folder / "both"
    assert run_ranks(tiny(place, alone, *settings, "--data.batch_size=8"), 1) == [0]
    accumulated = ["--trainer.accumulate_grad_batches=2", *DDP]

    def state() -> str:
        assert_same_training(both, alone)
        return "losses and weights as of one process with one batch"

    return place.ranks(tiny(place, both, *settings, *accumulated), 2, state)


def bad_gradient(place: Place, value: str) -> Outcome:
    new = place.folder / "new"

    def state() -> str:
        contents = [torch.load(new / "checkpoints" / f"{name}.ckpt", weights_only=True) for name in ("last", "best")]
        finite = all(torch.isfinite(one).all() for content in contents for one in content["state_dict"].values())
        return f"{place.status(new)}, {'all' if finite else 'not all'} of last.ckpt and best.ckpt finite"

    return place.command(*poisoned(place.shards, new, 9, f"--trainer.callbacks.value={value}"), state=state)


def continued(place: Place, *changed: str) -> Outcome:
    return place.command(*place.fit(LAST, *changed))


def taken(place: Place) -> Outcome:
    changed = ["--model.optimizer.lr=0.01", "--model.optimizer.weight_decay=0.2"]
    return place.command(*place.fit(LAST, *changed), state=place.status)


def without_last(place: Place) -> Outcome:
    place.checkpoint.unlink()
    return continued(place)


def damaged(place: Place, damage: Callable[[Path], object], name: str = "fit") -> Outcome:
    damage(place.checkpoint)
    if name == "fit":
        return continued(place)
    return place.command("validate", f"--config={place.run}/config.yaml", f"--ckpt_path={place.checkpoint}")


def damaged_part(place: Place) -> Outcome:
    """A sharded checkpoint."""
    new = place.folder / "new"
    arguments = tiny(place, new, *FSDP)
    assert run_ranks(arguments, 2) == [0, 0]
    flip((new / "checkpoints" / "last.ckpt").resolve() / "shard-00002-model-00001-of-00001.safetensors")
    return place.command(*arguments, LAST)


def second_run(place: Place) -> Outcome:
    new = place.folder / "new"
    arguments = tiny(place, new, LAST, "--trainer.max_steps=100000")
    first = start(arguments)
    while steps_logged(new) < 3:
        assert first.is_alive()
        time.sleep(0.01)

    def state() -> str:
        alive = first.is_alive()
        os.kill(first.pid or 0, signal.SIGKILL)
        first.join()
        return f"the first goes on: {'yes' if alive else 'no'}"

    return place.command(*arguments, state=state)


def killed_and_logged(place: Place) -> Outcome:
    whole, parts = place.folder / "whole", place.folder / "parts"
    more = ["--checkpoint_every_n_steps=4"]
    run(accumulating(place.shards, whole, 1, *more))
    run(accumulating(place.shards, parts, 1, *more, *killed_at(10)))

    def state() -> str:
        assert rows_of(whole) == rows_of(parts)
        return "metrics.csv has each step once"

    return place.command(*accumulating(place.shards, parts, 1, *more, LAST), state=state)


def in_precision(place: Place, precision: str) -> Outcome:
    shutil.rmtree(place.run)
    arguments = tiny(place, place.run, f"--trainer.precision={precision}", model="GPT")
    return place.command(*arguments, state=lambda: (
        place.status() if (place.run / "checkpoints").exists() else "no checkpoint"
    ))  # fmt: skip


WHOLE = "run.json: failed, last.ckpt of step 8"
OTHER = r"was trained with other settings \({}"
DAMAGED = r"last.ckpt is damaged \(.*: continue with --ckpt_path .*best.ckpt"
CASES = [
    Case("E", "continue a run with accumulate_grad_batches=3, val_check_interval=5 that was killed within a step",
         killed_while_accumulating, "0", "",
         "saved after step 5; weights, optimizer and random state as without the kill, to the bit"),
    Case("F", "fit anGPT with a gate per head, 2 heads on 3 ranks of FSDP", more_ranks_than_heads,
         "0, 0, 0", "", "run.json: finished, last.ckpt of step 6"),
    Case("G", "fit under FSDP on 2 ranks, checkpoints in the background, the disk of rank 1 full",
         partial(full_disk, strategy=BACKGROUND, ranks=2), "1, 1", "last.ckpt could not be written", WHOLE),
    Case("H", "fit under DDP on 2 ranks, 2 micro-batches, documents that count different numbers of tokens",
         documents_of_different_lengths, "0, 0", "",
         "losses and weights as of one process with one batch"),
    *[Case("I", f"fit with a gradient of {words} at step 10", partial(bad_gradient, value=value), "2",
           "the gradient became NaN or infinite at step 10.*the last good checkpoint is",
           "run.json: failed, last.ckpt of step 5, all of last.ckpt and best.ckpt finite")
      for words, value in (("NaN", ".nan"), ("∞", ".inf"))],
    Case("J", "continue with another learning rate and weight decay", taken, "0",
         "Continued with changed settings.*model.optimizer.lr 0.001 → 0.01",
         "run.json: finished, last.ckpt of step 4"),
    *[Case("J", f"continue with {option}", lambda place, option=option: continued(place, option),
           "2", OTHER.format(key), NOTHING)
      for option, key in (("--model.n_heads=4", "model.n_heads 2 → 4"), ("--model.attention=LogN", "model.attention"),
                          ("--model.positions.base=500", "model.positions.base"),
                          ("--model.d_model=32", "model.d_model"),
                          ("--model.optimizer=torch.optim.SGD", "model.optimizer AdamW → SGD"))],
    Case("K", "continue with --ckpt_path last, last.ckpt lost", without_last, "2",
         "ckpt_path=last finds no .*last.ckpt in .*best.ckpt", NOTHING),
    *[Case("L", f"continue from a last.ckpt that is {words}", partial(damaged, damage=damage), "2", DAMAGED, NOTHING)
      for words, damage in (("changed by one bit", flip), ("cut short", cut),
                            ("empty", lambda path: path.write_bytes(b"")))],
    Case("L", "validate a last.ckpt that is changed by one bit", partial(damaged, damage=flip, name="validate"),
         "2", DAMAGED, NOTHING),
    Case("L", "continue from a sharded checkpoint with one changed bit in a part", damaged_part, "2", DAMAGED, NOTHING),
    Case("M", "fit in the folder of a run that is going on", second_run, "2", "is being trained in by process",
         "the first goes on: yes"),
    Case("N", "fit GPT+ with precision bf16-true on CPU", partial(in_precision, precision="bf16-true"),
         "0", "", "run.json: finished, last.ckpt of step 6"),
    Case("N", "fit GPT+ with precision 16-true", partial(in_precision, precision="16-true"),
         "2", "trainer.precision=16-true trains in float16 alone", "no checkpoint"),
    Case("N", "fit, the disk full while a checkpoint is saved", partial(full_disk, strategy=[], ranks=1),
         "1", "last.ckpt could not be written", WHOLE),
    Case("N", "continue a run that was killed between two checkpoints", killed_and_logged, "0",
         "", "metrics.csv has each step once"),
]  # fmt: skip
