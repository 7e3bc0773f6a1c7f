"""Writing a made-up checkpoint: shard by shard, tensor by tensor, under a temporary name until it is complete.

Inside a shard wider dtypes come first, then names in order, as the safetensors library writes them. A checkpoint
without values is laid out as sparse files: true headers and sizes, the data holes that read as zeros.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kconv.checkpoint.claim import claim, out_path
from kconv.checkpoint.folder import unfinished
from kconv.checkpoint.headers import OutFile, safetensors_header
from kconv.checkpoint.place import check_filled, check_place, check_room
from kconv.checkpoint.reading import index_name
from kconv.spec import BITS, Spec, spec_of
from kconv.storage.safe_paths import inside

if TYPE_CHECKING:
    from torch import Tensor

COMMAND = "kconv tiny"
SINGLE = "model.safetensors"


@dataclass
class Synthetic:
    """A checkpoint to be written: config, tensors with their files, and where their values come from (None: nowhere)."""

    config: dict[str, Any]
    specs: dict[str, Spec]
    shards: dict[str, str]
    value: Callable[[str], Tensor] | None
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())


def write_checkpoint(made: Synthetic, out: str | os.PathLike[str]) -> dict[str, Any]:
    """Write it into a new folder; returns `tensors`, `bytes` and `shards`."""
    folder = out_path(out)
    check_place(None, folder)
    files, side = _files(made), _side_files(made)
    data = made.nbytes if made.value else 0
    with claim(folder):
        check_filled(folder, overwrite=False, resume=False)
        with unfinished(folder, COMMAND, [*(f.name for f in files), *side]) as partial:
            check_room(folder, files, partial, data + sum(len(f.header) for f in files))
            for file in files:
                _write_shard(made, file, inside(partial, file.name))
            for name, blob in side.items():
                inside(partial, name).write_bytes(blob)
    return {"tensors": len(made.specs), "bytes": made.nbytes, "shards": len(files)}


def _files(made: Synthetic) -> list[OutFile]:
    by_file: dict[str, list[str]] = {}
    for name, file in made.shards.items():
        by_file.setdefault(file, []).append(name)
    files = []
    for file in sorted(by_file):
        names = sorted(by_file[file], key=lambda n: (-BITS[made.specs[n].dtype], n))
        specs = {n: made.specs[n] for n in names}
        header, starts = safetensors_header(specs)
        files.append(OutFile(file, "model", header, len(header) + sum(s.nbytes for s in specs.values()), starts))
    return files


def _write_shard(made: Synthetic, file: OutFile, path: Path) -> None:
    with open(path, "wb") as handle:
        handle.write(file.header)
        if made.value is None:
            handle.truncate(file.size)
            return
        for name in file.starts:
            handle.write(_bytes(made.value(name), name, made.specs[name]))


def _bytes(tensor: Tensor, name: str, spec: Spec) -> memoryview:
    import torch

    if spec_of(tensor) != spec:
        raise AssertionError(f"{name} was made as {spec_of(tensor)}, announced as {spec}")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _side_files(made: Synthetic) -> dict[str, bytes]:
    blobs = {**made.files, "config.json": dump_json(made.config)}
    if set(made.shards.values()) != {SINGLE}:
        index = {"metadata": {"total_size": made.nbytes}, "weight_map": dict(sorted(made.shards.items()))}
        # One entry a line; an indented dump takes seconds for half a million names.
        blobs[index_name("model")] = json.dumps(index, separators=(",\n", ": ")).encode() + b"\n"
    return blobs


def dump_json(value: Mapping[str, Any]) -> bytes:
    """JSON as the Hub's files are written."""
    return json.dumps(value, indent=2).encode() + b"\n"
