"""A small run folder whose data have a tokenizer."""

from pathlib import Path

import torch

from anlit.data.preparation.sources import file_sha256
from anlit.data.tokenizer import train_bpe
from tests.data.prepared import END, VOCABULARY
from tests.evaluation.saved import make_run, prepare

TEXTS = ["the cat sat on the mat and the dog sat by the cat", "naïve café – ☕ for the cats and the dogs"] * 3


def make_run_with_text(folder: Path, architecture, token_at: str = "end", **changes) -> Path:
    """A run in FOLDER/run on data in FOLDER/data; the tokenizer has a few tokens less than the model."""
    folder.mkdir(parents=True, exist_ok=True)
    train_bpe(TEXTS, VOCABULARY - 10).save(str(folder / "tokenizer.json"))
    data = prepare(folder / "data", tokenizer_sha256=file_sha256(folder / "tokenizer.json"), document_token_at=token_at)
    (folder / "tokenizer.json").rename(data / "tokenizer.json")
    run = make_run(folder / "run", data, architecture, **changes)
    file = run / "checkpoints" / "best.ckpt"
    content = torch.load(file, weights_only=True)
    separator = {"end_of_document": END, "document_token_at": token_at}
    content["anlit"]["data"] |= {"path": str(data), "corpus": "test", **separator}
    torch.save(content, file)
    return run
