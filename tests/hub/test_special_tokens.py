"""Special tokens and chat templates of foreign models: token for token as in transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import cross_entropy

from anlit import load_checkpoint
from anlit.cli import main
from anlit.data.tokenizer import set_plain_encoding, vocabulary_size
from anlit.evaluation.generation import Request, Sampling, Separator, generate
from anlit.evaluation.text_stream import TextStream, decode_continuation
from tests.data.prepared import END
from tests.data.reader import edit
from tests.evaluation.test_chat import CONVERSATION
from tests.evaluation.test_generate_command import generate_records, with_tolerance
from tests.hub.made_tokenizers import KINDS, write_tokenizer
from tests.hub.models import export, export_to_transformers, import_model, read
from tests.hub.published import published

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_code_cache")

PROMPTS = [
    "the cat",
    "<|im_start|>user\nthe cat<|im_end|>\n",
    "</s>the cat</s> and",
    "naïve café – ☕ 🦜🏽‍♀️",
    "an unknown letter: �",
    "  two spaces  ",
]
LAST_TOKEN = 291
"""The `<|im_end|>` of the tokenizers of Qwen's kind."""
GREEDY = ("--temperature=0", "--max_tokens=12")
CASES = {"Qwen": "SmolLM2-135M", "Llama 3": "Llama-3.2-1B"}
"""The model that a kind of tokenizer comes with; for other kinds a Llama 2."""


class Folders(NamedTuple):
    """A model as transformers has it, and as `anlit import` writes it."""

    hub_folder: Path
    imported_folder: Path


def source(folder: Path, kind: str) -> Path:
    """A folder of transformers: a small random model with a tokenizer of that kind."""
    case = CASES.get(kind, "Llama-2-7b")
    published(case, folder, vocab_size=vocabulary_size(KINDS[kind]()))
    write_tokenizer(folder, kind)
    return folder


@pytest.fixture(scope="module")
def folders_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folders]:
    """folders_of(kind) → the folders of a model; tests leave them as they are."""
    folders_by_kind: dict[str, Folders] = {}

    def make(kind: str) -> Folders:
        if kind not in folders_by_kind:
            folder = tmp_path_factory.mktemp("model")
            hub_folder = source(folder / "hub_folder", kind)
            imported_folder = import_model(hub_folder, folder / "imported_folder")
            folders_by_kind[kind] = Folders(hub_folder, imported_folder)
        return folders_by_kind[kind]

    return make


