"""The same training on one process, on two with DDP, and on two to four with FSDP2.

Each strategy continues the checkpoints of the others.

Global batch and data order are the same everywhere, so runs differ by the order of summation only.
Documents have a few or hundreds of tokens, and their first tokens do not count. So ranks and
micro-batches have different numbers of targets. They train like one process with the whole batch.
"""

import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from anlit import TextFiles
from anlit.checkpoints.location import SHARDED
from anlit.cli import main
from tests.integration import conftest
from tests.integration.cases import slow, slow_except
from tests.integration.conftest import (
    Train,
    assert_identical,
    fit_arguments,
    last_checkpoint,
    signal_at,
)
from tests.integration.ranks import BACKGROUND, DDP, FSDP, run_ranks
from tests.integration.run_files import column, file_names

STEPS = 10
SAVED_AT = 7
GLOBAL_BATCH = 12
CLIP = 0.03  # below every gradient norm, so that each step is clipped
LOSS_TOLERANCE = 1e-5
"""Relative. float32 has 1.2e-7, and a loss is a sum of 384 terms, split over ranks. Strategies
differ by 2.5e-7, and the settings that the comparison must tell apart by 8e-4."""
NORM_TOLERANCE = 3e-6  # relative, of the gradient norm after up to 9 earlier steps
WEIGHT_TOLERANCE = 5e-6  # absolute, at a learning rate of 1e-3 and AdamW's eps of 1e-6
MUON = 100
"""Factor of the tolerances with Muon, which orthogonalises in bfloat16."""
MODELS = ["GPT", "NGPT", "AnGPT"]
PART_FILES = [
    "shard-00001-model-00001-of-00001.safetensors",
    "shard-00002-model-00001-of-00001.safetensors",
]


class Way(NamedTuple):
    """The division of a step's sequences."""

    n_ranks: int
    micro_batches: int
    strategy: list[str]


ONE = Way(1, 1, [])
WAYS = {
    "one": ONE,
    "accumulated": Way(1, 6, []),
    "ddp2": Way(2, 2, DDP),
    "fsdp2": Way(2, 2, FSDP),
    "fsdp3": Way(3, 1, FSDP),
    "fsdp4": Way(4, 1, FSDP),
    "hybrid": Way(4, 1, [*FSDP, "--trainer.strategy.replicas=2"]),
    "async2": Way(2, 2, BACKGROUND),
}
TrainWay = Callable[..., Path]


def flags(way: Way) -> list[str]:
    n_ranks, micro_batches, strategy = way
    return [
        f"--data.batch_size={GLOBAL_BATCH // n_ranks // micro_batches}",
        "--data.val_batch_size=1",
        "--trainer.limit_val_batches=1.0",
        "--data.score_first_token=false",
        f"--trainer.gradient_clip_val={CLIP}",
        f"--trainer.accumulate_grad_batches={micro_batches}",
        f"--trainer.max_steps={STEPS}",
        "--model.z_loss=0.01",
        "--trainer.val_check_interval=5",
        "--checkpoint_every_n_steps=1000",
        "--model.optimizer.eps=1e-6",
        *strategy,
    ]


@pytest.fixture(scope="module")
def short_and_long(tmp_path_factory) -> Path:
    """Shards of many documents of a few tokens, and some of hundreds."""
    source = tmp_path_factory.mktemp("source")
    path = tmp_path_factory.mktemp("data") / "shards"
    for number in range(400):
        (source / f"short_{number}.txt").write_text(f"{number}")
    for number in range(12):
        words = [f"{number} {word}" for word in range(200)]
        (source / f"long_{number}.txt").write_text(" ".join(words))
    settings = {
        "pattern": "*.txt",
        "vocab_size": conftest.VOCABULARY,
        "val_fraction": 0.2,
        "path": str(path),
    }
    TextFiles(str(source), **settings).prepare_data()
    return path


@pytest.fixture(scope="module")
def train(short_and_long: Path, trained: Train) -> TrainWay:
    """`train(model, way, more settings)` → run folder; each run is made once."""

    def run(model: str, way: Way = ONE, *extra: str, code: int = 0) -> Path:
        return trained(
            *flags(way), *extra, model=model, n_ranks=way.n_ranks, data=short_and_long, code=code
        )

    return run


