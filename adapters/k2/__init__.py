"""Kimi K2, K2-Thinking, K2.5 and later: the published layout, text alone, and the names of Transformers 5, by one table.

| target | what it is | weights |
|---|---|---|
| `native` | Transformers 5's names, grouped experts: its own classes load it | decoded; scales in a sidecar |
| `native` with `--vision keep` | the same for `Kimi_K25ForConditionalGeneration`, with the tower | decoded; scales in a sidecar |
| `hf` | the published layout, split experts | as published; `--dtype`, `--experts` decode them |
| `hf-text` | the published names of the text model, root `model.` | likewise |

Without `--vision keep`, `native` is the text model of `DeepseekV3ForCausalLM`. The way back restores the stored bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kconv.adapters.k2.config import config_edits, hf_text_config, native_config, published_config, vision_config
from kconv.adapters.k2.source import K2Source, Side, read_source
from kconv.adapters.k2.table import EXPERTS, STACKED, VISION_ROOTS
from kconv.adapters.k2.vision import Renaming
from kconv.adapters.tables import checks
from kconv.adapters.tables.edits import put
from kconv.adapters.tables.rows import Row
from kconv.adapters.weights.forms import Form, plain
from kconv.adapters.weights.inventory import SIDECAR, described
from kconv.adapters.weights.rules import DTYPES, WeightRules
from kconv.adapters.weights.vision import VisionRules
from kconv.checkpoint.reading import Checkpoint
from kconv.checkpoint.side_files import without_tokenizer
from kconv.errors import KconvError
from kconv.options import Options
from kconv.planning.edges import Layouts
from kconv.planning.rules import Drop, Rule, rule
from kconv.spec import FLOATS, Spec, dtype_name
from kconv.transforms.base import Same
from kconv.transforms.dtype import Cast

FAMILY = "Kimi K2"


def layouts(checkpoint: Checkpoint, options: Options) -> Layouts:
    """The table from a checkpoint's layout to the one `options.to` names, with config, facts and drops."""
    source = read_source(checkpoint, options)
    _refuse(source, options)
    vision = source.keeps_vision(options)
    target = _target(source, options, vision)
    backward = source.native and options.to != "native"
    left, right = (target, source.side) if backward else (source.side, target)
    made = _Rules(source, options, left, right, backward)
    rules = [*made.rows(), *made.experts(), *made.carried()]
    rules += _vision_rules(source, options) if vision else []
    return Layouts(
        family=FAMILY,
        source_layout=source.side.name,
        target_layout=options.to,
        rules=rules,
        backward=backward,
        drops=_drops(source, rules, backward, vision),
        config=_config(source, options, vision, quantized=any(not f.plain for f in made.forms) or _keeps_codes(source, options)),
        facts=source.facts | {"target_root": target.root},
        notes=source.notes + without_tokenizer(checkpoint),
        problems=source.problems,
    )


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `kconv inspect` says of a checkpoint of this family."""
    source = read_source(checkpoint, Options())
    counts = sorted(set(source.counts.values()))
    return {
        "family": FAMILY,
        "layout": source.side.name,
        "root": source.side.root,
        "layers": {kind: len(source.layout.kinds[kind]) for kind in ("layer", "dense", "moe")},
        "experts": counts[0] if len(counts) == 1 else counts,
        "formats": described(source.forms),
        "vision_tensors": len(source.vision),
        "notes": source.notes,
        "problems": source.problems,
    }


def _vision_rules(source: K2Source, options: Options) -> Iterator[Rule]:
    """The rules of every vision tensor: renamed and reordered, or between layouts that name them alike."""
    if source.native == (options.to == "native"):
        return VisionRules(
            source.tower, source.checkpoint, source.forms, options, native=source.native, dtype=source.dtype, group="model"
        ).rules()
    return Renaming(
        source.checkpoint, vision_config(source.original_config), source.layout.sizes["C"], source.forms, options,
        source.native, source.dtype,
    ).rules()  # fmt: skip


def _keeps_codes(source: K2Source, options: Options) -> bool:
    """Whether a vision weight stays quantised in the target."""
    quantised = any(name.startswith(VISION_ROOTS) for name in source.forms.rows)
    return quantised and source.keeps_vision(options) and options.to == "hf" and not options.dtype


def _target(source: K2Source, options: Options, vision: bool) -> Side:
    if options.to == "native":
        return Side("native", "model.language_model." if vision else "model.", "")
    return Side("hf-text", "model.", "") if options.to == "hf-text" else source.published


class _Rules:
    """Makes the rules, and remembers the forms that weights have in the target."""

    def __init__(self, source: K2Source, options: Options, left: Side, right: Side, backward: bool) -> None:
        self.source, self.options, self.left, self.right, self.backward = source, options, left, right, backward
        self.forms: set[Form] = set()
        dtype = source.layout.config.get("dtype")
        self.floats = {dtype_name(dtype), "F32"} if dtype else set(FLOATS)
        if dtype and source.side.name == "native":
            self.floats |= checks.published_dtype(source.original_config)

    def rows(self) -> Iterator[Rule]:
        """Every row of the table but the routed experts."""
        for row in self.source.layout.rows():
            if row.kind == "head" and self.source.tied:
                continue
            for layers, count in self.source.layer_groups(row):
                counts = {"E": count} if count else {}
                shape, why = self.source.layout.shape(row.shape, **counts), self.source.layout.formula(row.shape, **counts)
                if len(shape) == 2:
                    yield from self._weight(row, layers, shape, why)
                else:
                    yield self._vector(row, layers, shape, why)

    def _vector(self, row: Row, layers: tuple[int, ...], shape: tuple[int, ...], why: str) -> Rule:
        stored = self._stored(self.source.side.name_of(row), layers)
        wanted = dtype_name(self.options.dtype) if self.options.dtype and not row.fp32 else stored
        ends = (wanted, stored) if self.backward else (stored, wanted)
        transform = Same() if stored == wanted else Cast(*ends)
        expect = ((tuple(Spec(d, shape) for d in sorted(self.floats | ({wanted} if self.backward else set()))),),)
        over = {"layer": layers} if layers else {}
        return rule(self.left.name_of(row), self.right.name_of(row), transform, over=over, expect=expect, why=why)

    def _weight(self, row: Row, layers: tuple[int, ...], shape: tuple[int, ...], why: str) -> Iterator[Rule]:
        asked = dtype_name(self.options.dtype) if self.options.dtype else None
        stems = [side.name_of(row).removesuffix("weight") for side in (self.left, self.right)]
        left, right = (lambda key, stem=stem: stem + key for stem in stems)
        for published, mine in self.source.forms.split(row.name, layers):
            yield from self._moved(published, asked, (left,), right, shape, {"layer": mine} if mine else {}, None, why)

    def experts(self) -> Iterator[Rule]:
        """The routed experts, by layers that share count and form."""
        groups: dict[tuple, list[int]] = {}
        for layer, count in self.source.counts.items():
            forms = self.source.forms.experts.get(layer, {})
            groups.setdefault((count, tuple(forms.items())), []).append(layer)
        asked = DTYPES.get(self.options.experts or "")
        for (count, forms), layers in sorted(groups.items(), key=lambda item: item[1]):
            for name, parts in STACKED.items():
                form = dict(forms).get(parts[0])
                published = None if form is None or form.plain else form
                yield from self._projection(name, parts, published, asked, tuple(layers), tuple(range(count)))

    def _projection(self, name: str, parts: tuple[str, ...], published: Form | None, asked: str | None,
                    layers: tuple[int, ...], experts: tuple[int, ...]) -> Iterator[Rule]:  # fmt: skip
        shape, why = self.source.layout.shape(EXPERTS[parts[0]]), self.source.layout.formula(EXPERTS[parts[0]])
        over = {"layer": layers}
        if self.left.name == "native":
            spell = [side.expert(name) for side in (self.left, self.right)]
            for made in self._moved(published, asked, (spell[0],), spell[1], shape, over, None, why):
                yield Rule(made.left, made.right, made.transform, made.over, None, None, made.group)
        elif self.right.name == "native":
            pieces = tuple(self.left.expert(part) for part in parts)
            yield from self._moved(published, asked, pieces, self.right.expert(name), shape, over, ("expert", experts), why)
        else:
            for part in parts:
                pieces, each = (self.left.expert(part),), {**over, "expert": experts}
                yield from self._moved(published, asked, pieces, self.right.expert(part), shape, each, None, why)

    def _moved(self, published: Form | None, asked: str | None, pieces: tuple, right: Any, shape: tuple[int, ...],
               over: dict, stack: tuple | None, why: str) -> Iterator[Rule]:  # fmt: skip
        """One weight from the form it is stored in to the one that is wanted."""
        native, entries = self.source.native, self.source.checkpoint.entries
        own = right if native and self.backward else pieces[0]
        layers = over.get("layer", ())
        dtype = self._stored(own("weight"), layers)
        stored = plain(dtype) if native or published is None else published
        restored = published if self.options.to != "native" and not asked else None
        kept = self.source.dtype if published and not native else dtype
        wanted = restored or plain(asked or kept)
        self.forms.add(wanted)
        sidecar = self.options.sidecar
        if native and published:
            sidecar = own(published.kept[0]).format_map({"layer": layers[0] if layers else 0}) in entries
        floats = frozenset({*self.floats, dtype, *({wanted.stored} if wanted.plain and self.backward else ())}) & FLOATS
        restore = native and wanted == published
        made = WeightRules(stored, wanted, pieces, right, self.backward, shape, floats, sidecar, restore)
        yield from made.rules(over, stack, why)

    def _stored(self, template: str, layers: tuple[int, ...]) -> str:
        """The dtype of the first of these layers' tensors; the config's where it is quantised or missing."""
        name = template.format_map({"layer": layers[0] if layers else 0, "expert": 0})
        entry = self.source.checkpoint.entries.get(name)
        return entry.spec.dtype if entry and entry.spec.dtype in FLOATS else self.source.dtype

    def carried(self) -> Iterator[Rule]:
        """A native checkpoint's sidecar goes along to another native one."""
        if not (self.source.native and self.options.to == "native" and self.options.sidecar):
            return
        for name, entry in self.source.checkpoint.entries.items():
            if entry.file.startswith(SIDECAR):
                mine = name.startswith(self.left.root + "layers.")
                to = self.right.root + name.removeprefix(self.left.root) if mine else name
                if mine or self.source.keeps_vision(self.options):
                    yield rule(name, to, group=("sidecar",))


