"""The vocabulary maps of a draft over fewer tokens than its target: the same bytes, refused unless they fit each other.

`d2t[i]` is an offset: draft token i is target token i + d2t[i]. `t2d` marks the target tokens that the draft has. A map of
zeros, of ids instead of offsets, or the map of another draft loads everywhere and makes every accepted token luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kconv.errors import BadData
from kconv.transforms.base import Grade, SpecError, Specs, Transform, stated

if TYPE_CHECKING:
    from torch import Tensor

MARKS = frozenset({"BOOL", "U8", "I8", "I32", "I64"})
OFFSETS = frozenset({"I64", "I32"})


@dataclass(frozen=True)
class VocabularyMaps(Transform):
    """`d2t` [draft] and `t2d` [target] under their names, checked against each other in both directions."""

    draft: int
    target: int
    grade: ClassVar[Grade] = Grade.EXACT

    def identity(self) -> str:
        return stated("VocabularyMaps", draft=self.draft, target=self.target)

    def forward_specs(self, specs: Specs) -> Specs:
        d2t, t2d = specs
        if d2t.dtype not in OFFSETS or d2t.shape != (self.draft,):
            raise SpecError(f"d2t is {d2t}, a map of {self.draft} draft tokens is I64 [{self.draft}]")
        if t2d.dtype not in MARKS or t2d.shape != (self.target,):
            raise SpecError(f"t2d is {t2d}, the marks of {self.target} target tokens are BOOL [{self.target}]")
        return specs

    backward_specs = forward_specs

    def forward(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        import torch

        d2t, t2d = tensors
        ids = torch.arange(self.draft, device=d2t.device) + d2t.long()
        outside = ((ids < 0) | (ids >= self.target)).nonzero()
        if outside.numel():
            at = int(outside[0])
            raise BadData(
                f"d2t leads draft token {at} to token {int(ids[at])} of {self.target}", operand=0, position=(at,),
                hint="d2t holds offsets (target id minus draft id), not ids",
            )  # fmt: skip
        marked = torch.zeros(self.target, dtype=torch.bool, device=d2t.device)
        marked[ids] = True
        if int(marked.sum()) != self.draft:
            raise BadData(
                "d2t leads several draft tokens to one target token (a map that was never filled?)", operand=0, position=(0,)
            )
        differ = (marked != t2d.bool()).nonzero()
        if differ.numel():
            said = f"t2d marks {int(t2d.bool().sum())} tokens, d2t leads to {self.draft}; token {int(differ[0])} differs first"
            raise BadData(said, operand=1, position=(int(differ[0]),))
        return list(tensors)

    backward = forward
