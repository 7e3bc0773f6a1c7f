"""What a Kimi K2 checkpoint is, read from its names, specs, config and manifest.

| seen | handled as |
|---|---|
| roots `language_model.model.` (K2.5 and later), `model.` (K2, K2-Thinking, text alone) | found from the names |
| grouped experts `mlp.experts.gate_up_proj` | native: the names of Transformers 5; `kconv.json` says what it came from |
| FP8 with `weight_scale_inv`, INT4 pack-quantized, plain | decided per weight from the tensors (`kconv.adapters.weights.forms`) |
| fewer experts than the config says | counted by the router's rows |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kconv.adapters.k2.config import absent_note, text_config, value_faults, vision_config
from kconv.adapters.k2.table import VISION_ROOTS, k2_table
from kconv.adapters.k2.vision import native_shapes, published_shapes
from kconv.adapters.tables import checks
from kconv.adapters.tables.config import Config, quantization
from kconv.adapters.tables.rows import Row, Table
from kconv.adapters.weights.declared import says
from kconv.adapters.weights.forms import ACTIVATIONS
from kconv.adapters.weights.inventory import NO_LAYER, SIDECAR, Forms, Found, Reader, from_facts
from kconv.adapters.weights.vision import Tower, read_forms, tower, vision_names
from kconv.checkpoint.reading import Checkpoint
from kconv.errors import KconvError
from kconv.names import number
from kconv.options import Options
from kconv.spec import dtype_name

ROOTS = (("language_model.model.", "language_model."), ("model.language_model.", ""), ("model.", ""))
GROUPED = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class Side:
    """How one side names its tensors: the layout, the text model's root, and the prefix of the head."""

    name: str
    root: str
    head: str

    def name_of(self, row: Row) -> str:
        """The name template of a row."""
        if row.kind == "head":
            return self.head + row.name
        return self.root + (row.name if row.kind == "model" else "layers.{layer}." + row.name)

    def expert(self, part: str) -> Any:
        """A projection's tensors by key: the names of a stack (native), or the published ones of each expert."""
        base = self.root + "layers.{layer}.mlp.experts."
        if self.name == "native":
            return lambda key: base + part + ("" if key == "weight" else "_" + key.removeprefix("weight_"))
        return lambda key: base + "{expert}." + part + "." + key


