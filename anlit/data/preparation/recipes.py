"""What is prepared: the corpora that `anlit prepare` knows, each with its files, splits and tokenizer.

None of this needs torch: a command that prepares for days should start at once.
"""

import hashlib
import platform
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from anlit.data import tokenizer as tokenizers
from anlit.data.preparation import sources
from anlit.data.preparation.formats import Columns, is_one_text
from anlit.data.preparation.hub import HubFiles
from anlit.data.preparation.sources import (
    DistinctTexts,
    LocalFiles,
    Source,
    SourceFile,
    file_sha256,
    list_files,
)
from anlit.data.storage.manifest import TEST, TRAIN, VAL
from anlit.errors import UserError

HUB_TOKENIZERS = {"gpt2": "openai-community/gpt2", "gpt-neox": "EleutherAI/gpt-neox-20b"}
BPE, NO_TOKENIZER = "bpe", "none"
FINEWEB_VAL_TOKENS = 10_485_760
OPENWEBTEXT_VAL_FRACTION = 10_000 / 8_013_769  # as many documents as the papers hold out


@dataclass(frozen=True)
class Splits:
    """What documents are for training, validation and test; by default all are trained on."""

    folders: Mapping[str, str] = field(
        default_factory=dict
    )  # beginning of a file's name → split of its documents
    fraction: float = (
        0.0  # of the documents, held out by a hash of the text: copies are on one side
    )
    first_tokens: int = (
        0  # of the first task that are held out, with the rest of the document that has the last
    )

    def of_file(self, file: SourceFile) -> str:
        known = (
            split for beginning, split in self.folders.items() if file.name.startswith(beginning)
        )
        return file.split or next(known, TRAIN)

    def of_text(self, text: str, split: str) -> str:
        """The split of one document in a file of `split`."""
        held_out = self.fraction and sources.is_held_out(
            hashlib.sha256(text.encode()).hexdigest(), self.fraction
        )
        return VAL if held_out else split

    def check(self, files: list[SourceFile]) -> None:
        """Raise UserError for a corpus whose file names alone show that a split would be empty."""
        there = {self.of_file(file) for file in files}
        if missing := [name for name, split in self.folders.items() if split not in (TEST, *there)]:
            said = f"no file whose name begins with {missing[0]}: set --source to a complete copy in the hub's layout"
            raise UserError(f"The corpus has {said}.")


@dataclass(frozen=True)
class Options:
    """What the user may choose; None is the corpus's own default. The command's help says what each means."""

    source: str | None = None
    repo: str | None = None
    files: str | None = None
    revision: str = "main"
    part: str | None = None
    tokenizer: str | None = None
    vocab_size: int = 4096
    end_of_document: str = tokenizers.END_OF_DOCUMENT
    val_tokens: int = FINEWEB_VAL_TOKENS
    val_fraction: float | None = None
    pattern: str = "**/*.txt"
    text_field: str = "text"
    max_document_bytes: int = Columns.max_document_bytes
    include_site_packages: bool = False

    def held_out(self, default: float = 0.05) -> float:
        """The part of the documents that is held out; UserError if that is none or all."""
        fraction = default if self.val_fraction is None else self.val_fraction
        if not 0 < fraction < 1:
            raise UserError(f"val_fraction must be between 0 and 1, not {fraction}.")
        return fraction

    def one_part(self, *known: str) -> str:
        """The part of the corpus, by default the first one; UserError if there is no such."""
        if (part := self.part or known[0]) not in known:
            raise UserError(f"--part {part} is not known: choose one of {', '.join(known)}.")
        return part


