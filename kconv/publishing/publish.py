"""`publish`: a folder to the Hub, preflighted, resumable, verified.

    kconv.publish("out/", "lab/Kimi-K3-native", private=True)
    kconv.publish("draft/", "lab/Kimi-K3-DSpark", create_pr=True, require="verified", evidence=["check.json"])

| order | why |
|---|---|
| folder (`folder_check`), evidence, hashes against the manifest | wrong contents never reach the Hub |
| token, repository, branch, the Hub's own check of the card | what it would refuse at the end it refuses now |
| batches of commits (`upload`) | an interrupted run goes on where it stopped |
| every hash of the pushed commit against the local files | what is printed as published is what is there |
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kconv.console import human
from kconv.errors import KconvError, Problems
from kconv.json_types import Result
from kconv.publishing.folder_check import MAX_FILE, Contents, examine
from kconv.publishing.hub_hashes import Hashes, HashMemory
from kconv.publishing.upload import Repository, compare, same, send
from kconv.storage.hashing import stated
from kconv.storage.hub_answers import field
from kconv.storage.hub_http import patiently
from kconv.text.printable import printable
from kconv.text.redaction import redacted


@dataclass(frozen=True, eq=False)
class Published(Result):
    """What was sent, or (`dry_run`) would be; `commit` and `url` are None where nothing was committed."""

    repo_id: str
    private: bool
    dry_run: bool
    files: int
    bytes: int
    sent_files: list[str]
    sent_bytes: int
    left_out: list[str]
    kept_on_hub: list[str]
    notes: list[str]
    verified_by: list[str]
    commit: str | None
    url: str | None
    revision: str
    pull_request: str | None


def publish(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_branch: bool = False,
    create_pr: bool = False,
    message: str | None = None,
    dry_run: bool = False,
    require: str | None = None,
    evidence: Iterable[str | Path] = (),
    ignore: Iterable[str] = (),
    allow: Collection[str] = (),
    max_file_size: int = MAX_FILE,
    card: bool = False,
    token: str | None = None,
    quiet: bool = True,
) -> Published:
    """Upload a folder to a model repository of the Hub; a second run uploads nothing.

    Args:
        folder: a converted checkpoint or a packaged draft.
        repo_id: `owner/name`; created if missing.
        private: create it private; refused if it exists and is public.
        revision: the branch, or `refs/pr/N`, to commit to (`main`).
        create_branch: create that branch from main if it is missing.
        create_pr: commit to a pull request; an unfinished one of the same message is gone on with.
        message: the commits' message.
        dry_run: check everything and say what would be sent; writes nothing.
        require: `verified` refuses a folder without passing evidence about exactly these files (`kconv.checkpoint.evidence`).
        evidence: files with the JSON of `verify`, `verify-parity` or `check`, beyond those in the folder.
        ignore: patterns to leave out, beyond what is never uploaded.
        allow: kinds of problems to accept (`kconv.publishing.folder_check.ALLOWABLE`).
        max_file_size: bytes a single file may have.
        card: write README.md from the manifest if there is none.
        token: a token to use instead of the environment's.

    Returns the JSON object of `kconv publish --json`. Raises KconvError before anything is written if the folder, the
    card, the token, the repository or the branch is not right.
    """
    tell = (lambda text: None) if quiet else (lambda text: print(f"publish: {text}", file=sys.stderr, flush=True))
    if card:
        from kconv.publishing.modelcard import write_missing_card

        written = write_missing_card(Path(folder), dry_run=dry_run)
        allow = {*allow, "no-card"} if written and dry_run else allow
    contents = examine(Path(folder), ignore=ignore, allow=allow, max_file_size=max_file_size)
    verified_by = _evidence(contents, require, evidence)
    hashes = _hashes(contents, tell)
    title = message or f"Upload {contents.folder.resolve().name} with kconv {metadata.version('kconv')}"
    repo = Repository(repo_id, title, token)
    repo.log_in()
    repo.look()
    repo.choose(revision, create_branch=create_branch, create_pr=create_pr, private=private)
    _card_accepted(repo, contents)
    there = repo.files()
    to_send = [n for n, h in hashes.items() if not same(there.get(n), h)]
    private_now, commit = bool(private or repo.private), None
    if not dry_run:
        repo.create(private)
        if create_pr and to_send:
            repo.open_pull_request()
            tell(f"pull request {repo.pull_request}")
        with _bars(not quiet):
            send(repo, to_send, contents.files, hashes, tell)
        commit = repo.head()
        compare(repo, commit, hashes)
        tell(f"{len(hashes)} files of hf://{repo.repo_id}@{commit} have the local hashes")
    return Published(
        repo_id=repo_id, private=private_now, dry_run=dry_run,
        files=len(hashes), bytes=sum(h.size for h in hashes.values()),
        sent_files=to_send, sent_bytes=sum(hashes[n].size for n in to_send),
        left_out=contents.left_out, kept_on_hub=sorted(set(there) - set(hashes) - {".gitattributes"}),
        notes=contents.notes, verified_by=verified_by, commit=commit,
        url=commit and redacted(f"{repo.api.endpoint}/{repo.repo_id}/tree/{commit}"),
        revision=repo.ref, pull_request=repo.pull_request_url,
    )  # fmt: skip


@contextlib.contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """huggingface_hub's progress bars, only where people watch."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hide = not (shown and sys.stderr.isatty()) and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()


