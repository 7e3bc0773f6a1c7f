"""The rules of K2.5's vision tower and projector: the published names, and those of Transformers 5.

| published | native | how |
|---|---|---|
| `wqkv` [3W, W] and its bias | `attn.q_proj`, `k_proj`, `v_proj` | split; a head's rows of q and k from pairs to halves |
| anything else | its own name | the same bytes, or a cast |
| a weight in a quantised form | the plain one, as above | decoded first; the scales go to the sidecar |

Between two layouts of one kind the names stay, and `kconv.adapters.weights.vision` makes the rules.

The tower rotates neighbouring pairs of a head's dimensions; Transformers rotates the first half against the second. The
reordering (row 2i of a head becomes row i, row 2i+1 row D/2+i) keeps every bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kconv.adapters.k2.table import QKV, VISION, VisionRow
from kconv.adapters.weights.forms import Form
from kconv.adapters.weights.inventory import NO_LAYER, Forms
from kconv.checkpoint.reading import Checkpoint
from kconv.errors import KconvError
from kconv.options import Options
from kconv.planning.rules import Rule, rule
from kconv.spec import FLOATS, Spec, dtype_name
from kconv.transforms.base import Par, Same, Seq, Transform
from kconv.transforms.dtype import Cast
from kconv.transforms.inverse import Inverse
from kconv.transforms.shape import Fuse, Reshape, Transpose


@dataclass(frozen=True)
class Renaming:
    """The rules of a tower whose names change: the published side is the left one, whichever way the data flow.

    Args:
        config: the tower's config in Transformers' words.
        hidden: the text model's width.
        dtype: what quantised weights are decoded to.
    """

    checkpoint: Checkpoint
    config: dict[str, Any]
    hidden: int
    forms: Forms
    options: Options
    native: bool
    dtype: str

    def rules(self) -> Iterator[Rule]:
        """Of every row, by the stored form and dtype of its blocks."""
        for row in VISION:
            shape = shape_of(row, self.config, self.hidden)
            for (form, dtype), blocks in self._alike(row).items():
                yield self._rule(row, shape, form, dtype, {"block": blocks} if blocks else {})

    def _alike(self, row: VisionRow) -> dict[tuple[Form | None, str], tuple[int, ...]]:
        """Form and stored dtype -> the blocks that have them; no block for what stands once."""
        found: dict[tuple[Form | None, str], list[int]] = {}
        blocks = range(self.config["num_hidden_layers"]) if "{block}" in row.published else (NO_LAYER,)
        for block in blocks:
            name = row.published.format(block=block)
            if (name, NO_LAYER) not in self.forms.unread:
                own = row.native[0].format(block=block) if self.native else name
                found.setdefault((self.forms.row(name), self._stored(own)), []).append(block)
        return {key: () if mine == [NO_LAYER] else tuple(mine) for key, mine in found.items()}

    def _stored(self, name: str) -> str:
        entry = self.checkpoint.entries.get(name)
        return entry.spec.dtype if entry and entry.spec.dtype in FLOATS else self.dtype

    def _rule(self, row: VisionRow, shape: tuple[int, ...], form: Form | None, dtype: str, over: dict) -> Rule:
        asked = dtype_name(self.options.dtype) if self.options.dtype else None
        moved = _transform(row, shape, self.config["num_attention_heads"])
        if form is None or (self.native and asked):
            ends = (asked or dtype, dtype) if self.native else (dtype, asked or dtype)
            cast: Transform = Same() if ends[0] == ends[1] else Cast(*ends)
            expect = ((tuple(Spec(d, shape) for d in sorted(FLOATS)),),)
            return rule(row.published, row.native, _chain(cast, moved, len(row.native), 0), over=over, expect=expect)
        kept = self._kept(row, form, over)
        decode = form.decoder(dtype if self.native else asked or self.dtype, shape[-1], sidecar=bool(kept))
        stem = row.published.removesuffix("weight")
        left, right = tuple(stem + n for n in form.names), (*row.native, *(_beside(row) + n for n in kept))
        groups = (*("model",) * len(row.native), *("sidecar",) * len(kept))
        specs = (tuple((spec,) for spec in form.specs(shape)),)
        return rule(left, right, _chain(decode, moved, len(row.native), len(kept)), over=over, expect=specs, group=groups)

    def _kept(self, row: VisionRow, form: Form, over: dict) -> tuple[str, ...]:
        """The scales that lie beside the values: by choice on the way there, by presence on the way back."""
        if not self.native:
            return form.kept if self.options.sidecar else ()
        block = over["block"][0] if over else 0
        there = form.kept and (_beside(row) + form.kept[0]).format(block=block) in self.checkpoint.entries
        return form.kept if there else ()


def published_shapes(config: dict[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    """Published name -> shape of every tensor of a tower."""
    return {
        row.published.format(block=block): shape_of(row, config, hidden)
        for row in VISION
        for block in (range(config["num_hidden_layers"]) if "{block}" in row.published else (0,))
    }


def native_shapes(config: dict[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    """The same in Transformers' names."""
    found: dict[str, tuple[int, ...]] = {}
    for row in VISION:
        shape = shape_of(row, config, hidden)
        part = (shape[0] // len(row.native), *shape[1:])
        for block in range(config["num_hidden_layers"]) if "{block}" in row.published else (0,):
            found |= {name.format(block=block): part for name in row.native}
    return found


def shape_of(row: VisionRow, config: dict[str, Any], hidden: int) -> tuple[int, ...]:
    """The shape of a row's published tensors."""
    sizes = vision_sizes(config, hidden)
    return tuple(s if isinstance(s, int) else sizes[s] for s in row.shape)


def _beside(row: VisionRow) -> str:
    """What the names of a weight's scales begin with in the sidecar."""
    return row.native[0].removesuffix("weight") if len(row.native) == 1 else row.native[0].replace("q_proj.weight", "qkv_proj.")


def _chain(first: Transform, moved: Transform, parts: int, kept: int) -> Transform:
    """`first`, then `moved` on the values alone, without steps that do nothing."""
    beside = (1,) * kept
    then = Par((moved, *(Same() for _ in beside)), (1, *beside), (parts, *beside)) if kept else moved
    steps = tuple(s for s, does in ((first, not isinstance(first, Same)), (then, not isinstance(moved, Same))) if does)
    return steps[0] if len(steps) == 1 else Seq(steps) if steps else Same()


def vision_sizes(config: dict, hidden: int) -> dict[str, int]:
    """What the symbols of the table's shapes mean for a tower's config; raises KconvError where its heads do not divide."""
    kernel, width = config["merge_kernel_size"], config["hidden_size"]
    merged = width * kernel[0] * kernel[1]
    if width % (2 * config["num_attention_heads"]):
        heads = config["num_attention_heads"]
        raise KconvError(f"config.json: the tower's {width} channels are no even number for each of {heads} heads")
    return {
        "W": width, "3W": 3 * width, "F": config["intermediate_size"], "N": merged, "C": hidden, "patch": config["patch_size"],
        "height": config["pos_emb_height"], "width": config["pos_emb_width"],
    }  # fmt: skip


def _transform(row: VisionRow, shape: tuple[int, ...], heads: int) -> Transform:
    if len(row.native) != len(QKV):
        return Same()
    rows, rest = shape[0] // 3, shape[1:]
    halves = Reshape((rows, *rest), (heads, rows // heads // 2, 2, *rest))
    axes = (0, 2, 1, 3)[: 3 + len(rest)]
    joined = Reshape((heads, 2, rows // heads // 2, *rest), (rows, *rest))
    reordered = Seq((halves, Transpose(axes), joined))
    return Seq((Inverse(Fuse(0, parts=3)), Par((reordered, reordered, Same()), (1, 1, 1), (1, 1, 1))))
