"""Back ends on trial: the wrong, the failing and the hanging are left out, the fastest of the others is taken."""

import json
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from anlit import GPT, ALiBi, AttentionPattern, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.attention import backends
from anlit.attention.backends import eager, sdpa
from anlit.attention.choice import choose as choosing
from anlit.attention.choice import process, proof, trial
from anlit.attention.choice.cache import Cache
from anlit.attention.choice.choices import Choice, Choices, device_label
from anlit.attention.choice.choose import Wanted, choose
from anlit.attention.choice.inputs import Inputs, own_copy, random_documents
from anlit.attention.choice.kind import Kind, form_of
from anlit.attention.choice.process import TrialProcess
from anlit.attention.choice.trial import Outcome, Request
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.models.kernel_choice import choose_at_first_batch, take_saved, wanted
from tests.models.tiny import random_tokens, tiny

CPU = torch.device("cpu")
LONG_RUN = 10_000.0  # passes
PRETENDED = {
    "wrong": "return 1.001 * eager.attend(*arguments)",
    "slow": "for _ in range(30): out = eager.attend(*arguments)\n    return out",
    "raising": "raise RuntimeError('no kernel image is available\\nfor this device')",
    "hanging": "time.sleep(1000)",
    "dying": "os.abort()",
}


def kind(mechanism: Mechanism = Plain(), length: int = 48, document: int | None = 16, **changes: object) -> Kind:
    sizes = {"rows": 2, "heads": 2, "key_heads": 2, "width": 8, "length": length, "document": document}
    others = {"dtype": "float32", "dropout": 0.0, "compiled": False}
    return Kind(form_of(mechanism), **sizes | others | changes)  # type: ignore[arg-type]


def a_wanted(mechanism: Mechanism = Plain(), n_passes: float = LONG_RUN, **changes: object) -> Wanted:
    return Wanted(kind(mechanism, **changes), own_copy(mechanism.for_layer(2, 8, 0)), 2, n_passes)  # type: ignore[arg-type]


def request_of(mechanism: Mechanism = Plain(), **changes: object) -> Request:
    one = a_wanted(mechanism, **changes)
    return Request(one.kind, one.mechanism, CPU, one.n_layers, 3)


