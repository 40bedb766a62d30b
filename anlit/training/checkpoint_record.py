"""The entry `anlit` of a checkpoint. A model writes it, and checks it before the weights.

`fit` continues from a checkpoint, `validate` and `test` evaluate it. All of them refuse another
architecture, another tokenizer and other shapes. They refuse the changed settings that
`resume_checks` names, too. In this file `model` is a `LanguageModel`.
"""

from typing import Any

import anlit
from anlit.checkpoints.averages import AVERAGES, STATE, separate_averages
from anlit.checkpoints.weights import (
    refuse_non_finite,
    refuse_other_architecture,
    refuse_other_shapes,
)
from anlit.config.objects import recorded_name, shown, to_plain_values
from anlit.data.attributes import fingerprint_of
from anlit.errors import UserError
from anlit.training.kept_checkpoints import paths_to_names, restore_paths
from anlit.training.lightning_internals import trainer_of
from anlit.training.resume_checks import compare_settings, refuse_changes, run_settings
from anlit.training.weight_averages import averages_of


def write_record(checkpoint: dict[str, Any], model: Any) -> None:
    """Add the record and the averages of weights; replace objects and paths by plain values."""
    averages = averages_of(model.trainer)
    if averages is not None:
        averages.write(checkpoint, model)
    if "hyper_parameters" in checkpoint:
        checkpoint["hyper_parameters"] = to_plain_values(checkpoint["hyper_parameters"])
    if "callbacks" in checkpoint:
        checkpoint["callbacks"] = paths_to_names(checkpoint["callbacks"], model.trainer)
    checkpoint["anlit"] = {
        "architecture": recorded_name(type(model)),
        "version": anlit.__version__,
        "data": fingerprint_of(model.data_module),
        "family": model.family,
        "family_length": model.family_length,
        "begun_from": model.begun_from,
        "run": run_settings(model.trainer),
    }


def load_record(checkpoint: dict[str, Any], model: Any) -> None:
    """Check a checkpoint, and prepare it and `model` for its weights.

    Raises UserError if anlit did not write the checkpoint, or it does not fit the configuration.
    """
    record = checkpoint.get("anlit")
    if record is None:
        raise UserError(
            "ckpt_path names a checkpoint that anlit did not write: choose one from a run folder"
        )
    source = "the checkpoint in ckpt_path"
    refuse_other_architecture(record["architecture"], recorded_name(type(model)), source)
    # Lightning reads the states of callbacks after this hook.
    states = restore_paths(checkpoint.get("callbacks", {}), trainer_of(model))
    # max_time limits one launch: with the state of its timer no later launch would train.
    states.pop("Timer", None)
    checkpoint["callbacks"] = states
    model.family = record.get("family")
    model.family_length = record.get("family_length")
    model.begun_from = record.get("begun_from")
    fingerprint = fingerprint_of(model.data_module)
    fix = "set --data.path to the shards that it was trained on"
    refuse_other_tokenizer(record["data"], fingerprint, source, fix)
    if trainer_of(model) is None:
        return
    if model.trainer.state.fn == "fit":
        _refuse_other_content(record["data"], fingerprint)
        _prepare_to_continue(checkpoint, model)
    else:
        _check_for_evaluation(checkpoint, model)


def refuse_other_tokenizer(
    saved: dict[str, Any] | None,
    current: dict[str, Any] | None,
    source: str,
    fix: str,
    owner: str | None = None,
) -> None:
    """Raise UserError if two fingerprints of data name different tokenizers.

    Args:
        saved: The fingerprint of the data that the weights were trained on. None if unknown.
        current: The fingerprint of the present data. None without data.
        source: Where the weights come from, the beginning of the message.
        fix: The end of the message.
        owner: The present data with their verb. None: by the settings of `fit`.
    """
    if not saved or not current or _has_unknown_tokenizer(saved) or _has_unknown_tokenizer(current):
        return
    saved_hash = saved.get("tokenizer_sha256")
    current_hash = current.get("tokenizer_sha256")
    if owner is None:
        owner = "--data has" if "class" in current else "data.path's shards have"
    if saved_hash != current_hash:
        raise UserError(
            f"{source} was trained with another tokenizer ({_shorten(saved_hash)}) than "
            f"{owner} ({_shorten(current_hash)}): {fix}"
        )


