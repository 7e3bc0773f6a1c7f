"""Target `nemo`: the module names and layouts of NeMo AutoModel's Kimi K3, so that its model loads them as they are.

| native | nemo |
|---|---|
| `self_attn.A_log`, `dt_bias` | `self_attn._fp32_params.A_log`, `dt_bias` |
| `self_attn.q_conv1d.weight`, k, v, `o_norm.weight` | `self_attn.q_conv1d._fp32_params.weight`, k, v, `o_norm` alike |
| `mlp.experts.gate_up_proj` [E, 2M, L] | `mlp.experts.gate_and_up_projs` [E, L, 2M]: gate columns, then up columns |
| `mlp.experts.down_proj` [E, L, M] | `mlp.experts.down_projs` [E, M, L] |
| anything else | the same name and bytes |

The rules are those of the native layout with their native side named and laid out so: one table, no second one. What
NeMo keeps in fp32 is written so; packed experts are decoded, their scales go along in a sidecar. A checkpoint in this
layout is read as a native one. Source: nemo-automodel 0.7.0, whose model takes the result with `strict=True`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from kconv.adapters.k3.config import NATIVE_ONLY, config_edits
from kconv.adapters.tables.edits import refusals
from kconv.checkpoint.reading import Checkpoint, Entry
from kconv.errors import KconvError
from kconv.options import Options
from kconv.planning.edges import Layouts
from kconv.planning.rules import Drop, Rule
from kconv.spec import Spec
from kconv.transforms.base import Par, Same, Seq, Transform
from kconv.transforms.dtype import Cast
from kconv.transforms.shape import Transpose
from kconv.transforms.side_by_side import SideBySide

NAME = "nemo"
ATTENTION = {
    **{f"self_attn.{n}": f"self_attn._fp32_params.{n}" for n in ("A_log", "dt_bias")},
    **{f"self_attn.{n}.weight": f"self_attn.{n}._fp32_params.weight" for n in ("q_conv1d", "k_conv1d", "v_conv1d", "o_norm")},
}
EXPERTS = {"mlp.experts.gate_up_proj": "mlp.experts.gate_and_up_projs", "mlp.experts.down_proj": "mlp.experts.down_projs"}
RENAMED = ATTENTION | EXPERTS
BACK = {own: native for native, own in RENAMED.items()}
SWAPPED = Transpose((0, 2, 1))


def is_nemo(checkpoint: Checkpoint) -> bool:
    """Whether the names are NeMo AutoModel's."""
    return any("._fp32_params." in n or n.endswith(tuple(EXPERTS.values())) for n in (a.name for a in checkpoint.alike))


