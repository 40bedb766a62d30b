"""The configurations of the papers' runs build on the meta device, with the parameters that the papers' sizes say."""

from pathlib import Path

import pytest

from anlit.commands.parser import ConfigurationParser, read_command
from anlit.models.language_model import LanguageModel
from anlit.optim.optimizers import MuonAdamW, parameter_groups

RUNS = Path(__file__).parents[2] / "configs" / "experiment"


def build(folder: str, *names: str) -> LanguageModel:
    configs = [part for name in names for part in ("--config", str(RUNS / folder / f"{name}.yaml"))]
    command = read_command(ConfigurationParser, ["fit", *configs])
    return command.model_of(command.config["fit"])


def matrices(layers: int, d: int, f: int, vocabulary: int) -> int:
    """W_q, W_k, W_v, W_o of d × d, W_u, W_z, W_d of d × f, the embedding and the head."""
    return layers * (4 * d * d + 3 * d * f) + 2 * vocabulary * d


def vectors(architecture: str, layers: int, d: int, f: int, vocabulary: int, d_head: int) -> int:
    """The learned gains and scales; the baseline of [nGPT] has no QK-norm."""
    return {
        "gpt": layers * (2 * d + 2 * d_head) + d,  # two norms and QK-norm a block, one norm before the head
        "gpt without QK-norm": layers * 2 * d + d,
        "ngpt": layers * (2 * d + d + 2 * f) + vocabulary,  # α twice, s_qk, s_u, s_v; s_z
        "angpt": layers * 2 * d + vocabulary,
    }[architecture]


@pytest.mark.parametrize(
    ("architecture", "size", "layers", "d", "stated"),
    [("gpt", "32m", 6, 256, 32e6), ("ngpt", "62m", 10, 384, 62e6), ("angpt", "125m", 18, 512, 127e6),
     ("angpt", "250m", 18, 768, 247e6), ("angpt", "0.5b", 24, 1024, 506e6), ("angpt", "1b", 36, 1280, 1.07e9)],
)  # fmt: skip
def test_angpt_on_slimpajama(architecture: str, size: str, layers: int, d: int, stated: float) -> None:
    model = build("angpt_slimpajama", architecture, "common", size)
    expected = matrices(layers, d, 4 * d, 50_304) + vectors(architecture, layers, d, 4 * d, 50_304, 64)
    assert model.model.n_parameters() == expected
    assert expected == pytest.approx(stated, rel=0.01)
    assert model.context_length == 2048


@pytest.mark.parametrize(
    ("size", "layers", "d", "f", "stated"), [("162m", 12, 768, 2048, 162e6), ("304m", 16, 1024, 2736, 304e6)]
)
def test_si_on_fineweb(size: str, layers: int, d: int, f: int, stated: float) -> None:
    model = build("si_fineweb", "common", size)
    expected = matrices(layers, d, f, 50_304) + vectors("gpt", layers, d, f, 50_304, 64)
    assert model.model.n_parameters() == expected
    assert expected == pytest.approx(stated, rel=0.01)
    two_matrix_mlp = layers * 12 * d * d + 2 * 50_304 * d  # the paper's blocks, ReLU² between d × 4d and 4d × d
    assert expected == pytest.approx(two_matrix_mlp, rel=0.002)
    assert isinstance(model.make_optimizer(parameter_groups(model.model)), MuonAdamW)


@pytest.mark.parametrize(
    ("size", "layers", "d", "ngpt", "gpt"), [("0.5b", 24, 1024, 468.4e6, 468.2e6), ("1b", 36, 1280, 1026.1e6, 1025.7e6)]
)
def test_ngpt_on_openwebtext(size: str, layers: int, d: int, ngpt: float, gpt: float) -> None:
    model = build("ngpt_openwebtext", "common", size)
    expected = matrices(layers, d, 4 * d, 32_000) + vectors("ngpt", layers, d, 4 * d, 32_000, 64)
    assert model.model.n_parameters() == expected
    assert expected == pytest.approx(ngpt, abs=0.11e6)  # table 2 gives one decimal, cut off
    baseline = build("ngpt_openwebtext", "common", size, "gpt").model.n_parameters()
    assert baseline == matrices(layers, d, 4 * d, 32_000) + vectors("gpt without QK-norm", layers, d, 0, 0, 64)
    assert baseline == pytest.approx(gpt, abs=0.05e6)
