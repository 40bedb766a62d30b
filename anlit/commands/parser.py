"""The parser of `anlit fit | validate | test`, for whoever reads a configuration: fit itself, size, study.

`ConfigurationParser` adds anlit's own settings to LightningCLI's. A subclass says what is made of the parsed
configuration. `check` refuses what a configuration may not say, before any object is made.
"""

import inspect
import logging
import re
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from pydoc import locate
from typing import Any, NamedTuple, TypeVar

import lightning as L
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.enums import LightningEnum
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins import Precision as PrecisionPlugin
from lightning.pytorch.strategies import Strategy
from torch import nn

from anlit.checkpoints.location import CHECKPOINTS
from anlit.commands.values import expand_home, use_one_loader
from anlit.config.error_messages import classes_for, no_class, sentence
from anlit.config.files import configuration_file
from anlit.config.labels import ARCHITECTURES, CONFIG, class_name, init_args
from anlit.config.objects import parameters_of, shown
from anlit.config.options import ToolParser
from anlit.config.schema import check_precision, check_ranges, refuse_null
from anlit.data.checks import padded_vocabulary
from anlit.data.module import TokenShards
from anlit.data.storage.manifest import MANIFEST, read_manifest
from anlit.errors import UserError
from anlit.io.read import read_yaml
from anlit.training.language_model import LanguageModel
from anlit.training.lightning_internals import CommandLine
from anlit.training.support import check_trainer, names_class_of_strategy

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
"""A schema of `anlit.io.read` for configuration files. The parser takes any number for the Trainer's settings."""
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
    ".*You're using the WeightAveraging callback.*",  # it shards nothing, and evaluation reads the mean alone
    ".*callbacks used to create the checkpoint need to be provided.*",  # validate and test need none of them
    "(?s).*was deprecated in v4\\..*",  # Lightning calls jsonargparse so
    "(?s).*JSONARGPARSE_DEPRECATION_WARNINGS.*",
)
LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.accelerators.cuda",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.seed",
)
"""What Lightning logs the messages below with."""
MESSAGES = (
    "Seed set to",
    "GPU available",
    "TPU available",
    "💡 Tip",
    # The line at a run's start says device, number of ranks and precision.
    "Using bfloat16 Automatic Mixed Precision",
    "LOCAL_RANK:",
    "Initializing distributed:",
    "-" * 100 + "\ndistributed_backend=",
    "You are using a CUDA device",  # that products in float32 could be faster: precision is a setting
    "`Trainer.fit` stopped",
    "`Trainer(",  # that validation comes after every batch, where it comes after every optimizer step
    "\nDetected KeyboardInterrupt",  # LastCheckpoint prints what was saved and how to continue
    "Restoring states from the checkpoint",
    "Loaded model weights from the checkpoint",  # the command prints the path before
    "Restored all states from the checkpoint",
)
"""How messages of Lightning begin that tell users nothing, after `[rank: 1] ` where there are several ranks."""

OWN_SETTINGS: list[tuple[str, Any, Any, str]] = [
    ("run_dir", str | None, None, "The run folder (default: runs/<model>-seed<seed>)."),
    ("checkpoint_every_n_steps", int, 500, "Optimizer steps between two last.ckpt."),
    ("initial_weights", str | None, None, "A checkpoint whose weights `fit` starts from, with a new optimizer and step "
     "0; with --ckpt_path last only where the run folder has no last.ckpt yet."),
    ("accept_changes", bool, False, "Let `fit` continue from --ckpt_path with another model, class of optimizer or "
     "seed than its checkpoint's, and `validate` and `test` evaluate another model; weights that do not fit are "
     "refused all the same."),
]  # fmt: skip
"""anlit's own, beside those of LightningCLI: name, type, default, help."""
TOP_LEVEL: dict[str, tuple[Any, Any]] = {
    **{name: (kind, default) for name, kind, default, _ in OWN_SETTINGS},
    "seed_everything": (int, 1),
    "trainer": (dict, inspect.Parameter.empty),
}
"""Settings outside of model, data and trainer → their type and default."""


