"""Kimi K3 and Kimi-Linear as published: names and shapes from the adapter's table, shards by layer, values by name.

| tensor | dtype |
|---|---|
| the table's fp32 rows | F32 in Kimi K3; in Kimi-Linear only `A_log` and `dt_bias` are |
| `A_log` | padded with exact zeros to a multiple of 128 (Kimi K3), [1,1,H,1] (Kimi-Linear), or [H] |
| routed experts | MXFP4: `weight_packed` U8, two codes a byte, and `weight_scale` U8, one exponent per 32; or plain |

Kimi K3 has layer l in shard l+1, then head, embedding and final norms, the projector, the vision tower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kconv.adapters.k3.source import ROOTS, Side
from kconv.adapters.k3.table import EXPERTS, k3_table
from kconv.adapters.tables.rows import Row, Table
from kconv.spec import Spec, dtype_name
from kconv.synthesis.configs import generation_config, k3_config, k3_text_config, linear_config, tokenizer_files
from kconv.synthesis.family import Family
from kconv.synthesis.shapes import GROUP, K3Shape, LinearShape, TextShape
from kconv.synthesis.writing import Synthetic

if TYPE_CHECKING:
    from torch import Tensor

PAD = 128  # published A_log vectors are padded to a multiple of it
PATCH = 14
LINEAR_FP32 = ("A_log", "dt_bias")


@dataclass(frozen=True)
class Piece:
    """One tensor: its spec, the layer it belongs to (None: none), and the name that decides its values in every naming."""

    name: str
    spec: Spec
    layer: int | None
    key: str
    kind: str = "weights"


def make_k3(shape: K3Shape, seed: int) -> Synthetic:
    """A Kimi K3 checkpoint."""
    shape.check()
    return k3_like(shape, k3_table(k3_text_config(shape)), k3_config(shape), seed)


def k3_like(shape: K3Shape, layout: Table, config: dict[str, Any], seed: int) -> Synthetic:
    """A checkpoint in Kimi K3's shards, of a layout's tensors and the vision tower."""
    text = _Text(shape, layout, all_fp32=True)
    pieces = [*text.pieces(), *(vision(shape) if _sees(shape) else ())]
    return _synthetic(shape, config, pieces, _published_shards(shape, pieces), seed)


def frame_k3(shape: K3Shape) -> Synthetic:
    """Kimi K3's config and generation config, without tensors."""
    shape.check()
    return Synthetic(k3_config(shape), {}, {}, None, generation_config(shape))


def make_linear(shape: LinearShape, seed: int) -> Synthetic:
    """A Kimi-Linear checkpoint."""
    shape.check()
    config = linear_config(shape)
    pieces = list(_Text(shape, k3_table(config), all_fp32=False).pieces())
    return _synthetic(shape, config, pieces, _filled_shards(shape, pieces), seed)


def _synthetic(shape: TextShape, config: dict[str, Any], pieces: list[Piece], files: list[str], seed: int) -> Synthetic:
    by_name = {p.name: p for p in pieces}

    def value(name: str) -> Tensor:
        from kconv.synthesis import values

        piece = by_name[name]
        if piece.kind == "weights":
            return values.weights(piece.key, piece.spec, seed, calm=shape.calm)
        if piece.kind == "decay":
            return values.decay_logs(piece.key, piece.spec, shape.kda_heads, seed)
        draw: Callable[[str, Spec, int], Tensor] = getattr(values, f"mxfp4_{piece.kind}")
        return draw(piece.key, piece.spec, seed)

    shards = {p.name: f for p, f in zip(pieces, files, strict=True)}
    return Synthetic(config, {p.name: p.spec for p in pieces}, shards, value, generation_config(shape) | tokenizer_files(shape))


