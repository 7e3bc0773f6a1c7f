"""`kconv.load`: a native module from a converted checkpoint, or straight from a published one through the same plan.

Slabs go from the files into the model's own storage, converted on the way, so nothing is held beyond the model and the
slabs in flight. Loading is strict: the plan's targets and the model's state dict must agree name by name and shape by
shape, before any data is read.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kconv.console import Meter
from kconv.conversion import default_workers, plan
from kconv.engine import worker_cuda
from kconv.engine.run import execute
from kconv.engine.sink import Sink
from kconv.engine.slabs import Region, streams
from kconv.errors import KconvError, Problems
from kconv.names import folded
from kconv.planning.plan import Plan
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
        workers: reading threads; by default half as many again as cores, at most 8 for a GPU.
        options: `experts` (`packed`, `bf16`, ...), `follow_index`, `tie` as for `kconv.plan`.

    Raises `Problems` when a tensor is missing, surplus or misshapen.
    """
    import torch

    made = plan(source, "native", **options).check()
    model = empty_model(made, device, dtype)
    sink, on_gpu = MemorySink(_storage(made, model)), model.device.type == "cuda"
    count = workers or (min(default_workers(), worker_cuda.WORKERS) if on_gpu else default_workers())
    with Meter("load", made.output_bytes, quiet=quiet) as meter:
        todo = streams(made, sink.place, str(device))
        execute(todo, made.source.files, sink, workers=count, device=str(device), tick=meter)
    model.tie_weights()
    if on_gpu:
        torch.cuda.synchronize(model.device)
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


class MemorySink(Sink):
    """A sink that puts converted regions into tensors, cast to their dtype."""

    takes_tensors = True

    def __init__(self, storage: dict[str, Tensor]) -> None:
        self._flat = {name: tensor.detach().reshape(-1) for name, tensor in storage.items()}

    def place(self, name: str) -> tuple[str, int]:
        """Offsets count bytes of the target's own dtype."""
        return name, 0

    def lend(self, region: Region) -> np.ndarray | None:
        """The region's own storage as bytes, where it lies on the CPU in the region's dtype: it is filled in place."""
        import torch

        place = self._place(region, "cpu")
        return None if place is None else place.view(torch.uint8).numpy()

    def lend_on_device(self, region: Region) -> Tensor | None:
        """The region's own storage, flat, where it lies on a GPU in the region's dtype."""
        return self._place(region, "cuda")

    def put(self, region: Region, data: np.ndarray) -> str:
        """Copy bytes that lie on the CPU."""
        import torch

        return self.put_tensor(region, torch.from_numpy(data).view(torch_dtype(region.spec.dtype)))

    def put_tensor(self, region: Region, tensor: Tensor) -> str:
        """Copy a tensor from any device into the region's place, unless it is the place."""
        place = self._place(region)
        if place is not None and place.data_ptr() != tensor.data_ptr():
            place.copy_(tensor.reshape(-1), non_blocking=True)
        return ""

    def _place(self, region: Region, device: str | None = None) -> Tensor | None:
        """The region in the model's storage, flat; None where there is none, or not in the region's dtype on such a `device`."""
        flat, dtype = self._flat.get(region.name), torch_dtype(region.spec.dtype)
        if flat is None or (device and (flat.device.type != device or flat.dtype != dtype)):
            return None
        start = region.offset // dtype.itemsize
        return flat[start : start + region.spec.nbytes // dtype.itemsize]
