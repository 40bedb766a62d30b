"""The same training on one process, two with DDP, and two or four with FSDP2: losses, gradient norms, weights, norms.

Global batch, accumulation and data order are the same everywhere, so runs differ by the order of summation only.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anlit.checkpoints.checkpoint_io import read_checkpoint
from tests.integration.conftest import fit_arguments
from tests.integration.ranks import DDP, FSDP, column, run_ranks

STEPS = 20
GLOBAL_BATCH = 8
CLIP = 0.03
"""Far below every gradient norm of these runs: each step is clipped."""
LOSS_TOLERANCE = 1e-6
"""Relative; float32 has 1.2e-7, and a loss is a sum of 256 terms of which ranks add parts."""
NORM_TOLERANCE = 3e-6
"""Relative, of the gradient norm after up to 19 earlier steps."""
WEIGHT_TOLERANCE = 5e-6
"""Absolute, at a learning rate of 1e-3: AdamW divides by |g|, so rounding in a tiny gradient shows whole."""
MUON = 100
"""How much wider with Muon, which orthogonalises in bfloat16: a gradient's last bit can show in its third digit."""
MODELS = ["GPT", "NGPT", "AnGPT"]

Train = Callable[..., Path]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def train(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`train(model, ranks, strategy flags, more settings)` → run folder; each run is made once."""
    made: dict[tuple, Path] = {}

    def run(model: str, n_ranks: int = 1, strategy: list[str] | None = None, *extra: str, steps: int = STEPS) -> Path:
        key = (model, n_ranks, tuple(strategy or ()), extra, steps)
        if key not in made:
            run_dir = tmp_path_factory.mktemp("run")
            arguments = fit_arguments(
                shards, run_dir, f"--data.batch_size={GLOBAL_BATCH // n_ranks}", f"--trainer.max_steps={steps}",
                "--trainer.accumulate_grad_batches=2", f"--trainer.gradient_clip_val={CLIP}",
                "--trainer.val_check_interval=12", "--checkpoint_every_n_steps=1000", *(strategy or ()), *extra,
                model=model,
            )  # fmt: skip
            assert run_ranks(arguments, n_ranks) == [0] * n_ranks
            made[key] = run_dir
        return made[key]

    return run


def weights(run_dir: Path) -> dict[str, Tensor]:
    return read_checkpoint(run_dir / "checkpoints" / "last.ckpt")["state_dict"]


def largest_difference(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def assert_same_training(run_dir: Path, reference: Path, factor: float = 1.0) -> None:
    """Losses, gradient norms and final weights agree; `factor` widens the tolerances."""
    for name, tolerance in (("train/loss", LOSS_TOLERANCE), ("train/grad_norm", NORM_TOLERANCE)):
        here, there = (torch.tensor(column(run, name), dtype=torch.float64) for run in (run_dir, reference))
        assert len(here) == len(there) >= 1
        assert (here / there - 1).abs().max() < factor * tolerance, name
    assert column(run_dir, "val/loss") == pytest.approx(column(reference, "val/loss"), rel=factor * LOSS_TOLERANCE)
    assert largest_difference(weights(run_dir), weights(reference)) < factor * WEIGHT_TOLERANCE


def assert_norms_hold(run_dir: Path, model: str) -> None:
    """After every step; nGPT's vectors have norm 1, anGPT's rows at most 1."""
    largest, smallest = column(run_dir, "norms/row_max"), column(run_dir, "norms/row_min")
    assert len(largest) == len(smallest) == STEPS
    assert largest == pytest.approx([1.0] * STEPS, abs=1e-6)
    assert model == "AnGPT" or smallest == pytest.approx([1.0] * STEPS, abs=1e-6)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("n_ranks", "strategy"),
    [pytest.param(2, DDP, id="ddp2"), pytest.param(2, FSDP, id="fsdp2"), pytest.param(4, FSDP, id="fsdp4", marks=slow)],
)
@pytest.mark.covering(1)
def test_every_strategy_trains_alike(train: Train, model: str, n_ranks: int, strategy: list[str]) -> None:
    reference, run_dir = train(model), train(model, n_ranks, strategy)
    assert min(column(reference, "train/grad_norm")) > 2 * CLIP
    assert len(column(run_dir, "train/loss")) == STEPS
    assert_same_training(run_dir, reference)
    if model != "GPT":
        assert_norms_hold(reference, model)
        assert_norms_hold(run_dir, model)
        assert column(run_dir, "norms/row_min") == pytest.approx(column(reference, "norms/row_min"), rel=1e-6)


VARIANTS = {
    "sgd": ("AnGPT", "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=5", "--model.optimizer.fused=false"),
    "muon": ("AnGPT", "--model.optimizer=anlit.MuonAdamW", "--model.optimizer.embedding_lr=0.002"),
    "muon_ngpt": ("NGPT", "--model.optimizer=anlit.MuonAdamW", "--model.optimizer.embedding_lr=0.002"),
    "learned_globally": ("GPT", "--model.attention=ScaleInvariant", "--model.attention.learned=globally"),
    "learned_per_head": ("AnGPT", "--model.attention=ScaleInvariant", "--model.attention.learned=per_head"),
    "qk_clip": ("GPT", "--model.qk_norm=false", "--model.qk_clip=0.002"),
    "qk_clip_ngpt": ("NGPT", "--model.qk_clip=0.002"),
    "qk_clip_angpt": ("AnGPT", "--model.qk_norm=false", "--model.qk_clip=0.002"),
    "gated": ("NGPT", "--model.attention_gate=per_head"),
    "shared_keys": ("NGPT", "--model.n_heads=4", "--model.n_kv_heads=1", "--model.d_head=12"),
    "qk_clip_shared_keys": (
        "AnGPT",
        "--model.qk_norm=false",
        "--model.qk_clip=0.002",
        "--model.n_heads=4",
        "--model.n_kv_heads=2",
    ),
    "tied": ("GPT", "--model.tie_embeddings=true", "--model.runtime.meta_init=true"),
}
FAST = ("muon_ngpt",)


@pytest.mark.parametrize("variant", [name if name in FAST else pytest.param(name, marks=slow) for name in VARIANTS])
def test_what_steps_do_to_sharded_weights(train: Train, variant: str) -> None:
    model, *extra = VARIANTS[variant]
    reference, run_dir = train(model, 1, None, *extra), train(model, 2, FSDP, *extra)
    assert_same_training(run_dir, reference, factor=MUON if "muon" in variant else 1)
    with pytest.raises(AssertionError):  # the setting does something that the comparison can see
        assert_same_training(run_dir, train(model))


@slow
@pytest.mark.parametrize("model", MODELS)
def test_weights_drawn_late_are_the_same(train: Train, model: str) -> None:
    late = train(model, 2, FSDP, "--model.runtime.meta_init=true")
    early = train(model, 2, FSDP)
    assert column(late, "train/loss") == column(early, "train/loss")
    assert largest_difference(weights(late), weights(early)) == 0


@slow
def test_recomputed_blocks_change_nothing(train: Train) -> None:
    recomputed = train("AnGPT", 2, FSDP, "--model.runtime.recompute_every=1")
    assert column(recomputed, "train/loss") == column(train("AnGPT", 2, FSDP), "train/loss")
    assert largest_difference(weights(recomputed), weights(train("AnGPT", 2, FSDP))) == 0


@slow
def test_gathering_in_bfloat16_stays_near(train: Train) -> None:
    rounded = column(train("AnGPT", 2, [*FSDP, "--trainer.strategy.gather_dtype=bfloat16"]), "train/loss")
    exact = column(train("AnGPT"), "train/loss")
    assert rounded == pytest.approx(exact, rel=2e-3)
    assert rounded != pytest.approx(exact, rel=LOSS_TOLERANCE)


@slow
@pytest.mark.parametrize("model", MODELS)
def test_two_copies_of_two_shards(train: Train, model: str) -> None:
    assert_same_training(train(model, 4, [*FSDP, "--trainer.strategy.replicas=2"]), train(model))


@slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs a C++ compiler")
@pytest.mark.parametrize(("n_ranks", "strategy"), [(1, []), (2, DDP), (2, FSDP)], ids=["one", "ddp2", "fsdp2"])
def test_compiled_blocks_train_alike(train: Train, n_ranks: int, strategy: list[str]) -> None:
    """Fused kernels round differently, by more than another order of summation."""
    compiled = train("AnGPT", n_ranks, strategy, "--model.runtime.compile=true")
    assert weights(compiled).keys() == weights(train("AnGPT")).keys()
    assert_same_training(compiled, train("AnGPT"), factor=10)
    assert_norms_hold(compiled, "AnGPT")


def test_replicas_must_divide_the_ranks(shards: Path, tmp_path: Path) -> None:
    arguments = fit_arguments(shards, tmp_path / "run", *FSDP, "--trainer.strategy.replicas=3")
    assert run_ranks(arguments, 2) == [2, 2]
