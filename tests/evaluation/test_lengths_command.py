"""The command `anlit lengths`: the files of its report, what it prints, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

from anlit import GPT, AnGPT
from anlit.commands.evaluations import main
from anlit.errors import UserError
from anlit.evaluation import runner
from anlit.evaluation.lengths_report import loss_figure
from anlit.evaluation.runner import load_checkpoints
from anlit.training.load_model import Checkpoint, load_checkpoint
from tests.data.prepared import VOCABULARY
from tests.evaluation.length_results import find, total_loss
from tests.evaluation.saved import LENGTH, VAL_TOKENS, make_run, prepare, save, small

Record = dict[str, Any]


@pytest.mark.usefixtures("no_figures")
def test_a_seed_that_is_given_twice_is_averaged_once(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = shutil.copytree(run, tmp_path / "again")

    record = run_lengths(tmp_path / "out", run, again, "--lengths=16")

    (arm,) = record["arms"]
    assert arm["checkpoints"] == [1]
    assert arm["loss"][0]["sd"] is None
    assert f"note: {arm['label']}: {run}" in capsys.readouterr().out
    assert "is left out" in (tmp_path / "out" / "lengths.md").read_text()


def run_lengths(output: Path, *arguments: object) -> Record:
    """Run the command; returns the content of lengths.json."""
    main(["lengths", *map(str, arguments), f"--output={output}"])
    return read_record(output)


def read_record(output: Path) -> Record:
    return json.loads((output / "lengths.json").read_text())


@pytest.fixture(scope="module")
def report(run: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report on two seeds of GPT+ and an anGPT."""
    folder = tmp_path_factory.mktemp("report")
    second = make_run(folder / "gpt-2", data, GPT, seed=2)
    angpt = make_run(folder / "angpt", data, AnGPT)
    output = folder / "new" / "out"
    run_lengths(output, run, second, angpt, "--lengths=64,16", "--tokens=1000")
    return output


def mean_and_deviation(loss: dict[str, float]) -> str:
    """The loss of an arm as reports print it."""
    return f"{loss['mean']:.4f} ± {loss['sd']:.4f}"


def test_the_command_writes_table_numbers_and_figure(report: Path) -> None:
    files = [file.name for file in report.iterdir()]

    assert sorted(files) == [
        "lengths.html",
        "lengths.json",
        "lengths.md",
        "lengths.pdf",
        "lengths.png",
        "lengths.svg",
    ]


def test_the_record_has_the_origin_of_its_numbers(report: Path) -> None:
    record = read_record(report)

    assert record["command"].startswith("anlit lengths ")
    assert {"git", "versions", "hardware", "device", "data"} <= record.keys()
    assert record["settings"]["tokens"] == 960
    seeds = [checkpoint["seed"] for checkpoint in record["checkpoints"]]
    assert seeds == [1, 2, 1]


def test_an_arm_has_mean_and_deviation_of_its_seeds(report: Path) -> None:
    record = read_record(report)
    markdown = (report / "lengths.md").read_text()

    pair, single = record["arms"]
    assert pair["checkpoints"] == [0, 1]
    assert single["checkpoints"] == [2]
    losses = []
    for results in record["measurements"][:2]:
        losses.append(total_loss(find(results, 64, False)))
    loss = find(pair["loss"], 64, False)
    assert loss["mean"] == pytest.approx(np.mean(losses))
    assert loss["sd"] == pytest.approx(np.std(losses, ddof=1))
    assert f"| no | 64 | 2 | {mean_and_deviation(loss)} |" in markdown
    assert "Evaluated on 960 tokens and not 1,000" in markdown


def test_the_shade_of_several_training_lengths_is_longer_than_all(report: Path) -> None:
    """It begins at the greatest, where the models of the others have long left their length."""
    record = read_record(report)
    record["checkpoints"][2]["training_length"] = 4 * LENGTH

    figure = loss_figure(record)

    (legend,) = figure.legends
    *_, label = [text.get_text() for text in legend.get_texts()]
    assert label == f"longer than in any training ({LENGTH} and {4 * LENGTH})"
    plt.close(figure)


