"""The rules of every weight of the K3 table but the routed experts.

| row | source -> target | how |
|---|---|---|
| `A_log` | published <-> native | trimmed, reshaped or the same |
| a weight [O, I] | any form of `formats` | decoded for `native`, kept for `hf`, re-encoded on request (`weights.rules`) |
| anything else | | the same bytes, or a cast |
| activation scales | published <-> native | the same bytes, in the sidecar; left out where the weight loses its form |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kconv.adapters.k3.source import K3Source, Side
from kconv.adapters.tables import checks
from kconv.adapters.tables.rows import Row
from kconv.adapters.weights.forms import FP8_BLOCK, Form, plain
from kconv.adapters.weights.rules import WeightRules
from kconv.options import Options
from kconv.planning.rules import Rule, rule
from kconv.spec import FLOATS, Spec, dtype_name
from kconv.transforms.base import Same, Transform
from kconv.transforms.dtype import Cast
from kconv.transforms.shape import Reshape, TrimZeros

# What RedHatAI/Kimi-K3-FP8-BLOCK quantises beside the experts; attention stays, since engines fuse q, k, v with b_proj.
FP8_ROWS = frozenset({
    *(f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
    *(f"mlp.shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")),
    "mlp.routed_expert_down_proj.weight", "mlp.routed_expert_up_proj.weight",
})  # fmt: skip


class RowRules:
    """Makes the rules, and remembers the form that each row has in the target."""

    def __init__(self, source: K3Source, left: Side, right: Side, options: Options) -> None:
        self.source, self.left, self.right, self.options = source, left, right, options
        self.backward = source.side == right != left
        self.forms: dict[str, set[Form]] = {}
        self.changed = False
        self.decodes = False
        self._reformed: set[tuple[str, int]] = set()

    def rules(self) -> Iterator[Rule]:
        """Every row's rules, then those of activation scales."""
        for row in self.source.layout.rows():
            if row.name == "lm_head.weight" and self.source.tied:
                continue
            for layers, count in self.source.layer_groups(row):
                if len(row.shape) == 2 and self.left.name_of(row).endswith(".weight"):
                    yield from self._weight(row, layers, count)
                else:
                    yield self._plain(row, layers, count)
        yield from self._activations()

    def _plain(self, row: Row, layers: tuple[int, ...], count: int | None) -> Rule:
        shape, why = self._shape(row, count)
        if row.name.endswith("A_log") and self.left.name != "native":
            shape, why = self._a_log(), f"{why} alone, padded with zeros to a multiple of 8, or as [1, 1, heads, 1]"
        expect = ((tuple(Spec(d, shape) for d in sorted(self._floats())),),)
        over = {"layer": layers} if layers else {}
        return rule(self.left.name_of(row), self.right.name_of(row), self._transform(row), over=over, expect=expect, why=why)

    def _a_log(self) -> tuple[int, ...]:
        """The published form of A_log. Text-only from native it has no padding, with which the remote code does not load."""
        shape = self.source.a_log_shape
        bare = self.backward and self.options.to == "hf-text" and len(shape) == 1
        return (self.source.layout.sizes["H"],) if bare else shape

    def _transform(self, row: Row) -> Transform:
        if row.name.endswith("A_log") and self.left.name != self.right.name:
            heads, shape = self.source.layout.sizes["H"], self._a_log()
            if len(shape) > 1:
                return Reshape(shape, (heads,)) if "native" in (self.left.name, self.right.name) else Same()
            if shape[0] != heads:
                return TrimZeros(size=heads, padded=shape[0])
        if self.options.dtype and not row.fp32:
            stored, wanted = self.source.stored_dtype(row), dtype_name(self.options.dtype)
            return Cast(wanted, stored) if self.backward else Cast(stored, wanted)
        return Same()

    def _weight(self, row: Row, layers: tuple[int, ...], count: int | None) -> Iterator[Rule]:
        shape, why = self._shape(row, count)
        for published, mine in self.source.forms.split(row.name, layers):
            native = self.source.side.name == "native"
            dtype = self._stored(row, mine)
            stored = plain(dtype) if native or published is None else published
            wanted = self._wanted(row, published, dtype)
            self.forms.setdefault(row.name, set()).add(wanted)
            self.decodes |= wanted.plain and not stored.plain
            if wanted != (published or wanted) or (published is None and not wanted.plain):
                self._lose(row, mine, wanted)
            made = WeightRules(
                stored, wanted, (_naming(self.left, row),), _naming(self.right, row), self.backward, shape,
                frozenset({*self._floats(), dtype} if native else self._floats()),
                self._sidecar(row, mine, stored, wanted, published), native and wanted == published,
            )  # fmt: skip
            over = {"layer": mine} if mine else {}
            yield from made.rules(over, None, why)
            if native and self.options.to == "native" and published and not self.options.dtype:
                yield from self._carried(row, published, over, mine)

    def _wanted(self, row: Row, published: Form | None, dtype: str) -> Form:
        """The form of a row in the target."""
        to, asked = self.options.to, self.options.dtype
        if self.options.weights and row.name in FP8_ROWS and to != "native":
            return FP8_BLOCK
        if to != "native" and published and not asked:
            return published
        if asked:
            return plain(dtype_name(asked))
        decoded = published is not None and self.source.side.name != "native"
        return plain(self.source.dtype) if decoded else plain(dtype)

    def _sidecar(self, row: Row, layers: tuple[int, ...], stored: Form, wanted: Form, published: Form | None) -> bool:
        """Whether scales go along, by choice, or lie beside the values, by presence."""
        if self.source.side.name != "native":
            return self.options.sidecar
        first = (published.kept if published else ())[:1]
        return bool(first) and self._names(row, layers[:1], first[0])[0] in self.source.checkpoint.entries

    def _carried(self, row: Row, published: Form, over: dict, layers: tuple[int, ...]) -> Iterator[Rule]:
        """A native checkpoint's own scales go along to another native one."""
        for suffix in published.kept if self.options.sidecar else ():
            if self._names(row, layers[:1], suffix)[0] in self.source.checkpoint.entries:
                name = _naming(self.right, row)(suffix)
                yield Rule(((name,),), (name,), Same(), over, group=("sidecar",))

    def _lose(self, row: Row, layers: tuple[int, ...], wanted: Form) -> None:
        if not (wanted.plain and self.options.to == "native"):
            self.changed = True
        stem = row.name.removesuffix("weight")
        self._reformed |= {(stem, layer) for layer in layers}

    def _activations(self) -> Iterator[Rule]:
        """Activation scales outside the experts, from the published side into the sidecar or back."""
        for tail, specs in self.source.activations().items():
            stem = tail.rpartition(".")[0] + "."
            layers = tuple(i for i in specs if self.options.to == "native" or (stem, i) not in self._reformed)
            if not layers or (self.options.to == "native" and not self.options.sidecar):
                continue
            group = ("sidecar",) if "native" in (self.right.name,) else ("model",)
            yield rule(_tail(self.left, tail), _tail(self.right, tail), over={"layer": layers}, group=group)

    def _names(self, row: Row, layers: tuple[int, ...], suffix: str) -> list[str]:
        template = _naming(self.source.side, row)(suffix)
        return [template.format_map({"layer": layer}) for layer in layers or (0,)]

    def _stored(self, row: Row, layers: tuple[int, ...]) -> str:
        """The dtype of the first of these layers' tensors, the config's where it is quantised or missing."""
        entry = self.source.checkpoint.entries.get(self._names(row, layers[:1], "weight")[0])
        return entry.spec.dtype if entry and entry.spec.dtype in FLOATS else self.source.dtype

    def _shape(self, row: Row, count: int | None) -> tuple[tuple[int, ...], str]:
        counts = {"E": count} if count else {}
        return self.source.layout.shape(row.shape, **counts), self.source.layout.formula(row.shape, **counts)

    def _floats(self) -> set[str]:
        """Dtypes that a plain tensor of the left side may have: the configs' (what no cast touches keeps the source's), F32,
        and what a cast makes."""
        dtype = self.source.layout.config.get("dtype")
        allowed = {dtype_name(dtype), "F32"} if dtype else set(FLOATS)
        if dtype and self.source.side.name == "native":
            allowed |= checks.published_dtype(self.source.original_config)
        if self.options.dtype and self.left != self.source.side:
            allowed.add(dtype_name(self.options.dtype))
        return allowed


def _naming(side: Side, row: Row) -> Any:
    stem = side.name_of(row).removesuffix("weight")
    return lambda key: stem + key


def _tail(side: Side, tail: str) -> str:
    """A tensor below a layer, given by its native name."""
    own = tail.startswith("mlp.") and side.name != "native" and tail.split(".")[1] not in ("gate_proj", "up_proj", "down_proj")
    return side.root + "layers.{layer}." + (side.moe + tail.removeprefix("mlp.") if own else tail)
