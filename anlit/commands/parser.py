"""The parser of `anlit fit | validate | test`, for each command that reads a configuration.

`ConfigurationParser` adds anlit's settings to LightningCLI's, and makes nothing. Its subclass
`FitCommand` runs. `anlit size` and `anlit study` use it to read and check configurations.
"""

import inspect
from argparse import ArgumentError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pydoc import locate
from typing import Any, TypeVar

import lightning as L
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.enums import LightningEnum
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy

from anlit.commands.arguments import expand_arguments
from anlit.commands.configuration_checks import check_configuration
from anlit.commands.help_texts import describe_arguments
from anlit.commands.lightning_messages import hide_messages
from anlit.commands.values import parse_given_settings, use_one_loader
from anlit.config.error_messages import (
    explain_constructor_error,
    explain_parser_error,
    is_of_parser,
)
from anlit.config.lightning_errors import explain_lightning_error
from anlit.config.names import check_name, split_tags
from anlit.config.schema import OPTIONS
from anlit.config.trainer_defaults import TRAINER_DEFAULTS
from anlit.data.checks import padded_vocabulary
from anlit.data.mixture import Mixture
from anlit.data.module import TokenShards  # noqa: F401  (`--data TokenShards` finds imported classes)
from anlit.data.storage.manifest import MANIFEST, read_manifest
from anlit.errors import UserError, find_cause
from anlit.training.language_model import LanguageModel
from anlit.training.lightning_internals import CommandLine
from anlit.training.support import names_class_of_strategy

USUAL_VOCABULARY = 50_257
"""GPT-2's vocabulary, for a configuration without vocabulary and data."""

TOP_LEVEL: dict[str, tuple[Any, Any]] = {
    **{option.key: (option.type, option.default) for option in OPTIONS},
    "seed_everything": (int, 1),
    "trainer": (dict, inspect.Parameter.empty),
}
"""Settings outside of model, data and trainer → their type and default."""

T = TypeVar("T")


class ConfigurationParser(CommandLine):
    """LightningCLI with anlit's settings, up to the parsed configuration. It makes no objects."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's subcommands without `weights_only`: anlit unpickles no checkpoint."""
        lightning_subcommands = LightningCLI.subcommands()
        subcommands = {}
        for name in ("fit", "validate", "test"):
            subcommands[name] = lightning_subcommands[name] | {"weights_only"}
        return subcommands

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a parser without abbreviated options."""
        # Defaults of Lightning such as `Timer.interval` are members of enumerations of texts.
        yaml.SafeDumper.add_multi_representer(LightningEnum, _represent_text)
        use_one_loader()
        return super().init_parser(allow_abbrev=False, **kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        for subcommand in self.subcommands():
            describe_arguments(self.parser_of(subcommand), subcommand)
        self.config = parse_given_settings(parser, args)
        _complete_and_check(self.config[self.config.subcommand])

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for option in OPTIONS:
            parser.add_argument(
                f"--{option.key}", type=option.type, default=option.default, help=option.help
            )

    def parse_again(self, arguments: list[str]) -> Any:
        """Return the configuration of further arguments. Raises UserError if it is wrong."""
        subcommand = arguments[0]
        expanded_arguments = expand_arguments(arguments)
        parse = partial(parse_given_settings, self.parser, expanded_arguments)
        config = _raise_user_errors(parse, subcommand)[subcommand]
        _complete_and_check(config)
        return config

    def model_of(self, config: Any) -> LanguageModel:
        """Return the model of a configuration on the meta device, without memory for its weights.

        A missing `vocab_size` is the vocabulary of the prepared data. Without prepared data it is
        the vocabulary that the data ask for, else the default. Raises UserError if the model's
        class refuses a setting, or the manifest of the data is damaged.
        """
        spec = config.model.clone()
        settings = spec.get("init_args", {})
        if "vocab_size" in settings and settings.vocab_size is None:
            settings.vocab_size = padded_vocabulary(_vocabulary_of_data(config.data))
        parser = self.parser_of(str(self.subcommand))
        try:
            with torch.device("meta"):
                return parser.instantiate(Namespace(model=spec)).model
        except ValueError as error:
            raise UserError(str(original_error(error))) from error

    def instantiate_classes(self) -> None:
        """Make nothing."""

    def run(self, subcommand: str) -> None:
        """Start nothing."""


Command = TypeVar("Command", bound=ConfigurationParser)


def read_command(command_class: type[Command], arguments: list[str], **settings: Any) -> Command:
    """Parse the arguments of `fit`, `validate` or `test`, and let `command_class` do the rest.

    Args:
        command_class: Makes and runs objects after parsing, or does not.
        arguments: The subcommand and its options. Only this subcommand's parser is built, because
            each takes a second.
        settings: Further arguments of LightningCLI.

    Raises:
        UserError: The configuration is wrong.
    """
    hide_messages()
    arguments = expand_arguments(arguments)
    subcommand = arguments[0]
    subcommands = {subcommand: command_class.subcommands()[subcommand]}
    members = {
        "subcommands": staticmethod(lambda: subcommands),
        "__doc__": command_class.__doc__,
    }
    make_command = partial(
        type(command_class.__name__, (command_class,), members),
        model_class=LanguageModel,
        datamodule_class=L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        seed_everything_default=1,
        trainer_defaults=TRAINER_DEFAULTS,
        parser_kwargs={subcommand: {"exit_on_error": False}, "exit_on_error": False},
        args=arguments,
        **settings,
    )
    return _raise_user_errors(make_command, subcommand)


def original_error(error: BaseException) -> BaseException:
    """Return the exception of a class's constructor, without the parser's wrappers around it.

    If the parser names another type as the cause, its list of errors has the constructor's.
    """
    cause = error.__cause__ or error.__context__
    while isinstance(cause, ValueError | TypeError) and not is_of_parser(str(cause)):
        error = cause
        cause = error.__cause__ or error.__context__
    return error


@contextmanager
def explain_constructor_errors() -> Iterator[None]:
    """Raise UserError with one sentence if a class of the configuration refuses a setting."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        cause: Any = original_error(error)
        if _is_programming_error(cause):
            raise
        raise UserError(explain_constructor_error(cause)) from error
    except (TypeError, MisconfigurationException) as error:
        if _is_programming_error(error):
            raise
        raise UserError(explain_lightning_error(error)) from error


