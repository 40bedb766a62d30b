"""Special tokens and chat templates of models from elsewhere: what transformers makes of them, token for token."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from anlit import load_checkpoint
from anlit.cli import main
from anlit.data.tokenizer import set_plain_encoding, vocabulary_size
from anlit.evaluation.generation import Request, Sampling, Separator, generate
from anlit.evaluation.text_stream import TextStream, decode_continuation
from tests.data.prepared import END
from tests.data.reader import edit
from tests.evaluation.test_chat import CONVERSATION
from tests.evaluation.test_generate_command import generate_records
from tests.hub.made_tokenizers import KINDS, write_tokenizer
from tests.hub.published import published, read

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


def source(folder: Path, kind: str, **generation: Any) -> Path:
    """A folder of transformers: a small random model with a tokenizer of that kind."""
    case = {"Qwen": "SmolLM2-135M", "Llama 3": "Llama-3.2-1B"}.get(kind, "Llama-2-7b")
    published(case, folder, vocab_size=vocabulary_size(KINDS[kind]()))
    write_tokenizer(folder, kind, **generation)
    return folder


def imported(folder: Path, output: Path) -> Path:
    assert main(["import", str(folder), "--output", str(output)]) == 0
    return output


def answer(folder: Path, prompt: Any) -> tuple[list[int], list[int]]:
    """The tokens of a prompt, or of a conversation, and of transformers' greedy answer without the last end token."""
    model = read(folder, trust=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if isinstance(prompt, str):
        tokens = tokenizer(prompt).input_ids
    else:
        tokens = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False
        )
    whole = model.float().generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False)
    new = whole[0, len(tokens) :].tolist()
    ends = model.generation_config.eos_token_id
    is_ended = new[-1] in (ends if isinstance(ends, list) else [ends])
    return tokens, new[:-1] if is_ended else new


@pytest.mark.parametrize("kind", ["Qwen", "Llama 3", "Llama 2"])
def test_a_conversation_is_answered_as_by_transformers(kind, tmp_path: Path, capsys) -> None:
    """Also by what `export` writes, read there."""
    source_folder = source(tmp_path / "theirs", kind)
    imported_folder = imported(source_folder, tmp_path / "ours")
    assert (
        main(
            [
                "export",
                str(imported_folder),
                "--format=huggingface",
                f"--output={tmp_path / 'back'}",
            ]
        )
        == 0
    )
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": CONVERSATION}))
    for prompts, conversation in (
        ([f"--prompts={tmp_path / 'chats.jsonl'}"], CONVERSATION),
        (["the cat"], [{"role": "user", "content": "the cat"}]),
    ):
        (record,) = generate_records(capsys, imported_folder, "--chat", *prompts, *GREEDY)
        expected = answer(source_folder, conversation)
        assert (record["prompt_tokens"], record["tokens"]) == expected
        assert answer(tmp_path / "back", conversation) == expected


