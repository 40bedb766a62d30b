"""The needle-in-a-haystack task (arXiv 2505.17083): its samples, and the DataModule that fine-tunes on them.

    corpus text … ⏎ The special magic <city> number is <7 digits>. ⏎ … corpus text ⏎ The special magic <city> number is

The continuation is the number. Corpus text comes as tokens from prepared shards. Blank lines replace the
end-of-document tokens, so that a sample is one document for the mask.

City and number of a sample are drawn from one of two disjoint sets of pairs, one for training and one for evaluation.
"""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from anlit.config.schema import check_ranges
from anlit.data.batch import IGNORE_INDEX, Batch
from anlit.data.module import TokenShards
from anlit.data.order import generator
from anlit.data.streams import Blocks, BlockStream, Share
from anlit.errors import UserError

SENTENCE = "The special magic {city} number is {number}."
QUESTION = "The special magic {city} number is"
SMALLEST, LARGEST = 1_000_000, 9_999_999
MODULUS, FACTOR = (
    97,
    41,
)  # the pair (city c, number m) is held out for evaluation if m + 41·c is a multiple of 97
UNUSED = (
    "--data.shuffle",
    "--data.weights",
)  # on which the place in the training samples does not depend
CLOSE = 0.05  # the needle moves to the end of a sentence or line within this share of the haystack
TRAINING, VALIDATION, EVALUATION = (
    1,
    2,
    3,
)  # the random streams of one seed; the last is that of `anlit needle`
NAMES = """
    Aarhus Accra Adelaide Algiers Almaty Amman Amsterdam Ankara Antwerp Athens Auckland Baku Bangkok Barcelona Basel
    Beirut Belgrade Bergen Berlin Bern Bilbao Bogota Bologna Bordeaux Boston Bratislava Bremen Brisbane Bristol Brussels
    Bucharest Budapest Cairo Calgary Canberra Caracas Cardiff Chicago Cologne Copenhagen Cordoba Cork Dakar Dallas
    Damascus Delhi Denver Detroit Doha Dortmund Dresden Dubai Dublin Durban Edinburgh Florence Geneva Genoa Ghent
    Glasgow Granada Graz Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kabul Kampala Karachi Kigali Kingston
    Krakow Kyoto Lagos Leeds Leipzig Lima Lisbon Liverpool London Lyon Madrid Malaga Manila Marseille Melbourne Memphis
    Miami Milan Montreal Moscow Mumbai Munich Nairobi Nantes Naples Nice Osaka Oslo Oxford Palermo Paris Perth Porto
    Prague Quito Riga Rome Rotterdam Salzburg Seattle Seoul Seville Sofia Stockholm Sydney Tallinn Tokyo Toronto Trieste
    Tunis Turin Valencia Vienna Vilnius Warsaw Zurich
"""
CITIES = NAMES.split()  # in an order that must not change: it decides which pairs are held out


class Sample(NamedTuple):
    """One haystack with its needle, question and answer: the model reads the first `length` tokens."""

    tokens: np.ndarray  # (length + 1,) int64; the answer is their end
    n_answer: int  # tokens of the answer
    city: str
    number: int
    depth: float  # the share of the haystack before the needle


