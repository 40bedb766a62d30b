"""What stands around the kernel, each setting alone and all that go together, against the formulas of `naive.py`."""

import pytest

from anlit import GPT, NGPT, AnGPT, AroundAttention
from tests.parity.test_architectures import architectures, check


@pytest.mark.parametrize("mechanism", ["plain", "scale-invariant", "window, log n"])
@pytest.mark.parametrize("gate", ["per_head", "per_element"])
@architectures
def test_gates(architecture, gate, mechanism) -> None:
    check(architecture, mechanism, around=AroundAttention(gate=gate), gated=True)


@pytest.mark.parametrize("name", ["v_norm", "output_norm", "post_norm"])
@architectures
def test_norms_of_values_and_outputs(architecture, name) -> None:
    formulas = {} if (architecture, name) == (NGPT, "post_norm") else {name: True}  # nGPT has that one anyway
    check(architecture, "log n", around=AroundAttention(**{name: True}), **formulas)


@pytest.mark.parametrize("qk_norm", [True, False])
@architectures
def test_a_finite_epsilon_lets_queries_keep_some_norm(architecture, qk_norm) -> None:
    check(architecture, qk_norm=qk_norm, around=AroundAttention(qk_norm_eps=0.7), qk_norm_eps=0.7)


@pytest.mark.parametrize(("architecture", "gain"), [(GPT, False), (NGPT, False), (AnGPT, True)])
def test_the_gain_of_the_qk_norm_can_be_left_out_or_added(architecture, gain) -> None:
    check(architecture, around=AroundAttention(qk_gain=gain), qk_gain=gain)


@architectures
def test_everything_at_once(architecture) -> None:
    around = AroundAttention(
        qk_gain=True, qk_norm_eps=0.1, v_norm=True, output_norm=True, gate="per_element", post_norm=True
    )
    formulas = {"qk_gain": True, "qk_norm_eps": 0.1, "v_norm": True, "output_norm": True, "post_norm": True}
    check(architecture, "pattern", "pattern", around=around, gated=True, **formulas)
