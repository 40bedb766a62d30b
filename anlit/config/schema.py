"""The schema of a run's settings: a row for each key, and questions about a key.

A key is dotted and has no `init_args`: `model.optimizer.lr`. A key that ends in `.*` covers a class
with its arguments, or a mapping with its entries. A setting of a user's own class has no row;
see `setting_of`.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from typing import Any


class Role(Enum):
    """The subject of a setting."""

    MODEL = auto()
    """The network and its initial values."""
    OPTIMISATION = auto()
    """How every architecture learns alike: the steps, their size, regularisation."""
    TUNING = auto()
    """Rates and decays, which are tuned for each architecture by itself."""
    CORPUS = auto()
    """The texts and their tokens."""
    DATA_ORDER = auto()
    """Which tokens make up a training sequence, a batch, a step."""
    VALIDATION = auto()
    """On which tokens the loss is measured, and when."""
    EXECUTION = auto()
    """Hardware, logs, checkpoints: how a run is computed and observed."""
    PATHS = auto()
    """Where files are."""


MODEL = Role.MODEL
OPTIMISATION = Role.OPTIMISATION
TUNING = Role.TUNING
CORPUS = Role.CORPUS
DATA_ORDER = Role.DATA_ORDER
VALIDATION = Role.VALIDATION
EXECUTION = Role.EXECUTION
PATHS = Role.PATHS


@dataclass(frozen=True)
class Range:
    """The numbers that a setting takes.

    Args:
        text: The range in words, for messages.
        holds: Whether a finite number is in it.
    """

    text: str
    holds: Callable[[float], bool]

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and self.holds(value)


AT_LEAST_0 = Range("0 or more", lambda x: x >= 0)
AT_LEAST_1 = Range("1 or more", lambda x: x >= 1)
POSITIVE = Range("more than 0", lambda x: x > 0)
ABOVE_MINUS_1 = Range("more than -1", lambda x: x > -1)
SHARE = Range("0 or more and less than 1", lambda x: 0 <= x < 1)
AT_MOST_1 = Range("0 to 1", lambda x: 0 <= x <= 1)
SEED = Range("0 to 4294967295", lambda x: 0 <= x < 1 << 32)
LIMIT = Range("1 or more, or -1 for no limit", lambda x: x >= 1 or x == -1)
DEVICES = Range("1 or more, or -1 for all devices", lambda x: x >= 1 or x == -1)


@dataclass(frozen=True)
class Setting:
    """A row of the schema.

    Args:
        key: The key, or for `X.*` all keys from X on.
        role: The subject of the setting.
        range: Its numbers, if the parser and the constructors check them; a mechanism checks its
            own.
        fixed: A continued run may not change it, unless `accept_changes` is true.
        hidden: Runs that differ in it belong to one configuration, and labels do not show it.
        recorded: A checkpoint holds it in addition to the model's settings.
    """

    key: str
    role: Role
    range: Range | None = None
    _: KW_ONLY
    fixed: bool = False
    hidden: bool = False
    recorded: bool = False


@dataclass(frozen=True, kw_only=True)
class Option(Setting):
    """A row for an option that anlit adds to those of LightningCLI."""

    type: Any
    default: Any
    help: str


TOP_LEVEL = (
    Setting("seed_everything", OPTIMISATION, SEED, fixed=True, hidden=True),
    Setting("ckpt_path", PATHS, hidden=True),
    Setting("verbose", EXECUTION, hidden=True),
    Option(
        "run_dir",
        PATHS,
        hidden=True,
        type=str | None,
        default=None,
        help="The run folder (default: runs/<name>, without a name runs/<model>-seed<seed>; a new "
        "run takes the next free number behind it).",
    ),
    Option(
        "name",
        EXECUTION,
        hidden=True,
        type=str | None,
        default=None,
        help="The name of the run in its default folder, in tables, pictures and W&B.",
    ),
    Option(
        "tags",
        EXECUTION,
        hidden=True,
        type=list[str] | str | None,
        default=None,
        help="Tags of the run, as `baseline,english` or a list; `anlit runs --tag` filters by it.",
    ),
    Option(
        "checkpoint_every_n_steps",
        EXECUTION,
        AT_LEAST_1,
        hidden=True,
        type=int,
        default=500,
        help="Optimizer steps between two last.ckpt.",
    ),
    Option(
        "initial_weights",
        PATHS,
        type=str | None,
        default=None,
        help="A checkpoint whose weights `fit` starts from, with a new optimizer and step 0; with "
        "--ckpt_path last only where the run folder has no last.ckpt yet.",
    ),
    Option(
        "anneal",
        OPTIMISATION,
        POSITIVE,
        hidden=True,
        type=float | None,
        default=None,
        help="Branch from the run of --ckpt_path into a new run folder; its rate falls to 0 over "
        "this share of the steps that the run has taken.",
    ),
    Option(
        "max_tokens",
        OPTIMISATION,
        POSITIVE,
        hidden=True,
        type=float | None,
        default=None,
        help="The length of the run in training tokens, as 300000, 1e6, 10M or 2B, in place of "
        "trainer.max_steps.",
    ),
    Option(
        "tokens_per_parameter",
        OPTIMISATION,
        POSITIVE,
        hidden=True,
        type=float | None,
        default=None,
        help="The length of the run in training tokens per parameter of the model, in place of "
        "trainer.max_steps.",
    ),
    Option(
        "accept_changes",
        EXECUTION,
        hidden=True,
        type=bool,
        default=False,
        help="Let `fit` continue from --ckpt_path with another model, class of optimizer or seed "
        "than its checkpoint's, or begin from --initial_weights with another tokenizer, and "
        "`validate` and `test` evaluate another model; weights that do not fit are refused all the "
        "same.",
    ),
)
MODELS = (
    Setting("model", MODEL, fixed=True),
    Setting("model.vocab_size", CORPUS, AT_LEAST_1, fixed=True),
    Setting("model.context_length", DATA_ORDER, AT_LEAST_1, fixed=True),
    Setting("model.document_masking", DATA_ORDER, fixed=True),
    Setting("model.n_layers", MODEL, AT_LEAST_1, fixed=True),
    Setting("model.n_heads", MODEL, AT_LEAST_1, fixed=True),
    Setting("model.n_kv_heads", MODEL, AT_LEAST_1, fixed=True),
    Setting("model.d_head", MODEL, AT_LEAST_1, fixed=True),
    Setting("model.d_model", MODEL, AT_LEAST_1, fixed=True),
    Setting("model.d_ff", MODEL, AT_LEAST_1, fixed=True),
    Setting("model.attention.*", MODEL, fixed=True),
    Setting("model.positions.*", MODEL, fixed=True),
    Setting("model.tie_embeddings", MODEL, fixed=True),
    Setting("model.qk_norm", MODEL, fixed=True),
    Setting("model.qk_norm_gain", MODEL, fixed=True),
    Setting("model.qk_norm_eps", MODEL, AT_LEAST_0, fixed=True),
    Setting("model.qk_clip", MODEL, POSITIVE, fixed=True),
    Setting("model.v_norm", MODEL, fixed=True),
    Setting("model.attention_norm", MODEL, fixed=True),
    Setting("model.attention_gate", MODEL, fixed=True),
    Setting("model.post_norm", MODEL, fixed=True),
    Setting("model.init_std", MODEL, POSITIVE, fixed=True),
    Setting("model.norm_eps", MODEL, AT_LEAST_0, fixed=True),
    Setting("model.norms", MODEL, fixed=True),
    Setting("model.alpha_init", MODEL, POSITIVE, fixed=True),
    Setting("model.alpha_scale", MODEL, POSITIVE, fixed=True),
    Setting("model.s_z_init", MODEL, POSITIVE, fixed=True),
    Setting("model.s_z_scale", MODEL, POSITIVE, fixed=True),
    Setting("model.s_qk", MODEL, fixed=True),
    Setting("model.s_qk_init", MODEL, POSITIVE, fixed=True),
    Setting("model.s_qk_scale", MODEL, POSITIVE, fixed=True),
    Setting("model.s_uv_init", MODEL, POSITIVE, fixed=True),
    Setting("model.s_uv_scale", MODEL, POSITIVE, fixed=True),
    Setting("model.silu_std", MODEL, POSITIVE, fixed=True),
    Setting("model.approximation.residual_factor", MODEL, fixed=True),
    Setting("model.approximation.error", MODEL, ABOVE_MINUS_1, fixed=True),
    Setting("model.base_d_model", MODEL, AT_LEAST_1, fixed=True),
    Setting("model.base_n_layers", MODEL, AT_LEAST_1, fixed=True),
    Setting("model.lr_factors.*", TUNING, AT_LEAST_0),
    Setting("model.dropout", OPTIMISATION, SHARE),
    Setting("model.z_loss", OPTIMISATION, AT_LEAST_0),
    Setting("model.schedule", OPTIMISATION),
    Setting("model.schedule.*", OPTIMISATION),
    Setting("model.schedule.decay", OPTIMISATION, AT_MOST_1),
    Setting("model.schedule.final", OPTIMISATION, AT_LEAST_0),
    Setting("model.schedule.warmup", TUNING, SHARE),
    Setting("model.optimizer", OPTIMISATION, fixed=True),
    Setting("model.optimizer.*", TUNING),
    Setting("model.optimizer.lr", TUNING, AT_LEAST_0),
    Setting("model.optimizer.embedding_lr", TUNING, AT_LEAST_0),
    Setting("model.optimizer.head_lr", TUNING, AT_LEAST_0),
    Setting("model.optimizer.vector_lr", TUNING, AT_LEAST_0),
    Setting("model.optimizer.weight_decay", TUNING, AT_LEAST_0),
    Setting("model.optimizer.eps", TUNING, AT_LEAST_0),
    Setting("model.optimizer.betas.0", TUNING, SHARE),
    Setting("model.optimizer.betas.1", TUNING, SHARE),
    Setting("model.optimizer.momentum", TUNING, SHARE),
    Setting("model.kernel", EXECUTION, hidden=True),
    Setting("model.runtime.compile", EXECUTION, hidden=True),
    Setting("model.runtime.recompute_every", EXECUTION, AT_LEAST_0, hidden=True),
    Setting("model.runtime.meta_init", EXECUTION, hidden=True),
    Setting("model.runtime.float8", EXECUTION),
)
DATA = (
    Setting("data", PATHS),  # the class: like the paths, a recorded hash of the tokens replaces it
    Setting("data.path", PATHS),
    Setting("data.paths.*", PATHS),
    Setting("data.source", PATHS),
    Setting("data.fingerprint", PATHS),  # the recorded hash of it replaces it
    Setting("data.train.*", CORPUS),
    Setting("data.val.*", VALIDATION),
    Setting("data.test.*", VALIDATION, hidden=True),
    Setting("data.bytes_per_token", EXECUTION, hidden=True),
    Setting("data.pattern", CORPUS),
    Setting("data.text_field", CORPUS),
    Setting("data.include_site_packages", CORPUS),
    Setting("data.tokenizer", CORPUS),
    Setting("data.end_of_document", CORPUS),
    Setting("data.vocab_size", CORPUS),
    Setting("data.val_fraction", VALIDATION),
    Setting("data.batch_size", DATA_ORDER, AT_LEAST_1, recorded=True),
    Setting("data.context_length", DATA_ORDER, AT_LEAST_1),
    Setting("data.context_schedule.*", DATA_ORDER, recorded=True),
    Setting("data.weights.*", DATA_ORDER),
    Setting("data.shuffle", DATA_ORDER),
    Setting("data.seed", DATA_ORDER, AT_LEAST_0, hidden=True),
    Setting("data.val_blocks", VALIDATION, AT_LEAST_1, fixed=True, recorded=True),
    Setting("data.val_tokens", VALIDATION, AT_LEAST_1, fixed=True, recorded=True),
    Setting("data.val_context_length", VALIDATION, AT_LEAST_1, fixed=True, recorded=True),
    Setting("data.val_samples", VALIDATION, AT_LEAST_1, fixed=True, recorded=True),
    Setting("data.score_first_token", VALIDATION, fixed=True, recorded=True),
    Setting("data.val_batch_size", EXECUTION, AT_LEAST_1, hidden=True),
    Setting("data.num_workers", EXECUTION, AT_LEAST_0, hidden=True),
    Setting("data.cache_gb", EXECUTION, AT_LEAST_0, hidden=True),
)
# Some settings change nothing that is learned and are shown all the same, such as `detect_anomaly`:
# their defaults are in the keys of recorded configurations (`Group.key`).
TRAINER = (
    Setting("trainer.max_steps", OPTIMISATION, LIMIT, recorded=True),
    Setting("trainer.min_steps", OPTIMISATION),
    Setting("trainer.max_epochs", OPTIMISATION, LIMIT),
    Setting("trainer.min_epochs", OPTIMISATION),
    Setting("trainer.accumulate_grad_batches", OPTIMISATION, AT_LEAST_1, recorded=True),
    Setting("trainer.gradient_clip_val", OPTIMISATION, AT_LEAST_0, recorded=True),
    Setting("trainer.gradient_clip_algorithm", OPTIMISATION, recorded=True),
    Setting("trainer.limit_train_batches", OPTIMISATION, POSITIVE),
    Setting("trainer.overfit_batches", OPTIMISATION),
    Setting("trainer.fast_dev_run", OPTIMISATION),
    Setting("trainer.callbacks.*", OPTIMISATION),
    Setting("trainer.reload_dataloaders_every_n_epochs", DATA_ORDER),
    Setting("trainer.use_distributed_sampler", DATA_ORDER),
    Setting("trainer.limit_val_batches", VALIDATION, AT_LEAST_0, fixed=True, recorded=True),
    Setting("trainer.val_check_interval", VALIDATION, POSITIVE),
    Setting("trainer.check_val_every_n_epoch", VALIDATION),
    Setting("trainer.num_sanity_val_steps", VALIDATION, hidden=True),
    Setting("trainer.limit_test_batches", VALIDATION, AT_LEAST_0, hidden=True),
    Setting("trainer.limit_predict_batches", VALIDATION, hidden=True),
    Setting("trainer.accelerator", EXECUTION, hidden=True),
    Setting("trainer.strategy.*", EXECUTION, hidden=True),
    Setting("trainer.devices", EXECUTION, DEVICES),
    Setting("trainer.num_nodes", EXECUTION, AT_LEAST_1),
    Setting("trainer.precision", EXECUTION),
    Setting("trainer.plugins.*", EXECUTION),
    Setting("trainer.sync_batchnorm", EXECUTION),
    Setting("trainer.deterministic", EXECUTION, hidden=True),
    Setting("trainer.benchmark", EXECUTION, hidden=True),
    Setting("trainer.inference_mode", EXECUTION),
    Setting("trainer.detect_anomaly", EXECUTION),
    Setting("trainer.barebones", EXECUTION),
    Setting("trainer.max_time", EXECUTION, hidden=True),
    Setting("trainer.logger.*", EXECUTION, hidden=True),
    Setting("trainer.log_every_n_steps", EXECUTION, AT_LEAST_0, hidden=True),
    Setting("trainer.profiler.*", EXECUTION, hidden=True),
    Setting("trainer.enable_checkpointing", EXECUTION, hidden=True),
    Setting("trainer.enable_progress_bar", EXECUTION, hidden=True),
    Setting("trainer.enable_model_summary", EXECUTION, hidden=True),
    Setting("trainer.enable_autolog_hparams", EXECUTION),
    Setting("trainer.model_registry", EXECUTION, hidden=True),
    Setting("trainer.default_root_dir", PATHS, hidden=True),
)
SETTINGS = (*TOP_LEVEL, *MODELS, *DATA, *TRAINER)
"""All rows."""
OPTIONS = [setting for setting in SETTINGS if isinstance(setting, Option)]
_ROWS = {setting.key: setting for setting in SETTINGS}

EARLIER_KEYS = {"model.backend": "model.kernel"}
"""Keys in results that earlier commits recorded, and their keys today."""
FOREIGN_SETTINGS = {
    "model": Setting("model.*", MODEL, fixed=True),
    "data": Setting("data.*", CORPUS),
    "trainer": Setting("trainer.*", EXECUTION),
}
"""Rows for settings of users' own classes, by section."""
PATH_NAMES = ("path", "paths", "folder", "root", "dir", "source")
"""Last words of keys that hold paths, in a user's own data class."""


