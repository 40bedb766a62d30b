"""The plan of a preparation, fixed before its first task: settings, files and tokenizer."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anlit.data import tokenizer as tokenizers
from anlit.data.preparation.encode import shown_name
from anlit.data.preparation.folder_state import PUT_BACK, refuse_other_settings
from anlit.data.preparation.formats import read_file
from anlit.data.preparation.hub import COMMIT, HubFiles, fetch_tokenizer
from anlit.data.preparation.publish import forget
from anlit.data.preparation.recipes import BPE, HUB_TOKENIZERS, NO_TOKENIZER, Recipe
from anlit.data.preparation.sources import (
    CorpusFiles,
    DistinctTexts,
    Listing,
    SourceFile,
    file_sha256,
    lines_sha256,
)
from anlit.data.preparation.tasks import (
    Job,
    bad_document,
    columns_of,
    record_path,
    split_of_document,
    split_of_file,
)
from anlit.data.storage.manifest import MANIFEST, TASKS, TEST, TOKENIZER, TRAIN
from anlit.errors import UserError
from anlit.io.read import read_json
from anlit.io.write import replacing, write_json
from anlit.reporting.text import say

PLAN = "plan.json"
PLAN_KEYS = ("settings", "commit", "files_sha256", "tokenizer_sha256")
"""What a plan has, and the manifest after it."""
TOKENIZER_BYTES = 256 << 20
"""Text that a BPE is trained on, at most."""
GPT2_VOCABULARY = 50257
GPT2_END_OF_DOCUMENT = 50256


def settings_of(recipe: Recipe, source: CorpusFiles) -> dict[str, Any]:
    """Return the settings that an existing folder must have been made with.

    Raises UserError if the tokenizer is not a file.
    """
    settings: dict[str, Any] = {
        "corpus": recipe.corpus,
        "subset": recipe.subset_field,
        "chunk_bytes": recipe.chunk_bytes,
        "task_bytes": recipe.task_bytes,
        "end_of_document": recipe.end_of_document,
        "text_field": recipe.text_field,
        "max_document_bytes": recipe.max_document_bytes,
    }
    settings |= {name: getattr(recipe, name) for name in recipe.identity}
    settings |= source.settings
    if recipe.tokenizer == BPE:
        settings["vocab_size"] = recipe.vocab_size
    elif recipe.tokenizer in (*HUB_TOKENIZERS, NO_TOKENIZER):
        settings["tokenizer"] = recipe.tokenizer
    else:  # the same file is the same in any folder
        tokenizers.load_tokenizer(recipe.tokenizer)
        settings["tokenizer"] = "sha256:" + file_sha256(recipe.tokenizer)
    settings["splits"] = {
        "folders": dict(recipe.split_folders),
        # A source of distinct texts holds out files, and has the fraction in its settings.
        "fraction": 0.0 if isinstance(source, DistinctTexts) else recipe.val_fraction,
        "first_tokens": recipe.val_tokens,
    }
    files = []
    for name, path in source.paths.items():
        if path.is_file():
            files.append(f"{name}\t{path.stat().st_size}")
    if files:
        settings["listing_sha256"] = lines_sha256(sorted(files))
    return settings


def make_plan(
    folder: Path, recipe: Recipe, source: CorpusFiles, settings: dict[str, Any], skip_bad: bool
) -> tuple[dict[str, Any], Listing, Job]:
    """Write the plan and the tokenizer. Return the plan, the corpus's files, and the job.

    If its first task is not done, a preparation begins anew: the command may have been a mistake.
    Raises UserError if the folder was begun with another plan, or the corpus cannot be prepared.
    """
    stored = _stored_plan(folder, settings)
    if stored is None:
        forget(folder)
    else:
        source.commit = stored["commit"]
    listing = source.listing()
    if listing.bad and not skip_bad:
        raise bad_document(listing.bad)
    _check_split_folders(recipe, listing.files)
    (folder / TASKS).mkdir(exist_ok=True)
    content = _tokenizer_content(folder, recipe, source, listing, stored, skip_bad)
    tokenizer_sha256 = None if content is None else hashlib.sha256(content).hexdigest()
    plan = {
        "settings": settings,
        "commit": source.commit,
        "files_sha256": lines_sha256(map(_line_of, listing.files)),
        "tokenizer_sha256": tokenizer_sha256,
    }
    if stored is not None and plan != stored:
        raise UserError(
            f"The source files or the tokenizer are not what {folder} was begun with: {PUT_BACK}"
        )
    vocab_size = GPT2_VOCABULARY
    end_of_document = GPT2_END_OF_DOCUMENT
    if content is not None:
        vocab_size, end_of_document = _write_tokenizer(folder, recipe, content)
    write_json(folder / TASKS / PLAN, plan)
    # Workers fetch files from the hub. The paths of local files are in the tasks.
    fetcher = source if isinstance(source, HubFiles) else CorpusFiles()
    job = Job(folder, recipe, fetcher, tokenizer_sha256, vocab_size, end_of_document, skip_bad)
    return plan, listing, job


def _stored_plan(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the plan that the folder was begun with. None if its first task is not done."""
    path = folder / MANIFEST
    if not path.is_file():
        path = folder / TASKS / PLAN
        if not record_path(folder, 0).is_file():
            return None
    remedy = "copy the folder again, or remove it and repeat the command"
    content = read_json(path, {}, remedy)
    stored = {key: content.get(key) for key in PLAN_KEYS}
    refuse_other_settings(folder, stored["settings"], settings)
    stored["settings"] = settings  # they may name another folder of the same files
    if not COMMIT.fullmatch(str(stored["commit"] or 40 * "0")):  # it becomes an address
        raise UserError(f"{path} cannot be used (its commit is {stored['commit']!r:.50}): {remedy}")
    return stored


