"""`anlit benchmark` at tiny sizes: what is right is timed and written, what is wrong or fails is named and is not."""

import json
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from anlit.benchmarks import attention, loss, step
from anlit.benchmarks.harness import put_ratios
from anlit.benchmarks.options import Size
from anlit.benchmarks.timing import quartiles
from anlit.benchmarks.training_step import MODELS, batch_of, our_step, peer_step
from anlit.commands.benchmark import main
from anlit.errors import UserError
from anlit.nn.kernels import eager
from anlit.nn.models.flops import flops_per_token
from anlit.training.optim.schedule import Cosine
from tests.nn.models.tiny import fit

CPU = torch.device("cpu")
TINY = Size(16, 2, 2, 64, 8, 2, "float32")
SMALL = {
    "attention": "--preset cpu --widths 8 --lengths 32 --rounds 2",
    "step": "--preset cpu --d_model 16 --n_layers 2 --n_heads 2 --vocab_size 64 --length 8 --batch 2 --rounds 2",
    "loss": "--batch 2 --length 64 --d_model 8 --vocab_size 300 --device cpu",
}


@pytest.fixture(autouse=True)
def not_compiled() -> Iterator[None]:
    """What would be compiled runs as it is: compiling takes longer than all else here, and has tests of its own."""
    with torch.compiler.set_stance("force_eager"):
        yield


