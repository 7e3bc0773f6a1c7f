"""A draft's target: who it is and the digests that tell it from its sisters, from its index, a few headers and ranges.

Kimi K2.5, K2.6 and K2.7 have equal shapes throughout, so do K3 and its derivatives; what separates them is content.

| read | bytes on Kimi K3 |
|---|---|
| config.json, tokenizer files, index | 60 MB (the index names 497,220 tensors) |
| headers of the shards that hold the tables and the tapped layers | about 1 MB each |
| `embed_tokens`, `lm_head`, the final norm | 4.7 GB, whatever the rest of the checkpoint weighs |
| one spot of 64 KiB in two tensors of each tapped layer | 0.1 MB a layer |

On the Hub the sha256 of every weight file is in the listing, so where those are recorded no tensor needs to be read; the weight
files of a local folder are read whole unless `quick` is set.
A checkpoint that kconv converted speaks for its source: `kconv.json` holds its repository, revision and config.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kconv.checkpoint.headers import read_tensors
from kconv.checkpoint.manifest import checked
from kconv.checkpoint.reading import MANIFEST, Entry, read_json
from kconv.console import human
from kconv.errors import KconvError
from kconv.packaging import digests
from kconv.storage.files import Files, LocalFiles
from kconv.storage.known_hashes import sha256_of_files
from kconv.storage.opening import open_files
from kconv.text.canonical import json_digest

UNKNOWN = "unknown"
SHA = re.compile(r"[0-9a-f]{40}")
REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
TOKENIZER = re.compile(
    r"tokenizer\.(json|model)|tiktoken\.model|vocab\.(json|txt)|merges\.txt|tokenizer_config\.json|special_tokens_map\.json"
    r"|added_tokens\.json|spiece\.model|tokenization_\w+\.py"
)
PROMPT = re.compile(r"chat_template\.(jinja|json)|encoding_\w+\.py")
ROOT = r"(?:(?:language_model|model)\.)*"
TABLES = {kind: re.compile(rf"{ROOT}{kind}\.weight") for kind in ("embed_tokens", "lm_head", "norm")}
LAYER = re.compile(rf"{ROOT}layers\.(\d+)\.(.+)")
ALIKE = ("shared_experts.down_proj.weight", "mlp.down_proj.weight")
"""Tensors of an MLP that lie in every form of a checkpoint with the same bytes, unlike its experts."""


@dataclass
class Target:
    """A checkpoint as far as a draft depends on it; nothing is read before it is asked for."""

    files: Files
    stated_repo: str | None = None
    stated_revision: str | None = None
    headers: dict[str, dict[str, Entry]] = field(default_factory=dict)
    quick: bool = False
    quiet: bool = True

    @classmethod
    def open(cls, source: Any, *, repo: str | None = None, revision: str | None = None) -> Target:
        """The target of a folder or `hf://owner/name[@revision]`; `repo` and `revision` say what a folder is a copy of."""
        if repo is not None and not REPO.fullmatch(repo):
            raise KconvError(f"the target's repository {repo!r} is no name of the Hub", hint="write OWNER/NAME")
        if revision is not None and not SHA.fullmatch(revision):
            raise KconvError(f"the target's revision {revision!r} is no commit", hint="give the 40 hex digits: a branch moves on")
        target = cls(open_files(source), repo, revision)
        if not target.config:
            raise KconvError(f"{target.where} has no config.json", hint="give the target's checkpoint folder or hf://owner/name")
        return target

    @property
    def where(self) -> str:
        """Path or address."""
        return self.files.where

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """kconv.json of a converted checkpoint, else empty."""
        return checked(self._json(MANIFEST) or {}, f"{self.where}/{MANIFEST}")

    @cached_property
    def converted(self) -> bool:
        """Whether kconv made it from another checkpoint."""
        return bool(self.manifest.get("source", {}).get("config"))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The published config: the source's own for a converted checkpoint."""
        return self.manifest["source"]["config"] if self.converted else self._json("config.json") or {}

    @cached_property
    def text(self) -> dict[str, Any]:
        """The part of the config that describes the language model."""
        text = self.config.get("text_config")
        return text if text and isinstance(text, dict) else self.config

    @property
    def repo(self) -> str | None:
        """Its repository on the Hub, if that is known."""
        named = re.match(r"hf://([^@]+)", self.manifest.get("source", {}).get("name") or "") if self.converted else None
        cached = re.search(r"models--([^/]+)--([^/]+)/snapshots/", str(Path(self.where).absolute()))
        known = self.files.repo_id if not self.converted else named and named[1]
        return known or self.stated_repo or (f"{cached[1]}/{cached[2]}" if cached and not self.converted else None)

    @property
    def revision(self) -> str | None:
        """The commit of the repository, if that is known."""
        if self.converted:
            return self.manifest["source"].get("revision") or self.stated_revision
        cached = re.search(r"/snapshots/([0-9a-f]{40})(/|$)", str(Path(self.where).absolute()))
        return self.files.revision or self.stated_revision or (cached[1] if cached else None)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file, from the index, or from the headers where there is none."""
        index = self._json("model.safetensors.index.json")
        if index is not None:
            placed = index.get("weight_map")
            if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
                raise KconvError(f"{self.where}: its index has no weight_map", hint="fetch the target again")
            return placed
        files = [n for n in self.files.names() if n.endswith(".safetensors") and "/" not in n]
        files = ["model.safetensors"] if "model.safetensors" in files else files
        return {name: file for file in files for name in self._header(file)}

    def entry(self, name: str) -> Entry:
        """A tensor's place; raises KconvError if it is not where the index says."""
        file = self.weight_map[name]
        if name not in self._header(file):
            raise KconvError(f"{self.where}: the index names {name} in {file}, which lacks it", hint="fetch the target again")
        return self._header(file)[name]

    def table(self, kind: str) -> str | None:
        """The name of `embed_tokens`, `lm_head` or `norm` in this checkpoint; None if it has none."""
        found = [n for n in self.weight_map if TABLES[kind].fullmatch(n)]
        return found[0] if found else None

    def spots(self, layers: list[int]) -> dict[str, str]:
        """Tensor name -> `spot-1` digest: of each layer one tensor of its attention and one of its MLP or experts."""
        chosen: dict[tuple[int, bool], str] = {}
        for name in sorted(self.weight_map):
            match = LAYER.fullmatch(name)
            if match and int(match[1]) in layers and ("self_attn." in match[2] or "mlp." in match[2] or "experts." in match[2]):
                key = (int(match[1]), "self_attn." in match[2])
                if key not in chosen or match[2].endswith(("self_attn.o_proj.weight", *ALIKE)):
                    chosen[key] = name
        return {name: digests.spot_digest(self.files, self.entry(name)) for _, name in sorted(chosen.items())}

    @cached_property
    def places(self) -> dict[str, str]:
        """Layer and part of a layer, spelled the same in every form of a checkpoint -> the name of the tensor here."""
        return {spelled: name for name in self.weight_map if (spelled := place(name))}

    def named(self, name: str) -> str | None:
        """The tensor here that is called `name` in some form of this checkpoint; None if it has none, or in other bytes."""
        if name in self.weight_map:
            return name
        here = self.places.get(place(name) or "")
        fp8 = self.converted and "fp8" in stated(self)["quantization"]
        return None if here is None or (fp8 and not self.entry(here).spec.dtype.startswith("F8")) else here

    @property
    def as_published(self) -> bool:
        """Whether its tensors lie in the files in which they are published."""
        return not self.converted or self.manifest.get("to") == "hf"

    @property
    def source_hashes(self) -> dict[str, str] | None:
        """sha256 of its source's weight files, as the manifest of the conversion states them; None where it states times."""
        known = {n: sha for n, sha in (self.manifest.get("inputs") or {}).items() if n.endswith(".safetensors")}
        published = str(self.manifest.get("from", "")).startswith("hf")
        return known if published and known and all(re.fullmatch(r"[0-9a-f]{64}", str(v)) for v in known.values()) else None

    def hashes(self, pattern: re.Pattern[str]) -> dict[str, str]:
        """sha256 of the files whose name matches."""
        return {n: self._sha256(n) for n in self.files.names() if pattern.fullmatch(n)}

    @cached_property
    def weight_files(self) -> list[str]:
        """The files that hold its tensors."""
        return sorted(set(self.weight_map.values()))

    def weight_hashes(self) -> dict[str, str] | None:
        """sha256 of every weight file: as the Hub states them, or read from a local folder; None where `unread` says why."""
        if not self.as_published:
            return None if self.quick else self.source_hashes
        if isinstance(self.files, LocalFiles):
            return None if self.quick else sha256_of_files(self.files, self.weight_files, "target's weights", quiet=self.quiet)
        known = {f: self.files.sha256(f) for f in self.weight_files}
        return {f: sha for f, sha in known.items() if sha} if known and all(known.values()) else None

    @property
    def unread(self) -> str:
        """Why `weight_hashes` has none."""
        if self.quick and isinstance(self.files, LocalFiles):
            total = human(sum(self.files.size(f) for f in self.weight_files))
            return f"--quick: of {total} in {len(self.weight_files)} weight files only headers, tables and spots were read"
        return "its source was a local folder, whose files' sha256 no manifest states" if self.converted else "not stated"

    def token(self, number: int) -> str | None:
        """The string of a special token, from the tokenizer's files; None if they do not name it."""
        added = (self._json("tokenizer_config.json") or {}).get("added_tokens_decoder")
        rows = (self._json("tokenizer.json") or {}).get("added_tokens")
        found = [added.get(str(number))] if isinstance(added, dict) else []
        found += [r for r in rows if isinstance(r, dict) and r.get("id") == number] if isinstance(rows, list) else []
        said = [row.get("content") for row in found if isinstance(row, dict)]
        return next((text for text in said if isinstance(text, str)), None)

    def special_tokens(self) -> dict[int, str]:
        """Ids that mean something to the target: pad, bos, eos, media placeholders."""
        found: dict[int, str] = {}
        for config in (self.config, self.text, self._json("generation_config.json") or {}):
            for key, value in config.items():
                if key.endswith("_token_id") or key == "media_placeholder_token_id":
                    for number in value if isinstance(value, list) else [value]:
                        if isinstance(number, int):
                            found.setdefault(number, key)
        return found

    def _header(self, file: str) -> dict[str, Entry]:
        if file not in self.headers:
            try:
                tensors = read_tensors(self.files, file).tensors
            except ValueError as e:
                raise KconvError(f"{self.where}/{file}: {e}", hint="fetch the target again") from e
            self.headers[file] = {name: Entry(spec, file, start) for name, spec, start in tensors}
        return self.headers[file]

    def _json(self, name: str) -> Any:
        if name not in self.files.names():
            return None
        return read_json(self.files, name)

    def _sha256(self, name: str) -> str:
        return self.files.sha256(name) or hashlib.sha256(self.files.read(name)).hexdigest()


