"""GPT+ with rotary fraction 1 against an outside implementation: transformers' Qwen3, with copied weights."""

import pytest
import torch

from anlit import GPT, RoPE
from anlit.hub.families import weight_names
from tests.nn.models.tiny import SIZE, jolt, next_token_loss, random_tokens, tiny

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("d_ff", [128, 80])
def test_gpt_is_qwen3(d_ff, kernel) -> None:
    model = jolt(
        tiny(
            GPT,
            positions=RoPE(fraction=1.0),
            d_ff=d_ff,
            kernel=kernel,
            init_std=0.2,
            norm_eps=1e-3,
        )
    ).model
    config = transformers.Qwen3Config(
        vocab_size=SIZE["vocab_size"], hidden_size=32, intermediate_size=d_ff, num_hidden_layers=SIZE["n_layers"],
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, tie_word_embeddings=False,
        attention_bias=False, attn_implementation="eager",
    )  # fmt: skip
    reference = transformers.Qwen3ForCausalLM(config).float()
    ours, names = dict(model.named_parameters()), weight_names(SIZE["n_layers"])
    reference.load_state_dict(
        {theirs: ours[name].detach() for theirs, name in names.items() if name in ours}
    )
    tokens, targets = random_tokens(3, 24), random_tokens(3, 24, seed=1)

    logits, expected = model(tokens), reference(tokens).logits
    assert expected.std() > 0.5, "logits near zero would agree whatever the network"
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    next_token_loss(logits, targets)[1].backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    gradients = {names[name]: parameter.grad for name, parameter in reference.named_parameters()}
    assert gradients.keys() == ours.keys()
    assert min(gradient.abs().max() for gradient in gradients.values()) > 1e-4
    torch.testing.assert_close(
        {name: ours[name].grad for name in gradients}, gradients, rtol=1e-4, atol=1e-5
    )