@dataclass
class _Text:
    """The text model's tensors under one naming."""

    shape: TextShape
    layout: Table
    all_fp32: bool

    def pieces(self) -> Iterator[Piece]:
        """Every tensor of the text model."""
        heads = dict(ROOTS)
        side = Side("hf", self.shape.root, heads[self.shape.root], self.shape.dotted_res)
        counts = self.shape.counts()
        for row in self.layout.rows():
            for layer in self.layout.kinds.get(row.kind, (None,)):
                override = {"E": counts[layer]} if layer is not None and "E" in row.shape else {}
                spec = self._spec(row, override)
                kind = "decay" if row.name.endswith("A_log") else "weights"
                key = row.name if layer is None else f"layers.{layer}.{row.name}"
                if self.shape.tied and row.name.startswith("embed_tokens"):
                    key = "lm_head.weight"  # drawn as what it also is, or logits grow with the root of the width
                yield Piece(side.name_of(row).format_map({"layer": layer}), spec, layer, key, kind)
        for layer, count in counts.items():
            for expert in range(count):
                base = f"layers.{layer}.{side.moe}experts.{expert}."
                yield from self._expert(side.root + base, f"layers.{layer}.mlp.experts.{expert}.", layer)

    def _spec(self, row: Row, override: dict[str, int]) -> Spec:
        fp32 = row.fp32 if self.all_fp32 else row.name.endswith(LINEAR_FP32)
        dtype = "F32" if fp32 else dtype_name(self.shape.dtype)
        if not row.name.endswith("A_log"):
            return Spec(dtype, self.layout.shape(row.shape, **override))
        heads = self.shape.kda_heads
        forms = {"padded": (-(-heads // PAD) * PAD,), "heads": (heads,), "broadcast": (1, 1, heads, 1)}
        return Spec(dtype, forms[self.shape.a_log])

    def _expert(self, base: str, key: str, layer: int) -> Iterator[Piece]:
        for part, symbols in EXPERTS.items():
            rows, columns = self.layout.shape(symbols)
            if self.shape.plain_experts:
                plain = Spec(dtype_name(self.shape.dtype), (rows, columns))
                yield Piece(f"{base}{part}.weight", plain, layer, key + part)
                continue
            yield Piece(f"{base}{part}.weight_packed", Spec("U8", (rows, columns // 2)), layer, key + part, "codes")
            yield Piece(f"{base}{part}.weight_scale", Spec("U8", (rows, columns // GROUP)), layer, key + part, "scales")


def _sees(shape: K3Shape) -> bool:
    """Whether there is a vision tower; a text-only root has none."""
    return shape.vision and shape.root != "model."


def vision(shape: K3Shape) -> Iterator[Piece]:
    """Vision tower and projector: patches of 14 pixels in three colours, neighbours merged two by two before the projector."""
    width, qkv, mlp, merged = shape.vision_hidden, shape.vision_qkv, shape.vision_width, 4 * shape.vision_hidden
    block = {
        "norm0.weight": (width,), "wqkv.weight": (3 * qkv, width), "wo.weight": (width, qkv), "norm1.weight": (width,),
        "mlp.fc0.weight": (mlp, width), "mlp.fc1.weight": (width, mlp),
    }  # fmt: skip
    tensors: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (width, 3, PATCH, PATCH),
        "vision_tower.patch_embed.pos_emb.weight": (shape.vision_grid, shape.vision_grid, width),
        **{f"vision_tower.encoder.blocks.{i}.{n}": s for i in range(shape.vision_layers) for n, s in block.items()},
        "vision_tower.encoder.final_layernorm.weight": (width,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (shape.hidden, merged),
        "mm_projector.post_norm.weight": (shape.hidden,),
    }
    prefix = "model." if shape.root.startswith("model.") else ""
    for name, size in tensors.items():
        yield Piece(prefix + name, Spec(dtype_name(shape.dtype), size), None, name)


def _published_shards(shape: K3Shape, pieces: list[Piece]) -> list[str]:
    """File of each piece: a layer a file, then the ends, the projector, the tower; or dealt out one by one."""
    numbers = []
    for piece in pieces:
        after = 3 if "vision_tower." in piece.key else 2 if "mm_projector." in piece.key else 1
        numbers.append(piece.layer + 1 if piece.layer is not None else shape.layers + after)
    total = max(numbers)
    if shape.split_experts:
        numbers = [i % total + 1 for i in range(len(pieces))]
    return [f"model-{n:05d}-of-{total:06d}.safetensors" for n in numbers]


def _filled_shards(shape: LinearShape, pieces: list[Piece]) -> list[str]:
    """File of each piece: equal shares of the bytes in the table's order, about three files for four layers."""
    total = max(2, shape.layers * 3 // 4)
    whole, before, numbers = sum(p.spec.nbytes for p in pieces), 0, []
    for i, piece in enumerate(pieces):
        numbers.append(i % total + 1 if shape.split_experts else before * total // whole + 1)
        before += piece.spec.nbytes
    names = {n: i for i, n in enumerate(sorted(set(numbers)), 1)}
    return [f"model-{names[n]:05d}-of-{len(names):05d}.safetensors" for n in numbers]


K3 = Family("Kimi K3: MXFP4 experts, vision tower, two-level config", K3Shape, make_k3, "kimi-k3", frame_k3)
KIMI_LINEAR = Family("Kimi-Linear: plain experts, no vision, flat config", LinearShape, make_linear)