class Haystack:
    """Makes samples from one split of prepared data; UserError if its tokenizer does not reproduce the sentence."""

    def __init__(self, data: TokenShards, split: str) -> None:
        self.name, self.stores, self.tokenizer = (
            f"{data.path}/{split}",
            data.stores(split),
            data.tokenizer,
        )
        self.end_of_document = data.manifest["end_of_document"]
        self.ends = np.cumsum([0, *(store.n_tokens for store in self.stores)])
        self.n_tokens = int(self.ends[-1])
        self.blank_line = self._encode("\n\n")
        sentence = SENTENCE.format(city=CITIES[0], number=SMALLEST)
        if self.tokenizer.decode(self._encode(sentence).tolist()).strip() != sentence or not len(
            self.blank_line
        ):
            raise UserError(
                f"The tokenizer of {self.name} does not reproduce '{sentence}': the needle needs one that keeps "
                "letters, digits and line ends, such as a byte-level BPE."
            )

    @cached_property
    def shortest(self) -> int:
        """The least length that has room for a token of corpus text with every needle and question."""
        questions = max(len(self._encode(f"\n{QUESTION}".format(city=city))) for city in CITIES)
        longest_answer = len(f" {LARGEST}")  # at most one token per character
        return 2 * (questions + longest_answer) + len(self._encode(".\n"))

    def check(self, length: int) -> None:
        """Raise UserError if samples of `length` tokens cannot be made."""
        if length < self.shortest:
            least = f"choose {self.shortest} or more"
            raise UserError(
                f"{length} tokens are too few for a needle with the tokenizer of {self.name}: {least}."
            )
        if length > self.n_tokens:
            raise UserError(
                f"{self.name} has {self.n_tokens:,} tokens, too few for a haystack of {length:,}: choose a shorter "
                "length, or a corpus with more text in that split."
            )

    def sample(
        self, length: int, depth: float, random: np.random.RandomState, held_out: bool
    ) -> Sample:
        """One sample of `length` tokens; `random` decides on it, and `held_out` whether its pair is one for evaluation.

        `depth` is the needle's position, from 0 (first) to 1 (before the question). It moves to the nearest end of a
        sentence or line if one is within `CLOSE`.
        """
        city, number = draw_pair(random, held_out)
        needle = self._encode(f"\n{SENTENCE}\n".format(city=city, number=number))
        question = self._encode(f"\n{QUESTION}".format(city=city))
        answer = self._encode(f" {number}")
        n_text = length + 1 - len(needle) - len(question) - len(answer)
        text = self._text(
            int(random.randint(0, self.n_tokens - n_text + 1, dtype=np.int64)), n_text
        )
        place = self._place(text, depth)
        tokens = np.concatenate([text[:place], needle, text[place:], question, answer])
        return Sample(tokens, len(answer), city, number, place / len(text))

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def _text(self, start: int, count: int) -> np.ndarray:
        """`count` tokens of the corpus from the token `start` on, with blank lines between documents."""
        begins = np.clip(
            start - self.ends[:-1], 0, np.diff(self.ends)
        ).tolist()  # in each of the consecutive stores
        stops = np.clip(start + count - self.ends[:-1], 0, np.diff(self.ends)).tolist()
        read = [
            store.read(a, b - a)
            for store, a, b in zip(self.stores, begins, stops, strict=True)
            if a < b
        ]
        tokens = np.concatenate(read).astype(np.int64)
        documents = np.split(tokens, np.flatnonzero(tokens == self.end_of_document))
        parts = [
            documents[0],
            *(np.concatenate([self.blank_line, document[1:]]) for document in documents[1:]),
        ]
        return np.concatenate(parts)[:count]

    def _place(self, text: np.ndarray, depth: float) -> int:
        """The index of the token before which the needle is inserted."""
        asked = round(depth * len(text))
        ends_line, ends_sentence, begins_word = self._kinds
        before, after = text[:-1], text[1:]
        inside = (
            np.flatnonzero(ends_line[before] | (ends_sentence[before] & begins_word[after])) + 1
        )
        boundaries = np.concatenate([[0], inside, [len(text)]])
        nearest = int(boundaries[np.abs(boundaries - asked).argmin()])
        return nearest if abs(nearest - asked) <= CLOSE * len(text) else asked

    @cached_property
    def _kinds(self) -> np.ndarray:
        """(3, V): whether a token ends a line, ends with a full stop or the like, begins with a space."""
        ids = [[token] for token in range(self.tokenizer.get_vocab_size())]
        texts = self.tokenizer.decode_batch(ids, skip_special_tokens=False)
        stops = (".", "!", "?", '."', ".)", "!)", "?)", '!"', '?"')
        return np.array(
            [(text.endswith("\n"), text.endswith(stops), text[:1].isspace()) for text in texts]
        ).T


def draw_pair(random: np.random.RandomState, held_out: bool) -> tuple[str, int]:
    """A city and a number of 7 digits, from the pairs for evaluation (`held_out`) or from all others."""
    city, number = int(random.randint(len(CITIES))), int(random.randint(SMALLEST, LARGEST + 1))
    rest = (number + FACTOR * city) % MODULUS
    if held_out:
        number -= rest
        number += MODULUS if number < SMALLEST else 0
    elif rest == 0:
        number += 1 if number < LARGEST else -1
    return CITIES[city], number


