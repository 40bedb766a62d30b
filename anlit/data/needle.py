"""The needle-in-a-haystack task (arXiv 2505.17083) and the DataModule that fine-tunes on it.

    corpus text … ⏎ The special magic <city> number is <7 digits>. ⏎ … corpus text ⏎
    The special magic <city> number is

The continuation is the number. Corpus text comes as tokens from prepared shards. Blank lines
replace the end-of-document tokens, so that a sample is a single document for the mask.

The pairs of city and number form two disjoint sets, for training and for evaluation.
"""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from anlit.config.value_checks import check_ranges
from anlit.data.batch import IGNORE_INDEX, Batch
from anlit.data.module import TokenShards
from anlit.data.order import generator
from anlit.data.streams import BlockStream, Share, TokenBlocks
from anlit.errors import UserError

SENTENCE = "The special magic {city} number is {number}."
QUESTION = "The special magic {city} number is"
SMALLEST_NUMBER = 1_000_000
LARGEST_NUMBER = 9_999_999
PAIR_MODULUS = 97
"""The pair of city c and number m is held out for evaluation if 97 divides m + 41·c."""
CITY_FACTOR = 41
BOUNDARY_SHARE = 0.05
"""The needle moves to the end of a sentence or line within this share of the haystack."""
TRAINING = 1
"""Random stream of training samples."""
VALIDATION = 2
"""Random stream of validation samples."""
EVALUATION = 3
"""Random stream of `anlit needle`."""
SENTENCE_ENDS = (".", "!", "?", '."', ".)", "!)", "?)", '!"', '?"')
CITY_NAMES = """
    Aarhus Accra Adelaide Algiers Almaty Amman Amsterdam Ankara Antwerp Athens Auckland Baku
    Bangkok Barcelona Basel Beirut Belgrade Bergen Berlin Bern Bilbao Bogota Bologna Bordeaux
    Boston Bratislava Bremen Brisbane Bristol Brussels Bucharest Budapest Cairo Calgary Canberra
    Caracas Cardiff Chicago Cologne Copenhagen Cordoba Cork Dakar Dallas Damascus Delhi Denver
    Detroit Doha Dortmund Dresden Dubai Dublin Durban Edinburgh Florence Geneva Genoa Ghent Glasgow
    Granada Graz Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kabul Kampala Karachi Kigali
    Kingston Krakow Kyoto Lagos Leeds Leipzig Lima Lisbon Liverpool London Lyon Madrid Malaga Manila
    Marseille Melbourne Memphis Miami Milan Montreal Moscow Mumbai Munich Nairobi Nantes Naples Nice
    Osaka Oslo Oxford Palermo Paris Perth Porto Prague Quito Riga Rome Rotterdam Salzburg Seattle
    Seoul Seville Sofia Stockholm Sydney Tallinn Tokyo Toronto Trieste Tunis Turin Valencia Vienna
    Vilnius Warsaw Zurich
"""
CITIES = CITY_NAMES.split()
"""The order must not change: it decides which pairs are held out."""


class Sample(NamedTuple):
    """A haystack with its needle, question and answer. The model reads the first `length` tokens.

    The answer is at the end of the tokens.
    """

    tokens: np.ndarray  # (length + 1,) int64
    n_answer: int  # tokens of the answer
    city: str
    number: int
    depth: float  # the share of the haystack before the needle


