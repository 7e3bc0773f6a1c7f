"""Rules: direction-free rows that join the tensor names of two layouts.

A `Rule` says that, for every value of its indices, the tensors on the left and the tensors on the right are the two
sides of one transform. Two placements need no arithmetic and therefore no transform:

* `fuse`: the left side is several *pieces* whose right sides lie one after the other along axis 0 (gate rows, then up);
* `stack`: the right side gets a new leading axis over an index (one expert after the other).

Together they make the unit of work one expert's projection, whatever the size of the stacked tensor:

    Rule(left=(("e.{expert}.w1", ), ("e.{expert}.w3", )), right=("gate_up", ), over={"layer": ..}, stack=("expert", 0..895))

A `Drop` says which tensors of a side are left out, and why.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kconv.spec import Spec
from kconv.transforms.base import Same, Specs, Transform

Binding = dict[str, int]
Domain = tuple[int, ...]
SAME = Same()


@dataclass(frozen=True)
class Rule:
    """One row of an adapter's table.

    Args:
        left: pieces, each a tuple of name templates (the transform's left operands); a plain tuple of names is one piece.
        right: name templates of the transform's right operands.
        over: index name -> its values; `layer` orders the output.
        stack: index name and values of the new leading axis on the right.
        expect: allowed specs of the left operands of each piece, from the config (None: unchecked).
        group: output file group of each right operand (`model`, `vision`, `sidecar`); one name stands for all.
        left_group: the same for the left side.
        why: how `expect` follows from the config, for the message.
    """

    left: tuple[tuple[str, ...], ...]
    right: tuple[str, ...]
    transform: Transform = SAME
    over: Mapping[str, Domain] = field(default_factory=dict)
    stack: tuple[str, Domain] | None = None
    expect: tuple[tuple[tuple[Spec, ...] | None, ...], ...] | None = None
    group: tuple[str, ...] = ("model",)
    left_group: str = "model"
    why: str = ""

    def bindings(self) -> Iterator[Binding]:
        """Every assignment of the indices in `over`."""
        for values in itertools.product(*self.over.values()):
            yield dict(zip(self.over, values, strict=True))

    @property
    def domain(self) -> Sequence[int | None]:
        """The stacked index's values, or one None."""
        return self.stack[1] if self.stack else (None,)

    def left_names(self, binding: Binding, value: int | None) -> list[list[str]]:
        """Names of each piece's left operands, for one element of the stack."""
        if self.stack:
            binding = {**binding, self.stack[0]: value}  # type: ignore[dict-item]
        return [[name.format_map(binding) for name in piece] for piece in self.left]

    def left_columns(self, binding: Binding) -> list[list[list[str]]]:
        """The names of `left_names` of a stacked rule, each operand's over the whole stack."""
        index, domain = self.stack or ("", ())
        gap, values = {**binding, index: "\0"}, list(map(str, domain))
        pieces = [[name.format_map(gap).split("\0") for name in piece] for piece in self.left]  # type: ignore[arg-type]
        return [[[value.join(parts) for value in values] for parts in piece] for piece in pieces]

    def right_names(self, binding: Binding) -> list[str]:
        """Names of the right operands."""
        return [name.format_map(binding) for name in self.right]

    def group_of(self, operand: int) -> str:
        """File group of a right operand."""
        return self.group[operand] if len(self.group) > 1 else self.group[0]

    def identity(self) -> dict[str, object]:
        """What the plan's digest is made of."""
        return {
            "left": self.left,
            "right": self.right,
            "iso": self.transform.identity(),
            "over": {k: list(v) for k, v in self.over.items()},
            "stack": [self.stack[0], list(self.stack[1])] if self.stack else None,
            "group": self.group,
        }


def rule(left: str | Sequence[str], right: str | Sequence[str], transform: Transform = SAME, **kwargs: Any) -> Rule:
    """A rule with one piece; single names may be given bare."""
    names = (left,) if isinstance(left, str) else tuple(left)
    rights = (right,) if isinstance(right, str) else tuple(right)
    return Rule((names,), rights, transform, **kwargs)


@dataclass(frozen=True)
class Drop:
    """Tensors of the source that are left out on purpose."""

    names: tuple[str, ...]
    reason: str


def concat_specs(pieces: Sequence[Specs]) -> Specs:
    """Right specs of a fused rule: the pieces' specs with their axis-0 sizes added."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    for other in pieces[1:]:
        for a, b in zip(first, other, strict=True):
            if a.dtype != b.dtype or a.shape[1:] != b.shape[1:]:
                raise ValueError(f"pieces to be joined differ: {a} and {b}")
    return tuple(s.rows(sum(p[i].shape[0] for p in pieces)) for i, s in enumerate(first))
