"""The parser of `anlit fit | validate | test`, for whoever reads a configuration: fit itself, size, study.

`ConfigurationParser` adds anlit's own settings to LightningCLI's. A subclass says what is made of the parsed
configuration.
"""

import inspect
import logging
import warnings
from argparse import ArgumentError
from typing import Any, TypeVar

import lightning as L
import torch
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import anlit.attention.mechanisms
import anlit.data.corpora
import anlit.data.mixture
import anlit.data.needle
import anlit.models
import anlit.training.callbacks  # noqa: F401  short class names in YAML are those of imported classes
from anlit.commands.checks import check
from anlit.data.checks import padded_vocabulary
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.lightning_internals import CommandLine
from anlit.models.language_model import LanguageModel
from anlit.reading import read_yaml
from anlit.sentences import sentence
from anlit.shipped import with_configuration_files

TRAINER_DEFAULTS = {
    "max_steps": 1000,
    "gradient_clip_val": 1.0,
    "val_check_interval": 100,
    "check_val_every_n_epoch": None,  # val_check_interval counts optimizer steps, across epochs; see WholeSteps
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 10,
    "enable_model_summary": False,  # RunProgress says how many parameters there are
}
CONFIGURATION = dict.fromkeys(("trainer", "model", "data"), (dict, str))
"""A schema of `anlit.reading` for configuration files. The parser takes any number for the Trainer's settings."""
USUAL_VOCABULARY = 50_257
"""GPT-2's, where the configuration names neither a vocabulary nor data that are to make one."""
WARNINGS = (
    ".*args parameter is intended.*",
    ".*does not have many workers.*",
    ".*is an instance of `nn.Module`.*",
    ".*Checkpoint directory.*",
    ".*LeafSpec.*",
    ".*trying to `self.log\\(\\)`.*",  # what sizing traces has no Trainer
    ".*`__len__` could be inaccurate.*",
    ".*sync_dist=True.*",  # logged values are already over all ranks
    ".*You are using the .* progress bar.*",
    ".*there is no last checkpoint available.*",  # `--ckpt_path last` starts a new run in a new folder
    ".*callbacks used to create the checkpoint need to be provided.*",  # validate and test need none of them
    "(?s).*was deprecated in v4\\..*",  # Lightning calls jsonargparse so
    "(?s).*JSONARGPARSE_DEPRECATION_WARNINGS.*",
)
MESSAGES = (
    "Seed set to",
    "GPU available",
    "TPU available",
    "💡 Tip",
    "`Trainer.fit` stopped",
    "`Trainer(",  # that validation comes after every batch, where it comes after every optimizer step
    "\nDetected KeyboardInterrupt",  # LastCheckpoint prints what was saved and how to continue
    "Restoring states from the checkpoint",
    "Loaded model weights from the checkpoint",  # the command prints the path before
    "Restored all states from the checkpoint",
)


OWN_SETTINGS: list[tuple[str, Any, Any, str]] = [
    ("run_dir", str | None, None, "The run folder (default: runs/<model>-seed<seed>)."),
    ("checkpoint_every_n_steps", int, 500, "Optimizer steps between two last.ckpt."),
    ("initial_weights", str | None, None, "A checkpoint whose weights `fit` starts from, with a new optimizer and step "
     "0; with --ckpt_path last only where the run folder has no last.ckpt yet."),
    ("accept_changes", bool, False, "Let `fit` continue from --ckpt_path with another model, class of optimizer or "
     "seed than its checkpoint's; weights that do not fit are refused all the same."),
]  # fmt: skip
"""anlit's own, beside those of LightningCLI: name, type, default, help."""


def hide_library_messages() -> None:
    """Hide the warnings and messages of Lightning and its libraries that are of no use to users; show all others."""
    for pattern in WARNINGS:
        warnings.filterwarnings("ignore", pattern)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).addFilter(_is_useful)