class Haystack:
    """Makes samples from a split of prepared data.

    Raises UserError if the tokenizer does not reproduce the sentence of the needle.
    """

    def __init__(self, data: TokenShards, split: str) -> None:
        self.name = f"{data.path}/{split}"
        self.stores = data.stores(split)
        self.tokenizer = data.tokenizer
        self.end_of_document = data.manifest["end_of_document"]
        self.store_bounds = np.cumsum([0, *(store.n_tokens for store in self.stores)])
        self.n_tokens = int(self.store_bounds[-1])
        self.blank_line = self._encode("\n\n")
        sentence = SENTENCE.format(city=CITIES[0], number=SMALLEST_NUMBER)
        decoded = self.tokenizer.decode(self._encode(sentence).tolist())
        if decoded.strip() != sentence or not len(self.blank_line):
            raise UserError(
                f"the tokenizer of {self.name} does not reproduce '{sentence}': use a tokenizer "
                "that keeps letters, digits and line ends, such as a byte-level BPE"
            )

    @cached_property
    def shortest(self) -> int:
        """The least length that has room for text with every needle and question."""
        questions = [f"\n{QUESTION}".format(city=city) for city in CITIES]
        longest_question = max(len(self._encode(question)) for question in questions)
        longest_answer = len(f" {LARGEST_NUMBER}")  # at most one token per character
        return 2 * (longest_question + longest_answer) + len(self._encode(".\n"))

    def check(self, length: int) -> None:
        """Raise UserError if samples of `length` tokens cannot be made."""
        if length < self.shortest:
            raise UserError(
                f"{length} tokens are too few for a needle with the tokenizer of {self.name}: "
                f"give --lengths of {self.shortest} or more"
            )
        if length > self.n_tokens:
            raise UserError(
                f"{self.name} has {self.n_tokens:,} tokens, too few for a haystack of {length:,}: "
                "choose a shorter length, or a corpus with more text in that split"
            )

    def sample(
        self, length: int, depth: float, random: np.random.RandomState, held_out: bool
    ) -> Sample:
        """Return a sample of `length` tokens, which `random` draws.

        Args:
            length: tokens that the model reads.
            depth: position of the needle, from 0 (first) to 1 (before the question). It moves to
                the nearest end of a sentence or line within `BOUNDARY_SHARE`.
            random: decides on the text, the city and the number.
            held_out: whether the pair of city and number is held out for evaluation.
        """
        city, number = draw_pair(random, held_out)
        needle = self._encode(f"\n{SENTENCE}\n".format(city=city, number=number))
        question = self._encode(f"\n{QUESTION}".format(city=city))
        answer = self._encode(f" {number}")
        n_text = length + 1 - len(needle) - len(question) - len(answer)
        start = int(random.randint(0, self.n_tokens - n_text + 1, dtype=np.int64))
        text = self._read_text(start, n_text)
        position = self._needle_position(text, depth)
        tokens = np.concatenate([text[:position], needle, text[position:], question, answer])
        return Sample(tokens, len(answer), city, number, position / len(text))

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def _read_text(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens of the corpus, with blank lines between documents."""
        pieces = []
        for store, first in zip(self.stores, self.store_bounds.tolist(), strict=False):
            begin = min(max(start - first, 0), store.n_tokens)
            end = min(max(start + count - first, 0), store.n_tokens)
            if begin < end:
                pieces.append(store.read(begin, end - begin))
        tokens = np.concatenate(pieces).astype(np.int64)
        documents = np.split(tokens, np.flatnonzero(tokens == self.end_of_document))
        text = [documents[0]]
        for document in documents[1:]:  # each begins with the end-of-document token
            text += [self.blank_line, document[1:]]
        return np.concatenate(text)[:count]

    def _needle_position(self, text: np.ndarray, depth: float) -> int:
        """Return the index of the token before which the needle is inserted."""
        position = round(depth * len(text))
        ends_line, ends_sentence, begins_word = self._token_properties
        left = text[:-1]
        right = text[1:]
        is_boundary = ends_line[left] | (ends_sentence[left] & begins_word[right])
        boundaries = np.concatenate([[0], np.flatnonzero(is_boundary) + 1, [len(text)]])
        nearest = int(boundaries[np.abs(boundaries - position).argmin()])
        return nearest if abs(nearest - position) <= BOUNDARY_SHARE * len(text) else position

    @cached_property
    def _token_properties(self) -> np.ndarray:
        """(3, V) whether each token ends a line, ends a sentence, begins with a space."""
        ids = [[token] for token in range(self.tokenizer.get_vocab_size())]
        properties = []
        for text in self.tokenizer.decode_batch(ids, skip_special_tokens=False):
            ends_line = text.endswith("\n")
            ends_sentence = text.endswith(SENTENCE_ENDS)
            properties.append((ends_line, ends_sentence, text[:1].isspace()))
        return np.array(properties).T


def draw_pair(random: np.random.RandomState, held_out: bool) -> tuple[str, int]:
    """Draw a city and a number of 7 digits: a held-out pair for evaluation, or any other."""
    city = int(random.randint(len(CITIES)))
    number = int(random.randint(SMALLEST_NUMBER, LARGEST_NUMBER + 1))
    remainder = (number + CITY_FACTOR * city) % PAIR_MODULUS
    if held_out:
        number -= remainder
        if number < SMALLEST_NUMBER:
            number += PAIR_MODULUS
    elif remainder == 0:
        number += 1 if number < LARGEST_NUMBER else -1
    return CITIES[city], number


class NeedleStream(BlockStream):
    """Samples that their number and the seed determine. The depth is uniform.

    The stream is endless, or has the first `count` samples and fills every device's last batch.
    """

    n_blocks = 1 << 20  # an epoch for Lightning; the next epoch has other samples

    def __init__(
        self,
        haystack: Haystack,
        length: int,
        seed: int,
        share: Share,
        held_out: bool,
        count: int | None = None,
    ) -> None:
        self.haystack = haystack
        self.length = length
        self.seed = seed
        self.share = share
        self.held_out = held_out
        self.n_batches = None if count is None else -(-count // share.sequences)

    def batch(self, number: int) -> TokenBlocks:
        first = self.first_draw(number)
        purpose = VALIDATION if self.held_out else TRAINING
        tokens = []
        n_answers = []
        for draw in range(first, first + self.share.batch_size):
            random = generator(self.seed, purpose, self.length, draw)
            depth = random.random_sample()
            sample = self.haystack.sample(self.length, depth, random, self.held_out)
            tokens.append(sample.tokens)
            n_answers.append(sample.n_answer)
        return TokenBlocks(np.stack(tokens), np.array(n_answers))


class NeedleInHaystack(TokenShards):
    """Needles in haystacks of a prepared corpus, for fine-tuning (arXiv 2505.17083).

    A sample is `context_length` tokens of corpus text. At a random depth it has the sentence "The
    special magic <city> number is <7 digits>.". At the end it has the question for the number. The
    loss counts the answers only. Validation uses the text of the validation split, and no pair of
    city and number that training could draw.

    Args:
        path: folder (or s3://, gs://, hf:// address) of prepared token shards with their tokenizer.
        batch_size: samples per device and micro-batch.
        context_length: tokens per sample. By default the model's.
        num_workers: loader processes per device for training.
        seed: seed of the samples.
        val_batch_size: samples per device and validation batch. By default batch_size.
        val_samples: samples to validate on, rounded up to whole batches.
        cache_gb: size of the cache for remote shards, in 10⁹ bytes.
    """

    def __init__(
        self,
        path: str,
        batch_size: int = 8,
        context_length: int | None = None,
        num_workers: int = 0,
        seed: int = 42,
        val_batch_size: int | None = None,
        val_samples: int = 128,
        cache_gb: float = 100.0,
    ) -> None:
        check_ranges("data", locals())
        super().__init__(
            path,
            batch_size,
            context_length,
            num_workers,
            seed=seed,
            val_batch_size=val_batch_size,
            cache_gb=cache_gb,
            score_first_token=False,  # only answers count, and they differ in length
        )
        self.val_samples = val_samples
        self._haystacks: dict[str, Haystack] = {}

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The identity of the haystacks' corpus in a run's record, and the task."""
        return {**super().fingerprint, "task": type(self).__name__}

    def bytes_per_token(self, split: str = "val") -> float | None:
        """Return None: a loss over answers is unrelated to the corpus's bytes."""
        return None

    def _identity(self) -> dict[str, Any]:
        identity = super()._identity()
        del identity["--data.shuffle"]  # it decides nothing here; plain training needs it
        return {"--data": type(self).__name__, **identity}

    def _training_stream(self) -> NeedleStream:
        return self._stream("train", self.batch_size)

    def _evaluation_stream(self, split: str) -> NeedleStream:
        return self._stream(split, self.val_batch_size, self.val_samples)

    def _stream(self, split: str, batch_size: int, count: int | None = None) -> NeedleStream:
        share = self._share(batch_size)
        held_out = split != "train"
        return NeedleStream(self._haystack(split), self._length, self.seed, share, held_out, count)

    def _haystack(self, split: str) -> Haystack:
        if split not in self._haystacks:
            self._haystacks[split] = Haystack(self, split)
        return self._haystacks[split]

    def _make_batch(self, blocks: TokenBlocks) -> Batch:
        """Make a batch that has only the answers as targets: the last `n_targets` of each row."""
        assert blocks.n_targets is not None
        batch = super()._make_batch(TokenBlocks(blocks.tokens, None))
        length = batch.targets.shape[1]
        batch.targets.numpy()[np.arange(length) < length - blocks.n_targets[:, None]] = IGNORE_INDEX
        return batch

    def _check_training(self) -> None:
        self._haystack("train").check(self._length)

    def _check_validation(self) -> None:
        self._haystack("val").check(self._length)

    def _warn_of_cut(self, split: str) -> None:
        """Do nothing: the first samples are as random as all samples."""
