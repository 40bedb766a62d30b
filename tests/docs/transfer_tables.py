"""The tables and sentences of transfer.md, computed from the study's record."""

from collections.abc import Iterator

from tests.docs.page_tables import TRANSFER, Rows, table
from tests.docs.records import Study
from tests.docs.section_claims import section

ARMS = {
    "GPT+": "gpt",
    "GPT+, µP": "gpt-transfer",
    "nGPT": "ngpt",
    "nGPT, νGPT's rule": "ngpt-transfer",
    "anGPT": "angpt",
    "anGPT, νGPT's rule": "angpt-transfer",
}
"""Title → key in the study."""
WIDTHS = (32, 64, 128)


def losses_by_rate(key: str, width: int) -> dict[float, float]:
    """The losses of the tuning, by peak rate."""
    losses = {}
    for entry in Study("transfer").record["tuning"][f"{key}_d_model={width}"]:
        losses[entry["setting"]["lr"]] = entry["loss"]
    return losses


def best_rate(key: str, width: int) -> float:
    losses = losses_by_rate(key, width)
    return min(losses, key=losses.__getitem__)


@table(TRANSFER, "Transfer of the learning rate")
def best_rates() -> Rows:
    rows = []
    for title, key in ARMS.items():
        rates = [f"{best_rate(key, width):g}" for width in WIDTHS]
        losses = losses_by_rate(key, WIDTHS[-1])
        at_base = losses[best_rate(key, WIDTHS[0])]
        rows.append([title, *rates, f"{at_base:.6f}", f"{min(losses.values()):.6f}"])
    return rows


@section(TRANSFER, "Transfer of the learning rate")
def sentences() -> Iterator[str]:
    for title, key in ARMS.items():
        if key.endswith("transfer"):
            rates = {best_rate(key, width) for width in WIDTHS}
            assert len(rates) == 1, f"{title}: the page says that the best rate stays"
    ngpt = losses_by_rate("ngpt", 128)
    transferred = losses_by_rate("ngpt-transfer", 128)
    behind = min(transferred.values()) - min(ngpt.values())
    yield f"nGPT ends {behind:.3f} higher with the rule than at its own best rate"
    angpt = min(losses_by_rate("angpt-transfer", 128).values()) - min(
        losses_by_rate("angpt", 128).values()
    )
    yield f"anGPT {angpt:.3f}"
    gpt = min(losses_by_rate("gpt", 128).values()) - min(
        losses_by_rate("gpt-transfer", 128).values()
    )
    yield f"GPT+ ends {gpt:.3f} lower with µP"
    seconds = 0.0
    for run in Study("transfer").record["measured"].values():
        seconds += run["curve"]["seconds"][-1]
    yield f"{seconds / 3600:.2f} hours of training in all"