def as_native(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as one in the native layout: its names and specs there, its config with the native type."""
    entries = {}
    for name, entry in checkpoint.entries.items():
        native = _renamed(name, BACK)
        shape = entry.spec.shape
        swap = native.endswith(tuple(EXPERTS)) and len(shape) == 3
        spec = Spec(entry.spec.dtype, (shape[0], shape[2], shape[1])) if swap else entry.spec
        entries[native] = Entry(spec, entry.file, entry.start)
    return dataclasses.replace(checkpoint, entries=entries, config={**checkpoint.config, "model_type": "kimi_k3_text"})


def layouts(checkpoint: Checkpoint, options: Options, native_layouts: Any) -> Layouts:
    """From or to the nemo layout, out of what `native_layouts` says of the native one."""
    source = is_nemo(checkpoint)
    if source and options.to == NAME:
        raise KconvError(f"{checkpoint.where} is in the nemo layout already", hint="--to native, hf or hf-text leads out of it")
    to_nemo = options.to == NAME
    if to_nemo and options.vision == "keep":
        raise KconvError("--vision keep: the nemo layout is the text model's", hint="leave the option out")
    if to_nemo and options.experts in ("packed", "mxfp4", "nvfp4", "fp8-block"):
        raise KconvError(f"--experts {options.experts}: NeMo's experts are plain", hint="ask for bf16, fp16 or fp32")
    inner = dataclasses.replace(options, to="native") if to_nemo else options
    if to_nemo and any(_packed(r) for r in native_layouts(checkpoint, dataclasses.replace(inner, sidecar=True)).rules):
        inner = dataclasses.replace(inner, experts="bf16")
    made = native_layouts(as_native(checkpoint) if source else checkpoint, inner)
    if made.family != "Kimi K3":
        raise KconvError(f"{made.family} has no nemo layout", hint="NeMo AutoModel's class is Kimi K3's alone")
    if to_nemo and made.config.get("num_experts_per_layer"):
        said = "layers have different numbers of experts, which NeMo's class cannot be told"
        raise KconvError(said, hint="--to native keeps them")
    edits = config_edits(checkpoint.config, checkpoint.manifest) if to_nemo else {}
    return dataclasses.replace(
        made,
        problems=made.problems + refusals(edits, NATIVE_ONLY, NAME),
        rules=[_respelled(r, checkpoint, source=source, backward=made.backward) for r in made.rules],
        drops=[Drop(tuple(_renamed(n, RENAMED) for n in d.names), d.reason) for d in made.drops] if source else made.drops,
        config=_config(made.config) if to_nemo else made.config,
        source_layout=NAME if source else made.source_layout,
        target_layout=options.to,
        model="" if to_nemo else made.model,
    )


def _config(native: dict[str, Any]) -> dict[str, Any]:
    """The text config under the type that NeMo's config class has; without our own keys."""
    kept = {k: v for k, v in native.items() if k not in NATIVE_ONLY}
    return kept | {"model_type": "kimi_linear", "architectures": ["KimiK3ForCausalLM"]}


def _renamed(name: str, table: dict[str, str]) -> str:
    head, dot, tail = name.partition(".layers.")
    layer, _, rest = tail.partition(".")
    return f"{head}{dot}{layer}.{table[rest]}" if rest in table else name


def _packed(rule: Rule) -> bool:
    return any(n.endswith("_packed") and ".mlp.experts." in n for n in rule.right)


def _grouped(name: str) -> bool:
    return name.endswith(tuple(f".{n}" for n in EXPERTS))


def _respelled(rule: Rule, checkpoint: Checkpoint, *, source: bool, backward: bool) -> Rule:
    """The rule with its native side in NeMo's names and layout; that is the left one only from nemo to native."""
    if source and not backward:
        left = tuple(tuple(_renamed(n, RENAMED) for n in piece) for piece in rule.left)
        steps = (_on_first(SWAPPED, len(rule.left[0])), rule.transform)
        grouped = _grouped(rule.left[0][0])
        transform, expected = (_simple(steps), None) if grouped else (rule.transform, rule.expect)
        return dataclasses.replace(rule, left=left, transform=transform, expect=expected)
    right = tuple(_renamed(n, RENAMED) for n in rule.right)
    if not _grouped(rule.right[0]):
        transform = rule.transform if source or right == rule.right else _in_fp32(rule, checkpoint)
        return dataclasses.replace(rule, right=right, transform=transform)
    if rule.stack is None:
        return dataclasses.replace(rule, right=right, transform=_simple((rule.transform, _on_first(SWAPPED, len(right)))))
    expected = rule.expect and (tuple(choices for piece in rule.expect for choices in piece),)
    left = (tuple(name for piece in rule.left for name in piece),)
    joined = SideBySide(rule.transform, len(rule.left))
    return dataclasses.replace(rule, left=left, right=right, transform=joined, expect=expected)


def _in_fp32(rule: Rule, checkpoint: Checkpoint) -> Transform:
    """The rule's transform, then the fp32 that NeMo's holders have."""
    first = rule.left[0][0].format_map(next(rule.bindings()))
    entry = checkpoint.entries.get(first)
    if entry is None or entry.spec.dtype == "F32":
        return rule.transform
    return _simple((rule.transform, Cast(entry.spec.dtype, "F32")))


def _on_first(transform: Transform, count: int) -> Transform:
    """`transform` on the first of `count` tensors, the others as they are."""
    ones = (1,) * count
    return transform if count == 1 else Par((transform, *(Same() for _ in range(count - 1))), ones, ones)


def _simple(steps: Iterable[Transform]) -> Transform:
    """Steps one after the other, without those that do nothing."""
    kept = tuple(s for s in steps if not isinstance(s, Same))
    return kept[0] if len(kept) == 1 else Seq(kept) if kept else Same()
