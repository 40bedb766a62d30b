"""Gates and norms, each setting alone and all that go together, against the formulas of `naive.py`."""

import pytest

from anlit import GPT, NGPT, AnGPT
from tests.parity.test_architectures import architectures, check


@pytest.mark.parametrize("mechanism", ["plain", "scale-invariant", "window, log n"])
@pytest.mark.parametrize("gate", ["per_head", "per_element"])
@architectures
def test_gates(architecture, gate, mechanism) -> None:
    check(architecture, mechanism, attention_gate=gate)


@pytest.mark.parametrize("name", ["v_norm", "attention_norm", "post_norm"])
@architectures
def test_norms_of_values_and_outputs(architecture, name) -> None:
    check(architecture, "log n", **{name: True})


@pytest.mark.parametrize("qk_norm", [True, False])
@architectures
def test_a_finite_epsilon_lets_queries_keep_some_norm(architecture, qk_norm) -> None:
    check(architecture, qk_norm=qk_norm, qk_norm_eps=0.7)


@pytest.mark.parametrize(("architecture", "gain"), [(GPT, False), (NGPT, False), (AnGPT, True)])
def test_the_gain_of_the_qk_norm_can_be_left_out_or_added(architecture, gain) -> None:
    check(architecture, qk_norm_gain=gain)


@pytest.mark.parametrize(
    "changes", [{"s_qk": True}, {"silu_std": 1.0}, {"s_qk": True, "silu_std": 0.7, "n_kv_heads": 1}]
)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_parts_of_ngpt_in_angpt(qk_norm, changes) -> None:
    check(AnGPT, qk_norm=qk_norm, **changes)


@architectures
def test_everything_at_once(architecture) -> None:
    norms = dict.fromkeys(("qk_norm_gain", "v_norm", "attention_norm", "post_norm"), True)
    check(architecture, "pattern", "pattern", qk_norm_eps=0.1, attention_gate="per_element", **norms)
