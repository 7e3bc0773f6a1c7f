"""The tensors of Kimi K3's vision tower and projector, as a table; the sizes follow from `vision_config`.

W width [1024], Q width of queries, keys and values each [1536], F width of an MLP [4096], N merged neighbours [4096],
C hidden width of the text model [7168]. Kimi K3 itself has no biases, RMS norms and the projector `patchmergerv2`; a
relative whose `vision_config` says otherwise has the tensors of K2.5's tower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kconv.errors import KconvError

Config = dict[str, Any]
SIZES = {
    "W": "vt_hidden_size", "Q": "qkv_hidden_size", "F": "vt_intermediate_size", "patch": "patch_size",
    "height": "init_pos_emb_height", "width": "init_pos_emb_width", "blocks": "vt_num_hidden_layers",
}  # fmt: skip
MERGE = "merge_kernel_size"
MOST = 1 << 31


def _biased(key: str) -> Callable[[Config], bool]:
    return lambda c: bool(c.get(key))


def _layer_norm(c: Config) -> bool:
    return c.get("norm_type", "rmsnorm") != "rmsnorm"


def _after(c: Config) -> bool:
    """Whether the projector's norm comes last."""
    return c.get("mm_projector_type", "patchmergerv2") == "patchmergerv2"


def _before(c: Config) -> bool:
    return not _after(c)


@dataclass(frozen=True)
class VisionRow:
    """Tensors of one name, of all encoder blocks where it holds `{block}`: shape in the table's symbols, and when they exist."""

    name: str
    shape: tuple[str | int, ...]
    when: Callable[[Config], bool] = field(default=lambda c: True)


_PATCH, _BLOCK = "vision_tower.patch_embed.", "vision_tower.encoder.blocks.{block}."
ROWS: tuple[VisionRow, ...] = (
    VisionRow(_PATCH + "proj.weight", ("W", 3, "patch", "patch")),
    VisionRow(_PATCH + "proj.bias", ("W",), _biased("patch_embed_proj_bias")),
    VisionRow(_PATCH + "pos_emb.weight", ("height", "width", "W")),
    VisionRow(_BLOCK + "norm0.weight", ("W",)),
    VisionRow(_BLOCK + "norm0.bias", ("W",), _layer_norm),
    VisionRow(_BLOCK + "wqkv.weight", ("3Q", "W")),
    VisionRow(_BLOCK + "wqkv.bias", ("3Q",), _biased("attn_bias")),
    VisionRow(_BLOCK + "wo.weight", ("W", "Q")),
    VisionRow(_BLOCK + "wo.bias", ("W",), _biased("attn_bias")),
    VisionRow(_BLOCK + "norm1.weight", ("W",)),
    VisionRow(_BLOCK + "norm1.bias", ("W",), _layer_norm),
    VisionRow(_BLOCK + "mlp.fc0.weight", ("F", "W")),
    VisionRow(_BLOCK + "mlp.fc0.bias", ("F",), _biased("linear_bias")),
    VisionRow(_BLOCK + "mlp.fc1.weight", ("W", "F")),
    VisionRow(_BLOCK + "mlp.fc1.bias", ("W",), _biased("linear_bias")),
    VisionRow("vision_tower.encoder.final_layernorm.weight", ("W",)),
    VisionRow("vision_tower.encoder.final_layernorm.bias", ("W",), _layer_norm),
    VisionRow("mm_projector.pre_norm.weight", ("W",), _before),
    VisionRow("mm_projector.pre_norm.bias", ("W",), _before),
    VisionRow("mm_projector.proj.0.weight", ("N", "N")),
    VisionRow("mm_projector.proj.0.bias", ("N",), _before),
    VisionRow("mm_projector.proj.2.weight", ("C", "N")),
    VisionRow("mm_projector.proj.2.bias", ("C",), _before),
    VisionRow("mm_projector.post_norm.weight", ("C",), _after),
)


def lacking(config: Config) -> list[str]:
    """Keys of `vision_config` without which no shape follows; raises KconvError for a value that is no size."""
    for key in SIZES.values():
        value = config.get(key)
        if value is not None and (type(value) is not int or not 0 < value < MOST):
            raise KconvError(f"config.json: vision_config.{key} is {value!r}, which is no size", hint="give the checkpoint's own "
                             "config.json")  # fmt: skip
    merge = config.get(MERGE)
    sides = isinstance(merge, list) and len(merge) == 2 and all(type(n) is int and 0 < n < MOST for n in merge)
    if merge is not None and not sides:
        raise KconvError(f"config.json: vision_config.{MERGE} is {merge!r}, no two numbers", hint="for example [2, 2]")
    return [key for key in (*SIZES.values(), MERGE) if config.get(key) is None]


def shapes(config: Config, hidden: int, prefix: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a tower with these sizes; `hidden` is the text model's width."""
    sizes = {symbol: config[key] for symbol, key in SIZES.items()}
    rows, columns = config[MERGE]
    sizes |= {"C": hidden, "3Q": 3 * sizes["Q"], "N": sizes["W"] * rows * columns}
    return {
        prefix + name: tuple(s if isinstance(s, int) else sizes[s] for s in row.shape)
        for row in ROWS if row.when(config) for name in _names(row, sizes["blocks"])
    }  # fmt: skip


def _names(row: VisionRow, blocks: int) -> Iterator[str]:
    if "{block}" in row.name:
        yield from (row.name.format(block=block) for block in range(blocks))
    else:
        yield row.name
