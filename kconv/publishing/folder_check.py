"""Is a folder fit to be published? Everything that can be known without the Hub, all problems at once.

| checked | refused | said only |
|---|---|---|
| weights | broken index, damaged or truncated shard, none at all, left from an unfinished conversion | pickles |
| card | README.md missing, or metadata that the Hub refuses (`card_rules`) | no LICENSE file |
| sizes | a file over the limit (decimal GB), over 100,000 files, over 10,000 in a folder | |
| secrets | tokens and private keys in text files (the line is named, the secret is not shown) | |
| code | `auto_map` naming a file that is not there | an import that Transformers 5 removed |
| tokenizer | none, in a checkpoint that is not a draft | two different chat templates |
| names | broken links | links out of the folder, names that differ only in case |
| never uploaded | | caches, temporary, partial and lock files, logs, environments, `.git` |

`allow` turns a refusal of one kind into a note; the kinds are in `ALLOWABLE`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kconv.console import human
from kconv.errors import KconvError, Problems
from kconv.publishing import modelcard_rules
from kconv.storage import json_text
from kconv.storage.safe_paths import LEFTOVERS, is_left_out

MAX_FILE = 50 * 1000**3
MAX_FILES, MAX_ENTRIES = 100_000, 10_000
SCAN_LIMIT = 5 * 1000**2
ALLOWABLE = ("no-tokenizer", "no-card", "no-weights", "secrets", "missing-code", "license")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "spiece.model")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
SECRETS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}\b",
    "an API key": r"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{32,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{50,})",
    "a GitLab token": r"\bglpat-[\w-]{20,}",
    "an AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a Slack token": r"\bxox[abprs]-[\w-]{10,}",
    "a private key": r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----",
}
REMOVED_IMPORTS = {
    r"transformers\.models\.gpt2\.tokenization_gpt2 import .*\bbytes_to_unicode": "transformers.convert_slow_tokenizer",
}


@dataclass
class Contents:
    """What a folder would publish: files by their path in the repository, what stays behind, what was noticed."""

    folder: Path
    files: dict[str, Path] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all files that would be published."""
        return sum(p.stat().st_size for p in self.files.values())

    @property
    def is_draft(self) -> bool:
        """Whether the folder holds a draft, by its config."""
        from kconv.adapters.drafts.dialects import dialect_of

        kinds = ("target_layer_ids", "dflash_config", "kconv_provenance")
        return any(k in self.config for k in kinds) or dialect_of(self.config) is not None

    def refuse(self, kind: str, message: str) -> None:
        """Note a problem; `kind` is one of ALLOWABLE or empty."""
        self.problems.append((kind, message))


def examine(folder: Path, *, ignore: Iterable[str] = (), allow: Collection[str] = (), max_file_size: int = MAX_FILE) -> Contents:
    """The contents of a folder to publish.

    Args:
        folder: a checkpoint or draft folder.
        ignore: patterns to leave out beyond `LEFTOVERS`, matched against the path and every part of it.
        allow: kinds of problems (of `ALLOWABLE`) that become notes.
        max_file_size: bytes one file may have.

    Raises `Problems` with everything that keeps the folder from being published.
    """
    if not folder.is_dir():
        raise KconvError(f"{folder} is not a folder", hint="give the folder that `kconv convert` or `kconv package` made")
    unknown = set(allow) - set(ALLOWABLE)
    if unknown:
        raise KconvError(f"nothing called {', '.join(sorted(unknown))} can be allowed", hint=f"one of {', '.join(ALLOWABLE)}")
    contents = Contents(folder)
    _collect(contents, tuple(ignore))
    contents.config = _json(contents, "config.json")
    contents.manifest = _json(contents, "kconv.json") or None
    _sizes(contents, max_file_size)
    for check in (_card, _code, _tokenizer, _secrets, _weights):
        check(contents)
    contents.notes += [f"allowed: {message}" for kind, message in contents.problems if kind in allow]
    refused = [message for kind, message in contents.problems if kind not in allow]
    if refused:
        kinds = sorted({kind for kind, _ in contents.problems if kind and kind not in allow})
        hint = "nothing was uploaded; mend them" + (f", or accept with --allow {' --allow '.join(kinds)}" if kinds else "")
        raise Problems(f"{folder} is not fit to be published:", refused, hint=hint)
    return contents


def _collect(contents: Contents, ignore: tuple[str, ...]) -> None:
    root = contents.folder.resolve()
    for path in sorted(contents.folder.rglob("*")):
        name = path.relative_to(contents.folder).as_posix()
        if path.is_symlink() and not path.exists():
            contents.refuse("", f"{name} is a broken link")
        if not path.is_file():
            continue
        if is_left_out(name, (*LEFTOVERS, *ignore)):
            contents.left_out.append(name)
            continue
        contents.files[name] = path
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            contents.notes.append(f"{name} is a link out of the folder; what it points to is uploaded")
    twins = [n for n, count in Counter(n.lower() for n in contents.files).items() if count > 1]
    contents.notes += [f"{n}: several names that differ only in case" for n in twins]


