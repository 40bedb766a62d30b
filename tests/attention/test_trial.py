"""Back ends on trial: what is wrong, fails or hangs is not taken and not kept, the fastest of the others is."""

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from anlit import GPT, ALiBi, AttentionPattern, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.attention import trial
from anlit.attention.backends import BACKENDS, eager
from anlit.attention.mechanism import Mechanism
from anlit.attention.selection import (
    AttentionSpec,
    Selection,
    Selections,
    device_label,
    mechanism_name,
)
from anlit.attention.trial import (
    Inputs,
    Trial,
    own_copy,
    random_documents,
    relative_errors,
    run_trials,
    wrong,
)
from anlit.errors import UserError
from anlit.models import kernel_selection
from anlit.models.kernel_selection import select_at_first_batch, use_saved
from tests.models.tiny import random_tokens, tiny

CPU = torch.device("cpu")
SPEC = AttentionSpec("Plain", 2, 2, 2, 48, 16, "float32", 16, False)
ON_CPU = ("sdpa", "blockwise", "eager")
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB"


def a_trial(mechanism: Mechanism = Plain(), candidates: Any = ON_CPU, **changes: Any) -> Trial:
    spec = replace(SPEC, mechanism=mechanism_name(mechanism), **changes)
    layer = mechanism.for_layer(spec.heads, spec.width, 0)
    supported = [name for name in candidates if BACKENDS[name].unsupported_reason(layer) is None]
    return Trial(spec, own_copy(layer), supported, "eager")


def add(monkeypatch: pytest.MonkeyPatch, **attends: Callable[..., Any]) -> None:
    """Add back ends by name."""
    for name, attend in attends.items():
        monkeypatch.setitem(
            BACKENDS, name, SimpleNamespace(attend=attend, unsupported_reason=lambda layer: None)
        )


def fails(*arguments: Any) -> Any:
    raise torch.OutOfMemoryError(f"{FULL}\nmore of it")


@pytest.mark.parametrize(
    "changes", [{"document": None}, {"document": 16}, {"key_heads": 1}], ids=str
)
@pytest.mark.parametrize(
    "mechanism", [Plain(), ScaleInvariant(learned="globally"), SlidingWindow(8, ALiBi())]
)
def test_real_back_ends_are_right_and_timed_and_leave_no_trace(
    mechanism: Mechanism, changes: dict[str, Any]
) -> None:
    before = torch.get_rng_state()
    with torch.inference_mode():  # as in validation
        given = a_trial(mechanism, **changes)
        (selection,) = run_trials([given], CPU)
    assert selection.seconds.keys() == {*given.candidates}
    assert Selections("a GPU", [selection]).final() == {
        "device": "a GPU",
        "made": [asdict(selection)],
    }
    assert torch.equal(torch.get_rng_state(), before)
    assert all(
        parameter.grad is None
        for parameter in (*given.mechanism.parameters(), *mechanism.parameters())
    )


def test_the_fastest_is_taken_and_what_is_wrong_or_fails_is_not(monkeypatch) -> None:
    add(monkeypatch, slow=lambda *given: [eager.attend(*given) for _ in range(60)].pop(), full=fails,
        wrong=lambda *given: 1.001 * eager.attend(*given))  # fmt: skip
    (selection,) = run_trials([a_trial(candidates=("slow", "wrong", "full", "eager"))], CPU)
    assert (selection.backend, selection.seconds.keys()) == ("eager", {"slow", "eager"})
    assert selection.wrong["wrong"].startswith("relative error 1")
    assert selection.failed == {"full": f"it fails: {FULL}"}
    line = str(selection)
    assert line.startswith(
        "attention Plain (float32, 2 × 48 tokens in documents of about 16) runs on 'eager', "
    )
    assert f"'full' is tried again at the next start (it fails: {FULL})" in line
    assert "\n" not in line


