"""What a K3-family checkpoint is, read from its names, specs, config and manifest.

| seen in the wild | handled as |
|---|---|
| roots `language_model.model.`, `model.language_model.`, `model.` | found from the names; two at once are refused |
| `A_log` [H], [H padded to a multiple of 8 or 128], [1,1,H,1] | recorded, so that the way back writes the same form |
| `self_attention_res_proj.weight` or `self_attention_res.proj_weight` | recorded likewise |
| a dense layer's `mlp` called `block_sparse_moe` (Transformers' `save_pretrained`) | recorded likewise |
| experts quantised, plain, fewer than the config says (pruned), different per layer | counted per layer |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from kconv.adapters.k3 import indexer, vision
from kconv.adapters.k3.config import ABSENT, absent_note, text_config, value_faults
from kconv.adapters.k3.table import VISION_ROOTS, k3_table
from kconv.adapters.tables import checks
from kconv.adapters.tables.config import Config, quantization
from kconv.adapters.tables.rows import Row, Table
from kconv.adapters.weights.declared import HF_QUANT, disagreement, says
from kconv.adapters.weights.forms import ACTIVATIONS
from kconv.adapters.weights.inventory import SIDECAR, Forms, Found, Reader, from_facts
from kconv.adapters.weights.vision import Tower, read_forms, tower, vision_names
from kconv.checkpoint.reading import Checkpoint
from kconv.errors import KconvError
from kconv.names import number, ranges
from kconv.options import Options
from kconv.spec import Spec, dtype_name

ROOTS = (("language_model.model.", "language_model."), ("model.language_model.", ""), ("model.", ""))
MOST_EXPERTS = 1 << 16
DOTTED = {"_res_norm.weight": "_res.norm_weight", "_res_proj.weight": "_res.proj_weight"}


@dataclass(frozen=True)
class Side:
    """How one side names its tensors: the layout, the text model's root, and the prefix of the head."""

    name: str
    root: str
    head: str
    dotted_res: bool = False
    dense_as_moe: bool = False

    def name_of(self, row: Row) -> str:
        """The name template of a row on this side."""
        name = row.name
        if self.name != "native" and (row.kind == "moe" or (row.kind == "dense" and self.dense_as_moe)):
            name = self.moe + name.removeprefix("mlp.")
        if self.dotted_res:
            for plain, dotted in DOTTED.items():
                name = name.removesuffix(plain) + dotted if name.endswith(plain) else name
        if row.kind == "head":
            return self.head + name
        return self.root + (name if row.kind == "model" else "layers.{layer}." + name)

    @property
    def moe(self) -> str:
        """Where a layer's mixture of experts lies."""
        return "mlp." if self.name == "native" else "block_sparse_moe."


