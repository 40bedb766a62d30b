"""FlashAttention-4: its functions of the scores against eager in float64, with a pretended library on the CPU."""

import importlib
import inspect
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from anlit import LogN, Plain, ScaleInvariant
from anlit.attention.backends import cute, flash
from anlit.attention.documents import Documents
from tests.attention.kernels import MECHANISMS, check, gradients, inputs
from tests.attention.test_flash import IDS, LENGTH

FORWARD = """q k v qv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k min_seqlen_k page_table
softmax_scale causal softcap window_size_left window_size_right learnable_sink tile_mn mma_pv_is_rs intra_wg_overlap
num_threads num_splits pack_gqa _arch score_mod mask_mod block_sparse_tensors return_lse out lse aux_tensors aux_scalars
q_descale k_descale v_descale gather_kv_indices scheduler_metadata seqlen_k_per_split disable_scheduler_metadata
gather_bwd_recompute_p"""
BACKWARD = """q k v out dout lse softmax_scale causal softcap window_size_left window_size_right m_block_size
n_block_size num_threads pack_gqa num_stages_Q num_stages_dO SdP_swapAB dKV_swapAB dQ_swapAB AtomLayoutMSdP
AtomLayoutNdKV AtomLayoutMdQ V_in_regs cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k
deterministic dq dk dv score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors dlse
learnable_sink"""
"""The parameters of `_flash_attn_fwd` and `_flash_attn_bwd` of flash-attn-4 4.0.0b36, in order."""