def check(config: Namespace) -> None:
    """Raises UserError for null where a setting takes none, a callable that is not a class, a number out of its range,
    what a Trainer may not have.

    The parser also accepts functions: any function if the key needs a callable, such as `model.init_args.optimizer`,
    else those whose annotation returns the right type. Both would be called.
    """
    for key, name, value, owner, annotation, default in _settings(config.as_dict(), ""):
        if value is None:
            wanted = "settings below it, or leave it out" if key == "trainer" else classes_for(name)
            refuse_null(key, annotation, default, wanted)
        if name == "class_path":
            if not inspect.isclass(named := locate(value)):
                raise UserError(no_class(key, shown(value)))
            if issubclass(named, PrecisionPlugin):
                raise UserError(f"{key}={named.__name__} sets the precision: set trainer.precision")
        elif callable(value) and not isinstance(value, type | nn.Module):
            defaults = parameters_of(owner) if inspect.isclass(owner) else []
            if not any(
                parameter.name == name and parameter.default is value for parameter in defaults
            ):
                raise UserError(no_class(key, shown(getattr(value, "__qualname__", value))))
        if isinstance(value, str) and key == "trainer.devices" and re.fullmatch(r"-?\d+", value):
            value = int(value)  # it may be a text such as `0,1`, so the parser leaves `0` a text
        if key == "trainer.precision":
            check_precision(value)
        check_ranges(key, value)
    check_trainer(config.trainer.as_dict(), config.model.as_dict())


def make_strategy_explicit(config: Namespace) -> None:
    """Write `strategy: anlit.FullySharded` as a class_path; the parser takes a name without arguments for a text.

    Raises UserError if there is no such class.
    """
    strategy = config.get("trainer.strategy")  # an empty trainer is refused by `check`
    if not names_class_of_strategy(strategy):
        return
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    try:
        parsed = parser.parse_object({"strategy": {"class_path": strategy}})
    except ArgumentError:
        return  # `check` refuses the name
    config.trainer.strategy = parsed.strategy


def changes_of_class(config: Namespace) -> Iterator[str]:
    """A sentence for each file with settings of another class than the one that a later file or option chose.

    The parser leaves out what the other class does not have, and keeps the rest, without a word.
    """
    for part in ("model", "data"):
        name, kind = class_name(config[part].class_path), locate(config[part].class_path)
        known = (
            {parameter.name for parameter in parameters_of(kind)}
            if inspect.isclass(kind)
            else set()
        )
        specs = {
            str(file): read_yaml(str(file), CONFIGURATION).get(part) for file in config.config or []
        }
        last = {setting: file for file, spec in specs.items() for setting in init_args(spec)}
        final = config[part].as_dict().get("init_args")
        for file, spec in specs.items():
            if left_out := ", ".join(
                setting for setting in init_args(spec) if setting not in known
            ):
                yield f"{file}: {left_out} left out, {name} has no such {part} settings."
            kept = " and ".join(key for key in ("optimizer", "schedule") if last.get(key) == file
                                and _is_part({key: init_args(spec)[key]}, final))  # fmt: skip
            if kept and class_name(spec) not in ("", name):
                own = f"; its own are in model/{name.lower()}.yaml" * (name in ARCHITECTURES)
                yield f"{file}: {kept} of {class_name(spec)} kept for {name}{own}."


def _is_part(given: Any, whole: Any) -> bool:
    if isinstance(given, dict):
        return isinstance(whole, dict) and all(
            _is_part(value, whole.get(key)) for key, value in given.items()
        )
    return bool(given == whole)


class Setting(NamedTuple):
    """One value of a configuration."""

    key: str  # with dots and without `init_args`: `model.optimizer.lr`
    name: str
    value: Any
    owner: Any  # the class or dataclass that has the argument; None outside of classes
    annotation: Any  # Any where it is not known
    default: Any  # None where it is not known


def _settings(part: Any, key: str, owner: Any = None, defaults: Any = None) -> Iterator[Setting]:
    """Every value below `part`, at any depth. `part` holds arguments of `owner`, or of the dataclass `defaults`."""
    if isinstance(part, list | tuple):
        for number, value in enumerate(part):
            yield from _settings(value, f"{key}.{number}", owner)
    elif isinstance(part, dict):
        path = part.get("class_path")
        for name, value in part.items():
            within = name in ("class_path", "init_args") and isinstance(path, str)
            below = key if within else f"{key}.{name}".lstrip(".")
            annotation, default = _type_and_default(below, owner, name, defaults)
            yield Setting(below, str(name), value, owner, annotation, default)
            if within:
                yield from _settings(value, below, locate(str(path)))
            elif below == "trainer":
                yield from _settings(value, below, L.Trainer)
            elif is_dataclass(annotation):
                yield from _settings(value, below, annotation, default)
            else:
                yield from _settings(value, below)


