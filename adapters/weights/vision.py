"""Vision tensors that keep their names: each held against the tower's sizes, and stored, decoded or cast like any weight.

| tensor | answer |
|---|---|
| one that `vision_config` promises | dtype and shape are checked; where it is missing, it is named |
| a weight [O, I] in a quantised form | kept for a published target; decoded for the native one or a cast, scales in the sidecar |
| a scale without codes, codes without their scale, BOOL | a problem that names it |
| one of a tower that `vision_config` does not describe | its form is checked, its shape cannot be; a note says so |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kconv.adapters.tables.rows import Row
from kconv.adapters.weights.forms import ACTIVATIONS, SCALES, Form, plain
from kconv.adapters.weights.inventory import NO_LAYER, SIDECAR, Forms, Reader
from kconv.adapters.weights.rules import WeightRules
from kconv.checkpoint.reading import Checkpoint
from kconv.options import Options
from kconv.planning.rules import Rule, rule
from kconv.spec import FLOATS, Spec, dtype_name
from kconv.transforms.base import Same, Transform
from kconv.transforms.dtype import Cast

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Tower:
    """The vision tensors of a checkpoint.

    Args:
        names: those that are there.
        shapes: published name -> shape of those that the config promises; empty where it does not describe this tower.
    """

    names: tuple[str, ...] = ()
    shapes: Shapes = dataclasses.field(default_factory=dict)


def tower(names: Sequence[str], shapes: Shapes, lacking: Iterable[str], notes: list[str]) -> Tower:
    """The tower of these names; a note says what cannot be checked, for lack of keys or since the config describes another."""
    lacks = list(lacking)
    if lacks:
        notes.append(f"vision_config lacks {', '.join(lacks)}: the shapes of {len(names)} vision tensors are not checked")
        return Tower(tuple(names))
    stems = {name.removesuffix("weight") for name in shapes}
    if not any(name in shapes or name.rpartition(".")[0] + "." in stems for name in names):
        notes.append(f"none of the {len(names)} vision tensors is one that vision_config describes ({names[0]}): their shapes "
                     "are not checked")  # fmt: skip
        return Tower(tuple(names))
    extra = [n for n in names if n not in shapes and not _of_weight(n)]
    if extra:
        notes.append(f"{len(extra)} vision tensors are none that vision_config describes, kept as they are: {extra[0]}")
    return Tower(tuple(names), shapes)


def read_forms(found: Tower, checkpoint: Checkpoint, reader: Reader) -> None:
    """The stored form of every weight [O, I] of a published tower, by its name, in the reader's forms."""
    stems = dict.fromkeys(n.rpartition(".")[0] + "." for n in found.names if n.endswith(".weight") or _of_weight(n))
    for stem in stems:
        shape = found.shapes.get(stem + "weight") or _own_shape(checkpoint, stem)
        if len(shape) == 2:
            reader.row(Row(stem + "weight", "vision", ()), NO_LAYER, stem, shape)


def _of_weight(name: str) -> bool:
    """Whether a tensor is a part of a quantised weight."""
    return name.rpartition(".")[2] in {"weight_packed", *SCALES, *ACTIVATIONS}


def _own_shape(checkpoint: Checkpoint, stem: str) -> tuple[int, ...]:
    """[O, I] of a weight that no config speaks of, from what is stored."""
    for suffix, per_element in (("weight", 1), ("weight_packed", 2)):
        if entry := checkpoint.entries.get(stem + suffix):
            spec = entry.spec
            width = 8 if spec.dtype == "I32" else per_element
            return (*spec.shape[:-1], spec.shape[-1] * width) if spec.shape else ()
    return (0, 0)


