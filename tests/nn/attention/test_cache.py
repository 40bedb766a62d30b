"""Text in pieces with a cache gives the same logits as the whole text."""

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from anlit import (
    GPT,
    DynamicNTK,
    NoPE,
    Plain,
    PositionsPattern,
    PRoPE,
    RoPE,
    SlidingWindow,
    SqrtLogN,
)
from anlit.nn.attention.cache import KeyValueCache
from anlit.nn.kernels import sdpa
from anlit.nn.models.decoder import Decoder
from tests.nn.attention.examples import SHIPPED
from tests.nn.attention.kernels import assert_same
from tests.nn.models.tiny import architectures, decoder, random_tokens

LENGTH = 40
CUTS = (0, 9, 10, 11, 25, LENGTH)
TOKENS = random_tokens(3, LENGTH)
DOCUMENTS = (TOKENS == 3).cumsum(1)


@torch.no_grad()
def in_pieces(
    model: Decoder, tokens: Tensor, ids: Any, cache: KeyValueCache, cuts: Sequence[int] = CUTS
) -> Tensor:
    logits = []
    for first, end in pairwise(cuts):
        ids_of_piece = None if ids is None else ids[:, first:end]
        logits.append(model(tokens[:, first:end], ids_of_piece, cache=cache))
    return torch.cat(logits, 1)


NORMS = {"v_norm": True, "attention_norm": True, "post_norm": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "rope": {"positions": RoPE(1.0)},
    "p-rope": {"positions": PRoPE()},
    "nope": {"positions": NoPE()},
    "dynamic ntk": {"positions": DynamicNTK(training_length=10)},
    "pattern of positions": {"positions": PositionsPattern([RoPE(), NoPE()])},
    "norms": {"attention_gate": "per_head", **NORMS},
    "epsilon": {"attention_gate": "per_element", "qk_norm_eps": 0.1},
    "one key": {"n_heads": 4, "n_kv_heads": 1, "d_head": 12},
    "two keys": {"n_heads": 4, "n_kv_heads": 2, "d_head": 12},
}
OTHER_SETTINGS = [name for name in SETTINGS if name != "defaults"]
WITH_ALL_SETTINGS = (
    "plain",
    "scale-invariant, c per layer",
    "sqrt log n",
    "alibi",
    "window, log n",
)
"""The mechanisms that are tried with all settings."""


@pytest.mark.parametrize(
    ("name", "settings"),
    [*product(SHIPPED, ["defaults"]), *product(WITH_ALL_SETTINGS, OTHER_SETTINGS)],
)
@architectures
@pytest.mark.covering(2)
@torch.no_grad()
def test_every_mechanism_and_setting_in_pieces(architecture, settings: str, name: str) -> None:
    """nGPT's gain after RoPE makes scores depend on the position itself."""
    model = decoder(architecture, attention=SHIPPED[name], **SETTINGS[settings])
    for ids in (DOCUMENTS, None):
        logits = in_pieces(model, TOKENS, ids, KeyValueCache(LENGTH))
        assert_same(logits, model(TOKENS, ids))


@pytest.mark.parametrize(
    ("name", "has_mask"),
    [
        ("log n", [False, False]),
        ("alibi", [True, True]),
        ("window", [False, False]),
        ("scale-invariant", []),
    ],
)
def test_a_fused_kernel_computes_one_query_without_a_gain_by_distance(
    name: str, has_mask: list[bool], monkeypatch
) -> None:
    """`has_mask` lists the calls of two layers."""
    masks = []
    fused = sdpa.fused

    def record_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *more: Any) -> Tensor:
        masks.append(mask)
        return fused(q, k, v, mask, *more)

    monkeypatch.setattr(sdpa, "fused", record_mask)
    model = decoder(GPT, attention=SHIPPED[name], kernel="eager")

    in_pieces(model, TOKENS, None, KeyValueCache(LENGTH), (0, 30, 31, LENGTH))

    assert [mask is not None for mask in masks] == has_mask


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize(
    "name", ["plain", "scale-invariant", "sqrt log n, r per head", "alibi", "window, log n"]
)
def test_rows_of_different_lengths_do_not_see_each_others_padding(name: str, masking: bool) -> None:
    model = decoder(GPT, attention=SHIPPED[name], document_masking=masking)
    n_padded = [0, 11, 4]
    tokens = TOKENS.clone()
    ids = DOCUMENTS.clone()
    for row, n in enumerate(n_padded):
        tokens[row, :n] = 28 - row
        ids[row, :n] = ids[row, n].item()
    cache = KeyValueCache(LENGTH, torch.tensor(n_padded))
    cuts = (0, 15, 16, 17, 18, 30, LENGTH)

    logits = in_pieces(model, tokens, ids, cache, cuts)

    for row, n in enumerate(n_padded):
        tokens_alone = TOKENS[row, n:]
        ids_alone = DOCUMENTS[row, n:]
        with torch.no_grad():
            (logits_alone,) = model(tokens_alone[None], ids_alone[None])
        assert_same(logits[row, n:], logits_alone)


@pytest.mark.parametrize(
    ("attention", "n_kv_heads", "n_visible", "n_kept"),
    [
        (SlidingWindow(40, SqrtLogN()), 2, 40, 39),
        (Plain(), 2, 700, 700),
        (Plain(), 1, 700, 700),
    ],
)
@torch.no_grad()
def test_a_window_bounds_the_memory_and_takes_more_new_tokens_than_a_block_of_queries(
    attention, n_kv_heads, n_visible, n_kept
) -> None:
    """2 layers, 2 or 1 heads of keys of width 16, float64: 1,024 or 512 bytes per slot."""
    tokens = random_tokens(1, 700)
    cuts = (0, 40, 600, *range(610, 700, 10), 700)
    model = decoder(GPT, attention=attention, n_kv_heads=n_kv_heads)
    cache = KeyValueCache(700)

    logits = in_pieces(model, tokens, None, cache, cuts)

    assert_same(logits, model(tokens))
    assert model.cache_bytes(700, 8) == n_visible * n_kv_heads * 512
    assert bytes_held(cache) == n_kept * n_kv_heads * 512


@torch.no_grad()
def test_a_window_does_not_hold_the_memory_of_a_long_prompt() -> None:
    model = decoder(GPT, attention=SlidingWindow(40), n_kv_heads=2)
    cache = KeyValueCache(701)

    model(random_tokens(1, 700), cache=cache)
    bytes_after_prompt = bytes_held(cache)
    model(random_tokens(1, 1), cache=cache)

    assert bytes_after_prompt == 39 * 2 * 512
    assert bytes_held(cache) == 40 * 2 * 512


def bytes_held(cache: KeyValueCache) -> int:
    """The memory of a cache, with what lies beside its keys and values in their storages."""
    storages = {}
    for keys_and_values in cache._layers.values():
        for tensor in keys_and_values:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
