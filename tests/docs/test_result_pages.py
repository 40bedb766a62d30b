"""The figures on the pages of results are those of their records."""

import re
from pathlib import Path

import pytest

import tests.docs.architecture_tables
import tests.docs.speed_tables  # noqa: F401  they register their tables
from anlit.compare.statistics import median_with_interval
from tests.docs.page_tables import TABLES, UNRECORDED, Key
from tests.docs.pages import ROOT
from tests.docs.records import RESULTS, Study, read_record
from tests.docs.result_claims import Claim, claims
from tests.docs.section_claims import section_claims

PAGES = ("architectures.md", "attention.md", "nu_att.md", "speed.md")
"""tests/docs/test_gpu_page.py has gpu.md."""
ESTIMATES = ("speed.md", "Sizes")
"""What `anlit size` computes, no measurement."""
WITHOUT_RECORD: dict[Key, str] = {
    ("architectures.md", "Defaults", 0): "a rule; the cells name their sweep, or say that there is no record",
}  # fmt: skip
NO_RESULTS = ("0.6 tokens per parameter", "torch 2.13.0+cpu", "Apache-2.0")
PAPERS, SETTING, DEFINITION, LOST = (
    "a number of the papers",
    "a setting, no measurement",
    "a definition",
    "no record is kept, and the page says so",
)
WORDS_WITHOUT_RECORD: dict[tuple[str, str], dict[str, str]] = {
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
        "within 0.03 at all": "test_defaults_are_as_good_as_tuned_settings",
        "weights of 0.05 with a warm-up of 20 % end at 3.435, 0.03 with 20 % at 3.421, 0.05 with "
        "40 % at 3.414, 0.02 with 20 % at 3.413, 0.03 with 40 % at 3.398": LOST,
        "ends at 4.100 (GPT+), 4.067 (nGPT) and 4.018 (anGPT) as printed, on 10.9 MB": "README's example",
        "weights of 0.05 ends at 4.047": "README's example",
        "3.388.": "its record is compared in the sentence before",
    },
    ("architectures.md", "A bridge from nGPT"): {"first is 3.3 nats": DEFINITION},
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
    ("nu_att.md", "Does anGPT's attention want its missing factor?"): {
        "0.30 to 0.42 where normal scores give 0.294": "the output of `diagnose` is not kept",
        "0.07 to 0.11 where they give 0.060": "the output of `diagnose` is not kept",
        "0.52 to 0.61 of their norm (scale-invariant) and 0.26 to 0.36": "the same",
        "1.8 to 2.1 and 4 to 6 times": "the same",
    },
    ("speed.md", "Hidden states in float32"): {
        "4.3, 3.5, 4.8 with bfloat16": "the record has no curves, and the page says so",
        "ends at 2.297": "a run without a record",
    },
}
"""Figures in sentences that no record holds, by page and heading, each with the reason."""
_NUMBER = re.compile(r"−?\d+(?:,\d{3})*(?:\.\d+)?")
_INTERVAL = re.compile(
    r"(\(|interval |quartiles |, )([+−]?\d[\d.]*) (?:to|–|…) ([+−]?\d[\d.]*)(?=[,;) ])"
)


def plain(text: str) -> str:
    """Without bold, links and plus signs, and with one way to write an interval."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text.replace("**", ""))
    text = _INTERVAL.sub(r"\1\2 … \3", text)
    return re.sub(r"\+(?=\d)", "", text)


def sections(page: Path) -> dict[str, str]:
    """The text below each heading."""
    parts = re.split(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def tables(section: str) -> list[list[list[str]]]:
    """The cells of each table's rows, without its head."""
    blocks = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [[cells(line) for line in block.splitlines()[2:]] for block in blocks]


def cells(line: str) -> list[str]:
    return [plain(cell.strip()) for cell in line.strip().strip("|").split("|")]


def is_printed(printed: str, computed: str) -> bool:
    """Whether a text has the computed figures, each rounded to the digits that it prints.

    A twentieth of the last digit more is for the rounding of the record itself, which has six digits.
    """
    if _NUMBER.sub("#", printed) != _NUMBER.sub("#", computed):
        return False
    pairs = zip(_NUMBER.findall(printed), _NUMBER.findall(computed), strict=True)
    return all(abs(value_of(a) - value_of(b)) <= 0.55 * last_digit(a) for a, b in pairs)


def value_of(number: str) -> float:
    return float(number.replace(",", "").replace("−", "-"))


def last_digit(number: str) -> float:
    """0.01 of `1.30`."""
    return float(10.0 ** -len(number.partition(".")[2]))


@pytest.mark.parametrize("key", TABLES, ids=lambda key: "-".join(map(str, key)))
def test_a_table_is_that_of_its_record(key: Key) -> None:
    page, heading, number = key
    printed = tables(sections(RESULTS / page)[heading])[number]
    computed = TABLES[key]()
    assert [row[0] for row in printed] == [row[0] for row in computed]
    for printed_row, row in zip(printed, computed, strict=True):
        for printed_cell, cell in zip(printed_row, row, strict=True):
            assert cell is UNRECORDED or is_printed(printed_cell, cell), printed_row