def _refuse(source: K2Source, options: Options) -> None:
    """Options that this family cannot honour."""
    if options.to not in ("native", "hf", "hf-text"):
        raise KconvError(f"--to {options.to}: Kimi K2 has no such layout", hint="there are native, hf and hf-text")
    if options.vision == "keep" and (not source.vision or options.to == "hf-text"):
        why = "hf-text is text-only" if source.vision else "the source holds no vision tensors"
        raise KconvError(f"--vision keep: {why}", hint="leave the option out, or use --to hf for the whole checkpoint")
    if options.experts and options.experts not in DTYPES:
        raise KconvError(
            f"--experts {options.experts}: experts of Kimi K2 stay as published (hf) or are decoded",
            hint=f"ask for one of {', '.join(DTYPES)}, or leave the option out",
        )
    if options.weights:
        raise KconvError(f"--weights {options.weights}: Kimi K2's weights stay as published or are decoded", hint="leave it out")
    depth = len(source.layout.kinds["layer"])
    if options.layers and options.layers[1] >= depth:
        raise KconvError(f"--layers {options.layers[0]}-{options.layers[1]}: the checkpoint has layers 0-{depth - 1}")
    rows_quantised = any(not f.plain for by_layer in source.forms.rows.values() for f in by_layer.values())
    if options.to != "native" and bool(options.experts) != bool(options.dtype) and rows_quantised:
        raise KconvError(
            "experts and other weights are quantised by one block of the config, and only one of them would be decoded",
            hint="give --experts bf16 and --dtype bfloat16 together, or neither",
        )
    if options.to == "native" and len(set(source.counts.values())) > 1:
        said = "layers have different numbers of experts, which Transformers' DeepSeek-V3 cannot be told"
        raise KconvError(said, hint="--to hf keeps them")


