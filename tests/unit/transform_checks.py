"""What every transform owes: bits that come back, and tensors of the specs it predicted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kconv.kernels.common import same_bits
from kconv.spec import Spec, spec_of, torch_dtype
from kconv.transforms.base import Transform


def random_bits(spec: Spec, seed: int = 0) -> Tensor:
    """A tensor of this spec with every bit random, so with NaN, infinities, subnormals and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (max(spec.nbytes, 1),), dtype=torch.uint8, generator=generator)[: spec.nbytes]
    return raw.view(torch_dtype(spec.dtype)).reshape(spec.shape)


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Same number, dtypes, shapes and bits."""
    assert [spec_of(t) for t in got] == [spec_of(t) for t in expected]
    for g, e in zip(got, expected, strict=True):
        assert same_bits(g.contiguous(), e.contiguous())


def forward(transform: Transform, left: Sequence[Tensor]) -> list[Tensor]:
    """The right side, checked against the predicted specs, with and without lent storage."""
    predicted = transform.forward_specs(tuple(spec_of(t) for t in left))
    right = transform.forward(left)
    assert tuple(spec_of(t) for t in right) == predicted
    lent = [torch.empty(s.shape, dtype=torch_dtype(s.dtype)) for s in predicted]
    assert_same(transform.forward(left, lent), right)
    return right


def backward(transform: Transform, right: Sequence[Tensor]) -> list[Tensor]:
    """The left side, checked against the predicted specs, with and without lent storage."""
    predicted = transform.backward_specs(tuple(spec_of(t) for t in right))
    left = transform.backward(right)
    assert tuple(spec_of(t) for t in left) == predicted
    lent = [torch.empty(s.shape, dtype=torch_dtype(s.dtype)) for s in predicted]
    assert_same(transform.backward(right, lent), left)
    return left


def round_trip(transform: Transform, left: Sequence[Tensor]) -> list[Tensor]:
    """Forward and backward give the left bits again; the tiles, converted one by one, give the same right side."""
    right = forward(transform, left)
    assert_same(backward(transform, right), left)
    assert_tiles(transform, left, right)
    return right


def assert_tiles(transform: Transform, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Converting tile after tile and joining equals converting the whole, both ways."""
    tiles = transform.tiles(tuple(spec_of(t) for t in left), tuple(spec_of(t) for t in right))
    if tiles is None:
        return
    cut_left = [t.split(n) for t, n in zip(left, tiles.left, strict=True)]
    cut_right = [t.split(n) for t, n in zip(right, tiles.right, strict=True)]
    assert len({len(pieces) for pieces in (*cut_left, *cut_right)}) == 1
    made_right = [transform.forward(pieces) for pieces in zip(*cut_left, strict=True)]
    made_left = [transform.backward(pieces) for pieces in zip(*cut_right, strict=True)]
    assert_same([torch.cat(pieces) for pieces in zip(*made_right, strict=True)], right)
    assert_same([torch.cat(pieces) for pieces in zip(*made_left, strict=True)], left)
