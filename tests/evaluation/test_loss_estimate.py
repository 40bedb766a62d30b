"""A mean loss over pieces of text, and its standard error."""

import math

import numpy as np
import pytest

from anlit.evaluation.lengths import estimate_loss


def test_the_standard_error_is_over_pieces() -> None:
    losses = np.random.default_rng(0).normal(size=50)
    tokens = np.full(50, 10.0)

    estimate = estimate_loss(tokens * losses, tokens)

    standard_error = losses.std(ddof=1) / math.sqrt(50)
    assert estimate["loss"] == pytest.approx(losses.mean())
    assert estimate["standard_error"] == pytest.approx(standard_error)


def test_a_piece_without_targets_does_not_count() -> None:
    sums = np.array([30.0, 20.0])
    tokens = np.array([10.0, 10.0])

    estimate = estimate_loss(sums, tokens)
    with_an_empty_piece = estimate_loss(np.append(sums, 0.0), np.append(tokens, 0.0))

    assert with_an_empty_piece == estimate


def test_no_target_has_no_loss_and_a_single_piece_no_error() -> None:
    no_targets = estimate_loss(np.zeros(3), np.zeros(3))
    single_piece = estimate_loss(np.ones(1), np.ones(1))

    assert no_targets["loss"] is None
    assert single_piece["standard_error"] is None


def test_the_standard_error_of_a_ratio_is_its_spread_over_many_draws() -> None:
    """Pieces have different numbers of targets."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 9, (4000, 60)).astype(float)
    piece_losses = rng.normal(3, 0.5, tokens.shape)
    noise = rng.normal(0, 2, tokens.shape)
    sums = tokens * piece_losses + noise

    losses = []
    errors = []
    for sums_of_draw, tokens_of_draw in zip(sums, tokens, strict=True):
        estimate = estimate_loss(sums_of_draw, tokens_of_draw)
        losses.append(estimate["loss"])
        errors.append(estimate["standard_error"])

    spread = np.std(losses)
    assert np.mean(errors) == pytest.approx(spread, rel=0.05)
