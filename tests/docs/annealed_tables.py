"""The tables and sentences of annealed.md, computed from the studies' records."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from anlit.compare.annealed import AnnealedSpeedUp, End, annealed_speed_up, trend
from anlit.compare.statistics import SpeedUp, mean_difference
from tests.docs.page_tables import ANNEALED, Rows, table
from tests.docs.records import FORM, Study, read_record, summary
from tests.docs.section_claims import section

ARMS = {
    "GPT+": "gpt",
    "GPT+, norm of each head's average": "gpt-attention_norm",
    "nGPT": "ngpt",
    "anGPT": "angpt",
    "anGPT, gain, unit norm of each head's average": "angpt-gain-attention_norm",
}
"""Title → key in the studies."""
BASELINE = "GPT+"
ARMS_WITH_BASELINE = [title for title in ARMS if title != BASELINE]
LENGTHS = (500, 1000, 2000, 4000)
"""Steps."""
DECAY = 0.2
"""The share of steps with a falling rate in an annealed run."""
RATES = (0.002, 0.004, 0.008, 0.016, 0.032)
TITLE = "Annealed runs by length"
RATES_TITLE = "Rates with an annealed schedule"

LossBySeed = dict[int, float]


def points(arm: str) -> dict[int, dict[str, Any]]:
    """An arm against GPT+ in the record, by length in steps."""
    for line in read_record("annealed/report.json")["annealed"]:
        if line["arm"] == arm and line["baseline"] == BASELINE:
            return {point["max_steps"]: point for point in line["points"]}
    raise KeyError(arm)


def losses(arm: str, length: int) -> LossBySeed:
    """The annealed losses of an arm at a length, by the number of the seed."""
    if arm == BASELINE:
        values = points(ARMS_WITH_BASELINE[0])[length]["baseline_losses"]
    else:
        values = points(arm)[length]["losses"]
    return dict(enumerate(values))


def ends(arm: str) -> dict[int, dict[int, End]]:
    """The ends of an arm's runs by seed and length."""
    ends_by_seed: dict[int, dict[int, End]] = {}
    for length in LENGTHS:
        tokens = points(ARMS_WITH_BASELINE[0])[length]["tokens"]
        for seed, loss in losses(arm, length).items():
            ends_by_seed.setdefault(seed, {})[length] = End(tokens, loss)
    return ends_by_seed


def speed_ups(arm: str) -> list[AnnealedSpeedUp]:
    return [annealed_speed_up(ends(BASELINE), ends(arm), length) for length in LENGTHS]


def by_length(arms: Iterable[str], cell: Callable[[str, int], str]) -> Rows:
    """A row for each arm, with a cell for each length."""
    return [[arm, *(cell(arm, length) for length in LENGTHS)] for arm in arms]


@table(ANNEALED, TITLE, 0)
def mean_losses() -> Rows:
    return by_length(ARMS, lambda arm, length: summary(losses(arm, length).values()))


def minus_baseline(arm: str, length: int) -> str:
    """The arm's losses minus GPT+'s, paired by seed."""
    return mean_difference(losses(arm, length), losses(BASELINE, length), FORM)


@table(ANNEALED, TITLE, 1)
def differences() -> Rows:
    return by_length(ARMS_WITH_BASELINE, minus_baseline)


def annealed_speed_up_in_words(arm: str, length: int) -> str:
    return annealed_speed_up(ends(BASELINE), ends(arm), length).words


@table(ANNEALED, TITLE, 2)
def annealed_speed_ups() -> Rows:
    return by_length(ARMS_WITH_BASELINE, annealed_speed_up_in_words)


def crossing_in_words(arm: str, length: int) -> str:
    return SpeedUp(tuple(points(arm)[length]["speedup_crossing"])).words


@table(ANNEALED, TITLE, 3)
def crossing_speed_ups() -> Rows:
    return by_length(ARMS_WITH_BASELINE, crossing_in_words)


@table(ANNEALED, RATES_TITLE)
def losses_by_rate() -> Rows:
    rows = []
    for title, key in ARMS.items():
        tuned_losses = {}
        for entry in Study("annealed-rates").record["tuning"][key]:
            tuned_losses[entry["setting"]["lr"]] = entry["loss"]
        best = min(tuned_losses, key=tuned_losses.__getitem__)
        tried = sorted(tuned_losses)
        assert tried[0] < best < tried[-1], f"{title}: the page says that it is inside its grid"
        cells = [f"{tuned_losses[rate]:.6f}" if rate in tuned_losses else "" for rate in RATES]
        rows.append([title, *cells])
    return rows


@section(ANNEALED, TITLE)
def figures_of_the_text() -> Iterator[str]:
    longest = LENGTHS[-1]
    yield f"anGPT is behind by {minus_baseline('anGPT', longest)} at 42"
    yield f"GPT+ needs {annealed_speed_up_in_words('anGPT', longest)} times anGPT's tokens"
    shortest = LENGTHS[0]
    with_both = losses("anGPT, gain, unit norm of each head's average", shortest)
    lead = mean_difference(losses(BASELINE, shortest), with_both, FORM)
    yield f"anGPT with gain and norm leads by {lead}"
    spreads = []
    for arm in ARMS:
        values = losses(arm, longest).values()
        spreads.append(max(values) - min(values))
    yield f"Seeds of an arm differ by up to {max(spreads):{FORM}} nats"
    for arm in ("nGPT", "anGPT"):
        change = trend(speed_ups(arm))
        assert change is not None
        yield f"{change.per_doubling} for {arm}"


@section(ANNEALED, TITLE)
def hours_of_training() -> Iterator[str]:
    """An annealed run counts on from its stable run, so the decay's share is its own."""
    seconds = 0.0
    for name, run in Study("annealed").record["measured"].items():
        share = DECAY if "_annealed=" in name else 1.0
        seconds += share * run["curve"]["seconds"][-1]
    yield f"{seconds / 3600:.2f} hours of training in all"


@section(ANNEALED, RATES_TITLE)
def hours_of_the_tuning() -> Iterator[str]:
    seconds = 0.0
    for run in Study("annealed-rates").record["measured"].values():
        seconds += run["curve"]["seconds"][-1]
    yield f"{seconds / 3600:.2f} hours of training in all"
