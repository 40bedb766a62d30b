"""Several prepared folders as one corpus."""

import hashlib
import json
import os
from collections.abc import Collection
from functools import cached_property
from itertools import product
from typing import Any

from anlit.data.module import TokenShards
from anlit.data.storage.manifest import CHANGES, n_changed, read_manifest
from anlit.data.storage.shards import Source, read_sources
from anlit.errors import UserError

COUNTS = ("documents", "bytes", "tokens")
MUST_AGREE = ("tokenizer_sha256", "vocab_size", "dtype", "end_of_document", "document_token_at")


class Mixture(TokenShards):
    """Prepared folders mixed in given proportions, all of them made with the same tokenizer.

    `weights` are given for the names of the folders, not of their subsets. Validation goes through every folder's val
    split, one after the other, so each counts by its tokens.

    Args:
        paths: name → prepared folder (or s3://, gs://, hf:// address).
    """

    def __init__(self, paths: dict[str, str], **kwargs: Any) -> None:
        if not paths:
            raise UserError("--data.paths names no folder: give at least one as name: folder.")
        # In the order of their names, so that the order in a YAML file decides nothing.
        self.paths = {name: os.path.expanduser(paths[name].rstrip("/")) for name in sorted(paths)}
        super().__init__(" + ".join(self.paths.values()), **kwargs)

    @property
    def folders(self) -> list[str]:
        return list(self.paths.values())

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """One manifest for all, with each folder's own under `parts`."""
        parts = {name: read_manifest(path) for name, path in self.paths.items()}
        first, *others = parts
        for other, key in product(others, MUST_AGREE):
            if parts[other][key] != parts[first][key]:
                raise UserError(
                    f"{self.paths[first]} and {self.paths[other]} differ in {key} ({parts[first][key]} and "
                    f"{parts[other][key]}): mix only folders that were prepared with the same tokenizer."
                )
        splits = [
            split
            for split in parts[first]["splits"]
            if all(split in part["splits"] for part in parts.values())
        ]
        hashes = {name: part["content_sha256"] for name, part in parts.items()}
        return {
            **{key: parts[first][key] for key in MUST_AGREE},
            "corpus": " + ".join(part["corpus"] for part in parts.values()),
            "content_sha256": hashlib.sha256(json.dumps(hashes).encode()).hexdigest(),
            **_sum(parts.values(), COUNTS),
            "splits": splits,
            **{
                split: _sum([part[split] for part in parts.values()], (*COUNTS, "chunks"))
                | {CHANGES: {"changed": sum(n_changed(part, split) for part in parts.values())}}
                for split in splits
            },
            "parts": parts,
        }

    @cached_property
    def sources(self) -> dict[str, dict[str, list[Source]]]:
        """The token arrays of each split, by the names of the folders."""
        parts = self.manifest["parts"]
        by_folder = {name: read_sources(path, parts[name]) for name, path in self.paths.items()}
        return {
            split: {name: by_folder[name][split] for name in self.paths}
            for split in self.manifest["splits"]
        }

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data in a run's record: that of the mixture, and the hash of each folder's content."""
        parts = {name: part["content_sha256"] for name, part in self.manifest["parts"].items()}
        return {**super().fingerprint, "parts": parts}


def _sum(counts: Collection[dict[str, Any]], keys: tuple[str, ...]) -> dict[str, Any]:
    """The counts of all folders together; None where one of them does not know it."""
    return {
        key: None if None in (own := [count[key] for count in counts]) else sum(own) for key in keys
    }