@dataclass
class K3Source:
    """A checkpoint of the family, as `read_source` found it."""

    checkpoint: Checkpoint
    layout: Table
    side: Side
    published: Side
    original_config: Config
    facts: dict[str, Any]
    a_log_shape: tuple[int, ...]
    tied: bool
    experts: dict[int, tuple[int, str]] = field(default_factory=dict)
    forms: Forms = field(default_factory=Forms)
    found: dict[int, Found] = field(default_factory=dict)
    vision: list[str] = field(default_factory=list)
    tower: Tower = field(default_factory=Tower)
    outside: list[str] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    span: tuple[int, int] | None = None

    @property
    def depth(self) -> int:
        """Number of layers by the config."""
        return len(self.layout.kinds["layer"])

    def inside(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """The layers that `--layers` keeps."""
        return layers if self.span is None else tuple(i for i in layers if self.span[0] <= i <= self.span[1])

    def layer_groups(self, row: Row) -> Iterator[tuple[tuple[int, ...], int | None]]:
        """Layers that share a row's shape: all of its kind, or those with one expert count."""
        if row.kind in ("model", "head"):
            yield (), None
            return
        layers = self.inside(self.layout.kinds[row.kind])
        if "E" not in row.shape:
            if layers:
                yield layers, None
            return
        for count in sorted({self.experts[i][0] for i in layers}):
            yield tuple(i for i in layers if self.experts[i][0] == count), count

    def stored_dtype(self, row: Row) -> str:
        """The dtype in which the first tensor of a row is stored (F32 where it is missing)."""
        layers = self.inside(self.layout.kinds.get(row.kind, ()))
        name = self.side.name_of(row).format_map({"layer": layers[0] if layers else 0})
        entry = self.checkpoint.entries.get(name)
        return entry.spec.dtype if entry else "F32"

    @property
    def dtype(self) -> str:
        """The dtype of the config, in which quantised weights are decoded."""
        return dtype_name(self.layout.config.get("dtype") or "bfloat16")

    def activations(self) -> dict[str, dict[int, Spec]]:
        """Activation scales outside the experts: name below the layer, as named natively -> layer -> spec."""
        return self.forms.activations

    def expert_activations(self, layer: int, stacked: str, part: str) -> dict[str, Spec]:
        """Activation scales of a projection's experts as published; of a native checkpoint, those that lie beside it."""
        found = {s: spec for (p, s), spec in self.forms.expert_activations.get(layer, {}).items() if p == part}
        if self.side.name != "native":
            return found
        base = f"{self.side.root}layers.{layer}.mlp.experts.{stacked}_"
        return {s: spec for s, spec in found.items() if base + s in self.checkpoint.entries}

    def keeps_vision(self, options: Options) -> bool:
        """Whether vision tensors go along: by default only to `hf`."""
        return bool(self.vision) and (options.vision or ("keep" if options.to == "hf" else "drop")) == "keep"

    def published_config(self) -> Config:
        """The config that the checkpoint was published with; raises KconvError for a native one without its manifest."""
        if self.side.name == "native" and not (self.checkpoint.manifest or {}).get("source", {}).get("config"):
            raise KconvError(
                f"{self.checkpoint.where} has no kconv.json of a conversion, so its published config is not known",
                hint="copy kconv.json from the conversion it came from, or use --to hf-text",
            )
        return self.original_config


def read_source(checkpoint: Checkpoint, options: Options) -> K3Source:
    """Read a checkpoint's layout; raises KconvError where it is no K3 layout at all, collects smaller problems."""
    notes, problems = list(checkpoint.notes), list[str]()
    text = text_config(checkpoint.config, trusted=indexer.has_indexer(checkpoint))
    native = text["model_type"] == "kimi_k3_text"
    side = Side("native", "model.", "") if native else _published(checkpoint, problems)
    if found := indexer.indexer(checkpoint, text, side.root, options, notes, problems):
        text["indexer_config"] = found
    layout = k3_table(text)
    manifest = (checkpoint.manifest or {}) if native else {}
    original = manifest.get("source", {}).get("config") or checkpoint.config
    hf_quant = checkpoint.json(HF_QUANT)
    block = quantization(original, notes) or (hf_quant and hf_quant.get("quantization"))
    facts = checks.manifest_facts(manifest.get("facts") or {}, layout.sizes["H"], checkpoint.where)
    a_log = tuple(facts.get("a_log_shape") or _a_log_shape(checkpoint, layout, side))
    if not native:
        facts = {"root": side.root, "head": side.head, "dotted_res": side.dotted_res, "a_log_shape": list(a_log)}
        facts |= {"dense_as_moe": True} if side.dense_as_moe else {}
    published = side if not native else Side(
        "hf", facts.get("root", ROOTS[0][0]), facts.get("head", ROOTS[0][1]), facts.get("dotted_res", False),
        facts.get("dense_as_moe", False),
    )  # fmt: skip
    head = side.head + checks.HEAD
    tied = checks.tied_head(checkpoint, head, config_ties=text["tie_word_embeddings"], asked=options.tie, problems=problems)
    source = K3Source(checkpoint, layout, side, published, original, facts, a_log, tied, notes=notes, problems=problems)
    source.span = options.layers
    _scan(source)
    _check_config(source, text, options)
    if source.keeps_vision(options):
        source.tower = _tower(source)
    if native:
        source.forms = from_facts(facts, layout.kinds["moe"], layout.experts, checkpoint.where)
        _activations(source, source.forms)
        return source
    _read_forms(source, Reader(checkpoint, layout, says(quantization(original, []), hf_quant), options.block, notes, problems))
    facts["experts"] = sorted({fmt for _, fmt in source.experts.values()})
    facts["formats"] = source.forms.to_json()
    facts |= {"expert_activations": scales} if (scales := source.forms.activations_to_json()) else {}
    checks.quantized(block, source.forms.quantised(), notes)
    if said := disagreement(quantization(original, []), hf_quant):
        notes.append(said)
    return source


def _read_forms(source: K3Source, reader: Reader) -> None:
    """The form of every weight of a published checkpoint."""
    side = source.side
    read_forms(source.tower, source.checkpoint, reader)
    for row in source.layout.rows():
        name = side.name_of(row)
        if len(row.shape) != 2 or not name.endswith(".weight") or (row.name == checks.HEAD and source.tied):
            continue
        for layers, count in source.layer_groups(row):
            shape = source.layout.shape(row.shape, **({"E": count} if count else {}))
            for layer in layers or (-1,):
                reader.row(row, layer, name.format_map({"layer": layer}).removesuffix("weight"), shape)
    for layer, (count, _) in source.experts.items():
        base = f"{side.root}layers.{layer}.{side.moe}experts."
        alike = reader.experts(layer, base, source.found.get(layer, Found()), count)
        if not alike or len({f.plain for f in reader.forms.experts[layer].values()}) > 1:
            source.problems.append(f"layer {layer} holds experts both quantised and plain; one form is expected in a layer")
        kinds = {"packed" if f.kind == "mxfp4" else f.kind for f in reader.forms.experts[layer].values()}
        source.experts[layer] = (count, "+".join(sorted(kinds)) or "packed")
    _activations(source, reader.forms)
    source.forms = reader.finish(quiet=not reader.forms.quantised())


def _check_config(source: K3Source, text: Config, options: Options) -> None:
    """What the config says that no model can be made of, that it leaves out, and that the tensors contradict."""
    counts = {i: n for i, (n, _) in source.experts.items()} if not options.layers else {}
    source.problems += value_faults(text, counts)
    source.notes += absent_note(text, ABSENT)
    checks.beyond(source.checkpoint, source.beyond, source.depth, source.problems)
    checks.next_tokens(text, bool(source.beyond), source.notes)


def _tower(source: K3Source) -> Tower:
    """The vision tensors, with the shapes that the published config gives them."""
    said = source.original_config.get("vision_config")
    config = said if isinstance(said, dict) else {}
    lacking = vision.lacking(config)
    prefix = "model." if any(n.startswith("model.") for n in source.vision) else ""
    shapes = {} if lacking else vision.shapes(config, source.layout.sizes["C"], prefix)
    return tower(source.vision, shapes, lacking, source.notes)


def _activations(source: K3Source, forms: Forms) -> None:
    """Activation scales outside the routed experts."""
    prefix, moe, layers = source.side.root + "layers.", source.side.moe, set(source.inside(source.layout.kinds["layer"]))
    for name, entry in ((n, source.checkpoint.entries[n]) for a in source.checkpoint.alike
                        if a.name.rpartition(".")[2] in ACTIVATIONS and a.name.startswith(prefix) for n in a.names):  # fmt: skip
        layer, _, tail = name[len(prefix) :].partition(".")
        if number(layer) in layers and not tail.startswith(f"{moe}experts."):
            forms.activations.setdefault(tail.replace(moe, "mlp.", 1), {})[int(layer)] = entry.spec


def _published(checkpoint: Checkpoint, problems: list[str]) -> Side:
    """How this checkpoint's published names are made."""
    found = [(r, h) for r, h in ROOTS if any(a.name.startswith(r + "layers.") for a in checkpoint.alike)]
    if not found:
        some = ", ".join(list(checkpoint.entries)[:3])
        raise KconvError(f"{checkpoint.where}: no decoder layers under any known root; names are like {some}")
    if len(found) > 1:
        problems.append(checks.two_roots(checkpoint, [r for r, _ in found]))
    root, head = found[0]
    checks.own_names(checkpoint)
    plain, dotted = (
        [n for a in checkpoint.alike if a.name.endswith(tuple(ends)) for n in a.names] for ends in (DOTTED, DOTTED.values())
    )
    if plain and dotted:
        problems.append(checks.two_spellings(checkpoint, plain, dotted))
    dense = any(a.name.endswith(".block_sparse_moe.gate_proj.weight") for a in checkpoint.alike)
    return Side("hf" if root != "model." else "hf-text", root, head, len(dotted) > len(plain), dense)


def _a_log_shape(checkpoint: Checkpoint, layout: Table, side: Side) -> tuple[int, ...]:
    """The form of A_log that most KDA layers have, among those that are one; [H] where none is."""
    heads = layout.sizes["H"]
    if side.name == "native":
        return (-(-heads // 128) * 128,)
    entries = [checkpoint.entries.get(f"{side.root}layers.{i}.self_attn.A_log") for i in layout.kinds["kda"]]
    shapes = Counter(e.spec.shape for e in entries if e and checks.a_log_form(e.spec.shape, heads))
    return shapes.most_common(1)[0][0] if shapes else (heads,)


def _scan(source: K3Source) -> None:
    """Count experts and find their format per layer; list vision and out-of-range tensors."""
    prefix = source.side.root + "layers."
    seen: dict[int, set[int] | range] = {}
    formats: dict[int, set[str]] = {}
    moe, native = source.side.moe.rstrip("."), source.side.name == "native"
    source.vision = vision_names(source.checkpoint, VISION_ROOTS + tuple("model." + r for r in VISION_ROOTS))
    for alike in source.checkpoint.alike:
        name, entry = alike.name, alike.entry
        if not name.startswith(prefix):
            continue
        parts = name[len(prefix) :].split(".")
        layer = number(parts[0])
        if layer is not None and layer >= source.depth:
            source.beyond += alike.names
        elif source.span and layer is not None and not source.span[0] <= layer <= source.span[1]:
            source.outside += alike.names
        elif layer is None or parts[1:3] != [moe, "experts"] or len(parts) < 4:
            continue
        elif native:
            seen[layer] = range(entry.spec.shape[0] if entry.spec.shape else 0)
            formats.setdefault(layer, set()).add(_native_format(parts[3]))
        elif alike.numbers:
            seen.setdefault(layer, set()).update(alike.numbers)  # type: ignore[union-attr]
            if len(parts) == 6 and not entry.file.startswith(SIDECAR):
                source.found.setdefault(layer, Found()).add(parts[4], parts[5], entry.spec)
    source.vision, source.outside, source.beyond = (_in_order(source, n) for n in (source.vision, source.outside, source.beyond))
    for layer in source.inside(source.layout.kinds["moe"]):
        source.experts[layer] = _count(source, layer, seen.get(layer, set()), formats.get(layer, set()) - {"scale"})
    _compare_with_config(source)


def _in_order(source: K3Source, names: list[str]) -> list[str]:
    """Names as the checkpoint has them: a plan's digest is made of what it drops, in that order."""
    held = set(names)
    return [n for n in source.checkpoint.entries if n in held] if held else []


def _native_format(name: str) -> str:
    return "packed" if name.endswith("_packed") else "plain" if name.endswith("_proj") else "scale"


def _count(source: K3Source, layer: int, seen: Collection[int], formats: set[str]) -> tuple[int, str]:
    """Expert count and format of a layer; the router's rows decide, and disagreements are problems."""
    router = f"{source.side.root}layers.{layer}.{source.side.moe}gate.weight"
    entry = source.checkpoint.entries.get(router)
    rows = entry.spec.shape[0] if entry and entry.spec.shape else len(seen) or source.layout.sizes["E"]
    said = _disagreement(seen, rows) if entry and seen else ""
    if said and entry:
        source.problems.append(f"layer {layer}: the router {router} in {entry.file} has {rows} rows, but {said}")
    if len(formats) > 1:  # of a native checkpoint; a published one's forms are read from its tensors
        source.problems.append(f"layer {layer} holds experts both quantised and plain; one form is expected in a layer")
    return max(1, min(rows, MOST_EXPERTS)), "packed" if "packed" in formats or not formats else "plain"


def _disagreement(seen: Collection[int], rows: int) -> str:
    if isinstance(seen, range) or rows > MOST_EXPERTS:
        return f"{len(seen)} experts are there" if len(seen) != rows else ""
    lacking, surplus = sorted(set(range(rows)).difference(seen)), sorted(e for e in seen if e >= rows)
    said = [f"expert {ranges(lacking)} is lacking"] * bool(lacking) + [f"expert {ranges(surplus)} is there too"] * bool(surplus)
    return " and ".join(said)


def _compare_with_config(source: K3Source) -> None:
    counts = {n for n, _ in source.experts.values()}
    if counts and counts != {source.layout.sizes["E"]}:
        by_count = {n: [i for i, (m, _) in source.experts.items() if m == n] for n in sorted(counts)}
        said = "; ".join(f"{n} in layers {ranges(layers)}" for n, layers in by_count.items())
        source.notes.append(f"the config says {source.layout.sizes['E']} experts, the tensors hold {said}")
