"""The lm-evaluation-harness reads an exported model: its log-likelihoods are those of the model."""

from pathlib import Path

import pytest
import torch

from anlit import AnGPT, SqrtLogN
from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from anlit.data.tokenizer import load_tokenizer
from tests.inference.conftest import make_run_with_text

pytest.importorskip("lm_eval", reason="needs `make extras EXTRAS=eval`")
CONTEXTS = ["the cat", "the cats and the dogs on the mat sat by", "naïve café – ☕"]
CHOICES = [" a mat", " the cats and the dogs", " sat", " naïve café – ☕"]


@pytest.mark.slow
@pytest.mark.usefixtures("own_code_cache")
@torch.no_grad()
def test_the_harness_finds_the_log_likelihoods_of_the_model(tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    settings = {"attention": SqrtLogN(), "s_z_init": 8.0, "context_length": 64}
    run, out = make_run_with_text(tmp_path, AnGPT, **settings), str(tmp_path / "out")
    assert main(["export", str(run), "--format", "huggingface", "--output", out]) == 0
    pairs = [(context, choice) for context in CONTEXTS for choice in CHOICES]
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    harness = HFLM(pretrained=out, trust_remote_code=True, dtype="float32", device="cpu", batch_size=4)
    measured = [log_likelihood for log_likelihood, _ in harness.loglikelihood(asked)]
    model, tokenizer = load_checkpoint(str(run), "cpu").model, load_tokenizer(tmp_path / "data" / "tokenizer.json")
    for (context, choice), own in zip(pairs, measured, strict=True):
        n_context, ids = len(tokenizer.encode(context).ids), torch.tensor(tokenizer.encode(context + choice).ids)
        chances = model(ids[None, :-1])[0].log_softmax(-1).gather(-1, ids[1:, None])
        assert own == pytest.approx(chances[n_context - 1 :].sum().item(), abs=1e-3)