def test_what_hangs_ends_with_the_time_of_all_and_the_rest_is_not_tried(monkeypatch) -> None:
    is_over = threading.Event()
    add(monkeypatch, hangs=lambda *given: is_over.wait(100) and fails())
    first, second = run_trials(
        [a_trial(candidates=("hangs", "eager")), a_trial(LogN())], CPU, limit_s=0.2
    )
    is_over.set()
    assert first.backend == second.backend == "eager"
    assert first.failed == {
        "hangs": "it did not end in time",
        "eager": "no time was left to try it",
    }
    assert {*second.failed.values()} == {"no time was left to try it"}
    assert Selections("a GPU", [first, second]).final() is None
    assert trial.TIME_LIMIT_S + trial.HANGING_S <= 130  # other ranks wait for ten minutes


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_gpu_that_hangs_or_is_broken_ends_the_run_with_a_sentence(
    monkeypatch, is_broken: bool
) -> None:
    """As CUDA does: an event is never done, or every call raises what a kernel did."""
    error = (
        RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it")
        if is_broken
        else None
    )
    event = mock.Mock(query=mock.Mock(return_value=False, side_effect=error))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: mock.Mock(record_event=lambda: event)
    )
    monkeypatch.setattr(trial, "HANGING_S", 0.05)
    failed = [Selection(SPEC, "sdpa", failed={"triton": "it did not end in time"})]
    reason = "illegal memory access" if is_broken else "still runs"
    with pytest.raises(
        UserError, match=rf"{reason}.*'triton' \(it did not end.*: set --model.backend sdpa$"
    ):
        trial.check_gpu(failed, torch.device("cuda"))


