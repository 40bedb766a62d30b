"""Folded models: the same logits, fewer multiplications, no training."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anlit import GPT, NGPT, AnGPT, LogN, NoPE
from anlit.checkpoints.initial_weights import load_initial_weights
from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from anlit.errors import UserError
from anlit.inference.generation import Request, Sampling, generate
from anlit.models.angpt import Approximation
from anlit.models.fold import FoldedAnGPT, FoldedNGPT, fold
from tests.data.prepared import VOCABULARY
from tests.evaluation.saved import make_run, prepare
from tests.models.tiny import fit, jolt, random_tokens, tiny

SIZE = {"d_model": 48, "n_heads": 2, "d_ff": 80}  # neither √d nor √d_head is a power of two
TOKENS = random_tokens(2, 16)
GATES_AND_NORMS = [
    {},
    {"attention_gate": "per_head"},
    {"attention_gate": "per_element", "post_norm": True},
    {"v_norm": True, "attention_norm": True},
    {"qk_norm_gain": True, "post_norm": True},
    {"qk_norm_gain": False},
    {"qk_norm_eps": 0.5},
    {"s_qk": True, "silu_std": 1.0, "n_heads": 4, "n_kv_heads": 2, "d_head": 20},
    {"n_heads": 4, "n_kv_heads": 2, "d_head": 20, "attention_gate": "per_element"},
    {"approximation": Approximation(residual_factor=False), "post_norm": True},
    {"approximation": Approximation(error=0.1)},
    {"approximation": Approximation(False, -0.02)},
]


class Multiplications(TorchDispatchMode):
    """Counts elementwise multiplications and divisions of tensors while it is open."""

    NAMES = ("mul", "mul_", "div", "div_", "addcmul", "addcdiv", "lerp", "square", "pow", "baddbmm")

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).split(".")[1]
        if name in self.NAMES:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("changes", GATES_AND_NORMS, ids=str)
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("architecture", [NGPT, AnGPT])
@torch.no_grad()
def test_folded_and_unfolded_logits_agree(architecture, qk_norm, changes) -> None:
    if architecture is NGPT and changes.keys() & {"silu_std", "approximation"}:
        pytest.skip("of anGPT only")
    settings = {**SIZE, "qk_norm": qk_norm, **changes, "attention": LogN(learned="globally")}
    decoder = jolt(tiny(architecture, **settings)).double().model.eval()
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    expected, folded = decoder(TOKENS), fold(decoder)
    torch.testing.assert_close(folded(TOKENS), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in decoder.state_dict().items())


@pytest.mark.parametrize("qk_norm", [True, False])
@torch.no_grad()
def test_a_folded_angpt_multiplies_by_alpha_alone(qk_norm) -> None:
    decoder = jolt(tiny(AnGPT, positions=NoPE(), qk_norm=qk_norm)).model.eval()
    n_layers = len(decoder.blocks)
    folded_decoder = fold(decoder)
    with Multiplications() as folded:
        folded_decoder(TOKENS)
    swiglu, norms = n_layers, 2 * n_layers * qk_norm  # u ∘ SiLU(z); x · 1/rms(x) of q and of k, with its square
    squares = {"pow": norms} if qk_norm else {}
    assert folded.counts == {"mul": swiglu + norms, "addcmul": 2 * n_layers, **squares}
    with Multiplications() as unfolded:
        decoder(TOKENS)
    assert unfolded.counts.total() > 2 * folded.counts.total()


@torch.no_grad()
def test_a_folded_ngpt_keeps_its_norms_alpha_and_s_qk() -> None:
    decoder = fold(jolt(tiny(NGPT, positions=NoPE())).model.eval())
    n_layers = len(decoder.blocks)
    with Multiplications() as folded:
        decoder(TOKENS)
    # u ∘ SiLU(z), s_qk ∘ q and ∘ k; two norms for each update, one each for q and k
    assert folded.counts == {"mul": 3 * n_layers, "lerp": 2 * n_layers, "div": 6 * n_layers}


@pytest.mark.parametrize("architecture", [NGPT, AnGPT])
def test_a_folded_model_continues_with_kept_keys(architecture) -> None:
    decoder = jolt(tiny(architecture, s_z_init=8.0, post_norm=True)).model.eval()
    requests = [Request([5, 6, 7]), Request([8])]
    texts = [generate(each, requests, 40, Sampling(temperature=0.0)) for each in (decoder, fold(decoder))]
    assert [text.tokens for text in texts[0]] == [text.tokens for text in texts[1]]


@pytest.mark.parametrize(("architecture", "label"), [(NGPT, "nGPT (folded)"), (AnGPT, "anGPT (folded)")])
def test_a_folded_export_loads_everywhere_but_for_training(architecture, label, tmp_path: Path, capsys) -> None:
    run, out = make_run(tmp_path / "run", prepare(tmp_path / "data"), architecture), tmp_path / "out"
    assert main(["export", str(run), "--fold", "--output", str(out)]) == 0
    tokens = random_tokens(2, 12, vocab_size=VOCABULARY)
    original, loaded = load_checkpoint(str(run), "cpu"), load_checkpoint(str(out), "cpu")
    assert loaded.label.startswith(label)
    torch.testing.assert_close(loaded.model(tokens), original.model(tokens), rtol=1e-5, atol=1e-5)
    capsys.readouterr()
    assert main(["export", str(out), "--fold", "--output", str(tmp_path / "again")]) == 2
    assert "folded already" in capsys.readouterr().err
    with pytest.raises(UserError, match="holds a folded model, which cannot be trained"):
        load_initial_weights(original.model, str(out))


def test_training_a_folded_model_and_folding_gpt_are_refused() -> None:
    for architecture in (FoldedNGPT, FoldedAnGPT):
        with pytest.raises(UserError, match="a folded model cannot be trained"):
            fit(tiny(architecture), max_steps=1)
    with pytest.raises(UserError, match=r"GPT\+ has none"):
        fold(tiny(GPT).model)
