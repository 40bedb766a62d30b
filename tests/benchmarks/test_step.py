"""`anlit benchmark step` at tiny sizes: that it measures what `fit` runs, refuses what is wrong, and counts rightly."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from anlit.benchmarks import step
from anlit.benchmarks.cases import of_peak, put_ratios
from anlit.benchmarks.our_step import MODELS, OurStep
from anlit.benchmarks.peers import PeerStep
from anlit.benchmarks.record import Record
from anlit.benchmarks.step import PRESETS, facts_of, group_of, other_work, reason_against
from anlit.benchmarks.turns import quartiles
from anlit.commands.benchmark import main
from anlit.errors import UserError
from anlit.models.flops import flops_per_token
from anlit.optim.schedule import Schedule
from tests.benchmarks.sizes import CPU, SHAPE, TINY


def run(output: Path, *options: str) -> dict[str, Any]:
    assert main(["step", "--preset", "cpu", *SHAPE, "--rounds", "2", "--output", str(output), *options]) == 0
    return json.loads((output / "step-cpu.json").read_text())


@pytest.mark.parametrize("architecture", MODELS)
def test_our_step_is_the_one_that_fit_runs(architecture: str, monkeypatch) -> None:
    """Three steps through a Trainer's own loop, with the same batch, end at the same weights."""
    factor = Schedule.factor
    monkeypatch.setattr(Schedule, "factor", lambda self, step, n_steps: factor(self, step, 10))  # both as long
    ours = OurStep(architecture, TINY, CPU)
    losses = [ours.train().item() for _ in range(3)]

    fitted = OurStep(architecture, TINY, CPU)  # the same initial weights, a Trainer of its own
    model = fitted.model
    del model.log, model.log_dict
    trainer = L.Trainer(
        accelerator="cpu", max_steps=3, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    seen: list[Any] = []
    model.on_train_batch_end = lambda *_: seen.append(model._loss)
    trainer.fit(model, DataLoader([fitted.batch] * 3, batch_size=None))
    assert losses == pytest.approx([loss.item() for loss in seen], rel=1e-6)
    for mine, theirs in zip(ours.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    if architecture != "GPT":
        norms = torch.cat([norm.flatten() for norm in ours.model.model.row_norms()])
        assert norms.max() <= 1 + 1e-5


def rows_of(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (group,) = record["groups"]
    return {row["label"]: row for row in group["rows"]}


def test_a_run_and_what_it_writes(tmp_path: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(step, "PRESETS", {"cpu": replace(PRESETS["cpu"], peers_compiled=("no",))})
    record = run(tmp_path, "--peers", "transformers", "--compiled", "no")
    rows = rows_of(record)
    assert list(rows) == ["GPT+ eager", "nGPT eager", "anGPT eager", "Qwen3 eager"]
    model = OurStep("GPT", TINY, CPU).model.model
    for row in rows.values():
        assert row["reason"] is None, row["reason"]
        assert len(row["seconds"]["train"]["values"]) == 2
        assert row["flops_per_token"] == flops_per_token(model, 8)
        assert row["flops"]["train"] == 16 * row["flops_per_token"]
    assert rows["GPT+ eager"]["ratio"]["train"]["median"] == 1
    assert record["finished"]
    assert record["settings"]["size"]["d_model"] == 16
    assert record["environment"]["git"]["commit"]
    assert "Qwen3 eager" in capsys.readouterr().out
    assert "| GPT+ eager |" in (tmp_path / "step-cpu.md").read_text()


def test_a_run_that_is_killed_leaves_the_rounds_that_it_did(tmp_path: Path, monkeypatch) -> None:
    keep = Record.keep

    def killed(self: Record, **values: Any) -> None:
        keep(self, **values)
        rows = [row for group in self.values.get("groups", ()) for row in group["rows"]]
        if any(len(row["seconds"]["train"]["values"]) == 2 for row in rows if "seconds" in row):
            raise KeyboardInterrupt

    monkeypatch.setattr(Record, "keep", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--peers", "none", "--compiled", "no", "--models", "GPT", "--rounds", "5")
    record = json.loads((tmp_path / "step-cpu.json").read_text())
    assert not record["finished"]
    assert len(rows_of(record)["GPT+ eager"]["seconds"]["train"]["values"]) == 2


def test_longer_sequences_of_as_many_tokens(tmp_path: Path) -> None:
    options = ["--peers", "none", "--compiled", "no", "--models", "GPT", "--lengths", "4,16,32"]
    groups = run(tmp_path, *options)["groups"]
    assert [group["title"].partition(", V")[0] for group in groups] == [
        "d 16, L 2, T 4, B 4", "d 16, L 2, T 16, B 1", "d 16, L 2, T 32, B 1",
    ]  # fmt: skip
    rows = [row for group in groups for row in group["rows"]]
    assert all(row["reason"] is None and row["seconds"]["train"]["median"] > 0 for row in rows)
    assert rows[0]["flops"]["train"] < rows[1]["flops"]["train"]


def test_documents_and_mechanisms(tmp_path: Path) -> None:
    options = ["--peers", "none", "--compiled", "no", "--models", "anGPT", "--documents"]
    rows = rows_of(run(tmp_path, *options, "--mechanisms", "plain,scale-invariant"))
    assert list(rows) == ["anGPT eager", "anGPT scale-invariant eager"]
    assert all(row["reason"] is None and set(row["seconds"]) == {"train"} for row in rows.values())
    assert rows["anGPT eager"]["losses"] != rows["anGPT scale-invariant eager"]["losses"]


@pytest.mark.parametrize("compiled", ["no", "whole"])
def test_a_peer_learns_and_does_our_work(compiled: str) -> None:
    pytest.importorskip("transformers")
    peer = PeerStep("transformers", TINY, CPU, compiled)
    assert other_work(facts_of(peer), facts_of(OurStep("GPT", TINY, CPU))) is None
    losses = [peer.train().item() for _ in range(10)]
    assert losses[0] == pytest.approx(4.16, abs=0.2)
    assert losses[-1] < losses[0] - 0.05


def test_other_work_is_told() -> None:
    ours = {"parameters": 1_000_000, "flops_per_token": 6e6}
    assert other_work({"parameters": 1_001_000, "flops_per_token": 6e6}, ours) is None
    assert "parameters" in str(other_work({"parameters": 1_010_000, "flops_per_token": 6e6}, ours))
    assert "flops_per_token" in str(other_work({"parameters": 1_000_000, "flops_per_token": 6.1e6}, ours))


def test_what_is_wrong_or_fails_is_told_and_not_timed(tmp_path: Path, monkeypatch) -> None:
    class Wrong(OurStep):
        def __init__(self, architecture: str, *more: Any) -> None:
            if architecture == "anGPT":
                raise RuntimeError("out of memory")
            super().__init__(architecture, *more)
            self.compiled = more[2].compile

        def train(self) -> torch.Tensor:
            loss = super().train()
            return loss * 1.001 if self.compiled else loss

    monkeypatch.setattr(step, "OurStep", Wrong)
    record = run(tmp_path, "--peers", "none", "--models", "GPT,anGPT")
    rows = rows_of(record)
    assert rows["GPT+ eager"]["reason"] is None
    assert rows["anGPT eager"]["reason"] == "it fails: out of memory"
    assert "it is wrong: its first losses are" in rows["GPT+ compiled"]["reason"]
    assert not any("seconds" in row for label, row in rows.items() if label != "GPT+ eager")
    assert "anGPT eager: it fails: out of memory." in (tmp_path / "step-cpu.md").read_text()


def test_losses_that_tell_of_errors() -> None:
    size = PRESETS["cpu"].size
    row: dict[str, Any] = {"model": "GPT", "mechanism": "plain", "label": "GPT+ eager", "reason": None}
    row |= {"compiled": "no", "group": 1}
    good = row | {"losses": [8.31, 8.3, 8.2]}
    assert reason_against(good, [good], size) is None
    assert reason_against(row | {"losses": [8.31, float("nan"), 8.2]}, [good], size) is not None
    other = row | {"losses": [8.31, 8.3, 8.21]}
    assert reason_against(other, [good], size) is not None
    assert reason_against(other | {"compiled": "float8"}, [good], size) is None
    assert reason_against(row | {"compiled": "float8", "losses": [8.31, 8.3, 8.0]}, [good], size)
    peer = row | {"model": "litgpt", "parameters": 1, "flops_per_token": 1.0}
    assert "about 8.32" in reason_against(peer | {"losses": [10.0, 9.0, 8.0]}, [good, peer], size)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    for options, sentence in (
        (["--models", "GTP"], "--models GTP is not known: choose from GPT"),
        (["--peers", "nanogpt"], "--peers nanogpt is not known"),
        (["--peers", "litgpt"], "--peers litgpt is not installed: install it, or leave it out"),
        (["--device", "cuda"], "needs a CUDA device"),
    ):
        if (torch.cuda.is_available() and "cuda" in options) or (find_spec("litgpt") and "litgpt" in options):
            continue
        with pytest.raises(UserError, match=sentence):
            run(tmp_path, *options)


def test_peers_are_clipped_and_free_their_gradients() -> None:
    pytest.importorskip("transformers")
    step = PeerStep("transformers", TINY, CPU, "no")
    norms = []
    step.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.stack([p.grad.norm() for p in step.model.parameters()]).norm().item())
    )
    step.model.lm_head.weight.data.mul_(300)  # large gradients
    step.train()
    assert norms == [pytest.approx(1.0, abs=1e-3)]
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_ratios_are_paired_with_gpt_plus_in_the_same_mode() -> None:
    plan = replace(PRESETS["cpu"], models=("GPT", "anGPT"), peers=("litgpt",), compiled=("no", "blocks", "float8"))
    bases = {case.label: case.base for case in group_of(plan, plan.size, CPU, False, "").cases}
    times = {
        "GPT+ eager": [1.0, 2.0, 4.0],
        "anGPT eager": [1.02, 2.04, 4.08],
        "GPT+ compiled": [0.5, 1.0, 2.0],
        "litgpt compiled whole": [0.55, 1.1, 2.2],
        "GPT+ compiled, float8": [0.25, 0.5, 1.0],
    }
    rows: list[dict[str, Any]] = [{"label": name, "seconds": {"train": quartiles(values)}, "flops": {"train": 1e9}}
                                  for name, values in times.items()]  # fmt: skip
    rows.append({"label": "litgpt eager", "reason": "it fails: no"})
    put_ratios(rows, [bases[row["label"]] for row in rows])
    ratios = [row["ratio"]["train"]["median"] for row in rows[:-1]]
    assert ratios == pytest.approx([1, 1.02, 1, 1.1, 0.5])  # float8 beside GPT+ compiled without it
    assert rows[1]["ratio"]["train"] == pytest.approx({"median": 1.02, "low": 1.02, "high": 1.02})
    assert rows[5]["ratio"] == {}
    assert rows[0]["seconds"]["train"]["quartiles"] == [1.5, 3.0]
    assert of_peak("train", 2e9)(rows[0]) == "25.0%"


def test_a_step_with_shared_keys_beside_one_without(tmp_path: Path) -> None:
    rows = rows_of(run(tmp_path, "--models", "GPT", "--compiled", "no", "--peers", "none", "--groups", "1,2"))
    own, shared = rows["GPT+ eager"], rows["GPT+ groups of 2 eager"]
    assert own["parameters"] - shared["parameters"] == 2 * 2 * 8 * 16
    assert shared["reason"] is None
    assert shared["ratio"]["train"]["median"] > 0
    with pytest.raises(UserError, match="--groups must be divisors of the 2 heads"):
        run(tmp_path, "--groups", "3")
