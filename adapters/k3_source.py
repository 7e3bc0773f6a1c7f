"""What a K3-family checkpoint is, read from its names, specs, config and manifest.

| seen in the wild | handled as |
|---|---|
| roots `language_model.model.`, `model.language_model.`, `model.` | found from the names; two at once are refused |
| `A_log` [H], [H padded to a multiple of 8 or 128], [1,1,H,1] | recorded, so that the way back writes the same form |
| `self_attention_res_proj.weight` or `self_attention_res.proj_weight` | recorded likewise |
| experts quantised, plain, fewer than the config says (pruned), different per layer | counted per layer |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kconv.adapters import Options
from kconv.adapters.k3_config import Config, quantization, text_config
from kconv.adapters.k3_layout import VISION_ROOTS, K3Layout, Row, k3_layout
from kconv.errors import KconvError
from kconv.names import ranges
from kconv.source import Checkpoint

ROOTS = (("language_model.model.", "language_model."), ("model.language_model.", ""), ("model.", ""))
DOTTED = {"_res_norm.weight": "_res.norm_weight", "_res_proj.weight": "_res.proj_weight"}


@dataclass(frozen=True)
class Side:
    """One spelling of the names: the layout, the text model's root, and the prefix of the head."""

    name: str
    root: str
    head: str
    dotted_res: bool = False

    def spell(self, row: Row) -> str:
        """The name template of a row on this side."""
        name = row.name
        if row.kind == "moe" and self.name != "native":
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
    layout: K3Layout
    side: Side
    published: Side
    original_config: Config
    facts: dict[str, Any]
    a_log_shape: tuple[int, ...]
    tied: bool
    experts: dict[int, tuple[int, str]] = field(default_factory=dict)
    vision: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    surplus_sidecar: list[str] = field(default_factory=list)
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
        name = self.side.spell(row).format_map({"layer": layers[0] if layers else 0})
        entry = self.checkpoint.entries.get(name)
        return entry.spec.dtype if entry else "F32"

    def keeps_vision(self, options: Options) -> bool:
        """Whether vision tensors go along: by default only to `hf`."""
        return bool(self.vision) and (options.vision or ("keep" if options.to == "hf" else "drop")) == "keep"

    def hf_config(self, experts_format: str) -> Config:
        """The published config: the source's own, without its quantisation blocks when the experts are not packed."""
        if self.side.name == "native" and not self.checkpoint.manifest:
            raise KconvError(
                f"{self.checkpoint.where} has no kconv.json, so its published config is not known",
                hint="copy kconv.json from the conversion it came from, or use --to hf-text",
            )
        config = {**self.original_config}
        if experts_format != "packed" and quantization(config, []):
            config.pop("quantization_config", None)
            if "text_config" in config:
                config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
        return config


def read_source(checkpoint: Checkpoint, options: Options) -> K3Source:
    """Read a checkpoint's layout; raises KconvError where it is no K3 layout at all, collects smaller problems."""
    notes, problems = list(checkpoint.notes), []
    text = text_config(checkpoint.config)
    layout = k3_layout(text)
    native = text["model_type"] == "kimi_k3_text"
    manifest = (checkpoint.manifest or {}) if native else {}
    original = manifest.get("source", {}).get("config") or checkpoint.config
    quantization(original, notes)
    side = Side("native", "model.", "") if native else _published(checkpoint, problems)
    facts = dict(manifest.get("facts") or {}) if native else {}
    a_log = tuple(facts.get("a_log_shape") or _a_log_shape(checkpoint, layout, side, problems))
    if not native:
        facts = {"root": side.root, "head": side.head, "dotted_res": side.dotted_res, "a_log_shape": list(a_log)}
    published = side if not native else Side(
        "hf", facts.get("root", ROOTS[0][0]), facts.get("head", ROOTS[0][1]), facts.get("dotted_res", False)
    )  # fmt: skip
    tied = _tied(checkpoint, side, text, options, problems)
    source = K3Source(checkpoint, layout, side, published, original, facts, a_log, tied, notes=notes, problems=problems)
    source.span = options.layers
    _scan(source)
    if not native:
        facts["experts"] = sorted({fmt for _, fmt in source.experts.values()})
    _next_tokens(text, notes)
    return source


def _published(checkpoint: Checkpoint, problems: list[str]) -> Side:
    """The published spelling of this checkpoint's names."""
    found = [(r, h) for r, h in ROOTS if any(n.startswith(r + "layers.") for n in checkpoint.entries)]
    if not found:
        some = ", ".join(list(checkpoint.entries)[:3])
        raise KconvError(f"{checkpoint.where}: no decoder layers under any known root; names are like {some}")
    if len(found) > 1:
        problems.append(f"layers under two roots: {' and '.join(r for r, _ in found)}")
    root, head = found[0]
    dotted = any(n.endswith(tuple(DOTTED.values())) for n in checkpoint.entries)
    return Side("hf" if root != "model." else "hf-text", root, head, dotted)


