"""Kimi K3 and Kimi-Linear: the published layout, text-only, and the native one, joined by one table.

| published (root `language_model.model.` or `model.`) | native | how |
|---|---|---|
| `{root}layers.{l}.X` | `model.layers.{l}.X` | same bytes |
| `...block_sparse_moe.Y` | `...mlp.Y` | same bytes |
| `...self_attn.A_log` [H], [H padded with zeros], [1,1,H,1] | [H] | same, trim, or reshape |
| `...experts.{e}.w1|w3.weight_packed|_scale` | `mlp.experts.gate_up_proj_packed|_scale` [E, 2M, ...] | stack, gate rows first |
| `...experts.{e}.w2.weight_packed|_scale` | `mlp.experts.down_proj_packed|_scale` [E, L, ...] | stack |
| the same pairs | `gate_up_proj`, `down_proj`, and the scales in a sidecar | MXFP4 decode |
| any weight in FP8, INT4, NVFP4, MXFP4 | the plain weight, and the scales in a sidecar | decode (`formats`, `weights.rules`) |
| `vision_tower.*`, `mm_projector.*` | the same names in files of their own, or left out | same bytes, or like any weight |

How a weight is stored is decided by the tensors present; the config's ignore list is incomplete.
"""

from __future__ import annotations

import json
from typing import Any

from kconv.adapters.k3 import nemo
from kconv.adapters.k3.config import NATIVE_ONLY, config_edits, cut_layers, hf_text_config, native_config, published_config
from kconv.adapters.k3.dialects import NAMES
from kconv.adapters.k3.expert_rules import ExpertRules
from kconv.adapters.k3.row_rules import RowRules
from kconv.adapters.k3.source import K3Source, Side, read_source
from kconv.adapters.k3.table import family
from kconv.adapters.tables import checks
from kconv.adapters.tables.config import Config, without_prefix
from kconv.adapters.tables.edits import put, refusals
from kconv.adapters.weights.declared import HF_QUANT
from kconv.adapters.weights.forms import ACTIVATIONS
from kconv.adapters.weights.inventory import SIDECAR, described
from kconv.adapters.weights.vision import VisionRules
from kconv.adapters.weights.written import block_of, placed
from kconv.checkpoint.reading import Checkpoint
from kconv.checkpoint.side_files import without_tokenizer
from kconv.errors import KconvError
from kconv.options import Options
from kconv.planning.edges import Layouts
from kconv.planning.rules import Drop, Rule

KEPT = "kept"
NATIVE = Side("native", "model.", "")
MODEL = "kconv.modeling.model:KimiK3ForCausalLM"
TEXT = Side("hf-text", "model.", "")
GATE_UP = "rows of w1 (gate), then rows of w3 (up); nothing is transposed or interleaved"


def layouts(checkpoint: Checkpoint, options: Options) -> Layouts:
    """The table from a checkpoint's layout to the one `options.to` names, with config, facts and drops."""
    if options.to == nemo.NAME or nemo.is_nemo(checkpoint):
        return nemo.layouts(checkpoint, options, _layouts)
    return _layouts(checkpoint, options)