def _is_useful(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(MESSAGES)


class ConfigurationParser(CommandLine):
    """LightningCLI with anlit's settings, up to the parsed configuration: it makes and starts nothing."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Without the option to unpickle checkpoints: they are always read with weights_only=True."""
        known = LightningCLI.subcommands()
        return {name: known[name] | {"weights_only"} for name in ("fit", "validate", "test")}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Restrict jsonargparse: refuse the functions on its list, make no objects for keys of type Any, and read the
        files that a configuration names from this machine only. Lightning would read `s3://…` too."""
        set_parsing_settings(
            import_path_denylist=[], instantiate_subclass_spec_in_any=False, config_read_mode_fsspec_enabled=False
        )
        return super().init_parser(**kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        check(self.config[self.config.subcommand])

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name, kind, default, text in OWN_SETTINGS:
            parser.add_argument(f"--{name}", type=kind, default=default, help=text)

    def read(self, arguments: list[str]) -> Any:
        """The configuration of further arguments of the subcommand. Raises UserError if it is wrong."""
        try:
            config = self.parser.parse_args(_with_checked_files(arguments))[arguments[0]]
        except ArgumentError as error:
            raise _refusal(error, arguments[0]) from error
        check(config)
        return config

    def model_of(self, config: Any) -> LanguageModel:
        """The model of a subcommand's configuration, on the meta device, which needs no memory for its weights.

        A vocabulary that only the data know is set to the usual one.

        Raises:
            UserError: The model's class refuses a setting.
        """
        settings = config.model.get("init_args", {})
        if "vocab_size" in settings and settings.vocab_size is None:
            settings.vocab_size = padded_vocabulary(config.data.get("init_args.vocab_size") or USUAL_VOCABULARY)
        try:
            with torch.device("meta"):
                return self.parser_of(str(self.subcommand)).instantiate(Namespace(model=config.model)).model
        except ValueError as error:
            raise UserError(str(origin(error))) from error

    def before_instantiate_classes(self) -> None:
        """Look at no run folder."""

    def instantiate_classes(self) -> None:
        """Make nothing."""

    def run(self, subcommand: str) -> None:
        """Start nothing."""


Parser = TypeVar("Parser", bound=ConfigurationParser)


def read_command(kind: type[Parser], arguments: list[str], **settings: Any) -> Parser:
    """Parse the arguments of `fit` or one of its siblings, and let `kind` make and run what they say.

    Args:
        kind: What to do with the configuration.
        arguments: They begin with the subcommand, whose parser alone is built: each takes a second.
        settings: Further ones of LightningCLI.

    Raises:
        UserError: The configuration is wrong.
    """
    arguments = _with_checked_files(arguments)
    command = arguments[0]
    only = {command: kind.subcommands()[command]}
    kind = type(kind.__name__, (kind,), {"subcommands": staticmethod(lambda: only), "__doc__": kind.__doc__})
    try:
        return kind(
            model_class=LanguageModel,
            datamodule_class=TokenShards,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=1,
            trainer_defaults=TRAINER_DEFAULTS,
            parser_kwargs={command: {"exit_on_error": False}, "exit_on_error": False},
            args=arguments,
            **settings,
        )
    except ArgumentError as error:
        raise _refusal(error, command) from error


def _with_checked_files(arguments: list[str]) -> list[str]:
    """The arguments with the paths of their configuration files.

    Raises UserError, which names the file, if one is missing or damaged.
    """
    arguments = with_configuration_files(arguments)
    for argument in arguments:
        if argument.startswith("--config="):
            read_yaml(argument.removeprefix("--config="), CONFIGURATION)
    return arguments


def _refusal(error: ArgumentError, command: str) -> UserError:
    """The parser's error about the arguments of a subcommand in one sentence."""
    trainer = (f"trainer.{name}" for name in inspect.signature(L.Trainer).parameters)
    own = (name for name, *_ in OWN_SETTINGS)
    names = [*trainer, "model", "data", "config", *own, "ckpt_path", "seed_everything"]
    return UserError(sentence(str(error), [f"--{name}" for name in names], f"anlit {command}"))


def origin(error: BaseException) -> BaseException:
    """The exception that a class's constructor raised, out of those that the parser wrapped around it."""
    while (inner := error.__cause__ or error.__context__) is not None and isinstance(inner, ValueError | TypeError):
        error = inner
    return error
