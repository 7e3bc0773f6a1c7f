"""One weight from the form in which it is stored to the form that is wanted, in the direction in which the data flow.

| stored | wanted | step |
|---|---|---|
| a form | the same form | every tensor keeps its bytes |
| quantised | plain | decode; the scales go along in the sidecar |
| plain, with the scales of `wanted` beside it | quantised | the very codes that were decoded |
| plain | quantised | re-encode: lossy, measured |
| quantised | quantised otherwise | decode to fp32, re-encode |
| plain | plain | the same bytes, or a cast |

Tensors are named by keys, the suffixes of `Form.names`; `weight` is a plain weight. The adapter spells them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kconv.adapters.weights.forms import ENCODED, Form
from kconv.errors import KconvError
from kconv.planning.rules import Domain, Rule
from kconv.spec import FLOATS, Spec
from kconv.transforms.base import Par, Same, Seq, Transform
from kconv.transforms.dtype import Cast
from kconv.transforms.inverse import Inverse, inverse
from kconv.transforms.quantize import Quantize
from kconv.transforms.shape import Reshape

Keys = tuple[str, ...]
Naming = Callable[[str], str]

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class Step:
    """Tensors of the source, by key, to tensors of the target; `groups` are the target's files."""

    source: Keys
    target: Keys
    transform: Transform
    groups: tuple[str, ...] = ("model",)


def steps(stored: Form, wanted: Form, columns: int, *, sidecar: bool, restore: bool, stacked: bool) -> list[Step]:
    """The steps of a weight [O, columns].

    Args:
        sidecar: scales go along with decoded values, or lie beside the values to be restored.
        restore: plain values came from `wanted`.
        stacked: the plain side is stacked, so that scalar scales become [1] there.
    """
    if dataclasses.replace(stored, names=wanted.names) == wanted and not stored.plain:
        return [Step((a,), (b,), Same()) for a, b in zip(stored.names, wanted.names, strict=True)]
    if stored.plain and wanted.plain:
        same = stored.stored == wanted.stored
        return [Step(("weight",), ("weight",), Same() if same else Cast(stored.stored, wanted.stored))]
    if wanted.plain:
        transform = _decoder(stored, wanted.stored, columns, sidecar, stacked)
        kept = stored.kept if sidecar else ()
        return [Step(stored.names, ("weight", *kept), transform, ("model", *("sidecar",) * len(kept)))]
    if stored.plain and restore:
        transform = Inverse(_decoder(wanted, stored.stored, columns, sidecar, stacked))
        return [Step(("weight", *(wanted.kept if sidecar else ())), wanted.names, transform)]
    if stored.plain:
        return [Step(("weight",), wanted.names, _encoder(wanted, stored.stored))]
    decode = stored.decoder("F32", columns, sidecar=False)
    return [Step(stored.names, wanted.names, Seq((decode, _encoder(wanted, "F32"))))]


def _decoder(form: Form, dtype: str, columns: int, sidecar: bool, stacked: bool) -> Transform:
    transform = form.decoder(dtype, columns, sidecar=sidecar)
    scalar = [key == form.names[-1] and form.kept and form.format.scalar(form) for key in form.kept]
    if not (sidecar and stacked and any(scalar)):
        return transform
    n = 1 + len(form.kept)
    return Seq((transform, Par((Same(), *(Reshape((), (1,)) if s else Same() for s in scalar)), (1,) * n, (1,) * n)))


def _encoder(form: Form, dtype: str) -> Quantize:
    encoder = form.format.encoder(form, dtype)
    if encoder is None:
        raise KconvError(f"kconv does not encode to {form.label}", hint=f"it encodes to {', '.join(ENCODED)}")
    return encoder


@dataclass(frozen=True)
class WeightRules:
    """The rules of one weight, or of weights that become parts of one.

    Args:
        stored, wanted: the source's and the target's form.
        pieces: how each left part spells a key.
        right: how the right side spells it.
        backward: whether the source is the right side.
        shape: [O, I] of one left part.
        floats: dtypes that a plain weight may have on the left side.
    """

    stored: Form
    wanted: Form
    pieces: tuple[Naming, ...]
    right: Naming
    backward: bool
    shape: tuple[int, ...]
    floats: frozenset[str] = FLOATS
    sidecar: bool = True
    restore: bool = False

    def rules(self, over: dict[str, Domain], stack: tuple[str, Domain] | None, why: str) -> Iterator[Rule]:
        """One rule a step."""
        columns = self.shape[-1]
        stacked = stack is not None
        made = steps(self.stored, self.wanted, columns, sidecar=self.sidecar, restore=self.restore, stacked=stacked)
        for step in made:
            left, right = (step.target, step.source) if self.backward else (step.source, step.target)
            expect = self._expect(left)
            yield Rule(
                tuple(tuple(name(key) for key in left) for name in self.pieces), tuple(self.right(key) for key in right),
                inverse(step.transform) if self.backward else step.transform, over, stack, (expect,) * len(self.pieces),
                ("model",) if self.backward else step.groups, why=why,
            )  # fmt: skip

    def _expect(self, keys: Keys) -> tuple[tuple[Spec, ...] | None, ...]:
        form = self.wanted if self.backward else self.stored
        if form.plain:
            return (tuple(Spec(d, self.shape) for d in sorted(self.floats)), *(None for _ in keys[1:]))
        specs = dict(zip(form.names, form.specs(self.shape), strict=True))
        return tuple((specs[key],) for key in keys)
