"""A draft directory as a module: native ones by `from_pretrained`, published ones through the adapter's table, in memory."""

from __future__ import annotations

from typing import Any

from kconv.adapters.drafts.adapter import NATIVE, layouts, read_source
from kconv.adapters.drafts.seal import refuse_edits
from kconv.checkpoint.reading import Checkpoint, open_checkpoint
from kconv.options import Options
from kconv.planning.plan import Plan
from kconv.spec import torch_dtype


def load_draft(source: Any, *, device: Any = "cpu", dtype: Any = None, **declared: Any) -> Any:
    """A native draft module in evaluation mode, from a native or a published draft checkpoint.

    Args:
        source: a folder, or anything `kconv.plan` opens.
        device: where the module goes.
        dtype: its dtype; the checkpoint's by default.
        declared: values for what the config leaves open: `block_size`, `target_layer_ids` (0-based outputs),
            `capture_stream`, `mla_norm_eps`, `attention_factor`, `target_num_hidden_layers`.

    Raises:
        KconvError: when it is no draft, its tensors are not exactly those its config asks for, or a value contradicts it;
            Problems when a packaged draft's config is not the one that its provenance was sealed over.
    """
    import torch

    from kconv.modeling.drafts import config_class, model_class

    checkpoint = open_checkpoint(source)
    read = read_source(checkpoint, declared)
    refuse_edits(read)
    plan = Plan(checkpoint, layouts(checkpoint, Options(), declared)).check()
    tensors = dict(_tensors(plan))
    config = config_class(read.config["model_type"])(**read.config)
    with torch.device("meta"):
        model = model_class(read.config["model_type"])(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    stored = next(t.dtype for t in tensors.values() if t.is_floating_point())
    return model.to(device=device, dtype=_dtype(dtype) or stored).eval()


def _dtype(dtype: Any) -> Any:
    import torch

    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


def _tensors(plan: Plan):
    """Native name and tensor of everything the plan makes; drafts have no stacked or fused rules."""
    for edge in plan.edges:
        rule, binding = edge.rule, edge.binding
        for piece in rule.left_names(binding, None):
            made = rule.transform.forward([_read(plan.source, name) for name in piece])
            yield from zip(rule.right_names(binding), made, strict=True)


def _read(checkpoint: Checkpoint, name: str) -> Any:
    import torch

    entry = checkpoint.entries[name]
    raw = bytearray(checkpoint.files.read(entry.file, entry.start, entry.spec.nbytes))
    return torch.frombuffer(raw, dtype=torch_dtype(entry.spec.dtype)).view(entry.spec.shape)


__all__ = ["NATIVE", "load_draft"]
