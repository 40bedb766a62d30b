"""The picture and the two tables of results in README, made from the records in docs/results.

    python -m tests.docs.first_page

writes docs/speed-ups.png, and both tables into README.md. tests/docs/test_first_page.py compares
them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from anlit.compare.statistics import SpeedUp, mean_difference
from anlit.reporting import figure
from tests.docs import annealed_tables
from tests.docs.pages import ROOT
from tests.docs.records import Study, read_record

README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "speed-ups.png"
LARGEST_SPEED_UP = 3.5
"""The right end of the picture's axis."""


@dataclass(frozen=True)
class Comparison:
    """One row of the picture.

    Args:
        training: Size and length of training; rows of the same training stand together.
        arm: The name of the arm in the record.
        baseline: The arm that it is compared with.
        folder: The record's folder in docs/results.
    """

    training: str
    arm: str
    baseline: str
    folder: str

    @property
    def study(self) -> Study:
        return Study(self.folder)

    @property
    def speed_up(self) -> SpeedUp:
        """Tokens that the baseline needs for its final loss over the tokens that the arm needs."""
        return self.study.speed_up(self.arm, self.baseline)

    @property
    def label(self) -> str:
        """`nGPT against GPT+, 3 seeds`."""
        n_seeds = len(self.study.curves[self.arm])
        return f"{self.arm} against {self.baseline}, {n_seeds} seeds"

    @property
    def result(self) -> str:
        """`1.40 (1.31 … 1.50)`, or how many seeds reach the baseline's loss."""
        speed_up = self.speed_up
        if speed_up.mean is not None:
            return speed_up.words
        if any(speed_up.values):
            return f"{speed_up.words} reach that loss"
        return "never reaches that loss"


SHORT = "1.3M parameters, 0.6 tokens per parameter"
LONG = "20 tokens per parameter"
ENGLISH = f"0.4M parameters, {LONG}, English"
COMPARISONS = (
    Comparison(SHORT, "nGPT", "GPT+", "convergence/demo"),
    Comparison(SHORT, "anGPT", "GPT+", "convergence/demo"),
    Comparison(SHORT, "anGPT, scale-invariant", "GPT+", "convergence/demo"),
    Comparison(f"1.3M parameters, {LONG}", "nGPT", "GPT+", "compute_optimal/1.3m"),
    Comparison(f"1.3M parameters, {LONG}", "anGPT", "GPT+", "bridge/plain-1.3m"),
    Comparison(
        f"0.1M parameters, {LONG}", "anGPT, scale-invariant", "anGPT", "compute_optimal/0.1m"
    ),
    Comparison(
        f"0.4M parameters, {LONG}",
        "anGPT, scale-invariant",
        "anGPT",
        "compute_optimal/0.4m-attention",
    ),
    Comparison(ENGLISH, "nGPT", "GPT+", "english"),
    Comparison(ENGLISH, "anGPT", "GPT+", "english"),
    Comparison(ENGLISH, "anGPT, scale-invariant", "anGPT", "english"),
)


