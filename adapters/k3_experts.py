"""The routed experts of a K3 layer: packed or decoded, one tensor a projection or stacked over the experts.

| left | right | rules |
|---|---|---|
| per expert, packed | stacked, packed | bytes move: `w1`, `w3` rows of `gate_up_proj_packed`, `w2` of `down_proj_packed`; scales alike |
| per expert, packed | stacked or per expert, decoded | MXFP4 decode; the scales go along in a sidecar |
| per expert, plain | stacked or per expert, plain | bytes move, or a cast |
| stacked, packed | stacked, decoded | MXFP4 decode over the whole stack |
"""

from __future__ import annotations

from collections.abc import Iterator

from kconv.adapters import Options
from kconv.adapters.k3_layout import DOWN, EXPERTS, GATE, UP
from kconv.adapters.k3_source import K3Source, Side
from kconv.errors import KconvError
from kconv.isos.base import Iso, Same
from kconv.isos.dtype import Cast
from kconv.isos.mxfp4 import Mxfp4
from kconv.rules import Rule
from kconv.spec import Spec, dtype_name

GROUP = 32
STACKED = {"gate_up_proj": (GATE, UP), "down_proj": (DOWN,)}
DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def expert_rules(source: K3Source, options: Options, left: Side, right: Side, backward: bool) -> tuple[list[Rule], str]:
    """Rules of all expert tensors, and the format of the target's experts (`packed` or a dtype such as `bfloat16`)."""
    rules: list[Rule] = []
    formats: set[str] = set()
    groups: dict[tuple[int, str], list[int]] = {}
    for layer, key in source.experts.items():
        groups.setdefault(key, []).append(layer)
    for (count, stored), layers in sorted(groups.items()):
        made = _Group(source, options, left, right, backward, tuple(layers), count, stored)
        rules += made.rules()
        formats.add(made.target_format)
    if len(formats) > 1:
        raise KconvError("some layers' experts are packed and others plain", hint="ask for one form with --experts bf16")
    return rules, formats.pop() if formats else "bfloat16"


