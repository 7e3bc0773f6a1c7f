"""`package`: a draft folder that loads where it should, says whose it is, and refuses what would fail in silence.

| refused | why it would not be noticed |
|---|---|
| a missing or surplus tensor | SGLang ignores surplus weights, others fill missing ones with noise |
| no `block_size`, no mask id, no taps | every runtime has another default |
| a mask id that is pad, eos or a media placeholder | it loads; acceptance drops (`--allow mask-is-...`) |
| taps beyond the target; on K3 no capture stream | it loads; the states are others |
| another vocabulary or width than the target's | some runtimes compare the draft with itself |
| a reduced vocabulary without head or maps, maps that do not fit | accepted tokens are luck |
| a head that is neither there nor the target's to lend | a random head, a healthy server |
| a runtime asked for that reads something else | `kconv.packaging.runtimes` |

Written: one config for all runtimes that read the same, one more for each that does not, weights, licence, notice, card, and
`kconv.json` with the sha256 of every file. `auto_map` is never carried over: it names code that the folder does not hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kconv.adapters.drafts import seal
from kconv.adapters.drafts.adapter import NATIVE, DraftSource, read_source
from kconv.adapters.drafts.naming import published_name
from kconv.adapters.drafts.reading import read_draft_config
from kconv.checkpoint import manifest as manifests
from kconv.checkpoint.claim import claim, out_path
from kconv.checkpoint.folder import contents, unfinished, write_file
from kconv.checkpoint.headers import safetensors_header
from kconv.checkpoint.place import check_filled, check_place
from kconv.checkpoint.reading import MANIFEST, Checkpoint, Entry, open_checkpoint
from kconv.console import human
from kconv.errors import KconvError, Problems
from kconv.json_types import Result
from kconv.packaging import check, digests, problems, provenance, runtimes
from kconv.packaging.target_model import UNKNOWN, Target, facts
from kconv.publishing import modelcard
from kconv.storage.files import LocalFiles, released
from kconv.storage.hashing import sha256_file
from kconv.storage.safe_paths import inside

COMMAND = "kconv package"
WEIGHTS, NOTICE = "model.safetensors", "NOTICE.kconv.md"
TABLES = ("drop", "keep")
PIECE = 16 << 20
CARRIED = ("LICENSE", "LICENCE", "NOTICE", "COPYING")


@dataclass
class Package:
    """A draft and its target on the way into a folder."""

    source: DraftSource
    target: Target
    facts: dict[str, Any]
    runtimes: list[runtimes.Runtime]
    origins: dict[str, str]
    entries: dict[str, Entry]
    notes: list[str] = field(default_factory=list)
    native: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Packaged(Result):
    """The folder that was written: its runtimes' files, whose draft it is, where its tables come from, its provenance block."""

    out: str
    family: str
    runtimes: dict[str, str]
    target: str
    target_revision: str
    tables: dict[str, str]
    tensors: int
    bytes: int
    notes: list[str]
    provenance: dict[str, Any]


def package(
    draft: Any, target: Any, out: str | Path, *, runtime: Sequence[str] | None = None, tables: str = "drop",
    declared: Mapping[str, Any] | None = None, allow: Collection[str] = (), training: Mapping[str, str] | None = None,
    licence: Mapping[str, str] | None = None, title: str | None = None, target_repo: str | None = None,
    target_revision: str | None = None, read_tables: bool = True, results: Sequence[str | Path] = (), overwrite: bool = False,
    quick: bool = False, quiet: bool = True,
) -> Packaged:  # fmt: skip
    """Write a publishable draft folder.

    Args:
        draft: a draft folder, published or native, or `hf://owner/name[@revision]`.
        target: exactly what it was trained on: a folder or `hf://owner/name[@revision]`.
        out: the folder to make; appears only when it is complete.
        runtime: runtimes to serve (`kconv.packaging.runtimes.RUNTIMES`); all that can read the draft by default.
        tables: what becomes of copies of the target's `embed_tokens` and `lm_head`: `drop` or `keep`.
        declared: values that the draft's config leaves open (`block_size`, `capture_stream`, ...).
        allow: `mask-is-pad`, `mask-is-eos`, `mask-is-bos`, `mask-is-media-placeholder`.
        training: `dataset`, `dataset_revision`, `trainer`, `trainer_version`.
        licence: `license`, `license_name`, `license_link` for the card; the draft's own card's by default.
        title: heading of the card.
        target_repo: what a local target folder is a copy of.
        target_revision: its commit.
        read_tables: read the target's tables for their digests (4.7 GB on Kimi K3); else they are recorded as unknown.
        results: JSON files for the card: results of `verify-parity`, or `command` and `found` (an acceptance length).
        overwrite: replace a folder that kconv made.
        quick: do not read a local target's weights in full; `check` can then never say `exact`.
        quiet: show no progress on stderr while weights are read.

    Returns the JSON object of `kconv package --json`. Raises Problems with everything that is wrong, before writing.
    """
    if tables not in TABLES:
        raise KconvError(f"tables is {tables!r}", hint=f"one of {', '.join(TABLES)}")
    provenance.check_training(training)
    folder = out_path(out)
    files, whole = check.open_draft(draft), Target.open(target, repo=target_repo, revision=target_revision)
    whole.quick, whole.quiet = quick, quiet
    check_place(files.files, folder, os.path.ismount(out), "draft")
    check_place(whole.files, folder, what="target")
    with claim(folder), released(files.files, whole.files):
        check_filled(folder, overwrite=overwrite, resume=False)
        source = read_source(files, declared)
        provenance.read(files.config, f"{files.where}/config.json")
        seal.refuse_edits(source)
        made = _examine(source, whole, runtime, set(allow), read_tables)
        _settle_tables(made, tables)
        rows = [modelcard.result_row(Path(path)) for path in results]
        with unfinished(folder, COMMAND, _names(made), overwrite=overwrite) as partial:
            block, written = _write(made, partial, training, licence or _own_licence(files), title or folder.name, rows)
    about = block["target"]
    return Packaged(
        out=str(folder), family=runtimes.family(made.native), runtimes=written, target=about["repo"],
        target_revision=about["revision"], tables=made.origins, tensors=len(made.entries),
        bytes=sum(e.spec.nbytes for e in made.entries.values()), notes=made.notes, provenance=block,
    )  # fmt: skip


