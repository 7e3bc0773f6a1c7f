"""`check`: is this draft made for exactly this target?

| verdict | meaning | exit code |
|---|---|---|
| `exact` | repository, revision, all weights of the target, the draft, its config and its seal were compared and agree | 0 |
| `same-content` | what was compared agrees, but not all of that could be (or `content` allows another repository) | 0 |
| `different` | something differs, named | 1 |
| `unknown` | shapes fit, but the draft does not say whose it is (Kimi K2.5, K2.6 and K2.7 have equal shapes) | 1 |

From the Hub the cost is headers and ranges, however large the target is: it states the sha256 of every weight file. A local
target is read whole, once: the digests of its files are remembered (`kconv.storage.known_hashes`). `quick` reads no more than
its tables and 64 KiB of some layers, and is never `exact`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kconv.adapters.drafts import seal
from kconv.adapters.drafts.adapter import DraftSource, is_draft, read_source
from kconv.checkpoint import evidence
from kconv.checkpoint.reading import Checkpoint, open_checkpoint
from kconv.errors import KconvError, Problems
from kconv.json_types import Result
from kconv.packaging import digests, provenance
from kconv.packaging.problems import native_names
from kconv.packaging.target_model import PROMPT, TABLES, TOKENIZER, UNKNOWN, Target, stated
from kconv.text.canonical import json_digest
from kconv.verification import check_files

IDENTITY = ("target.repo", "target.revision")
NEEDED = (*IDENTITY, "target.weights", "draft.weights", "draft.config", provenance.KEY)
"""What must have been compared for `exact`."""
TAKEN = ("embed_tokens.weight", "lm_head.weight")


@dataclass
class Findings:
    """What was compared, what differs, what could not be compared and why."""

    compared: list[str] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)
    not_compared: list[dict[str, str]] = field(default_factory=list)

    def hold(self, name: str, recorded: Any, found: Any, detail: str | None = None) -> bool:
        """Compare a recorded value with a found one; whether they agree."""
        if UNKNOWN in (recorded, found) or recorded is None or found is None:
            side = "recorded" if recorded in (UNKNOWN, None) else "to be found in the target"
            self.skip(name, f"not {side}")
            return True
        self.compared.append(name)
        if recorded != found:
            row = {"field": name, "recorded": recorded, "found": found}
            self.differences.append(row | ({"detail": detail} if detail else {}))
        return bool(recorded == found)

    def skip(self, name: str, why: str) -> None:
        """Note that something was not compared."""
        self.not_compared.append({"field": name, "why": why})


@dataclass(frozen=True, eq=False)
class Checked(Result):
    """Whether a draft was made for a target; `subject` ties the answer to the draft's files, None where they lie elsewhere."""

    fits: bool
    verdict: str
    draft: str
    target: str
    target_revision: str | None
    differences: list[dict[str, Any]]
    compared: list[str]
    not_compared: list[dict[str, str]]
    notes: list[str]
    subject: str | None


def check(
    draft: Any, target: Any, *, content: bool = False, tables: bool = True, target_repo: str | None = None,
    target_revision: str | None = None, declared: Mapping[str, Any] | None = None, quick: bool = False, quiet: bool = True,
) -> Checked:  # fmt: skip
    """Whether a draft was made for exactly this target.

    Args:
        draft: a draft folder or `hf://owner/name[@revision]`.
        target: the target's folder (published, or converted by kconv) or `hf://owner/name[@revision]`.
        content: accept another repository or revision if all contents agree.
        tables: read and compare the tables where needed (4.7 GB on Kimi K3).
        target_repo: what a local target folder is a copy of.
        target_revision: its commit.
        declared: values that the draft's config leaves open (`block_size`, ...).
        quick: do not read a local target's weights in full: spots and tables only, which is never `exact`.
        quiet: show no progress on stderr while weights are read.

    Returns the JSON object of `kconv check --json`. Raises KconvError for a draft or target that cannot be read.
    """
    files, whole = open_draft(draft), Target.open(target, repo=target_repo, revision=target_revision)
    whole.quick, whole.quiet = quick, quiet
    source = read_source(files, declared)
    if source.problems:
        raise Problems(f"{files.where} is not a sound draft:", source.problems)
    findings = Findings()
    shapes(source.config, whole, findings)
    block = provenance.read(files.config, f"{files.where}/config.json")
    if block is None:
        copies(files, whole, findings, tables)
        verdict = "different" if findings.differences else "unknown"
    else:
        compare(block, files, whole, findings, tables, native_names(source))
        _statements("draft", block["draft"], provenance.assumed(source.config, whole), findings)
        _own_config(block, source, findings)
        verdict = _verdict(findings, content)
    return Checked(
        fits=verdict in ("exact", "same-content"), verdict=verdict, draft=files.where, target=whole.where,
        target_revision=whole.revision, differences=findings.differences, compared=findings.compared,
        not_compared=findings.not_compared, notes=source.notes, subject=_subject(files),
    )  # fmt: skip


