"""The figures on the pages of results follow from their records."""

import re
from pathlib import Path

import pytest

import tests.docs.annealed_tables
import tests.docs.architecture_claims
import tests.docs.architecture_tables
import tests.docs.attention_claims
import tests.docs.bridge_claims
import tests.docs.english_tables
import tests.docs.inside_tables
import tests.docs.speed_claims
import tests.docs.speed_tables
import tests.docs.transfer_tables  # noqa: F401  these modules register tables and sentences
from anlit.compare.statistics import Interval, median_with_interval
from tests.docs.page_tables import TABLES, UNRECORDED, Key
from tests.docs.pages import ROOT
from tests.docs.printed_figures import (
    NUMBER,
    is_printed,
    matches,
    plain,
    sections,
    tables,
    value_of,
)
from tests.docs.records import RESULTS, Study, read_record
from tests.docs.result_claims import Claim, claims
from tests.docs.section_claims import section_claims

PAGES = (
    "annealed.md",
    "architectures.md",
    "attention.md",
    "english.md",
    "inside.md",
    "nu_att.md",
    "speed.md",
    "transfer.md",
)
"""tests/docs/test_gpu_page.py tests gpu.md."""
ESTIMATES = ("speed.md", "Sizes")
"""A table of `anlit size`, which computes and does not measure."""
TABLES_OF_SENTENCES: list[Key] = [
    ("architectures.md", "In short", 0),
    ("architectures.md", "In short", 1),
    ("speed.md", "Speed and memory", 0),
    ("attention.md", "Attention mechanisms", 0),
    ("english.md", "Sentences by corpus", 0),
]
"""Summaries. Claims hold the figures in their cells."""
FILES = "links to the records"
LOST = "no record is kept, and the page says so"
COMMITS = "the commits of the runs, not a measurement"
WITHOUT_RECORD: dict[Key, str] = {
    ("architectures.md", "Defaults", 0): "a rule; its cells name their sweep or a missing record",
    ("architectures.md", "A bridge from nGPT", 1): COMMITS,
    ("attention.md", "Mechanisms by length at 20 tokens per parameter", 2): FILES,
    ("nu_att.md", "Does anGPT's attention want its missing factor?", 1): LOST,
    ("architectures.md", "The norm of attention's average", 2): COMMITS,
}
"""Tables without a record, each with the reason."""
NO_RESULTS = ("0.6 tokens per parameter", "torch 2.13.0+cpu", "Apache-2.0")
PAPERS = "a number of the papers"
SETTING = "a setting, not a measurement"
DEFINITION = "a definition"
EXAMPLE = "the example of README"
PHRASES_WITHOUT_RECORD: dict[tuple[str, str], dict[str, str]] = {
    ("README.md", "Results"): {
        "from 0.6 to 6": SETTING,
        "at 0.6 GPT+'s initial weights": SETTING,
        "1.13 is not significant": "its record is compared in the sentence before",
        "within 0.03 nats": "test_defaults_are_as_good_as_tuned_settings",
        "1.60 becomes 2.01 and 1.29 becomes 1.08": "test_wall_clock_on_a_busy_machine",
        "the aim of 1.15": "an aim",
    },
    ("architectures.md", "In short"): {"needs 1.40 times": PAPERS, "needs 1.29 times": PAPERS},
    ("architectures.md", "Depth"): {"[anGPT]'s 1.40": PAPERS},
    ("architectures.md", "Defaults"): {
        "end within 0.03 of their tuned settings": "test_defaults_are_as_good_as_tuned_settings",
        "ends at 4.100 (GPT+), 4.067 (nGPT) and 4.018 (anGPT) as printed, on 10.9 MB": EXAMPLE,
        "weights of 0.05 ends at 4.047": EXAMPLE,
    },
    ("architectures.md", "A bridge from nGPT"): {"a loss of 3.3 nats": DEFINITION},
    ("architectures.md", "The gain on queries and keys"): {"reach 3.0 later": DEFINITION},
    ("architectures.md", "The norm of attention's average"): {"A loss of 3.0": DEFINITION},
    ("architectures.md", "The same model on fewer tokens"): {
        "From 0.6 to 6": SETTING,
        "At 0.6": SETTING,
        "initial weights of 0.02": SETTING,
        "reports of 0.6": SETTING,
    },
    ("architectures.md", "Convergence"): {
        "reports 1.29 and 1.40 at 0.5B, 1.8 and 2.0 without": PAPERS
    },
    ("architectures.md", "What a validation is taken on"): {"1.39 (1.19 … 1.63)": LOST},
    ("architectures.md", "Rate and batch size over size"): {
        "from 0.016 at width 32 to 0.004 or 0.008 at 128": "the rates in the table"
    },
    ("architectures.md", "From GPT+ to anGPT"): {"(−3.4 against −3.0 %)": PAPERS},
    ("attention.md", "Mechanisms by length after short training"): {"(0.3 % at 64k": PAPERS},
    ("attention.md", "Normal scores"): {
        "(36.6 … 37.9, unnormalised)": "`anlit diagnose --gaussian` computes it without a model"
    },
    ("speed.md", "Speed and memory"): {
        "aim of 1.15": "an aim",
        "in 0.9 days": "an estimate of `anlit size`",
    },
    ("speed.md", "Hidden states in float32"): {
        "loss first is 3.3": DEFINITION,
        "4.3, 3.5, 4.8 with bfloat16": "the record has no curves, and the page says so",
        "ends at 2.297": "a run without a record",
    },
}
"""Phrases with figures that no record has, by page and heading, each with the reason."""


