"""Back ends on trial: what is wrong, fails or hangs is not taken and not kept, the fastest of the others is."""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from anlit import GPT, ALiBi, AttentionPattern, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.attention import trial
from anlit.attention.backends import BACKENDS, eager
from anlit.attention.mechanism import Mechanism
from anlit.attention.selection import AttentionSpec, Selection, Selections, device_label, mechanism_name
from anlit.attention.trial import Inputs, Trial, own_copy, random_documents, relative_errors, run_trials, wrong
from anlit.errors import UserError
from anlit.models import kernel_selection
from anlit.models.kernel_selection import select_at_first_batch, use_saved
from tests.models.tiny import random_tokens, tiny

CPU = torch.device("cpu")
SPEC = AttentionSpec("Plain", 2, 2, 2, 48, 16, "float32", 16, False)
ON_CPU = ("sdpa", "blockwise", "eager")


def backend(attend: Callable[..., Any]) -> ModuleType:
    return SimpleNamespace(attend=attend)  # type: ignore[return-value]


def fails(*arguments: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore of it")


def is_slow(*arguments: Any) -> Any:
    return [eager.attend(*arguments) for _ in range(60)].pop()


@pytest.fixture
def hangs() -> Iterator[ModuleType]:
    """A back end that does not come back while the test runs."""
    is_over = threading.Event()
    yield backend(lambda *arguments: is_over.wait(100) and fails())
    is_over.set()


def a_trial(mechanism: Mechanism = Plain(), candidates: dict[str, ModuleType] | None = None, **changes: Any) -> Trial:
    spec = replace(SPEC, mechanism=mechanism_name(mechanism), **changes)
    layer = mechanism.for_layer(spec.heads, spec.width, 0)
    able = {name: BACKENDS[name] for name in ON_CPU if BACKENDS[name].unsupported_reason(layer) is None}
    return Trial(spec, layer, able if candidates is None else candidates, "eager")


@pytest.mark.parametrize("changes", [{"document": None}, {"document": 16}, {"key_heads": 1}], ids=str)
@pytest.mark.parametrize("mechanism", [Plain(), ScaleInvariant(learned="globally"), SlidingWindow(8, ALiBi())])
def test_real_back_ends_are_right_and_timed_and_leave_no_trace(mechanism: Mechanism, changes: dict[str, Any]) -> None:
    given = a_trial(mechanism, **changes)
    before = torch.get_rng_state()
    with torch.inference_mode():  # as in validation
        (selection,) = run_trials([given], CPU)
    assert selection.seconds.keys() == given.candidates.keys()
    assert selection.is_final
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in (*given.mechanism.parameters(), *mechanism.parameters()))


def test_the_fastest_is_taken_and_what_is_wrong_or_fails_is_not() -> None:
    is_wrong = backend(lambda *arguments: 1.001 * eager.attend(*arguments))
    candidates = {"slow": backend(is_slow), "wrong": is_wrong, "full": backend(fails), "eager": eager}
    (selection,) = run_trials([a_trial(candidates=candidates)], CPU)
    assert (selection.backend, selection.seconds.keys()) == ("eager", {"slow", "eager"})
    assert selection.wrong["wrong"].startswith("relative error 1")
    assert selection.failed == {"full": "it fails: CUDA out of memory. Tried to allocate 2.00 GiB"}
    line = str(selection)
    assert line.startswith("attention Plain (float32, 2 × 48 tokens in documents of about 16) runs on 'eager', ")
    assert "'full' is tried again at the next start (it fails: CUDA out of memory" in line
    assert "\n" not in line


@pytest.mark.parametrize(("flash", "taken"), [(1.04, "flash"), (1.06, "sdpa")])
def test_of_two_that_are_about_as_fast_the_first_is_taken(flash: float, taken: str, monkeypatch) -> None:
    times = {"flash": flash, "sdpa": 1.0}
    attends = {name: backend(lambda *arguments: eager.attend(*arguments)) for name in times}
    of_attend = {id(module.attend): times[name] for name, module in attends.items()}
    monkeypatch.setattr(trial, "seconds_of_calls", lambda call, *_: of_attend[id(call.args[0])])
    (selection,) = run_trials([a_trial(candidates=attends)], CPU)
    assert (selection.backend, selection.seconds) == (taken, times)


