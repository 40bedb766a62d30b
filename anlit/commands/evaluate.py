"""`anlit evaluate`: downstream tasks of the lm-evaluation-harness."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from anlit.commands.support.checkpoints import add_checkpoint_options, parse_with_checkpoints
from anlit.options import CommandParser
from anlit.shipped import configuration_file

if TYPE_CHECKING:
    from anlit.evaluation.harness.tasks import Settings


def evaluate(checkpoints: list[str], output: str, settings: Settings, command: str = "") -> dict[str, Any]:
    """Run the tasks on every checkpoint, print the table and write evaluate.json and evaluate.md.

    Args:
        checkpoints: Run folders, .ckpt files or exported folders.
        output: The folder for the report; made where missing.
        settings: What to evaluate and how.
        command: What the user typed, for the record.

    Returns:
        The content of evaluate.json.

    Raises:
        UserError: lm_eval is not installed, or a checkpoint, its tokenizer, a task or a setting is wrong.
    """
    from anlit.evaluation.harness import table
    from anlit.evaluation.harness.tasks import evaluate_all
    from anlit.reporting.files import output_folder, write_json, write_text, writing
    from anlit.reporting.table import console

    folder = output_folder(output)
    metrics, record = evaluate_all(checkpoints, settings, command)
    head, body = table.rows(table.labels(record["checkpoints"]), metrics)
    table.show(head, body, console())
    with writing(folder):
        write_json(folder / "evaluate.json", record)
        write_text(folder / "evaluate.md", table.markdown(head, body, record))
    return record


def _task(name: str) -> str:
    return configuration_file(name, "--tasks") if name.endswith((".yaml", ".yml")) else name


def main(argv: list[str]) -> int:
    """`anlit evaluate`; returns the exit status and raises UserError for the user's mistakes."""
    parser = CommandParser(
        prog="anlit evaluate",
        description="Downstream tasks of the lm-evaluation-harness on checkpoints. Contexts are read once for all "
        "their continuations. Needs lm_eval: make extras EXTRAS=eval. Tasks fetch their data from the hub; without a "
        "network, give task files with local data (dataset_path: json) with --include_path.",
        epilog="Writes evaluate.json and evaluate.md. Example: "
        "anlit evaluate runs/gpt runs/angpt --tasks evaluation/six_tasks.yaml --output reports/tasks",
    )
    add = parser.add_argument
    add_checkpoint_options(parser)
    add("--tasks", required=True, metavar="NAME,…", help="tasks or groups of lm_eval, or YAML files that define one")
    add("--include_path", action="append", default=[], metavar="DIR", help="task files of your own; can be repeated")
    add("--shots", type=int, metavar="N", help="examples before each question (default: the task's number)")
    add("--limit", type=int, metavar="N", help="the first N questions of each task (default: all)")
    add("--batch_size", type=int, default=32, metavar="N", help="sequences in a batch (default: 32)")
    add("--length", type=int, metavar="N", help="the most tokens that the model reads (default: its training length)")
    add("--tokenizer", metavar="FILE", help="the model's tokenizer.json (default: that of its data)")
    arguments = parse_with_checkpoints(parser, argv)

    from anlit.evaluation.harness.tasks import Settings  # torch takes seconds: --help and wrong options do not wait

    settings = Settings(
        tasks=tuple(_task(name.strip()) for name in arguments.tasks.split(",") if name.strip()),
        include_path=tuple(arguments.include_path),
        shots=arguments.shots,
        limit=arguments.limit,
        batch_size=arguments.batch_size,
        length=arguments.length,
        tokenizer=arguments.tokenizer,
        device=arguments.device,
    )
    evaluate(arguments.checkpoints, arguments.output, settings, shlex.join(["anlit", "evaluate", *argv]))
    return 0