class Library:
    """`flash_attn.cute.interface` in float64: one score at a time, as its kernels call the functions with tables."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def logits(self, given: dict[str, Any], q: Tensor, k: Tensor) -> Tensor:
        """(H, T, T) of one document, whose scores each function of the kernel's sees with its index."""
        scores = torch.einsum("ihd,jhd->hij", q, k) * given["softmax_scale"]
        if given["score_mod"] is not None:
            scores = self.changed(given, given["score_mod"], scores)
        return scores.masked_fill(self.hidden(given, len(q)), -torch.inf)

    def changed(self, given: dict[str, Any], function: Any, *values: Tensor) -> Tensor:
        result = torch.zeros_like(values[0])
        for h, i, j in torch.cartesian_prod(*map(torch.arange, result.shape)):
            index = [one[None].int() for one in (torch.tensor(0), h, i, j)]
            at = [value[h, i, j][None] for value in values]
            result[h, i, j] = function(*at, *index, None, given["aux_tensors"])[0]
        return result

    def hidden(self, given: dict[str, Any], length: int) -> Tensor:
        t = torch.arange(length)[:, None] - torch.arange(length)
        left = given["window_size_left"]
        return (t < 0) | (t > (length if left is None else left))

    def documents(self, given: dict[str, Any], *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Each document's rows of the tensors, with keys and values repeated for the heads of their group."""
        assert given["causal"]
        assert given["cu_seqlens_q"] is given["cu_seqlens_k"]
        assert given["cu_seqlens_q"].dtype == torch.int32
        lengths = given["cu_seqlens_q"].diff().tolist()
        assert given["max_seqlen_q"] == given["max_seqlen_k"] >= max(lengths)
        assert type(given["max_seqlen_q"]) is int
        for table in given["aux_tensors"] or ():
            assert table.dtype == torch.float32
            assert table.is_contiguous()
        heads = tensors[0].shape[1]
        wide = [x.double().repeat_interleave(heads // x.shape[1], 1) for x in tensors]
        return list(zip(*(x.split(lengths) for x in wide), strict=True))

    def forward(self, given: dict[str, Any]) -> tuple[Any, ...]:
        self.calls.append("forward")
        assert given["return_lse"]
        outs, lses = [], []
        for q, k, v in self.documents(given, given["q"], given["k"], given["v"]):
            logits = self.logits(given, q, k)
            outs.append(torch.einsum("hij,jhd->ihd", logits.softmax(-1), v))
            lses.append(logits.logsumexp(-1))
        return torch.cat(outs).to(given["q"].dtype), torch.cat(lses, 1).float(), None, None, None

    def backward(self, given: dict[str, Any]) -> tuple[Tensor, ...]:
        self.calls.append("backward")
        names = ("q", "k", "v", "out", "dout")
        ends = given["cu_seqlens_q"][1:].tolist()
        found = []
        for end, (q, k, v, out, gradient) in zip(ends, self.documents(given, *(given[n] for n in names)), strict=True):
            lse = given["lse"][:, end - len(q) : end].double()
            weights = (self.logits(given, q, k) - lse[..., None]).exp()
            of_weights = torch.einsum("ihd,jhd->hij", gradient, v)
            of_scores = weights * (of_weights - (gradient * out).sum(-1).T[..., None])
            if given["score_mod_bwd"] is not None:
                scores = torch.einsum("ihd,jhd->hij", q, k) * given["softmax_scale"]
                of_scores = self.changed(given, given["score_mod_bwd"], of_scores, scores)
            of_scores = of_scores * given["softmax_scale"]
            dq, dk = torch.einsum("hij,jhd->ihd", of_scores, k), torch.einsum("hij,ihd->jhd", of_scores, q)
            found.append((dq, dk, torch.einsum("hij,ihd->jhd", weights, gradient)))
        whole = (torch.cat(parts) for parts in zip(*found, strict=True))
        shapes = (given[name].shape for name in ("q", "k", "v"))
        summed = (x.unflatten(1, (shape[1], -1)).sum(2) for x, shape in zip(whole, shapes, strict=True))
        return tuple(x.to(given["q"].dtype) for x in summed)


@pytest.fixture
def library(monkeypatch) -> Library:
    """Modules like those of the package: their functions have its parameters."""
    made = Library()
    names = (
        "cutlass",
        "cutlass.cute",
        "flash_attn",
        "flash_attn.cute",
        "flash_attn.cute.interface",
        "flash_attn.cute.utils",
    )
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    modules["cutlass"].Float32 = torch.float32  # type: ignore[attr-defined]
    language = modules["cutlass.cute"]
    language.jit, language.where, language.full_like = lambda f: f, torch.where, torch.full_like  # type: ignore[attr-defined]
    modules["flash_attn.cute.utils"].scalar_to_ssa = lambda x, dtype: x[None].to(dtype)  # type: ignore[attr-defined]
    interface: Any = modules["flash_attn.cute.interface"]
    interface._flash_attn_fwd = with_parameters(FORWARD, made.forward)
    interface._flash_attn_bwd = with_parameters(BACKWARD, made.backward)
    cute.functions.cache_clear()
    yield made
    cute.functions.cache_clear()


def with_parameters(names: str, function: Any) -> Any:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind, default=None) for name in names.split()])

    def call(*arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        return function(bound.arguments)

    return call


@pytest.mark.parametrize("kind", ["dense", "documents", "window"])
@pytest.mark.parametrize("name", ["plain", "scale-invariant", "log bias", "alibi", "log n", "window, scale-invariant"])
@pytest.mark.covering(1)
def test_every_form_is_eager_in_float64(name, kind, library) -> None:
    check(cute, name, kind, (1, 2, 13, 8), torch.float32)
    assert library.calls == ["forward", "backward"]


def test_a_gain_and_a_bias_of_ones_own_take_two_tables(library) -> None:
    class Own(ScaleInvariant):
        def distance_bias(self, t: Tensor) -> Tensor:
            return -0.3 * t

    mechanism = Own().for_layer(2, 8, 0)
    form, _, tables = cute._form(mechanism, 5, torch.zeros(1, 2, 5, 8))
    assert (form, [tuple(table.shape) for table in tables]) == ("both", [(1, 5 + cute.PADDING)] * 2)


def test_logits_are_those_of_the_mechanism_up_to_a_constant() -> None:
    t, scores = torch.arange(1000.0, dtype=torch.float64), torch.linspace(-8, 8, 1000, dtype=torch.float64)
    for tau, c in ((10.0, 2.0), (3.0, 0.7)):
        mechanism = ScaleInvariant(tau, c)
        a, m = mechanism.distance_gain(t), mechanism.distance_bias(t)
        found = cute.changed("scale-invariant", c / 2, scores, [a])
        torch.testing.assert_close(found + c / 2, a * scores + m, rtol=1e-13, atol=1e-12)


def test_one_table_of_four_bytes_per_distance() -> None:
    _, half_c, tables = cute._form(ScaleInvariant(c=3.0).for_layer(4, 8, 0), 100, torch.zeros(1, 4, 100, 8))
    assert half_c == 1.5
    assert [(tuple(table.shape), table.dtype) for table in tables] == [((1, 100 + cute.PADDING), torch.float32)]


def test_compiled_without_a_graph_break(library) -> None:
    tensors = inputs(2, 2, LENGTH, 8, dtype=torch.float32, n_heads_kv=1)
    documents = Documents(IDS[:2], LENGTH, torch.device("cpu"))
    cute.prepare(Plain(), documents, 2)
    mechanism = LogN().for_layer(2, 8, 0)
    expected = gradients(cute.attend, mechanism, tensors, documents)
    compiled = torch.compile(cute.attend, backend="aot_eager", fullgraph=True)
    found = gradients(compiled, mechanism, tensors, documents)
    assert library.calls == ["forward", "backward"] * 2
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_functions_are_hashed_by_what_they_compute(library) -> None:
    hashes = [
        cute.functions(*key)[0].__cute_hash__
        for key in (("both", 0.0, False), ("both", 0.0, True), ("bias", 0.0, True))
    ]
    hashes += [cute.functions("scale-invariant", half_c, False)[0].__cute_hash__ for half_c in (1.0, 1.5)]
    assert len(set(hashes)) == 5
    assert "0x" not in "".join(hashes)


def test_reasons(monkeypatch) -> None:
    monkeypatch.setattr(cute, "IS_INSTALLED", False)
    assert "flash-attn-4 is not installed" in cute.reason_against(Plain())
    monkeypatch.setattr(cute, "IS_INSTALLED", True)
    assert cute.reason_against(ScaleInvariant()) is None
    learned = MECHANISMS["scale-invariant, c per layer"].for_layer(2, 8, 0)
    assert "gives no gradient" in cute.reason_against(learned)
    assert cute.reason_against(MECHANISMS["log n"].for_layer(2, 8, 0)) is None  # g multiplies q
    assert "no dropout" in cute.reason_against(Plain(), None, 0.1)
    assert "on cpu" in cute.reason_against(Plain(), torch.zeros(1, 1, 4, 8))


def test_the_package_is_told_from_flash_attn_2(tmp_path, monkeypatch) -> None:
    """Both are folders flash_attn: of 2 a package, of 4 only cute inside of it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    assert not cute._is_installed()
    (tmp_path / "flash_attn" / "cute" / "interface.py").touch()
    assert cute._is_installed()
    assert not flash._has_package()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert flash._has_package()
    assert cute._is_installed()


@pytest.mark.parametrize(
    ("capability", "width", "words"),
    [
        ((8, 0), 64, "Hopper and Blackwell"),
        ((9, 0), 256, None),
        ((10, 0), 256, "8, 16 … 128"),
        ((12, 0), 64, "9.x or 10.x"),
    ],
)
def test_devices_and_widths(capability, width, words, monkeypatch) -> None:
    monkeypatch.setattr(cute, "IS_INSTALLED", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q = types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 2, 4, width))
    reason = cute.reason_against(ScaleInvariant(), q)
    assert reason is None if words is None else words in reason