def schema_key(key: str) -> str:
    """The schema's key of a setting.

    `model.d_model` for `model.init_args.d_model`, its key in config.yaml.
    """
    plain_key = key.replace(".init_args", "").removesuffix(".class_path")
    return EARLIER_KEYS.get(plain_key, plain_key)


def row_of(key: str) -> Setting | None:
    """The row that covers a key of the schema, the most specific of several.

    None if there is none.
    """
    if key in _ROWS:
        return _ROWS[key]
    prefix = key
    while prefix:
        row = _ROWS.get(f"{prefix}.*")
        if row is not None:
            return row
        prefix = prefix.rpartition(".")[0]
    return None


def setting_of(key: str) -> Setting:
    """The row that covers a key, also one with `init_args`.

    A user's own class has the row of its section.
    """
    plain_key = schema_key(key)
    row = row_of(plain_key)
    if row is not None:
        return row
    section, _, name = plain_key.partition(".")
    if section == "data" and name.rpartition("_")[2] in PATH_NAMES:
        return Setting("data.*", PATHS)
    return FOREIGN_SETTINGS.get(section, Setting(plain_key, EXECUTION, fixed=True))


def changes_measure(key: str) -> bool:
    """Whether losses of runs that differ in this setting are losses on other tokens."""
    setting = setting_of(key)
    return setting.role is VALIDATION and setting.fixed


def recorded_keys() -> list[str]:
    """Keys of Trainer and data that a checkpoint holds."""
    return [setting.key.removesuffix(".*") for setting in SETTINGS if setting.recorded]