def _examine(source: DraftSource, target: Target, asked: Sequence[str] | None, allow: set[str], read_tables: bool) -> Package:
    """Everything that can be wrong, at once."""
    config, found = dict(source.config), list(source.problems)
    found += problems.problems(source, target, allow)
    findings = check.Findings()
    check.shapes(config, target, findings)
    found += [f"{row['field']}: {row['recorded']} in the draft, {row['found']} in the target" for row in findings.differences]
    chosen: list[runtimes.Runtime] = []
    notes = [note for note in source.notes if "compare it with" not in note] + problems.trap_notes(source, target)
    try:
        chosen, more = runtimes.choose(config, asked, str(target.config.get("model_type")))
        notes += [f"not written for {line}" for line in more]
    except Problems as e:
        found += e.problems
    if found:
        raise Problems(
            f"{source.checkpoint.where} cannot be packaged for {target.where}:",
            list(dict.fromkeys(found)),
            hint="nothing was written",
        )
    known = facts(target, config.get("target_layer_ids"), tables=read_tables)
    return Package(source, target, known, chosen, {}, {}, notes, config)


def _settle_tables(made: Package, tables: str) -> None:
    """Which copies of the target's tables stay; compared by digest, never by name."""
    files = made.source.checkpoint
    copies = check.copied_tables(files)
    for kind in ("embed_tokens", "lm_head"):
        entry, theirs = copies.get(kind), made.facts["tensors"][kind]
        if entry is None:
            made.origins[kind] = "borrowed"
        elif isinstance(theirs, str):
            made.origins[kind] = UNKNOWN
        else:
            ours = digests.rows_digest(files.files, entry)
            made.origins[kind] = "copy" if ours["sha256"] == theirs["sha256"] else "own"
    gone = {k for k, origin in made.origins.items() if origin == "copy" and tables == "drop" and k in copies}
    for name, entry in files.entries.items():
        kind = name.removeprefix("model.").removesuffix(".weight")
        if kind in gone:
            made.notes.append(f"{name} ({human(entry.spec.nbytes)}) is the target's, byte for byte, and left out")
            made.origins[kind] = "borrowed"
            made.native[f"owns_{kind}"] = False
        else:
            made.entries[_published(made.source, name)] = entry
    for kind, origin in made.origins.items():
        if origin in ("own", UNKNOWN) and kind in copies:
            why = "differs from the target's and is kept" if origin == "own" else "could not be compared and is kept"
            made.notes.append(f"{kind} {why}")


def _native_names(made: Package) -> dict[str, str]:
    """Published name -> native name of the tensors that are written."""
    return {_published(made.source, name): native for name, native in problems.native_names(made.source).items()}


def _published(source: DraftSource, name: str) -> str:
    return published_name(name, source.traits) if source.layout == NATIVE else name