def weights(run_dir: Path) -> dict[str, Tensor]:
    return last_checkpoint(run_dir)["state_dict"]


def assert_same_training(run_dir: Path, reference: Path, factor: float = 1.0) -> None:
    """Losses, gradient norms and final weights agree; `factor` widens the tolerances."""
    for name, tolerance in (("train/loss", LOSS_TOLERANCE), ("train/grad_norm", NORM_TOLERANCE)):
        expected = column(reference, name)
        assert len(expected) == STEPS
        assert column(run_dir, name) == pytest.approx(expected, rel=factor * tolerance), name
    losses = column(reference, "val/loss")
    assert len(losses) == 2
    assert column(run_dir, "val/loss") == pytest.approx(losses, rel=factor * LOSS_TOLERANCE)
    torch.testing.assert_close(
        weights(run_dir), weights(reference), rtol=0, atol=factor * WEIGHT_TOLERANCE
    )


def assert_norms_hold(run_dir: Path, model: str) -> None:
    """After every step; nGPT's vectors have norm 1, anGPT's rows at most 1."""
    largest = column(run_dir, "norms/row_max")
    smallest = column(run_dir, "norms/row_min")
    assert len(largest) == len(smallest) == STEPS
    assert largest == pytest.approx([1.0] * STEPS, abs=1e-6)
    assert model == "AnGPT" or smallest == pytest.approx([1.0] * STEPS, abs=1e-6)


FAST_WAYS = [("accumulated", "AnGPT"), ("ddp2", "NGPT"), ("fsdp2", "AnGPT")]
ALL_WAYS = [*itertools.product(("accumulated", "ddp2", "fsdp2", "fsdp4", "hybrid"), MODELS)]


@pytest.mark.parametrize(("way", "model"), slow_except(FAST_WAYS, ALL_WAYS))
def test_every_strategy_trains_alike(train: TrainWay, model: str, way: str) -> None:
    reference = train(model)

    run_dir = train(model, WAYS[way])

    assert min(column(reference, "train/grad_norm")) > 2 * CLIP
    assert_same_training(run_dir, reference)
    if model != "GPT":
        assert_norms_hold(reference, model)
        assert_norms_hold(run_dir, model)
        for name in ("norms/row_min", "scaling/alpha_A", "scaling/alpha_M"):
            assert column(run_dir, name) == pytest.approx(column(reference, name), rel=1e-6)


SGD = (
    "--model.optimizer=torch.optim.SGD",
    "--model.optimizer.lr=5",
    "--model.optimizer.fused=false",
)
MUON_LR = (
    "--model.optimizer=anlit.MuonAdamW",
    "--model.optimizer.lr=0.001",
    "--model.optimizer.embedding_lr=0.002",
    "--model.optimizer.weight_decay=3",
)
CLIPPED = ("--model.qk_norm=false", "--model.qk_clip=0.002")
GATED = ("--model.attention_gate=per_head",)
VARIANTS = {
    "muon": ("AnGPT", "fsdp2", *MUON_LR),
    "muon_ngpt": ("NGPT", "fsdp3", *MUON_LR),  # rows that three ranks share unevenly
    "every_target_counts": ("GPT", "fsdp2", "--data.score_first_token=true"),
    "learned_globally": (
        "GPT",
        "fsdp2",
        "--model.attention=ScaleInvariant",
        "--model.attention.learned=globally",
    ),
    "learned_per_head": (
        "AnGPT",
        "fsdp2",
        "--model.attention=ScaleInvariant",
        "--model.attention.learned=per_head",
    ),
    "shared_keys": (
        "NGPT",
        "fsdp2",
        "--model.n_heads=4",
        "--model.n_kv_heads=1",
        "--model.d_head=12",
    ),
    "qk_clip_shared_keys": (
        "AnGPT",
        "fsdp2",
        *CLIPPED,
        "--model.n_heads=4",
        "--model.n_kv_heads=2",
    ),
    "muon_tied": (
        "GPT",
        "fsdp2",
        *MUON_LR,
        "--model.tie_embeddings=true",
        "--model.runtime.meta_init=true",
    ),
    # two heads on three ranks: a rank holds no row of a gate
    "empty_shards": ("AnGPT", "fsdp3", *CLIPPED, *GATED, *SGD),
    "empty_shards_ngpt": ("NGPT", "fsdp3", CLIPPED[1], *GATED, *SGD),
    "empty_shards_gpt": ("GPT", "fsdp3", *CLIPPED, *GATED, *SGD),
}
FAST = ("muon_tied", "empty_shards", "every_target_counts")