def test_an_end_of_a_turn_does_not_hide_the_earlier_turns(tmp_path: Path, capsys) -> None:
    """The model has document masking, as every GPT+, and the end of a turn is its end of a document."""
    imported_folder = imported(source(tmp_path / "theirs", "Qwen"), tmp_path / "ours")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": CONVERSATION}))
    (record,) = generate_records(
        capsys, imported_folder, "--chat", f"--prompts={tmp_path / 'chats.jsonl'}", *GREEDY
    )
    model = load_checkpoint(str(imported_folder), "cpu").model.model
    end = json.loads((imported_folder / "generation_config.json").read_text())["eos_token_id"]
    assert model.document_masking
    assert end in record["prompt_tokens"]
    requests = [Request(record["prompt_tokens"])]
    (hidden,) = generate(model, requests, 12, Sampling(temperature=0), Separator(end))
    assert hidden.tokens != record["tokens"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_special_tokens_of_a_prompt_are_those_of_transformers(kind, prompt, tmp_path: Path) -> None:
    """When asked for; otherwise their names are letters."""
    tokenizer = write_tokenizer(tmp_path, kind)
    hub_tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    tokenizer.encode_special_tokens = False
    assert tokenizer.encode(prompt).ids == hub_tokenizer(prompt).input_ids
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    names = [name for name in special if name in prompt]
    as_letters = set_plain_encoding(KINDS[kind]()).encode(prompt, add_special_tokens=False)
    assert not {tokenizer.token_to_id(name) for name in names}.intersection(as_letters.ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [*PROMPTS, ""])
def test_a_stream_is_the_text_whatever_the_tokens(kind, prompt) -> None:
    """Random tokens, half of them bytes where there are such; a piece that is shown is never taken back."""
    tokenizer = set_plain_encoding(KINDS[kind]())
    prompt_tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    generator = torch.Generator().manual_seed(1)
    texts = []
    for n_tokens in range(1, 24):
        tokens = torch.randint(
            len(tokenizer.get_vocab()), (n_tokens,), generator=generator
        ).tolist()
        stream = TextStream(tokenizer, prompt_tokens)
        pieces = "".join(map(stream.add, tokens))
        text = decode_continuation(tokenizer, prompt_tokens, tokens)
        assert pieces + stream.finish() == text
        ends_in_bytes = prompt_tokens and tokenizer.id_to_token(prompt_tokens[-1]).startswith("<0x")
        if (
            not ends_in_bytes
        ):  # there the library decodes the bytes of prompt and continuation as one row
            assert tokenizer.decode(prompt_tokens) + text == tokenizer.decode(
                [*prompt_tokens, *tokens]
            )
        texts.append(text)
    assert len(set(texts)) > 3


@pytest.mark.parametrize("kind", ["Llama 2", "Gemma"])
def test_bytes_that_are_no_character_do_not_end_a_stream(kind, tmp_path: Path, capsys) -> None:
    imported_folder = imported(source(tmp_path / "theirs", kind), tmp_path / "ours")
    command = [str(imported_folder), "the cat", "--max_tokens=60", "--temperature=3", "--seed=2"]
    (record,) = generate_records(capsys, *command)
    assert "�" in record["text"]
    assert main(["generate", *command]) == 0
    assert capsys.readouterr().out.startswith("the cat")


def test_a_prompt_that_ends_in_a_replacement_character_is_shown_once(run: Path, capsys) -> None:
    assert main(["generate", str(run), "the cat�", "--max_tokens=20"]) == 0
    assert capsys.readouterr().out.count("the cat�") == 1


def test_every_end_token_ends_and_generation_config_is_the_last_word(
    tmp_path: Path, capsys
) -> None:
    source_folder = source(tmp_path / "theirs", "Qwen")
    (free,) = generate_records(
        capsys, imported(source_folder, tmp_path / "free"), "the cat", *GREEDY
    )
    assert free["finish"] == "length"
    third = free["tokens"][2]
    n_before = free["tokens"].index(third)
    write_tokenizer(source_folder, "Qwen", eos_token_id=[LAST_TOKEN, third], temperature=0.5)
    (record,) = generate_records(
        capsys, imported(source_folder, tmp_path / "ours"), "the cat", *GREEDY
    )
    assert (record["tokens"], record["finish"]) == (free["tokens"][:n_before], "end_of_document")
    back = tmp_path / "back"
    assert main(["export", str(tmp_path / "ours"), "--format=huggingface", f"--output={back}"]) == 0
    generation = json.loads((back / "generation_config.json").read_text())
    assert generation["eos_token_id"][:2] == [LAST_TOKEN, third]
    assert (generation["bos_token_id"], generation["temperature"]) == (290, 0.5)
    assert json.loads((back / "config.json").read_text())["bos_token_id"] == 290
    assert answer(back, "the cat") == (record["prompt_tokens"], record["tokens"])


def train_on(folder: Path, weights: Path, tokenizer: Path, *more: str) -> Path:
    """A run of two steps from imported weights, on data that were made with a tokenizer."""
    (folder / "texts").mkdir(parents=True)
    for number in range(4):
        (folder / "texts" / f"{number}.txt").write_text(f"the cat {number} sat on the mat " * 30)
    data = folder / "data"
    prepared = ["prepare", "TextFiles", f"--source={folder / 'texts'}", f"--output={data}", f"--tokenizer={tokenizer}",
                "--val_fraction=0.25"]  # fmt: skip
    assert main(prepared) == 0
    run = folder / "run"
    arguments = [
        "fit", f"--config={weights / 'model.yaml'}", "--data=TokenShards", f"--data.path={data}", f"--run_dir={run}",
        "--model.context_length=16", "--data.batch_size=2", "--trainer.accelerator=cpu", "--trainer.max_steps=2",
        "--trainer.val_check_interval=2", "--trainer.enable_progress_bar=false", f"--initial_weights={weights}", *more,
    ]  # fmt: skip
    assert main(arguments) == 0
    return run


def test_a_run_from_chat_weights_is_a_chat_model_too(tmp_path: Path, capsys) -> None:
    """Its folder has the template and all end tokens, and so have its export and a run from its checkpoint."""
    weights = imported(
        source(tmp_path / "theirs", "Qwen", eos_token_id=[291, 5]), tmp_path / "ours"
    )
    run = train_on(tmp_path / "first", weights, weights / "tokenizer.json")
    assert (
        "model.optimizer.lr is 0.001, the default, a rate for new weights"
        in capsys.readouterr().out
    )
    (record,) = generate_records(capsys, run, "--chat", "the cat", *GREEDY)
    (first,) = generate_records(capsys, weights, "--chat", "the cat", *GREEDY)
    assert record["prompt_tokens"] == first["prompt_tokens"]
    back = tmp_path / "back"
    assert main(["export", str(run), "--format=huggingface", f"--output={back}"]) == 0
    assert json.loads((back / "generation_config.json").read_text())["eos_token_id"] == [291, 5, 0]
    conversation = [{"role": "user", "content": "the cat"}]
    assert answer(back, conversation) == (record["prompt_tokens"], record["tokens"])
    assert main(["export", str(run), f"--output={tmp_path / 'plain'}"]) == 0
    assert generate_records(capsys, tmp_path / "plain", "--chat", "the cat", *GREEDY) == [record]

    longer = tmp_path / "longer"
    config, last = run / "config.yaml", run / "checkpoints" / "last.ckpt"
    command = [
        f"--config={config}",
        f"--run_dir={longer}",
        f"--ckpt_path={last}",
        "--trainer.max_steps=3",
    ]
    assert main(["fit", *command, "--initial_weights=null"]) == 0
    (continued,) = generate_records(capsys, longer, "--chat", "the cat", *GREEDY)
    assert continued["prompt_tokens"] == record["prompt_tokens"]


def test_a_run_with_another_tokenizer_does_not_keep_the_template(
    tmp_path: Path, capsys, refusal, caplog
) -> None:
    weights = imported(source(tmp_path / "theirs", "Qwen"), tmp_path / "ours")
    KINDS["Qwen"]().save(str(tmp_path / "other.json"), pretty=False)
    caplog.set_level("INFO")
    run = train_on(
        tmp_path / "first", weights, tmp_path / "other.json", "--model.optimizer.lr=1e-4"
    )
    assert "a rate for new weights" not in capsys.readouterr().out
    assert "the data have another tokenizer" in caplog.text
    assert "--chat needs a chat template" in refusal("generate", run, "--chat", "the cat")


def test_conversations_are_scored_as_by_transformers(tmp_path: Path, capsys) -> None:
    source_folder = source(tmp_path / "theirs", "Llama 2")
    imported_folder = imported(source_folder, tmp_path / "ours")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CONVERSATION}))
    table = tmp_path / "scores.parquet"
    command = [str(imported_folder), str(tmp_path / "chats.jsonl"), f"--output={table}"]
    assert main(["score", *command, "--chat", "--field=messages", "--length=1000"]) == 0
    rows = pq.read_table(table).to_pydict()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source_folder)
    tokens = tokenizer.apply_chat_template(CONVERSATION, return_dict=False)
    logits = read(source_folder, trust=False).float()(torch.tensor([tokens])).logits
    expected = logits.log_softmax(-1)[0, range(len(tokens) - 1), tokens[1:]].tolist()
    assert rows["token"] == tokens
    assert rows["log_likelihood"][0] is None
    assert rows["log_likelihood"][1:] == pytest.approx(expected, abs=2e-4)


