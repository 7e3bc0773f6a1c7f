"""What stands beside the weights of a converted folder, held against its source.

| file of the folder | must be |
|---|---|
| `config.json` | what the plan writes from the source's config |
| a file that the adapter rewrites (`layouts.files`) | those bytes; not there where the adapter leaves it out |
| every other side file of the source | the source's, byte for byte (of the Hub: its stated hash) |
| `kconv.json` | held against its own seal (`kconv.verification`) |
| an index | the one of its files: every tensor where it is, and their bytes together |
| `README.md`, results of `verify` and its like, where the manifest has none | not compared: written later (`publish --card`) |
| what is hidden or a leftover (`kconv.storage.safe_paths`) | not compared: no part of a checkpoint |
| anything else | nothing: it is named as added |
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kconv.checkpoint import evidence
from kconv.checkpoint.headers import read_header
from kconv.checkpoint.reading import MANIFEST, read_json
from kconv.planning.plan import Plan
from kconv.storage.files import Files, RemoteFiles
from kconv.storage.hashing import digests_of
from kconv.storage.safe_paths import is_leftover
from kconv.text.printable import printable

LATER = ("README.md", *evidence.NAMES)


def differences(files: Files, manifest: dict[str, Any], forward: Plan) -> list[str]:
    """A line for each file beside the weights that is not what it should be, is missing, or was added."""
    rewritten = [*_config(files, forward), *_indexes(files), *_rewritten(files, forward)]
    return [*rewritten, *_carried(files, forward), *_added(files, manifest)]


def _config(files: Files, forward: Plan) -> Iterator[str]:
    if "config.json" not in files.names():
        return  # the manifest names it, so it was said to be missing
    found, made = read_json(files, "config.json"), json.loads(json.dumps(forward.layouts.config))
    said, right = ({k: json.dumps(v, sort_keys=True) for k, v in config.items()} for config in (found, made))  # 1 is not true
    if said != right:
        keys = sorted(k for k in {*said, *right} if said.get(k) != right.get(k))
        yield f"config.json is not what the source's config makes: {printable(', '.join(keys[:8]))} differ"


def _indexes(files: Files) -> Iterator[str]:
    """Indexes that say more than which file holds what, which was read by them, and the bytes of these files' tensors."""
    for name in (n for n in files.names() if n.endswith(".safetensors.index.json") and "/" not in n):
        index = read_json(files, name)
        shards = sorted(set(index["weight_map"].values()))
        total = sum(files.size(s) - read_header(files, s, files.size(s))[1] for s in shards)
        if json.dumps(index) != json.dumps({"metadata": {"total_size": total}, "weight_map": index["weight_map"]}):
            yield f"{printable(name)} is not the index of its files: their tensors have {total:,} bytes together"


def _rewritten(files: Files, forward: Plan) -> Iterator[str]:
    names = set(files.names())
    for name, blob in forward.layouts.files.items():
        if blob is None and name in names:
            yield f"{printable(name)} is left out by the conversion, and is there"
        elif blob is not None and (name not in names or files.read(name) != blob):
            yield f"{printable(name)} is not what the conversion writes"


def _carried(files: Files, forward: Plan) -> Iterator[str]:
    names, source = set(files.names()), forward.source
    for name in source.other_files():
        if name in forward.layouts.files:
            continue
        if name not in names:
            yield f"{printable(name)} of the source is not there"
        elif not same(source.files, files, name):
            yield f"{printable(name)} differs from the source's"


def same(source: Files, files: Files, name: str) -> bool:
    """Whether two sets of files hold the same bytes under a name; of the Hub the stated hash counts."""
    if source.size(name) != files.size(name):
        return False
    if isinstance(source, RemoteFiles):
        return source.states(name, files)
    return digests_of(source, name, "sha256") == digests_of(files, name, "sha256")


def _added(files: Files, manifest: dict[str, Any]) -> Iterator[str]:
    known = {MANIFEST, *manifest["files"], *LATER}
    for name in files.names():
        if name not in known and not is_leftover(name):
            yield f"{printable(name)} was added: the manifest does not know it"
