"""A run that starts from an imported model: killed and continued as if nothing had happened, and out again."""

import signal
from pathlib import Path

import pytest
import torch

from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from tests.inference.huggingface_folders import read
from tests.inference.published import published
from tests.integration.conftest import VOCABULARY, assert_same_training_state, last_checkpoint, run
from tests.integration.test_resume import stop_at


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    published("Llama-3.2-1B", folder / "theirs", vocab_size=VOCABULARY)
    assert main(["import", str(folder / "theirs"), "--output", str(folder / "ours")]) == 0
    return folder / "ours"


def going_on(imported: Path, shards: Path, run_dir: Path, *extra: str) -> list[str]:
    return [
        "fit", f"--config={imported}/model.yaml", f"--initial_weights={imported}", "--model.context_length=32",
        "--data=TokenShards", f"--data.path={shards}", "--data.batch_size=4", "--trainer.accelerator=cpu",
        "--trainer.max_steps=24", "--trainer.log_every_n_steps=1", "--trainer.val_check_interval=12",
        "--trainer.limit_val_batches=2", "--trainer.enable_progress_bar=false", "--checkpoint_every_n_steps=8",
        "--trainer.enable_model_summary=false", f"--run_dir={run_dir}", "--ckpt_path=last", *extra,
    ]  # fmt: skip


@pytest.mark.slow
def test_an_imported_model_trains_on_resumes_exactly_and_goes_back(
    imported: Path, shards: Path, tmp_path: Path
) -> None:
    whole, cut, still = tmp_path / "whole", tmp_path / "cut", tmp_path / "still"
    assert run(going_on(imported, shards, still, "--trainer.max_steps=1", "--model.optimizer.lr=0")) == 0
    theirs = load_checkpoint(str(imported), "cpu").model.state_dict()
    ours = last_checkpoint(still)["state_dict"]
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    assert run(going_on(imported, shards, whole)) == 0
    assert stop_at(going_on(imported, shards, cut), cut, 13, signal.SIGKILL) == -signal.SIGKILL
    assert run(going_on(imported, shards, cut)) == 0
    assert last_checkpoint(whole)["global_step"] == 24
    assert_same_training_state(last_checkpoint(whole), last_checkpoint(cut))
    assert not torch.equal(last_checkpoint(cut)["state_dict"]["model.head.weight"], theirs["model.head.weight"])

    last = cut / "checkpoints" / "last.ckpt"
    assert main(["export", str(last), "--format", "huggingface", "--output", str(tmp_path / "out")]) == 0
    back = read(tmp_path / "out", trust=False)
    assert type(back).__name__ == "LlamaForCausalLM"
    assert back.lm_head.weight is back.model.embed_tokens.weight
    tokens = torch.arange(24)[None]
    expected = load_checkpoint(str(last), "cpu").model(tokens)
    torch.testing.assert_close(back(tokens).logits, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_its_attention_may_change(imported: Path, shards: Path, tmp_path: Path) -> None:
    """A mechanism without weights of its own starts from all the imported ones."""
    extra = ("--model.attention=ScaleInvariant", "--trainer.max_steps=2")
    assert run(going_on(imported, shards, tmp_path / "run", *extra)) == 0
    assert "ScaleInvariant" in (tmp_path / "run" / "config.yaml").read_text()