@pytest.mark.parametrize("key", TABLES, ids=lambda key: "-".join(map(str, key)))
def test_a_table_follows_from_its_record(key: Key) -> None:
    page, heading, number = key

    printed = tables(sections(RESULTS / page)[heading])[number]
    computed = TABLES[key]()

    assert [row[0] for row in printed] == [row[0] for row in computed]
    for printed_row, row in zip(printed, computed, strict=True):
        for printed_cell, cell in zip(printed_row, row, strict=True):
            assert cell is UNRECORDED or is_printed(printed_cell, cell), printed_row


def text_of(page: str, heading: str) -> str:
    return plain(" ".join(sections(RESULTS / page)[heading].split()))


CLAIMS = [*claims(), *section_claims()]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim[0]}: {claim[2][:40]}")
def test_a_sentence_has_the_figures_of_its_record(claim: Claim) -> None:
    page, heading, computed = claim

    candidates = matches(computed, text_of(page, heading))

    assert any(is_printed(printed, computed) for printed in candidates), (candidates, computed)


SECTIONS = [("../../README.md", "anlit"), ("README.md", "Results")]
for page in PAGES:
    for heading in sections(RESULTS / page):
        if (page, heading) != ESTIMATES:
            SECTIONS.append((page, heading))
_FIGURE = re.compile(r"(?<![\d.])−?\d+\.\d+(?![\d.]*[\dMB]\b)(?!\.\d|\d)")


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: " ".join(section))
def test_every_figure_has_a_record_or_is_listed(section: tuple[str, str]) -> None:
    """Tables are compared whole, except tables of sentences."""
    page, heading = section
    text = sections(RESULTS / page)[heading]
    if any(key[:2] == section for key in (*TABLES, *WITHOUT_RECORD)):
        text = re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)
    text = plain(" ".join(re.sub(r"`[^`]*`", "", text).split()))

    for claim_page, claim_heading, claim in CLAIMS:
        if (claim_page, claim_heading) == section:
            for printed in matches(claim, text):
                text = text.replace(printed, "")
    for phrase in (*PHRASES_WITHOUT_RECORD.get(section, {}), *NO_RESULTS):
        text = text.replace(phrase, "")

    assert _FIGURE.findall(text) == []


def test_every_table_has_a_record_or_is_listed() -> None:
    keys = set()
    for page in PAGES:
        for heading, section in sections(RESULTS / page).items():
            if (page, heading) != ESTIMATES:
                keys |= {(page, heading, number) for number in range(len(tables(section)))}

    assert keys == {*TABLES, *WITHOUT_RECORD, *TABLES_OF_SENTENCES}


def test_every_listed_phrase_stands_on_its_page() -> None:
    for (page, heading), phrases in PHRASES_WITHOUT_RECORD.items():
        text = text_of(page, heading)
        assert [phrase for phrase in phrases if phrase not in text] == []


@pytest.mark.parametrize("size", ["0.1m", "0.4m", "1.3m"])
def test_defaults_are_as_good_as_tuned_settings(size: str) -> None:
    study = Study(f"defaults/{size}")
    for arm in ("GPT+", "nGPT", "anGPT"):
        gap = study.minus(f"{arm}, defaults", f"{arm}, tuned").partition(" ")[0]
        assert abs(value_of(gap)) < 0.03


@pytest.mark.parametrize(
    ("run", "column"), [("angpt-scale-invariant", 3), ("angpt", 4), ("ngpt", 5)]
)
def test_wall_clock_on_a_busy_machine(run: str, column: int) -> None:
    """A speed-up times its ratio of times is the speed-up in tokens, which every row shares."""
    _, *rows = tables(sections(RESULTS / "speed.md")["Wall-clock on a busy machine"])[0]
    files = ("load-9-spinning", "load-11-spinning", "load-9-asleep")
    intervals = []
    speed_ups_in_tokens = []
    for row, name in zip(rows, files, strict=True):
        time = ratio_of_times(name, run)
        speed_up, low, high = map(value_of, NUMBER.findall(row[column]))
        speed_ups_in_tokens.append(speed_up * time.median)
        intervals.append((low, high, time))

    tokens = speed_ups_in_tokens[-1]
    assert max(speed_ups_in_tokens) == pytest.approx(min(speed_ups_in_tokens), rel=0.01)
    for low, high, time in intervals:
        assert tokens / time.high == pytest.approx(low, rel=0.01)
        assert tokens / time.low == pytest.approx(high, rel=0.01)


def ratio_of_times(name: str, run: str) -> Interval:
    """Return the time of a run's steps over the time of GPT+, in a record of a busy machine."""
    seconds = {}
    for arm in read_record(f"busy_cpu/{name}.json")["arms"]:
        seconds[Path(arm["run"]).name] = arm["seconds_per_token"]
    pairs = zip(seconds[run], seconds["gpt"], strict=True)
    return median_with_interval([run_time / gpt_time for run_time, gpt_time in pairs])


PAPERS_SPEED_UPS = re.compile(r"1\.29|1\.40 (?:times|\()|1\.40 at")
PAPERS_NAMES = re.compile(r"anGPT\]|[Pp]apers?\b")
HOW_PAPERS_MEASURE = re.compile(r"means? over the curve")
WRITTEN = [
    *(path for path in ROOT.glob("docs/**/*.md") if path.name != "report.md"),
    ROOT / "README.md",
    *ROOT.glob("configs/**/*.yaml"),
]


def test_a_comparison_with_the_papers_says_how_they_measure() -> None:
    """Papers give means over the curve of a longer training. We compare at the final loss."""
    silent = []
    for path in WRITTEN:
        for section in re.split(r"^#+ ", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            text = " ".join(section.split())
            compares = PAPERS_SPEED_UPS.search(text) and PAPERS_NAMES.search(text)
            if compares and not HOW_PAPERS_MEASURE.search(text):
                silent.append(f"{path}: {text[:60]}")
    assert silent == []
