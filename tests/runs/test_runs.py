"""Reading run folders, whole and broken, and grouping them."""

import math

import pytest

from anlit.config.labels import attention_label
from anlit.errors import UserError
from anlit.runs.folders import find_runs, load_run
from anlit.runs.groups import group_runs
from tests.compare.conftest import ANGPT, FALLING

SCALE_INVARIANT = {
    "class_path": "anlit.nn.mechanisms.ScaleInvariant",
    "init_args": {"tau": 10},
}
PLAIN = {"class_path": "anlit.nn.mechanisms.Plain", "init_args": {}}
ATTENTION = "model.init_args.attention"
LR = "model.init_args.optimizer.init_args.lr"


def labels(*folders):
    return [group.label for group in group_runs([load_run(folder) for folder in folders])]


def test_a_run_is_read(make_run):
    run = load_run(make_run("a", model=ANGPT, seed=7, settings={ATTENTION: SCALE_INVARIANT}))
    assert (run.architecture, run.attention, run.seed, run.status) == (
        "anGPT",
        "scale-invariant",
        7,
        "finished",
    )
    assert run.curve.tokens.tolist() == [100, 200, 300, 400]
    assert run.curve.seconds.tolist() == pytest.approx([10, 20, 30, 40])
    assert run.curve.loss.tolist() == [5.0, 4.0, 3.5, 3.0]
    assert run.bits_per_byte == pytest.approx(1.0)
    assert (run.content_hash, run.tokenizer_hash, run.commit) == ("c0", "t0", "0123456789")


def test_a_resumed_run_keeps_the_last_row_of_a_step_and_drops_what_it_undid(make_run):
    resumed = [(100, 5.0), (200, 4.5), (300, 9.0), (350, 9.0), (200, 4.0), (400, 3.0)]
    curve = load_run(make_run("a", resumed)).curve
    assert curve.tokens.tolist() == [100, 200, 400]
    assert curve.loss.tolist() == [5.0, 4.0, 3.0]


def test_nan_in_the_middle_is_skipped_and_nan_at_the_end_is_divergence(make_run):
    spike = load_run(make_run("spike", [(100, 5.0), (200, math.nan), (300, 4.0)]))
    assert spike.comparable
    assert spike.curve.finite().tokens.tolist() == [100, 300]
    lost = load_run(make_run("lost", [(100, 5.0), (200, math.nan)]))
    assert (lost.state, lost.comparable) == ("finished, diverged", False)


def test_missing_keys_files_and_a_torn_last_line_are_survived(make_run):
    folder = make_run("a")
    (folder / "run.json").write_text("{}")
    with (folder / "metrics.csv").open("a") as file:
        file.write("50,")
    run = load_run(folder)
    assert (run.status, run.commit, run.hardware, run.content_hash) == ("unknown", None, None, None)
    assert len(run.curve) == 4
    (folder / "metrics.csv").unlink()
    assert load_run(folder).state == "unknown, no validation"


def test_run_folders_are_found_below_a_parent_and_each_once(make_run, tmp_path):
    nested = [make_run("x/deep/b"), make_run("a")]
    (nested[1] / "checkpoints").mkdir()
    assert [path.name for path in find_runs([str(tmp_path), str(nested[0])])] == ["a", "b"]
    with pytest.raises(UserError, match="is not a folder"):
        find_runs([str(tmp_path / "none")])
    with pytest.raises(UserError, match="holds no run folder"):
        find_runs([str(nested[1] / "checkpoints")])


WINDOW = {"class_path": "SlidingWindow", "init_args": {"width": 8, "mechanism": SCALE_INVARIANT}}


@pytest.mark.parametrize(("spec", "label"), [
    (None, "plain"), (PLAIN, "plain"), ({"class_path": "anlit.ALiBi"}, "ALiBi"), ({"class_path": "LogN"}, "LogN"),
    ([SCALE_INVARIANT, None, SCALE_INVARIANT], "scale-invariant + plain"),
    ({"class_path": "anlit.AttentionPattern", "init_args": {"layers": [WINDOW, {"class_path": "anlit.SqrtLogN"}]}},
     "scale-invariant in a window of 8 + SqrtLogN"),
])  # fmt: skip
def test_attention_labels(spec, label):
    assert attention_label(spec) == label


