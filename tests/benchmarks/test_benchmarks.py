"""`anlit benchmark` at tiny sizes: right cases are timed, wrong cases are named."""

import json
import logging
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from anlit.benchmarks import attention, harness, loss, step
from anlit.benchmarks.harness import put_ratios
from anlit.benchmarks.options import Size
from anlit.benchmarks.timing import summarize_times
from anlit.benchmarks.training_step import MODELS, PEERS, Step, our_step, peer_step, random_batches
from anlit.commands.benchmark import main
from anlit.errors import UserError
from anlit.nn.kernels import eager
from anlit.nn.models.flops import flops_per_token
from anlit.nn.models.runtime import Runtime
from tests.nn.models.tiny import fit

CPU = torch.device("cpu")
TINY = Size(16, 2, 2, 64, 8, 2, "float32")
SMALL = {
    "attention": "--preset cpu --widths 8 --lengths 32 --rounds 2",
    "step": "--preset cpu --d_model 16 --n_layers 2 --n_heads 2 --vocab_size 64 --length 8 "
    "--batch 2 --rounds 2",
    "loss": "--batch 2 --length 64 --d_model 8 --vocab_size 300 --device cpu",
}
Record = dict[str, Any]
RowsByLabel = dict[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def without_compilation() -> Iterator[None]:
    """Run compiled code eagerly: compilation takes longer than these tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


def run(folder: Path, command: str) -> tuple[Record, list[RowsByLabel]]:
    """Return the record of `anlit benchmark …`, and the rows of each group by label."""
    name, *options = shlex.split(command)
    assert main([name, *SMALL[name].split(), f"--output={folder}", *options]) == 0
    (file,) = folder.glob("*.json")
    record = json.loads(file.read_text())
    groups = []
    for group in record["groups"]:
        rows = {}
        for row in group["rows"]:
            rows[row["label"]] = row
        groups.append(rows)
    return record, groups


def losses_of(step: Step, n_steps: int) -> list[float]:
    losses = []
    for _ in range(n_steps):
        loss = step.train()
        losses.append(loss.item())
    return losses


out_of_memory = mock.Mock(side_effect=RuntimeError("out of memory"))


def test_attention_measures_and_writes_every_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, (dense, packed) = run(tmp_path, "attention")

    kernels = attention.PRESETS["cpu"]["kernels"].split()
    assert " ".join(dense).replace(", ", ",").split() == kernels
    n_pairs = 32 * 33 // 2 * 128 * 16  # 128 sequences of 32, 16 heads of width 8
    for row in dense.values():
        assert row["reason"] is None
        assert len(row["seconds"]["both"]["values"]) == 2
        assert row["error"].keys() >= {"out", "q", "k", "v"}
        forward_flops = 4 * 8 * n_pairs
        assert row["flops"] == {"forward": forward_flops, "both": 3.5 * forward_flops}
    row = dense["plain, sdpa"]
    assert packed["plain, sdpa"]["flops"]["both"] < 0.5 * row["flops"]["both"]

    flops_per_second = row["flops"]["both"] / row["seconds"]["both"]["median"]
    share = flops_per_second / record["peak_flops_per_second"]
    page = (tmp_path / "attention.md").read_text()
    expected = rf"\| plain, sdpa \|.* {share:.1%} \| 1.000 \(fewer than 6 rounds\) \|.*\| auto \|$"
    assert re.search(expected, page, re.MULTILINE)
    assert re.search(rf"plain, sdpa .* {share:.1%} +1.000 ", capsys.readouterr().out)


@pytest.mark.parametrize("peaks", [(1e9, 3e9), (3e9, 1e9)], ids=["busy before", "busy after"])
@pytest.mark.parametrize(
    "command", ["attention --kernels plain,sdpa", "step --models GPT --peers none"]
)
def test_the_greater_of_two_measured_peaks_counts(
    tmp_path: Path, monkeypatch, command: str, peaks: tuple[float, float]
) -> None:
    monkeypatch.setattr(harness, "matrix_peak", mock.Mock(side_effect=peaks))

    record, _ = run(tmp_path, command)

    assert record["peak_flops_per_second"] == 3e9


def test_a_kernel_that_is_wrong_fails_or_is_unsupported_is_named_and_not_timed(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    def inexact(*arguments: Any) -> Tensor:
        return 1.001 * eager.attend(*arguments)

    monkeypatch.setattr(attention.KERNELS["blockwise"], "attend", inexact)
    monkeypatch.setattr(attention.KERNELS["sdpa"], "attend", out_of_memory)
    reasons = {
        "plain,eager": "None",
        "plain,blockwise": "it is wrong: relative error 1",
        "plain,sdpa": "it fails: out of memory",
        "scale-invariant,flash": "a(t)",
        "plain,flex": "backward",
    }

    _, (dense, _) = run(tmp_path, f"attention --kernels '{' '.join(reasons)}'")

    for row, reason in zip(dense.values(), reasons.values(), strict=True):
        assert reason in str(row["reason"])
    assert "it fails: out of memory" in capsys.readouterr().out


def test_the_time_limit_names_the_groups_that_it_left_out(tmp_path: Path) -> None:
    record, groups = run(tmp_path, "attention --minutes 0")

    assert groups == []
    dense = "D 8, T 32, dense, 128 × 16 heads"
    assert record["left_out"] == [dense, "D 8, T 32, documents, 128 × 16 heads"]
    assert f"Left out after 0 minutes: {dense}" in (tmp_path / "attention.md").read_text()


def test_losses_are_compared_with_full_logits(tmp_path: Path, monkeypatch) -> None:
    def tripled(*arguments: Any) -> tuple[int, Tensor]:
        return 0, 3 * loss.full_loss(*arguments)

    monkeypatch.setitem(loss.LOSSES, "torch", tripled)
    monkeypatch.setitem(loss.LOSSES, "broken", out_of_memory)

    _, (rows,) = run(tmp_path, "loss")

    assert list(rows) == ["full", "anlit", "torch", "broken"]
    wrong = "it is wrong: relative error 2.0e+00 of its gradients"
    assert rows["torch"]["reason"] == wrong
    assert rows["broken"]["reason"] == "it fails: out of memory"
    full = rows["full"]
    assert full["reason"] is None
    assert full["loss"] == pytest.approx(6.2, abs=0.4)
    assert full["error"] == 0
    anlit = rows["anlit"]
    assert anlit["reason"] is None
    assert anlit["loss"] == pytest.approx(full["loss"])
    assert anlit["error"] < 1e-5


@pytest.mark.parametrize("architecture", MODELS)
def test_our_step_is_the_step_of_fit(architecture: str) -> None:
    """Three steps of a Trainer on the same batches end at the same weights."""
    bare = our_step(architecture, TINY, CPU)
    losses = losses_of(bare, 3)

    model: Any = our_step(architecture, TINY, CPU).model  # the same initial weights
    del model.log, model.log_dict
    fit_losses: list[Any] = []
    model.on_train_batch_end = lambda *_: fit_losses.append(model._loss.item())
    batches = random_batches(TINY.vocab_size, TINY.shape, False, CPU)[:3]
    fit(model, 3, loader=DataLoader(batches, batch_size=None))

    assert losses == pytest.approx(fit_losses, rel=1e-6)
    weights = list(bare.model.parameters())
    fit_weights = list(model.parameters())
    torch.testing.assert_close(weights, fit_weights, rtol=1e-6, atol=1e-7)


def test_lightning_says_nothing_about_devices_and_ranks(monkeypatch, caplog, capfd) -> None:
    """The accelerator of a GPU logs LOCAL_RANK when the strategy sets it up."""
    logger = logging.getLogger("lightning.pytorch.accelerators.cuda")
    caplog.set_level(logging.INFO, logger.name)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])  # Lightning's may not propagate
    monkeypatch.setattr(logger, "propagate", False)
    set_up = mock.Mock(side_effect=lambda trainer: logger.info("LOCAL_RANK: 0"))
    monkeypatch.setattr(CPUAccelerator, "setup", set_up)

    our_step("GPT", TINY, CPU)

    set_up.assert_called_once()
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")
    logger.info("heard")
    assert "heard" in caplog.text


def test_steps_of_every_model_are_timed_and_written(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    record, (rows,) = run(tmp_path, "step --peers transformers --compiled no --peers_compiled no")

    assert list(rows) == ["GPT+ eager", "nGPT eager", "anGPT eager", "Qwen3 eager"]
    gpt = our_step("GPT", TINY, CPU).model
    flops = flops_per_token(gpt.model, 8)
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
    variants = "--models anGPT --documents --mechanisms plain,scale-invariant --groups 1,2"

    record, (short, long) = run(
        tmp_path, f"step --peers none --compiled no {variants} --lengths 4,64"
    )

    first, second = record["groups"]
    assert first["title"].startswith("d 16, L 2, T 4, B 4, V")
    assert second["title"].startswith("d 16, L 2, T 64, B 1, V")
    assert list(short) == [
        "anGPT eager",
        "anGPT groups of 2 eager",
        "anGPT scale-invariant eager",
        "anGPT scale-invariant groups of 2 eager",
    ]
    for row in short.values():
        assert row["reason"] is None
        assert set(row["seconds"]) == {"train"}
    plain = short["anGPT eager"]
    grouped = short["anGPT groups of 2 eager"]
    assert plain["parameters"] - grouped["parameters"] == 2 * 2 * 8 * 16
    assert plain["flops"]["train"] < long["anGPT eager"]["flops"]["train"]
    whole_row = our_step("anGPT", TINY._replace(length=64), CPU)
    assert long["anGPT eager"]["flops_per_token"] < whole_row.flops_per_token

    # Documents have T/4 tokens. At T 4 every mechanism gives the only token the weight 1.
    plain_loss = long["anGPT eager"]["losses"][0]
    scale_invariant_loss = long["anGPT scale-invariant eager"]["losses"][0]
    assert abs(plain_loss - scale_invariant_loss) > 1e-3


def test_a_peer_learns() -> None:
    pytest.importorskip("transformers")
    peer = peer_step("transformers", TINY, CPU, "whole")

    losses = losses_of(peer, 250)

    assert losses[0] == pytest.approx(4.16, abs=0.2)
    assert mean(losses[-10:]) < mean(losses[:10]) - 0.05


class CastCounter(TorchDispatchMode):
    """Counts the tensors that are cast to another type."""

    n_casts = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n_casts += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("peer", PEERS)
def test_a_cache_of_casts_saves_a_peer_no_cast(peer: str) -> None:
    """Lightning's Trainer, which ours has, switches it off; theirs have it."""
    pytest.importorskip(peer)
    counts = []
    for has_cache in (True, False):
        _, logits = PEERS[peer](TINY)
        with CastCounter() as counter:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=has_cache):
                loss = logits(torch.zeros(2, 8, dtype=torch.long)).float().sum()
            loss.backward()
        counts.append(counter.n_casts)

    assert counts[0] == counts[1] > 2 * TINY.n_layers


