"""Corpora and tokenizers on the Hugging Face hub: listed and fetched, at one commit."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import cached_assets_path, constants, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError

from anlit.data.preparation.files import SourceFile
from anlit.data.preparation.hub_requests import HubRepository
from anlit.data.preparation.sources import Listing, Source, natural
from anlit.data.storage.names import checked_path, path_inside
from anlit.errors import UserError

COMMIT = re.compile(r"[0-9a-f]{40}")


class HubFiles(HubRepository, Source):
    """Files of a dataset repository at one commit, fetched one by one and removed when their tokens are written.

    Args:
        repo_id: "owner/name".
        revision: branch, tag or commit; what a branch stands for is looked up once.
        patterns: globs of the wanted files: `*` stays within a folder, `**` does not.
        endpoint: address of the hub; None means https://huggingface.co or what HF_ENDPOINT says.
    """

    kind = "dataset"
    alternative = "prepare from a local copy with --source DIR"

    def __init__(
        self, repo_id: str, revision: str = "main", patterns: Sequence[str] = ("**",), endpoint: str | None = None
    ) -> None:
        super().__init__(repo_id, revision, endpoint)
        self.patterns = patterns
        self._commit: str | None = revision if COMMIT.fullmatch(revision) else None

    @property
    def commit(self) -> str:
        """The 40 hex digits of the revision.

        Raises:
            UserError: the hub, the repository or the revision cannot be reached.
        """
        if self._commit is None:
            content, _ = self.read_json(self.api(f"revision/{quote(self.revision, safe='')}"))
            commit = content.get("sha") if isinstance(content, dict) else None
            if not (isinstance(commit, str) and COMMIT.fullmatch(commit)):
                raise self.foreign_answer()
            self._commit = commit
        return self._commit

    def pinned(self) -> dict[str, Any]:
        return {"commit": self.commit}

    def pin(self, pinned: dict[str, Any]) -> None:
        self._commit = pinned["commit"]

    def settings(self) -> dict[str, Any]:
        return {"repository": self.repo_id, "revision": self.revision}

    def listing(self) -> Listing:
        found = {}
        for folder in sorted({_fixed_folder(pattern) for pattern in self.patterns}):
            for entry in self._tree(folder):
                checked_path(entry["path"], f"The hub's listing of {self.repo_id}")
                if entry["type"] == "file" and matches(entry["path"], self.patterns):
                    sha256 = (entry.get("lfs") or {}).get("oid")  # small files are in git itself and have none
                    found[entry["path"]] = SourceFile(entry["path"], entry["size"], sha256)
        if not found:
            raise UserError(
                f"The dataset {self.repo_id} has no file that matches {' or '.join(self.patterns)} in its revision "
                f"{self.revision}: set --revision to one that has, or {self.alternative}."
            )
        return Listing([found[name] for name in sorted(found, key=natural)])

    def provide(self, file: SourceFile, folder: Path) -> Path:
        """The file in `folder`, where it may already be; what an earlier attempt left is continued.

        Raises:
            UserError: the hub cannot be reached, the file is not there, or it keeps arriving damaged.
            OSError: `folder` cannot be written to.
        """
        try:
            return self.fetch_file(
                self.file_url(file.name, self.commit), self._place(file, folder), file.size, file.sha256
            )
        except EntryNotFoundError as error:
            raise UserError(
                f"The dataset {self.repo_id} has no file {file.name} in {self.commit}: {self.alternative}."
            ) from error

    def release(self, file: SourceFile, folder: Path) -> None:
        self._place(file, folder).unlink(missing_ok=True)

    def _place(self, file: SourceFile, folder: Path) -> Path:
        return path_inside(folder / self.commit, checked_path(file.name, "The plan"))

    def _tree(self, folder: str) -> Iterator[dict[str, Any]]:
        """The entries of a folder and the folders below."""
        path = f"tree/{self.commit}" + (f"/{quote(folder, safe='')}" if folder else "")
        url: str | None = self.api(f"{path}?recursive=true&expand=false")
        while url is not None:
            entries, url = self.read_json(url)
            yield from entries


def fetch_tokenizer(repo_id: str, endpoint: str | None = None) -> Path:
    """tokenizer.json of a model repository: from huggingface_hub's cache, or fetched into its folder for assets.

    Raises:
        UserError: it is not there and cannot be fetched.
        OSError: the folder cannot be written to.
    """
    name = "tokenizer.json"
    cached = try_to_load_from_cache(repo_id, name, cache_dir=constants.HF_HUB_CACHE)
    if isinstance(cached, str):
        return Path(cached)
    folder = cached_assets_path("anlit", repo_id, "tokenizer", assets_dir=constants.HF_ASSETS_CACHE)
    model = HubRepository(repo_id, endpoint=endpoint)
    try:
        return model.fetch_file(model.file_url(name, model.revision), folder / name, None, None)
    except EntryNotFoundError as error:
        raise UserError(f"The model {repo_id} has no file {name}: {model.alternative}.") from error


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a path matches a glob: `*` and `?` stay within a folder, `**` does not and may stand for none."""
    return any(re.fullmatch(_regex(pattern), name) for pattern in patterns)


def _regex(pattern: str) -> str:
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(wild.get(part) or re.escape(part) for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern))


def _fixed_folder(pattern: str) -> str:
    """The folder that all of a pattern's files are in."""
    folders = pattern.split("/")[:-1]
    wild = next((number for number, folder in enumerate(folders) if set(folder) & set("*?")), len(folders))
    return "/".join(folders[:wild])
