"""The configurations of the papers' runs have the sizes and the tokens of the papers."""

import pytest

from anlit.commands.parser import ConfigurationParser, read_command
from anlit.training.optim.optimizers import MuonAdamW, parameter_groups

SLIMPAJAMA = "angpt_slimpajama"
FINEWEB = "si_fineweb"
OPENWEBTEXT = "ngpt_openwebtext"
CONTEXT_LENGTHS = {SLIMPAJAMA: 2048, FINEWEB: 4096, OPENWEBTEXT: 4096}


def read_experiment(folder: str, files: str) -> ConfigurationParser:
    """Read the files of configs/experiment/FOLDER with these names."""
    options = []
    for name in files.split():
        options.append(f"--config=experiment/{folder}/{name}.yaml")
    return read_command(ConfigurationParser, ["fit", *options])


@pytest.mark.parametrize(("folder", "files", "parameters", "stated", "tolerance"), [
    (SLIMPAJAMA, "gpt common 32m", 32_051_200, 32e6, 0.32e6),
    (SLIMPAJAMA, "ngpt common 62m", 62_318_976, 62e6, 0.62e6),
    (SLIMPAJAMA, "angpt common 125m", 127_077_504, 127e6, 1.27e6),
    (SLIMPAJAMA, "angpt common 250m", 247_214_208, 247e6, 2.47e6),
    (SLIMPAJAMA, "angpt common 0.5b", 505_775_232, 506e6, 5.06e6),
    (SLIMPAJAMA, "angpt common 1b", 1_072_639_104, 1.07e9, 10.7e6),
    # 12 d² a layer and two matrices of the vocabulary. The paper's blocks have ReLU² between
    # d × 4d and 4d × d.
    (FINEWEB, "common 162m", 162_222_336, 12 * 12 * 768**2 + 2 * 50_304 * 768, 0.32e6),
    (FINEWEB, "common 304m", 304_647_168, 16 * 12 * 1024**2 + 2 * 50_304 * 1024, 0.6e6),
    # Table 2 gives a single decimal; it cuts off the other decimals of nGPT.
    (OPENWEBTEXT, "common 0.5b", 468_491_520, 468.4e6, 0.11e6),
    (OPENWEBTEXT, "common 1b", 1_026_177_280, 1026.1e6, 0.11e6),
    (OPENWEBTEXT, "common 0.5b gpt", 468_239_360, 468.2e6, 0.05e6),
    (OPENWEBTEXT, "common 1b gpt", 1_025_731_840, 1025.7e6, 0.05e6),
])  # fmt: skip
def test_a_paper_s_run_has_its_size(
    folder: str, files: str, parameters: int, stated: float, tolerance: float
) -> None:
    command = read_experiment(folder, files)

    model = command.model_of(command.config["fit"])

    assert model.model.n_parameters() == parameters
    assert parameters == pytest.approx(stated, abs=tolerance)
    assert model.context_length == CONTEXT_LENGTHS[folder]
    if folder == FINEWEB:
        optimizer = model.make_optimizer(parameter_groups(model.model))
        assert isinstance(optimizer, MuonAdamW)


def tokens_a_step(config) -> int:
    trainer = config.trainer
    sequences = config.data.init_args.batch_size * trainer.accumulate_grad_batches
    gpus = trainer.devices * trainer.num_nodes
    return int(gpus * sequences * config.model.init_args.context_length)


@pytest.mark.parametrize(("folder", "files", "step", "tokens"), [
    (FINEWEB, "common 162m", 524_288, 2.4e9),
    (FINEWEB, "common 304m", 917_504, 10e9),
    (OPENWEBTEXT, "common 0.5b", 512 * 4096, 10_000 * 512 * 4096),
    # the number of steps is our choice: 20 tokens for each parameter
    (SLIMPAJAMA, "gpt common 32m", 524_288, 20 * 32.05e6),
    (SLIMPAJAMA, "gpt common 62m", 524_288, 20 * 62.3e6),
    (SLIMPAJAMA, "gpt common 125m", 524_288, 20 * 127.1e6),
    (SLIMPAJAMA, "gpt common 250m", 524_288, 20 * 247.2e6),
    (SLIMPAJAMA, "gpt common 0.5b", 524_288, 20 * 505.8e6),
    (SLIMPAJAMA, "gpt common 1b", 524_288, 20 * 1072.6e6),
])  # fmt: skip
def test_a_paper_s_run_has_its_tokens(folder: str, files: str, step: int, tokens: float) -> None:
    config = read_experiment(folder, files).config["fit"]

    total = config.trainer.max_steps * step
    assert tokens_a_step(config) == step
    assert total == pytest.approx(tokens, rel=0.02)