def _has_unknown_tokenizer(record: dict[str, Any]) -> bool:
    """Whether a user's own class of data gave no tokenizer. Shards without one came as tokens."""
    return "class" in record and record.get("tokenizer_sha256") is None


def _refuse_other_content(saved: dict[str, Any] | None, current: dict[str, Any] | None) -> None:
    """Raise UserError if a user's own data had another fingerprint; other data check themselves."""
    if not saved or not current:
        return
    saved_fingerprint = saved.get("fingerprint")
    fingerprint = current.get("fingerprint")
    if saved_fingerprint and fingerprint and saved_fingerprint != fingerprint:
        raise UserError(
            f"the checkpoint in ckpt_path was trained on data with the fingerprint "
            f"{shown(saved_fingerprint)}, and --data now has {shown(fingerprint)}: set it back, or "
            "start from the weights alone with --initial_weights"
        )


def _shorten(tokenizer_sha256: str | None) -> str:
    """The first digits of a tokenizer's hash; `none` if the data came as tokens."""
    return f"{tokenizer_sha256[:12]}…" if tokenizer_sha256 else "none"


def _prepare_to_continue(checkpoint: dict[str, Any], model: Any) -> None:
    """Check the checkpoint for `fit`, and note in `model` that and how the run continues."""
    separate_averages(checkpoint)
    changed = _changed_settings(checkpoint, model)
    _refuse_forgotten_average(checkpoint, model)
    _check_weights(checkpoint, model, changed)
    model.is_continued = True
    model.changed_settings = tuple(changed.values())
    if "model.optimizer" in changed:
        model.begins_new_optimizer = True
        checkpoint["optimizer_states"] = []


def _refuse_forgotten_average(checkpoint: dict[str, Any], model: Any) -> None:
    """Raise UserError if the checkpoint's run averages weights, and this run does not."""
    path = model.trainer.ckpt_path
    if STATE in checkpoint and averages_of(model.trainer) is None:
        raise UserError(
            f"ckpt_path={path} has weights that a callback averages, and trainer.callbacks "
            "averages none: add the callback of the run's config.yaml, or begin a run from the "
            f"mean with --initial_weights {path}"
        )


def _check_for_evaluation(checkpoint: dict[str, Any], model: Any) -> None:
    """Check the checkpoint for `validate` and `test`; settings of its training may differ."""
    changed_model = {}
    for name, change in _changed_settings(checkpoint, model).items():
        if name.startswith("model.") and not name.startswith("model.optimizer"):
            changed_model[name] = change
    _check_weights(checkpoint, model, changed_model)
    weights = checkpoint.get("state_dict", {})
    refuse_non_finite(weights, f"ckpt_path={model.trainer.ckpt_path}")


def _changed_settings(checkpoint: dict[str, Any], model: Any) -> dict[str, str]:
    """The settings that differ from the checkpoint's: dotted name → `name old → new`."""
    saved = {
        "model": checkpoint.get("hyper_parameters", {}),
        **checkpoint["anlit"].get("run", {}),
    }
    current = {
        "model": to_plain_values(dict(model.hparams)),
        **run_settings(model.trainer),
    }
    return dict(compare_settings(saved, current))


def _check_weights(checkpoint: dict[str, Any], model: Any, changed: dict[str, str]) -> None:
    """Raise UserError for changed settings that are not accepted, and for weights that do not fit.

    The checkpoint has no weights here if a strategy loads them itself.
    """
    path = model.trainer.ckpt_path
    if not model.accept_changes:
        refuse_changes(changed, path)
    if "state_dict" not in checkpoint:
        return
    for key in ("state_dict", AVERAGES):
        if key in checkpoint:
            refuse_other_shapes(checkpoint[key], model.state_dict(), f"ckpt_path={path}")
