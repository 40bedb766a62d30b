"""`anlit benchmark step` at tiny sizes: that it measures what `fit` runs, refuses what is wrong, and counts rightly."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from anlit.benchmarks import step
from anlit.benchmarks.harness import put_ratios
from anlit.benchmarks.options import Size
from anlit.benchmarks.our_step import MODELS, OurStep
from anlit.benchmarks.peers import PeerStep
from anlit.benchmarks.step import group_of, skip_reason
from anlit.benchmarks.timing import quartiles
from anlit.commands.benchmark import main
from anlit.errors import UserError
from anlit.models.flops import flops_per_token
from anlit.optim.schedule import Schedule

CPU = torch.device("cpu")
TINY = Size(16, 2, 2, 64, 8, 2, "float32")
SHAPE = ["--d_model", "16", "--n_layers", "2", "--n_heads", "2", "--vocab_size", "64", "--length", "8", "--batch", "2"]
OURS = ["--peers", "none", "--compiled", "no"]


def run(output: Path, *options: str) -> dict[str, Any]:
    assert main(["step", "--preset", "cpu", *SHAPE, "--rounds", "2", "--output", str(output), *options]) == 0
    return json.loads((output / "step-cpu.json").read_text())


def rows_of(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (group,) = record["groups"]
    return {row["label"]: row for row in group["rows"]}


@pytest.mark.parametrize("architecture", MODELS)
def test_our_step_is_the_one_that_fit_runs(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps through a Trainer's own loop, with the same batch, end at the same weights."""
    factor = Schedule.factor
    monkeypatch.setattr(Schedule, "factor", lambda self, step, n_steps: factor(self, step, 10))  # both as long
    ours = OurStep(architecture, TINY, CPU)
    losses = [ours.train().item() for _ in range(3)]

    fitted = OurStep(architecture, TINY, CPU)  # the same initial weights, a Trainer of its own
    model = fitted.model
    del model.log, model.log_dict
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", max_steps=3, gradient_clip_val=1.0, **quiet)
    seen: list[Any] = []
    model.on_train_batch_end = lambda *_: seen.append(model._loss)
    trainer.fit(model, DataLoader([fitted.batch] * 3, batch_size=None))
    assert losses == pytest.approx([loss.item() for loss in seen], rel=1e-6)
    for mine, theirs in zip(ours.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    if architecture != "GPT":
        norms = torch.cat([norm.flatten() for norm in ours.model.model.row_norms()])
        assert norms.max() <= 1 + 1e-5


def test_every_model_is_timed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    record = run(tmp_path, "--peers", "transformers", "--compiled", "no", "--peers_compiled", "no")
    rows = rows_of(record)
    assert list(rows) == ["GPT+ eager", "nGPT eager", "anGPT eager", "Qwen3 eager"]
    flops = flops_per_token(OurStep("GPT", TINY, CPU).model.model, 8)
    for row in rows.values():
        assert row["reason"] is None
        assert len(row["seconds"]["train"]["values"]) == 2
        assert row["flops_per_token"] == flops
        assert row["flops"]["train"] == 16 * flops
    assert record["finished"]
    assert record["settings"]["d_model"] == 16
    assert record["environment"]["git"]["commit"]
    assert "Qwen3 eager" in capsys.readouterr().out
    assert "| GPT+ eager |" in (tmp_path / "step-cpu.md").read_text()


def test_longer_sequences_of_as_many_tokens(tmp_path: Path) -> None:
    groups = run(tmp_path, *OURS, "--models", "GPT", "--lengths", "4,16,32")["groups"]
    titles = ["d 16, L 2, T 4, B 4", "d 16, L 2, T 16, B 1", "d 16, L 2, T 32, B 1"]
    assert [group["title"].partition(", V")[0] for group in groups] == titles
    short, long, longer = (group["rows"][0] for group in groups)
    assert short["flops"]["train"] < long["flops"]["train"] < longer["flops"]["train"]
    assert all(row["seconds"]["train"]["median"] > 0 for row in (short, long, longer))


def test_documents_mechanisms_and_shared_keys(tmp_path: Path) -> None:
    options = ["--models", "anGPT", "--documents", "--mechanisms", "plain,scale-invariant", "--groups", "1,2"]
    rows = rows_of(run(tmp_path, *OURS, *options))
    mechanisms = ("anGPT", "anGPT scale-invariant")
    assert list(rows) == [f"{name}{group} eager" for name in mechanisms for group in ("", " groups of 2")]
    assert all(row["reason"] is None and set(row["seconds"]) == {"train"} for row in rows.values())
    assert rows["anGPT eager"]["losses"] != rows["anGPT scale-invariant eager"]["losses"]
    assert rows["anGPT eager"]["parameters"] - rows["anGPT groups of 2 eager"]["parameters"] == 2 * 2 * 8 * 16


def test_a_peer_learns_and_is_clipped() -> None:
    pytest.importorskip("transformers")
    peer = PeerStep("transformers", TINY, CPU, "whole")
    losses = [peer.train().item() for _ in range(10)]
    assert losses[0] == pytest.approx(4.16, abs=0.2)
    assert losses[-1] < losses[0] - 0.05
    norms: list[float] = []
    peer.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.stack([p.grad.norm() for p in peer.model.parameters()]).norm().item())
    )
    peer.model.lm_head.weight.data.mul_(300)  # large gradients
    peer.train()
    assert norms == [pytest.approx(1.0, abs=1e-3)]
    assert all(parameter.grad is None for parameter in peer.model.parameters())


