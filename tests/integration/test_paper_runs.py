"""The configurations of the papers' runs build on the meta device, with the parameters that the papers' sizes say."""

import pytest

from anlit.commands.parser import ConfigurationParser, read_command
from anlit.optim.optimizers import MuonAdamW, parameter_groups

GPT_NEOX, LLAMA_2 = 50_304, 32_000  # tokens in the vocabularies, padded
SLIMPAJAMA, FINEWEB, OPENWEBTEXT = "angpt_slimpajama", "si_fineweb", "ngpt_openwebtext"


def vectors(architecture: str, layers: int, d: int, f: int, vocabulary: int, d_head: int = 64) -> int:
    """The learned gains and scales; the baseline of [nGPT] has no QK-norm."""
    return {
        "gpt": layers * (2 * d + 2 * d_head) + d,  # two norms and QK-norm a block, one norm before the head
        "gpt without QK-norm": layers * 2 * d + d,
        "ngpt": layers * (2 * d + d + 2 * f) + vocabulary,  # α twice, s_qk, s_u, s_v; s_z
        "angpt": layers * 2 * d + vocabulary,
    }[architecture]


@pytest.mark.parametrize(
    ("folder", "files", "architecture", "layers", "d", "f", "vocabulary", "stated", "tolerance"),
    [
        (SLIMPAJAMA, "gpt common 32m", "gpt", 6, 256, 1024, GPT_NEOX, 32e6, 0.32e6),
        (SLIMPAJAMA, "ngpt common 62m", "ngpt", 10, 384, 1536, GPT_NEOX, 62e6, 0.62e6),
        (SLIMPAJAMA, "angpt common 125m", "angpt", 18, 512, 2048, GPT_NEOX, 127e6, 1.27e6),
        (SLIMPAJAMA, "angpt common 250m", "angpt", 18, 768, 3072, GPT_NEOX, 247e6, 2.47e6),
        (SLIMPAJAMA, "angpt common 0.5b", "angpt", 24, 1024, 4096, GPT_NEOX, 506e6, 5.06e6),
        (SLIMPAJAMA, "angpt common 1b", "angpt", 36, 1280, 5120, GPT_NEOX, 1.07e9, 10.7e6),
        # the paper's blocks have ReLU² between d × 4d and 4d × d: as many parameters to 0.2 %
        (FINEWEB, "common 162m", "gpt", 12, 768, 2048, GPT_NEOX, 12 * 12 * 768**2 + 2 * GPT_NEOX * 768, 0.32e6),
        (FINEWEB, "common 304m", "gpt", 16, 1024, 2736, GPT_NEOX, 16 * 12 * 1024**2 + 2 * GPT_NEOX * 1024, 0.6e6),
        # table 2 gives one decimal, of nGPT's cut off
        (OPENWEBTEXT, "common 0.5b", "ngpt", 24, 1024, 4096, LLAMA_2, 468.4e6, 0.11e6),
        (OPENWEBTEXT, "common 1b", "ngpt", 36, 1280, 5120, LLAMA_2, 1026.1e6, 0.11e6),
        (OPENWEBTEXT, "common 0.5b gpt", "gpt without QK-norm", 24, 1024, 4096, LLAMA_2, 468.2e6, 0.05e6),
        (OPENWEBTEXT, "common 1b gpt", "gpt without QK-norm", 36, 1280, 5120, LLAMA_2, 1025.7e6, 0.05e6),
    ],
)
def test_a_paper_s_run_has_its_size(
    folder: str, files: str, architecture: str, layers: int, d: int, f: int, vocabulary: int, stated: float,
    tolerance: float,
) -> None:  # fmt: skip
    configs = [f"--config=experiment/{folder}/{name}.yaml" for name in files.split()]
    command = read_command(ConfigurationParser, ["fit", *configs])
    model = command.model_of(command.config["fit"])
    matrices = layers * (4 * d * d + 3 * d * f) + 2 * vocabulary * d  # of attention, of the MLP; embedding and head
    expected = matrices + vectors(architecture, layers, d, f, vocabulary)
    assert model.model.n_parameters() == expected
    assert expected == pytest.approx(stated, abs=tolerance)
    if folder == SLIMPAJAMA:
        assert model.context_length == 2048
    if folder == FINEWEB:
        assert isinstance(model.make_optimizer(parameter_groups(model.model)), MuonAdamW)
