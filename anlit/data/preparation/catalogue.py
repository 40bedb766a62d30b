"""The corpora that `anlit prepare` knows, and where each one's files, splits and tokenizer come from.

None of this needs torch: a command that prepares for days should start at once.
"""

import platform
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from anlit.data.preparation.distinct_texts import DistinctTexts, list_files
from anlit.data.preparation.formats import BY_ENDING, Columns
from anlit.data.preparation.hub import HubFiles
from anlit.data.preparation.recipe import BPE, Recipe
from anlit.data.preparation.sources import LocalFiles, Source
from anlit.data.preparation.splits import ContentFraction, FirstTokens, Folders, Splits
from anlit.data.storage.manifest import TEST, TRAIN, VAL
from anlit.data.tokenizer import END_OF_DOCUMENT
from anlit.errors import UserError

FINEWEB_VAL_TOKENS = 10_485_760
OPENWEBTEXT_VAL_FRACTION = 10_000 / 8_013_769  # as many documents as the papers hold out
VAL_FRACTION = 0.05
SLIMPAJAMA_SUBSET = "meta.redpajama_set_name"
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Options:
    """What the user may choose; None is the corpus's own default."""

    source: str | None = None
    """A folder with a copy of the corpus in the hub's layout, instead of the hub."""
    revision: str = "main"
    part: str | None = None
    """FineWeb: sample-10BT or sample-100BT; FineWebBin: 10B or 100B."""
    tokenizer: str | None = None
    vocab_size: int = 4096
    end_of_document: str = END_OF_DOCUMENT
    val_tokens: int = FINEWEB_VAL_TOKENS
    val_fraction: float | None = None
    pattern: str = "**/*.txt"
    text: str = "text"
    max_document_bytes: int = Columns.max_document_bytes
    include_site_packages: bool = False

    def __post_init__(self) -> None:
        if self.max_document_bytes < 1:
            raise UserError(f"--max_document_bytes must be at least 1, not {self.max_document_bytes}.")


def slimpajama(options: Options) -> Recipe:
    """cerebras/SlimPajama-627B, its own three splits, its seven subsets in streams of their own."""
    folders = ("train", "validation", "test")
    layouts = [[f"{folder}/**/*{ending}" for folder in folders] for ending in (".jsonl.zst", ".jsonl")]
    splits = Folders({"train/": TRAIN, "validation/": VAL, "test/": TEST})
    return _hub_recipe(
        "SlimPajama", "cerebras/SlimPajama-627B", layouts, options, splits, "gpt-neox", SLIMPAJAMA_SUBSET
    )


def openwebtext(options: Options) -> Recipe:
    """Skylion007/openwebtext, with about 10,000 texts held out, chosen by their hashes."""
    layouts = [["plain_text/*.parquet"], ["**/*.parquet"], ["**/*.jsonl.zst", "**/*.jsonl"]]
    splits = ContentFraction(_fraction(options, OPENWEBTEXT_VAL_FRACTION))
    return _hub_recipe("OpenWebText", "Skylion007/openwebtext", layouts, options, splits, "gpt2")


def fineweb(options: Options) -> Recipe:
    """A sample of HuggingFaceFW/fineweb, with the first tokens of its first file held out."""
    part = _one_of(options.part or "sample-10BT", ("sample-10BT", "sample-100BT", "sample-350BT"))
    layouts = [[f"{part.replace('-', '/')}/*.parquet"], ["*.parquet"]]
    splits = FirstTokens(options.val_tokens)
    return _hub_recipe("FineWeb", "HuggingFaceFW/fineweb", layouts, options, splits, "gpt2", origin={"part": part})


def fineweb_bin(options: Options) -> Recipe:
    """kjj0/fineweb10B-gpt2 or …100B-gpt2: token files; the one called val is for validation."""
    part = _one_of(options.part or "10B", ("10B", "100B"))
    if options.tokenizer == BPE:
        raise UserError(
            "--tokenizer bpe is for text, and these files hold tokens: choose gpt2, gpt-neox, a file or none."
        )
    splits = Folders({"fineweb_val_": VAL, "fineweb_train_": TRAIN})
    repository, origin = f"kjj0/fineweb{part}-gpt2", {"part": part}
    return _hub_recipe("FineWebBin", repository, [["*.bin"]], options, splits, "gpt2", origin=origin, tokenized=True)