@pytest.fixture
def copy_hub_folder(folders_of, tmp_path: Path) -> Callable[[str], Path]:
    """copy_hub_folder(kind) → a folder of transformers that the test may change."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(folders_of(kind).hub_folder, tmp_path / "hub_folder"))

    return copy


def answer(folder: Path, prompt: Any) -> tuple[list[int], list[int]]:
    """The tokens of a prompt or a conversation, and of transformers' greedy answer.

    The answer is without the last end token.
    """
    model = read(folder, trust=False).float()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if isinstance(prompt, str):
        tokens = tokenizer(prompt).input_ids
    else:
        tokens = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False
        )
    whole = model.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False)
    new_tokens = whole[0, len(tokens) :].tolist()
    end_tokens = model.generation_config.eos_token_id
    if not isinstance(end_tokens, list):
        end_tokens = [end_tokens]
    if new_tokens[-1] in end_tokens:
        new_tokens.pop()
    return tokens, new_tokens


def write_json(file: Path, record: Any) -> Path:
    file.write_text(json.dumps(record))
    return file


def stop_tokens(folder: Path) -> Any:
    """The end tokens in generation_config.json of a folder."""
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize("kind", ["Qwen", "Llama 3", "Llama 2"])
def test_a_conversation_is_answered_as_by_transformers(
    kind: str, folders_of, tmp_path: Path, capsys
) -> None:
    """Also by the folder that `export` writes, read there."""
    hub_folder, imported_folder = folders_of(kind)
    back = export_to_transformers(imported_folder, tmp_path / "back")
    chats = write_json(tmp_path / "chats.jsonl", {"prompt": CONVERSATION})
    single_message = [{"role": "user", "content": "the cat"}]
    cases = [(f"--prompts={chats}", CONVERSATION), ("the cat", single_message)]

    for prompt, conversation in cases:
        (record,) = generate_records(capsys, imported_folder, "--chat", prompt, *GREEDY)

        prompt_tokens, tokens = answer(hub_folder, conversation)
        assert record["prompt_tokens"] == prompt_tokens
        assert record["tokens"] == tokens
        assert answer(back, conversation) == (prompt_tokens, tokens)


def test_an_end_of_a_turn_does_not_hide_the_earlier_turns(
    folders_of, tmp_path: Path, capsys
) -> None:
    """The model has document masking, and the end of a turn is its end of a document."""
    imported_folder = folders_of("Qwen").imported_folder
    chats = write_json(tmp_path / "chats.jsonl", {"prompt": CONVERSATION})
    model = load_checkpoint(str(imported_folder), "cpu").model.model
    end = stop_tokens(imported_folder)

    (record,) = generate_records(capsys, imported_folder, "--chat", f"--prompts={chats}", *GREEDY)

    assert model.document_masking
    assert end in record["prompt_tokens"]
    requests = [Request(record["prompt_tokens"])]
    (hidden,) = generate(model, requests, 12, Sampling(temperature=0), Separator(end))
    assert hidden.tokens != record["tokens"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_special_tokens_of_a_prompt_are_those_of_transformers(
    kind: str, prompt: str, tmp_path: Path
) -> None:
    """When asked for; otherwise their names are letters."""
    tokenizer = write_tokenizer(tmp_path, kind)
    tokenizer.encode_special_tokens = False
    hub_tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    special_ids = set()
    for number, token in tokenizer.get_added_tokens_decoder().items():
        if token.content in prompt:
            special_ids.add(number)

    tokens = tokenizer.encode(prompt).ids
    plain_tokenizer = set_plain_encoding(KINDS[kind]())
    letters = plain_tokenizer.encode(prompt, add_special_tokens=False).ids

    assert tokens == hub_tokenizer(prompt).input_ids
    assert not special_ids.intersection(letters)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [*PROMPTS, ""])
def test_a_stream_is_the_text_whatever_the_tokens(kind: str, prompt: str) -> None:
    """Random tokens, in some vocabularies half of them bytes. No shown piece is taken back."""
    tokenizer = set_plain_encoding(KINDS[kind]())
    vocabulary = len(tokenizer.get_vocab())
    prompt_tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    # After bytes the library decodes the bytes of prompt and continuation together.
    ends_in_bytes = False
    if prompt_tokens:
        ends_in_bytes = tokenizer.id_to_token(prompt_tokens[-1]).startswith("<0x")
    generator = torch.Generator().manual_seed(1)
    texts = set()

    for n_tokens in range(1, 24):
        tokens = torch.randint(vocabulary, (n_tokens,), generator=generator).tolist()
        stream = TextStream(tokenizer, prompt_tokens)
        pieces = "".join(map(stream.add, tokens))
        text = decode_continuation(tokenizer, prompt_tokens, tokens)

        assert pieces + stream.finish() == text
        if not ends_in_bytes:
            whole = tokenizer.decode([*prompt_tokens, *tokens])
            assert tokenizer.decode(prompt_tokens) + text == whole
        texts.add(text)
    assert len(texts) > 3


@pytest.mark.parametrize("kind", ["Llama 2", "Gemma"])
def test_bytes_that_are_no_character_do_not_end_a_stream(kind: str, folders_of, capsys) -> None:
    imported_folder = folders_of(kind).imported_folder
    command = [str(imported_folder), "the cat", "--max_tokens=60", "--temperature=3", "--seed=2"]

    (record,) = generate_records(capsys, *command)
    assert main(["generate", *command]) == 0

    assert "�" in record["text"]
    assert capsys.readouterr().out.startswith("the cat")


def test_a_prompt_that_ends_in_a_replacement_character_is_shown_once(run: Path, capsys) -> None:
    assert main(["generate", str(run), "the cat�", "--max_tokens=20"]) == 0

    assert capsys.readouterr().out.count("the cat�") == 1


def test_every_end_token_ends_and_generation_config_is_the_last_word(
    folders_of, copy_hub_folder, tmp_path: Path, capsys
) -> None:
    (free,) = generate_records(capsys, folders_of("Qwen").imported_folder, "the cat", *GREEDY)
    third = free["tokens"][2]
    n_before = free["tokens"].index(third)
    assert free["finish"] == "length"
    hub_folder = copy_hub_folder("Qwen")
    write_tokenizer(hub_folder, "Qwen", eos_token_id=[LAST_TOKEN, third], temperature=0.5)

    imported_folder = import_model(hub_folder, tmp_path / "imported_folder")
    (record,) = generate_records(capsys, imported_folder, "the cat", *GREEDY)
    back = export_to_transformers(imported_folder, tmp_path / "back")

    assert record["tokens"] == free["tokens"][:n_before]
    assert record["finish"] == "end_of_document"
    generation = json.loads((back / "generation_config.json").read_text())
    assert generation["eos_token_id"][:2] == [LAST_TOKEN, third]
    assert generation["bos_token_id"] == 290
    assert generation["temperature"] == 0.5
    config = json.loads((back / "config.json").read_text())
    assert config["bos_token_id"] == 290
    assert answer(back, "the cat") == (record["prompt_tokens"], record["tokens"])


def train_on(folder: Path, weights: Path, tokenizer: Path, *options: str) -> Path:
    """A run of two steps from imported weights, on data that were made with a tokenizer."""
    texts = folder / "texts"
    data = folder / "data"
    run = folder / "run"
    texts.mkdir(parents=True)
    for number in range(4):
        (texts / f"{number}.txt").write_text(f"the cat {number} sat on the mat " * 30)
    prepare = [
        f"--source={texts}",
        f"--output={data}",
        f"--tokenizer={tokenizer}",
        "--val_fraction=0.25",
    ]
    fit = [
        f"--config={weights / 'model.yaml'}",
        "--data=TokenShards",
        f"--data.path={data}",
        f"--run_dir={run}",
        "--model.context_length=16",
        "--data.batch_size=2",
        "--trainer.accelerator=cpu",
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=2",
        "--trainer.enable_progress_bar=false",
        f"--initial_weights={weights}",
    ]
    assert main(["prepare", "TextFiles", *prepare]) == 0
    assert main(["fit", *fit, *options]) == 0
    return run


def test_a_run_from_chat_weights_is_a_chat_model_too(
    copy_hub_folder, tmp_path: Path, capsys
) -> None:
    """Its folder has the template and all end tokens.

    So have its export and a run from its checkpoint.
    """
    hub_folder = copy_hub_folder("Qwen")
    write_tokenizer(hub_folder, "Qwen", eos_token_id=[LAST_TOKEN, 5])
    weights = import_model(hub_folder, tmp_path / "imported_folder")
    chat = ["--chat", "the cat", *GREEDY]
    (first,) = generate_records(capsys, weights, *chat)

    run = train_on(tmp_path / "first", weights, weights / "tokenizer.json")
    warning = "lr is 0.001, which is also the default of AdamW, a rate for new weights"
    assert warning in capsys.readouterr().out
    (record,) = generate_records(capsys, run, *chat)
    assert record["prompt_tokens"] == first["prompt_tokens"]

    back = export_to_transformers(run, tmp_path / "back")
    assert stop_tokens(back) == [LAST_TOKEN, 5, 0]
    conversation = [{"role": "user", "content": "the cat"}]
    assert answer(back, conversation) == (record["prompt_tokens"], record["tokens"])

    plain = export(run, tmp_path / "plain")
    assert generate_records(capsys, plain, *chat) == with_tolerance([record])

    longer = tmp_path / "longer"
    command = [
        f"--config={run / 'config.yaml'}",
        f"--run_dir={longer}",
        f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}",
        "--trainer.max_steps=3",
        "--initial_weights=null",
    ]
    assert main(["fit", *command]) == 0
    (continued,) = generate_records(capsys, longer, *chat)
    assert continued["prompt_tokens"] == record["prompt_tokens"]


def test_a_run_with_another_tokenizer_does_not_keep_the_template(
    folders_of, tmp_path: Path, capsys, refusal, caplog
) -> None:
    weights = folders_of("Qwen").imported_folder
    other = tmp_path / "other.json"
    KINDS["Qwen"]().save(str(other), pretty=False)
    caplog.set_level("INFO")

    run = train_on(tmp_path / "first", weights, other, "--model.optimizer.lr=1e-4")

    assert "a rate for new weights" not in capsys.readouterr().out
    assert "the data have another tokenizer" in caplog.text
    assert "--chat needs a chat template" in refusal("generate", run, "--chat", "the cat")


def expected_log_likelihoods(folder: Path, tokens: list[int]) -> list[float]:
    """The log-likelihood of each token after the first, by transformers."""
    model = read(folder, trust=False).float()
    row = torch.tensor(tokens)
    (logits,) = model(row[None]).logits
    log_likelihoods = -cross_entropy(logits[:-1], row[1:], reduction="none")
    return log_likelihoods.tolist()


def test_conversations_are_scored_as_by_transformers(folders_of, tmp_path: Path) -> None:
    hub_folder, imported_folder = folders_of("Llama 2")
    chats = write_json(tmp_path / "chats.jsonl", {"messages": CONVERSATION})
    table = tmp_path / "scores.parquet"
    options = ["--chat", "--field=messages", "--length=1000", f"--output={table}"]

    assert main(["score", str(imported_folder), str(chats), *options]) == 0

    rows = pq.read_table(table).to_pydict()
    tokenizer = transformers.AutoTokenizer.from_pretrained(hub_folder)
    tokens = tokenizer.apply_chat_template(CONVERSATION, return_dict=False)
    expected = expected_log_likelihoods(hub_folder, tokens)
    first, *log_likelihoods = rows["log_likelihood"]
    assert rows["token"] == tokens
    assert first is None
    assert log_likelihoods == pytest.approx(expected, abs=2e-4)


def test_special_tokens_in_a_scored_text_are_tokens_when_asked_for(
    folders_of, tmp_path: Path
) -> None:
    """After the token that begins a text, which is not doubled. The end of a turn hides nothing."""
    hub_folder, imported_folder = folders_of("Llama 3")
    text = "the cat<|im_end|>\nthe dogs<|im_end|>\nthe cat"
    plain_file = tmp_path / "text.txt"
    plain_file.write_text(text)
    begun_file = tmp_path / "begun.txt"
    begun_file.write_text(f"<|im_start|>{text}")
    table = tmp_path / "scores.parquet"
    options = ["--special_tokens", "--length=1000", f"--output={table}"]

    assert main(["score", str(imported_folder), str(plain_file), str(begun_file), *options]) == 0

    rows = pq.read_table(table).to_pylist()
    tokens = transformers.AutoTokenizer.from_pretrained(hub_folder)(text).input_ids
    expected = expected_log_likelihoods(hub_folder, tokens)
    for document, document_tokens in ((0, tokens[1:]), (1, tokens)):
        document_rows = [row for row in rows if row["document"] == document]
        values = [row["log_likelihood"] for row in document_rows]
        assert [row["token"] for row in document_rows] == document_tokens
        assert values[-len(expected) :] == pytest.approx(expected, abs=2e-4)
        assert values[: -len(expected)] == [None] * document


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_prompt_begins_a_document(kind: str, folders_of, tmp_path: Path, capsys) -> None:
    tokenizer = write_tokenizer(tmp_path, kind)
    begin = "<|im_start|>" if kind in CASES else "<s>"

    (record,) = generate_records(capsys, folders_of(kind).imported_folder, "", *GREEDY)

    assert record["prompt_tokens"] == [tokenizer.token_to_id(begin)]


def test_an_empty_prompt_of_a_run_is_the_separator_of_its_data(run: Path, capsys) -> None:
    """So the first token has the probability that `score` finds at the start of a document."""
    (record,) = generate_records(capsys, run, "", "--max_tokens=4", "--seed=1")

    assert record["prompt_tokens"] == [END]
    model = load_checkpoint(str(run), "cpu").model
    ((logits,),) = model(torch.tensor([[END]]))
    first_token, *_ = record["tokens"]
    log_likelihood, *_ = record["log_likelihood"]
    expected = logits.log_softmax(-1)[first_token].item()
    assert log_likelihood == pytest.approx(expected, abs=1e-5)


def test_a_model_without_such_a_token_refuses_an_empty_prompt(
    copy_hub_folder, tmp_path: Path, refusal
) -> None:
    hub_folder = copy_hub_folder("T5")
    (hub_folder / "tokenizer_config.json").unlink()
    (hub_folder / "generation_config.json").unlink()
    no_tokens = {"bos_token_id": None, "eos_token_id": None}
    edit(hub_folder / "config.json", lambda record: record.update(no_tokens))
    imported_folder = import_model(hub_folder, tmp_path / "imported_folder")

    message = refusal("generate", imported_folder, "")

    assert "has no token that begins a document: give some text" in message


DAMAGE = [
    (
        "generation_config.json",
        '{"eos_token_id": "x"}',
        "eos_token_id='x', which is not a token's number",
    ),
    (
        "generation_config.json",
        '{"eos_token_id": [1, true]}',
        "eos_token_id=[1, True], which is no",
    ),
    ("generation_config.json", "[", "generation_config.json cannot be read"),
    (
        "tokenizer_config.json",
        '{"chat_template": 3}',
        "chat_template is int in place of str or list",
    ),
    (
        "tokenizer_config.json",
        '{"chat_template": ["a"]}',
        "has chat templates without name and template",
    ),
    ("chat_template.jinja", "\udcff", "chat_template.jinja cannot be read"),
]
"""File, content, and a part of the error."""


@pytest.mark.parametrize(("name", "content", "complaint"), DAMAGE)
def test_damaged_special_tokens_are_refused(
    name: str, content: str, complaint: str, copy_hub_folder, tmp_path: Path, refusal
) -> None:
    hub_folder = copy_hub_folder("Qwen")
    output = tmp_path / "imported_folder"
    (hub_folder / name).write_bytes(content.encode(errors="surrogateescape"))

    assert complaint in refusal("import", hub_folder, "--output", output)
    assert not output.exists()


def test_a_template_may_lie_in_any_place_where_transformers_finds_it(
    copy_hub_folder, tmp_path: Path, capsys
) -> None:
    hub_folder = copy_hub_folder("Qwen")
    template = "{{ messages[0].content }} and"
    template_file = hub_folder / "chat_template.jinja"
    template_list = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": template},
    ]

    template_file.write_text(template)
    with_file = import_model(hub_folder, tmp_path / "one")
    template_file.unlink()
    edit(
        hub_folder / "tokenizer_config.json",
        lambda config: config.update(chat_template=template_list),
    )
    with_list = import_model(hub_folder, tmp_path / "two")
    (from_file,) = generate_records(capsys, with_file, "--chat", "the cat", *GREEDY)
    (from_list,) = generate_records(capsys, with_list, "--chat", "the cat", *GREEDY)
    (without_template,) = generate_records(capsys, with_list, "the cat and", *GREEDY)

    assert from_file == from_list
    assert from_file["prompt_tokens"] == without_template["prompt_tokens"]
