"""The parser of `anlit fit | validate | test`, for whoever reads a configuration: fit itself, size, study.

`RunParser` adds anlit's own settings to LightningCLI's. A subclass says what is made of the parsed configuration.
"""

import inspect
import os
from argparse import ArgumentError
from typing import Any, TypeVar

import lightning as L
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import anlit.attention.mechanisms
import anlit.data.corpora
import anlit.data.mixture
import anlit.data.needle
import anlit.models
import anlit.training.callbacks  # noqa: F401  short class names in YAML are those of imported classes
from anlit.commands.support.allowed import refuse_functions, restrict_parser
from anlit.commands.support.bounds import check_bounds
from anlit.commands.support.messages import one_sentence
from anlit.data.checks import padded_vocabulary
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.lightning_internals import CommandLine
from anlit.models.language_model import LanguageModel
from anlit.reading import parse_yaml, read_text
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

USUAL_VOCABULARY = 50_257
"""GPT-2's, where the configuration names neither a vocabulary nor data that are to make one."""


class RunParser(CommandLine):
    """LightningCLI with anlit's settings, up to the parsed configuration: it makes and starts nothing."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Without the option to unpickle checkpoints: they are always read with weights_only=True."""
        known = LightningCLI.subcommands()
        return {name: known[name] | {"weights_only"} for name in ("fit", "validate", "test")}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        restrict_parser()
        return super().init_parser(**kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        refuse_functions(self.config[self.config.subcommand])
        check_bounds(self.config[self.config.subcommand])

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run_dir", type=str | None, default=None, help="The run folder (default: runs/<model>-seed<seed>)."
        )
        parser.add_argument(
            "--checkpoint_every_n_steps", type=int, default=500, help="Optimizer steps between two last.ckpt."
        )
        parser.add_argument(
            "--initial_weights",
            type=str | None,
            default=None,
            help="A checkpoint whose weights `fit` starts from, with a new optimizer and step 0; with --ckpt_path last "
            "only where the run folder has no last.ckpt yet.",
        )
        parser.add_argument(
            "--accept_changes",
            type=bool,
            default=False,
            help="Let `fit` continue from --ckpt_path with another model, class of optimizer or seed than its "
            "checkpoint's; weights that do not fit are refused all the same.",
        )

    def before_instantiate_classes(self) -> None:
        """Look at no run folder."""

    def instantiate_classes(self) -> None:
        """Make nothing."""

    def run(self, subcommand: str) -> None:
        """Start nothing."""


Parser = TypeVar("Parser", bound=RunParser)


def read_command(kind: type[Parser], arguments: list[str], **settings: Any) -> Parser:
    """Parse the arguments of `fit` or one of its siblings, and let `kind` make and run what they say.

    Args:
        kind: What to do with the configuration.
        arguments: They begin with the subcommand, whose parser alone is built: each takes a second.
        settings: Further ones of LightningCLI.

    Raises:
        UserError: The configuration is wrong.
    """
    arguments = with_configuration_files(arguments)
    require_yaml(arguments)
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
        raise UserError(one_sentence(str(error), known_keys())) from error


def model_of(parser: LightningArgumentParser, settings: Any) -> LanguageModel:
    """The model of a parsed configuration without memory for its weights, on the meta device.

    Args:
        parser: Of the subcommand.
        settings: What it parsed. A vocabulary that only the data know is set to the usual one.
    """
    model = settings.model.get("init_args", {})
    if "vocab_size" in model and model.vocab_size is None:
        model.vocab_size = padded_vocabulary(settings.data.get("init_args.vocab_size") or USUAL_VOCABULARY)
    with torch.device("meta"):
        return parser.instantiate(Namespace(model=settings.model)).model


def origin(error: BaseException) -> BaseException:
    """The exception that a class's constructor raised, out of those that the parser wrapped around it."""
    while (inner := error.__cause__ or error.__context__) is not None and isinstance(inner, ValueError | TypeError):
        error = inner
    return error


def require_yaml(arguments: list[str]) -> None:
    """Refuse a damaged configuration file by name; the parser's own message does not say which file it is."""
    named = [argument.split("=", 1)[1] for argument in arguments if argument.startswith("--config=")]
    for path in filter(os.path.exists, named):
        try:
            parse_yaml(read_text(path))
        except OSError as error:
            raise UserError(f"the configuration file {path} cannot be read ({error.strerror})") from error
        except (yaml.YAMLError, ValueError) as error:
            problem = " ".join(str(error).split())
            raise UserError(f"the configuration file {path} is not valid YAML ({problem}): correct it there") from error


def known_keys() -> list[str]:
    """Every option of `fit` that is not inside a model or data class, and those of the Trainer, dotted."""
    trainer = [f"trainer.{name}" for name in inspect.signature(L.Trainer).parameters]
    own = ["run_dir", "checkpoint_every_n_steps", "initial_weights", "accept_changes"]
    return [*trainer, "model", "data", "config", *own, "ckpt_path", "seed_everything"]
