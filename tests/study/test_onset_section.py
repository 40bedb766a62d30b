"""The section of onsets: when each seed first has a loss, and its loss some tokens later."""

from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest

from tests.compare.reports import t_interval
from tests.study.conftest import ARMS_ON_OTHER_TOKENS
from tests.study.reports import FINAL_LOSSES, report_with, with_interval
from tests.study.synthetic import SHARE, curve_to

pytestmark = pytest.mark.usefixtures("unsaved")
TOKENS = 400 * 8 * 256
ONSET = {"loss": 4.3, "after": 200_000, "baseline": "gpt"}
ONSETS = "onset of each seed, tokens"
ONSET_GAP = "minus that of GPT+, 10⁶ tokens"
LATER_LOSS = "loss 200k tokens after it"
LATER_GAP = "minus that of GPT+"


def test_the_onset_and_the_loss_after_it(folder: Path) -> None:
    page = report_with({"onset": ONSET}, folder)

    gpt = page.row("GPT+", ONSETS)
    angpt = page.row("anGPT", ONSETS)
    gpt_onsets, gpt_losses = onsets_and_later_losses("gpt")
    angpt_onsets, angpt_losses = onsets_and_later_losses("angpt")
    check_onsets(gpt, gpt_onsets, gpt_losses)
    check_onsets(angpt, angpt_onsets, angpt_losses)
    assert gpt[ONSET_GAP] == "–"
    assert gpt[LATER_GAP] == "–"
    assert angpt[ONSET_GAP] == mean_with_t_interval((angpt_onsets - gpt_onsets) / 1e6)
    assert angpt[LATER_GAP] == mean_with_t_interval(angpt_losses - gpt_losses)


def onsets_and_later_losses(arm: str) -> tuple[np.ndarray, np.ndarray]:
    """The onset of each seed of an arm in tokens, and its loss 200,000 tokens later."""
    onsets = []
    losses = []
    for final_loss in FINAL_LOSSES[arm].values():
        tokens = SHARE * TOKENS
        curve = curve_to(final_loss)
        onset = np.interp(-4.3, -curve, tokens)
        onsets.append(onset)
        losses.append(np.interp(onset + 200_000, tokens, curve))
    return np.array(onsets), np.array(losses)


def check_onsets(row: dict[str, str], onsets: np.ndarray, losses: np.ndarray) -> None:
    """Compare a row of the table with the onsets and later losses of its seeds."""
    for cell, onset in zip(row[ONSETS].split(", "), onsets, strict=True):
        thousands = float(cell.removesuffix("k"))
        assert thousands == pytest.approx(onset / 1e3, rel=5e-3)
    assert row[LATER_LOSS] == f"{fmean(losses):.3f} ± {stdev(losses):.3f}"


def mean_with_t_interval(gaps: np.ndarray) -> str:
    low, high = t_interval(gaps)
    return with_interval(".3f", gaps.mean(), low, high)


def test_a_level_that_one_seed_reaches_has_one_onset(folder: Path) -> None:
    section = {"onset": {"loss": 3.495, "after": 1, "baseline": "angpt"}}

    page = report_with(section, folder)

    gpt = page.row("GPT+", ONSETS)
    assert gpt[ONSETS].count("–") == 2
    assert gpt["minus that of anGPT, 10⁶ tokens"] == "1 of 3 seeds"


def test_onsets_by_losses_on_other_tokens_are_not_subtracted(folder: Path) -> None:
    page = report_with({"onset": ONSET}, folder, arms=ARMS_ON_OTHER_TOKENS)

    angpt = page.row("anGPT", ONSETS)
    assert angpt[ONSET_GAP] == "– (validated differently)"
    assert angpt[LATER_GAP] == "– (validated differently)"
