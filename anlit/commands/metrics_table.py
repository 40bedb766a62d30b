"""The table of metrics that `anlit validate` and `anlit test` print."""

from collections.abc import Mapping, Sequence

from anlit.reporting.table import NONE, Table
from anlit.reporting.text import minus

LOADER_SUFFIX = "/dataloader_idx_"
"""Lightning's mark at the end of a metric's name, if the data have several loaders."""
LARGEST_WITH_FRACTION = 1e6
"""From here on six digits would need an exponent."""


def metrics_table(results: Sequence[Mapping[str, float]]) -> Table:
    """Return a table with a row for each metric, and a column for each loader of data.

    `results` are those of `Trainer.validate`. A number has six significant digits, about as many as
    float32 has, or all digits before its point. Loggers get all digits.
    """
    columns: list[dict[str, str]] = []
    names: set[str] = set()
    for metrics in results:
        column = {}
        for key, value in metrics.items():
            name = key.partition(LOADER_SUFFIX)[0]
            column[name] = _format_metric(float(value))
        columns.append(column)
        names |= column.keys()
    heads = ["value"]
    if len(results) > 1:
        heads = [f"loader {number}" for number in range(len(results))]
    rows = []
    for name in sorted(names):
        cells = [column.get(name, NONE) for column in columns]
        rows.append([name, *cells])
    return Table("", ["metric", *heads], rows)


def _format_metric(value: float) -> str:
    has_no_fraction = value.is_integer() or abs(value) >= LARGEST_WITH_FRACTION
    text = f"{value:,.0f}" if has_no_fraction else f"{value:,.6g}"
    return minus(text)
