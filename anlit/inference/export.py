"""A checkpoint's model in a folder of its own, for anlit or for transformers."""

from pathlib import Path
from typing import TYPE_CHECKING

from anlit.errors import UserError

if TYPE_CHECKING:
    from anlit.checkpoints.loading import Checkpoint
    from anlit.inference.text import CheckpointTokenizer

FORMATS = ("safetensors", "huggingface")


def export_model(
    checkpoint: str, output: str, form: str = "safetensors", folded: bool = False, tokenizer: str | None = None
) -> Path:
    """Write the model of `checkpoint` into the folder `output`; returns the folder.

    Args:
        checkpoint: A run folder (its best checkpoint, else its last), a .ckpt file, a sharded checkpoint or an
            exported folder.
        output: Created if missing.
        form: `safetensors` for anlit itself, `huggingface` for transformers.
        folded: Store the factors of nGPT and anGPT in their matrices, as `huggingface` always does.
        tokenizer: The tokenizer.json to add; by default that of the model's data, if the data is still there.

    Raises:
        UserError: The checkpoint is missing, damaged or foreign, the model has no factors to fold or no form for
            transformers, the tokenizer is another model's, or `output` is not empty or cannot be written.
    """
    from anlit.checkpoints.loading import load_checkpoint
    from anlit.inference.text import MissingTokenizerError, text_of

    folder = new_folder(output)
    loaded = load_checkpoint(checkpoint, "cpu")  # checks that the weights fit
    try:
        text = text_of(loaded, tokenizer)
    except MissingTokenizerError:
        text = None
    try:
        if form == "huggingface":
            from anlit.inference.huggingface.write import write_huggingface

            write_huggingface(loaded, folder, text)
        else:
            _write_safetensors(loaded, folder, text, folded)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error.strerror}): give a writable folder") from error
    return folder


def new_folder(output: str) -> Path:
    """The path of the folder `output`, which is not created here.

    Raises:
        UserError: It exists and is not an empty folder.
    """
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output {output} is not an empty folder: choose a new name")
    return folder


def _write_safetensors(loaded: "Checkpoint", folder: Path, text: "CheckpointTokenizer | None", folded: bool) -> None:
    from anlit.checkpoints.checkpoint_io import read_checkpoint
    from anlit.checkpoints.exported import PREFIX, write_exported
    from anlit.models.fold import FOLDED, fold

    content = read_checkpoint(loaded.file)
    if folded:
        weights = fold(loaded.model.model).state_dict()
        kind = FOLDED[loaded.architecture].__name__
        content |= {
            "state_dict": {PREFIX + name: tensor for name, tensor in weights.items()},
            "anlit": content["anlit"] | {"architecture": kind},
        }
    separators = {"end_of_document": text.end_of_document, "document_token_at": text.token_at} if text else {}
    write_exported(content, loaded.settings, folder, text.content if text else None, separators)