def test_special_tokens_in_a_scored_text_are_tokens_when_asked_for(tmp_path: Path, capsys) -> None:
    """After the token that begins a text, which is not doubled; the end of a turn hides nothing."""
    source_folder = source(tmp_path / "theirs", "Llama 3")
    imported_folder = imported(source_folder, tmp_path / "ours")
    text = "the cat<|im_end|>\nthe dogs<|im_end|>\nthe cat"
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "begun.txt").write_text(f"<|im_start|>{text}")
    table = tmp_path / "scores.parquet"
    files = [str(tmp_path / "text.txt"), str(tmp_path / "begun.txt")]
    command = ["score", str(imported_folder), *files, f"--output={table}", "--length=1000"]
    assert main([*command, "--special_tokens"]) == 0
    rows = pq.read_table(table).to_pylist()
    tokens = transformers.AutoTokenizer.from_pretrained(source_folder)(text).input_ids
    logits = read(source_folder, trust=False).float()(torch.tensor([tokens])).logits
    expected = logits.log_softmax(-1)[0, range(len(tokens) - 1), tokens[1:]].tolist()
    for document, first in ((0, tokens[1:]), (1, tokens)):
        document_rows = [row for row in rows if row["document"] == document]
        assert [row["token"] for row in document_rows] == first
        log_likelihoods = [row["log_likelihood"] for row in document_rows]
        scored = [value for value in log_likelihoods if value is not None]
        assert scored == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_prompt_begins_a_document(kind, tmp_path: Path, capsys) -> None:
    tokenizer = write_tokenizer(tmp_path, kind)
    imported_folder = imported(source(tmp_path / "theirs", kind), tmp_path / "ours")
    begin = "<|im_start|>" if kind in ("Qwen", "Llama 3") else "<s>"
    (record,) = generate_records(capsys, imported_folder, "", *GREEDY)
    assert record["prompt_tokens"] == [tokenizer.token_to_id(begin)]


