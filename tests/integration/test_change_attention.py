"""A trained run's attention is changed from the command line, trained on, resumed and evaluated."""

from pathlib import Path

import pytest
import torch

from anlit import load_checkpoint
from anlit.cli import main
from tests.integration.conftest import assert_same_training_state, fit_arguments, last_checkpoint

WARM = [
    "--model.attention=WarmStart", "--model.attention.mechanism=ScaleInvariant",
    "--model.attention.mechanism.tau=4", "--model.attention.steps=6", "--trainer.max_steps=8",
    "--checkpoint_every_n_steps=4", "--trainer.val_check_interval=4",
]  # fmt: skip


def test_plain_attention_becomes_scale_invariant_over_steps_and_a_resume(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ["--trainer.max_steps=4", "--checkpoint_every_n_steps=4", "--trainer.val_check_interval=4"]
    assert main(fit_arguments(shards, tmp_path / "plain", *first, model="GPT")) == 0
    weights = f"--initial_weights={tmp_path / 'plain' / 'checkpoints' / 'last.ckpt'}"
    assert main(fit_arguments(shards, tmp_path / "whole", *WARM, weights, model="GPT")) == 0
    half = [*WARM, weights, "--trainer.limit_train_batches=4"]
    assert main(fit_arguments(shards, tmp_path / "halves", *half, "--trainer.max_epochs=1", model="GPT")) == 0
    assert last_checkpoint(tmp_path / "halves")["global_step"] == 4
    share = "model.blocks.1.attention.mechanism.share"
    assert last_checkpoint(tmp_path / "halves")["state_dict"][share] == pytest.approx(4 / 6)
    assert main(fit_arguments(shards, tmp_path / "halves", *WARM, weights, "--ckpt_path=last", model="GPT")) == 0
    assert_same_training_state(last_checkpoint(tmp_path / "whole"), last_checkpoint(tmp_path / "halves"))
    assert last_checkpoint(tmp_path / "whole")["state_dict"][share] == 1

    capsys.readouterr()
    lengths = ["lengths", str(tmp_path / "plain"), str(tmp_path / "whole"), "--tokens=512", "--device=cpu"]
    assert main([*lengths, f"--output={tmp_path / 'lengths'}"]) == 0
    assert "scale-invariant" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "whole"), f"--output={tmp_path / 'exported'}"]) == 0
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        before, after = (load_checkpoint(tmp_path / name).model(tokens) for name in ("whole", "exported"))
    assert torch.allclose(before, after, atol=1e-5)
