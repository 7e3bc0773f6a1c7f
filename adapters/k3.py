"""Kimi K3 and Kimi-Linear: the published layout, text-only, and the native one, joined by one table.

| published (root `language_model.model.` or `model.`) | native | how |
|---|---|---|
| `{root}layers.{l}.X` | `model.layers.{l}.X` | same bytes |
| `...block_sparse_moe.Y` | `...mlp.Y` | same bytes |
| `...self_attn.A_log` [H], [H padded with zeros], [1,1,H,1] | [H] | same, trim, or reshape |
| `...experts.{e}.w1|w3.weight_packed|_scale` | `mlp.experts.gate_up_proj_packed|_scale` [E, 2M, ...] | stack, gate rows first |
| `...experts.{e}.w2.weight_packed|_scale` | `mlp.experts.down_proj_packed|_scale` [E, L, ...] | stack |
| the same pairs | `gate_up_proj`, `down_proj`, and the scales in a sidecar | MXFP4 decode |
| `vision_tower.*`, `mm_projector.*` | the same names in files of their own, or left out | same bytes |

Whether experts are quantised is decided by the tensors present; the config's ignore list is incomplete.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kconv.adapters import Options
from kconv.adapters import k3_checks as checks
from kconv.adapters.k3_config import cut_layers, hf_text_config, native_config, published_config
from kconv.adapters.k3_experts import expert_rules
from kconv.adapters.k3_layout import Row
from kconv.adapters.k3_source import K3Source, Side, read_source
from kconv.errors import KconvError
from kconv.isos.base import Iso, Same
from kconv.isos.dtype import Cast
from kconv.isos.mxfp4 import Mxfp4
from kconv.isos.shape import Reshape, TrimZeros
from kconv.plans import Layouts
from kconv.rules import Drop, Rule, rule
from kconv.side_files import without_tokenizer
from kconv.source import Checkpoint
from kconv.spec import FLOATS, Spec, dtype_name

NATIVE = Side("native", "model.", "")
MODEL = "kconv.modeling.model:KimiK3ForCausalLM"
TEXT = Side("hf-text", "model.", "")
GATE_UP = "rows of w1 (gate), then rows of w3 (up); nothing is transposed or interleaved"


def layouts(checkpoint: Checkpoint, options: Options) -> Layouts:
    """The table from a checkpoint's layout to the one `options.to` names, with config, facts and drops."""
    source = read_source(checkpoint, options)
    target = {"native": NATIVE, "hf-text": TEXT, "hf": source.published}[options.to]
    _refuse_unused(source, options)
    backward = source.side.name == "native" and options.to != "native"
    left, right = (target, source.side) if backward else (source.side, target)
    experts, experts_format = expert_rules(source, options, left, right, backward)
    _refuse_without_effect(source, options, experts)
    rules = [*_rows(source, left, right, options), *experts, *_vision(source, options)]
    return Layouts(
        family="Kimi K3" if source.layout.config.get("attn_res_block_size") else "Kimi-Linear",
        source_layout=source.side.name,
        target_layout=options.to,
        rules=rules,
        backward=backward,
        drops=_drops(source, options),
        config=_config(source, options, experts_format),
        facts=source.facts | ({"gate_up_proj": GATE_UP} if options.to == "native" else {}),
        notes=source.notes + without_tokenizer(checkpoint),
        problems=source.problems,
        model=MODEL,
    )


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `kconv inspect` says of a checkpoint of this family."""
    source = read_source(checkpoint, Options())
    counts = sorted({n for n, _ in source.experts.values()})
    return {
        "family": "Kimi K3" if source.layout.config.get("attn_res_block_size") else "Kimi-Linear",
        "layout": source.side.name,
        "root": source.side.root,
        "layers": {kind: len(source.layout.kinds[kind]) for kind in ("kda", "mla", "dense", "moe")},
        "experts": counts[0] if len(counts) == 1 else counts,
        "experts_format": sorted({fmt for _, fmt in source.experts.values()}),
        "vision_tensors": len(source.vision),
        "notes": source.notes,
        "problems": source.problems,
    }


def _rows(source: K3Source, left: Side, right: Side, options: Options) -> Iterator[Rule]:
    layout = source.layout
    for row in layout.rows():
        if row.name == "lm_head.weight" and source.tied:
            continue
        for layers, count in source.layer_groups(row):
            over = {"layer": layers} if layers else {}
            left_name, right_name = left.spell(row), right.spell(row)
            iso = _iso(source, row, left, right, options)
            expected, why = _expect(source, row, left, count, options)
            yield rule(left_name, right_name, iso, over=over, expect=expected, why=why)


def _iso(source: K3Source, row: Row, left: Side, right: Side, options: Options) -> Iso:
    backward = source.side == right != left
    if row.name.endswith("A_log") and "native" in (left.name, right.name) and left.name != right.name:
        heads, shape = source.layout.sizes["H"], source.a_log_shape
        if len(shape) > 1:
            return Reshape(shape, (heads,))
        if shape[0] != heads:
            return TrimZeros(size=heads, padded=shape[0])
    if options.dtype and not row.fp32:
        stored, wanted = source.stored_dtype(row), dtype_name(options.dtype)
        return Cast(wanted, stored) if backward else Cast(stored, wanted)
    return Same()


def _expect(source: K3Source, row: Row, left: Side, count: int | None, options: Options) -> tuple[Any, str]:
    """Allowed specs of a row's published tensor, the config's shape in the config's precision or in F32; and why."""
    counts = {"E": count} if count else {}
    shape, why = source.layout.shape(row.shape, **counts), source.layout.formula(row.shape, **counts)
    if row.name.endswith("A_log") and left.name != "native":
        shape, why = source.a_log_shape, f"{why} alone, padded with zeros to a multiple of 8, or as [1, 1, heads, 1]"
    dtype = source.layout.config.get("dtype")
    allowed = {dtype_name(dtype), "F32"} if dtype else set(FLOATS)
    if options.dtype and left != source.side:  # backward, the left side is what the cast makes
        allowed.add(dtype_name(options.dtype))
    return ((tuple(Spec(d, shape) for d in sorted(allowed)),),), why