def open_draft(draft: Any) -> Checkpoint:
    """A draft's checkpoint; raises KconvError if it is none."""
    files = draft if isinstance(draft, Checkpoint) else open_checkpoint(draft)
    if not is_draft(files.config):
        raise KconvError(
            f"{files.where} is no draft that kconv knows: architectures {files.config.get('architectures')}",
            hint="kconv knows DFlash, DFlash2, DSpark and Eagle3 drafts, published or converted",
        )
    return files


def shapes(config: Mapping[str, Any], target: Target, findings: Findings) -> None:
    """What must fit for the draft to run at all; equal shapes prove nothing."""
    text = target.text
    hidden, depth, vocab = (text.get(k) for k in ("hidden_size", "num_hidden_layers", "vocab_size"))
    findings.hold("shape.hidden_size", config.get("target_hidden_size") or config.get("hidden_size"), hidden)
    findings.hold("shape.vocab_size", config.get("vocab_size"), vocab)
    findings.hold("shape.num_hidden_layers", config.get("target_num_hidden_layers"), depth)
    for tap in config.get("target_layer_ids") or []:
        if isinstance(depth, int) and tap >= depth:
            row = {"field": "shape.taps", "recorded": tap, "found": depth, "detail": f"layer {tap} of {depth} (0..{depth - 1})"}
            findings.differences.append(row)


def copies(files: Checkpoint, target: Target, findings: Findings, tables: bool) -> None:
    """Hold a draft's copies of the target's tables against them: all that a draft without provenance can show."""
    for kind, entry in copied_tables(files).items():
        name = target.table(kind)
        if name is None or not tables:
            findings.skip(f"copy of {kind}", "the target has none" if tables else "--no-tables")
            continue
        ours, theirs = digests.rows_digest(files.files, entry), digests.rows_digest(target.files, target.entry(name))
        detail = _runs(ours, theirs)
        findings.hold(f"copy of {kind}", ours["sha256"], theirs["sha256"], detail)


def copied_tables(files: Checkpoint) -> dict[str, Any]:
    """`embed_tokens`, `lm_head` -> their places in a draft's files, if they are there."""
    found = {}
    for name, entry in files.entries.items():
        bare = name.removeprefix("model.")
        if bare in TAKEN:
            found[bare.split(".")[0]] = entry
    return found


def compare(
    block: Mapping[str, Any], files: Checkpoint, target: Target, findings: Findings, tables: bool, names: Mapping[str, str]
) -> None:
    """Hold everything a provenance block records against the target."""
    recorded = block["target"]
    findings.hold("target.repo", recorded["repo"], target.repo)
    findings.hold("target.revision", recorded["revision"], target.revision)
    _statements("target", recorded, stated(target), findings)
    findings.hold("target.config", recorded["config"]["sha256"], json_digest(target.config))
    for part, pattern in (("tokenizer", TOKENIZER), ("prompt", PROMPT)):
        _files(f"target.{part}", recorded[part], target.hashes(pattern), findings)
    if target.converted:
        _conversion(target, findings)
    index = recorded["index"]["sha256"]
    moved = target.converted and index != json_digest(target.weight_map)
    if moved:
        findings.skip("target.index", "the target was converted: its files are others")
    else:
        findings.hold("target.index", index, json_digest(target.weight_map) if index != UNKNOWN else None)
    if moved and target.as_published:
        findings.skip("target.weights", "the target was converted: its files are others")
    elif _weights(recorded["weights"]["sha256"], target, findings) and not target.converted:
        tables = False
    _spots(recorded["spots"]["tensors"], target, findings)
    _tables(recorded["tensors"], target, findings, tables)
    _draft_weights(block["draft"]["weights"], files, findings, names)


def _conversion(target: Target, findings: Findings) -> None:
    """The files of a converted target against the digests that its manifest states."""
    wrong = check_files(target.files, target.manifest, weights=not target.quick)
    findings.compared.append("target.conversion")
    findings.differences += [
        {"field": "target.conversion", "recorded": "as kconv.json states", "found": line, "detail": None} for line in wrong
    ]


def _weights(recorded: str, target: Target, findings: Findings) -> bool:
    """All weight files of the target; whether they are proven to be the recorded ones."""
    if recorded == UNKNOWN:
        findings.skip("target.weights", "not recorded: packaged with --quick, or by an earlier kconv")
        return False
    found = target.weight_hashes()
    if found is None:
        findings.skip("target.weights", target.unread)
        return False
    return findings.hold("target.weights", recorded, digests.files_digest(found))