def _check_split_folders(recipe: Recipe, files: list[SourceFile]) -> None:
    """Raise UserError if the names of the files show that a split would be empty."""
    splits = {split_of_file(recipe, file) for file in files}
    for beginning, split in recipe.split_folders.items():
        if split != TEST and split not in splits:
            raise UserError(
                f"The corpus has no file whose name begins with {beginning}: "
                "set --source to a complete copy in the hub's layout"
            )


def _line_of(file: SourceFile) -> str:
    return f"{file.name}\t{file.size}\t{file.sha256}\t{file.split}"


def _write_tokenizer(folder: Path, recipe: Recipe, content: bytes) -> tuple[int, int]:
    """Write tokenizer.json. Return the vocabulary's size and the end-of-document token's id."""
    tokenizer = tokenizers.parse_tokenizer(content, str(folder / TOKENIZER))
    vocab_size = tokenizers.vocabulary_size(tokenizer)
    end_of_document = tokenizers.end_of_document_id(tokenizer, recipe.end_of_document)
    with replacing(folder / TOKENIZER) as temporary:
        temporary.write_bytes(content)
    return vocab_size, end_of_document


def _tokenizer_content(
    folder: Path,
    recipe: Recipe,
    source: CorpusFiles,
    listing: Listing,
    stored: Mapping[str, Any] | None,
    skip_bad: bool,
) -> bytes | None:
    """Return the content for the folder's tokenizer.json. None if the recipe needs no tokenizer.

    The folder may have it already. Otherwise it is copied, or trained on the text.
    """
    if recipe.tokenizer == NO_TOKENIZER:
        return None
    path = folder / TOKENIZER
    if stored is not None and path.is_file() and file_sha256(path) == stored["tokenizer_sha256"]:
        return path.read_bytes()
    if recipe.tokenizer == BPE:
        say(f"Training the tokenizer: {recipe.vocab_size:,} tokens.")
        texts = _training_texts(folder, recipe, source, listing, skip_bad)
        trained = tokenizers.train_bpe(texts, recipe.vocab_size)
        return trained.to_str(pretty=True).encode()
    repository = HUB_TOKENIZERS.get(recipe.tokenizer)
    path = fetch_tokenizer(repository) if repository else Path(recipe.tokenizer)
    tokenizers.load_tokenizer(path)
    return path.read_bytes()


def _training_texts(
    folder: Path, recipe: Recipe, source: CorpusFiles, listing: Listing, skip_bad: bool
) -> Iterator[str]:
    """Yield the first `TOKENIZER_BYTES` of the texts to train on.

    Raises UserError for a document that cannot be used, unless `skip_bad`, or if there is no text.
    """
    n_bytes = 0
    for file in listing.files:
        if split_of_file(recipe, file) != TRAIN:
            continue
        path = source.fetch(file, folder / TASKS)
        for record in read_file(file.name, path, columns_of(recipe)):
            if record.text is None:
                if not skip_bad:
                    location = f"{shown_name(file, path)}, {record.location}"
                    raise bad_document(f"{location}: {record.detail}")
            elif split_of_document(recipe, file, record.text) == TRAIN:
                yield record.text
                n_bytes += record.size
                if n_bytes >= TOKENIZER_BYTES:
                    return
    if n_bytes == 0:
        raise UserError(
            "The corpus has no text to train a tokenizer on: check --source, --pattern and "
            "--text_field (--data.source and so on)"
        )