def _layouts(checkpoint: Checkpoint, options: Options) -> Layouts:
    source = read_source(checkpoint, options)
    target = {"native": NATIVE, "hf-text": TEXT, "hf": source.published}[options.to]
    _refuse_unused(source, options)
    backward = source.side.name == "native" and options.to != "native"
    left, right = (target, source.side) if backward else (source.side, target)
    rows, experts = RowRules(source, left, right, options), ExpertRules(source, left, right, options)
    vision = VisionRules(source.tower, checkpoint, source.forms, options, native=source.side.name == "native", dtype=source.dtype)
    rules = [*rows.rules(), *experts.rules(), *vision.rules()]
    _refuse_without_effect(source, options, rows, experts, vision)
    block = _block(rows, experts, vision)
    return Layouts(
        family=family(source.layout.config),
        source_layout=source.side.name,
        target_layout=options.to,
        rules=rules,
        backward=backward,
        drops=_drops(source, options, rules, backward),
        config=_config(source, options, experts.format, block),
        facts=_facts(source, options),
        notes=source.notes + without_tokenizer(checkpoint),
        problems=source.problems,
        model=MODEL,
        files=_files(source, options, block),
    )


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `kconv inspect` says of a checkpoint of this family."""
    own = nemo.is_nemo(checkpoint)
    source = read_source(nemo.as_native(checkpoint) if own else checkpoint, Options())
    counts = sorted({n for n, _ in source.experts.values()})
    return {
        "family": family(source.layout.config),
        "layout": nemo.NAME if own else source.side.name,
        "root": source.side.root,
        "layers": {kind: len(source.layout.kinds[kind]) for kind in ("kda", "mla", "dense", "moe")},
        "experts": counts[0] if len(counts) == 1 else counts,
        "experts_format": sorted({fmt for _, fmt in source.experts.values()}),
        "formats": described(source.forms),
        "vision_tensors": len(source.vision),
        "notes": source.notes,
        "problems": source.problems,
    }


def _drops(source: K3Source, options: Options, rules: list[Rule], backward: bool) -> list[Drop]:
    drops = []
    if source.vision and not source.keeps_vision(options):
        drops.append(Drop(tuple(source.vision), "vision left out (--vision drop)"))
    if source.outside:
        drops.append(Drop(tuple(source.outside), "outside --layers"))
    drops += [Drop(tuple(names), "stored in no form that can be read") for names in source.forms.unread.values()]
    for reason, names in _surplus(source, options, rules, backward).items():
        drops.append(Drop(names, reason))
    head = source.side.head + checks.HEAD
    if options.tie and source.tied and head in source.checkpoint.entries:
        drops.append(Drop((head,), "the embedding is the head (--tie)"))
    return drops


def _surplus(source: K3Source, options: Options, rules: list[Rule], backward: bool) -> dict[str, tuple[str, ...]]:
    """Scales that no rule reads: of a sidecar, and of activations where the weights lose the form they belong to."""
    entries, outside = source.checkpoint.entries, {*source.outside, *source.beyond}
    outside |= set() if source.keeps_vision(options) else set(source.vision)
    ends = tuple(f".{s}" for s in ACTIVATIONS)
    scales = {n for a in source.checkpoint.alike if a.entry.file.startswith(SIDECAR) or a.name.endswith(ends) for n in a.names}
    scales -= outside
    for made in rules if scales else ():
        for binding in made.bindings():
            if backward:
                scales.difference_update(made.right_names(binding))
                continue
            for value in made.domain:
                scales.difference_update(n for piece in made.left_names(binding, value) for n in piece)
    carried = {n for n in scales if entries[n].file.startswith(SIDECAR)}
    found = {
        "sidecar scales, not needed by this target": tuple(sorted(carried)),
        "activation scales of weights that are decoded": tuple(sorted(scales - carried)),
    }
    return {reason: names for reason, names in found.items() if names}


def _refuse_unused(source: K3Source, options: Options) -> None:
    if options.vision == "keep" and not source.vision:
        raise KconvError("--vision keep: the source holds no vision tensors", hint="leave the option out")
    if options.vision == "keep" and options.to == "hf-text":
        raise KconvError("--vision keep: hf-text is text-only", hint="use --to hf for the whole checkpoint")
    if options.layers and options.layers[1] >= source.depth:
        asked = f"--layers {options.layers[0]}-{options.layers[1]}"
        raise KconvError(f"{asked}: the checkpoint has layers 0-{source.depth - 1}", hint="both ends count, from 0")


def _refuse_without_effect(source: K3Source, options: Options, rows: RowRules, experts: ExpertRules,
                           vision: VisionRules) -> None:  # fmt: skip
    if options.experts and not source.experts:
        raise KconvError(f"--experts {options.experts}: the checkpoint has no routed experts", hint="leave the option out")
    if options.weights and options.to == "native":
        raise KconvError(
            f"--weights {options.weights}: the native layout keeps weights other than experts plain",
            hint="--to hf or --to hf-text writes them so",
        )
    carried = any(a.entry.file.startswith(SIDECAR) for a in source.checkpoint.alike)
    if not options.sidecar and not (rows.decodes or experts.decodes or vision.decodes or carried):
        raise KconvError(
            "--no-sidecar: no quantised weight is decoded here, so there is no sidecar to leave out",
            hint="leave the option out, or ask for --experts bf16",
        )


def _block(rows: RowRules, experts: ExpertRules, vision: VisionRules) -> Config | str | None:
    """The target's quantisation block: `KEPT` for the source's own, None for none, or a new one."""
    held = rows.forms | {name: forms for name, forms in vision.forms.items() if not all(f.plain for f in forms)}
    if not any(not f.plain for forms in (*held.values(), experts.forms) for f in forms):
        return None
    return block_of(held, experts.forms) if rows.changed or experts.changed or vision.changed else KEPT


def _config(source: K3Source, options: Options, experts_format: str, block: Config | str | None) -> Config:
    text, present = source.layout.config, source.checkpoint.files.names()
    if options.layers:
        text = cut_layers(text, *options.layers)
    if options.dtype:
        text = {**text, "dtype": str(options.dtype)}
    text = {**text, "tie_word_embeddings": source.tied}
    edits = _edits(source, options)
    if options.to == "hf":
        made = published_config(source.published_config(), text, quantized=block == KEPT)
        made = put(made, edits, NAMES, source.notes)
        return placed(made, source.original_config, block) if isinstance(block, dict) else made
    lifted = checks.auto_map(text, present, source.notes)
    if options.to == "hf-text":
        made = hf_text_config(source.original_config, lifted, source.published.root, quantized=block == KEPT)
        return made | ({"quantization_config": block} if isinstance(block, dict) else {})
    counts = {i: n for i, (n, _) in source.experts.items()}
    return native_config(text, experts_format=experts_format, counts=counts, layers=text["num_hidden_layers"])


def _edits(source: K3Source, options: Options) -> Config:
    """What someone changed in a native config since it was converted, for a target in published words."""
    if options.to == "native":
        return {}
    edits = config_edits(source.checkpoint.config, source.checkpoint.manifest)
    source.problems += refusals(edits, NATIVE_ONLY, options.to)
    return {k: v for k, v in edits.items() if k not in NATIVE_ONLY}


def _facts(source: K3Source, options: Options) -> Config:
    """What the way back needs; a native checkpoint keeps ModelOpt's own description of its source in them."""
    facts = source.facts | ({"gate_up_proj": GATE_UP} if options.to == "native" else {})
    text = source.checkpoint.text(HF_QUANT)
    return facts | ({"hf_quant_config": text} if text is not None else {})


def _files(source: K3Source, options: Options, block: Config | str | None) -> dict[str, bytes | None]:
    """hf_quant_config.json: gone where its words are no longer true, and back again where they are."""
    text = _facts(source, options).get("hf_quant_config")
    if text is None:
        return {}
    if options.to == "native" or block != KEPT:
        return {HF_QUANT: None}
    prefix = source.published.root.removesuffix("model.") if options.to == "hf-text" else ""
    if prefix:
        text = json.dumps(without_prefix(json.loads(text), prefix), indent=4)
    return {HF_QUANT: text.encode()}