def _hashes(contents: Contents, tell: Callable[[str], None]) -> dict[str, Hashes]:
    """Every file's hashes; raises Problems for those that are no longer what the manifest says."""
    memory = HashMemory(contents.folder)
    known = (contents.manifest or {}).get("files") or {}
    hashes, changed = {}, []
    large = lambda size: tell(f"hashing {human(size)}") if size > 1e9 else None  # noqa: E731
    for name, path in contents.files.items():
        hashes[name] = memory.of(path, reading=large)
        digest = stated(known.get(name, {}))
        if digest and digest not in hashes[name].digests.items():
            changed.append(f"{name} is not the file that kconv.json describes")
    missing = [f"{name} is in kconv.json and not in the folder" for name in known if name not in contents.files]
    if changed or missing:
        raise Problems(
            f"{contents.folder} was changed after it was made:",
            changed + missing,
            hint="convert or package again; nothing was uploaded",
        )
    return hashes


def _card_accepted(repo: Repository, contents: Contents) -> None:
    """Ask the Hub itself about the card's metadata."""
    path = contents.files.get("README.md")
    if path is None:
        return

    def ask() -> Any:
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        body = {"content": path.read_text(encoding="utf-8"), "repoType": "model"}
        url = f"{repo.api.endpoint}/api/validate-yaml"
        response = get_session().post(url, json=body, headers=build_hf_headers(token=repo.token))
        if response.status_code != 400:
            hf_raise_for_status(response)
        return response.json()

    where = "the Hub's check of README.md"
    said = patiently(ask, where)
    said = {"errors": [], **said} if isinstance(said, dict) else said
    errors = [_message(e) for e in field(said, "errors", list, where)]
    if errors:
        raise Problems("the Hub refuses the metadata of README.md:", errors, hint="nothing was uploaded")
    warnings = said.get("warnings")
    contents.notes += [f"README.md: {_message(w)}" for w in (warnings if isinstance(warnings, list) else [])]


def _message(row: Any) -> str:
    return redacted(printable(row.get("message") if isinstance(row, dict) else row))[:500]


def _evidence(contents: Contents, require: str | None, files: Iterable[str | Path]) -> list[str]:
    if require is None:
        return []
    if require != "verified":
        raise KconvError(f"--require {require} is not known", hint="--require verified")
    from kconv.checkpoint.evidence import passing

    return passing(contents.folder, [Path(f) for f in files])