def _is_programming_error(error: BaseException) -> bool:
    """Return whether an error is not the user's: a TypeError, except Lightning's on `devices`."""
    return isinstance(error, TypeError) and "CPUAccelerator" not in str(error)


def _complete_and_check(config: Namespace) -> None:
    _make_strategy_explicit(config)
    if config.seed_everything is True:  # Lightning would take 0 every time
        raise UserError("seed_everything=true is not a seed: give a number, or false to set none")
    check_name(config.name)
    config.tags = split_tags(config.tags)
    check_configuration(config, TOP_LEVEL)


def _make_strategy_explicit(config: Namespace) -> None:
    """Write `strategy: anlit.FullySharded` as a class_path, because the parser takes it for a text.

    Raises UserError if there is no such class.
    """
    strategy = config.get("trainer.strategy")  # the check refuses an empty trainer
    if not names_class_of_strategy(strategy):
        return
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    try:
        parsed = parser.parse_object({"strategy": {"class_path": strategy}})
    except ArgumentError:
        return  # the check refuses the name
    config.trainer.strategy = parsed.strategy


def manifest_of_data(data: Any) -> dict[str, Any] | None:
    """Return the manifest of the configured data; None if they are not prepared on this machine."""
    folders_of_mixture = data.get("init_args.paths")
    if folders_of_mixture:
        mixture = Mixture(dict(folders_of_mixture))
        if all(Path(folder, MANIFEST).is_file() for folder in mixture.folders):
            return mixture.manifest
        return None
    folder = data.get("init_args.path")
    if folder and Path(folder, MANIFEST).is_file():
        return read_manifest(folder)
    return None


def _vocabulary_of_data(data: Any) -> int:
    """Return the size of the vocabulary that the configured data have, or will have.

    A user's own class may have it as a constant.
    """
    manifest = manifest_of_data(data)
    if manifest is not None:
        size = manifest["vocab_size"]
    else:
        size = data.get("init_args.vocab_size")
        constant = getattr(locate(data.class_path), "vocab_size", None)
        if size is None and isinstance(constant, int):
            size = constant
    return size or USUAL_VOCABULARY


def _raise_user_errors(parse: Callable[[], T], subcommand: str) -> T:
    """Return the result of `parse`; raise a parser's error as UserError with one sentence."""
    try:
        return parse()
    except ArgumentError as error:
        user_error = find_cause(error, UserError)
        if user_error is not None:
            raise UserError(str(user_error)) from error
        trainer_settings = inspect.signature(L.Trainer).parameters
        names = [*(f"trainer.{name}" for name in trainer_settings), "model", "data", "config",
                 *(option.key for option in OPTIONS), "ckpt_path", "seed_everything"]  # fmt: skip
        options = [f"--{name}" for name in names]
        raise UserError(explain_parser_error(str(error), options, f"anlit {subcommand}")) from error


def _represent_text(dumper: yaml.SafeDumper, text: LightningEnum) -> yaml.ScalarNode:
    return dumper.represent_str(text.value)