@pytest.mark.parametrize("maker", ["anGPT", "transformers"])
def test_a_step_that_stopped_learning_keeps_the_weights(maker: str) -> None:
    if maker == "transformers":
        pytest.importorskip("transformers")
        bare = peer_step(maker, TINY, CPU, "no")
    else:
        bare = our_step(maker, TINY, CPU)
    start = snapshot(bare)
    bare.train()
    learned = snapshot(bare)

    bare.stop_learning()
    losses_of(bare, 2)

    assert not torch.equal(learned, start)
    torch.testing.assert_close(snapshot(bare), learned, rtol=0, atol=1e-6)  # norms are restored


def test_a_profile_has_the_operators_of_a_step_and_a_trace(tmp_path: Path) -> None:
    _, (rows,) = run(tmp_path, "step --models GPT --peers none --compiled no --profile")

    assert "aten::_fused_adamw_" in rows["GPT+ eager"]["profile"]
    assert (tmp_path / "GPTplus-eager.trace.json.gz").exists()
    assert "GPT+ eager, 3 steps:" in (tmp_path / "step-cpu.md").read_text()


def snapshot(bare: Step) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in bare.model.parameters()])


def test_a_variant_whose_loss_becomes_nan_is_not_timed(tmp_path: Path, monkeypatch) -> None:
    def step_to_nan(model: str, *settings: Any) -> Step:
        right = our_step(model, *settings)
        losses = iter([*losses_of(right, 5), *[torch.nan] * 99])
        return right._replace(train=lambda: torch.tensor(next(losses)))

    monkeypatch.setattr(step, "our_step", step_to_nan)

    _, (rows,) = run(tmp_path, "step --models GPT --peers none --compiled no")

    row = rows["GPT+ eager"]
    assert row["reason"] == "its loss became nan while it was timed"
    assert "seconds" not in row
    assert "its loss became nan" in (tmp_path / "step-cpu.md").read_text()


