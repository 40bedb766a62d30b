"""The kernels that run everywhere: equal results, and the blocks of the eager one."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from anlit import ALiBi, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.attention.backends import blockwise, eager, sdpa
from anlit.attention.coefficient import shared_coefficients
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from tests.attention.examples import SHIPPED, LogNWithSlopes

HEADS, WIDTH = 3, 8
MECHANISMS: dict[str, Mechanism] = {**SHIPPED, "of one's own": LogNWithSlopes()}
WITHOUT_DISTANCE_GAIN = [name for name, mechanism in MECHANISMS.items() if not mechanism.scales_with_distance]


def inputs(length: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q, k of unit root mean square, v, and weights for a scalar of the output: (2, H, T, D)."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, probe = torch.randn(4, 2, HEADS, length, WIDTH, generator=generator, dtype=torch.float64)
    q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
    return [x.to(dtype) for x in (q, k, v, probe)]


def documents(length: int, packed: bool) -> Documents:
    starts = torch.zeros(2, length, dtype=torch.long)
    if packed:
        for row, position in [(0, length // 3), (0, length // 3 + 1), (1, length - 2)]:
            starts[row, position] = 1
    return Documents(starts.cumsum(1) if packed else None, length, torch.device("cpu"))


def run(
    attend,
    mechanism: Mechanism,
    length: int,
    packed: bool,
    dtype: torch.dtype,
    where: tuple[slice, ...] = (slice(None),) * 3,
) -> dict[str, Tensor]:
    """The output and the gradients of q, k, v and of what the mechanism learns; of the part `where` alone."""
    learned = {f"learned {i}": parameter for i, parameter in enumerate(learned_by(mechanism))}
    q, k, v, probe = (x[where] for x in inputs(length, dtype))
    for x in (q, k, v, *learned.values()):
        x.requires_grad_().grad = None
    output = attend(q, k, v, mechanism, documents(q.shape[2], packed), 0.0)
    (output * probe).sum().backward()
    learned = {name: parameter.grad.clone() for name, parameter in learned.items()}
    return {"output": output.detach(), "q": q.grad, "k": k.grad, "v": v.grad, **learned}


def compare(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.abs().max() > 1e-3, name
        torch.testing.assert_close(
            tensor, other[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def loops(q: Tensor, k: Tensor, v: Tensor, tau: float, packed: Documents) -> Tensor:
    """Scale-invariant attention, pair by pair: a² = 1 − m, m = −2 ln(1 + t/τ)."""
    rows = []
    for b in range(q.shape[0]):
        ids = [0] * q.shape[2] if packed.ids is None else packed.ids[b].tolist()
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys, weights = [j for j in range(i + 1) if ids[j] == ids[i]], []
                for j in keys:
                    m = -2 * math.log(1 + (i - j) / tau)
                    weights.append(torch.exp(math.sqrt(1 - m) * (q[b, h, i] @ k[b, h, j]) / math.sqrt(WIDTH) + m))
                rows.append(sum(w * v[b, h, j] for w, j in zip(weights, keys, strict=True)) / sum(weights))
    return torch.stack(rows).view_as(q)


def as_kernel(tau: float):
    return lambda q, k, v, mechanism, packed, dropout: loops(q, k, v, tau, packed)


def all_pairs_at_once(
    q: Tensor, k: Tensor, v: Tensor, mechanism: ScaleInvariant, packed: Documents, _: float
) -> Tensor:
    """The same for sequences too long for the loops: one (T, T) array, no blocks."""
    index = torch.arange(q.shape[2])
    t = (index[:, None] - index).clamp_min(0).double()
    m = -2 * torch.log(1 + t / mechanism.tau)
    unseen = index > index[:, None]
    if packed.ids is not None:
        unseen = unseen | (packed.ids[:, None, :, None] != packed.ids[:, None, None, :])
    logits = (1 - m).sqrt() * torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(WIDTH) + m
    return logits.masked_fill(unseen, -math.inf).softmax(-1) @ v


def learned_by(mechanism: Mechanism) -> list[Tensor]:
    """What it learns itself, and what it refers to."""
    return [*mechanism.parameters(), *(p for part in shared_coefficients(mechanism) for p in part.parameters())]


packings = pytest.mark.parametrize("packed", [False, True], ids=["one text", "documents"])


@packings
@pytest.mark.parametrize("tau", [10.0, 0.7])
def test_scale_invariant_is_the_double_loop(packed, tau) -> None:
    mechanism = ScaleInvariant(tau)
    expected = run(as_kernel(tau), mechanism, 13, packed, torch.float64)
    compare(run(eager.attend, mechanism, 13, packed, torch.float64), expected, 1e-9)


@packings
def test_blocks_of_queries_are_the_double_loop(packed, monkeypatch) -> None:
    monkeypatch.setattr(eager, "QUERIES_PER_BLOCK", 5)
    mechanism = ScaleInvariant(3.0)
    expected = run(as_kernel(3.0), mechanism, 13, packed, torch.float64)
    compare(run(eager.attend, mechanism, 13, packed, torch.float64), expected, 1e-9)


@packings
@pytest.mark.parametrize("length", [512, 513, 1030])
def test_long_sequences_take_blocks_and_give_the_same(length, packed, monkeypatch) -> None:
    calls = []
    real = eager.checkpoint
    monkeypatch.setattr(eager, "checkpoint", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    mechanism = ScaleInvariant()
    blocked = run(eager.attend, mechanism, length, packed, torch.float64)
    assert len(calls) == {512: 0, 513: 2, 1030: 3}[length]
    compare(blocked, run(all_pairs_at_once, mechanism, length, packed, torch.float64), 1e-9)


@packings
def test_learned_parts_get_their_gradient_through_blocks(packed, monkeypatch) -> None:
    mechanism = LogNWithSlopes().for_layer(HEADS, WIDTH, 0).double()
    whole = run(eager.attend, mechanism, 40, packed, torch.float64)
    monkeypatch.setattr(eager, "QUERIES_PER_BLOCK", 16)
    compare(run(eager.attend, mechanism, 40, packed, torch.float64), whole, 1e-9)


@pytest.mark.parametrize("name", ["window", "window, scale-invariant", "window, log n"])
@packings
def test_blocks_leave_out_keys_before_their_windows(name, packed, monkeypatch) -> None:
    mechanism = MECHANISMS[name].for_layer(HEADS, WIDTH, 0).double()
    whole = run(eager.attend, mechanism, 40, packed, torch.float64)
    monkeypatch.setattr(eager, "QUERIES_PER_BLOCK", 16)
    compare(run(eager.attend, mechanism, 40, packed, torch.float64), whole, 1e-9)


@packings
@pytest.mark.parametrize("backend", [eager, sdpa, blockwise], ids=["eager", "sdpa", "blockwise"])
def test_a_window_over_all_keys_is_none(backend, packed) -> None:
    for inner in (Plain(), LogN(learned="never"), ScaleInvariant(), ALiBi()):
        if backend.reason_against(inner) is None:
            wide, narrow, without = (
                mechanism.for_layer(HEADS, WIDTH, 0).double()
                for mechanism in (SlidingWindow(33, inner), SlidingWindow(32, inner), inner)
            )
            expected = run(backend.attend, without, 33, packed, torch.float64)
            compare(run(backend.attend, wide, 33, packed, torch.float64), expected, 1e-12)
            if not packed:  # no document here has 33 tokens
                assert (run(backend.attend, narrow, 33, packed, torch.float64)["q"] - expected["q"]).abs().max() > 1e-6


def test_logits_are_those_that_attention_takes_the_softmax_of() -> None:
    q, k, v, _ = inputs(13, torch.float64)
    packed = documents(13, True)
    for name in MECHANISMS:
        mechanism = MECHANISMS[name].for_layer(HEADS, WIDTH, 0).double()
        logits = eager.logits(q, k, mechanism, packed, 3, 11)
        assert logits.shape == (2, HEADS, 8, 11)
        expected = eager.attend(q, k, v, mechanism, packed, 0.0)[..., 3:11, :]
        torch.testing.assert_close(logits.softmax(-1) @ v[..., :11, :], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shortest", "queries"), [(1, 512), (1000, 512), (1000, 16)], ids=["one by one", "by a mask", "by masks of blocks"]
)
@packings
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", WITHOUT_DISTANCE_GAIN)
def test_sdpa_is_eager(name, dtype, tolerance, packed, shortest, queries, monkeypatch) -> None:
    mechanism = MECHANISMS[name].for_layer(HEADS, WIDTH, 0).to(dtype)
    expected = run(eager.attend, mechanism, 33, packed, dtype)
    monkeypatch.setattr(sdpa, "SHORTEST_MEAN", shortest)
    monkeypatch.setattr(eager, "QUERIES_PER_BLOCK", queries)
    compare(run(sdpa.attend, mechanism, 33, packed, dtype), expected, tolerance)


@pytest.mark.parametrize("backend", [eager, sdpa, blockwise], ids=["eager", "sdpa", "blockwise"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_packed_documents_are_separate_ones(name, backend) -> None:
    """Outputs and the gradients of q, k and v of each document are those it has alone; without masking they differ."""
    mechanism = MECHANISMS[name].for_layer(HEADS, WIDTH, 0).double()
    if backend.reason_against(mechanism) is not None:
        return
    packed, mixed = (run(backend.attend, mechanism, 12, masked, torch.float64) for masked in (True, False))
    kinds = ("output", "q", "k", "v")
    for row, starts in [(0, [0, 4, 5, 12]), (1, [0, 10, 12])]:
        for first, end in itertools.pairwise(starts):
            where = (slice(row, row + 1), slice(None), slice(first, end))
            alone = run(backend.attend, mechanism, 12, False, torch.float64, where)
            for kind in kinds:
                torch.testing.assert_close(packed[kind][where], alone[kind], rtol=1e-9, atol=1e-9)
                if first > 0 and kind == "output":
                    reach = (mechanism.window or 100) - 1
                    assert (mixed[kind][where] - alone[kind])[..., :reach, :].abs().amax(-1).min() > 1e-2


def test_dropout_drops_weights_and_keeps_the_mean() -> None:
    q, k, v, _ = inputs(6, torch.float32)
    v = torch.ones_like(v)
    for backend in (eager, sdpa):
        torch.manual_seed(0)
        outputs = torch.stack([backend.attend(q, k, v, Plain(), documents(6, False), 0.5) for _ in range(400)])
        assert outputs.std(0).max() > 0.3
        assert outputs.mean() == pytest.approx(1, abs=0.03)
