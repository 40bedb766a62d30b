"""Several prepared folders as one corpus."""

import hashlib
import json
import os
from collections.abc import Collection
from functools import cached_property
from typing import Any

from anlit.data.module import TokenShards
from anlit.data.storage.manifest import (
    CHANGES,
    TEXT_HASH,
    add_text_hashes,
    n_changed_documents,
    read_manifest,
)
from anlit.data.storage.shards import TokenArray, read_token_arrays
from anlit.errors import UserError

COUNT_KEYS = ("documents", "bytes", "tokens")
SHARED_KEYS = ("tokenizer_sha256", "vocab_size", "dtype", "end_of_document", "document_token_at")
"""Keys of the manifest that must be equal in all folders of a mixture."""


class Mixture(TokenShards):
    """Prepared folders mixed in fixed proportions, all of them made with the same tokenizer.

    `weights` belong to the names of the folders, not to their subsets. Validation reads the val
    splits of all folders in turn, so each counts by its tokens.

    Args:
        paths: name → prepared folder (or s3://, gs://, hf:// address).
    """

    def __init__(self, paths: dict[str, str], **kwargs: Any) -> None:
        if not paths:
            raise UserError("--data.paths names no folder: give at least one as name: folder")
        # In the order of their names, so that the order in a YAML file decides nothing.
        self.paths = {}
        for name, path in sorted(paths.items()):
            self.paths[name] = os.path.expanduser(path.rstrip("/"))
        super().__init__(" + ".join(self.paths.values()), **kwargs)

    @property
    def folders(self) -> list[str]:
        return list(self.paths.values())

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """One manifest for all folders, with the manifest of each under `parts`."""
        manifests = {name: read_manifest(path) for name, path in self.paths.items()}
        self._check_shared_keys(manifests)
        first_manifest = next(iter(manifests.values()))
        hashes = {name: manifest["content_sha256"] for name, manifest in manifests.items()}
        mixture = {
            **{key: first_manifest[key] for key in SHARED_KEYS},
            "corpus": " + ".join(manifest["corpus"] for manifest in manifests.values()),
            "content_sha256": hashlib.sha256(json.dumps(hashes).encode()).hexdigest(),
            **_add_counts(manifests.values(), COUNT_KEYS),
            "splits": [],
            "parts": manifests,
        }
        for split in first_manifest["splits"]:
            if not all(split in manifest["splits"] for manifest in manifests.values()):
                continue
            mixture["splits"].append(split)
            counts = [manifest[split] for manifest in manifests.values()]
            mixture[split] = _add_counts(counts, (*COUNT_KEYS, "chunks"))
            n_changed = sum(n_changed_documents(manifest, split) for manifest in manifests.values())
            mixture[split][CHANGES] = {"changed": n_changed}
            text_hash = add_text_hashes(count.get(TEXT_HASH) for count in counts)
            if text_hash is not None:
                mixture[split][TEXT_HASH] = text_hash
        return mixture

    def _check_shared_keys(self, manifests: dict[str, dict[str, Any]]) -> None:
        """Raise UserError if two folders have different tokenizers or formats."""
        first_name, *other_names = manifests
        for name in other_names:
            for key in SHARED_KEYS:
                first_value = manifests[first_name][key]
                value = manifests[name][key]
                if value != first_value:
                    raise UserError(
                        f"{self.paths[first_name]} and {self.paths[name]} differ in {key} "
                        f"({first_value} and {value}): mix only folders that were prepared with "
                        "the same tokenizer"
                    )

    @cached_property
    def token_arrays(self) -> dict[str, dict[str, list[TokenArray]]]:
        """The token arrays of each split, by the names of the folders."""
        arrays: dict[str, dict[str, list[TokenArray]]] = {}
        for split in self.manifest["splits"]:
            arrays[split] = {}
        for name, path in self.paths.items():
            arrays_by_split = read_token_arrays(path, self.manifest["parts"][name])
            for split in self.manifest["splits"]:
                arrays[split][name] = arrays_by_split[split]
        return arrays

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The identity of the mixture in a run's record, with the hash of each folder's content."""
        hashes = {}
        for name, manifest in self.manifest["parts"].items():
            hashes[name] = manifest["content_sha256"]
        return {**super().fingerprint, "parts": hashes}


def _add_counts(counts: Collection[dict[str, Any]], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the counts of all folders together. None if a folder does not know its count."""
    totals: dict[str, Any] = {}
    for key in keys:
        values = [count[key] for count in counts]
        totals[key] = None if None in values else sum(values)
    return totals