def test_what_hangs_ends_with_the_time_of_all_and_the_rest_is_not_tried(hangs: ModuleType) -> None:
    trials = [a_trial(candidates={"hangs": hangs, "eager": eager}), a_trial(LogN())]
    first, second = run_trials(trials, CPU, limit_s=0.2)
    assert first.backend == second.backend == "eager"
    assert first.failed == {"hangs": "it did not end within 0.2 s", "eager": "no time was left to try it"}
    assert {*second.failed.values()} == {"no time was left to try it"}
    assert Selections("a GPU", (first, second)).final() is None
    assert trial.TIME_LIMIT_S + trial.HANGING_S <= 130  # other ranks wait for ten minutes


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_gpu_that_hangs_or_is_broken_ends_the_run_with_a_sentence(monkeypatch, is_broken: bool) -> None:
    """As CUDA does: an event is never done, or every call raises what a kernel did."""

    def query() -> bool:
        if is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
        return False

    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None, query=query))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(trial, "HANGING_S", 0.05)
    failed = [Selection(SPEC, "sdpa", failed={"triton": "it did not end within 120 s"})]
    reason = "illegal memory access" if is_broken else "still runs"
    with pytest.raises(UserError, match=rf"{reason}.*'triton' \(it did not end.*: set --model.backend sdpa$"):
        trial.check_gpu(failed, torch.device("cuda"))


@pytest.mark.slow
def test_a_candidate_is_compiled_once_for_the_shape_of_the_run(monkeypatch) -> None:
    """In one graph, for the check and all turns."""
    graphs: list[torch.fx.GraphModule] = []
    compile_ = torch.compile

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def breaks(*arguments: Any) -> Any:
        torch._dynamo.graph_break()
        return eager.attend(*arguments)

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, **options, backend=count))
    (selection,) = run_trials([a_trial(SlidingWindow(8, ALiBi()), compiled=True)], CPU)
    assert selection.seconds.keys() == {*ON_CPU}
    assert len(graphs) == 3
    (selection,) = run_trials([a_trial(candidates={"breaks": backend(breaks)}, compiled=True)], CPU)
    assert selection.failed["breaks"].startswith("it fails: ")


@pytest.mark.parametrize("document", [None, 16])
def test_a_fault_in_any_number_of_a_long_first_row_or_in_another_row_is_seen(document: int | None) -> None:
    length = 128 * (trial.MOST_BLOCKS + 2)
    layer = ScaleInvariant(learned="per_layer").for_layer(1, 8, 0)
    given = Inputs(own_copy(layer), random_documents(2, length, document, CPU), 2, 1, 1, 8, torch.float32)
    assert wrong(relative_errors(given, eager.attend), torch.float32) is None
    for row, token in ((0, 0), (0, length - 1), (1, 5)):

        def shifted(q: Any, k: Any, v: Any, *rest: Any, row: int = row, token: int = token) -> Any:
            pull = torch.zeros_like(v)
            pull[row, :, token] = 1.0
            return eager.attend(q, k, v, *rest) + 0.1 * (v * pull).sum()

        assert "v" in str(wrong(relative_errors(given, shifted), torch.float32))


class Rank:
    """As much of a Trainer as a selection needs; `told` is what the first rank sends to the others."""

    def __init__(self, told: object = None, **data: object) -> None:
        self.is_global_zero, self.told, self.events = told is None, told, []  # type: ignore[var-annotated]
        self.strategy = SimpleNamespace(broadcast=self.broadcast)
        self.max_steps, self.accumulate_grad_batches = 1000, 2
        self.datamodule = SimpleNamespace(**data)

    def broadcast(self, own: object) -> object:
        self.events.append("broadcast")
        return own if self.is_global_zero else self.told


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """This CPU has candidates as a GPU has, and eager attention wins; the trials so far."""
    tried: list[Trial] = []

    def run(trials: list[Trial], device: torch.device) -> list[Selection]:
        tried.extend(trials)
        return [Selection(each.spec, "eager", {"eager": 1.0, "sdpa": 2.0}) for each in trials]

    monkeypatch.setattr(trial, "run_trials", run)
    monkeypatch.setattr(kernel_selection, "candidates", lambda *_: {name: BACKENDS[name] for name in ("sdpa", "eager")})
    return tried


def in_a_run(trainer: Rank, **settings: object) -> GPT:
    model = tiny(GPT, context_length=48, **settings)
    model._trainer = trainer  # type: ignore[assignment]
    select_at_first_batch(model)
    return model


def names(model: GPT, length: int = 48, is_packed: bool = False) -> list[str]:
    q = torch.empty(1, 2, length, 16)
    return [block.attention.backend_for(q, is_packed) for block in model.model.blocks]


def test_the_first_batch_selects_for_every_kind_of_layer_and_length(on_a_gpu: list[Trial]) -> None:
    pattern = AttentionPattern([Plain(), ScaleInvariant(learned="globally"), Plain()])
    model = in_a_run(Rank(batch_size=8, context_schedule={0: 12, 500: 48}), attention=pattern, n_layers=3)
    state = torch.get_rng_state()
    for _ in range(2):
        model(random_tokens(4, 48))
    scaled = mechanism_name(ScaleInvariant(learned="globally"))
    specs = [each.spec for each in on_a_gpu]
    assert [(spec.mechanism, spec.rows, spec.length, spec.document, spec.width) for spec in specs] == [
        (form, rows, length, None, 16) for form in ("Plain", scaled) for rows, length in ((32, 12), (8, 48))
    ]
    assert names(model) == names(model, 20) == ["eager"] * 3
    assert torch.equal(torch.get_rng_state(), state)