def test_a_peers_gradient_is_clipped() -> None:
    pytest.importorskip("transformers")
    peer = peer_step("transformers", TINY, CPU, "whole")
    norms: list[Any] = []

    def record_norm(*_: Any) -> None:
        gradients = []
        for parameter in peer.model.parameters():
            gradients.append(parameter.grad)
        norm = torch.nn.utils.get_total_norm(gradients)
        norms.append(norm)

    peer.optimizer.register_step_pre_hook(record_norm)
    peer.model.lm_head.weight.data.mul_(300)  # large gradients
    peer.train()

    assert norms == [pytest.approx(1.0, abs=1e-3)]


def test_a_variant_that_computes_something_else_is_not_timed(tmp_path: Path, monkeypatch) -> None:
    def wrong_if_compiled(
        model: str, size: Size, device: torch.device, runtime: Runtime, *settings: Any
    ) -> Step:
        right = our_step(model, size, device, runtime, *settings)
        if not runtime.compile:
            return right
        return right._replace(train=lambda: right.train() * 1.001)

    monkeypatch.setattr(step, "our_step", wrong_if_compiled)

    _, (rows,) = run(tmp_path, "step --peers none --models GPT")

    compiled = rows["GPT+ compiled"]
    assert "it is wrong: its first losses are" in compiled["reason"]
    assert "seconds" not in compiled
    assert "seconds" in rows["GPT+ eager"]


