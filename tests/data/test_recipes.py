"""Recipes: plain data, completed by the user's options."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import anlit
from anlit.data.preparation.recipes import RECIPES, recipe_of
from anlit.errors import UserError

REQUIRED = {
    "Hub": {"repo": "allenai/c4", "files": "{en}/*.json.gz"},
    "TextFiles": {"source": "texts"},
}
"""Options without which a corpus has no recipe."""


@pytest.mark.parametrize("corpus", RECIPES)
def test_a_recipe_is_plain_data(corpus: str) -> None:
    recipe = recipe_of(corpus, **REQUIRED.get(corpus, {}))

    values = asdict(recipe)
    assert values.pop("options") == RECIPES[corpus].options
    assert json.dumps(values)


@pytest.mark.parametrize("corpus", sorted(RECIPES.keys() - {"Hub"}))
def test_a_recipe_has_a_data_module(corpus: str) -> None:
    assert issubclass(getattr(anlit, corpus), anlit.TokenShards)


def test_options_stand_in_place_of_their_names_in_braces(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    hub = recipe_of("Hub", **REQUIRED["Hub"])
    texts = recipe_of("TextFiles", source="texts", pattern="*.md")
    fineweb = recipe_of("FineWeb", part="sample-100BT")
    tokens = recipe_of("FineWebBin", part="100B")

    assert hub.corpus == "hub:allenai/c4"
    assert hub.repository == "allenai/c4"
    assert hub.layouts == (("{en}/*.json.gz",),)
    assert texts.corpus == "text:texts"
    assert texts.source == str(tmp_path.resolve() / "texts")
    assert texts.layouts == (("*.md",),)
    assert fineweb.layouts[0] == ("sample/100BT/*.parquet",)
    assert tokens.repository == "kjj0/fineweb100B-gpt2"


def test_an_option_that_is_none_keeps_the_corpus_s_default() -> None:
    recipe = recipe_of("SlimPajama", tokenizer=None, vocab_size=None)

    assert recipe.tokenizer == "gpt-neox"
    assert recipe.vocab_size == 4096


@pytest.mark.parametrize(
    ("corpus", "options", "message"),
    [
        ("FineWeb", {"part": "10B"}, "--part 10B does not exist: choose sample-10BT, sample-100BT"),
        ("SlimPajama", {"val_fraction": 0.1}, "--val_fraction 0.1 means nothing for SlimPajama"),
        ("SlimPajama", {"tokenizer": "none"}, "--tokenizer none is for files that hold tokens"),
        ("PythonSources", {"text_field": "text"}, "--text_field text means nothing"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    corpus: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        recipe_of(corpus, **options)
