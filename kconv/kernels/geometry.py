"""Where the scales of a weight [..., O, I] lie: told apart by shape alone, block sizes never guessed. No torch in here.

| layout | scale shape, after the leading axes | found in |
|---|---|---|
| `scalar`, `tensor`, `tensor-2d` | [], [1], [1, 1] | per-tensor FP8 |
| `channel`, `channel-2d` | [O], [O, 1] | Quark, compressed-tensors per-channel |
| `block` | [ceil(O/b0), ceil(I/b1)] | `weight_scale_inv` (DeepSeek, Kimi K2), compressed-tensors block, MXFP8 (1 x 32) |
| `block-4d` | [ceil(O/b0), 1, ceil(I/b1), 1] | ModelOpt |

A partial last tile has a scale of its own. A block layout is recognised only with its block size given.
"""

from __future__ import annotations

from dataclasses import dataclass

from kconv.errors import KconvError

Shape = tuple[int, ...]
LAYOUTS = ("scalar", "tensor", "tensor-2d", "channel", "channel-2d", "block", "block-4d")


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales [rows, columns] per weight, each over `height` x `width` values (fewer at the edges)."""

    rows: int
    columns: int
    height: int
    width: int


def scale_shape(layout: str, weight: Shape, block: Shape | None) -> Shape:
    """The scale shape of a layout for a weight shape [..., O, I]; raises `KconvError` for a block layout without block."""
    if len(weight) < 2:
        raise KconvError(f"a weight of shape {list(weight)} has no rows and columns for scales")
    *lead, rows, columns = weight
    tails: dict[str, Shape] = {
        "scalar": (), "tensor": (1,), "tensor-2d": (1, 1), "channel": (rows,), "channel-2d": (rows, 1),
    }  # fmt: skip
    if layout in tails:
        return (*lead, *tails[layout])
    if layout not in LAYOUTS:
        raise KconvError(f"no such layout of scales: {layout!r}; there are {', '.join(LAYOUTS)}")
    if block is None or len(block) != 2 or min(block) < 1:
        raise KconvError(
            f"the block size of the scales is {block}, expected two positive numbers",
            hint="it is weight_block_size or block_structure in the quantisation config; it is not guessed from shapes",
        )
    down, across = -(-rows // block[0]), -(-columns // block[1])
    return (*lead, down, across) if layout == "block" else (*lead, down, 1, across, 1)


def layout_of(weight: Shape, scale: Shape, block: Shape | None = None) -> str:
    """The layout that a scale shape has for a weight shape; raises `KconvError` when there is none, or block is needed."""
    for layout in LAYOUTS[: None if block else 5]:
        if scale == scale_shape(layout, weight, block):
            return layout
    tiles = f" in blocks of {block[0]} x {block[1]}" if block else ""
    raise KconvError(
        f"scale {list(scale)} fits no layout of a weight {list(weight)}{tiles}",
        hint="per-tensor, per-channel and block scales are known by their shapes; a block size must come from the config",
    )


def grid(layout: str, weight: Shape, block: Shape | None) -> Grid:
    """Rows and columns of scales of one weight matrix and the values under each."""
    rows, columns = weight[-2:]
    if layout.startswith("block"):
        shape = scale_shape("block", weight, block)
        assert block is not None
        return Grid(shape[-2], shape[-1], block[0], block[1])
    if layout.startswith("channel"):
        return Grid(rows, 1, 1, max(columns, 1))
    return Grid(1, 1, max(rows, 1), max(columns, 1))
