"""Sending files to a repository of the Hub with huggingface_hub's own commits, so that a second run moves only what is missing.

| stage | a run that dies there leaves | the next run |
|---|---|---|
| creating the repository, branch or pull request | it, or not | finds it (a pull request by its title and author) |
| sending a batch's objects | the objects that arrived | the Hub says which it has; those are not sent again |
| the commit of a batch | the commit, or not | compares hashes with the revision, sends the rest |
| checking | everything | compares, sends nothing |

Batches are small commits, weights first and the config and index last, so that a branch never looks complete before it is.
Nothing on the Hub is deleted.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kconv.console import alive
from kconv.errors import EnvironmentLacks, KconvError, Problems
from kconv.publishing.hub_hashes import Hashes
from kconv.storage.hub import HubFile, listing
from kconv.storage.hub_answers import field, headers_for, pages
from kconv.storage.hub_http import NO_TOKEN, patiently
from kconv.text.printable import printable
from kconv.text.redaction import guard_logs, redacted

BATCH_FILES = 50
BATCH_BYTES = 20 * 1000**3
LAST = ("README.md", "config.json", "kconv.json", ".index.json")


@dataclass
class Repository:
    """Where to publish: a repository of the Hub, its refs, the ref that takes the commits, and the title they have."""

    repo_id: str
    title: str
    token: str | None = None
    exists: bool = False
    private: bool | None = None
    user: str | None = None
    ref: str = "main"
    branch_missing: bool = False
    pull_request: str | None = None

    def __post_init__(self) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import validate_repo_id

        if not re.fullmatch(r"[^/]+/[^/]+", self.repo_id):
            raise KconvError(f"{self.repo_id!r} is not a repository id", hint="write owner/name")
        try:
            validate_repo_id(self.repo_id)
        except ValueError as e:
            raise KconvError(str(e)) from e
        guard_logs()
        headers_for(self.token)  # refuses a token that is none before anything is asked
        self.api = HfApi(token=self.token)
        self.name = f"hf://{self.repo_id}"

    def log_in(self) -> None:
        """Find out whose token this is; raises EnvironmentLacks without one."""
        from huggingface_hub import get_token

        if (self.token or get_token()) is None:
            raise EnvironmentLacks(f"no token to publish to {self.repo_id} with", hint=NO_TOKEN.replace("see", "write to"))
        account = "the token's account"
        self.user = field(patiently(lambda: self.api.whoami(), account), "name", str, account)

    def look(self) -> None:
        """Learn whether the repository exists, is private, and what it has."""
        from huggingface_hub.errors import RepositoryNotFoundError

        def info() -> Any:
            try:
                return self.api.model_info(self.repo_id)
            except RepositoryNotFoundError:
                return None

        found = patiently(info, self.name)
        self.exists, self.private = found is not None, bool(found.private) if found else None

    def choose(self, revision: str | None, *, create_branch: bool, create_pr: bool, private: bool) -> None:
        """Settle where the commits go, before anything is written; raises KconvError if they cannot go there."""
        if private and self.exists and not self.private:
            raise KconvError(
                f"{self.repo_id} exists and is public, and --private was asked for",
                hint="make it private on its settings page, or leave --private out",
            )
        if create_pr and not 3 <= len(self.title.strip()) <= 200:
            raise KconvError("a pull request's title has 3 to 200 characters", hint="--message sets it")
        if create_pr and revision not in (None, "main"):
            raise KconvError("--create-pr and --revision exclude each other", hint="--revision refs/pr/N goes on with one")
        if not self.exists:
            if create_pr or revision not in (None, "main"):
                raise KconvError(f"{self.repo_id} does not exist (or the token may not see it)", hint="publish to main first")
            return
        refs = patiently(lambda: self.api.list_repo_refs(self.repo_id, include_pull_requests=True), self.name)
        branches = [b.name for b in refs.branches]
        if create_pr:
            self.pull_request = self._our_pull_request()
            self.ref = self.pull_request or "main"
            return
        self.ref = revision or "main"
        pulls = [p.ref for p in refs.pull_requests or []]
        if self.ref in branches or self.ref in pulls:
            return
        if self.ref in [t.name for t in refs.tags]:
            raise KconvError(f"{self.ref} is a tag of {self.repo_id}, and tags do not move", hint="give a branch")
        if re.fullmatch(r"[0-9a-f]{40}", self.ref):
            raise KconvError(f"{self.ref} is a commit; publishing needs a branch", hint="give a branch")
        known = ", ".join([*branches, *pulls])
        if not create_branch or self.ref.startswith("refs/"):
            hint = "check the number" if self.ref.startswith("refs/") else "--create-branch makes it, from main"
            raise KconvError(f"{self.repo_id} has no branch {self.ref}; it has {known}", hint=hint)
        self.branch_missing = True

    def create(self, private: bool) -> None:
        """Create the repository, and the branch from main, if they are missing."""
        if not self.exists:
            patiently(lambda: self.api.create_repo(self.repo_id, private=private or None, exist_ok=True), self.name)
            self.exists, self.private = True, private
        if self.branch_missing:
            patiently(lambda: self.api.create_branch(self.repo_id, branch=self.ref, exist_ok=True), self.name)
            self.branch_missing = False

    def _our_pull_request(self) -> str | None:
        """Our own open pull request of this title: one that an interrupted run left, if any."""
        found = patiently(
            lambda: list(
                self.api.get_repo_discussions(
                    self.repo_id, author=self.user, discussion_type="pull_request", discussion_status="open"
                )
            ),
            self.name,
        )
        same = [d.git_reference for d in found if d.title == self.title and d.author == self.user]
        return same[-1] if same else None

    def open_pull_request(self) -> None:
        """Go on with our open pull request of this title, or open one."""

        def attempt() -> str:
            known = self._our_pull_request()
            return known or str(self.api.create_pull_request(self.repo_id, title=self.title).git_reference)

        self.ref = self.pull_request = patiently(attempt, self.name)

    def files(self, revision: str | None = None) -> dict[str, HubFile]:
        """The files of the ref (or of a commit) by path; those of main while the ref is missing."""
        if not self.exists:
            return {}
        revision = revision or ("main" if self.branch_missing else self.ref)
        url = f"{self.api.endpoint}/api/models/{self.repo_id}/tree/{quote(revision, safe='')}?recursive=true"
        return listing(pages(url, headers_for(self.token), self.name), self.name)

    @property
    def pull_request_url(self) -> str | None:
        """The page of the pull request."""
        number = self.pull_request.rsplit("/", 1)[1] if self.pull_request else None
        return redacted(f"{self.api.endpoint}/{self.repo_id}/discussions/{number}") if number else None

    def head(self) -> str:
        """The commit the ref points to."""
        return str(patiently(lambda: self.api.model_info(self.repo_id, revision=self.ref), self.name).sha)


def same(remote: HubFile | None, local: Hashes) -> bool:
    """Whether a file of the Hub has the content of a local one."""
    if remote is None or remote.size != local.size:
        return False
    return remote.sha256 == local.sha256 if remote.sha256 else remote.git_sha1 == local.git_sha1


def batches(names: Iterable[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """The files in the order and in the commits they are sent in."""
    ordered = sorted(names, key=lambda n: (n.endswith(LAST), not n.endswith(".safetensors"), n))
    batch: list[str] = []
    for name in ordered:
        if batch and (len(batch) == BATCH_FILES or sum(sizes[n] for n in batch) + sizes[name] > BATCH_BYTES):
            yield batch
            batch = []
        batch.append(name)
    if batch:
        yield batch


def send(
    repo: Repository, names: list[str], paths: Mapping[str, Path], hashes: Mapping[str, Hashes],
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Commit files in batches; what the ref has already by the time of a repeated attempt is not sent again."""
    from huggingface_hub import CommitOperationAdd

    planned = list(batches(names, {n: hashes[n].size for n in names}))
    for number, batch in enumerate(planned, 1):
        text = repo.title if len(planned) == 1 else f"{repo.title} ({number}/{len(planned)})"
        left = list(batch)

        def attempt(left: list[str] = left, text: str = text) -> None:
            operations = []
            for name in left:
                operation = CommitOperationAdd(path_in_repo=name, path_or_fileobj=paths[name])
                with contextlib.suppress(AttributeError):  # known already; saves a second reading of the file
                    operation.upload_info.sha256 = bytes.fromhex(hashes[name].sha256)
                operations.append(operation)
            if operations:
                repo.api.create_commit(repo.repo_id, operations, commit_message=text, revision=repo.ref)

        def failed(error: Exception, left: list[str] = left) -> None:
            tell(f"interrupted ({_first_line(error)}); going on")
            there = repo.files()
            left[:] = [n for n in left if not same(there.get(n), hashes[n])]

        tell(f"commit {number} of {len(planned)}: {len(batch)} files, {sum(hashes[n].size for n in batch):,} bytes")
        with alive(f"commit {number} of {len(planned)}", tell):
            patiently(attempt, repo.name, on_wait=failed)


def _first_line(error: Exception) -> str:
    return redacted(printable((str(error).strip() or type(error).__name__).splitlines()[0]))


def compare(repo: Repository, commit: str, hashes: Mapping[str, Hashes]) -> None:
    """Hold every published file's hash against the commit; raises Problems naming those that differ."""
    there = repo.files(commit)
    wrong = [
        f"{n} is missing" if n not in there else f"{n} has another hash" for n, h in hashes.items() if not same(there.get(n), h)
    ]
    if wrong:
        raise Problems(
            f"{repo.name}@{commit} is not what was sent:", wrong, hint="run the same command again; it sends what differs"
        )