@pytest.fixture(autouse=True)
def an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Back ends that computers without a GPU do not have, as modules that another process can import."""
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    for name, body in PRETENDED.items():
        (tmp_path / f"pretended_{name}.py").write_text(
            "import os, time\nfrom anlit.attention.backends import eager\n"
            "from anlit.attention.backends.eager import reason_against\n"
            f"def attend(*arguments):\n    {body}\n"
        )
        found[name] = __import__(f"pretended_{name}")
    yield found
    for name in PRETENDED:
        del sys.modules[f"pretended_{name}"]


@pytest.mark.parametrize("document", [None, 16])
@pytest.mark.parametrize("mechanism", [Plain(), ScaleInvariant(learned="per_head"), SlidingWindow(8, ALiBi())])
def test_real_back_ends_are_right_and_timed_and_leave_no_trace(mechanism: Mechanism, document: int | None) -> None:
    one = a_wanted(mechanism, document=document)
    before = torch.get_rng_state()
    with torch.inference_mode():  # as in validation
        outcome = trial.run(Request(one.kind, one.mechanism, CPU, 2, 3), one.able(CPU))
    assert outcome.left_out == {}
    others = set() if mechanism.scales_with_distance else {"sdpa"}
    assert outcome.seconds.keys() == {"blockwise", "eager"} | others
    assert all(0 < seconds < 60 for seconds in outcome.seconds.values())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in one.mechanism.parameters())


def test_heads_that_share_keys_are_tried_as_such() -> None:
    one = a_wanted(ScaleInvariant(), key_heads=1)
    outcome = trial.run(Request(one.kind, one.mechanism, CPU, 2, 3), one.able(CPU))
    assert outcome.left_out == {}
    assert outcome.seconds.keys() == {"blockwise", "eager"}


@pytest.mark.slow
def test_a_compiled_kind_is_timed_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[bool] = []
    compile_ = torch.compile

    def without_code(function, dynamic, fullgraph):
        compiled.append(fullgraph)
        return compile_(function, dynamic=dynamic, fullgraph=fullgraph, backend="eager")

    monkeypatch.setattr(torch, "compile", without_code)
    one = a_wanted(SlidingWindow(8, ALiBi()), compiled=True)
    outcome = trial.run(Request(one.kind, one.mechanism, CPU, 2, 3), one.able(CPU))
    assert outcome.left_out == {}
    assert outcome.seconds.keys() == {"sdpa", "blockwise", "eager"}
    assert compiled == [True] * 3

    def breaks(*arguments):
        torch._dynamo.graph_break()
        return eager.attend(*arguments)

    outcome = trial.run(Request(one.kind, one.mechanism, CPU, 2, 3), {"breaks": SimpleNamespace(attend=breaks)})
    assert outcome.left_out["breaks"].startswith("it fails: ")


def test_dropout_draws_nothing_from_the_run() -> None:
    before = torch.get_rng_state()
    outcome = trial.run(request_of(dropout=0.5), {"sdpa": sdpa, "eager": eager})
    assert outcome.seconds.keys() == {"sdpa", "eager"}
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_wrong_or_raises_is_left_out_and_what_is_slow_is_not_taken(pretended, monkeypatch, caplog) -> None:
    tried = {name: pretended[name] for name in ("wrong", "slow", "raising")}
    monkeypatch.setattr(backends, "BACKENDS", tried | {"eager": eager})
    monkeypatch.setattr(backends, "HARMLESS", tuple(backends.BACKENDS))
    with caplog.at_level(logging.INFO, logger="anlit.attention"):
        (made,) = choose([a_wanted()], CPU).made
    assert made.backend == "eager"
    assert made.seconds.keys() == {"slow", "eager"}
    assert made.seconds["slow"] > made.seconds["eager"]
    assert made.left_out["raising"] == "it fails: no kernel image is available"
    assert made.left_out["wrong"].startswith("it is wrong: relative error 1")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert "Plain runs on 'eager' (float32, 2 × 48 tokens, documents of about 16): it was the fastest" in messages[0]
    assert "'wrong' is left out: it is wrong" in messages[1]


def test_a_gradient_that_is_wrong_is_found() -> None:
    def attend(q, k, v, mechanism, documents, dropout):
        return eager.attend(q.detach() + 0.999 * (q - q.detach()), k, v, mechanism, documents, dropout)

    given = Inputs(Plain().for_layer(2, 8, 0), random_documents(2, 48, 16, CPU), 2, 2, 2, 8, torch.float32)
    errors = proof.errors(given.both(attend), proof.reference(given), given.probe)
    assert str(proof.wrong(errors, torch.float32)).endswith("of q")


def test_where_there_is_no_gradient_its_rounding_is_beside_that_of_v() -> None:
    given = Inputs(SlidingWindow(1).for_layer(2, 8, 0), random_documents(2, 48, None, CPU), 2, 2, 2, 8, torch.float32)
    expected = proof.reference(given)
    for rounding, is_wrong in ((1e-7, False), (1e-4, True)):
        out, q, *others = given.both(eager.attend)
        errors = proof.errors((out, q + rounding, *others), expected, given.probe)
        assert (proof.wrong(errors, torch.float32) is not None) == is_wrong


def test_a_back_end_that_hangs_ends_with_its_process(pretended) -> None:
    with TrialProcess(silence=1.0) as running:
        outcome = running.run(request_of(), {"hanging": pretended["hanging"]})
    assert outcome.seconds == {}
    assert outcome.left_out == {"hanging": "it hangs: nothing for 1 s"}


@pytest.mark.slow
def test_the_others_are_tried_without_those_that_hang_or_die(pretended) -> None:
    tried = {"hanging": pretended["hanging"], "dying": pretended["dying"], "wrong": pretended["wrong"], "eager": eager}
    with TrialProcess(silence=20.0) as running:
        outcome = running.run(request_of(ScaleInvariant(learned="per_head")), tried)
        again = running.run(request_of(), {"eager": eager, "sdpa": sdpa})
    assert outcome.seconds.keys() == {"eager"}
    assert "hangs" in outcome.left_out["hanging"]
    assert outcome.left_out["dying"].startswith("it fails: ")
    assert "it is wrong" in outcome.left_out["wrong"]
    assert again.seconds.keys() == {"eager", "sdpa"}


def test_where_another_process_helps_nothing_the_harmless_are_tried_in_this_one(pretended, monkeypatch) -> None:
    monkeypatch.setattr(backends, "BACKENDS", {"hanging": pretended["hanging"], "sdpa": sdpa, "eager": eager})
    monkeypatch.setattr(process, "STARTING", 0.01)
    (made,) = choose([a_wanted()], CPU).made
    assert made.left_out == {"hanging": "a process to try it in does not start: nothing for 0 s"}
    assert made.seconds.keys() == {"sdpa", "eager"}


def pretended_trial(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[Kind]:
    """Lets trials end with these times; the kinds that are tried are added to the list."""
    tried: list[Kind] = []

    def run(request: Request, able: dict[str, ModuleType], say=None) -> Outcome:
        tried.append(request.kind)
        return Outcome({name: seconds[name] for name in able})

    monkeypatch.setattr(trial, "run", run)
    return tried


def test_the_second_run_takes_what_the_first_has_found_at_once(monkeypatch, an_empty_cache: Path) -> None:
    tried = pretended_trial(monkeypatch, sdpa=2.0, blockwise=1.0, eager=3.0)
    first, second = (choose([a_wanted()], CPU) for _ in range(2))
    assert len(tried) == 1
    assert first.made[0].backend == second.made[0].backend == "blockwise"
    assert "earlier" in second.made[0].because
    assert second.made[0].seconds == {"sdpa": 2.0, "blockwise": 1.0, "eager": 3.0}
    for changes in ({"length": 96}, {"rows": 4}, {"document": None}, {"dtype": "float64"}):
        choose([a_wanted(**changes)], CPU)
    assert len(tried) == 5
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    choose([a_wanted()], CPU)
    assert len(tried) == 6
    assert sorted(len(json.loads(file.read_text())["kinds"]) for file in an_empty_cache.rglob("*.json")) == [1, 5]


def test_a_cache_that_cannot_be_read_or_written_is_done_without(tmp_path: Path, monkeypatch, caplog) -> None:
    tried = pretended_trial(monkeypatch, sdpa=2.0, blockwise=1.0, eager=3.0)
    choose([a_wanted()], CPU)
    Cache(CPU).path.write_text('{"device": 1}')
    choose([a_wanted()], CPU)
    assert len(tried) == 2
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, logger="anlit.attention"):
        assert choose([a_wanted()], CPU).made[0].backend == "blockwise"
    assert "cannot be written" in caplog.text


def test_a_run_that_is_short_takes_the_first_and_tries_and_says_nothing(monkeypatch, caplog) -> None:
    tried = pretended_trial(monkeypatch, sdpa=2.0, blockwise=1.0, eager=3.0)
    with caplog.at_level(logging.INFO, logger="anlit.attention"):
        (made,) = choose([a_wanted(n_passes=200)], CPU).made
    assert caplog.records == []
    assert (made.backend, made.seconds, tried) == ("sdpa", {}, [])
    assert "too short" in made.because
    choose([a_wanted()], CPU)
    (made,) = choose([a_wanted(n_passes=200)], CPU).made
    assert made.backend == "blockwise"


def test_a_trial_is_at_most_a_fiftieth_of_the_passes_of_a_run() -> None:
    for n_passes in (900, 1600, 5000, 1e9, float("inf")):
        for n_backends in (2, 3, 5):
            rounds = a_wanted(n_passes=n_passes).rounds(n_backends)
            passes = choosing.PASSES * n_backends * (rounds + 1) if rounds else 0
            assert passes <= 0.02 * n_passes
    assert a_wanted(n_passes=1600).rounds(3) >= 3  # a demo arm: 400 steps, 4 layers


def test_a_mask_of_all_pairs_that_may_exhaust_the_memory_is_not_tried(monkeypatch) -> None:
    monkeypatch.setattr(choosing.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**21}.__getitem__)  # 8 GiB
    for mechanism, length, tried in ((ALiBi(), 4096, True), (ALiBi(), 16384, False), (LogN(), 16384, True)):
        able = a_wanted(mechanism, length=length).able(CPU)
        assert ("sdpa" in able) is tried
        assert {"blockwise", "eager"} <= able.keys()


def test_what_the_checkpoint_names_goes_before_the_cache_on_a_device_of_the_same_kind(monkeypatch) -> None:
    tried = pretended_trial(monkeypatch, sdpa=2.0, blockwise=1.0, eager=3.0)
    choose([a_wanted()], CPU)
    saved = Choices(device_label(CPU), (Choice(kind(rows=9), "eager", "it was the fastest"),))
    assert choose([a_wanted()], CPU, saved).made[0].backend == "eager"
    assert choose([a_wanted(dtype="float64")], CPU, saved).made[0].backend == "blockwise"  # another precision
    elsewhere = Choices("NVIDIA H100", saved.made)
    assert choose([a_wanted()], CPU, elsewhere).made[0].backend == "blockwise"
    unknown = Choices(saved.device, (Choice(kind(), "warp", "it was the fastest"),))
    assert choose([a_wanted()], CPU, unknown).made[0].backend == "blockwise"
    assert len(tried) == 2
    assert Choices.from_plain(saved.as_plain()) == saved
    for changes in ({"length": 0}, {"length": "48"}, {"mechanism": 3}, {"backend": ["eager"]}, {"speed": 1}):
        assert Choices.from_plain({"device": "cpu", "kinds": [{**saved.made[0].as_plain(), **changes}]}) is None


def test_a_second_run_waits_for_the_trial_of_the_first(monkeypatch) -> None:
    began = time.monotonic()
    context = multiprocessing.get_context("fork")

    def run(request: Request, able: dict[str, ModuleType], say=None) -> Outcome:
        time.sleep(1.0)
        return Outcome({name: float(name != "eager") for name in able})

    with monkeypatch.context() as patch:
        patch.setattr(trial, "run", run)
        first = context.Process(target=choose, args=([a_wanted()], CPU))
        first.start()
    lock = Cache(CPU).path.with_suffix(".lock")
    while not lock.exists() and time.monotonic() < began + 60:
        time.sleep(0.01)
    time.sleep(0.2)
    tried = pretended_trial(monkeypatch, sdpa=1.0, blockwise=2.0, eager=3.0)
    (made,) = choose([a_wanted()], CPU).made
    first.join(60)
    assert (made.backend, tried) == ("eager", [])


class Rank:
    """As much of a Trainer as a choice needs; `told` is what the first rank sends to the others."""

    def __init__(self, told: object = None, **data: object) -> None:
        self.is_global_zero, self.told = told is None, told
        self.strategy = SimpleNamespace(broadcast=lambda own: own if self.is_global_zero else self.told)
        self.max_steps, self.accumulate_grad_batches = 1000, 2
        self.datamodule = SimpleNamespace(**data)


def in_a_run(trainer: Rank, **settings: object) -> GPT:
    model = tiny(GPT, context_length=48, **settings)
    model._trainer = trainer
    choose_at_first_batch(model)
    return model


def names(model: GPT, length: int = 48) -> list[str]:
    q = torch.empty(1, 2, length, 16)
    return [block.attention.backend_for(q, False) for block in model.model.blocks]


def test_the_first_batch_chooses_for_every_kind_of_layer_and_length(monkeypatch) -> None:
    tried = pretended_trial(monkeypatch, sdpa=2.0, blockwise=3.0, eager=1.0)
    pattern = AttentionPattern([Plain(), ScaleInvariant(learned="globally"), Plain()])
    trainer = Rank(batch_size=8, context_schedule={0: 12, 500: 48})
    model = in_a_run(trainer, attention=pattern, n_layers=3)
    state = torch.get_rng_state()
    with torch.no_grad():
        model(random_tokens(4, 48))
    sizes = [(one.mechanism, one.rows, one.length, one.document, one.width) for one in tried]
    scaled = form_of(ScaleInvariant(learned="globally"))
    assert sizes == [
        (form, rows, length, None, 16) for form in ("Plain", scaled) for rows, length in ((32, 12), (8, 48))
    ]
    model(random_tokens(4, 48))
    assert len(tried) == 4
    assert names(model) == names(model, 20) == ["eager"] * 3
    assert torch.equal(torch.get_rng_state(), state)
    passes = [one.n_passes for one in wanted(model, torch.empty(4, 48, 32), Documents(None, 48, CPU))]
    assert passes == [2000, 2000, 1000, 1000]  # 1,000 steps of two micro-batches, half of them at each length


def test_other_ranks_take_what_the_first_one_has_chosen(monkeypatch) -> None:
    pretended_trial(monkeypatch, sdpa=2.0, blockwise=1.0, eager=3.0)
    told = Choices("another device", (Choice(kind(), "eager", "it was the fastest"),)).as_plain()
    model = in_a_run(Rank(told))
    model(random_tokens(4, 48))
    assert names(model) == ["eager"] * 2
    assert model.choices.as_plain() == told


def test_a_back_end_that_is_named_is_not_tried(monkeypatch) -> None:
    tried = pretended_trial(monkeypatch, sdpa=2.0, blockwise=1.0, eager=3.0)
    model = in_a_run(Rank(), backend="eager")
    model(random_tokens(4, 48))
    assert (tried, model.choices, model.model.before_attention) == ([], None, None)


def test_a_loaded_model_runs_on_what_its_checkpoint_names_where_that_can_compute_it() -> None:
    made = (Choice(kind(), "eager", "it was the fastest"),)
    for label, backend, expected in (
        (device_label(CPU), "eager", "eager"),
        (device_label(CPU), "flash", "sdpa"),
        (device_label(CPU), "warp", "sdpa"),
        ("NVIDIA H100", "eager", "sdpa"),
    ):
        model = tiny(GPT)
        plain = Choices(label, tuple(replace(one, backend=backend) for one in made)).as_plain()
        take_saved(model.model, plain, CPU)
        assert names(model) == [expected] * 2
    take_saved(model.model, None, CPU)
    named = tiny(GPT, backend="sdpa")
    take_saved(named.model, Choices(device_label(CPU), made).as_plain(), CPU)
    assert names(named) == ["sdpa"] * 2