class _Group:
    """The layers that share expert count and stored format."""

    def __init__(self, source: K3Source, options: Options, left: Side, right: Side, backward: bool,
                 layers: tuple[int, ...], count: int, stored: str) -> None:  # fmt: skip
        self.source, self.options, self.left, self.right, self.backward = source, options, left, right, backward
        self.layers, self.count, self.stored = layers, count, stored
        asked = options.experts
        if backward:
            asked = self._asked_backward(asked)
        self.packed_left = stored == "packed" if not backward else asked == "packed"
        self.packed_right = stored == "packed" if backward else asked == "packed" or (asked is None and stored == "packed")
        self.dtype = DTYPES.get(asked or "", "BF16") if self.packed_left else self._plain_dtype()
        if not backward and asked == "packed" and stored != "packed":
            raise KconvError("--experts packed: the source's experts are not quantised", hint="leave --experts out to keep them as stored")

    def _asked_backward(self, asked: str | None) -> str:
        """From native to a published layout: the form the source had, unless another is asked for and can be had."""
        was_packed = "packed" in (self.source.facts.get("experts") or ["packed"])
        if self.stored == "packed":
            if asked not in (None, "packed"):
                raise KconvError(
                    f"--experts {asked}: a packed native checkpoint goes back packed",
                    hint="convert it with --to native --experts bf16 first, then with --to hf",
                )
            return "packed"
        asked = asked or ("packed" if was_packed else "plain")
        if asked != "packed":
            names = [self._names(self.source.side, part, True)[1].format_map({"layer": i}) for i in self.layers for part in STACKED]
            self.source.surplus_sidecar += [n for n in names if n in self.source.checkpoint.entries]
        return asked

    def _plain_dtype(self) -> str:
        name = next((n for n in self._stored_names() if n in self.source.checkpoint.entries), None)
        return self.source.checkpoint.entries[name].spec.dtype if name else "BF16"

    def _stored_names(self) -> Iterator[str]:
        side = self.source.side
        for layer in self.layers:
            base = f"{side.root}layers.{layer}.{side.moe}experts."
            yield base + ("gate_up_proj" if side.name == "native" else f"0.{GATE}.weight")

    @property
    def target_format(self) -> str:
        """How the target's experts are stored."""
        packed = self.packed_left if self.backward else self.packed_right
        if packed:
            return "packed"
        dtype = DTYPES.get(self.options.experts or "", self.dtype)
        return {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(dtype, dtype)

    def sidecar(self) -> bool:
        """Whether scales go along when experts are decoded: by choice forward, by presence backward."""
        if not self.backward:
            return self.options.sidecar
        name = f"{self.right.root}layers.{self.layers[0]}.mlp.experts.gate_up_proj_scale"
        return name in self.source.checkpoint.entries

    def rules(self) -> list[Rule]:
        """The rules of this group."""
        over = {"layer": self.layers}
        if self.left.name == "native":
            return [r for name in STACKED for r in self._rules(((name,),), name, over, None)]
        experts = tuple(range(self.count))
        if self.right.name == "native":
            stack = ("expert", experts)
            return [r for name, parts in STACKED.items() for r in self._rules(tuple((p,) for p in parts), name, over, stack)]
        each = {**over, "expert": experts}
        return [r for part in EXPERTS for r in self._rules(((part,),), part, each, None)]

    def _rules(self, parts: tuple[tuple[str, ...], ...], right: str, over: dict, stack: tuple | None) -> Iterator[Rule]:
        lefts = [self._names(self.left, p, self.packed_left) for (p,) in parts]
        rights = self._names(self.right, right, self.packed_right)
        expects = [self._expect(p) for (p,) in parts]
        if self.packed_left == self.packed_right:
            if not self.packed_left and self.left.name == self.right.name == "native":
                yield from self._carried(right, over)
            for i, name in enumerate(rights):
                pieces = tuple((left[i],) for left in lefts)
                expect = tuple((e[i],) for e in expects)
                yield Rule(pieces, (name,), self._move(), over, stack, expect, why=self._why(parts))
            return
        names = tuple(tuple(left) for left in lefts)
        sidecar = self.sidecar()
        if sidecar:
            rights = [rights[0], self._names(self.right, right, True)[1]]
        iso = Mxfp4(dtype=self.dtype, sidecar=sidecar)
        groups = ("model", "sidecar")[: len(rights)]
        yield Rule(names, tuple(rights), iso, over, stack, tuple(map(tuple, expects)), groups, why=self._why(parts))

    def _carried(self, part: str, over: dict) -> Iterator[Rule]:
        """A decoded native checkpoint's own sidecar goes along, or is left out by name."""
        name = self._names(self.right, part, True)[1]
        if name.format_map({"layer": self.layers[0]}) not in self.source.checkpoint.entries:
            return
        if self.options.sidecar:
            yield Rule(((name,),), (name,), Same(), over, group=("sidecar",))
        else:
            self.source.surplus_sidecar += [name.format_map({"layer": i}) for i in self.layers]

    def _move(self) -> Iso:
        wanted = DTYPES.get(self.options.experts or "")
        if self.packed_left or not wanted or wanted == self.dtype:
            return Same()
        return Cast(wanted, self.dtype) if self.backward else Cast(self.dtype, wanted)

    def _names(self, side: Side, part: str, packed: bool) -> list[str]:
        base = side.root + "layers.{layer}." + side.moe + "experts."
        if side.name == "native":
            return [f"{base}{part}_packed", f"{base}{part}_scale"] if packed else [f"{base}{part}"]
        base += "{expert}." + part
        return [f"{base}.weight_packed", f"{base}.weight_scale"] if packed else [f"{base}.weight"]

    def _why(self, parts: tuple[tuple[str, ...], ...]) -> str:
        part = parts[0][0]
        if part not in EXPERTS:
            return ""
        packed = f", two codes a byte, a scale for {GROUP} codes" if self.packed_left else ""
        return self.source.layout.formula(EXPERTS[part]) + packed

    def _expect(self, part: str) -> list[tuple[Spec, ...] | None]:
        if part not in EXPERTS:
            return [None, None]
        rows, columns = self.source.layout.shape(EXPERTS[part])
        if self.packed_left:
            return [(Spec("U8", (rows, columns // 2)),), (Spec("U8", (rows, columns // GROUP)),)]
        dtype = self.source.layout.config.get("dtype")
        allowed = {dtype_name(dtype) if dtype else "BF16", "F32", self.dtype}
        return [tuple(Spec(d, (rows, columns)) for d in sorted(allowed))]
