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
    if init_args(run.config.get("data")).get("score_first_token") is False:
        return "its loss leaves out the first token of each document (data.score_first_token)"
    return "it validated on the beginning of its split (data.val_tokens, trainer.limit_val_batches)"


def has_other_tokenizer(group: Group, baseline: Group) -> bool:
    """Whether the tokenizers of two groups are known and differ."""
    hashes = {group.counted[0].tokenizer_hash, baseline.counted[0].tokenizer_hash}
    return None not in hashes and len(hashes) > 1


def obstacle_across_tokenizers(group: Group, baseline: Group) -> str:
    """Why bits per byte of groups with different tokenizers do not compare. "" if they do."""
    runs = (group.counted[0], baseline.counted[0])
    if not _is_same_text(*runs, "val"):
        return OTHER_TEXT
    return "" if all(map(_reads_all_text, runs)) else OTHER_PARTS


def _is_same_text(run: Run, other_run: Run, split: str) -> bool:
    """Whether two runs are known to have the same documents in a split, by their hashes."""
    text_hash = run.split_counts(split).get("text_sha256")
    return text_hash is not None and text_hash == other_run.split_counts(split).get("text_sha256")


def _reads_all_text(run: Run) -> bool:
    """Whether the run validates on all of its split. Runs that leave out tokens have no bits."""
    return init_args(run.config.get("data")).get("val_blocks") is None


def block_length(run: Run) -> int | None:
    """The tokens of a validation sequence; None if a class of the user's does not tell them."""
    class_path = str(mapping(run.config.get("data")).get("class_path") or "anlit.")
    data = init_args(run.config.get("data"))
    if not class_path.startswith("anlit.") and "val_context_length" not in data:
        return None
    model = init_args(run.config.get("model"))
    length = data.get("val_context_length") or data.get("context_length")
    length = length or model.get("context_length")
    return length if isinstance(length, int) else None


def notes_across_tokenizers(group: Group, baseline: Group) -> Iterator[str]:
    """Facts about a comparison of groups with different tokenizers."""
    run = group.counted[0]
    baseline_run = baseline.counted[0]
    yield (
        f"{group.label}: another tokenizer, {_rate(run)} bytes per token of validation text, the "
        f"baseline {_rate(baseline_run)}; a context of {_context(run)}, the baseline "
        f"{_context(baseline_run)}."
    )
    if not _is_same_text(run, baseline_run, "val"):
        yield (
            f"{group.label}: OTHER VALIDATION TEXT, or a folder without its hash; no test and no "
            "speed-up, prepare both from the same held-out documents."
        )
    if not _is_same_text(run, baseline_run, "train"):
        yield f"{group.label}: OTHER TRAINING TEXT, or a folder without its hash."
    if not (_reads_all_text(run) and _reads_all_text(baseline_run)):
        yield (
            f"{group.label}: validates on other parts of the text, so there is no test and no "
            "speed-up; leave data.val_blocks out."
        )
    for member in (group, baseline):
        if init_args(member.counted[0].config.get("data")).get("weights"):
            cause = "data.weights draws its subsets in other shares than the split has"
            yield f"{member.label}: its bytes of training text are estimated, because {cause}."


def _rate(run: Run) -> str:
    return f"{bytes_per_token(run, 'val'):.2f}"


def _context(run: Run) -> str:
    """`256 tokens, about 980 bytes`: the validation's context."""
    length = block_length(run)
    if length is None:
        return "unknown length"
    return f"{length} tokens, about {length * bytes_per_token(run, 'val'):,.0f} bytes"