class NeedleStream(BlockStream):
    """Samples by their numbers, which alone decide on them, with the seed; the depth is uniform.

    Endless, or the first `count` and as many more as fill every device's last batch.
    """

    n_blocks = 1 << 20  # an epoch for Lightning; the next one has other samples

    def __init__(
        self,
        haystack: Haystack,
        length: int,
        seed: int,
        share: Share,
        held_out: bool,
        count: int | None = None,
    ) -> None:
        self.haystack, self.length, self.seed, self.share, self.held_out = (
            haystack,
            length,
            seed,
            share,
            held_out,
        )
        self.n_batches = None if count is None else -(-count // share.sequences)

    def batch(self, number: int) -> Blocks:
        first, purpose = self.first_draw(number), VALIDATION if self.held_out else TRAINING
        draws = [
            generator(self.seed, purpose, self.length, first + row)
            for row in range(self.share.batch_size)
        ]
        samples = [
            self.haystack.sample(self.length, draw.random_sample(), draw, self.held_out)
            for draw in draws
        ]
        answers = np.array([sample.n_answer for sample in samples])
        return Blocks(np.stack([sample.tokens for sample in samples]), answers)


class NeedleInHaystack(TokenShards):
    """Needles in haystacks of a prepared corpus, for fine-tuning (arXiv 2505.17083); the loss counts the answers only.

    A sample is `context_length` tokens of corpus text with the sentence "The special magic <city> number is
    <7 digits>." at a random depth, and the question for the number. Validation has other numbers, in the
    text of the validation split, and no pair of city and number that training could draw.

    Args:
        path: folder (or s3://, gs://, hf:// address) of prepared token shards with their tokenizer.
        batch_size: samples per device and micro-batch.
        context_length: tokens per sample; by default the model's.
        num_workers: loader processes per device for training.
        seed: seed of the samples.
        val_batch_size: samples per device and validation batch; by default batch_size.
        val_samples: samples to validate on, rounded up to whole batches.
        cache_gb: size of the cache for remote shards, in 10⁹ bytes.
    """

    def __init__(
        self, path: str, batch_size: int = 8, context_length: int | None = None, num_workers: int = 0, seed: int = 42,
        val_batch_size: int | None = None, val_samples: int = 128, cache_gb: float = 100.0,
    ) -> None:  # fmt: skip
        check_ranges("data", locals())
        super().__init__(
            path, batch_size, context_length, num_workers, seed=seed, val_batch_size=val_batch_size, cache_gb=cache_gb,
            score_first_token=False,  # only answers count, and they differ in length
        )  # fmt: skip
        self.val_samples = val_samples
        self._haystacks: dict[str, Haystack] = {}

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The data in a run's record: the corpus of the haystacks, and the task."""
        return {**super().fingerprint, "task": type(self).__name__}

    def bytes_per_token(self, split: str = "val") -> float | None:
        """None: a loss over answers says nothing about the corpus's bytes."""
        return None

    def _identity(self) -> dict[str, Any]:
        kept = {key: value for key, value in super()._identity().items() if key not in UNUSED}
        return {"--data": type(self).__name__, **kept}

    def _training_stream(self) -> NeedleStream:
        return self._stream("train", self.batch_size)

    def _evaluation_stream(self, split: str) -> NeedleStream:
        return self._stream(split, self.val_batch_size, self.val_samples)

    def _stream(self, split: str, batch_size: int, count: int | None = None) -> NeedleStream:
        haystack, share = self._haystack(split), self._share(batch_size)
        return NeedleStream(haystack, self._length, self.seed, share, split != "train", count)

    def _haystack(self, split: str) -> Haystack:
        if split not in self._haystacks:
            self._haystacks[split] = Haystack(self, split)
        return self._haystacks[split]

    def _make_batch(self, blocks: Blocks) -> Batch:
        """Only the answers are targets: the last `n_targets` of each row."""
        assert blocks.n_targets is not None
        batch = super()._make_batch(Blocks(blocks.tokens, None))
        length = batch.targets.shape[1]
        batch.targets.numpy()[np.arange(length) < length - blocks.n_targets[:, None]] = IGNORE_INDEX
        return batch

    def _check_training(self) -> None:
        self._haystack("train").check(self._length)

    def _check_validation(self) -> None:
        self._haystack("val").check(self._length)

    def _warn_of_cut(self, split: str) -> None:
        """Say nothing: the first samples are as random as all."""