@dataclass(frozen=True)
class Recipe:
    """A corpus and how it becomes tokens. The sizes shape the chunks, so they are never taken from the machine."""

    corpus: str
    source: Source
    splits: Splits
    options: Options
    own_tokenizer: str = "gpt2"
    subset: str | None = None  # the field that names a document's subset
    tokenized: bool = (
        False  # whether the source files hold tokens, each document after its separator (.bin)
    )
    origin: Mapping[str, Any] = field(
        default_factory=dict
    )  # more settings to compare with an existing folder's
    chunk_bytes: int = 64 << 20
    task_bytes: int = 64 << 20  # of the source files, at least

    @property
    def tokenizer(self) -> str:
        """gpt2, gpt-neox, the path of a tokenizer.json, bpe, or none."""
        return self.options.tokenizer or self.own_tokenizer

    @property
    def columns(self) -> Columns:
        return Columns(self.options.text_field, self.subset, self.options.max_document_bytes)

    def settings(self) -> dict[str, Any]:
        """The settings that an existing folder must have been made with; UserError if the tokenizer is no file."""
        tokenizer = self.tokenizer
        if tokenizer not in (*HUB_TOKENIZERS, BPE, NO_TOKENIZER):
            tokenizers.load_tokenizer(tokenizer)
            tokenizer = "sha256:" + file_sha256(tokenizer)  # the same file wherever it lies
        files = sorted(
            f"{name}\t{path.stat().st_size}"
            for name, path in self.source.paths.items()
            if path.is_file()
        )
        return {
            **{
                key: getattr(self, key) for key in ("corpus", "subset", "chunk_bytes", "task_bytes")
            },
            **{
                key: getattr(self.options, key)
                for key in ("end_of_document", "text_field", "max_document_bytes")
            },
            **self.origin,
            **self.source.settings,
            **(
                {"vocab_size": self.options.vocab_size}
                if tokenizer == BPE
                else {"tokenizer": tokenizer}
            ),
            "splits": asdict(self.splits),
            **({"listing_sha256": sources.lines_sha256(files)} if files else {}),
        }


def slimpajama(options: Options) -> Recipe:
    """cerebras/SlimPajama-627B, its own three splits, its seven subsets in streams of their own."""
    splits = Splits({"train/": TRAIN, "validation/": VAL, "test/": TEST})
    layouts = [
        [f"{folder}**/*{ending}" for folder in splits.folders]
        for ending in (".jsonl.zst", ".jsonl")
    ]
    source = _from_hub(options, "cerebras/SlimPajama-627B", *layouts)
    return Recipe("SlimPajama", source, splits, options, "gpt-neox", "meta.redpajama_set_name")


def openwebtext(options: Options) -> Recipe:
    """Skylion007/openwebtext, with about 10,000 texts held out, chosen by their hashes."""
    layouts = [["plain_text/*.parquet"], ["**/*.parquet"], ["**/*.jsonl.zst", "**/*.jsonl"]]
    source = _from_hub(options, "Skylion007/openwebtext", *layouts)
    return Recipe(
        "OpenWebText", source, Splits(fraction=options.held_out(OPENWEBTEXT_VAL_FRACTION)), options
    )


def fineweb(options: Options) -> Recipe:
    """A sample of HuggingFaceFW/fineweb, with the first tokens of its first file held out."""
    part = options.one_part("sample-10BT", "sample-100BT", "sample-350BT")
    source = _from_hub(
        options, "HuggingFaceFW/fineweb", [f"{part.replace('-', '/')}/*.parquet"], ["*.parquet"]
    )
    return Recipe(
        "FineWeb", source, Splits(first_tokens=options.val_tokens), options, origin={"part": part}
    )


def fineweb_bin(options: Options) -> Recipe:
    """kjj0/fineweb10B-gpt2 or …100B-gpt2: token files; the one called val is for validation."""
    part = options.one_part("10B", "100B")
    if options.tokenizer == BPE:
        raise UserError(
            "--tokenizer bpe is for text, and these files hold tokens: choose gpt2, gpt-neox or none."
        )
    splits = Splits({"fineweb_val_": VAL, "fineweb_train_": TRAIN})
    source = _from_hub(options, f"kjj0/fineweb{part}-gpt2", ["*.bin"])
    return Recipe("FineWebBin", source, splits, options, tokenized=True, origin={"part": part})