def text_of(page: str, heading: str) -> str:
    return " ".join(plain(sections(RESULTS / page)[heading]).split())


def matches(claim: str, text: str) -> list[str]:
    """The parts of the text that have the claim's words, with any figures."""
    words = _NUMBER.split(claim)
    pattern = _NUMBER.pattern.join(map(re.escape, words))
    return [match[0] for match in re.finditer(pattern, text)]


CLAIMS = [*claims(), *section_claims()]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim[0]}: {claim[2][:40]}")
def test_a_sentence_has_the_figures_of_its_record(claim: Claim) -> None:
    page, heading, words = claim
    found = matches(words, text_of(page, heading))
    assert any(is_printed(printed, words) for printed in found), (found, words)


SECTIONS = [
    ("../../README.md", "anlit"),
    ("README.md", "Results"),
    *((page, heading) for page in PAGES for heading in sections(RESULTS / page)),
]
SECTIONS.remove(ESTIMATES)
_FIGURE = re.compile(r"(?<![\d.])−?\d+\.\d+(?![\d.]*[\dMB]\b)(?!\.\d|\d)")


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: " ".join(section))
def test_every_figure_has_a_record_or_is_listed(section: tuple[str, str]) -> None:
    """Tables are compared whole, but for those of "In short", which are sentences."""
    page, heading = section
    text = sections(RESULTS / page)[heading]
    if any(key[:2] == section for key in (*TABLES, *WITHOUT_RECORD)):
        text = re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)
    text = " ".join(plain(re.sub(r"`[^`]*`", "", text)).split())
    for claim_page, claim_heading, words in CLAIMS:
        if (claim_page, claim_heading) == section:
            for printed in matches(words, text):
                text = text.replace(printed, "")
    for words in (*WORDS_WITHOUT_RECORD.get(section, {}), *NO_RESULTS):
        text = text.replace(words, "")
    assert _FIGURE.findall(text) == []


def test_every_table_has_a_record_or_is_listed() -> None:
    found = {
        (page, heading, number)
        for page in PAGES
        for heading, section in sections(RESULTS / page).items()
        for number in range(len(tables(section)))
        if (page, heading) != ESTIMATES
    }
    in_words = {("architectures.md", "In short", number) for number in (0, 1)}
    assert found == {*TABLES, *WITHOUT_RECORD, *in_words}


def test_every_listed_figure_without_a_record_stands_on_its_page() -> None:
    for (page, heading), words in WORDS_WITHOUT_RECORD.items():
        text = text_of(page, heading)
        assert [figure for figure in words if figure not in text] == []


@pytest.mark.parametrize("size", ["0.1m", "0.4m", "1.3m"])
def test_defaults_are_as_good_as_tuned_settings(size: str) -> None:
    study = Study(f"defaults/{size}")
    for arm in ("GPT+", "nGPT", "anGPT"):
        gap = study.minus(f"{arm}, defaults", f"{arm}, tuned").partition(" ")[0]
        assert abs(value_of(gap)) < 0.03


def test_wall_clock_on_a_busy_machine() -> None:
    """A speed-up times its ratio of times is the runs' speed-up in tokens, in every row the same."""
    printed = tables(sections(RESULTS / "speed.md")["Wall-clock on a busy machine"])[0]
    files = ("load-9-spinning", "load-11-spinning", "load-9-asleep")
    products = []
    for row, name in zip(printed[1:], files, strict=True):
        arms = read_record(f"busy_cpu/{name}.json")["arms"]
        seconds = {Path(arm["run"]).name: arm["seconds_per_token"] for arm in arms}
        for column, run in enumerate(("angpt-scale-invariant", "angpt", "ngpt"), 3):
            ratios = [a / b for a, b in zip(seconds[run], seconds["gpt"], strict=True)]
            time = median_with_interval(ratios)
            printed_numbers = [value_of(number) for number in _NUMBER.findall(row[column])]
            products.append((run, printed_numbers, time))
    for run in ("angpt-scale-invariant", "angpt", "ngpt"):
        tokens = [numbers[0] * time.median for name, numbers, time in products if name == run]
        assert max(tokens) == pytest.approx(min(tokens), rel=0.01)
        for name, (_, low, high), time in products:
            if name == run:
                assert tokens[-1] / time.high == pytest.approx(low, rel=0.01)
                assert tokens[-1] / time.low == pytest.approx(high, rel=0.01)


THEIR_SPEED_UPS = re.compile(r"1\.29|1\.40 (?:times|\()|1\.40 at")
WRITTEN = [
    *(path for path in ROOT.glob("docs/**/*.md") if path.name != "report.md"),
    ROOT / "README.md",
    *ROOT.glob("configs/**/*.yaml"),
]


def test_a_comparison_with_the_papers_says_how_theirs_is_measured() -> None:
    """Theirs are means over the curve of a longer training, ours are at the final loss."""
    silent = []
    for path in WRITTEN:
        for section in re.split(r"^#+ ", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            words = " ".join(section.split())
            compares = THEIR_SPEED_UPS.search(words) and re.search(r"anGPT\]|[Pp]apers?\b", words)
            if compares and not re.search(r"means? over the curve", words):
                silent.append(f"{path}: {words[:60]}")
    assert silent == []
