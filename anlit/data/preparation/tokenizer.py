"""The tokenizer that all workers of a preparation read: one that exists, or a BPE trained on the corpus."""

import shutil
from collections.abc import Iterator

from anlit.data import tokenizer as tokenizers
from anlit.data.preparation.formats import read_file
from anlit.data.preparation.plan import Plan
from anlit.data.preparation.recipe import BPE, Recipe
from anlit.data.preparation.workspace import Workspace
from anlit.data.storage.manifest import TRAIN
from anlit.reporting.files import replacing
from anlit.reporting.text import say

TOKENIZER_BYTES = 256 << 20
"""Text that a BPE is trained on, at most."""


def provide_tokenizer(workspace: Workspace, recipe: Recipe, plan: Plan) -> None:
    """Train a BPE on the training part, or copy the one that exists, to .work/tokenizer.json; done once.

    Raises:
        UserError: the one that exists cannot be fetched, or the vocabulary is too small for a trained one.
    """
    if workspace.tokenizer.is_file():
        return
    with replacing(workspace.tokenizer) as temporary:
        if recipe.tokenizer != BPE:
            shutil.copyfile(recipe.tokenizer_file(), temporary)
            return
        say(f"Training the tokenizer: {recipe.vocab_size:,} tokens.")
        trained = tokenizers.train_bpe(_training_texts(workspace, recipe, plan), recipe.vocab_size)
        # Not its own save(), whose error for a full disk is a bare Exception with a text.
        temporary.write_text(trained.to_str(pretty=True), encoding="utf-8")


def _training_texts(workspace: Workspace, recipe: Recipe, plan: Plan) -> Iterator[str]:
    """The first texts of the training part, `TOKENIZER_BYTES` of them."""
    given = 0
    for file in plan.files:
        split = file.split or recipe.splits.of_file(file.name)
        if split != TRAIN:
            continue
        path = recipe.source.provide(file, workspace.source)
        for record in read_file(file.name, path, recipe.task_bytes, recipe.columns):
            if record.text is None or recipe.splits.of_text(record.text, split) != TRAIN:
                continue
            yield record.text
            given += record.size
            if given >= TOKENIZER_BYTES:
                return