@pytest.mark.parametrize("variant", slow_except(FAST, VARIANTS))
def test_what_steps_do_to_sharded_weights(train: TrainWay, variant: str) -> None:
    model, way, *extra = VARIANTS[variant]
    reference = train(model, ONE, *extra)

    run_dir = train(model, WAYS[way], *extra)

    assert_same_training(run_dir, reference, factor=MUON if "muon" in variant else 1)
    with pytest.raises(AssertionError):  # the setting does something that the comparison can see
        assert_same_training(run_dir, train(model))
    if model != "GPT":
        for name in ("norms/row_max", "norms/row_min"):
            assert column(run_dir, name) == pytest.approx(
                column(reference, name), rel=1e-5, abs=1e-9
            )
    if variant == "muon_tied":  # safetensors refuses tensors that share memory
        state = weights(run_dir)
        assert state["model.head.weight"] is state["model.embedding.weight"]


@slow
@pytest.mark.parametrize(
    ("model", "setting"),
    [
        *itertools.product(MODELS, ["--model.runtime.meta_init=true"]),
        ("AnGPT", "--model.runtime.recompute_every=1"),
    ],
)
def test_weights_drawn_late_and_recomputed_blocks_change_nothing(
    train: TrainWay, model: str, setting: str
) -> None:
    plain = train(model, WAYS["fsdp2"])
    changed = train(model, WAYS["fsdp2"], setting)
    assert column(changed, "train/loss") == column(plain, "train/loss")
    assert_identical(weights(changed), weights(plain), "weights")


@slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile on the CPU needs a C++ compiler"
)
@pytest.mark.parametrize("way", ["one", "ddp2", "fsdp2"])
def test_compiled_blocks_train_alike(train: TrainWay, way: str) -> None:
    """Fused kernels round differently, by more than another order of summation."""
    compiled = train("AnGPT", WAYS[way], "--model.runtime.compile=true")
    assert_same_training(compiled, train("AnGPT"), factor=10)
    assert_norms_hold(compiled, "AnGPT")


def continued(
    shards: Path, run_dir: Path, copy: Path, way: Way, *extra: str, links: bool = True, model: str
) -> Path:
    """A copy of a stopped run, taken to its end."""
    shutil.copytree(run_dir, copy, symlinks=links)
    arguments = fit_arguments(shards, copy, *flags(way), "--ckpt_path=last", *extra, model=model)
    assert run_ranks(arguments, way.n_ranks) == [0] * way.n_ranks
    return copy


def saved(train: TrainWay, way: Way, model: str = "AnGPT", *extra: str) -> Path:
    """A run that stopped after SAVED_AT steps. Several ranks get the signal a step earlier."""
    batch = (SAVED_AT - 1 - (way.n_ranks > 1)) * way.micro_batches
    return train(model, way, *extra, *signal_at("SIGTERM", batch), code=75)


FAST_MATRIX = [("AnGPT", "fsdp2", "one"), ("AnGPT", "one", "fsdp2")]
CONTINUING = ("one", "ddp2", "fsdp2")
MATRIX = [
    *itertools.product(["AnGPT"], ("one", "ddp2", "fsdp2", "fsdp4"), CONTINUING),
    ("AnGPT", "async2", "one"),
    ("AnGPT", "fsdp2", "async2"),
    ("AnGPT", "fsdp2", "fsdp4"),
    *itertools.product(("GPT", "NGPT", "muon"), ["fsdp2"], ["one"]),
    *itertools.product(("GPT", "NGPT", "muon"), ["one"], ["fsdp2"]),
]


