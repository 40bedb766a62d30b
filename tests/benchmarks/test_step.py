"""`anlit benchmark step` at tiny sizes: that it measures what `fit` runs, refuses what is wrong, and counts rightly."""

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from anlit.benchmarks.command import main
from anlit.benchmarks.peers.training_step import PeerStep, TimedStep
from anlit.benchmarks.process import ProcessError
from anlit.benchmarks.record import Record
from anlit.benchmarks.step import entrants, measure
from anlit.benchmarks.step.entrants import PeerEntrant, same_work
from anlit.benchmarks.step.ours import MODELS, OurStep
from anlit.benchmarks.step.plan import PRESETS, Size, Variant
from anlit.benchmarks.step.report import finish
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


class PeerHere(TimedStep):
    """A peer without a process of its own, whose imports take seconds."""

    def __init__(self, python: str, variant: Variant, size: Size, device: torch.device) -> None:
        super().__init__(PeerStep(variant.model, size.as_json(), device, variant.compiled), device)

    def close(self) -> None:
        del self.step


def test_a_run_and_what_it_writes(tmp_path: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(entrants, "PeerEntrant", PeerHere)
    record = run(tmp_path, "--peer", "transformers", "--compiled", "no", "--peers_compiled", "no")
    rows = {row["label"]: row for row in record["rows"]}
    assert list(rows) == ["GPT+ eager", "nGPT eager", "anGPT eager", "Qwen3 eager"]
    model = OurStep("GPT", TINY, CPU).model.model
    for label, row in rows.items():
        assert row["reason"] is None, row["reason"]
        assert len(row["seconds"]["train"]) == record["rounds"] == 2
        assert ("infer" in row["seconds"]) == (label != "Qwen3 eager")
        assert row["flops_per_token"] == flops_per_token(model, 8)
        rate = 16 / row["spread"]["train"]["median"]
        assert row["tokens_per_second"] == pytest.approx(rate)
        assert row["mfu"] == pytest.approx(rate * row["flops_per_token"] / record["peak_flops_per_second"])
    assert rows["GPT+ eager"]["beside_base"]["train"]["median"] == 1
    assert record["finished"]
    assert record["settings"]["size"]["d_model"] == 16
    assert record["environment"]["git"]["commit"]
    assert "Qwen3 eager" in capsys.readouterr().out
    assert "| GPT+ eager |" in (tmp_path / "step-cpu.md").read_text()


def test_a_run_that_is_killed_leaves_the_rounds_that_it_did(tmp_path: Path, monkeypatch) -> None:
    keep, kept = Record.keep, []

    def killed(self: Record, **values: Any) -> None:
        keep(self, **values)
        kept.append(values.get("rounds"))
        if values.get("rounds") == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Record, "keep", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--peer", "none", "--compiled", "no", "--models", "GPT", "--rounds", "5", "--kinds", "train")
    record = json.loads((tmp_path / "step-cpu.json").read_text())
    assert not record["finished"]
    assert record["rounds"] == 2
    assert [len(row["seconds"]["train"]) for row in record["rows"]] == [2]


def test_documents_kernels_and_mechanisms(tmp_path: Path) -> None:
    options = ["--peer", "none", "--compiled", "no", "--models", "anGPT", "--kinds", "train", "--documents"]
    record = run(tmp_path, *options, "--mechanisms", "plain,scale-invariant", "--backends", "eager,sdpa")
    labels = ["anGPT eager eager", "anGPT sdpa eager"]
    labels += ["anGPT scale-invariant eager eager", "anGPT scale-invariant sdpa eager"]
    assert [row["label"] for row in record["rows"]] == labels
    *possible, impossible = record["rows"]
    assert all(row["reason"] is None and set(row["seconds"]) == {"train"} for row in possible)
    assert "cannot do attention ScaleInvariant" in impossible["reason"]
    assert possible[0]["losses"] == pytest.approx(possible[1]["losses"], rel=1e-5)


@pytest.mark.parametrize("compiled", ["no", "blocks", "whole"])
def test_a_peer_learns_and_does_our_work(compiled: str) -> None:
    pytest.importorskip("transformers")
    peer = TimedStep(PeerStep("transformers", TINY.as_json(), CPU, compiled), CPU)
    assert same_work(peer.described, TimedStep(OurStep("GPT", TINY, CPU), CPU).described) is None
    losses = [peer.loss() for _ in range(10)]
    assert losses[0] == pytest.approx(4.16, abs=0.2)
    assert losses[-1] < losses[0] - 0.05


def test_other_work_is_told() -> None:
    ours = {"parameters": 1_000_000, "flops_per_token": 6e6}
    assert same_work({"parameters": 1_001_000, "flops_per_token": 6e6}, ours) is None
    assert "parameters" in str(same_work({"parameters": 1_010_000, "flops_per_token": 6e6}, ours))
    assert "flops_per_token" in str(same_work({"parameters": 1_000_000, "flops_per_token": 6.1e6}, ours))


def test_a_peer_in_a_process_of_its_own() -> None:
    pytest.importorskip("transformers")
    entrant = PeerEntrant(sys.executable, Variant("transformers"), TINY, CPU)
    here = PeerStep("transformers", TINY.as_json(), CPU, "no")
    assert entrant.described["flops_per_token"] == here.flops_per_token()
    assert entrant.described["versions"].keys() == {"transformers", "torch"}
    for _ in range(2):
        assert entrant.loss() == pytest.approx(here.train().item(), rel=1e-5)
    assert entrant.seconds("train", 2) > 0
    with pytest.raises(ProcessError, match="AttributeError"):
        entrant.seconds("infer")
    with pytest.raises(ProcessError, match="ended"):
        entrant.loss()
    entrant.close()


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

    monkeypatch.setattr(entrants, "OurStep", Wrong)
    record = run(tmp_path, "--peer", "none", "--models", "GPT,anGPT", "--kinds", "train")
    rows = {row["label"]: row for row in record["rows"]}
    assert rows["GPT+ eager"]["reason"] is None
    assert rows["anGPT eager"]["reason"] == "it fails: out of memory"
    assert "it is wrong: its first losses are" in rows["GPT+ compiled"]["reason"]
    assert not any("seconds" in row for label, row in rows.items() if label != "GPT+ eager")
    assert "not timed: anGPT eager: it fails: out of memory" in (tmp_path / "step-cpu.md").read_text()


def test_losses_that_tell_of_errors() -> None:
    plan = PRESETS["cpu"]
    row: dict[str, Any] = {"model": "GPT", "mechanism": "plain", "peer": False, "label": "GPT+ eager", "reason": None}
    row |= {"compiled": "no"}
    good = row | {"losses": [8.31, 8.3, 8.2]}
    assert measure.reason_against(good, [good], plan) is None
    assert measure.reason_against(row | {"losses": [8.31, float("nan"), 8.2]}, [good], plan) is not None
    other = row | {"losses": [8.31, 8.3, 8.21]}
    assert measure.reason_against(other, [good], plan) is not None
    assert measure.reason_against(other | {"compiled": "float8"}, [good], plan) is None
    assert measure.reason_against(row | {"compiled": "float8", "losses": [8.31, 8.3, 8.0]}, [good], plan)
    peer = row | {"model": "litgpt", "peer": True, "parameters": 1, "flops_per_token": 1.0}
    assert "about 8.32" in measure.reason_against(peer | {"losses": [10.0, 9.0, 8.0]}, [good, peer], plan)


def test_no_time_left(tmp_path: Path) -> None:
    record = run(tmp_path, "--peer", "none", "--minutes", "0")
    assert all("no time was left" in row["reason"] for row in record["rows"])
    assert record["rounds"] == 0


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    for options, sentence in (
        (["--models", "GTP"], "--models GTP is not known: choose from GPT"),
        (["--peer", "nanogpt"], "--peer nanogpt is not known"),
        (["--kinds", "infer"], "lacks train"),
        (["--peer", "litgpt", "--peer_python", "/no/python"], "cannot import litgpt"),
        (["--device", "cuda"], "needs a CUDA device"),
    ):
        if torch.cuda.is_available() and "cuda" in options:
            continue
        with pytest.raises(UserError, match=sentence):
            run(tmp_path, *options)


def test_peers_are_clipped_and_free_their_gradients() -> None:
    pytest.importorskip("transformers")
    step = PeerStep("transformers", TINY.as_json(), CPU, "no")
    norms = []
    step.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.stack([p.grad.norm() for p in step.model.parameters()]).norm().item())
    )
    step.model.lm_head.weight.data.mul_(300)  # large gradients
    step.train()
    assert norms == [pytest.approx(1.0, abs=1e-3)]
    assert all(parameter.grad is None for parameter in step.model.parameters())


