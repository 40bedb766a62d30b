"""Fine-tuning on needles in haystacks: the DataModule, whose loss counts only the answers."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from anlit.data.batch import Batch, batch_from_blocks
from anlit.data.module import TokenShards
from anlit.data.order.blocks import generator
from anlit.data.order.loader import BatchMaker, EvaluationLoader, ResumableLoader
from anlit.data.order.streams import Blocks, EvaluationStream, Share, TrainingStream
from anlit.evaluation.needle.haystack import Haystack, Sample
from anlit.targets import IGNORED

TRAINING, VALIDATION = 1, 2
"""Numbers of the random streams of one seed."""


@dataclass(frozen=True)
class AnswerBatchMaker(BatchMaker):
    """Batches in which only the answers are targets: the last `n_targets` of each row."""

    def __call__(self, blocks: Blocks) -> Batch:
        assert blocks.n_targets is not None
        batch = batch_from_blocks(blocks.tokens, self.end_of_document, self.token_at)
        length = batch.targets.shape[1]
        batch.targets.numpy()[np.arange(length) < length - blocks.n_targets[:, None]] = IGNORED
        return batch.pin_memory() if self.pin_memory else batch


@dataclass(frozen=True)
class NeedleSamples:
    """Sample number i depends only on the seed and on i. The depth is uniform."""

    haystack: Haystack
    length: int
    seed: int
    held_out: bool

    def __call__(self, number: int) -> Sample:
        random = generator(self.seed, VALIDATION if self.held_out else TRAINING, self.length, number)
        return self.haystack.sample(self.length, random.random_sample(), random, self.held_out)

    def blocks(self, first: int, count: int) -> Blocks:
        """The samples [first, first + count) as a batch."""
        samples = [self(number) for number in range(first, first + count)]
        return Blocks(
            np.stack([sample.tokens for sample in samples]), np.array([sample.n_answer for sample in samples])
        )


class NeedleStream(TrainingStream):
    """The endless training stream: the samples by their numbers."""

    n_blocks = 1 << 20  # an epoch for Lightning; the next one has other samples

    def __init__(self, samples: NeedleSamples, share: Share) -> None:
        self.samples, self.share = samples, share

    def batch(self, number: int) -> Blocks:
        return self.samples.blocks(self.first_draw(number), self.share.batch_size)


class NeedleEvaluation(EvaluationStream):
    """The first samples, `count` of them or as many more as fill the last batch of every device."""

    def __init__(self, samples: NeedleSamples, share: Share, count: int) -> None:
        self.samples, self.share, self.count = samples, share, count

    def __len__(self) -> int:
        return -(-self.count // self.share.sequences)

    def batch(self, number: int) -> Blocks:
        first = number * self.share.sequences + self.share.rank * self.share.batch_size
        return self.samples.blocks(first, self.share.batch_size)


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
        super().__init__(
            path, batch_size, context_length, num_workers, seed=seed, val_batch_size=val_batch_size, cache_gb=cache_gb
        )
        self.val_samples = val_samples
        self._haystacks: dict[str, Haystack] = {}

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The data in a run's record: the corpus of the haystacks, and the task."""
        return {**super().fingerprint, "task": type(self).__name__}

    @property
    def counts_every_target(self) -> bool:
        """Only answers count, and they differ in length."""
        return False

    def bytes_per_token(self, split: str = "val") -> float | None:
        """None: a loss over answers says nothing about the corpus's bytes."""
        return None

    def train_dataloader(self) -> ResumableLoader:
        """The stream of training batches, continued within a run.

        Raises:
            UserError: The checkpoint's position belongs to other data or another seed.
        """
        stream = NeedleStream(self._samples("train"), self._share(self.batch_size))
        identity = {
            "--data": type(self).__name__,
            "--data.path (the texts in it)": self.manifest["content_sha256"],
            "--data.seed": self.seed,
            "--model.context_length": self.context_length,
        }
        return self._training_loader(stream, identity)

    def _evaluation_loader(self, split: str) -> EvaluationLoader:
        stream = NeedleEvaluation(self._samples(split), self._share(self.val_batch_size), self.val_samples)
        return EvaluationLoader(stream, self._batch_maker())

    def _samples(self, split: str) -> NeedleSamples:
        assert self.context_length is not None, "setup() comes first"
        if split not in self._haystacks:
            self._haystacks[split] = Haystack.of(self, split)
        return NeedleSamples(self._haystacks[split], self.context_length, self.seed, held_out=split != "train")

    def _batch_maker(self) -> AnswerBatchMaker:
        plain = super()._batch_maker()
        return AnswerBatchMaker(
            plain.end_of_document, plain.token_at, pin_memory=plain.pin_memory, score_first_token=True
        )

    def _check_training(self) -> None:
        self._check("train")

    def _check_validation(self) -> None:
        self._check("val")

    def _check(self, split: str) -> None:
        samples = self._samples(split)
        samples.haystack.check(samples.length)