def _json(contents: Contents, name: str) -> dict[str, Any]:
    if name not in contents.files:
        return {}
    try:
        return json_text.read_path(contents.files[name], "the file", hint="write it again")
    except KconvError as e:
        contents.refuse("", e.message)
        return {}


def _sizes(contents: Contents, limit: int) -> None:
    for name, path in contents.files.items():
        size = path.stat().st_size
        if size > limit:
            contents.refuse(
                "",
                f"{name} has {human(size)} ({size:,} bytes), over the limit of {human(limit)} a file: "
                "convert again with a smaller --shard-size, or raise --max-file-size if your account may hold more",
            )
    if len(contents.files) > MAX_FILES:
        contents.refuse("", f"{len(contents.files):,} files; a repository should stay below {MAX_FILES:,}")
    entries = Counter(name.rpartition("/")[0] for name in contents.files)
    for parent, count in entries.items():
        if count > MAX_ENTRIES:
            contents.refuse("", f"{count:,} entries in {parent or 'the top folder'}; the Hub takes {MAX_ENTRIES:,}")


def _card(contents: Contents) -> None:
    licence = [n for n in contents.files if n.upper().startswith(("LICENSE", "LICENCE"))]
    if not licence:
        contents.notes.append("no LICENSE file")
    if "README.md" not in contents.files:
        contents.refuse("no-card", "README.md (the model card) is missing; --card writes one")
        return
    text = contents.files["README.md"].read_text(encoding="utf-8", errors="replace")
    for line in modelcard_rules.problems(text, has_license_file=bool(licence)):
        contents.refuse("license" if "is not an identifier of the Hub" in line else "", line)


def _code(contents: Contents) -> None:
    for holder in ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        auto_map = _json(contents, holder).get("auto_map") if holder in contents.files else None
        for entry in _flat(auto_map):
            module = f"{entry.rpartition('.')[0].replace('.', '/')}.py"
            if "--" not in entry and module not in contents.files:
                contents.refuse("missing-code", f"{holder}: auto_map names {entry}, but there is no {module}")
    for name, path in contents.files.items():
        if name.endswith(".py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            for pattern, instead in REMOVED_IMPORTS.items():
                if re.search(pattern, text):
                    contents.notes.append(f"{name}: Transformers 5 removed an import it uses; it is in {instead} now")


def _flat(auto_map: Any) -> list[str]:
    values = auto_map.values() if isinstance(auto_map, dict) else []
    listed = [v for value in values for v in (value if isinstance(value, list) else [value])]
    return [v for v in listed if isinstance(v, str)]


def _tokenizer(contents: Contents) -> None:
    if not any(name in contents.files for name in TOKENIZERS):
        if contents.is_draft:
            contents.notes.append("no tokenizer files: the draft uses its target's")
        else:
            contents.refuse("no-tokenizer", f"no tokenizer: none of {', '.join(TOKENIZERS)} is there")
    inside = _json(contents, "tokenizer_config.json").get("chat_template")
    beside = contents.files.get("chat_template.jinja")
    if isinstance(inside, str) and beside and beside.read_text(encoding="utf-8") != inside:
        contents.notes.append("two different templates: chat_template.jinja and tokenizer_config.json's chat_template")


def _secrets(contents: Contents) -> None:
    patterns = {what: re.compile(pattern) for what, pattern in SECRETS.items()}
    for name, path in contents.files.items():
        if name.endswith((".safetensors", ".gguf", *PICKLES)) or path.stat().st_size > SCAN_LIMIT:
            continue
        text = path.read_bytes().decode("latin-1")
        for what, pattern in patterns.items():
            if match := pattern.search(text):
                line = text.count("\n", 0, match.start()) + 1
                contents.refuse("secrets", f"{name} line {line} looks like {what}: remove and revoke it")


def _weights(contents: Contents) -> None:
    from kconv.checkpoint.reading import open_checkpoint

    pickles = [n for n in contents.files if n.endswith(PICKLES)]
    if pickles:
        contents.notes.append(f"pickle files, which others will not open: {', '.join(pickles[:4])}")
    if any(name.startswith(".kconv-journal") for name in contents.left_out):
        contents.refuse("", "a conversion journal lies in it: the conversion did not finish; go on with --resume")
    if not any(name.endswith(".safetensors") for name in contents.files):
        contents.refuse("no-weights", "no .safetensors file")
        return
    if not contents.config:
        contents.refuse("", "no config.json beside the weights")
    try:
        contents.notes += open_checkpoint(contents.folder).notes
    except Problems as e:
        for problem in e.problems:
            contents.refuse("", problem)
    except KconvError as e:
        contents.refuse("", e.message)