def any_of_hub(options: Options) -> Recipe:
    """Files of any dataset repository: JSON lines, parquet or text, with a part of the documents held out."""
    if options.repo is None or options.files is None:
        raise UserError(
            "Hub needs --repo and --files, such as --repo allenai/c4 --files 'en/*.json.gz'."
        )
    source, origin = _from_hub(options, options.repo, [options.files]), {"files": options.files}
    return Recipe(
        f"hub:{options.repo}", source, Splits(fraction=options.held_out()), options, origin=origin
    )


def _from_hub(options: Options, repository: str, *layouts: list[str]) -> Source:
    """The files of the first layout on the hub, or those of any layout in a local copy."""
    on_hub = HubFiles(repository, options.revision, layouts[0])
    return on_hub if options.source is None else LocalFiles(options.source, *layouts)


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
    splits = Splits(fraction=options.held_out())
    where = (
        str(root)
        if str(root) == options.source
        else f"{root} ({options.source}, seen from {Path.cwd()})"
    )
    source: Source = LocalFiles(root, [pattern])
    if all(
        map(is_one_text, source.paths or [pattern])
    ):  # the files may be gone when the shards are there
        splits, source = (
            Splits(),
            DistinctTexts(source.paths, splits.fraction, f"{pattern} in {where}"),
        )
    return Recipe(
        f"text:{root.name}",
        source,
        splits,
        options,
        BPE,
        origin={"source": str(root), "pattern": pattern},
    )


def python_sources(options: Options) -> Recipe:
    """The running interpreter's own library, which every machine has."""
    origin = {
        "python": platform.python_version(),
        "include_site_packages": options.include_site_packages,
    }
    texts = DistinctTexts(
        python_files(options.include_site_packages), options.held_out(), "*.py of this Python", True
    )
    return Recipe("PythonSources", texts, Splits(), options, BPE, origin=origin)


def python_files(include_site_packages: bool) -> dict[str, Path]:
    """Every *.py of the interpreter's standard library and, if asked for, of its installed packages, by its label."""
    paths = sysconfig.get_paths()
    library = list_files(paths["stdlib"], "**/*.py")
    packages = {"site-packages", "dist-packages"}
    files = {
        label: path for label, path in library.items() if packages.isdisjoint(Path(label).parts)
    }
    if include_site_packages:
        for folder in sorted({paths["purelib"], paths["platlib"]}):
            files |= list_files(folder, "**/*.py")
    return files


_FROM_HUB = frozenset({"source", "revision", "tokenizer", "end_of_document", "max_document_bytes"})
_FROM_TEXT = _FROM_HUB | {"vocab_size", "text_field"}
CORPORA: dict[str, tuple[Callable[[Options], Recipe], frozenset[str]]] = {
    "SlimPajama": (slimpajama, _FROM_TEXT),
    "OpenWebText": (openwebtext, _FROM_TEXT | {"val_fraction"}),
    "FineWeb": (fineweb, _FROM_TEXT | {"part", "val_tokens"}),
    "FineWebBin": (fineweb_bin, _FROM_HUB | {"part"}),
    "Hub": (any_of_hub, _FROM_TEXT | {"repo", "files", "val_fraction"}),
    "TextFiles": (text_files, _FROM_TEXT - {"revision"} | {"pattern", "val_fraction"}),
    "PythonSources": (
        python_sources,
        frozenset({"vocab_size", "val_fraction", "include_site_packages"}),
    ),
}
"""Each corpus's recipe, and the options that change what is made of it."""


def recipe_of(corpus: str, options: Options) -> Recipe:
    """How the corpus of that name is prepared; UserError for an option that it would ignore or that is out of range."""
    make, takes = CORPORA[corpus]
    for option in fields(Options):
        value = getattr(options, option.name)
        if value != option.default and option.name not in takes:
            listed = ", ".join(f"--{name}" for name in sorted(takes))
            raise UserError(
                f"--{option.name} {value} means nothing for {corpus}, which takes {listed}: leave it out."
            )
    return make(options)