def _hub_recipe(
    corpus: str,
    repository: str,
    layouts: list[list[str]],
    options: Options,
    splits: Splits,
    tokenizer: str,
    subset: str | None = None,
    **others: Any,
) -> Recipe:
    """A corpus of the hub, read there or from a local copy; `others` are fields of the recipe."""
    source: Source
    if options.source is None:
        source = HubFiles(repository, options.revision, layouts[0])
    else:
        source = LocalFiles(options.source, *layouts)
    columns = Columns(options.text, subset, options.max_document_bytes)
    return Recipe(
        corpus=corpus,
        source=source,
        splits=splits,
        columns=columns,
        tokenizer=options.tokenizer or tokenizer,
        vocab_size=options.vocab_size,
        end_of_document=options.end_of_document,
        **others,
    )


def text_files(options: Options) -> Recipe:
    """A folder of the user's own: text files, each a document, or JSON lines and parquet with many."""
    if options.source is None:
        raise UserError("TextFiles needs --source, the folder that holds the texts.")
    root, pattern = Path(options.source).resolve(), options.pattern
    if not pattern or pattern.startswith("/") or ".." in pattern.split("/"):
        raise UserError(
            f'The pattern "{pattern}" is not one for files under {root}: give one like "**/*.txt" with --pattern '
            "(--data.pattern), and the folder with --source."
        )
    source: Source
    splits: Splits
    if pattern.lower().endswith(tuple(BY_ENDING)):
        source, splits = LocalFiles(root, [pattern]), ContentFraction(_fraction(options))
    else:
        nothing = (
            f"No file matches {pattern} in {root}: set --source (--data.source) to the folder with the text, "
            "or --pattern (--data.pattern) to what its files are called."
        )
        source, splits = DistinctTexts(lambda: list_files(root, pattern), _fraction(options), nothing), Splits()
    return Recipe(
        corpus=f"text:{root.name}",
        source=source,
        splits=splits,
        columns=Columns(options.text, None, options.max_document_bytes),
        tokenizer=options.tokenizer or BPE,
        vocab_size=options.vocab_size,
        end_of_document=options.end_of_document,
        origin={"source": str(root), "pattern": pattern},
    )


def python_sources(options: Options) -> Recipe:
    """The running interpreter's own library, which every machine has."""
    origin = {"python": platform.python_version(), "include_site_packages": options.include_site_packages}
    nothing = "This Python has no sources of its library (*.py): use another corpus."
    texts = DistinctTexts(lambda: python_files(options.include_site_packages), _fraction(options), nothing)
    return Recipe("PythonSources", texts, Splits(), vocab_size=options.vocab_size, origin=origin)


def python_files(include_site_packages: bool) -> dict[str, Path]:
    """Every *.py of the interpreter's standard library and, if asked for, of its installed packages, by its label."""
    paths = sysconfig.get_paths()
    library = list_files(Path(paths["stdlib"]), "**/*.py")
    files = {label: path for label, path in library.items() if PACKAGE_FOLDERS.isdisjoint(Path(label).parts)}
    if include_site_packages:
        for folder in sorted({paths["purelib"], paths["platlib"]}):
            files |= list_files(Path(folder), "**/*.py")
    return files


def _fraction(options: Options, default: float = VAL_FRACTION) -> float:
    return default if options.val_fraction is None else options.val_fraction


def _one_of(value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UserError(f"--part {value} is not known: choose one of {', '.join(known)}.")
    return value


CORPORA: dict[str, Callable[[Options], Recipe]] = {
    "SlimPajama": slimpajama,
    "OpenWebText": openwebtext,
    "FineWeb": fineweb,
    "FineWebBin": fineweb_bin,
    "TextFiles": text_files,
    "PythonSources": python_sources,
}
_FROM_HUB = frozenset({"source", "revision", "tokenizer", "end_of_document", "max_document_bytes"})
TAKES = {
    "SlimPajama": _FROM_HUB | {"vocab_size", "text"},
    "OpenWebText": _FROM_HUB | {"vocab_size", "text", "val_fraction"},
    "FineWeb": _FROM_HUB | {"vocab_size", "text", "part", "val_tokens"},
    "FineWebBin": _FROM_HUB | {"part"},
    "TextFiles": _FROM_HUB - {"revision"} | {"vocab_size", "text", "pattern", "val_fraction"},
    "PythonSources": frozenset({"vocab_size", "val_fraction", "include_site_packages"}),
}
"""The options that change what is made of each corpus."""


def recipe_of(corpus: str, options: Options) -> Recipe:
    """How the corpus of that name is prepared.

    Raises:
        UserError: An option is given that this corpus would ignore, or one is out of range.
    """
    for field in fields(Options):
        value = getattr(options, field.name)
        if value != field.default and field.name not in TAKES[corpus]:
            takes = ", ".join(f"--{name}" for name in sorted(TAKES[corpus]))
            raise UserError(f"--{field.name} {value} means nothing for {corpus}, which takes {takes}: leave it out.")
    return CORPORA[corpus](options)