@pytest.mark.parametrize(
    ("model", "saving_way", "continuing_way"), slow_except(FAST_MATRIX, MATRIX)
)
def test_saved_there_continued_here(
    short_and_long: Path,
    tmp_path: Path,
    train: TrainWay,
    model: str,
    saving_way: str,
    continuing_way: str,
) -> None:
    extra: tuple[str, ...] = ()
    factor = 1
    if model == "muon":
        model = "AnGPT"
        extra = MUON_LR
        factor = MUON
    run_dir = saved(train, WAYS[saving_way], model, *extra)
    assert last_checkpoint(run_dir)["global_step"] == SAVED_AT
    run_dir = continued(
        short_and_long, run_dir, tmp_path / "copy", WAYS[continuing_way], *extra, model=model
    )
    assert_same_training(run_dir, train(model, ONE, *extra), factor)
    assert last_checkpoint(run_dir)["global_step"] == STEPS


SHIPPED = Way(
    2,
    2,
    [
        "--config=trainer/fsdp.yaml",
        "--trainer.accelerator=cpu",
        "--trainer.precision=32-true",
        "--trainer.strategy.process_group_backend=gloo",
        f"--trainer.max_steps={STEPS}",
        "--trainer.val_check_interval=5",
    ],
)
"""The configuration for many GPUs, on a CPU. Weights are drawn late, checkpoints written aside."""
EMA = ("--config=trainer/ema.yaml", "--trainer.callbacks.decay=0.8")


@pytest.mark.parametrize("model", slow_except(["AnGPT"], MODELS))
def test_the_shipped_configuration_averages_weights_and_continues_like_one_process(
    short_and_long: Path, tmp_path: Path, train: TrainWay, model: str
) -> None:
    reference = train(model, ONE, *EMA)
    stopped = saved(train, SHIPPED, model, *EMA)

    run_dir = continued(short_and_long, stopped, tmp_path / "copy", SHIPPED, *EMA, model=model)

    assert_same_training(run_dir, reference)
    current = last_checkpoint(run_dir)["current_model_state"]
    expected = last_checkpoint(reference)["current_model_state"]
    torch.testing.assert_close(current, expected, rtol=0, atol=WEIGHT_TOLERANCE)
    with pytest.raises(AssertionError):  # averages differ from the weights
        assert_same_training(run_dir, train(model))
    if model != "GPT":
        assert_norms_hold(run_dir, model)


def test_written_in_the_background_is_the_same(train: TrainWay) -> None:
    """Each name has its folder, and replaced folders are gone."""
    direct = saved(train, WAYS["fsdp2"])
    later = saved(train, WAYS["async2"])

    first = last_checkpoint(direct)
    second = last_checkpoint(later)
    conftest.assert_same_training_state(first, second)
    assert_identical(first["loops"], second["loops"], "loops")
    for run_dir in (direct, later):
        folder = run_dir / "checkpoints"
        assert file_names(folder / "last.ckpt") == {"meta.pt", "sums.json", *PART_FILES}
        assert file_names(folder) == {SHARDED, "best.ckpt", "last.ckpt"}
        targets = {(folder / "best.ckpt").resolve(), (folder / "last.ckpt").resolve()}
        assert {path.resolve() for path in (folder / SHARDED).iterdir()} == targets


def test_validate_reads_parts_on_one_process(train: TrainWay, capfd) -> None:
    run_dir = train("AnGPT", WAYS["fsdp2"])
    arguments = [
        "validate",
        f"--config={run_dir}/config.yaml",
        f"--ckpt_path={run_dir}/checkpoints/last.ckpt",
        "--data.batch_size=1",
        "--trainer.strategy=auto",
        "--trainer.devices=1",
    ]
    capfd.readouterr()

    assert main(arguments) == 0

    (printed,) = re.findall(r"val/loss\D+([\d.]+)", capfd.readouterr().out)
    assert float(printed) == pytest.approx(column(run_dir, "val/loss")[-1], rel=1e-5)


@slow
def test_a_copy_without_links_goes_on(
    short_and_long: Path, tmp_path: Path, train: TrainWay
) -> None:
    """Such as a copy from a bucket or by `cp -L`. Its folders make way for links."""
    fsdp = WAYS["fsdp2"]
    run_dir = continued(
        short_and_long, saved(train, fsdp), tmp_path / "copy", fsdp, links=False, model="AnGPT"
    )
    assert_identical(weights(run_dir), weights(train("AnGPT", fsdp)), "weights")
    assert (run_dir / "checkpoints" / "last.ckpt").is_symlink()