RIGHT_ROW = {
    "label": "",
    "model": "GPT",
    "mechanism": "plain",
    "group": 1,
    "compiled": "no",
    "losses": [8.31, 8.3, 8.2],
    "parameters": 1_000_000,
    "flops_per_token": 6e6,
    "reason": None,
}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"losses": [8.31, float("nan"), 8.2]}, "its losses are"),
        ({"losses": [8.31, 8.3, 8.21]}, "it is wrong: its first losses are"),
        ({"losses": [8.31, 8.3, 8.21], "compiled": "float8"}, "None"),
        ({"model": "litgpt", "losses": [10.0, 9.0, 8.0]}, "its first loss is 10.000, not about 8"),
        ({"model": "litgpt", "parameters": 1_010_000}, "it does other work: parameters"),
        ({"model": "litgpt", "flops_per_token": 6.1e6}, "it does other work: flops_per_token"),
        ({"model": "litgpt"}, "None"),
    ],
)
def test_losses_and_work_have_to_agree(changes: dict[str, Any], fault: str) -> None:
    size = Size(256, 6, 4, 4096, 256, 8, "float32")
    row = RIGHT_ROW | changes

    found = step.fault_of_row(row, [RIGHT_ROW], size)

    assert fault in str(found)


def test_ratios_are_paired_with_gpt_plus_in_the_same_mode() -> None:
    options = step.parse_options(["--preset=cpu", "--models=GPT,anGPT", "--peers=none"])
    options.peers = ("litgpt",)
    options.compiled = ("no", "blocks", "float8")
    cases = {}
    for case in step.step_group(options, TINY).cases:
        cases[case["label"]] = case
    seconds = {
        "GPT+ eager": 1.0,
        "anGPT eager": 1.02,
        "GPT+ compiled": 0.5,
        "litgpt compiled whole": 0.55,
        "GPT+ compiled, float8": 0.25,
    }
    rows = []
    for label, s in seconds.items():
        times = summarize_times([s, 2 * s, 4 * s])
        rows.append(cases[label] | {"seconds": {"train": times}})
    not_timed = cases["litgpt eager"]

    put_ratios([*rows, not_timed])

    ratios = {}
    for row in rows:
        ratios[row["label"]] = row["ratio"]["train"]["median"]
    assert ratios == {
        "GPT+ eager": 1,
        "anGPT eager": pytest.approx(1.02),
        "GPT+ compiled": 1,
        "litgpt compiled whole": pytest.approx(1.1),
        "GPT+ compiled, float8": pytest.approx(0.5),
    }
    assert not_timed["ratio"] == {}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("attention --kernels plane,sdpa", "plane,sdpa is not known: the mechanisms are plain"),
        ("attention --kernels plain,spda", "plain,spda is not known: the mechanisms are"),
        ("attention --preset h200", "--preset h200 needs a CUDA device"),
        ("step --models GTP", "--models GTP is not known: choose from GPT"),
        ("step --peers litgpt", "--peers litgpt is not installed: install it, or leave it out"),
        ("step --groups 3", "--groups must be divisors of the 2 heads"),
    ],
)
def test_a_wrong_option_is_refused(tmp_path: Path, command: str, message: str) -> None:
    if "CUDA" in message and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    if "litgpt" in command and find_spec("litgpt"):
        pytest.skip("litgpt is installed")

    with pytest.raises(UserError, match=message):
        run(tmp_path, command)