class VisionRules:
    """The rules of a tower between two layouts that name it alike; remembers the forms that its weights have in the target."""

    def __init__(self, found: Tower, checkpoint: Checkpoint, forms: Forms, options: Options, *, native: bool, dtype: str,
                 group: str = "") -> None:  # fmt: skip
        self.found, self.checkpoint, self.stored_forms, self.options = found, checkpoint, forms, options
        self.native, self.dtype = native, dtype
        self.asked = dtype_name(options.dtype) if options.dtype else None
        self.group = group or ("vision" if native or options.to == "native" else "model")
        self.forms: dict[str, set[Form]] = {}
        self.changed = False
        self.decodes = False

    def rules(self) -> Iterator[Rule]:
        """A rule a tensor, in the source's order, then those of promised tensors that are missing."""
        unread = {n for names in self.stored_forms.unread.values() for n in names}
        done: set[str] = set()
        for name in (*self.found.names, *self.found.shapes):
            stem, _, suffix = name.rpartition(".")
            weight = f"{stem}.weight" if _of_weight(name) else name
            published = self.stored_forms.row(weight)
            if name in unread or weight in done or (weight not in self.found.shapes and _of_weight(name) and not published):
                continue
            if suffix in ACTIVATIONS:
                yield from self._activation(name, weight, published)
                continue
            done.add(weight)
            yield from self._tensor(weight, published)

    def _tensor(self, name: str, published: Form | None) -> Iterator[Rule]:
        entry = self.checkpoint.entries.get(name)
        shape = self.found.shapes.get(name) or (entry.spec.shape if entry else _own_shape(self.checkpoint, name[:-6]))
        if len(shape) != 2 or not name.endswith(".weight"):
            yield self._plain(name, shape)
            return
        dtype = entry.spec.dtype if entry and entry.spec.dtype in FLOATS else self.dtype
        stored = plain(dtype) if self.native or published is None else published
        wanted = self._wanted(published, dtype)
        self.forms[name] = {wanted}
        self.decodes |= wanted.plain and not stored.plain
        self.changed |= published is not None and wanted != published and self.options.to != "native"
        spell = name.removesuffix("weight").__add__
        backward = self.native and self.options.to != "native"
        sidecar = self._sidecar(name, published)
        made = WeightRules(stored, wanted, (spell,), spell, backward, shape, FLOATS, sidecar, self.native and wanted == published)
        for one in made.rules({}, None, ""):
            yield dataclasses.replace(one, group=tuple(self.group if g == "model" else g for g in one.group))
        if self.native and self.options.to == "native" and published and sidecar and self.options.sidecar and not self.asked:
            yield from (rule(spell(key), spell(key), group=("sidecar",)) for key in published.kept)

    def _wanted(self, published: Form | None, dtype: str) -> Form:
        if self.asked:
            return plain(self.asked)
        if published and self.options.to != "native":
            return published
        return plain(self.dtype if published and not self.native else dtype)

    def _sidecar(self, name: str, published: Form | None) -> bool:
        """Whether scales go along, by choice, or lie beside the values, by presence."""
        if not self.native:
            return self.options.sidecar
        kept = published.kept if published else ()
        return bool(kept) and name.removesuffix("weight") + kept[0] in self.checkpoint.entries

    def _plain(self, name: str, shape: tuple[int, ...]) -> Rule:
        """A tensor that has no other form than the plain one; a buffer of an unknown tower may be of any dtype."""
        entry = self.checkpoint.entries.get(name)
        free = name not in self.found.shapes and not name.endswith((".weight", ".bias"))
        expect = None if free else ((tuple(Spec(d, shape) for d in sorted(FLOATS)),),)
        transform: Transform = Same()
        if self.asked and entry and entry.spec.dtype in FLOATS and entry.spec.dtype != self.asked:
            ends = (entry.spec.dtype, self.asked)
            transform = Cast(*(ends[::-1] if self.native and self.options.to != "native" else ends))
        return rule(name, name, transform, expect=expect, group=(self.group,))

    def _activation(self, name: str, weight: str, published: Form | None) -> Iterator[Rule]:
        """A scale of activations, where the weight keeps its form, or beside the sidecar's scales."""
        entry = self.checkpoint.entries.get(name)
        kept = self.options.sidecar if self.options.to == "native" else published and self._wanted(published, "") == published
        if entry and kept:
            group = "sidecar" if "native" in (self.options.to, "native" if self.native else "") else "model"
            yield rule(name, name, group=(group,))


def vision_names(checkpoint: Checkpoint, roots: tuple[str, ...]) -> list[str]:
    """The vision tensors of a checkpoint, without what lies in the sidecar."""
    mine = (a for a in checkpoint.alike if a.name.startswith(roots) and not a.entry.file.startswith(SIDECAR))
    return [name for alike in mine for name in alike.names]