def test_ranks_are_told_before_the_trials_and_take_what_the_first_one_selects(on_a_gpu, monkeypatch) -> None:
    rank = Rank()
    run = trial.run_trials
    monkeypatch.setattr(trial, "run_trials", lambda *given: rank.events.append("trials") or run(*given))
    model = in_a_run(rank)
    model(random_tokens(4, 48))
    assert rank.events == ["broadcast", "trials", "broadcast"]
    other = in_a_run(Rank(model.selections))
    other(random_tokens(4, 48))
    assert names(other) == names(model) == ["eager"] * 2
    assert other.selections == model.selections
    assert len(on_a_gpu) == 1


def test_what_could_not_be_tried_is_tried_at_the_next_start_and_the_rest_is_kept(on_a_gpu, monkeypatch, caplog) -> None:
    """The card was full for a moment: nothing is kept as the fastest, and the second start finds out."""
    saved: Selections | None = None
    run = trial.run_trials
    full = [Selection(SPEC, "sdpa", {"sdpa": 2.0}, failed={"eager": "it fails: CUDA out of memory"})]
    for start, (taken, n_tried) in enumerate((("sdpa", 0), ("eager", 1), ("eager", 1))):
        monkeypatch.setattr(trial, "run_trials", run if start else lambda trials, device: full)
        model = in_a_run(Rank())
        model.selections = saved
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="anlit.attention"):
            model(random_tokens(4, 48))
        assert (model.selections.made[0].backend, len(on_a_gpu)) == (taken, n_tried)
        assert [len(caplog.records), "next start" in caplog.text] == ([0, False] if start == 2 else [1, start == 0])
        final = model.selections.final()
        saved = None if final is None else Selections.from_plain(final.as_plain())
        assert (saved is None) is (start == 0)


@pytest.mark.parametrize("why", ["named", "short", "dropout", "cpu"])
def test_nothing_is_tried_or_said_where_the_default_is_taken(why: str, on_a_gpu, monkeypatch, caplog) -> None:
    settings = {"named": {"backend": "eager"}, "dropout": {"dropout": 0.1}}.get(why, {})
    if why == "cpu":
        monkeypatch.undo()
    rank = Rank()
    rank.max_steps = 400 if why == "short" else 1000
    model = in_a_run(rank, **settings)
    with caplog.at_level(logging.INFO, logger="anlit.attention"):
        model(random_tokens(4, 48))
    assert (on_a_gpu, caplog.records) == ([], [])
    assert [made.backend for made in model.selections.made] == ["sdpa"] if why != "named" else model.selections is None
    assert model.selections is None or model.selections.final() is None


@pytest.mark.parametrize(
    ("label", "changes", "expected"),
    [
        (device_label(CPU), {}, "eager"),
        (device_label(CPU), {"backend": "flash"}, "sdpa"),  # cannot compute it here
        (device_label(CPU), {"backend": "cute"}, "sdpa"),  # as an earlier version had
        ("NVIDIA H100", {}, "sdpa"),
        (device_label(CPU), {"length": 0}, "eager"),
        *[(device_label(CPU), strange, "sdpa") for strange in (
            {"backend": ["eager"]}, {"seconds": 1.0}, {"spec": None}, {"length": "48"}, {"mechanism": 3}, {"speed": 1}
        )],
    ],
)  # fmt: skip
def test_a_loaded_model_runs_on_what_its_checkpoint_names_where_that_can_compute_it(label, changes, expected) -> None:
    plain = Selections(label, (Selection(SPEC, "eager", {"eager": 1.0}),)).as_plain()
    (made,) = plain["made"]
    for name, value in changes.items():
        (made["spec"] if name in ("length", "mechanism") else made)[name] = value
    model, named = tiny(GPT), tiny(GPT, backend="sdpa")
    for each in (model, named):
        use_saved(each.model, plain, CPU)
        use_saved(each.model, {"device": label, "kinds": []}, CPU)
    assert (names(model), names(named)) == ([expected] * 2, ["sdpa"] * 2)


def test_attention_takes_the_selection_most_like_its_inputs() -> None:
    made = [
        Selection(replace(SPEC, length=length, document=document), name, {name: 1.0})
        for length, document, name in ((64, None, "eager"), (1024, None, "blockwise"), (64, 16, "sdpa"))
    ]
    model = tiny(GPT, n_layers=1)
    use_saved(model.model, Selections(device_label(CPU), tuple(made)).as_plain(), CPU)
    for length, is_packed, expected in ((48, False, "eager"), (512, False, "blockwise"), (512, True, "sdpa")):
        assert names(model, length, is_packed) == [expected]
