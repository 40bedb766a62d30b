"""GPT+ with rotary fraction 1 against an outside implementation: transformers' Qwen3, with copied weights."""

import pytest
import torch

from anlit import GPT, RoPE
from tests.layers.from_logits import next_token_loss
from tests.models.tiny import SIZE, jolt, random_tokens, tiny

transformers = pytest.importorskip("transformers")

NAMES = {
    "norm_1.gain": "input_layernorm.weight",
    "norm_2.gain": "post_attention_layernorm.weight",
    "W_q.weight": "self_attn.q_proj.weight",
    "W_k.weight": "self_attn.k_proj.weight",
    "W_v.weight": "self_attn.v_proj.weight",
    "W_o.weight": "self_attn.o_proj.weight",
    "norm_q.gain": "self_attn.q_norm.weight",
    "norm_k.gain": "self_attn.k_norm.weight",
    "W_u.weight": "mlp.up_proj.weight",
    "W_z.weight": "mlp.gate_proj.weight",
    "W_d.weight": "mlp.down_proj.weight",
}
OUTSIDE = {"embedding.weight": "model.embed_tokens.weight", "norm_f.gain": "model.norm.weight",
           "head.weight": "lm_head.weight"}  # fmt: skip


def qwen_name(name: str) -> str:
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{NAMES[rest]}"


def qwen3(d_ff: int, eps: float) -> torch.nn.Module:
    n_heads, d_model = SIZE["n_heads"], SIZE["d_model"]
    config = transformers.Qwen3Config(
        vocab_size=SIZE["vocab_size"], hidden_size=d_model, intermediate_size=d_ff, num_hidden_layers=SIZE["n_layers"],
        num_attention_heads=n_heads, num_key_value_heads=n_heads, head_dim=d_model // n_heads, rms_norm_eps=eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, tie_word_embeddings=False,
        attention_bias=False, attn_implementation="eager",
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).float()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("d_ff", [None, 80])
def test_gpt_is_qwen3(d_ff, backend) -> None:
    model = jolt(tiny(GPT, positions=RoPE(fraction=1.0), d_ff=d_ff, backend=backend, init_std=0.2, norm_eps=1e-3)).model
    reference = qwen3(d_ff or 4 * SIZE["d_model"], 1e-3)
    reference.load_state_dict({qwen_name(name): p.detach() for name, p in model.named_parameters()})
    tokens, targets = random_tokens(3, 24), random_tokens(3, 24, seed=1)

    logits, expected = model(tokens), reference(tokens).logits
    assert expected.std() > 0.5, "logits near zero would agree whatever the network"
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)

    next_token_loss(logits, targets)[1].backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    theirs = dict(reference.named_parameters())
    assert len(theirs) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        gradient = theirs[qwen_name(name)].grad
        assert gradient.abs().max() > 1e-4, name
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