@pytest.mark.slow
def test_a_candidate_is_compiled_once_for_the_shape_of_the_run(monkeypatch) -> None:
    """In one graph, for the check and all turns."""
    graphs: list[torch.fx.GraphModule] = []
    compile_ = partial(
        torch.compile, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    monkeypatch.setattr(torch, "compile", compile_)
    (selection,) = run_trials([a_trial(SlidingWindow(8, ALiBi()), compiled=True)], CPU)
    assert selection.seconds.keys() == {*ON_CPU}
    assert len(graphs) == 3


@pytest.mark.parametrize("document", [None, 16])
def test_a_fault_in_any_number_of_a_long_first_row_or_in_another_row_is_seen(
    document: int | None,
) -> None:
    length = 128 * (trial.MOST_BLOCKS + 2)
    layer = ScaleInvariant(learned="per_layer").for_layer(1, 8, 0)
    given = Inputs(layer, random_documents(2, length, document, CPU), 2, 1, 1, 8, torch.float32)
    assert wrong(relative_errors(given, eager.attend), torch.float32) is None
    for row, token in ((0, 0), (0, length - 1), (1, 5)):

        def shifted(q: Any, k: Any, v: Any, *rest: Any, row: int = row, token: int = token) -> Any:
            return eager.attend(q, k, v, *rest) + 0.1 * v[row, :, token].sum()

        assert "v" in str(wrong(relative_errors(given, shifted), torch.float32))


def rank(received: object = None, max_steps: int = 1000, **data: object) -> SimpleNamespace:
    """As much of a Trainer as a selection needs; `received` is what the first rank sends to the others."""
    strategy = SimpleNamespace(broadcast=lambda own: own if received is None else received)
    return SimpleNamespace(is_global_zero=received is None, strategy=strategy, max_steps=max_steps,
                           accumulate_grad_batches=2, datamodule=SimpleNamespace(**data))  # fmt: skip


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """This CPU has candidates as a GPU has, and eager attention wins; the trials so far."""
    tried: list[Trial] = []

    def run(trials: list[Trial], device: torch.device) -> list[Selection]:
        tried.extend(trials)
        return [Selection(each.spec, "eager", {"eager": 1.0, "sdpa": 2.0}) for each in trials]

    monkeypatch.setattr(kernel_selection, "run_trials", run)
    monkeypatch.setattr(kernel_selection, "candidates", lambda *_: ["sdpa", "eager"])
    return tried


def in_a_run(trainer: SimpleNamespace, **settings: object) -> GPT:
    model = tiny(GPT, context_length=48, **settings)
    model._trainer = trainer  # type: ignore[assignment]
    select_at_first_batch(model)
    return model


def names(model: GPT, length: int = 48) -> list[str]:
    q = torch.empty(1, 2, length, 16)
    return [block.attention.backend_for(q) for block in model.model.blocks]


def test_the_first_batch_selects_for_every_kind_of_layer_and_length_and_the_first_rank_for_all(
    on_a_gpu,
) -> None:
    pattern = AttentionPattern([Plain(), ScaleInvariant(learned="globally"), Plain()])
    model = in_a_run(
        rank(batch_size=8, context_schedule={0: 12, 500: 48}), attention=pattern, n_layers=3
    )
    state = torch.get_rng_state()
    for _ in range(2):
        model(random_tokens(4, 48))
    scaled = mechanism_name(ScaleInvariant(learned="globally"))
    specs = [each.spec for each in on_a_gpu]
    asked = [
        (form, rows, length, None, 16)
        for form in ("Plain", scaled)
        for rows, length in ((32, 12), (8, 48))
    ]
    assert [
        (spec.mechanism, spec.rows, spec.length, spec.document, spec.width) for spec in specs
    ] == asked
    assert names(model) == names(model, 20) == ["eager"] * 3
    assert torch.equal(torch.get_rng_state(), state)
    other = in_a_run(rank(model.selections), attention=pattern, n_layers=3)
    other(random_tokens(4, 48))
    assert (names(other), other.selections, len(on_a_gpu)) == (names(model), model.selections, 4)
    resumed = in_a_run(rank())
    resumed.selections = model.selections
    resumed(random_tokens(6, 48), torch.zeros(6, 48).long())  # other rows and documents
    assert (names(resumed), len(on_a_gpu)) == (["eager"] * 2, 4)


@pytest.mark.parametrize("why", ["named", "short", "dropout", "cpu"])
def test_nothing_is_tried_or_said_where_the_default_is_taken(
    why: str, on_a_gpu, monkeypatch, caplog
) -> None:
    settings = {"named": {"backend": "eager"}, "dropout": {"dropout": 0.1}}.get(why, {})
    if why == "cpu":
        monkeypatch.undo()
    model = in_a_run(rank(max_steps=400 if why == "short" else 1000), **settings)
    with caplog.at_level(logging.INFO, logger="anlit.attention"):
        model(random_tokens(4, 48))
    assert (on_a_gpu, caplog.records) == ([], [])
    assert (model.selections is None) == (why == "named")
    if model.selections is not None:
        assert ([made.backend for made in model.selections.made], model.selections.final()) == (
            ["sdpa"],
            None,
        )


HERE = device_label(CPU)


@pytest.mark.parametrize(("label", "changes", "expected"), [
    (HERE, {}, "eager"), (HERE, {"length": 0}, "eager"), ("NVIDIA H100", {}, "sdpa"),
    (HERE, {"backend": "flash"}, "sdpa"),  # cannot compute it here
    (HERE, {"backend": "cute"}, "sdpa"),  # as an earlier version had
    *[(HERE, strange, "sdpa") for strange in ({"seconds": 1.0}, {"spec": None}, {"length": "48"}, {"speed": 1})],
])  # fmt: skip
def test_a_loaded_model_runs_on_what_its_checkpoint_names_where_that_can_compute_it(
    label, changes, expected
) -> None:
    plain = asdict(Selections(label, [Selection(SPEC, "eager", {"eager": 1.0})]))
    (made,) = plain["made"]
    for name, value in changes.items():
        (made["spec"] if name == "length" else made)[name] = value
    model, named = tiny(GPT), tiny(GPT, backend="sdpa")
    for each in (model, named):
        use_saved(each.model, plain, CPU)
        use_saved(each.model, {"device": label, "kinds": []}, CPU)
    assert (names(model), names(named)) == ([expected] * 2, ["sdpa"] * 2)


def test_attention_takes_the_selection_of_the_most_similar_length() -> None:
    made = [
        Selection(replace(SPEC, length=n), name) for n, name in ((64, "eager"), (1024, "blockwise"))
    ]
    model = tiny(GPT, n_layers=1)
    use_saved(model.model, asdict(Selections(HERE, made)), CPU)
    assert names(model, 48) + names(model, 512) == ["eager", "blockwise"]
