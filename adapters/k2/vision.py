"""The rules of K2.5's vision tower and projector: the published names, and those of Transformers 5.

| published | native | how |
|---|---|---|
| `wqkv` [3W, W] and its bias | `attn.q_proj`, `k_proj`, `v_proj` | split; a head's rows of q and k from pairs to halves |
| anything else | its own name | the same bytes |

The tower rotates neighbouring pairs of a head's dimensions; Transformers rotates the first half against the second. The
reordering (row 2i of a head becomes row i, row 2i+1 row D/2+i) keeps every bit.
"""

from __future__ import annotations

from collections.abc import Iterator

from kconv.adapters.k2.config import vision_config
from kconv.adapters.k2.source import K2Source
from kconv.adapters.k2.table import QKV, VISION, VisionRow
from kconv.errors import KconvError
from kconv.planning.rules import Rule, rule
from kconv.spec import FLOATS, Spec
from kconv.transforms.base import Iso, Par, Same, Seq
from kconv.transforms.inverse import Inverse
from kconv.transforms.shape import Fuse, Reshape, Transpose


def vision_rules(source: K2Source, *, to_native: bool) -> Iterator[Rule]:
    """Rules of every vision tensor; between two layouts of one kind they keep their names."""
    if source.native == to_native:
        for name in source.vision:
            yield rule(name, name)
        return
    config = vision_config(source.original_config)
    sizes = vision_sizes(config, source.layout.sizes["C"])
    blocks = {"block": tuple(range(config["num_hidden_layers"]))}
    for row in VISION:
        shape = tuple(s if isinstance(s, int) else sizes[s] for s in row.shape)
        over = blocks if "{block}" in row.published else {}
        expect = ((tuple(Spec(d, shape) for d in sorted(FLOATS)),),)
        yield rule(row.published, row.native, _iso(row, shape, config["num_attention_heads"]), over=over, expect=expect)


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


def _iso(row: VisionRow, shape: tuple[int, ...], heads: int) -> Iso:
    if len(row.native) != len(QKV):
        return Same()
    rows, rest = shape[0] // 3, shape[1:]
    halves = Reshape((rows, *rest), (heads, rows // heads // 2, 2, *rest))
    axes = (0, 2, 1, 3)[: 3 + len(rest)]
    joined = Reshape((heads, 2, rows // heads // 2, *rest), (rows, *rest))
    reordered = Seq((halves, Transpose(axes), joined))
    return Seq((Inverse(Fuse(0, parts=3)), Par((reordered, reordered, Same()), (1, 1, 1), (1, 1, 1))))
