"""A run continued with other settings: another model is refused, other changes are printed."""

import shutil
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from anlit.cli import main
from anlit.nn.models import decoder
from anlit.training.optim.schedule import Cosine
from tests.integration.cases import slow_cases
from tests.integration.conftest import Train, fit_arguments, last_checkpoint
from tests.integration.ranks import FSDP, run_ranks
from tests.integration.run_files import (
    column,
    contents,
    lines_with,
    model_settings_of,
    record_of,
    values,
)

STEPS, LONGER = 12, 20
PARTS = ("--model.attention=Plain", "--model.positions=RoPE")
SGD = ["--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1"]


@pytest.fixture
def run_dir(tmp_path: Path, trained: Train) -> Path:
    return shutil.copytree(trained(f"--trainer.max_steps={STEPS}", *PARTS), tmp_path / "run")


def continued(shards: Path, run_dir: Path, *changed: str) -> list[str]:
    return fit_arguments(
        shards, run_dir, f"--trainer.max_steps={LONGER}", "--ckpt_path=last", *PARTS, *changed
    )


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        (["--model.attention=LogN"], "model.attention Plain → LogN"),
        (["--model.positions.base=500"], "model.positions.base 10000.0 → 500.0"),
        (
            ["--model.d_model=64", "--model.n_layers=3"],
            f"model.n_layers 2 → 3, model.d_model 32 → 64, model.alpha_init {1 / 4} → {1 / 6}",
        ),
        (SGD, "model.optimizer AdamW → SGD"),
        (["--seed_everything=5"], "seed_everything 1 → 5"),
        (["--data.val_blocks=2"], "data.val_blocks None → 2"),
        (["--trainer.limit_val_batches=3"], "trainer.limit_val_batches 2 → 3"),
    ],
)
def test_another_model_is_refused_in_one_sentence(
    shards: Path, run_dir: Path, changed: list, difference: str, refusal
):
    contents_before = contents(run_dir)

    error = refusal(*continued(shards, run_dir, *changed))

    assert f"was trained with other settings ({difference})" in error
    assert "--accept_changes true" in error
    contents_after = contents(run_dir)
    for name in ("config.yaml", "run.json", "metrics.csv", "checkpoints/last.ckpt"):
        assert contents_after[run_dir / name] == contents_before[run_dir / name]


def test_weights_that_do_not_fit_are_refused_even_if_accepted(
    shards: Path, run_dir: Path, refusal
) -> None:
    error = refusal(*continued(shards, run_dir, "--model.d_model=64", "--accept_changes=true"))
    assert "does not fit the model (" in error


def evaluated(run_dir: Path, command: str, *changed: str) -> list[str]:
    return [command, f"--config={run_dir}/config.yaml", *changed]


@pytest.mark.parametrize("command", ["validate", "test"])
@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        (["--model.attention=LogN"], "model.attention Plain → LogN"),
        (["--model.positions.base=500"], "model.positions.base 10000.0 → 500.0"),
        (["--model.n_heads=4"], "model.n_heads 2 → 4"),
        (["--model.d_model=64"], "model.d_model 32 → 64"),
        (["--model.document_masking=false"], "model.document_masking True → False"),
    ],
)
@pytest.mark.covering(1)
def test_another_model_is_not_evaluated(
    run_dir: Path, command: str, changed: list, difference: str, refusal
) -> None:
    error = refusal(*evaluated(run_dir, command, *changed))
    assert f"was trained with other settings ({difference})" in error
    assert "--accept_changes true" in error


def test_another_model_is_evaluated_when_told_and_other_data_in_any_case(run_dir: Path) -> None:
    told = ["--model.n_heads=4", "--accept_changes=true"]
    assert main(evaluated(run_dir, "validate", *told)) == 0
    free = ["--data.val_blocks=4", "--model.optimizer.lr=1", "--trainer.precision=bf16-true"]
    assert main(evaluated(run_dir, "validate", *free)) == 0


def test_weights_that_do_not_fit_are_not_evaluated_even_if_accepted(run_dir: Path, refusal) -> None:
    told = ["--model.d_model=64", "--accept_changes=true"]
    assert "does not fit the model (" in refusal(*evaluated(run_dir, "validate", *told))


def test_an_evaluation_draws_no_matrix_and_needs_all_of_them_in_the_checkpoint(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, refusal
) -> None:
    def fill(weight: torch.Tensor, draw: object) -> NoReturn:
        raise AssertionError("a matrix is drawn")

    monkeypatch.setattr(decoder, "fill", fill)
    assert main(evaluated(run_dir, "validate")) == 0
    file = run_dir / "checkpoints" / "best.ckpt"
    content = torch.load(file, weights_only=True)
    del content["state_dict"]["model.blocks.1.W_o.weight"]
    torch.save(content, file)

    error = refusal(*evaluated(run_dir, "validate"))

    assert "does not fit the model (model.blocks.1.W_o.weight is missing in it" in error