def _write(
    made: Package,
    partial: Path,
    training: Mapping[str, str] | None,
    licence: Mapping[str, str],
    title: str,
    results: Sequence[tuple[str, str]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """All files, the manifest last; the provenance block, and runtime -> config file."""
    _write_weights(made.entries, made.source.checkpoint, partial / WEIGHTS)
    weights = open_checkpoint(LocalFiles(partial / WEIGHTS))
    weights.config, weights.manifest = made.source.original or made.source.checkpoint.config, made.source.checkpoint.manifest
    block = provenance.build(
        weights,
        made.native,
        made.target,
        names=_native_names(made),
        origins=made.origins,
        training=training,
        target_facts=made.facts,
    )
    written, blocks = _write_configs(made, partial, weights, block)
    kept = _carry(made, partial, licence)
    card = modelcard.draft_card(title, block, written.items(), licence=licence, notes=[*made.notes, *kept], results=results)
    write_file(partial / "README.md", card.encode())
    write_file(partial / MANIFEST, manifests.dump(_manifest(made, partial, blocks, written)))
    return blocks["config.json"], written


def _write_configs(
    made: Package, partial: Path, weights: Checkpoint, block: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Every config file with the block sealed over it; runtime -> file, and file -> block."""
    written: dict[str, str] = {}
    blocks: dict[str, dict[str, Any]] = {}
    main: dict[str, Any] | None = None
    for runtime in sorted(made.runtimes, key=lambda r: runtimes.family(made.native) in r.own):
        config = runtimes.config_for(runtime, made.native, made.facts)
        own = main is not None and config != main
        main = config if main is None else main
        file = written[runtime.name] = f"runtimes/{runtime.name}/config.json" if own else "config.json"
        if file not in blocks:
            blocks[file] = seal.sealed(block, config, read_draft_config(config, weights.entries).config)
            write_file(inside(partial, file), _dump(config | {provenance.KEY: blocks[file]}))
    first = blocks["config.json"]["contract"]
    if other := [file for file, one in blocks.items() if one["contract"] != first]:
        raise AssertionError(f"{', '.join(other)} reads back to another draft than config.json")
    return written, blocks


def _names(made: Package) -> list[str]:
    """Every file that the folder may get."""
    configs = [f"runtimes/{runtime.name}/config.json" for runtime in made.runtimes]
    return [WEIGHTS, "config.json", *configs, *_licences(made), "LICENSE.target", NOTICE, "README.md", MANIFEST]


def _licences(made: Package) -> list[str]:
    """The draft's licences and notices, which go along."""
    names = made.source.checkpoint.files.names()
    return [n for n in names if "/" not in n and n.upper().startswith(CARRIED) and n not in ("LICENSE.target", NOTICE)]


def _write_weights(entries: Mapping[str, Entry], source: Checkpoint, path: Path) -> None:
    specs = {name: entry.spec for name, entry in entries.items()}
    header, _ = safetensors_header(specs)
    with path.open("wb") as f:
        f.write(header)
        for entry in entries.values():
            for at in range(0, entry.spec.nbytes, PIECE):
                f.write(source.files.read(entry.file, entry.start + at, min(PIECE, entry.spec.nbytes - at)))


def _carry(made: Package, partial: Path, licence: Mapping[str, str]) -> list[str]:
    """Licences and notices, byte for byte, and a notice of our own; notes on what stays behind."""
    files = made.source.checkpoint.files
    names = files.names()
    for name in _licences(made):
        write_file(inside(partial, name), files.read(name))
    theirs = [n for n in made.target.files.names() if "/" not in n and n.upper().startswith(("LICENSE", "LICENCE"))]
    copied = [k for k, origin in made.origins.items() if origin == "copy"]
    if copied and theirs:
        write_file(partial / "LICENSE.target", made.target.files.read(theirs[0]))
    write_file(partial / NOTICE, _notice(made, copied, licence).encode())
    skip = ("config.json", MANIFEST, "README.md", "generation_config.json")
    left = [n for n in names if n not in skip and not n.upper().startswith(CARRIED) and ".safetensors" not in n]
    return (
        [f"files of the source that are not carried over: {', '.join(left[:8])}{', ...' if len(left) > 8 else ''}"]
        if left
        else []
    )


def _notice(made: Package, copied: Sequence[str], licence: Mapping[str, str]) -> str:
    about = made.facts
    copies = (
        f"It contains the target's {' and '.join(copied)}, under the target's licence."
        if copied
        else "It contains no tensor of it."
    )
    where, terms = made.source.checkpoint.where, licence.get("license_name") or licence.get("license") or UNKNOWN
    shown = where if where.startswith("hf://") else Path(where).resolve().name
    return (
        f"# Notice\n\nThe weights are those of `{shown}`, licence: {terms}.\n\n"
        f"They were trained to draft for `{about['repo']}` at revision `{about['revision']}`. {copies}\n"
    )


def _manifest(
    made: Package, partial: Path, blocks: Mapping[str, Mapping[str, Any]], written: Mapping[str, str]
) -> dict[str, Any]:
    where, block = made.source.checkpoint.where, blocks["config.json"]
    sizes = contents(partial)
    return {
        "format": manifests.FORMAT,
        "kind": "draft-package",
        "draft": {
            "name": where if where.startswith("hf://") else Path(where).resolve().name,
            "revision": made.source.checkpoint.files.revision,
            "config": made.source.original or made.source.checkpoint.config,
        },
        "target": {"repo": block["target"]["repo"], "revision": block["target"]["revision"]},
        "runtimes": dict(written),
        "provenance": {file: one["seal"]["sha256"] for file, one in blocks.items()},
        "tables": made.origins,
        "files": {name: {"size": sizes[name], "sha256": sha256_file(partial / name)} for name in sorted(sizes)},
        "versions": manifests.versions(),
    }


def _own_licence(files: Checkpoint) -> dict[str, str]:
    readme = files.files.read("README.md").decode("utf-8", "replace") if "README.md" in files.files.names() else None
    found = modelcard.licence_of(readme)
    return found or {"license": UNKNOWN}


def _dump(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