def run(folder: Path, typed: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record of `anlit benchmark …`, and the rows of each group by label."""
    name, *options = shlex.split(typed)
    assert main([name, *SMALL[name].split(), "--output", str(folder), *options]) == 0
    record = json.loads(next(folder.glob("*.json")).read_text())
    return record, [{row["label"]: row for row in group["rows"]} for group in record["groups"]]


broken = mock.Mock(side_effect=RuntimeError("out of memory"))


def test_attention_measures_and_writes_each_entrant(tmp_path: Path) -> None:
    record, (dense, packed) = run(tmp_path, "attention")
    names = attention.PRESETS["cpu"]["entrants"].split()
    assert [*dense] == [name.replace(",", ", ") for name in names]
    pairs = 32 * 33 // 2 * 128 * 16  # 128 sequences of 32, 16 heads of width 8
    for row in dense.values():
        assert row["reason"] is None
        assert len(row["seconds"]["both"]["values"]) == 2
        assert row["error"].keys() >= {"out", "q", "k", "v"}
        assert row["flops"] == {"forward": 4 * 8 * pairs, "both": 3.5 * 4 * 8 * pairs}
    row = dense["plain, sdpa"]
    assert packed["plain, sdpa"]["flops"]["both"] < 0.5 * row["flops"]["both"]
    share = (
        row["flops"]["both"] / row["seconds"]["both"]["median"] / record["peak_flops_per_second"]
    )
    line = next(
        line
        for line in (tmp_path / "attention.md").read_text().splitlines()
        if "| plain, sdpa |" in line
    )
    assert f"| {share:.1%} | 1.000 (fewer than 6 rounds) |" in line


def test_a_kernel_that_is_wrong_fails_or_is_unsupported_is_named_and_not_timed(
    tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setattr(
        attention.KERNELS["blockwise"], "attend", lambda *given: 1.001 * eager.attend(*given)
    )
    monkeypatch.setattr(attention.KERNELS["sdpa"], "attend", broken)
    entrants = "plain,eager plain,blockwise plain,sdpa scale-invariant,flash plain,flex"
    _, (dense, _) = run(tmp_path, f"attention --entrants '{entrants}'")
    said = ("None", "it is wrong: relative error 1", "it fails: out of memory", "a(t)", "backward")
    assert all(part in str(row["reason"]) for part, row in zip(said, dense.values(), strict=True))
    assert "it fails: out of memory" in capsys.readouterr().out


def test_the_time_limit_names_what_it_left_out(tmp_path: Path) -> None:
    record, groups = run(tmp_path, "attention --minutes 0")
    assert groups == []
    assert record["left_out"] == [
        "D 8, T 32, dense, 128 × 16 heads",
        "D 8, T 32, documents, 128 × 16 heads",
    ]
    assert "Left out after 0 minutes: D 8, T 32, dense" in (tmp_path / "attention.md").read_text()


def test_ways_to_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.WAYS, "torch", lambda *given: (0, 3 * loss.full(*given)))
    monkeypatch.setitem(loss.WAYS, "broken", broken)
    _, (rows,) = run(tmp_path, "loss")
    assert {name: row["reason"] for name, row in rows.items()} == {
        "full": None, "anlit": None, "torch": "it is wrong: relative error 2.0e+00 of its gradients",
        "broken": "it fails: out of memory",
    }  # fmt: skip
    assert rows["full"]["loss"] == pytest.approx(6.2, abs=0.4)
    assert rows["anlit"]["loss"] == pytest.approx(rows["full"]["loss"])
    assert rows["full"]["error"] == 0
    assert rows["anlit"]["error"] < 1e-5


@pytest.mark.parametrize("architecture", MODELS)
def test_our_step_is_the_one_that_fit_runs(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps through a Trainer's own loop, with the same batch, end at the same weights."""
    factor = Cosine.factor
    monkeypatch.setattr(
        Cosine, "factor", lambda self, step, n_steps: factor(self, step, 10)
    )  # both as long
    ours = our_step(architecture, TINY, CPU)
    losses = [ours.train().item() for _ in range(3)]

    model: Any = our_step(
        architecture, TINY, CPU
    ).model  # the same initial weights, a Trainer of its own
    del model.log, model.log_dict
    seen: list[Any] = []
    model.on_train_batch_end = lambda *_: seen.append(model._loss)
    fit(model, 3, loader=DataLoader([batch_of(TINY, False, CPU)] * 3, batch_size=None))
    assert losses == pytest.approx([loss.item() for loss in seen], rel=1e-6)
    for mine, theirs in zip(ours.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_steps_of_every_model_are_timed_and_written(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    record, (rows,) = run(tmp_path, "step --peers transformers --compiled no --peers_compiled no")
    assert list(rows) == ["GPT+ eager", "nGPT eager", "anGPT eager", "Qwen3 eager"]
    flops = flops_per_token(our_step("GPT", TINY, CPU).model.model, 8)
    for row in rows.values():
        assert row["reason"] is None
        assert len(row["seconds"]["train"]["values"]) == 2
        assert row["flops_per_token"] == flops
        assert row["flops"]["train"] == 16 * flops
    assert record["finished"]
    assert record["environment"]["git"]["commit"]
    assert "| GPT+ eager |" in (tmp_path / "step-cpu.md").read_text()


def test_lengths_documents_mechanisms_and_shared_keys(tmp_path: Path) -> None:
    """Longer sequences have as many tokens in a batch."""
    options = (
        "--models anGPT --documents --mechanisms plain,scale-invariant --groups 1,2 --lengths 4,32"
    )
    record, (short, long) = run(tmp_path, f"step --peers none --compiled no {options}")
    titles = [group["title"].partition(", V")[0] for group in record["groups"]]
    assert titles == ["d 16, L 2, T 4, B 4", "d 16, L 2, T 32, B 1"]
    names = ("", " groups of 2", " scale-invariant", " scale-invariant groups of 2")
    assert list(short) == [f"anGPT{name} eager" for name in names]
    assert all(row["reason"] is None and set(row["seconds"]) == {"train"} for row in short.values())
    # Documents of T/4 tokens: of one at T 4, where every mechanism gives weight 1, and of 8 at T 32.
    first = {name: row["losses"][0] for name, row in long.items()}
    assert abs(first["anGPT eager"] - first["anGPT scale-invariant eager"]) > 1e-3
    assert (
        short["anGPT eager"]["parameters"] - short["anGPT groups of 2 eager"]["parameters"]
        == 2 * 2 * 8 * 16
    )
    assert short["anGPT eager"]["flops"]["train"] < long["anGPT eager"]["flops"]["train"]


def test_a_peer_learns_and_is_clipped() -> None:
    pytest.importorskip("transformers")
    peer = peer_step("transformers", TINY, CPU, "whole")
    losses = [peer.train().item() for _ in range(10)]
    assert losses[0] == pytest.approx(4.16, abs=0.2)
    assert losses[-1] < losses[0] - 0.05
    norms: list[Any] = []
    gradients = (parameter.grad for parameter in peer.model.parameters())
    peer.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.nn.utils.get_total_norm(gradients))
    )
    peer.model.lm_head.weight.data.mul_(300)  # large gradients
    peer.train()
    assert norms == [pytest.approx(1.0, abs=1e-3)]


def test_a_variant_that_computes_something_else_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def falsified(model: str, size: Size, device: torch.device, runtime: Any, *given: Any) -> Any:
        made = our_step(model, size, device, runtime, *given)
        return made._replace(train=lambda: made.train() * (1.001 if runtime.compile else 1))

    monkeypatch.setattr(step, "our_step", falsified)
    _, (rows,) = run(tmp_path, "step --peers none --models GPT")
    assert "it is wrong: its first losses are" in rows["GPT+ compiled"]["reason"]
    assert [label for label, row in rows.items() if "seconds" in row] == ["GPT+ eager"]


@pytest.mark.parametrize(("changes", "reason"), [
    ({"losses": [8.31, float("nan"), 8.2]}, "its losses are"),
    ({"losses": [8.31, 8.3, 8.21], "compiled": "float8"}, "None"),
    ({"model": "litgpt", "losses": [10.0, 9.0, 8.0]}, "its first loss is 10.000, not about 8.32"),
    ({"model": "litgpt", "parameters": 1_010_000}, "it does other work: parameters"),
    ({"model": "litgpt", "flops_per_token": 6.1e6}, "it does other work: flops_per_token"),
])  # fmt: skip
def test_losses_and_work_have_to_agree(changes: dict[str, Any], reason: str) -> None:
    row = {"model": "GPT", "compiled": "no", "losses": [8.31, 8.3, 8.2], "parameters": 1_000_000, "reason": None,
           "flops_per_token": 6e6, "mechanism": "plain", "group": 1, "label": ""}  # fmt: skip
    assert reason in str(
        step.skip_reason(row | changes, [row], Size(256, 6, 4, 4096, 256, 8, "float32"))
    )


def test_ratios_are_paired_with_gpt_plus_in_the_same_mode() -> None:
    given = step.options(["--preset", "cpu", "--models", "GPT,anGPT", "--peers", "none"])
    given.peers, given.compiled = ("litgpt",), ("no", "blocks", "float8")
    # seconds and ratio; float8 stands beside GPT+ compiled without it
    times = {"GPT+ eager": (1.0, 1), "anGPT eager": (1.02, 1.02), "GPT+ compiled": (0.5, 1),
             "litgpt compiled whole": (0.55, 1.1), "GPT+ compiled, float8": (0.25, 0.5)}  # fmt: skip
    cases = {case["label"]: case for case in step.group_of(given, TINY).cases}
    rows = [
        cases[name] | {"seconds": {"train": quartiles([s, 2 * s, 4 * s])}}
        for name, (s, _) in times.items()
    ]
    put_ratios([*rows, cases["litgpt eager"]])
    assert [row["ratio"]["train"]["median"] for row in rows] == pytest.approx(
        [ratio for _, ratio in times.values()]
    )
    assert cases["litgpt eager"]["ratio"] == {}


@pytest.mark.parametrize(("typed", "sentence"), [
    ("attention --entrants plane,sdpa", "--entrants plane,sdpa: no mechanism 'plane'; choose plain"),
    ("attention --preset h200", "--preset h200 needs a CUDA device"),
    ("step --models GTP", "--models GTP is not known: choose from GPT"),
    ("step --peers litgpt", "--peers litgpt is not installed: install it, or leave it out"),
    ("step --groups 3", "--groups must be divisors of the 2 heads"),
])  # fmt: skip
def test_a_wrong_option_is_refused(tmp_path: Path, typed: str, sentence: str) -> None:
    if (torch.cuda.is_available() and "CUDA" in sentence) or (
        find_spec("litgpt") and "litgpt" in typed
    ):
        pytest.skip("it is right here")
    with pytest.raises(UserError, match=sentence):
        run(tmp_path, typed)
