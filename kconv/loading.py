"""`kconv.load`: a native module from a converted checkpoint, or straight from a published one through the same plan.

Slabs go from the files into the model's own storage, converted on the way, so nothing is held beyond the model and the
slabs in flight. Loading is strict: the plan's targets and the model's state dict must agree name by name and shape by
shape, before any data is read.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kconv.conversion import default_workers, plan
from kconv.errors import KconvError, Problems
from kconv.names import folded
from kconv.plans import Plan
from kconv.report import Meter
from kconv.run import execute
from kconv.slabs import Region, Slab, streams
from kconv.spec import torch_dtype

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel


def load(source: Any, *, device: str | torch.device = "cpu", dtype: torch.dtype | str | None = None,
         workers: int | None = None, quiet: bool = True, **options: Any) -> PreTrainedModel:  # fmt: skip
    """Load a checkpoint as a native module in eval mode.

    Args:
        source: a folder in the native or the published layout, or `hf://owner/name`.
        device: where the model lives; slabs are converted there when it is a GPU.
        dtype: floating-point dtype of the model; the config's by default. The fp32 set stays (at least) fp32.
        workers: reading threads.
        options: `experts` (`packed`, `bf16`, ...), `follow_index`, `tie` as for `kconv.plan`.

    Raises `Problems` when a tensor is missing, surplus or misshapen.
    """
    made = plan(source, "native", **options).check()
    model = empty_model(made, device, dtype)
    sink = MemorySink(_storage(made, model))
    with Meter("load", made.output_bytes, quiet=quiet) as meter:
        execute(
            streams(made, sink.place, str(device)), made.source.files, sink,
            workers=workers or default_workers(), device=str(device), tick=meter,
        )  # fmt: skip
    model.tie_weights()
    return model.eval()


def empty_model(made: Plan, device: str | torch.device, dtype: torch.dtype | str | None) -> PreTrainedModel:
    """The plan's model with uninitialised parameters on `device`."""
    import torch

    module, _, name = made.layouts.model.partition(":")
    if not name:
        hint = "convert it with --to native; Transformers' own class loads that: AutoModelForCausalLM.from_pretrained(OUT)"
        raise KconvError(f"{made.layouts.family} has no module of kconv's own to load into", hint=hint)
    importlib.import_module("kconv.modeling")
    cls = getattr(importlib.import_module(module), name)
    config = cls.config_class(**{k: v for k, v in made.layouts.config.items() if k not in ("model_type", "architectures")})
    asked = dtype or config.dtype or "bfloat16"
    wanted = asked if isinstance(asked, torch.dtype) else getattr(torch, asked.removeprefix("torch."))
    with torch.device("meta"):
        model = cls(config)
    return model.to(wanted).to_empty(device=device)


def _storage(made: Plan, model: PreTrainedModel) -> dict[str, Tensor]:
    """Target name -> the model's tensor; raises `Problems` unless they are the same set with the same shapes."""
    state = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    wanted = {n: t for n, t in made.targets.items() if t.group == "model"}
    lines = [f"the model lacks {line}" for line in folded(n for n in wanted if n not in state)]
    lines += [f"the checkpoint lacks {line}" for line in folded(n for n in state if n not in wanted and n not in tied)]
    for name in wanted.keys() & state.keys():
        if tuple(state[name].shape) != wanted[name].spec.shape:
            lines.append(f"{name} is {wanted[name].spec}, the model's is {list(state[name].shape)}")
    if lines:
        raise Problems(f"{made.source.where} does not fit {type(model).__name__}:", lines)
    return {n: state[n] for n in wanted}


class MemorySink:
    """A sink that puts converted regions into tensors, cast to their dtype."""

    def __init__(self, storage: dict[str, Tensor]) -> None:
        self._storage = storage

    def place(self, name: str) -> tuple[str, int]:
        """Offsets count bytes of the target's own dtype."""
        return name, 0

    def lend(self, region: Region) -> np.ndarray | None:
        """The region's own storage as bytes, where it lies on the CPU in the region's dtype: it is filled in place."""
        import torch

        target = self._storage.get(region.name)
        if target is None or target.device.type != "cpu" or target.dtype != torch_dtype(region.spec.dtype):
            return None
        flat = target.reshape(-1).view(torch.uint8).numpy()
        return flat[region.offset : region.offset + region.spec.nbytes]

    def put(self, region: Region, data: np.ndarray) -> str:
        """Copy bytes that lie on the CPU."""
        import torch

        return self.put_tensor(region, torch.from_numpy(data).view(torch_dtype(region.spec.dtype)))

    def put_tensor(self, region: Region, tensor: Tensor) -> str:
        """Copy a tensor from any device into the region's place."""
        target = self._storage.get(region.name)
        lent = self.lend(region)
        if target is not None and (lent is None or lent.ctypes.data != tensor.data_ptr()):
            dtype = torch_dtype(region.spec.dtype)
            start = region.offset // dtype.itemsize
            target.reshape(-1)[start : start + tensor.numel()].copy_(tensor.reshape(-1), non_blocking=True)
        return ""

    def put_zeros(self, region: Region) -> str | None:
        return None

    def finished(self, slab: Slab) -> None:
        """Nothing to do."""

