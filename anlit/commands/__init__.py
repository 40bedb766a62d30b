"""The subcommands. A file has the options of a command, and calls the package that works."""

COMMANDS = {
    "demo": "train three architectures here and compare them: anlit demo",
    "prepare": "a corpus into token shards: anlit prepare FineWeb --output data/fw",
    "fit": "train a model: anlit fit --config experiment/demo/gpt.yaml",
    "validate": "a checkpoint's loss: anlit validate RUN",
    "test": "the same on the test split",
    "study": "arms tuned alike, on seeds: anlit study --config study/copying.yaml",
    "benchmark": "speed: anlit benchmark step, fit, attention or loss",
    "size": "memory, FLOPs, days of a run: anlit size --config FILE --gpus 8",
    "runs": "a table of all runs of a folder: anlit runs runs/",
    "compare": "plot and report of several runs: anlit compare RUN… --output DIR",
    "generate": "text from a checkpoint: anlit generate RUN 'Once upon a time'",
    "score": "log-likelihoods of tokens: anlit score RUN FILE… --output P.parquet",
    "export": "for transformers, or for anlit: anlit export RUN --output DIR",
    "import": "Qwen3, Llama and others as GPT+: anlit import FOLDER --output DIR",
    "lengths": "loss by length, 1 to 16 times: anlit lengths RUN… --output DIR",
    "needle": "needle in a haystack, depth × length: anlit needle RUN… --output DIR",
    "diagnose": "attention by layer, head, length: anlit diagnose RUN --output DIR",
}
"""Name → description and example."""
LIGHTNING = ("fit", "validate", "test")
"""Subcommands of LightningCLI, all in fit.py."""
EVALUATIONS = ("lengths", "needle", "diagnose")
"""Evaluations of trained models, all in evaluations.py."""
FILES = (
    dict.fromkeys(LIGHTNING, "fit")
    | dict.fromkeys(EVALUATIONS, "evaluations")
    | {"import": "import_model"}
)
"""Command → its file, if the file has another name. Python reserves `import`."""
