"""Cases of models and configurations that somebody else made: letters A, B, C, and what N says of them."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

from tests.checkpoints.foreign import RunsCode, as_export, change_json
from tests.trust.place import NOTHING, Case, Outcome, Place

NOT_MADE = r"which is no \w+ of anlit or of an imported module, so nothing is made of it"


def exported(place: Place) -> Path:
    """The run as a folder."""
    return as_export(place.run, place.folder, {})


def command(place: Place, name: str, path: Path) -> list[Any]:
    """A command that reads a model, on `path`."""
    text = place.folder / "text.txt"
    text.write_text("the cat sat\n")
    out = ["--output", place.output]
    data = ["--data", place.data, "--device", "cpu", *out]
    return {
        "generate": ["generate", path, "the cat", "--max_tokens", "2"],
        "export": ["export", path, *out],
        "score": ["score", path, text, "--output", place.output / "scores.parquet"],
        "lengths": ["lengths", path, *data, "--lengths", "16", "--tokens", "64"],
        "diagnose": ["diagnose", path, *data, "--lengths", "16", "--tokens", "64"],
        "needle": ["needle", path, *data, "--lengths", "64", "--samples", "1"],
        "evaluate": ["evaluate", path, "--tasks", "any", *out],
    }[name]


def unneeded_optimizer(place: Place) -> Outcome:
    folder = exported(place)
    change_json(folder / "config.json", lambda record: record["settings"].update(optimizer=place.shell))
    return place.command(*command(place, "generate", folder))


def named_attention(place: Place, name: str) -> Outcome:
    path = place.change_checkpoint(lambda content: content["hyper_parameters"].update(attention=place.shell))
    return place.command(*command(place, name, path))


def nested_attention(place: Place) -> Outcome:
    layers = [{"class_path": "anlit.SlidingWindow", "init_args": {"width": 4, "mechanism": place.process}}]
    attention = {"class_path": "anlit.AttentionPattern", "init_args": {"layers": layers}}
    path = place.change_checkpoint(lambda content: content["hyper_parameters"].update(attention=attention))
    return place.command(*command(place, "generate", path))


def pickled(place: Place) -> Outcome:
    path = place.change_checkpoint(lambda content: content.update(extra=RunsCode(place.marker)))
    return place.command(*command(place, "score", path))


def larger_settings(place: Place) -> Outcome:
    path = place.change_checkpoint(lambda content: content["hyper_parameters"].update(n_layers=10**9))
    return place.command(*command(place, "generate", path))


def address_of_data(place: Place) -> Outcome:
    path = place.change_checkpoint(lambda content: content["anlit"]["data"].update(path="s3://somebody/data"))
    return place.command(*command(place, "generate", path))


def data_of_a_run(place: Place, name: str) -> Outcome:
    place.change_config(lambda config: config.update(data=place.shell))
    arguments = command(place, name, place.run)
    if "--data" in arguments:
        at = arguments.index("--data")
        del arguments[at : at + 2]
    return place.command(*arguments)


def optimizer_of_a_run(place: Place, name: str) -> Outcome:
    config = place.change_config(lambda config: config["model"]["init_args"].update(optimizer=place.shell))
    given = {"compare": [place.run, "--baseline", place.run, "--measure_steps", "--output", place.output]}
    return place.command(name, *given.get(name, [f"--config={config}"]))


def callbacks_of_a_run(place: Place) -> Outcome:
    config = place.change_config(lambda config: config["trainer"].update(callbacks=[place.process]))
    return place.command("validate", f"--config={config}")


def tag_of_a_run(place: Place) -> Outcome:
    config = place.run / "config.yaml"
    config.write_text(f"x: !!python/object/apply:os.system ['mkdir {place.marker}']\n{config.read_text()}")
    return place.command("validate", f"--config={config}")


def at_an_address(place: Place, *arguments: str) -> Outcome:
    return place.command(*place.fit(*arguments, run_dir=place.folder / "new"))


def pickled_tokenizer(place: Place) -> Outcome:
    file = place.folder / "tokenizer.json"
    file.write_bytes(pickle.dumps(RunsCode(place.marker)))
    return place.command(*command(place, "generate", place.run), "--tokenizer", file)


def growing_tokenizer(place: Place) -> Outcome:
    folder = exported(place)
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}
    change_json(
        folder / "tokenizer.json",
        lambda content: content.update(normalizer={"type": "Sequence", "normalizers": [step] * 12}),
    )
    return place.command(*command(place, "generate", folder))


CASES = [
    Case("A", "generate from an export whose config.json names os.system as the optimizer", unneeded_optimizer,
         "0", "the cat", NOTHING),
    *[Case("A", f"{name} of a .ckpt that names os.system as the attention", partial(named_attention, name=name),
           "2", NOT_MADE, NOTHING)
      for name in ("generate", "export", "score", "lengths", "diagnose", "needle")],
    Case("A", "generate from a .ckpt with a class of another type inside of two mechanisms", nested_attention,
         "2", NOT_MADE, NOTHING),
    Case("A", "score with a .ckpt that holds a pickled call", pickled, "2", "cannot be read as a checkpoint", NOTHING),
    *[Case("B", f"{name} of a run whose config.yaml names os.system as the data", partial(data_of_a_run, name=name),
           "2", NOT_MADE, NOTHING) for name in ("lengths", "diagnose", "needle")],
    *[Case("B", f"{name} of a run whose config.yaml names os.system as the optimizer",
           partial(optimizer_of_a_run, name=name), "2", says, NOTHING)
      for name, says in (("validate", "names os.system, which is not a class"),
                         ("size", "names os.system, which is not a class"), ("compare", NOT_MADE))],
    Case("B", "validate with a config.yaml whose callback is subprocess.Popen", callbacks_of_a_run,
         "2", "trainer.callbacks names subprocess.Popen, which is not a class for it", NOTHING),
    Case("B", "validate with a config.yaml that has a YAML tag for Python", tag_of_a_run,
         "2", "is not valid YAML", NOTHING),
    Case("C", "fit --ckpt_path http://…",
         lambda place: at_an_address(place, "--ckpt_path=http://127.0.0.1:9/a.ckpt"),
         "2", "is not on this machine: download it", NOTHING),
    Case("C", "fit --model.attention s3://…/attention.yaml",
         lambda place: at_an_address(place, "--model.attention=s3://bucket/attention.yaml"),
         "2", "either not accessible or invalid", NOTHING),
    Case("N", "generate from a .ckpt whose data are at s3://…", address_of_data,
         "2", "has no tokenizer", NOTHING),
    Case("N", "generate from a .ckpt that says n_layers is 10⁹", larger_settings,
         "2", "but its weights are those of n_layers=1", NOTHING),
    Case("N", "generate with a tokenizer.json that makes texts grow", growing_tokenizer,
         "2", "normalisation steps could make a text", NOTHING),
    Case("N", "generate with a pickle as tokenizer.json", pickled_tokenizer,
         "2", "is not a tokenizer.json that the tokenizers library can read", NOTHING),
]  # fmt: skip
