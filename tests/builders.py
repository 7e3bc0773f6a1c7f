"""Checkpoints for tests: legal ones written by the safetensors library, illegal ones byte by byte.

| builder | makes |
|---|---|
| `small_k3()` | the golden tiny checkpoint cut to four layers: KDA dense, two KDA with experts, MLA with experts |
| `Draft.write(folder)` | its tensors in shards with an index, its config and its side files |
| `raw_shard(path, header, data)` | a file with any header at all, for what the library refuses to write |
"""

from __future__ import annotations

import copy
import functools
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parent / "data" / "golden" / "tiny-k3"
ROOT = "language_model.model."
DEPTH, EXPERTS = 4, 8


@functools.cache
def _golden() -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in sorted(GOLDEN.glob("model-*.safetensors")):
        tensors |= load_file(shard)
    return tensors


@functools.cache
def _golden_config() -> str:
    return (GOLDEN / "config.json").read_text()


@dataclass
class Draft:
    """A checkpoint in memory, to be changed and written."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    side: dict[str, bytes] = field(default_factory=dict)

    @property
    def text(self) -> dict[str, Any]:
        """The text model's config."""
        return self.config.get("text_config", self.config)

    def pop(self, *names: str) -> Draft:
        """Without these tensors."""
        for name in names:
            del self.tensors[name]
        return self

    def renamed(self, old: str, new: str) -> Draft:
        """With `old` replaced by `new` in every tensor's name."""
        self.tensors = {name.replace(old, new): tensor for name, tensor in self.tensors.items()}
        return self

    def write(self, folder: Path, shards: int = 2, *, index: bool = True) -> Path:
        """Write shards of about equally many tensors, the index, config.json and the side files; returns the folder."""
        names = sorted(self.tensors)
        files = {name: shard_name(i * shards // len(names) + 1, shards) for i, name in enumerate(names)}
        return self.write_as(folder, files, index=index)

    def write_as(self, folder: Path, files: Mapping[str, str], *, index: bool = True) -> Path:
        """The same with each tensor in the file that `files` names."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(set(files.values())):
            mine = {n: self.tensors[n].contiguous() for n, f in files.items() if f == file}
            save_file(mine, folder / file, metadata={"format": "pt"})
        if index:
            write_index(folder, files)
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, data in self.side.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder


def shard_name(i: int, n: int) -> str:
    """`model-00001-of-00002.safetensors`."""
    return f"model-{i:05d}-of-{n:05d}.safetensors"


def write_index(folder: Path, files: Mapping[str, str]) -> None:
    """The index that maps each tensor to its file."""
    index = {"metadata": {"total_size": 0}, "weight_map": dict(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(folder: Path) -> dict[str, str]:
    """The weight map of a folder's index."""
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def load_all(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every safetensors file of a folder."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def small_k3(*, vision: bool = False) -> Draft:
    """The first four layers of the golden tiny K3 with its norm, head and embedding, and its vision tensors on request."""
    keep = {
        name: tensor.clone()
        for name, tensor in _golden().items()
        if (_layer(name) < DEPTH if name.startswith("language_model.") else vision)
    }
    config = json.loads(_golden_config())
    cut(config["text_config"], DEPTH)
    return Draft(keep, config)


def smallest_k3() -> Draft:
    """The first two layers of the small K3 with one expert: for tests that plan thousands of times."""
    draft = small_k3()
    for name in [n for n in draft.tensors if _layer(n) > 1 or (".experts." in n and ".experts.0." not in n)]:
        draft.pop(name)
    for name in ("weight", "e_score_correction_bias"):
        gate = f"{ROOT}layers.1.block_sparse_moe.gate.{name}"
        draft.tensors[gate] = draft.tensors[gate][:1].clone()
    cut(draft.text, 2)
    draft.text["num_experts"] = draft.text["num_experts_per_token"] = 1
    return draft


def cut(text: dict[str, Any], depth: int) -> None:
    """Make a text config one of `depth` layers."""
    text["num_hidden_layers"] = depth
    linear = text["linear_attn_config"]
    for key in ("kda_layers", "full_attn_layers"):
        linear[key] = [i for i in linear[key] if i <= depth]


def flat_k3() -> Draft:
    """The small K3 as a text-only checkpoint: root `model.`, the text config at top level."""
    draft = small_k3().renamed("language_model.", "")
    draft.config = copy.deepcopy(draft.text)
    return draft


def dense_experts(draft: Draft) -> Draft:
    """With its experts unquantised (random bf16) instead of packed."""
    import torch

    generator = torch.Generator().manual_seed(7)
    for name in [n for n in draft.tensors if n.endswith(".weight_packed")]:
        rows, columns = draft.tensors[name].shape
        plain = torch.randn(rows, 2 * columns, generator=generator).bfloat16()
        draft.tensors[name.removesuffix("_packed")] = plain
        draft.pop(name, name.replace("_packed", "_scale"))
    draft.text.pop("quantization_config", None)
    return draft


def expert(layer: int, number: int, part: str, root: str = ROOT) -> str:
    """The name of one of an expert's tensors: `part` is for example `w1.weight_scale`."""
    return f"{root}layers.{layer}.block_sparse_moe.experts.{number}.{part}"


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else 0


def header_of(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, as JSON."""
    blob = path.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    return json.loads(blob[8 : 8 + length])


def data_of(path: Path) -> bytes:
    """The data of a safetensors file, without its header."""
    blob = path.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    return blob[8 + length :]


def raw_shard(path: Path, header: Mapping[str, Any] | bytes, data: bytes, *, length: int | None = None) -> Path:
    """A file with this header (`length` overrides the length it declares) and this data, whatever they say."""
    blob = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(blob) if length is None else length) + blob + data)
    return path


def rows(spec: Iterable[tuple[str, str, list[int], int, int]]) -> dict[str, Any]:
    """A header from (name, dtype, shape, start, end)."""
    return {n: {"dtype": d, "shape": s, "data_offsets": [a, b]} for n, d, s, a, b in spec}