def test_seeds_paths_loggers_and_plain_written_out_do_not_separate_runs(make_run):
    unlearned = {"trainer.logger": False, "data.init_args.path": "elsewhere", "ckpt_path": "x", ATTENTION: PLAIN,
                 "data.init_args.source": "texts", "trainer.max_time": "00:01:00:00",
                 "trainer.callbacks": [{"class_path": "anlit.training.callbacks.TrainingDynamics"}]}  # fmt: skip
    (group,) = group_runs(
        [load_run(make_run("a")), load_run(make_run("b", seed=2, settings=unlearned))]
    )
    assert (group.label, [run.seed for run in group.counted]) == ("GPT+, plain", [1, 2])


def test_settings_and_data_separate_runs_and_distinct_labels_tell_how(make_run):
    first, faster = make_run("a"), make_run("b", settings={LR: 0.005})
    assert labels(first, faster) == ["GPT+, plain, lr=0.001", "GPT+, plain, lr=0.005"]
    null = make_run("null", settings={LR: None, "trainer.max_steps": None})
    assert labels(first, null)[1] == "GPT+, plain, lr=default, max_steps=none"
    other = make_run("c", record={"data": {"content_sha256": "c1", "tokenizer_sha256": "t0"}})
    assert labels(first, other) == ["GPT+, plain, content=c0", "GPT+, plain, content=c1"]
    nope = make_run(
        "d",
        settings={"model.init_args.positions": {"class_path": "anlit.nn.layers.positions.NoPE"}},
    )
    assert labels(first, nope) == ["GPT+, plain, RoPE", "GPT+, plain, no positions"]
    many = {f"model.init_args.{name}": 1 for name in "abcde"}
    runs = [make_run("a"), make_run("b", settings=many), make_run("c", settings=many | {LR: 1.0})]
    assert len({*labels(*runs)}) == 3


def test_unfinished_runs_count_only_where_nothing_finished(make_run):
    running = load_run(make_run("a", FALLING[:2], record={"status": "running"}))
    finished = load_run(make_run("b", seed=2))
    failed = load_run(make_run("c", [], seed=3, record={"status": "failed"}))
    together, alone = group_runs([running, finished, failed])[0], group_runs([running, failed])[0]
    assert (together.counted, together.unfinished) == ((finished,), False)
    assert (alone.counted, alone.unfinished) == ((running,), True)
    assert not load_run(make_run("d", record={"status": "interrupted"})).complete


SIZE, OPTIMIZER = "model.init_args.d_model", "model.init_args.optimizer"


def test_labels_of_two_sizes_at_two_rates_hold_size_and_rate(make_run):
    """Also where many other settings follow the size."""
    follow = ("a", "b", "c", "d_ff", "n_heads")
    runs = [
        make_run(
            f"{size}-{rate}",
            settings={
                SIZE: size,
                LR: rate,
                **{f"model.init_args.{name}": size for name in follow},
            },
        )
        for size in (32, 64)
        for rate in (0.001, 0.002)
    ]
    found = labels(*runs)
    assert len({*found}) == 4
    for label, (size, rate) in zip(
        found, [(32, 0.001), (32, 0.002), (64, 0.001), (64, 0.002)], strict=True
    ):
        assert f"lr={rate:g}" in label
        assert f"={size}" in label


def test_rates_of_one_optimizer_are_told_apart_beside_another_optimizer(make_run):
    muon = {"class_path": "anlit.MuonAdamW", "init_args": {"momentum": 0.95}}
    runs = [
        make_run("slow", settings={LR: 0.001}),
        make_run("fast", settings={LR: 0.005}),
        make_run("muon", settings={OPTIMIZER: muon}),
    ]
    slow, fast, other = labels(*runs)
    assert slow.endswith("lr=0.001")
    assert fast.endswith("lr=0.005")
    assert "MuonAdamW" in other


def test_groups_that_no_short_label_tells_apart_have_the_names_of_their_folders(make_run):
    """Values that look the same when rounded or cut, and more settings than a label holds."""
    close = [
        make_run("close/a", settings={LR: 0.001}),
        make_run("close/b", settings={LR: 0.00100000001}),
    ]
    assert labels(*close) == ["GPT+, plain, a", "GPT+, plain, b"]

    long = "x" * 60
    cut = [make_run(f"cut/{end}/run", settings={SIZE: long + end}) for end in "ab"]
    assert labels(*cut) == ["GPT+, plain, a/run", "GPT+, plain, b/run"]

    names = [f"model.init_args.{name}" for name in "abcde"]
    several = [make_run(f"many/{name[-1]}", settings={name: 1}) for name in names] + [
        make_run("many/none")
    ]
    assert labels(*several)[0] == "GPT+, plain, a"
    assert len({*labels(*several)}) == 6
