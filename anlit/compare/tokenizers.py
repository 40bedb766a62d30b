"""Comparisons across tokenizers: whether losses are on the same text, and notes if they are not.

Bits per byte compare if both runs validate on all of the same text. A block is a number of tokens.
So a sample of blocks is other text for each tokenizer. All seeds share its deviation from the whole
split, and no test over seeds would see it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from anlit.config.labels import init_args, mapping
from anlit.errors import UserError
from anlit.runs.folders import Run
from anlit.runs.groups import Group, counted_runs
from anlit.runs.measure import BITS_PER_BYTE, bytes_per_token

OTHER_TEXT = "other text"
OTHER_PARTS = "other parts of the text"
"""Obstacles to a comparison, in words for a table."""


def with_common_measure(groups: Sequence[Group]) -> list[Group]:
    """Return the groups, measured in bits per byte if their tokenizers differ.

    Raises UserError if tokenizers differ and a counted run logged no bits per byte.
    """
    runs = counted_runs(groups)
    if len(tokenizers_of(runs)) < 2:
        return list(groups)
    for run in runs:
        _refuse_without_bits(run, runs)
    return [replace(group, measure=BITS_PER_BYTE) for group in groups]


def tokenizers_of(runs: Sequence[Run]) -> dict[str, Run]:
    """A run for each tokenizer, by its hash. Runs without a recorded hash are left out."""
    runs_by_tokenizer: dict[str, Run] = {}
    for run in runs:
        if run.tokenizer_hash:
            runs_by_tokenizer.setdefault(run.tokenizer_hash, run)
    return runs_by_tokenizer


def _refuse_without_bits(run: Run, runs: Sequence[Run]) -> None:
    obstacle = _obstacle_to_bits(run)
    if obstacle is None:
        return
    first, second, *_ = tokenizers_of(runs).values()
    raise UserError(
        f"{first.folder} and {second.folder} have different tokenizers, so runs compare by bits "
        f"per byte, and {run.folder} has none, because {obstacle}: leave it out"
    )


def _obstacle_to_bits(run: Run) -> str | None:
    """The reason why a run has no bits per byte over bytes of text. None if it has them."""
    for split in ("val", "train"):
        counts = run.split_counts(split)
        if not counts.get("bytes") or not counts.get("tokens"):
            return f"the text of its {split} tokens is not known"
    if run.bits_per_byte is not None:
        return None
    counts = run.split_counts("val")
    if mapping(counts.get("changes")).get("changed"):
        return "its tokenizer gives back documents as another text"
    return "it validated on the beginning of its split (data.val_tokens, trainer.limit_val_batches)"


def has_other_tokenizer(group: Group, baseline: Group) -> bool:
    """Whether the tokenizers of two groups are known and differ."""
    hashes = {group.counted[0].tokenizer_hash, baseline.counted[0].tokenizer_hash}
    return None not in hashes and len(hashes) > 1


def obstacle_across_tokenizers(group: Group, baseline: Group) -> str:
    """Why bits per byte of groups with different tokenizers do not compare. "" if they do."""
    if _is_same_text(group.counted[0], baseline.counted[0], "val") is False:
        return OTHER_TEXT
    is_whole = _reads_all_text(group.counted[0]) and _reads_all_text(baseline.counted[0])
    return "" if is_whole else OTHER_PARTS


def _is_same_text(run: Run, other_run: Run, split: str) -> bool | None:
    """Whether two runs have the same documents in a split. None if it is not known."""
    counts = run.split_counts(split)
    other_counts = other_run.split_counts(split)
    hashes = (counts.get("text_sha256"), other_counts.get("text_sha256"))
    if None not in hashes:
        return hashes[0] == hashes[1]
    if any(counts.get(key) != other_counts.get(key) for key in ("bytes", "documents")):
        return False
    return None


def _reads_all_text(run: Run) -> bool:
    """Whether every token of the validation split counts in the run's loss."""
    settings = init_args(run.config.get("data"))
    if settings.get("score_first_token") is False:
        return False
    n_blocks = settings.get("val_blocks")
    return n_blocks is None or n_blocks >= _most_blocks(run)


