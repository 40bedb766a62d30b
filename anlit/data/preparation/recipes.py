"""The corpora that `anlit prepare` knows: their files, their splits and their tokenizer.

A recipe is data: it reads no file and asks nobody. `prepare` does the work.
A new corpus is an entry of `RECIPES`, and a DataModule in `anlit/data/corpora.py`.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anlit.data import tokenizer as tokenizers
from anlit.data.storage.manifest import TEST, TRAIN, VAL
from anlit.errors import UserError

HUB_TOKENIZERS = {"gpt2": "openai-community/gpt2", "gpt-neox": "EleutherAI/gpt-neox-20b"}
"""Names for `tokenizer`, and the model repositories that have these tokenizers."""
BPE = "bpe"
"""Value of `tokenizer`: train a byte-level BPE on the corpus."""
NO_TOKENIZER = "none"
"""Value of `tokenizer`: the files hold tokens, and their tokenizer is not needed."""


@dataclass(frozen=True)
class Recipe:
    """A corpus and how it becomes tokens, in plain values.

    `corpus`, `repository` and `layouts` may name an option in braces, for which `recipe_of` puts
    its value.
    """

    corpus: str
    """The name in the manifest."""
    options: frozenset[str]
    """The fields that the user may choose, each by an option of the same name."""
    required: tuple[str, ...] = ()
    """The options that have no default."""
    identity: tuple[str, ...] = ()
    """More fields that an existing folder must have been made with."""

    repository: str | None = None
    """Data set of the hub. None if the corpus is not there."""
    revision: str = "main"
    """Branch, tag or commit of the repository."""
    source: str | None = None
    """Folder with the files. None for the hub or for Python's library."""
    layouts: tuple[tuple[str, ...], ...] = ()
    """Lists of glob patterns: the hub's layout, then other layouts that a folder may have."""
    part: str | None = None
    """A part of the corpus that can be prepared alone, one of `parts`."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Each part that exists, and the text that {part} stands for."""
    repo: str | None = None
    """Data set that the user names, for {repo}."""
    files: str | None = None
    """Glob pattern of files on the hub, for {files}."""
    pattern: str = "**/*.txt"
    """Glob pattern of files in `source`, for {pattern}."""
    python: str | None = None
    """Version of Python, for the corpus that is Python's own library."""
    include_site_packages: bool = False
    """Whether that corpus has the installed packages too."""

    is_tokenized: bool = False
    """Whether the files hold tokens (.bin), each document after its separator."""
    text_field: str = "text"
    """Field of JSON lines and parquet that holds a document's text."""
    subset_field: str | None = None
    """Field that names a document's subset. Dots lead into nested fields."""
    max_document_bytes: int = 32 << 20
    """Longest document in bytes of UTF-8."""

    split_folders: Mapping[str, str] = field(default_factory=dict)
    """Beginning of a file's name → split of its documents. All others are trained on."""
    val_fraction: float = 0.0
    """Fraction of the documents to hold out, by a hash of the text: copies stay together."""
    val_tokens: int = 0
    """Tokens to hold out at the beginning, with the rest of the last document."""

    tokenizer: str = "gpt2"
    """gpt2, gpt-neox, the path of a tokenizer.json, bpe, or none."""
    vocab_size: int = 4096
    """Vocabulary size of a tokenizer that is trained."""
    end_of_document: str = tokenizers.END_OF_DOCUMENT
    """Token that ends a document."""

    chunk_bytes: int = 64 << 20
    """Size of a chunk of tokens. Sizes shape the shards, so they never depend on the machine."""
    task_bytes: int = 64 << 20
    """Size of a task, in bytes of the source files, at least."""


HUB_OPTIONS = frozenset(
    {"source", "revision", "tokenizer", "end_of_document", "max_document_bytes"}
)
TEXT_OPTIONS = HUB_OPTIONS | {"vocab_size", "text_field"}

