"""GPT+ with rotary fraction 1 against an outside implementation, transformers' Qwen3."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from anlit import GPT, RoPE
from anlit.hub.families import weight_names
from tests.nn.models.tiny import SIZE, jolt, next_token_loss, random_tokens, tiny

transformers = pytest.importorskip("transformers")


EPS = 1e-3


def qwen3(model: torch.nn.Module, d_ff: int) -> torch.nn.Module:
    """Qwen3 with the weights of `model`."""
    config = transformers.Qwen3Config(
        vocab_size=SIZE["vocab_size"],
        hidden_size=SIZE["d_model"],
        intermediate_size=d_ff,
        num_hidden_layers=SIZE["n_layers"],
        num_attention_heads=SIZE["n_heads"],
        num_key_value_heads=SIZE["n_heads"],
        head_dim=SIZE["d_model"] // SIZE["n_heads"],
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        attention_bias=False,
        attn_implementation="eager",
    )
    reference = transformers.Qwen3ForCausalLM(config).float()
    parameters = dict(model.named_parameters())
    weights = {}
    for qwen3_name, name in weight_names(SIZE["n_layers"]).items():
        if name in parameters:
            weights[qwen3_name] = parameters[name].detach()
    reference.load_state_dict(weights)
    return reference


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("d_ff", [128, 80])
def test_gpt_is_qwen3(d_ff, kernel) -> None:
    positions = RoPE(fraction=1.0)
    settings = {"d_ff": d_ff, "kernel": kernel, "init_std": 0.2, "norm_eps": EPS}
    model = jolt(tiny(GPT, positions=positions, **settings)).model
    reference = qwen3(model, d_ff)
    tokens = random_tokens(3, 24)
    targets = random_tokens(3, 24, seed=1)

    logits = model(tokens)
    _, objective = next_token_loss(logits, targets)
    objective.backward()

    expected_logits = reference(tokens).logits  # (B, T, V)
    expected_loss = cross_entropy(expected_logits.flatten(0, 1), targets.flatten())
    expected_loss.backward()
    assert expected_logits.std() > 0.5, "logits near zero would agree whatever the network"
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    names = weight_names(SIZE["n_layers"])
    expected_gradients = {}
    for qwen3_name, parameter in reference.named_parameters():
        name = names[qwen3_name]
        expected_gradients[name] = parameter.grad
        assert parameter.grad.abs().max() > 1e-4
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)