def made_up(model: str, compiled: str, seconds: list[float], **more: Any) -> dict[str, Any]:
    variant = Variant(model, compiled)
    row = {**vars(variant), "label": variant.label, "mode": variant.mode, "reason": None}
    return row | {"seconds": {"train": seconds}, "flops_per_token": 1e6, **more}


def test_ratios_are_paired_with_gpt_plus_in_the_same_mode() -> None:
    rows = [
        made_up("GPT", "no", [1.0, 2.0, 4.0]),
        made_up("anGPT", "no", [1.02, 2.04, 4.08]),
        made_up("GPT", "blocks", [0.5, 1.0, 2.0]),
        made_up("litgpt", "whole", [0.55, 1.1, 2.2]),
        made_up("GPT", "float8", [0.25, 0.5, 1.0]),
        made_up("transformers", "whole", [0.6], reason="it fails: no"),
    ]
    finish(rows, 1000, 2e9)
    assert rows[1]["beside_base"]["train"] == pytest.approx({"median": 1.02, "low": 1.02, "high": 1.02})
    assert rows[2]["beside_base"]["train"]["median"] == 1
    assert rows[3]["beside_base"]["train"]["median"] == pytest.approx(1.1)
    assert rows[4]["beside_base"]["train"]["median"] == 0.5  # beside GPT+ compiled without it
    assert rows[0]["spread"]["train"]["quartiles"] == [1.5, 3.0]
    assert rows[0]["mfu"] == pytest.approx(1000 / 2 * 1e6 / 2e9)
    assert "beside_base" not in rows[5]


def test_the_presets_compare_what_is_to_be_compared() -> None:
    labels = [variant.label for variant in PRESETS["cpu"].variants()]
    assert labels[:6] == [f"{model} {how}" for how in ("eager", "compiled") for model in ("GPT+", "nGPT", "anGPT")]
    assert {"litgpt eager", "litgpt compiled whole", "Qwen3 eager", "Qwen3 compiled"} <= set(labels)
    gpu = PRESETS["h200"]
    assert (gpu.size.length, gpu.size.batch, gpu.size.vocab_size, gpu.size.dtype) == (2048, 8, 50_304, torch.bfloat16)
    assert [variant.label for variant in gpu.variants()] == [
        "GPT+ compiled", "nGPT compiled", "anGPT compiled", "litgpt compiled whole", "Qwen3 compiled whole",
    ]  # fmt: skip