def test_a_longer_run_says_how_the_rate_of_its_next_step_changes(
    shards: Path, run_dir: Path, caplog
) -> None:
    rate_before = 0.001 * Cosine().factor(STEPS, STEPS)
    rate_after = 0.001 * Cosine().factor(STEPS, LONGER)
    assert main(continued(shards, run_dir)) == 0
    (line,) = lines_with("\n".join(caplog.messages), "The learning rate of step")
    assert f"step {STEPS + 1} is {rate_after:.3g}" in line
    assert f"would be {rate_before:.3g}" in line
    assert column(run_dir, "train/learning_rate")[STEPS] == pytest.approx(rate_after)


def test_a_new_run_from_weights_says_in_what_its_model_differs(
    shards: Path, run_dir: Path, tmp_path: Path, caplog
) -> None:
    flags = [*PARTS, "--trainer.max_steps=2", f"--initial_weights={run_dir}"]
    changed = "--model.positions.base=500"
    assert main(fit_arguments(shards, tmp_path / "new", *flags, changed)) == 0
    (line,) = lines_with("\n".join(caplog.messages), "initial_weights=")
    assert line.endswith("the new ones are used: model.positions.base 10000.0 → 500.0")


def test_a_class_under_its_full_path_is_no_other_setting(
    shards: Path, run_dir: Path, tmp_path: Path, caplog
) -> None:
    """As `anlit import` and models that were built in Python record it."""
    full = "--model.positions=anlit.nn.layers.positions.RoPE"
    assert main(continued(shards, run_dir, full)) == 0
    flags = ["--model.attention=Plain", full, "--trainer.max_steps=2"]
    begun = fit_arguments(shards, tmp_path / "new", *flags, f"--initial_weights={run_dir}")
    assert main(begun) == 0
    assert "RoPE →" not in caplog.text


def assert_rate(run_dir: Path, peak: float) -> None:
    """The rate of the further steps follows the schedule to this peak."""
    rates = column(run_dir, "train/learning_rate")
    assert len(rates) == LONGER
    for step in range(STEPS, LONGER):
        assert rates[step] == pytest.approx(peak * Cosine().factor(step, LONGER))


CHANGED = [
    "--model.optimizer.lr=0.01",
    "--model.optimizer.weight_decay=0.2",
    "--model.optimizer.betas=[0.8, 0.9]",
    "--data.batch_size=2",
]


def assert_changed_rates(run_dir: Path) -> None:
    """The settings of `CHANGED` are used and recorded."""
    settings = model_settings_of(run_dir)["optimizer"]["init_args"]
    assert_rate(run_dir, 0.01)
    assert settings["lr"] == 0.01
    assert settings["weight_decay"] == 0.2
    assert settings["betas"] == [0.8, 0.9]


def test_changed_rates_are_taken_and_said(shards: Path, run_dir: Path, caplog) -> None:
    assert main(continued(shards, run_dir, *CHANGED)) == 0

    assert_changed_rates(run_dir)
    (line,) = lines_with("\n".join(caplog.messages), "Continued with changed settings")
    for change in (
        "model.optimizer.lr 0.001 → 0.01",
        "model.optimizer.betas [0.9, 0.95] → [0.8, 0.9]",
        "model.optimizer.weight_decay 0.0 → 0.2",
        f"trainer.max_steps {STEPS} → {LONGER}",
        "data.batch_size 4 → 2",
    ):
        assert change in line
    first, second = record_of(run_dir)["launches"]
    assert first["changed"] == []
    assert second["step"] == STEPS
    assert ", ".join(second["changed"]) == line.partition(": ")[2]
    groups = last_checkpoint(run_dir)["optimizer_states"][0]["param_groups"]
    assert values(groups, "weight_decay") == [0.2, 0.2, 0.2, 0.0]
    for betas in values(groups, "betas"):
        assert [*betas] == [0.8, 0.9]


@pytest.mark.slow
def test_changed_rates_are_taken_on_two_ranks(shards: Path, run_dir: Path) -> None:
    assert run_ranks(continued(shards, run_dir, *CHANGED, *FSDP), 2) == [0, 0]

    assert_changed_rates(run_dir)


@pytest.mark.parametrize("n_ranks", [1, *slow_cases([2])])
def test_another_optimizer_and_other_heads_are_taken_when_told(
    shards: Path, run_dir: Path, n_ranks: int
) -> None:
    """The optimizer begins without a state; weights, step and data go on."""
    changed = [*SGD, "--model.optimizer.fused=false", "--model.n_heads=4", "--accept_changes=true"]
    strategy = FSDP if n_ranks > 1 else []

    assert run_ranks(continued(shards, run_dir, *changed, *strategy), n_ranks) == [0] * n_ranks

    assert len(column(run_dir, "train/loss")) == LONGER
    assert_rate(run_dir, 0.1)
    assert last_checkpoint(run_dir)["hyper_parameters"]["n_heads"] == 4