def test_a_record_gives_the_same_report_again(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["lengths", str(report / "lengths.json"), f"--output={tmp_path}"])

    names = {file.name for file in tmp_path.iterdir()}
    names_before = {file.name for file in report.iterdir()}
    assert names == names_before - {"lengths.json"}
    for name in names:
        content = (tmp_path / name).read_bytes()
        assert content == (report / name).read_bytes(), name
    pair, _ = read_record(report)["arms"]
    first_loss, *_ = pair["loss"]
    assert mean_and_deviation(first_loss) in capsys.readouterr().out


@pytest.mark.usefixtures("no_figures")
def test_a_loss_that_falls_with_the_length_changes_by_a_number_with_a_minus_sign(
    report: Path, tmp_path: Path
) -> None:
    record = read_record(report)
    for results in record["measurements"]:
        for result in results:
            if result["change"] is not None:
                result["change"]["loss"] = -0.1
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(record))

    main(["lengths", str(changed), f"--output={tmp_path / 'out'}"])

    markdown = (tmp_path / "out" / "lengths.md").read_text()
    assert "| −0.1000 ± 0.0000 |" in markdown
    assert "| −0.1000 |" in markdown


@pytest.mark.parametrize("content", ["[", '{"settings": 1}'])
def test_another_json_file_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)

    with pytest.raises(UserError, match=r"other\.json .*: give (the|its) lengths\.json"):
        main(["lengths", str(file), f"--output={tmp_path}"])


@pytest.mark.usefixtures("no_figures")
def test_a_loss_that_is_not_finite_is_printed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_run = Path(shutil.copytree(run, tmp_path / "broken"))
    file = broken_run / "checkpoints" / "best.ckpt"
    content = torch.load(file, weights_only=True)
    content["state_dict"]["model.head.weight"][:] = 3e38  # finite, but not the logits
    torch.save(content, file)

    record = run_lengths(tmp_path, file, "--lengths=16")

    (arm,) = record["arms"]
    loss, *_ = arm["loss"]
    assert loss["mean"] is None
    assert "not finite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--lengths=47,48"],
            f"/val has {VAL_TOKENS - 1:,} tokens to predict and this needs 2,256, the least common",
        ),
        (
            ["--lengths=16,64", "--tokens=50"],
            "--tokens is 50 and must be at least 64, the least common multiple of",
        ),
    ],
)
def test_wrong_settings_are_a_single_sentence(
    arguments: list[str], message: str, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        run_lengths(tmp_path, run, *arguments)


def test_checkpoints_of_different_data_need_common_data(run: Path, tmp_path: Path) -> None:
    other_data = prepare(tmp_path / "other", seed=9)
    second = make_run(tmp_path / "gpt-2", other_data, GPT)

    with pytest.raises(UserError, match=r"have different data .* set --data"):
        run_lengths(tmp_path, run, second, "--lengths=16")

    _, data = load_checkpoints([str(run), str(second)], str(other_data), "cpu")
    assert data.path == str(other_data)


@pytest.mark.usefixtures("no_figures")
def test_a_single_checkpoint_is_read_once_and_several_are_checked_first(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = make_run(tmp_path / "second", data, GPT)
    read = []

    def load_and_note(path: str, device: str) -> Checkpoint:
        read.append(Path(path).parent.parent)
        return load_checkpoint(path, device)

    monkeypatch.setattr(runner, "load_checkpoint", load_and_note)

    run_lengths(tmp_path / "one", run, "--lengths=16", "--tokens=64")
    assert read == [run]
    read.clear()
    run_lengths(tmp_path / "two", run, second, "--lengths=16", "--tokens=64")

    assert read == [run, second, run, second]


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("family", [None, "llama"])
def test_a_note_on_masking_in_training_is_only_on_models_trained_here(
    family: str | None, data: Path, tmp_path: Path
) -> None:
    """The setting of an imported model tells nothing about its training."""
    model = small(GPT, vocab_size=VOCABULARY, context_length=LENGTH)
    file = save(model, tmp_path / "a.ckpt", family=family, data=None)

    record = run_lengths(tmp_path / "out", file, "--data", data)

    has_note = "trained with document masking" in " ".join(record["notes"])
    was_trained_here = family is None
    assert has_note == was_trained_here