def _drops(source: K2Source, rules: list[Rule], backward: bool, vision: bool) -> list[Drop]:
    sidecar = {n for n, e in source.checkpoint.entries.items() if e.file.startswith(SIDECAR)}
    for made in rules if sidecar else ():
        for binding in made.bindings():
            sidecar.difference_update(made.right_names(binding) if backward else made.left_names(binding, None)[0])
    drops = {
        "vision left out (--vision drop)": source.vision if not vision else [],
        "outside --layers": source.outside,
        "stored in no form that can be read": [n for names in source.forms.unread.values() for n in names],
        "sidecar scales, not needed by this target": sorted(sidecar),
        "activation scales, of no use to decoded weights": source.activations,
    }
    return [Drop(tuple(names), reason) for reason, names in drops.items() if names]


def _config(source: K2Source, options: Options, vision: bool, *, quantized: bool) -> dict[str, Any]:
    text = {**source.layout.config, "tie_word_embeddings": source.tied}
    if options.layers and options.layers[0] == 0:
        text["num_hidden_layers"] = options.layers[1] + 1
    if options.dtype:
        text["dtype"] = str(options.dtype)
    if source.counts:
        text["n_routed_experts"] = max(source.counts.values())
    if options.to == "native":
        return native_config(source.original_config, text, vision=vision)
    if options.to == "hf-text":
        lifted = checks.auto_map(text, source.checkpoint.files.names(), source.notes)
        return hf_text_config(source.original_config, lifted, source.published.root, quantized=quantized)
    if source.native and not source.checkpoint.manifest:
        raise KconvError(
            f"{source.checkpoint.where} has no kconv.json, so its published config is not known",
            hint="copy kconv.json from the conversion it came from, or use --to hf-text",
        )
    made = published_config(source.original_config, text, quantized=quantized)
    edits = config_edits(source.checkpoint.config, source.checkpoint.manifest) if source.native else {}
    return put(made, edits, {}, source.notes)
