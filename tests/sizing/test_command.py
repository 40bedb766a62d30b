"""`anlit size` from options to numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

from anlit.commands.size import main
from anlit.errors import UserError
from anlit.training.strategies import FullySharded
from tests.data.prepared import random_tokens, write_prepared

MODEL = [
    "--model=AnGPT",
    "--model.vocab_size=256",
    "--model.n_layers=2",
    "--model.d_model=32",
    "--model.n_heads=2",
    "--model.context_length=64",
    "--data=TokenShards",
    "--data.path=nowhere",
]
SHARDED = "--trainer.strategy anlit.FullySharded"


def size(folder: Path, options: str) -> dict[str, Any]:
    """The numbers that `anlit size` writes for the model with options."""
    file = folder / "size.json"
    assert main([*MODEL, *options.split(), "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_numbers_follow_from_the_options_of_fit_without_data(tmp_path: Path) -> None:
    """2 layers, d 32, f 128, V 256. W_q and W_o have 2 heads of width 24, W_k and W_v 1 head."""
    plan = "--gpus 4 --gpu A100 --mfu 0.5"
    settings = (
        f"{SHARDED} --data.batch_size 2 --max_tokens 1e9 "
        "--model.runtime.recompute_every 2 --trainer.precision bf16-mixed "
        "--model.n_kv_heads 1 --model.d_head 24"
    )

    numbers = size(tmp_path, f"{plan} {settings}")

    in_blocks = 2 * (2 * 2 * 24 + 2 * 24 + 3 * 128) * 32
    embedding = 256 * 32
    alphas = 2 * 2 * 32
    head_scale = 256
    assert numbers["parameters"]["total"] == in_blocks + 2 * embedding + alphas + head_scale
    attention_flops = 12 * 2 * 2 * 24 * 65 / 2
    flops = 6 * (in_blocks + embedding) + attention_flops
    assert numbers["flops_per_token"] == flops
    assert numbers["cache_bytes"] == 64 * 2 * 2 * 24 * 2
    assert numbers["plan"]["checkpoint_every"] == 2
    assert numbers["plan"]["length"] == 64
    assert numbers["plan"]["precision"] == "bf16-mixed"
    assert numbers["peak"] == pytest.approx(sum(numbers["memory"].values()))
    seconds = 1e9 * flops / (4 * 312e12 * 0.5)
    assert numbers["days"] == pytest.approx(seconds / 86_400)


@pytest.mark.parametrize(
    ("devices", "gpus"), [("4", 4), ("[0,1]", 2), ("0,1,3", 3), ("auto", 1), ("-1", 1)]
)
def test_devices_batches_and_steps_are_those_of_fit(
    tmp_path: Path, devices: str, gpus: int
) -> None:
    options = [
        f"--trainer.devices {devices} --trainer.num_nodes 2",
        "--trainer.strategy anlit.FullySharded",
        "--data.batch_size 3 --trainer.accumulate_grad_batches 5 --trainer.max_steps 7",
    ]

    plan = size(tmp_path, " ".join(options))["plan"]

    assert plan["gpus"] == 2 * gpus
    assert plan["strategy"] == "fsdp"
    assert plan["tokens"] == 7 * 3 * 5 * 2 * gpus * 64


class Spread(FullySharded):
    """A strategy of a user's, whose name says nothing."""


class Unsharded(DDPStrategy):
    """Not sharded, whatever its name has in it."""


@pytest.mark.parametrize(("strategy", "planned"), [(Spread, "fsdp"), (Unsharded, "ddp")])
def test_the_class_of_a_strategy_decides_and_not_its_name(
    tmp_path: Path, strategy: type, planned: str
) -> None:
    options = f"--gpus 2 --trainer.strategy {__name__}.{strategy.__name__}"

    assert size(tmp_path, options)["plan"]["strategy"] == planned


def test_a_replica_has_the_memory_of_as_many_gpus(tmp_path: Path) -> None:
    replicas = size(tmp_path, f"{SHARDED} --trainer.strategy.replicas 4 --gpus 8")

    assert replicas["memory"] == size(tmp_path, f"{SHARDED} --gpus 2")["memory"]
    with pytest.raises(UserError, match="replicas=3 does not divide the number of ranks, 8"):
        size(tmp_path, f"{SHARDED} --trainer.strategy.replicas 3 --gpus 8")