def _most_blocks(run: Run) -> int:
    """At least as many blocks as the validation split has. Each array may end in a short block."""
    data = mapping(run.record.get("data"))
    counts = run.split_counts("val")
    n_arrays = max(1, len(mapping(counts.get("subsets"))), len(mapping(data.get("parts"))))
    return int(counts["tokens"]) // _block_length(run) + n_arrays


def _block_length(run: Run) -> int:
    """The tokens of a validation sequence."""
    data = init_args(run.config.get("data"))
    model = init_args(run.config.get("model"))
    length = data.get("val_context_length") or data.get("context_length")
    return int(length or model.get("context_length") or 1)


def notes_across_tokenizers(group: Group, baseline: Group) -> Iterator[str]:
    """Facts about a comparison of groups with different tokenizers."""
    run = group.counted[0]
    baseline_run = baseline.counted[0]
    yield (
        f"{group.label}: another tokenizer, {_rate(run)} bytes per token of validation text, the "
        f"baseline {_rate(baseline_run)}; a context of {_context(run)} bytes, the baseline "
        f"{_context(baseline_run)}."
    )
    yield from _notes_on_text(group, baseline, "val", "VALIDATION")
    yield from _notes_on_text(group, baseline, "train", "TRAINING")
    yield from _notes_on_parts(group, baseline)
    for member in (group, baseline):
        if init_args(member.counted[0].config.get("data")).get("weights"):
            cause = "data.weights draws its subsets in other shares than the split has"
            yield f"{member.label}: its bytes of training text are estimated, because {cause}."


def _rate(run: Run) -> str:
    return f"{bytes_per_token(run, 'val'):.2f}"


def _context(run: Run) -> str:
    """`256 tokens, about 980`: the validation's context in tokens and bytes."""
    length = _block_length(run)
    return f"{length} tokens, about {length * bytes_per_token(run, 'val'):,.0f}"


def _notes_on_text(group: Group, baseline: Group, split: str, kind: str) -> Iterator[str]:
    """Tell if the text of a split differs between two groups, or is not known."""
    is_same = _is_same_text(group.counted[0], baseline.counted[0], split)
    if is_same:
        return
    text = _amount_of_text(group.counted[0], split)
    if is_same is None:
        cause = "a folder prepared by an earlier version has no hash of its text"
        yield f"{group.label}: {kind} TEXT NOT VERIFIED, {cause}; both have {text}."
        return
    amounts = f"{text}, the baseline {_amount_of_text(baseline.counted[0], split)}"
    if split == "val":
        amounts += "; no test and no speed-up, prepare both from the same held-out documents"
    yield f"{group.label}: OTHER {kind} TEXT, {amounts}."


def _amount_of_text(run: Run, split: str) -> str:
    """`25 documents of 30,110 bytes (hash 0123456789ab)`."""
    counts = run.split_counts(split)
    n_documents = counts.get("documents")
    documents = f"{n_documents:,} documents of " if n_documents is not None else ""
    text_hash = counts.get("text_sha256")
    hash_in_words = f" (hash {text_hash[:12]})" if text_hash else ""
    return f"{documents}{counts['bytes']:,} bytes{hash_in_words}"


def _notes_on_parts(group: Group, baseline: Group) -> Iterator[str]:
    """Tell how much of the validation text two groups read, if a group does not read all."""
    run = group.counted[0]
    baseline_run = baseline.counted[0]
    if not (_reads_all_text(run) and _reads_all_text(baseline_run)):
        parts = f"{_part_in_words(run)}, the baseline on {_part_in_words(baseline_run)}"
        yield (
            f"{group.label}: validates on {parts}: these are other parts of the text, so there is "
            "no test and no speed-up; leave data.val_blocks out, and data.score_first_token true."
        )


def _part_in_words(run: Run) -> str:
    """`16 blocks (about 1,254 of 16,080 bytes)`, or `all text`."""
    settings = init_args(run.config.get("data"))
    n_blocks = settings.get("val_blocks")
    words = "all text"
    if n_blocks is not None and n_blocks < _most_blocks(run):
        n_bytes = run.split_counts("val")["bytes"]
        n_read = n_blocks * _block_length(run) * bytes_per_token(run, "val")
        words = f"{n_blocks:,} blocks (about {min(n_read, n_bytes):,.0f} of {n_bytes:,} bytes)"
    if settings.get("score_first_token") is False:
        words += " without the first token of each document"
    return words