def _own_config(block: Mapping[str, Any], source: DraftSource, findings: Findings) -> None:
    """The draft's config and the block, against what was sealed when it was packaged."""
    findings.differences += seal.edits(block, source)
    if "seal" not in block:
        for part in ("draft.config", provenance.KEY):
            findings.skip(part, f"format {block['format']} records no digest of it; `kconv package` writes format 2")
        return
    findings.compared += ["draft.config", provenance.KEY]


def _statements(where: str, recorded: Mapping[str, Any], found: Mapping[str, Any], findings: Findings) -> None:
    """Hold what a block says in plain words against what the configs say, value by value."""
    for key, value in found.items():
        name, was = f"{where}.{key}", recorded.get(key)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            _statements(name, was, value, findings)
        else:
            findings.hold(name, was, value)


def _draft_weights(recorded: Mapping[str, Any], files: Checkpoint, findings: Findings, names: Mapping[str, str]) -> None:
    """By the files' sha256 where the Hub states them, else by reading the draft."""
    known = {shard: files.files.sha256(shard) for shard in files.shards}
    if known and known == recorded["files"]:
        findings.compared.append("draft.weights")
    else:
        findings.hold("draft.weights", recorded["sha256"], digests.tensors_digest(files, names))


def _files(name: str, recorded: Mapping[str, Any], found: dict[str, str], findings: Findings) -> None:
    if recorded["sha256"] == UNKNOWN and not found:
        findings.skip(name, "neither recorded nor there")
        return
    was = recorded["files"]
    changed = sorted(n for n in was.keys() | found.keys() if was.get(n) != found.get(n))
    detail = ", ".join(f"{n} {'differs' if n in was and n in found else 'is missing' if n in was else 'is new'}" for n in changed)
    findings.hold(name, digests.files_digest(was), digests.files_digest(found), detail)


def _spots(recorded: Mapping[str, str], target: Target, findings: Findings) -> None:
    if not recorded:
        findings.skip("target.spots", "not recorded")
    for name, digest in recorded.items():
        here = target.named(name)
        if here is None:
            findings.skip(f"target.spots {name}", "the target has no tensor of that name, or in another form")
        else:
            findings.hold(f"target.spots {name}", digest, digests.spot_digest(target.files, target.entry(here)))


def _tables(recorded: Mapping[str, Any], target: Target, findings: Findings, wanted: bool) -> None:
    for kind in TABLES:
        was, name = recorded[kind], target.table(kind)
        if isinstance(was, str) or name is None:
            if was == "tied" and name is not None:
                findings.hold(f"target.tensors.{kind}", "tied", name)
            else:
                findings.skip(
                    f"target.tensors.{kind}", f"recorded: {was if isinstance(was, str) else 'yes'}, target: {name or 'none'}"
                )
        elif not wanted:
            proven = "target.weights" in findings.compared
            findings.skip(f"target.tensors.{kind}", "proven by the weight files' sha256" if proven else "--no-tables")
        else:
            found = digests.rows_digest(target.files, target.entry(name))
            findings.hold(f"target.tensors.{kind}", was["sha256"], found["sha256"], _runs(was, found))


def _runs(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """In which rows two tables differ, in words."""
    if (a["dtype"], a["shape"]) != (b["dtype"], b["shape"]):
        return f"{a['dtype']} {a['shape']} and {b['dtype']} {b['shape']}"
    runs = digests.differing_runs(a["runs"], b["runs"], a["shape"][0])
    where = "everywhere" if len(runs) == len(a["runs"]) else f"in rows {', '.join(runs)}"
    return f"they differ {where}" if runs else None


def _verdict(findings: Findings, content: bool) -> str:
    fields = {row["field"] for row in findings.differences}
    if fields - set(IDENTITY) or (fields and not content):
        return "different"
    return "exact" if not fields and set(NEEDED) <= set(findings.compared) else "same-content"


def _subject(files: Checkpoint) -> str | None:
    root = files.files.root
    return evidence.subject(root) if root is not None else None


def lines(result: Checked) -> list[str]:
    """What a person reads of a result."""
    said = {
        "exact": "this draft was made for exactly this target",
        "same-content": "everything recorded agrees with this target",
        "different": "this draft was made for another target",
        "unknown": "this draft does not say whose it is; `kconv package` records it",
    }
    out = []
    for row in result.differences:
        recorded, found = (str(row[k])[:16] + "..." if len(str(row[k])) > 48 else row[k] for k in ("recorded", "found"))
        out.append(f"{row['field']}: recorded {recorded}, found {found}" + (f" ({row['detail']})" if row.get("detail") else ""))
    out += [f"not compared: {row['field']} ({row['why']})" for row in result.not_compared]
    return [*out, f"{result['verdict']}: {said[result['verdict']]} ({len(result['compared'])} fields compared)"]