def test_blocks_that_stay_gathered_need_memory(tmp_path: Path) -> None:
    options = f"{SHARDED} --gpus 2 --model.n_layers 6"

    peak = size(tmp_path, f"{options} --trainer.strategy.reshard_after_forward false")["peak"]

    freed = size(tmp_path, options)
    in_block = freed["parameters"]["matrices"] // 6 + 2 * 32  # with α_A and α_M
    assert peak == pytest.approx(freed["peak"] + 4 * (6 - 2) * in_block)


def test_a_ramp_of_the_batch_counts_its_steps(tmp_path: Path) -> None:
    plan = size(tmp_path, "--config trainer/batch_ramp.yaml --trainer.max_steps 3500")["plan"]

    assert plan["accumulate"] == 4
    assert plan["tokens"] == (1000 * 1 + 2000 * 2 + 500 * 4) * plan["batch_size"] * 64


@pytest.mark.parametrize(
    ("options", "bytes_per_parameter"),
    [
        ("", 0),
        ("--config trainer/ema.yaml", 4),
        ("--config trainer/swa.yaml --trainer.precision bf16-true", 4),
        ("--config trainer/swa.yaml --trainer.precision 64-true", 8),
        (f"--config trainer/ema.yaml --gpus 4 {SHARDED}", 1),
        ("--config trainer/ema.yaml --trainer.callbacks.device cpu", 0),
    ],
)
def test_an_average_of_the_weights_takes_memory(
    tmp_path: Path, options: str, bytes_per_parameter: int
) -> None:
    numbers = size(tmp_path, options)

    average = numbers["memory"].get("average of the weights", 0)
    assert average == bytes_per_parameter * numbers["parameters"]["total"]


def test_a_number_of_tokens_is_counted_as_in_fit(tmp_path: Path) -> None:
    numbers = size(tmp_path, "--max_tokens 2M")

    assert numbers["plan"]["tokens"] == 2_000_000


def test_tokens_per_parameter_are_counted_as_in_fit(tmp_path: Path) -> None:
    numbers = size(tmp_path, "--tokens_per_parameter 20")

    assert numbers["plan"]["tokens"] == 20 * numbers["parameters"]["total"]


@pytest.mark.parametrize(("batch_size", "fits"), [(1, True), (1_000_000, False)])
def test_a_run_that_does_not_fit_is_named(
    tmp_path: Path, capsys, batch_size: int, fits: bool
) -> None:
    numbers = size(tmp_path, f"--data.batch_size {batch_size}")

    needed = numbers["peak"] + numbers["allowance"]
    has_warning = "DOES NOT FIT" in capsys.readouterr().out
    assert numbers["allowance"] == pytest.approx(0.05 * numbers["peak"] + 1.5e9)
    assert numbers["fits"] == fits
    assert (needed <= numbers["gpu_bytes"]) == fits
    assert has_warning != fits


def test_a_prepared_corpus_gives_the_vocabulary_as_in_fit(tmp_path: Path) -> None:
    tokens = {"train": random_tokens(99, 1), "val": random_tokens(99, 2)}
    write_prepared(tmp_path / "d", tokens, vocab_size=361)
    data = f"--data PythonSources --data.vocab_size 512 --data.path {tmp_path}/d"

    numbers = size(tmp_path, f"--model.vocab_size null {data}")

    expected = size(tmp_path, "--model.vocab_size 384")
    assert numbers["parameters"] == expected["parameters"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("16-mixed", "precision=16-mixed is float16, .* set bf16-mixed or 32-true"),
        ("16", "precision=16-mixed is float16"),
        ("16-true", "precision=16-true is float16"),
        (f"64-true --gpus 8 {SHARDED}", "=64-true does not go with fsdp, .*: set 32-true$"),
        (
            "transformer-engine",
            "=transformer-engine is not one of anlit's: set 32-true, .*64-true; float8 is ",
        ),
        (
            "bf16 --trainer.plugins lightning.pytorch.plugins.DoublePrecision",
            "DoublePrecision sets .*: set trainer.pr",
        ),
    ],
)
def test_a_precision_that_fit_refuses_is_refused(
    tmp_path: Path, options: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        size(tmp_path, f"--trainer.precision {options}")