def _vision(source: K3Source, options: Options) -> Iterator[Rule]:
    if not source.keeps_vision(options):
        return
    native = "native" in (source.side.name, options.to)
    for name in source.vision:
        yield rule(name, name, group=("vision" if native else "model",))


def _drops(source: K3Source, options: Options) -> list[Drop]:
    drops = []
    if source.vision and not source.keeps_vision(options):
        drops.append(Drop(tuple(source.vision), "vision left out (--vision drop)"))
    if source.outside:
        drops.append(Drop(tuple(source.outside), "outside --layers"))
    if source.surplus_sidecar:
        drops.append(Drop(tuple(source.surplus_sidecar), "sidecar scales, not needed by this target"))
    head = source.side.head + checks.HEAD
    if options.tie and source.tied and head in source.checkpoint.entries:
        drops.append(Drop((head,), "the embedding is the head (--tie)"))
    return drops


def _refuse_unused(source: K3Source, options: Options) -> None:
    if options.vision == "keep" and not source.vision:
        raise KconvError("--vision keep: the source holds no vision tensors", hint="leave the option out")
    if options.vision == "keep" and options.to == "hf-text":
        raise KconvError("--vision keep: hf-text is text-only", hint="use --to hf for the whole checkpoint")
    if options.layers and options.layers[1] >= source.depth:
        asked = f"--layers {options.layers[0]}-{options.layers[1]}"
        raise KconvError(f"{asked}: the checkpoint has layers 0-{source.depth - 1}", hint="both ends count, from 0")


def _refuse_without_effect(source: K3Source, options: Options, experts: list[Rule]) -> None:
    if options.experts and not source.experts:
        raise KconvError(f"--experts {options.experts}: the checkpoint has no routed experts", hint="leave the option out")
    if not options.sidecar and not any(isinstance(r.iso, Mxfp4) for r in experts):
        raise KconvError(
            "--no-sidecar: no packed expert is decoded here, so there is no sidecar to leave out",
            hint="leave the option out, or ask for --experts bf16",
        )


def _config(source: K3Source, options: Options, experts_format: str) -> dict[str, Any]:
    text, quantized, present = source.layout.config, experts_format == "packed", source.checkpoint.files.names()
    if options.layers:
        text = cut_layers(text, *options.layers)
    if options.dtype:
        text = {**text, "dtype": str(options.dtype)}
    text = {**text, "tie_word_embeddings": source.tied}
    if options.to == "hf":
        return published_config(source.published_config(), text, quantized=quantized)
    lifted = checks.auto_map(text, present, source.notes)
    if options.to == "hf-text":
        return hf_text_config(source.original_config, lifted, source.published.root, quantized=quantized)
    counts = {i: n for i, (n, _) in source.experts.items()}
    return native_config(text, experts_format=experts_format, counts=counts, layers=text["num_hidden_layers"])

