"""The streaming loader, with a resume that stays right at the end of an epoch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

from anlit.data.batch import Batch
from anlit.errors import UserError


class ResumableLoader(StreamingDataLoader):
    """A `StreamingDataLoader` whose position in a checkpoint is right wherever the checkpoint was made.

    litdata forgets a restored position when the pass is run to its very end. Lightning's Trainer stops
    at the last batch, one step short of it, so the epoch after a resume would start at the restored
    position again instead of at its beginning: here a restored position holds for one pass.

    litdata also ties the position to the folder's path. Here it is tied to what the folder holds
    (`content`, a hash), so that a run can go on where its data were copied to.
    """

    content: str = ""
    _restored_pass_begun = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "content": self.content}

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Go on at a position that `state_dict` gave.

        Raises:
            UserError: it is a position in other data, or in the same data in another order.
        """
        source = self.dataset.input_dir
        position = {**obj["dataset"], "input_dir_path": source.path, "input_dir_url": source.url}
        self._check_same_order(obj, position)
        super().load_state_dict({**obj, "dataset": position})
        self._restored_pass_begun = False
        # With another number of ranks or workers litdata would otherwise resume a finished epoch.
        total = len(self.dataset) * self.dataset.distributed_env.world_size
        if position.get("sample_in_epoch", 0) >= total:
            self.restore = False

    def _check_same_order(self, state: dict[str, Any], position: dict[str, Any]) -> None:
        then = {
            "--data.path (the texts in it)": state.get("content"),
            "--data.seed": position["seed"],
            "--data.shuffle": position["shuffle"],
            "--model.context_length": position["item_loader"]["block_size"] - 1,
        }
        now = (self.content, self.dataset.seed, self.dataset.shuffle, self.block_size - 1)
        for (name, old), new in zip(then.items(), now, strict=True):
            if old != new:
                raise UserError(
                    f"The checkpoint's place in the data is for {name} {old} and this run has {new}: "
                    "set it back, or start from the weights alone."
                )

    @property
    def block_size(self) -> int:
        return self.dataset.item_loader.state_dict()["block_size"]

    def __iter__(self) -> Iterator[Batch]:
        if self._restored_pass_begun:
            self.restore = False
        self._restored_pass_begun = self.restore
        yield from super().__iter__()


def open_split(
    path: str, split: str, block_size: int, shuffle: bool, seed: int, drop_last: bool | None
) -> StreamingDataset:
    """Stream a split of a prepared folder in consecutive blocks of `block_size` tokens that do not overlap.

    Args:
        drop_last: None leaves out the last blocks only where several ranks must get the same number.
    """
    dataset = StreamingDataset(
        f"{path}/{split}",
        item_loader=TokensLoader(block_size=block_size),
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        item_shuffle_window=0,  # mix all the blocks of a chunk, not within windows of 256
    )
    if dataset.posix_fast is not None:
        # On network file systems litdata would shuffle in another way and hand out whole chunks, so
        # that the order depended on where the folder lies and a rank could be left without any.
        dataset.posix_fast = replace(dataset.posix_fast, kind="posix")
    return dataset