def _a_log_shape(checkpoint: Checkpoint, layout: K3Layout, side: Side, problems: list[str]) -> tuple[int, ...]:
    heads = layout.sizes["H"]
    padded = (-(-heads // 128) * 128,)
    if side.name == "native" or not layout.kinds["kda"]:
        return padded
    name = f"{side.root}layers.{layout.kinds['kda'][0]}.self_attn.A_log"
    entry = checkpoint.entries.get(name)
    if entry is None:
        return padded
    shape = entry.spec.shape
    allowed = shape in ((heads,), (1, 1, heads, 1)) or (len(shape) == 1 and shape[0] > heads and shape[0] % 8 == 0)
    if not allowed:
        problems.append(f"{name} has shape {list(shape)}: {heads} heads, or padded with zeros to a multiple of 8, are expected")
        return (heads,)
    return shape


def _tied(checkpoint: Checkpoint, side: Side, text: Config, options: Options, problems: list[str]) -> bool:
    """Whether the head is the embedding: by the tensors present; a missing head that nothing explains is a problem."""
    if side.head + "lm_head.weight" in checkpoint.entries:
        return False
    if text["tie_word_embeddings"] or options.tie:
        return True
    problems.append(
        f"{side.head}lm_head.weight is missing and config.json says tie_word_embeddings false: "
        "--tie if the embedding is the head, or fetch the file that holds the head"
    )
    return True


def _scan(source: K3Source) -> None:
    """Count experts and find their format per layer; list vision and out-of-range tensors."""
    prefix = source.side.root + "layers."
    seen: dict[int, set[int]] = {}
    formats: dict[int, set[str]] = {}
    moe, native = source.side.moe.rstrip("."), source.side.name == "native"
    vision = VISION_ROOTS + tuple("model." + r for r in VISION_ROOTS)
    for name, entry in source.checkpoint.entries.items():
        if name.startswith(vision):
            source.vision.append(name)
        if not name.startswith(prefix):
            continue
        parts = name[len(prefix) :].split(".")
        layer = int(parts[0]) if parts[0].isdigit() else -1
        if source.span and not source.span[0] <= layer <= source.span[1] and layer < source.depth:
            source.outside.append(name)
        elif parts[1:3] != [moe, "experts"]:
            continue
        elif native:
            seen.setdefault(layer, set()).update(range(entry.spec.shape[0] if entry.spec.shape else 0))
            formats.setdefault(layer, set()).add("packed" if parts[3].endswith("_packed") else "scale" if parts[3].endswith("_scale") else "plain")
        elif parts[3].isdigit():
            seen.setdefault(layer, set()).add(int(parts[3]))
            formats.setdefault(layer, set()).add("plain" if parts[-1] == "weight" else "packed")
    for layer in source.inside(source.layout.kinds["moe"]):
        source.experts[layer] = _count(source, layer, seen.get(layer, set()), formats.get(layer, set()) - {"scale"})
    _compare_with_config(source)


def _count(source: K3Source, layer: int, seen: set[int], formats: set[str]) -> tuple[int, str]:
    """Expert count and format of a layer; the router's rows decide, and disagreements are problems."""
    router = f"{source.side.root}layers.{layer}.{source.side.moe}gate.weight"
    entry = source.checkpoint.entries.get(router)
    rows = entry.spec.shape[0] if entry and entry.spec.shape else source.layout.sizes["E"]
    if seen and seen != set(range(rows)):
        missing, extra = set(range(rows)) - seen, seen - set(range(rows))
        said = [f"expert {ranges(list(s))} {what}" for s, what in ((missing, "lacking"), (extra, "unexpected")) if s]
        source.problems.append(f"layer {layer}: the router {router} has {rows} rows, but {' and '.join(said)}")
    if len(formats) > 1:
        source.problems.append(f"layer {layer} holds experts both quantised and plain")
    return rows, "packed" if "packed" in formats or not formats else "plain"


def _compare_with_config(source: K3Source) -> None:
    counts = {n for n, _ in source.experts.values()}
    if counts and counts != {source.layout.sizes["E"]}:
        by_count = {n: [i for i, (m, _) in source.experts.items() if m == n] for n in sorted(counts)}
        said = "; ".join(f"{n} in layers {ranges(layers)}" for n, layers in by_count.items())
        source.notes.append(f"the config says {source.layout.sizes['E']} experts, the tensors hold {said}")


def _next_tokens(text: Config, notes: list[str]) -> None:
    """Multi-token-prediction layers are never part of a published K3 checkpoint; a config that promises them is corrected."""
    if text.get("num_nextn_predict_layers"):
        notes.append(f"config.json promises {text['num_nextn_predict_layers']} next-token layers, which the weights do not hold; set to 0")
        text["num_nextn_predict_layers"] = 0