def _type_and_default(key: str, owner: Any, name: str, defaults: Any) -> tuple[Any, Any]:
    if owner is None:
        return TOP_LEVEL.get(key, (Any, None))
    if owner is L.Trainer and name in TRAINER_DEFAULTS and name != "gradient_clip_val":
        default = TRAINER_DEFAULTS[name]
        return type(default), default  # where null is another default, Lightning's
    parameters = parameters_of(owner) if inspect.isclass(owner) else []
    for parameter in parameters:
        if parameter.name == name:
            return parameter.annotation, getattr(defaults, name, parameter.default)
    return Any, None


class ConfigurationParser(CommandLine):
    """LightningCLI with anlit's settings, up to the parsed configuration: it makes and starts nothing."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Without the option to unpickle checkpoints: they are always read with weights_only=True."""
        known = LightningCLI.subcommands()
        return {name: known[name] | {"weights_only"} for name in ("fit", "validate", "test")}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Without shortened options."""
        # A default of Lightning's may be an enumeration of texts, such as that of `Timer.interval`.
        yaml.SafeDumper.add_multi_representer(LightningEnum, _represent_text)
        use_one_loader()
        return super().init_parser(allow_abbrev=False, **kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        config = self.config[self.config.subcommand]
        make_strategy_explicit(config)
        check(config)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name, kind, default, text in OWN_SETTINGS:
            parser.add_argument(f"--{name}", type=kind, default=default, help=text)

    def read(self, arguments: list[str]) -> Any:
        """The configuration of further arguments of the subcommand. Raises UserError if it is wrong."""
        config = _in_sentences(
            lambda: self.parser.parse_args(with_configuration_files(arguments)), arguments[0]
        )
        config = config[arguments[0]]
        make_strategy_explicit(config)
        check(config)
        return config

    def model_of(self, config: Any) -> LanguageModel:
        """The model of a subcommand's configuration, on the meta device, which needs no memory for its weights.

        A missing vocabulary is that of data that are prepared on this machine, else the one that they are to have, else
        the usual one. UserError if the model's class refuses a setting, or the manifest of the data is damaged.
        """
        settings = config.model.get("init_args", {})
        if "vocab_size" in settings and settings.vocab_size is None:
            folders = config.data.get("init_args.paths") or {"": config.data.get("init_args.path")}
            folder, wanted = (
                next(iter(folders.values())),
                config.data.get("init_args.vocab_size"),
            )  # a mixture has one
            known = (
                read_manifest(folder)["vocab_size"]
                if folder and Path(folder, MANIFEST).is_file()
                else wanted
            )
            settings.vocab_size = padded_vocabulary(known or USUAL_VOCABULARY)
        try:
            with torch.device("meta"):
                return (
                    self.parser_of(str(self.subcommand))
                    .instantiate(Namespace(model=config.model))
                    .model
                )
        except ValueError as error:
            raise UserError(str(origin(error))) from error

    def instantiate_classes(self) -> None:
        """Make nothing."""

    def run(self, subcommand: str) -> None:
        """Start nothing."""


Parser = TypeVar("Parser", bound=ConfigurationParser)
T = TypeVar("T")


def read_command(kind: type[Parser], arguments: list[str], **settings: Any) -> Parser:
    """Parse the arguments of `fit` or one of its siblings, and let `kind` make and run what they say.

    `arguments` begin with the subcommand, whose parser alone is built: each takes a second. `settings` are further ones
    of LightningCLI. Messages of Lightning and its libraries that are of no use to users are hidden. UserError if the
    configuration is wrong.
    """
    hide_messages()
    arguments = with_configuration_files(arguments)
    command = arguments[0]
    only = {command: kind.subcommands()[command]}
    kind = type(
        kind.__name__, (kind,), {"subcommands": staticmethod(lambda: only), "__doc__": kind.__doc__}
    )
    make = partial(
        kind,
        model_class=LanguageModel, datamodule_class=TokenShards, subclass_mode_model=True, subclass_mode_data=True,
        auto_configure_optimizers=False, seed_everything_default=1, trainer_defaults=TRAINER_DEFAULTS,
        parser_kwargs={command: {"exit_on_error": False}, "exit_on_error": False}, args=arguments, **settings,
    )  # fmt: skip
    return _in_sentences(make, command)


def _represent_text(dumper: yaml.SafeDumper, text: LightningEnum) -> yaml.ScalarNode:
    return dumper.represent_str(text.value)


def hide_messages() -> None:
    """Hide the warnings and messages of Lightning and its libraries that tell users nothing."""
    for pattern in WARNINGS:
        warnings.filterwarnings("ignore", pattern)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_useful)


def _is_useful(record: logging.LogRecord) -> bool:
    message = re.sub(r"^\[rank: \d+\] ", "", record.getMessage())
    return not message.startswith(MESSAGES)


def with_configuration_files(arguments: list[str]) -> list[str]:
    """The arguments of `anlit fit`, with the path of the file that each `--config` means.

    The files come first, so that an option wins over a file wherever it stands. Before them come the classes of model
    and data that options or later files name, because a file may set arguments of such a class. Raises UserError if a
    file is missing or damaged.
    """
    arguments = with_run_folder([_with_home(argument) for argument in arguments])
    parser = ToolParser(prog=f"anlit {arguments[0]}", add_help=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    for option in ("--model", "--data"):
        parser.add_argument(option)
    given, others = parser.parse_known_args(arguments[1:])
    classes = [
        f"--{name}={kind}"
        for name in ("model", "data")
        if (kind := getattr(given, name)) is not None
    ]
    files = [configuration_file(name) for name in given.config]
    contents = [read_yaml(file, CONFIGURATION) for file in files]
    first = [
        *classes_of_later_files(contents),
        *classes,
        *(f"--config={file}" for file in files),
    ]
    return [arguments[0], *(first if files else []), *classes, *others]


def classes_of_later_files(contents: list[dict[str, Any]]) -> Iterator[str]:
    """The class of model or data as an option, where a file sets arguments of a class that only a later file names.

    Without it the parser refuses such arguments, or loses them.
    """
    for part in ("model", "data"):
        specs = [content[part] for content in contents if content.get(part)]
        classes = [spec if isinstance(spec, str) else spec.get("class_path") for spec in specs]
        named = [kind for kind in classes if isinstance(kind, str)]
        if named and classes[0] is None:
            yield f"--{part}={named[0]}"


def with_run_folder(arguments: list[str]) -> list[str]:
    """`validate RUN` as the options that it means: the run's configuration, and its checkpoint if it names one.

    Raises UserError if the folder is none of a run.
    """
    command, *options = arguments
    if command == "fit" or not options or options[0].startswith("-"):
        return arguments
    path = Path(options[0])
    is_checkpoint = CHECKPOINTS in path.parts[:-1]
    if is_checkpoint:
        folder = Path(*path.parts[: path.parts.index(CHECKPOINTS)])
    else:
        folder = path.parent if path.is_file() else path
    if not (folder / CONFIG).is_file():
        fix = "give a run folder such as runs/gpt-seed1, or --config FILE and --ckpt_path FILE"
        raise UserError(f"{path} is no run folder with a {CONFIG}: {fix}")
    checkpoint = [f"--ckpt_path={path}"] if is_checkpoint else []
    return [command, f"--config={folder / CONFIG}", *checkpoint, *options[1:]]


def _with_home(argument: str) -> str:
    """The home folder in place of ~, also in `--run_dir=~/runs`, where shells leave it."""
    option, is_option, value = argument.partition("=")
    if is_option and argument.startswith("-"):
        return f"{option}={expand_home(value)}"
    return str(expand_home(argument))


def _in_sentences(parse: Callable[[], T], command: str) -> T:
    """What `parse` returns; the parser's error about the arguments of a subcommand becomes one sentence."""
    try:
        return parse()
    except ArgumentError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, UserError):
                raise UserError(str(cause)) from error
            cause = cause.__cause__ or cause.__context__
        names = [*(f"trainer.{name}" for name in inspect.signature(L.Trainer).parameters), "model", "data", "config",
                 *(name for name, *_ in OWN_SETTINGS), "ckpt_path", "seed_everything"]  # fmt: skip
        raise UserError(
            sentence(str(error), [f"--{name}" for name in names], f"anlit {command}")
        ) from error


def origin(error: BaseException) -> BaseException:
    """The exception that a class's constructor raised, out of those that the parser wrapped around it."""
    while (inner := error.__cause__ or error.__context__) is not None and isinstance(
        inner, ValueError | TypeError
    ):
        error = inner
    return error