RECIPES: dict[str, Recipe] = {
    # It comes in three splits and seven subsets.
    "SlimPajama": Recipe(
        corpus="SlimPajama",
        options=TEXT_OPTIONS,
        repository="cerebras/SlimPajama-627B",
        layouts=(
            ("train/**/*.jsonl.zst", "validation/**/*.jsonl.zst", "test/**/*.jsonl.zst"),
            ("train/**/*.jsonl", "validation/**/*.jsonl", "test/**/*.jsonl"),
        ),
        split_folders={"train/": TRAIN, "validation/": VAL, "test/": TEST},
        subset_field="meta.redpajama_set_name",
        tokenizer="gpt-neox",
    ),
    "OpenWebText": Recipe(
        corpus="OpenWebText",
        options=TEXT_OPTIONS | {"val_fraction"},
        repository="Skylion007/openwebtext",
        layouts=(
            ("plain_text/*.parquet",),
            ("**/*.parquet",),
            ("**/*.jsonl.zst", "**/*.jsonl"),
        ),
        val_fraction=10_000 / 8_013_769,  # as many documents as the papers hold out
    ),
    "FineWeb": Recipe(
        corpus="FineWeb",
        options=TEXT_OPTIONS | {"part", "val_tokens"},
        identity=("part",),
        repository="HuggingFaceFW/fineweb",
        layouts=(("{part}/*.parquet",), ("*.parquet",)),
        part="sample-10BT",
        parts={
            "sample-10BT": "sample/10BT",
            "sample-100BT": "sample/100BT",
            "sample-350BT": "sample/350BT",
        },
        val_tokens=10_485_760,
    ),
    # Token files that others have published.
    "FineWebBin": Recipe(
        corpus="FineWebBin",
        options=HUB_OPTIONS | {"part"},
        identity=("part",),
        repository="kjj0/fineweb{part}-gpt2",
        layouts=(("*.bin",),),
        part="10B",
        parts={"10B": "10B", "100B": "100B"},
        is_tokenized=True,
        split_folders={"fineweb_val_": VAL, "fineweb_train_": TRAIN},
    ),
    # Any data set of the hub with JSON lines, parquet or text.
    "Hub": Recipe(
        corpus="hub:{repo}",
        options=TEXT_OPTIONS | {"repo", "files", "val_fraction"},
        required=("repo", "files"),
        identity=("files",),
        repository="{repo}",
        layouts=(("{files}",),),
        val_fraction=0.05,
    ),
    # A folder of the user: text files are a document each, JSON lines and parquet hold many.
    "TextFiles": Recipe(
        corpus="text:{folder}",
        options=TEXT_OPTIONS - {"revision"} | {"pattern", "val_fraction"},
        required=("source",),
        identity=("source", "pattern"),
        layouts=(("{pattern}",),),
        val_fraction=0.05,
        tokenizer=BPE,
    ),
    # The standard library of the running Python.
    "PythonSources": Recipe(
        corpus="PythonSources",
        options=frozenset({"vocab_size", "val_fraction", "include_site_packages"}),
        identity=("python", "include_site_packages"),
        python=platform.python_version(),
        val_fraction=0.05,
        tokenizer=BPE,
    ),
}


def recipe_of(corpus: str, **options: Any) -> Recipe:
    """Return the recipe of a corpus with the user's options. None stands for the corpus's default.

    Raises UserError for an option that the corpus does not take, that is missing, or out of range.
    """
    recipe = RECIPES[corpus]
    chosen = {name: value for name, value in options.items() if value is not None}
    for name, value in chosen.items():
        if name not in recipe.options:
            listed = ", ".join(f"--{option}" for option in sorted(recipe.options))
            raise UserError(
                f"--{name} {value} means nothing for {corpus}, which takes {listed}: leave it out"
            )
    recipe = replace(recipe, **chosen)
    _check_options(corpus, recipe)
    return _fill_in(recipe)


def _check_options(corpus: str, recipe: Recipe) -> None:
    """Raise UserError for a value that is missing or cannot be used."""
    if any(getattr(recipe, name) is None for name in recipe.required):
        options = " and ".join(f"--{name}" for name in recipe.required)
        raise UserError(f"{corpus} needs {options}: `anlit prepare --help` explains it")
    if "val_fraction" in recipe.options and not 0 < recipe.val_fraction < 1:
        value = recipe.val_fraction
        raise UserError(
            f"val_fraction={value} holds out no document or all: set it between 0 and 1"
        )
    if recipe.parts and recipe.part not in recipe.parts:
        raise UserError(f"--part {recipe.part} does not exist: choose {', '.join(recipe.parts)}")
    if recipe.is_tokenized and recipe.tokenizer == BPE:
        raise UserError(
            "--tokenizer bpe is for text, and these files hold tokens: "
            "choose gpt2, gpt-neox or none"
        )
    if not recipe.is_tokenized and recipe.tokenizer == NO_TOKENIZER:
        raise UserError(
            "--tokenizer none is for files that hold tokens already: "
            "choose gpt2, gpt-neox or a file"
        )


def _fill_in(recipe: Recipe) -> Recipe:
    """Return the recipe with full paths, and with values in place of the names in braces."""
    source = recipe.source
    tokenizer = recipe.tokenizer
    values = {
        "part": recipe.parts.get(recipe.part or ""),
        "repo": recipe.repo,
        "files": recipe.files,
        "pattern": recipe.pattern,
    }
    if source is not None:
        source = os.path.abspath(os.path.expanduser(source))
        if "source" in recipe.identity:  # a folder is the same by whichever link it is named
            source = os.path.realpath(source)
        values["folder"] = Path(source).name
    if tokenizer not in (*HUB_TOKENIZERS, BPE, NO_TOKENIZER):
        tokenizer = os.path.expanduser(tokenizer)
    layouts = []
    for layout in recipe.layouts:
        layouts.append(tuple(pattern.format(**values) for pattern in layout))
    return replace(
        recipe,
        corpus=recipe.corpus.format(**values),
        repository=recipe.repository and recipe.repository.format(**values),
        source=source,
        layouts=tuple(layouts),
        tokenizer=tokenizer,
    )