def test_a_variant_that_computes_something_else_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = OurStep.train
    monkeypatch.setattr(OurStep, "train", lambda self: train(self) * (1.001 if self.model.runtime.compile else 1))
    rows = rows_of(run(tmp_path, "--peers", "none", "--models", "GPT"))
    assert "it is wrong: its first losses are" in rows["GPT+ compiled"]["reason"]
    assert [label for label, row in rows.items() if "seconds" in row] == ["GPT+ eager"]


RIGHT = {"model": "GPT", "compiled": "no", "losses": [8.31, 8.3, 8.2], "parameters": 1_000_000, "flops_per_token": 6e6}
PEER = {"model": "litgpt", "losses": [8.3, 8.2, 8.1]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"losses": [8.31, float("nan"), 8.2]}, "its losses are"),
        ({"losses": [8.31, 8.3, 8.21]}, "it is wrong: its first losses are"),
        ({"losses": [8.31, 8.3, 8.21], "compiled": "float8"}, None),
        ({"losses": [8.31, 8.3, 8.0], "compiled": "float8"}, "it is wrong: its first losses are"),
        (PEER, None),
        (PEER | {"losses": [10.0, 9.0, 8.0]}, "its first loss is 10.000, not about 8.32"),
        (PEER | {"parameters": 1_001_000}, None),
        (PEER | {"parameters": 1_010_000}, "it does other work: parameters"),
        (PEER | {"flops_per_token": 6.1e6}, "it does other work: flops_per_token"),
    ],
)
def test_losses_and_work_have_to_agree(changes: dict[str, Any], reason: str | None) -> None:
    row = {"mechanism": "plain", "group": 1, "label": "", "reason": None, **RIGHT}
    answer = skip_reason(row | changes, [row], Size(256, 6, 4, 4096, 256, 8, "float32"))
    assert answer is None if reason is None else reason in str(answer)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--models", "GTP"], "--models GTP is not known: choose from GPT"),
        (["--peers", "nanogpt"], "--peers nanogpt is not known"),
        (["--peers", "litgpt"], "--peers litgpt is not installed: install it, or leave it out"),
        (["--device", "cuda"], "needs a CUDA device"),
        (["--groups", "3"], "--groups must be divisors of the 2 heads"),
    ],
)
def test_a_wrong_option_is_refused(tmp_path: Path, options: list[str], sentence: str) -> None:
    if (torch.cuda.is_available() and "cuda" in options) or (find_spec("litgpt") and "litgpt" in options):
        pytest.skip("it is right here")
    with pytest.raises(UserError, match=sentence):
        run(tmp_path, *options)


def test_ratios_are_paired_with_gpt_plus_in_the_same_mode() -> None:
    given = step.options(["--preset", "cpu", "--models", "GPT,anGPT", "--peers", "none"])
    given.peers, given.compiled = ("litgpt",), ("no", "blocks", "float8")
    times = {
        "GPT+ eager": [1.0, 2.0, 4.0],
        "anGPT eager": [1.02, 2.04, 4.08],
        "GPT+ compiled": [0.5, 1.0, 2.0],
        "litgpt compiled whole": [0.55, 1.1, 2.2],
        "GPT+ compiled, float8": [0.25, 0.5, 1.0],  # beside GPT+ compiled without it
    }
    cases = {case["label"]: case for case in group_of(given, TINY, CPU).cases}
    rows = [cases[name] | {"seconds": {"train": quartiles(values)}} for name, values in times.items()]
    put_ratios([*rows, cases["litgpt eager"]])
    assert [row["ratio"]["train"]["median"] for row in rows] == pytest.approx([1, 1.02, 1, 1.1, 0.5])
    assert cases["litgpt eager"]["ratio"] == {}