def place(name: str) -> str | None:
    """A tensor of a layer without what differs between the forms of a checkpoint; None for others."""
    match = LAYER.fullmatch(name)
    return f"{match[1]}.{match[2].replace('block_sparse_moe.', 'mlp.')}" if match else None


def facts(target: Target, taps: list[int] | None, *, tables: bool = True) -> dict[str, Any]:
    """The `target` part of the provenance block.

    Args:
        target: the checkpoint.
        taps: tapped layers, whose spots are digested; None when unknown.
        tables: whether to read and digest the tables; without them they are "unknown".
    """
    tokenizer, prompt, weights = target.hashes(TOKENIZER), target.hashes(PROMPT), _published_hashes(target)
    index = None if target.converted else target._json("model.safetensors.index.json")
    return {
        "repo": target.repo or UNKNOWN,
        "revision": target.revision or UNKNOWN,
        **stated(target),
        "config": {"form": "json-1", "sha256": json_digest(target.config)},
        "index": {"form": "weight-map-1", "sha256": json_digest(index["weight_map"]) if index else UNKNOWN},
        "tokenizer": {"form": "files-1", "sha256": digests.files_digest(tokenizer) if tokenizer else UNKNOWN, "files": tokenizer},
        "prompt": {"form": "files-1", "sha256": digests.files_digest(prompt) if prompt else UNKNOWN, "files": prompt},
        "weights": {"form": "files-1", "sha256": digests.files_digest(weights) if weights else UNKNOWN},
        "tensors": table_digests(target) if tables else dict.fromkeys(TABLES, UNKNOWN),
        "spots": {"form": "spot-1", "tensors": target.spots(taps) if taps else {}},
    }


