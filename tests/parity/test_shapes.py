"""Heads that share keys and values, and heads of any width, against the formulas of `naive.py`: logits, all gradients.

There every query head looks up its own key. H is 4 and d 32, so heads of width 12 and 4 make H·D 1.5 and 0.5 times d.
"""

import pytest

from anlit import GPT
from tests.parity.test_architectures import architectures, check

EACH = {"n_heads": 4}
MECHANISMS = ["plain", "scale-invariant, c per layer", "log n", "sqrt log n, r global", "beta", "alibi",
              "window, log n", "of one's own"]  # fmt: skip


@pytest.mark.parametrize("d_head", [4, 8, 12])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mechanism", MECHANISMS)
@architectures
@pytest.mark.covering(2)
def test_every_shape_matches_the_formulas(architecture, mechanism, n_kv_heads, d_head) -> None:
    check(architecture, mechanism, n_kv_heads=n_kv_heads, d_head=d_head, **EACH)


@pytest.mark.parametrize("n_kv_heads", [1, 2])
@pytest.mark.parametrize("qk_norm_eps", [None, 0.7])
@pytest.mark.parametrize("qk_norm", [True, False])
@architectures
@pytest.mark.covering(2)
def test_shapes_with_gates_and_norms(architecture, qk_norm, qk_norm_eps, n_kv_heads) -> None:
    gates = {"attention_gate": "per_element", "v_norm": True, "attention_norm": True}
    check(architecture, qk_norm=qk_norm, qk_norm_eps=qk_norm_eps, n_kv_heads=n_kv_heads, d_head=12, **EACH, **gates)


def test_a_tied_head_adds_its_gradient_to_the_embedding() -> None:
    check(GPT, "log n", tie_embeddings=True)


@architectures
def test_keys_that_two_heads_share_without_a_gain(architecture) -> None:
    check(architecture, qk_norm_gain=False, n_kv_heads=2, d_head=12, **EACH)