def draw() -> Figure:
    """The speed-ups with their 95 % intervals, a row each, under the headings of trainings."""
    axis_figure, (axes,) = figure.panels(1, 1, width=figure.TEXT_WIDTH, height=3.6)
    row = 0.0
    training = ""
    for comparison in COMPARISONS:
        if comparison.training != training:
            training = comparison.training
            axes.text(
                -0.02,
                row,
                training,
                transform=axes.get_yaxis_transform(),
                ha="right",
                va="center",
                color="0.45",
            )
            row += 1
        draw_row(axes, row, comparison)
        row += 1
    axes.axvline(1, color=figure.INK, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(0.9, LARGEST_SPEED_UP)
    ticks = [1, 1.5, 2, 3]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(row - 0.4, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("times fewer tokens for the baseline's final loss, 95 % interval over seeds")
    return axis_figure


def draw_row(axes: Any, row: float, comparison: Comparison) -> None:
    """A label left of the axis, a point with its interval, and the numbers at the right."""
    architecture = comparison.arm.partition(",")[0]
    colour, marker = figure.ARCHITECTURES[architecture]
    if "scale-invariant" in comparison.arm:
        marker = "D"
    axes.text(
        -0.02, row, comparison.label, transform=axes.get_yaxis_transform(), ha="right", va="center"
    )
    speed_up = comparison.speed_up
    axes.text(1.02, row, comparison.result, transform=axes.get_yaxis_transform(), va="center")
    if speed_up.mean is None:
        return
    axes.plot(speed_up.mean, row, marker=marker, color=colour)
    if speed_up.test is not None:
        axes.plot([speed_up.test.low, speed_up.test.high], [row, row], color=colour)


def times_fewer(folder: str, arm: str, baseline: str) -> str:
    """`1.30 times fewer tokens (1.25 … 1.34)`."""
    return Study(folder).faster(arm, baseline).replace(" (", " times fewer tokens (", 1)


def behind(folder: str, arm: str, baseline: str) -> str:
    """`0.111 nats behind (0.078 … 0.144)`."""
    test = Study(folder).test(arm, baseline)
    low = f"{test.low:.3f}".replace("-", "−")
    return f"{test.difference:.3f} nats behind ({low} … {test.high:.3f})"


def behind_annealed(arm: str) -> str:
    """`0.111 nats behind (0.078 … 0.144)` GPT+, at the greatest length of the annealed runs."""
    length = annealed_tables.LENGTHS[-1]
    losses = annealed_tables.losses(arm, length)
    baseline_losses = annealed_tables.losses(annealed_tables.BASELINE, length)
    gap = mean_difference(losses, baseline_losses, ".3f")
    return gap.replace(" (", " nats behind (")


ARCHITECTURES_PAGE = "docs/results/architectures.md"
CLAIMS_HEAD = ("claim", "parameters", "tokens per parameter", "seeds", "result")


def linked(claim: str, heading: str) -> str:
    """The claim as a link to a section of the architectures' page."""
    return f"[{claim}]({ARCHITECTURES_PAGE}#{heading})"


def claims() -> list[tuple[str, ...]]:
    """The rows of "What is proven"; the numbers in brackets are 95 % intervals."""
    invariant = "anGPT, scale-invariant"
    untuned = linked("nGPT, untuned, is ahead after long training", "13m-parameters")
    tuned_heading = "equal-tuning-at-13m-parameters"
    tuned = linked("anGPT, tuned alike, is ahead after long training", tuned_heading)
    with_both = "anGPT, gain, unit norm of each head's average"
    with_norm = "GPT+, norm of each head's average"
    neither = "[nGPT, anGPT are ahead on English](docs/results/english.md): **not shown**"
    neither_behind = f"{behind('english', 'nGPT', 'GPT+')}, {behind('english', 'anGPT', 'GPT+')}"
    return [
        ("the code computes the papers' formulas", "", "", "", "float64, forward and backward"),
        ("a killed run, continued, ends with the same weights", "", "", "", "to the bit, on a CPU"),
        (linked("nGPT is ahead after short training", "convergence"), "1.3M", "0.6", "3",
         times_fewer("convergence/demo", "nGPT", "GPT+")),
        (linked("anGPT is ahead after short training", "convergence"), "1.3M", "0.6", "3",
         times_fewer("convergence/demo", "anGPT", "GPT+")),
        (f"{untuned}: **not shown**", "1.3M", "20", "2",
         times_fewer("compute_optimal/1.3m", "nGPT", "GPT+")),
        (f"{tuned}: **no**", "1.3M", "20", "3", behind("bridge/plain-1.3m", "anGPT", "GPT+")),
        (linked("… both with a QK gain and a norm of attention's average, neither in the paper as "
                "we read it", "the-norm-of-attentions-average"),
         "1.3M", "20", "3", behind("bridge/plain-1.3m", with_both, with_norm)),
        (linked("scale-invariant attention, with p-RoPE, helps anGPT", "scale-invariant-attention"),
         "0.1M", "20", "3", times_fewer("compute_optimal/0.1m", invariant, "anGPT")),
        (linked("… and at 0.4M", "scale-invariant-attention"), "0.4M", "20", "3",
         times_fewer("compute_optimal/0.4m-attention", invariant, "anGPT")),
        ("[… on English too](docs/results/english.md)", "0.4M", "20", "3",
         times_fewer("english", invariant, "anGPT")),
        (neither, "0.4M", "20", "3", neither_behind),
        ("[… annealed and tuned](docs/results/annealed.md): **not shown**", "0.4M", "42", "3",
         f"{behind_annealed('nGPT')}, {behind_annealed('anGPT')}"),
    ]  # fmt: skip


GPU_HEAD = ("model", "tokens a second", "share of the peak", "memory")


def gpu_rows() -> list[tuple[str, ...]]:
    """Training steps of a record: the card's measured peak, not the data sheet's, counts."""
    record = read_record("gpu/step.json")
    (group,) = record["groups"]
    n_tokens = record["settings"]["length"] * record["settings"]["batch"]
    rows = []
    for row in group["rows"]:
        if row["reason"] is not None:
            continue
        seconds = row["seconds"]["train"]["median"]
        share = row["flops"]["train"] / seconds / record["peak_flops_per_second"]
        name = row["label"].partition(" ")[0]
        speed = f"{n_tokens / seconds:,.0f}"
        rows.append((name, speed, f"{100 * share:.0f} %", f"{row['peak_bytes'] / 1e9:.1f} GB"))
    return rows


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def tables() -> dict[str, str]:
    """The tables by the NAME in their marks, `<!-- NAME -->` and `<!-- end of NAME -->`."""
    return {"claims": markdown(CLAIMS_HEAD, claims()), "gpu": markdown(GPU_HEAD, gpu_rows())}


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"


def table_in(text: str, name: str) -> str:
    """The table between its marks."""
    begin, end = marks(name)
    return text.partition(begin)[2].partition(end)[0]


def write(path: Path = README) -> None:
    """Draw the picture, and put the tables between their marks."""
    with figure.style(9):
        draw().savefig(PICTURE, dpi=figure.PLOT_DPI)
    text = path.read_text(encoding="utf-8")
    for name, table in tables().items():
        begin, end = marks(name)
        text = text.replace(begin + table_in(text, name) + end, begin + table + end)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
