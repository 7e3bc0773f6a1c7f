"""Where every output tensor will lie: files, headers and offsets, settled before any data is read.

Tensors go into files in the plan's order (layer by layer) until `shard_size` bytes are reached; one larger tensor gets
a file of its own. Inside a file the plan's order is kept where it leaves every tensor aligned; otherwise wider dtypes
come first, as the safetensors library writes them. Files are `<group>-00001-of-000NN.safetensors` with one index a group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kconv.checkpoint.headers import MAX_HEADER, PAGED, OutFile, read_header, safetensors_header
from kconv.checkpoint.reading import GROUPS, index_name
from kconv.errors import KconvError
from kconv.planning.edges import Target
from kconv.spec import BITS, Spec
from kconv.storage.direct import PAGE
from kconv.storage.files import LocalFiles


def lay_out(targets: Mapping[str, Target], shard_size: int, word: str = "") -> list[OutFile]:
    """Files that hold all targets, none over `shard_size` bytes of data unless a single tensor is; `word` is for their names."""
    files: list[OutFile] = []
    for group in GROUPS:
        shards = _shards({n: t.spec for n, t in targets.items() if t.group == group}, shard_size)
        for i, names in enumerate(shards, 1):
            name = f"{group}{word}-{i:05d}-of-{len(shards):05d}.safetensors"
            files.append(_file(name, group, {n: targets[n].spec for n in names}))
    return files


def _shards(specs: Mapping[str, Spec], shard_size: int) -> list[list[str]]:
    shards: list[list[str]] = []
    room = -1
    for name, spec in specs.items():
        if not shards or spec.nbytes > room:
            shards.append([])
            room = shard_size
        shards[-1].append(name)
        room -= spec.nbytes
    return shards


def _file(name: str, group: str, specs: Mapping[str, Spec]) -> OutFile:
    if sum(s.nbytes for s in specs.values()) >= PAGED:
        specs = {n: specs[n] for n in sorted(specs, key=lambda n: specs[n].nbytes % PAGE != 0)}
    header, starts = safetensors_header(specs)
    if any(at % max(1, BITS[specs[n].dtype] // 8) for n, at in starts.items()):
        ordered = sorted(specs, key=lambda n: -BITS[specs[n].dtype])
        header, starts = safetensors_header({n: specs[n] for n in ordered})
    if len(header) - 8 > MAX_HEADER:
        raise KconvError(
            f"{name} would have a header of {len(header) - 8:,} bytes for its {len(specs):,} tensors; no reader takes more than "
            f"{MAX_HEADER:,}",
            hint="a smaller --shard-size makes more files with fewer tensors each",
        )
    size = len(header) + sum(s.nbytes for s in specs.values())
    return OutFile(name, group, header, size, starts)


def indexes(files: list[OutFile], folder: Path) -> dict[str, bytes]:
    """Index file name -> its bytes, for every group that has files, from the headers of the files on disk."""
    on_disk = LocalFiles(folder)
    result = {}
    for group in GROUPS:
        weight_map: dict[str, str] = {}
        total = 0
        for file in (f for f in files if f.group == group):
            header, base = read_header(on_disk, file.name, on_disk.size(file.name))
            weight_map |= dict.fromkeys((n for n in header if n != "__metadata__"), file.name)
            total += file.size - base
        if weight_map:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            result[index_name(group)] = json.dumps(index, indent=2).encode() + b"\n"
    on_disk.close()
    return result