def _published_hashes(target: Target) -> dict[str, str] | None:
    """sha256 of the weight files as they are published: those of a conversion are not theirs, even back in the same layout."""
    return target.source_hashes if target.converted and target.as_published else target.weight_hashes()


def stated(target: Target) -> dict[str, Any]:
    """What the target's config says in plain words, as far as a draft depends on it."""
    text, config = target.text, target.config
    return {
        "architecture": first_of(config.get("architectures")),
        "model_type": config.get("model_type") or UNKNOWN,
        "num_hidden_layers": text.get("num_hidden_layers") or UNKNOWN,
        "hidden_size": text.get("hidden_size") or UNKNOWN,
        "vocab_size": text.get("vocab_size") or UNKNOWN,
        "dtype": config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or UNKNOWN,
        "quantization": quantisation_name(config.get("quantization_config") or text.get("quantization_config")),
    }


def table_digests(target: Target) -> dict[str, Any]:
    """`rows-1` digests of the tables, "tied" for a head that is the embedding, "unknown" for one that is not there."""
    found: dict[str, Any] = {}
    for kind in TABLES:
        name = target.table(kind)
        if name:
            found[kind] = {"name": name, **digests.rows_digest(target.files, target.entry(name))}
        else:
            tied = kind == "lm_head" and (target.text.get("tie_word_embeddings") or target.config.get("tie_word_embeddings"))
            found[kind] = "tied" if tied else UNKNOWN
    return found


def first_of(names: Any) -> Any:
    """The first of a list of names, "unknown" where there is none."""
    return names[0] if isinstance(names, list) and names else UNKNOWN


def quantisation_name(block: Any) -> str:
    """One word for a `quantization_config`."""
    if not isinstance(block, dict):
        return "none"
    words = [str(block[k]) for k in ("quant_method", "format", "quant_algo") if block.get(k)]
    return " ".join(words) or UNKNOWN
