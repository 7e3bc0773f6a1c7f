"""The routed experts of a K3 layer: in any form, one tensor a projection or stacked over the experts.

| left | right | rules |
|---|---|---|
| per expert, MXFP4 | stacked, packed | bytes move: `w1`, `w3` rows of `gate_up_proj_packed`, `w2` of `down_proj_packed` |
| per expert, quantised | stacked or per expert, decoded | decode; scales go along in a sidecar, `gate_up_proj_scale` ... |
| per expert, plain | stacked or per expert, plain | bytes move, or a cast |
| stacked, packed | stacked, decoded | MXFP4 decode over the whole stack |
| any | MXFP4, NVFP4, FP8 in blocks | re-encode (`weights.rules`), on request |

Only MXFP4 stays packed in the native layout; other forms are decoded there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kconv.adapters.k3.source import K3Source, Side
from kconv.adapters.k3.table import DOWN, EXPERTS, GATE, UP
from kconv.adapters.weights.forms import ENCODED, MXFP4, Form, plain
from kconv.adapters.weights.rules import DTYPES, TORCH, WeightRules
from kconv.errors import KconvError
from kconv.names import ranges
from kconv.options import Options
from kconv.planning.rules import Rule
from kconv.spec import FLOATS, dtype_name
from kconv.transforms.base import Same
from kconv.transforms.shape import Reshape

STACKED = {"gate_up_proj": (GATE, UP), "down_proj": (DOWN,)}


@dataclass(frozen=True)
class Group:
    """Layers that share expert count, what is stored and what was published: of gate and up (w1), and of down (w2)."""

    layers: tuple[int, ...]
    count: int
    stored: dict[str, Form]
    published: dict[str, Form | None]


class ExpertRules:
    """Makes the rules, and remembers the form that experts have in the target."""

    def __init__(self, source: K3Source, left: Side, right: Side, options: Options) -> None:
        self.source, self.left, self.right, self.options = source, left, right, options
        self.backward = source.side == right != left
        self.native = source.side.name == "native"
        self.target = left if self.backward else right
        self.forms: set[Form] = set()
        self.changed = False
        self.decodes = False

    @property
    def format(self) -> str:
        """How the target's experts are stored: `packed` (MXFP4), a dtype such as `bfloat16`, or the kind of another form."""
        if not self.forms:
            return "bfloat16"
        form = next(iter(self.forms))
        return TORCH.get(form.stored, form.stored) if form.plain else "packed" if form.kind == "mxfp4" else form.kind

    def rules(self) -> list[Rule]:
        """The rules of all layers; raises KconvError where the target would hold experts of several forms natively."""
        rules: list[Rule] = []
        for group in self._groups():
            for name, parts in STACKED.items():
                rules += self._projection(group, name, parts)
            rules += self._activations(group)
        if self.options.to == "native" and len({f.plain for f in self.forms}) > 1:
            self.source.problems.append("some layers' experts are packed and others plain: ask for one form with --experts bf16")
        if self.options.to == "native" and not self.native:
            self._say_decoded()
        return rules

    def _groups(self) -> Iterator[Group]:
        groups: dict[Any, list[int]] = {}
        for layer, (count, fmt) in self.source.experts.items():
            published = {p: self._published(layer, p) for p in (GATE, DOWN)}
            stored = {p: self._stored(layer, p, fmt, published[p]) for p in (GATE, DOWN)}
            key = (count, tuple(stored.items()), tuple(published.items()))
            groups.setdefault(key, []).append(layer)
        for (count, stored_items, published_items), layers in sorted(groups.items(), key=lambda item: item[1]):
            yield Group(tuple(layers), count, dict(stored_items), dict(published_items))

    def _published(self, layer: int, part: str) -> Form | None:
        form = self.source.forms.experts.get(layer, {}).get(part)
        return None if form is None or form.plain else form

    def _stored(self, layer: int, part: str, fmt: str, published: Form | None) -> Form:
        if self.native and fmt == "packed":
            return MXFP4
        if published and not self.native:
            return published
        side = self.source.side
        base = f"{side.root}layers.{layer}.{side.moe}experts."
        native = "gate_up_proj" if part == GATE else "down_proj"
        entry = self.source.checkpoint.entries.get(base + (native if self.native else f"0.{part}.weight"))
        if entry is None and not self.native and self.source.forms.experts.get(layer) == {}:
            return MXFP4  # nothing at all is there: say what the published checkpoint has
        return plain(entry.spec.dtype if entry and entry.spec.dtype in FLOATS else self.source.dtype)

    def _wanted(self, stored: Form, published: Form | None) -> Form:
        """The form in the target."""
        asked, to = self.options.experts, self.options.to
        if asked in DTYPES:
            return plain(DTYPES[asked])
        if to == "native":
            return self._wanted_native(stored, asked)
        kept = published if published and (self.native or stored == published) else stored
        if self.native and stored == MXFP4 and not (published and published.kind == "mxfp4"):
            kept = MXFP4
        if asked is None:
            return kept
        wanted = MXFP4 if asked == "packed" else ENCODED[asked]
        if asked == "packed" and not self.native and stored.kind != "mxfp4":
            raise self._not_packed(stored)
        return kept if kept.kind == wanted.kind == "mxfp4" else wanted

    def _wanted_native(self, stored: Form, asked: str | None) -> Form:
        if asked in ("nvfp4", "fp8-block"):
            raise KconvError(
                f"--experts {asked}: the native layout keeps experts plain or packed as MXFP4",
                hint="--to hf or --to hf-text writes them so; leave --experts out to decode them here",
            )
        packable = stored.kind == "mxfp4" and (stored.stored, stored.scale) == ("U8", "U8")
        if asked == "packed" and not packable:
            raise self._not_packed(stored)
        if packable and asked in (None, "packed", "mxfp4"):
            return MXFP4
        return MXFP4 if asked == "mxfp4" else stored if stored.plain else plain(self.source.dtype)

    def _not_packed(self, stored: Form) -> KconvError:
        if stored.plain:
            return KconvError(
                "--experts packed: the source's experts are not quantised", hint="leave --experts out to keep them as stored"
            )
        return KconvError(
            f"--experts packed: the source's experts are {stored.label}, and only MXFP4 stays packed in the native layout",
            hint="--experts bf16 decodes them, --experts mxfp4 re-encodes them (lossy unless the values allow it)",
        )

    def _projection(self, group: Group, name: str, parts: tuple[str, ...]) -> Iterator[Rule]:
        stored, published = group.stored[parts[0]], group.published[parts[0]]
        wanted = self._wanted(stored, published)
        self.forms.add(wanted)
        self.decodes |= wanted.plain != stored.plain
        self.changed |= self.options.to != "native" and wanted != (published or plain(wanted.stored))
        was_packed = self.options.experts == "packed" and wanted == MXFP4
        restore = self.native and stored.plain and not wanted.plain and (wanted == published or was_packed)
        sidecar = self._sidecar(group, name, stored, wanted, published)
        over: dict[str, tuple[int, ...]] = {"layer": group.layers}
        experts = tuple(range(group.count))
        why = self.source.layout.formula(EXPERTS[parts[0]])
        if not stored.plain and stored.kind == "mxfp4" and not self.backward:
            why += ", two codes a byte, a scale for 32 codes"
        if self.left.name == "native":
            yield from self._one(name, (name,), stored, wanted, over, None, why, sidecar, restore)
            if stored.plain and wanted == stored:
                yield from self._carried(name, over, published)
        elif self.right.name == "native":
            yield from self._one(name, parts, stored, wanted, over, ("expert", experts), why, sidecar, restore)
        else:
            for part in parts:
                yield from self._one(part, (part,), stored, wanted, {**over, "expert": experts}, None, why, sidecar, restore)

    def _one(self, right: str, lefts: tuple[str, ...], stored: Form, wanted: Form, over: dict[str, tuple[int, ...]],
             stack: tuple[str, tuple[int, ...]] | None, why: str, sidecar: bool, restore: bool) -> Iterator[Rule]:  # fmt: skip
        first = lefts[0]
        stacked = first not in EXPERTS
        shape = self.source.layout.shape(EXPERTS[GATE if first == "gate_up_proj" else DOWN if stacked else first])
        pieces = tuple(_naming(self.left, part) for part in lefts)
        floats = self._floats(stored, wanted)
        naming = _naming(self.right, right)
        made = WeightRules(stored, wanted, pieces, naming, self.backward, shape, floats, sidecar, restore)
        for rule in made.rules(over, stack, why):
            yield Rule(rule.left, rule.right, rule.transform, rule.over, rule.stack, None, rule.group) if stacked else rule

    def _floats(self, stored: Form, wanted: Form) -> frozenset[str]:
        dtype = self.source.layout.config.get("dtype")
        own = (wanted if self.backward else stored).stored
        return frozenset({dtype_name(dtype) if dtype else "BF16", "F32", own} & FLOATS)

    def _sidecar(self, group: Group, name: str, stored: Form, wanted: Form, published: Form | None) -> bool:
        """Whether scales go along, by choice, or lie beside the values that they restore, by presence."""
        if not self.backward:
            return self.options.sidecar
        if not stored.plain or wanted != published:
            return False
        scale = _naming(self.source.side, name)(wanted.kept[0]).format_map({"layer": group.layers[0]})
        return scale in self.source.checkpoint.entries

    def _carried(self, name: str, over: dict[str, tuple[int, ...]], published: Form | None) -> Iterator[Rule]:
        """A decoded native checkpoint's own scales go along to another native one."""
        naming = _naming(self.right, name)
        for key in published.kept if published and self.options.sidecar else ():
            if naming(key).format_map({"layer": over["layer"][0]}) in self.source.checkpoint.entries:
                yield Rule(((naming(key),),), (naming(key),), Same(), over, group=("sidecar",))

    def _activations(self, group: Group) -> Iterator[Rule]:
        """Activation scales of the experts, into the sidecar, back, or along."""
        for name, parts in STACKED.items():
            found = self.source.expert_activations(group.layers[0], name, parts[0])
            published = group.published[parts[0]]
            kept = self._wanted(group.stored[parts[0]], published) == published
            keeps = self.options.sidecar if self.options.to == "native" else kept
            for suffix, spec in found.items() if keeps else ():
                over = {"layer": group.layers}
                experts = tuple(range(group.count))
                if "native" not in (self.left.name, self.right.name):
                    for part in parts:
                        left, right = (_naming(side, part)(suffix) for side in (self.left, self.right))
                        yield Rule(((left,),), (right,), Same(), {**over, "expert": experts})
                    continue
                if self.left.name == "native":
                    own = _naming(self.left, name)(suffix)
                    yield Rule(((own,),), (own,), Same(), over, group=("sidecar",))
                    continue
                pieces = tuple((_naming(self.left, part)(suffix),) for part in parts)
                transform = Reshape((), (1,)) if spec.shape == () else Same()
                right = _naming(self.right, name)(suffix)
                yield Rule(pieces, (right,), transform, over, ("expert", experts), group=("sidecar",))

    def _say_decoded(self) -> None:
        """A note for experts that are decoded because the native layout cannot keep them."""
        kinds: dict[str, list[int]] = {}
        for layer, parts in self.source.forms.experts.items():
            for form in parts.values():
                if not form.plain and form.kind != "mxfp4":
                    kinds.setdefault(form.label, []).append(layer)
        for label, layers in kinds.items() if self.options.experts is None else ():
            held = f"experts of layers {ranges(layers)} are {label}"
            self.source.notes.append(f"{held}: decoded to {self.format}; only MXFP4 stays packed in the native layout")


def _naming(side: Side, part: str) -> Any:
    """A projection's tensors by key: the native names of a stack, or the published ones of each expert."""
    base = side.root + "layers.{layer}." + side.moe + "experts."
    if side.name == "native":
        return lambda key: base + part + ("" if key == "weight" else "_" + key.removeprefix("weight_"))
    return lambda key: base + "{expert}." + part + "." + key