def test_an_empty_prompt_of_a_run_is_the_separator_of_its_data(run: Path, capsys, refusal) -> None:
    """So the first token has the probability that `score` finds for it at the start of a document."""
    (record,) = generate_records(capsys, run, "", "--max_tokens=4", "--seed=1")
    assert record["prompt_tokens"] == [END]
    model = load_checkpoint(str(run), "cpu").model
    logits = model(torch.tensor([[END]]))[0, -1].log_softmax(-1)
    assert record["log_likelihood"][0] == pytest.approx(
        logits[record["tokens"][0]].item(), abs=1e-5
    )


def test_a_model_without_such_a_token_refuses_an_empty_prompt(tmp_path: Path, refusal) -> None:
    source_folder = source(tmp_path / "theirs", "T5")
    for name in ("tokenizer_config.json", "generation_config.json"):
        (source_folder / name).unlink()
    edit(
        source_folder / "config.json",
        lambda record: record.update(bos_token_id=None, eos_token_id=None),
    )
    imported_folder = imported(source_folder, tmp_path / "ours")
    assert "has no token that begins a document: give some text" in refusal(
        "generate", imported_folder, ""
    )


@pytest.mark.parametrize(("name", "content", "complaint"), [
    ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id='x', which is no token's number"),
    ("generation_config.json", '{"eos_token_id": [1, true]}', "eos_token_id=[1, True], which is no"),
    ("generation_config.json", "[", "generation_config.json cannot be read"),
    ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is int in place of str or list"),
    ("tokenizer_config.json", '{"chat_template": ["a"]}', "has chat templates without name and template"),
    ("chat_template.jinja", "\udcff", "chat_template.jinja cannot be read"),
])  # fmt: skip
def test_damaged_special_tokens_are_refused(
    name, content, complaint, tmp_path: Path, refusal
) -> None:
    source_folder = source(tmp_path / "theirs", "Qwen")
    (source_folder / name).write_bytes(content.encode(errors="surrogateescape"))
    assert complaint in refusal("import", source_folder, "--output", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_template_may_lie_in_any_place_where_transformers_finds_it(
    tmp_path: Path, capsys
) -> None:
    source_folder = source(tmp_path / "theirs", "Qwen")
    (source_folder / "chat_template.jinja").write_text("{{ messages[0].content }} and")
    (from_file,) = generate_records(
        capsys, imported(source_folder, tmp_path / "one"), "--chat", "the cat", *GREEDY
    )
    (source_folder / "chat_template.jinja").unlink()
    config = json.loads((source_folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ messages[0].content }} and"},
    ]
    (source_folder / "tokenizer_config.json").write_text(json.dumps(config))
    (from_list,) = generate_records(
        capsys, imported(source_folder, tmp_path / "two"), "--chat", "the cat", *GREEDY
    )
    (without_template,) = generate_records(capsys, tmp_path / "two", "the cat and", *GREEDY)
    assert from_file == from_list
    assert from_file["prompt_tokens"] == without_template["prompt_tokens"]


def test_files_whose_names_are_not_utf8_are_read_and_written(
    run: Path, tmp_path: Path, capsys
) -> None:
    (text := tmp_path / "caf\udce9.txt").write_text("the cat sat")
    assert main(["generate", str(run), f"--prompts={text}", "--max_tokens=2"]) == 0
    assert capsys.readouterr().out.startswith("the cat sat")
    output = tmp_path / "caf\udce9.parquet"
    assert main(["score", str(run), str(text), f"--output={output}", "--json"]) == 0
    assert math.isfinite(json.loads(capsys.readouterr().out)["nats"])
    with output.open("rb") as file:
        sources = pq.read_table(file).to_pydict()["source"]
    assert set(sources) == {f"{tmp_path}/caf\\xe9.txt, the file"}