@dataclass
class K2Source:
    """A checkpoint of the family, as `read_source` found it."""

    checkpoint: Checkpoint
    layout: Table
    side: Side
    published: Side
    original_config: Config
    tied: bool
    facts: dict[str, Any] = field(default_factory=dict)
    forms: Forms = field(default_factory=Forms)
    counts: dict[int, int] = field(default_factory=dict)
    found: dict[int, Found] = field(default_factory=dict)
    vision: list[str] = field(default_factory=list)
    tower: Tower = field(default_factory=Tower)
    outside: list[str] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)
    activations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    span: tuple[int, int] | None = None

    @property
    def native(self) -> bool:
        """Whether the names are Transformers 5's."""
        return self.side.name == "native"

    @property
    def dtype(self) -> str:
        """The dtype of the config, in which quantised weights are decoded."""
        return dtype_name(self.layout.config.get("dtype") or "bfloat16")

    def inside(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """The layers that `--layers` keeps."""
        return layers if self.span is None else tuple(i for i in layers if self.span[0] <= i <= self.span[1])

    def layer_groups(self, row: Row) -> Iterator[tuple[tuple[int, ...], int | None]]:
        """Layers that share a row's shape."""
        if row.kind in ("model", "head"):
            yield (), None
        elif "E" not in row.shape:
            if layers := self.inside(self.layout.kinds[row.kind]):
                yield layers, None
        else:
            for count in sorted(set(self.counts.values())):
                yield tuple(i for i, n in self.counts.items() if n == count), count

    def keeps_vision(self, options: Options) -> bool:
        """Whether vision tensors go along: by default only to `hf`."""
        return bool(self.vision) and (options.vision or ("keep" if options.to == "hf" else "drop")) == "keep"


def read_source(checkpoint: Checkpoint, options: Options) -> K2Source:
    """Read a checkpoint's layout; raises KconvError where it is none of this family, collects smaller problems."""
    notes, problems = list(checkpoint.notes), list[str]()
    text = text_config(checkpoint.config)
    layout = k2_table(text)
    said = (checkpoint.manifest or {}).get("to") == "native"  # without a layer of experts no name tells it
    native = said or any(n.endswith(tuple(f".mlp.experts.{g}" for g in GROUPED)) for n in checkpoint.entries)
    manifest = (checkpoint.manifest or {}) if native else {}
    facts = _facts(manifest.get("facts") or {}, checkpoint.where)
    original = manifest.get("source", {}).get("config") or checkpoint.config
    root, head = _root(checkpoint)
    side = Side("native" if native else "hf-text" if root == "model." else "hf", root, head)
    published = Side("hf", facts.get("root", "model."), facts.get("head", "")) if native else side
    tied = checks.tied_head(
        checkpoint, head + checks.HEAD, config_ties=text["tie_word_embeddings"], asked=options.tie, problems=problems
    )
    source = K2Source(checkpoint, layout, side, published, original, tied, facts, notes=notes, problems=problems)
    source.span = options.layers
    _scan(source)
    pruned = {"n_routed_experts": min(source.counts.values())} if source.counts else {}
    problems += value_faults(text | pruned)
    notes += absent_note(text)
    checks.beyond(checkpoint, source.beyond, len(layout.kinds["layer"]), problems)
    checks.next_tokens(text, bool(source.beyond), notes)
    if source.keeps_vision(options):
        source.tower = _tower(source)
    if native:
        source.forms = from_facts({"formats": [], **facts}, layout.kinds["moe"], layout.experts, checkpoint.where)
        return source
    block = quantization(original, notes)
    _read_forms(source, Reader(checkpoint, layout, says(block, None), options.block, notes, problems))
    checks.quantized(block, source.forms.quantised(), notes)
    source.facts = {"root": root, "head": head, "formats": source.forms.to_json()}
    return source


def _tower(source: K2Source) -> Tower:
    """The vision tensors with their shapes; a config that leaves sizes out has Transformers' defaults, which are K2.5's."""
    shapes = (native_shapes if source.native else published_shapes)(
        vision_config(source.original_config), source.layout.sizes["C"]
    )
    return tower(source.vision, shapes, (), source.notes)


def _facts(facts: Config, where: str) -> Config:
    for key, kind in {"root": str, "head": str, "formats": list}.items():
        if key in facts and not isinstance(facts[key], kind):
            hint = "copy kconv.json again from the conversion it came from"
            raise KconvError(f"{where}/kconv.json: facts.{key} is {facts[key]!r}", hint=hint)
    return dict(facts)


def _root(checkpoint: Checkpoint) -> tuple[str, str]:
    found = [(r, h) for r, h in ROOTS if any(n.startswith(r + "layers.") for n in checkpoint.entries)]
    if not found:
        some = ", ".join(list(checkpoint.entries)[:3])
        hint = "give a checkpoint with the published names, or one that kconv converted"
        raise KconvError(f"{checkpoint.where}: no decoder layers under any known root; names are like {some}", hint=hint)
    if len(found) > 1:
        raise KconvError(f"{checkpoint.where}: {checks.two_roots(checkpoint, [r for r, _ in found])}")
    return found[0]


def _scan(source: K2Source) -> None:
    """Count experts per layer; list vision, activation scales and what lies out of range."""
    prefix, depth = source.side.root + "layers.", len(source.layout.kinds["layer"])
    seen = vision_names(source.checkpoint, VISION_ROOTS)
    source.vision = [n for n in seen if n.rpartition(".")[2] not in ACTIVATIONS]
    source.activations += [n for n in seen if n.rpartition(".")[2] in ACTIVATIONS]
    for name, entry in source.checkpoint.entries.items():
        if not name.startswith(prefix):
            continue
        parts = name[len(prefix) :].split(".")
        layer = number(parts[0])
        if layer is not None and layer >= depth:
            source.beyond.append(name)
        elif source.span and layer is not None and not source.span[0] <= layer <= source.span[1]:
            source.outside.append(name)
        elif parts[-1] in ACTIVATIONS:
            source.activations.append(name)
        elif layer is not None and parts[1:3] == ["mlp", "experts"] and len(parts) == 6 and not entry.file.startswith(SIDECAR):
            source.found.setdefault(layer, Found()).add(parts[4], parts[5], entry.spec)
    for layer in source.inside(source.layout.kinds["moe"]):
        router = source.checkpoint.entries.get(f"{prefix}{layer}.mlp.gate.weight")
        rows = router.spec.shape[0] if router and router.spec.shape else 0
        source.counts[layer] = rows or source.layout.sizes["E"]
    said = sorted(set(source.counts.values()))
    if said and said != [source.layout.sizes["E"]]:
        found = ", ".join(map(str, said))
        source.notes.append(f"the config says {source.layout.sizes['E']} experts, the routers have {found} rows")


def _read_forms(source: K2Source, reader: Reader) -> None:
    """The form of every weight of a published checkpoint."""
    read_forms(source.tower, source.checkpoint, reader)
    for row in source.layout.rows():
        if len(row.shape) != 2 or (row.kind == "head" and source.tied):
            continue
        stem = source.side.name_of(row).removesuffix("weight")
        for layers, count in source.layer_groups(row):
            shape = source.layout.shape(row.shape, **({"E": count} if count else {}))
            for layer in layers or (NO_LAYER,):
                reader.row(row, layer, stem.format_map({"layer": layer}), shape)
    for layer, count in source.counts.items():
        base = f"{source.side.root}layers.{layer}.mlp.experts."
        if not reader.experts(layer, base, source.found.get(layer, Found()), count):
            source.problems.append(f"layer {layer} holds experts in several forms; one form is expected in a layer")
    source.forms = reader.finish(quiet=not reader.forms.quantised())
