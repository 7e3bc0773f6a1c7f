"""Runs a reference model and writes down what it computed: the golden form that `kconv verify-parity` compares with.

`python capture_script.py REF OUT [--trust-remote-code --code DIR] [--dtype D] [--also D,D] [--modules sketch:4] ...`

| entry of the golden file | shape | meaning |
|---|---|---|
| `input_ids`, `attention_mask` | [B, T] | the inputs; ids where the mask is 0 are random, so leaking padding shows |
| `logits`, `logits_padded` | [B, T, vocab] | without a mask, and with it (meaningless where the mask is 0) |
| `hidden_states.0 .. N` | [B, T, hidden] | the embedding, the output of layer i, last the output of the final norm |
| `modules.POINT` | [B, T, width or k] | a module's output (or input: `INPUTS`); for `sketch:k` k random projections |
| `routing.L.experts`, `.weights` | [B, T, top_k] | the experts that layer L chose for each token, and their weights |
| `logits_fp32`, `logits_bf16` .. | as `logits` | the same run in a lower precision: the reference's own noise |

Everything is stored as fp32. The metadata entry `kconv_golden` is JSON: class, versions, dtype, device, points.
In float64 every request for float32 inside the reference becomes one for float64: its answers carry no rounding noise.
What the official Kimi K3 code needs on a CPU and under transformers 5 is in `REMOTE`, `Operators` and `_shims`.
One file, longer than others, that needs the standard library, torch, transformers and safetensors only: the reference's
own environment runs it, where kconv is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.machinery
import inspect
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

FORMAT = 1
SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# model_type: the text model's class, its prefix in the checkpoint, and the prefixes that are not text.
REMOTE = {"kimi_k3": ("modeling_kimi_linear.KimiLinearForCausalLM", "language_model.", ("vision_tower.", "mm_projector."))}
RENAMES = (("language_model.", ""), ("model.", ""), ("block_sparse_moe", "mlp"), ("forget_gate.", ""))
# What a module reads is a point of its own where no module made it: the mixtures, the recurrence, the experts' sum.
INPUTS = (
    ("input_layernorm", "self_attention_res"), ("post_attention_layernorm", "mlp_res"), ("down_proj", "act"),
    ("self_attn.o_norm", "self_attn.kda"), ("self_attn.o_proj", "self_attn.attention"),
    ("mlp.routed_expert_norm", "mlp.experts"),
)  # fmt: skip
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Refused(Exception):
    """Something the user has to change; `code` is the exit code (2 bad input, 3 the environment lacks something)."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


# --- recording: kconv uses it on the native side too, so that both sides name and reduce what they see alike ----------


def point_name(module: str) -> str:
    """The canonical name of a module: the native one, without `model.` (`layers.3.mlp.gate`)."""
    for old, new in RENAMES:
        module = module.replace(old, new)
    return module


def signs(width: int, k: int) -> torch.Tensor:
    """[width, k] of +-k**-0.5, from an integer hash: the same on every machine and in every version of torch."""
    h = torch.arange(1, width * k + 1, dtype=torch.int64)
    for multiplier, shift in ((0x9E3779B1, 15), (0x85EBCA77, 13), (0xC2B2AE3D, 16)):
        h = (h * multiplier) & 0xFFFFFFFF
        h = h ^ (h >> shift)
    return ((h & 1) * 2 - 1).to(torch.float64).view(width, k) * k**-0.5


def reduce(x: torch.Tensor, k: int) -> torch.Tensor:
    """[tokens, width] as it is (k = 0), or projected on k random sign vectors, which keeps norms and differences."""
    if k == 0 or x.shape[-1] <= k:
        return x.detach().clone()
    return x.detach().double() @ signs(x.shape[-1], k).to(x.device)


def first_float(value: Any) -> torch.Tensor | None:
    """The first floating tensor of a module's inputs or outputs."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else (value,)
    return next((v for v in items if isinstance(v, torch.Tensor) and v.is_floating_point()), None)


def chosen(output: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(expert ids, weights), each [tokens, top_k], of a router's output; None when it is something else."""
    if not isinstance(output, (tuple, list)):
        return None
    ids = next((t for t in output if isinstance(t, torch.Tensor) and not t.is_floating_point()), None)
    if ids is None:
        return None
    like = [t for t in output if isinstance(t, torch.Tensor) and t.is_floating_point() and t.shape == ids.shape]
    return (ids.flatten(0, -2), like[0].detach().flatten(0, -2)) if like else None


def decoder(model: nn.Module) -> tuple[str, Any]:
    """Name and module of the decoder stack: the one that holds `layers` and the final `norm`."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and hasattr(module, "norm"):
            return name, module
    raise Refused(f"{type(model).__name__} has no module with `layers` and `norm`: it cannot be captured")


class Recorder:
    """Hooks that keep what every module of the decoder computed in one forward pass.

    `hidden[i]` [B, T, hidden], `points[name]` [tokens, width or k] in order of execution, `routing[layer]` = (ids,
    weights), each [tokens, top_k] with ascending ids. `only` keeps points whose names begin so.
    """

    def __init__(self, model: Any, k: int = 0, points: bool = True, only: tuple[str, ...] = ("",)) -> None:
        self.model, self.k, self.with_points, self.only = model, k, points, only
        self.hidden: dict[int, torch.Tensor] = {}
        self.points: dict[str, torch.Tensor] = {}
        self.routing: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._undo: list[Callable[[], Any]] = []
        self.tokens = 0

    def __enter__(self) -> Recorder:
        prefix, stack = decoder(self.model)
        count = len(stack.layers)
        for name, module in self.model.named_modules():
            inside = name.startswith(f"{prefix}.layers.") and not re.search(r"\.experts\.|\.act_fn$|layers\.\d+$", name)
            if inside:
                self._watch(module, point_name(name))
        for i, layer in enumerate(stack.layers):
            self._hook(layer, functools.partial(self._layer, i, count))
        if self.with_points:
            self._pre(stack.norm, "output_attn_res")
        self._hook(self.model.get_input_embeddings(), functools.partial(self._keep, 0))
        self._hook(stack.norm, functools.partial(self._keep, count))
        return self

    def __exit__(self, *exc: object) -> None:
        for undo in self._undo:
            undo()

    def _hook(self, module: nn.Module, keep: Callable[[Any], None]) -> None:
        self._undo.append(module.register_forward_hook(lambda m, args, out: keep(out)).remove)

    def _pre(self, module: nn.Module, point: str) -> None:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found = first_float(args)
            self._point(point, first_float(kwargs) if found is None else found)

        self._undo.append(module.register_forward_pre_hook(keep, with_kwargs=True).remove)

    def _watch(self, module: Any, name: str) -> None:
        if name.endswith(".gate"):
            self._hook(module, functools.partial(self._gate, name))
            return
        if not self.with_points:
            return
        for suffix, point in INPUTS:
            if name.endswith("." + suffix):
                self._pre(module, name.removesuffix(suffix) + point)
        if hasattr(module, "moe_infer"):
            run = module.moe_infer

            def moe_infer(*args: Any, **kwargs: Any) -> Any:
                out = run(*args, **kwargs)
                self._point(f"{name}.experts", first_float(out))
                return out

            module.moe_infer = moe_infer
            self._undo.append(lambda: delattr(module, "moe_infer"))
        self._hook(module, lambda out: self._point(name, first_float(out)))

    def _keep(self, i: int, out: Any) -> None:
        self.hidden[i] = first_float(out).detach().clone()  # type: ignore[union-attr]
        self.tokens = self.hidden[i].shape[0] * self.hidden[i].shape[1]

    def _layer(self, i: int, count: int, out: Any) -> None:
        if i + 1 < count:
            self._keep(i + 1, out)
        if self.with_points:
            self._point(f"layers.{i}", first_float(out))

    def _point(self, name: str, x: torch.Tensor | None) -> None:
        if x is None or name in self.points or not name.startswith(self.only):
            return
        if not self.tokens or x.numel() % self.tokens:
            return
        self.points[name] = reduce(x.reshape(self.tokens, -1), self.k)

    def _gate(self, name: str, out: Any) -> None:
        pair = chosen(out)
        if pair is None:
            if self.with_points:
                self._point(name, first_float(out))
            return
        ids, order = pair[0].sort(dim=-1)
        weights = pair[1].gather(-1, order)
        self.routing[int(name.split(".")[1])] = (ids, weights)


# --- the operators of flash-linear-attention, in plain torch, in at least fp32 ---------------------------------------


def kda(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any,
    lower_bound: Any = None, cu_seqlens: Any = None, initial_state: Any = None, **flags: Any,
) -> tuple[Any, None]:  # fmt: skip
    """The gated delta rule token by token over q, k, v, g [B, T, H, D]; gate, l2 norm and beta's sigmoid are inside."""
    inside = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    if initial_state is not None or not all(flags.get(f) for f in inside):
        raise Refused("the plain operators do not cover the way this code calls KDA; use --operators fla", 3)
    heads, width = g.shape[-2:]
    z, rate = g.float() + dt_bias.float().view(heads, width), A_log.float().exp().view(heads, 1)
    decay = (lower_bound * torch.sigmoid(rate * z) if lower_bound is not None else -rate * F.softplus(z)).exp()
    unit = [x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k)]
    query, key, value, step = unit[0] * width**-0.5, unit[1], v.float(), beta.float().sigmoid().unsqueeze(-1)
    ends = cu_seqlens.tolist() if cu_seqlens is not None else [0, q.shape[1]]
    out = torch.empty_like(value)
    for start, end in itertools.pairwise(ends):
        state = query.new_zeros(*query.shape[:1], heads, width, value.shape[-1])
        for t in range(start, end):
            state = state * decay[:, t].unsqueeze(-1)
            seen = torch.einsum("bhk,bhkv->bhv", key[:, t], state)
            state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], step[:, t] * (value[:, t] - seen))
            out[:, t] = torch.einsum("bhk,bhkv->bhv", query[:, t], state)
    return out.to(v.dtype), None


class ShortConvolution(nn.Conv1d):
    """Causal depthwise convolution and SiLU over [B, T, channels]; sequences of `cu_seqlens` do not see each other."""

    def __init__(self, hidden_size: int, kernel_size: int, activation: str | None = None, **_: Any) -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=False)
        self.activation = activation

    def forward(self, x: Any, cache: Any = None, cu_seqlens: Any = None, **_: Any) -> tuple[Any, None]:  # type: ignore[override]
        """[B, T, channels] -> the same shape, and no state."""
        ends = cu_seqlens.tolist() if cu_seqlens is not None else [0, x.shape[1]]
        parts = [x[:, s:e].float().transpose(1, 2) for s, e in itertools.pairwise(ends)]
        past, weight = self.kernel_size[0] - 1, self.weight.float()
        y = torch.cat([F.conv1d(F.pad(p, (past, 0)), weight, groups=self.groups) for p in parts], -1).transpose(1, 2)
        return (F.silu(y) if self.activation else y).to(x.dtype), None


class FusedRMSNormGated(nn.Module):
    """`rms(x) * weight * sigmoid(gate)` over the last axis."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, activation: str = "swish", **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps
        self.gate = torch.sigmoid if activation == "sigmoid" else F.silu

    def forward(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """[.., size] and its gate -> [.., size]."""
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return (y * self.gate(g.float())).to(x.dtype)


def _lengths(mask: torch.Tensor) -> torch.Tensor:
    return mask.sum(-1, dtype=torch.int32)


class Operators:
    """Where fla's operators come from: `torch` (above; any device, any dtype) or `fla` (interpreted on a CPU)."""

    NAMES: ClassVar[dict[str, dict[str, Any]]] = {
        "fla": {}, "fla.ops": {}, "fla.ops.utils": {}, "fla.utils": {"tensor_cache": lambda f: f},
        "fla.modules": {"FusedRMSNormGated": FusedRMSNormGated, "ShortConvolution": ShortConvolution},
        "fla.ops.kda": {"chunk_kda": kda, "fused_recurrent_kda": kda},
        "fla.ops.utils.index": {
            "prepare_lens_from_mask": _lengths,
            "prepare_cu_seqlens_from_mask": lambda m: F.pad(_lengths(m).cumsum(0, dtype=torch.int32), (1, 0)),
        },
    }  # fmt: skip

    @classmethod
    def install(cls, kind: str, device: str, remote: bool) -> None:
        """Before the reference is imported."""
        if kind == "torch" and not remote:
            # Transformers' own classes hold plain forms, and use them when the package is not there.
            sys.modules.update({"fla": None, "causal_conv1d": None})  # type: ignore[dict-item]
        elif kind == "torch":
            for name, attributes in cls.NAMES.items():
                module = types.ModuleType(name)
                spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
                module.__dict__.update({**attributes, "__path__": [], "__spec__": spec})
                sys.modules[name] = module
        elif device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"
            from triton.runtime import autotuner

            # The interpreter has nothing to time: any configuration will do.
            autotuner.Autotuner._bench = lambda self, *args, **kwargs: [1.0, 1.0, 1.0]

    @staticmethod
    def patch(kind: str, device: str, module: types.ModuleType) -> None:
        """After the reference is imported: the chunked kernel cannot be interpreted, the recurrent one can."""
        if kind == "fla" and device == "cpu" and hasattr(module, "chunk_kda"):
            recurrent = module.fused_recurrent_kda
            module.chunk_kda = lambda safe_gate=None, **kw: recurrent(**kw)  # type: ignore[attr-defined]


# --- loading the reference -------------------------------------------------------------------------------------------


class Widen(TorchFunctionMode):
    """Inside, every request for float32 is one for float64: code that widens to fp32 computes in float64 throughout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace `.float()` and every float32 argument."""
        if func is torch.Tensor.float:
            return args[0].double()
        wide = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*(torch.float64 if a is torch.float32 else a for a in args), **wide)


@contextlib.contextmanager
def precision(dtype: torch.dtype, widen: bool = True) -> Iterator[None]:
    """Default dtype `dtype`, no gradients, and `Widen` where it is float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.no_grad(), Widen() if widen and dtype is torch.float64 else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


def _shims() -> None:
    """Names and arguments that moved between transformers 4.57, which the official code was written for, and 5.x."""
    import transformers as library
    from transformers import masking_utils as masks
    from transformers.utils import generic as utils

    transformers, masking_utils, generic = cast(Any, library), cast(Any, masks), cast(Any, utils)
    if not hasattr(generic, "OutputRecorder"):
        from transformers.utils.output_capturing import OutputRecorder

        generic.OutputRecorder = OutputRecorder
    if not hasattr(transformers.PretrainedConfig, "use_return_dict"):
        transformers.PretrainedConfig.use_return_dict = True
    make = masking_utils.create_causal_mask
    known = inspect.signature(inspect.unwrap(make)).parameters
    if "input_embeds" not in known:

        def create_causal_mask(cache_position: Any = None, **kw: Any) -> Any:
            return make(inputs_embeds=kw.pop("input_embeds"), cache=kw.pop("past_key_values"), **kw)

        masking_utils.create_causal_mask = create_causal_mask


def read_config(ref: Path) -> dict[str, Any]:
    """The reference's config.json."""
    try:
        return json.loads((ref / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise Refused(f"{ref} has no readable config.json ({e}); REF is the folder of a checkpoint") from e


def remote_class(args: argparse.Namespace, work: Path) -> tuple[Any, Any, str, tuple[str, ...]]:
    """(class, config, prefix of its names, prefixes to leave out) of a reference that brings its own code."""
    config = read_config(args.ref)
    code = args.code or args.ref
    by_itself = (config.get("auto_map", {}).get("AutoModelForCausalLM"), "", ())
    target, prefix, skip = REMOTE.get(config.get("model_type", ""), by_itself)
    if not target:
        raise Refused(f"{args.ref}/config.json names no remote code (auto_map.AutoModelForCausalLM)")
    module = target.split(".")[0] + ".py"
    if not (code / module).exists():
        raise Refused(f"{code} lacks {module}; give the folder with the reference's code by --code")
    for file in code.glob("*.py"):
        shutil.copy(file, work)
    shutil.copy(args.ref / "config.json", work)
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        full = AutoConfig.from_pretrained(work, trust_remote_code=True)
        cls: Any = get_class_from_dynamic_module(target, str(work))
    except ImportError as e:
        raise Refused(f"the reference's code cannot be imported here: {e}; see --reference-python", 3) from e
    cls._tied_weights_keys = None
    return cls, getattr(full, "text_config", full), prefix, skip


def stored(ref: Path) -> dict[str, Any]:
    """Tensor name -> a function that reads it, over all shards."""
    from safetensors import safe_open

    index = ref / "model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else []
    found: dict[str, Any] = {}
    for file in files or sorted(p.name for p in ref.glob("*.safetensors") if p.name != "golden.safetensors"):
        handle = safe_open(ref / file, framework="pt")
        found |= {name: (lambda n=name, h=handle: h.get_tensor(n)) for name in handle.keys()}  # noqa: SIM118
    if not found:
        raise Refused(f"{ref} holds no .safetensors weights")
    return found


def unpack_mxfp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """U8 [out, in/2] of two E2M1 codes each (low nibble first) and U8 [out, in/32] exponents -> [out, in]."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(packed.shape[0], -1, 32)
    values = torch.tensor(E2M1, dtype=torch.float64)[codes.int()]
    return torch.ldexp(values, (scale.int() - 127).unsqueeze(-1)).view(packed.shape[0], -1).to(dtype)


def _tensor(name: str, tensors: dict[str, Any], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
    """The stored value of one parameter: decoded, cut where A_log is padded, fp32 kept where it is stored as fp32."""
    if name + "_packed" in tensors:
        return unpack_mxfp4(tensors.pop(name + "_packed")(), tensors.pop(name + "_scale")(), dtype)
    if name not in tensors:
        return None
    value = tensors.pop(name)()
    if name.endswith("A_log") and value.numel() > shape.numel():
        if value.flatten()[shape.numel() :].any():
            raise Refused(f"{name}: the padding behind its {shape.numel()} heads is not zero")
        value = value.flatten()[: shape.numel()].view(shape)
    return value.to(torch.promote_types(dtype, torch.float32) if value.dtype is torch.float32 else dtype)


def load_remote(args: argparse.Namespace, dtype: torch.dtype, work: Path) -> nn.Module:
    """The reference's own class with the checkpoint's weights; every tensor of both sides has to be met."""
    cls, config, prefix, skip = remote_class(args, work)
    Operators.patch(args.operators, args.device, sys.modules[cls.__module__])
    with precision(dtype):
        model = cls(config).eval()
    model.config._attn_implementation = "eager"  # the constructor forces flash attention
    tensors = {n: get for n, get in stored(args.ref).items() if not n.startswith(skip)}
    missing, wrong = [], []
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        value = _tensor(prefix + name, tensors, p.shape, dtype)
        if value is None:
            missing.append(prefix + name)
        elif value.shape != p.shape:
            wrong.append(f"{prefix + name} {list(value.shape)} instead of {list(p.shape)}")
        else:
            p.data = value
    if missing or wrong or tensors:
        report = {"missing": missing, "surplus": sorted(tensors), "of another shape": wrong}
        lines = [f"{what} ({len(names)}): {', '.join(names[:5])}" for what, names in report.items() if names]
        raise Refused(f"{args.ref} does not fit the reference's class: " + "; ".join(lines))
    return model.to(args.device)


def _exact_constants(model: nn.Module, config: Any) -> None:
    """Constants computed when a model is built (rotary frequencies), anew in float64: loading made them in fp32."""
    with precision(torch.float64):
        fresh = type(model)(config)
    held = model.state_dict()
    for name, value in fresh.named_buffers():
        if name not in held:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, value)


def load_native(args: argparse.Namespace, dtype: torch.dtype) -> nn.Module:
    """A class of Transformers' own, read by `from_pretrained`, and refused when anything is missing or left over."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(args.ref, trust_remote_code=False)
        known = type(config) in AutoModelForCausalLM._model_mapping
    except (ValueError, KeyError, OSError) as e:
        trust = "if you trust the code that comes with it, add --trust-remote-code"
        raise Refused(f"Transformers knows no class for {args.ref} ({str(e).splitlines()[0]}); {trust}") from e
    if not known:
        raise Refused(f"Transformers has no causal language model for {type(config).__name__}")
    how: dict[str, Any] = {"attn_implementation": "eager", "output_loading_info": True, "use_safetensors": True}
    with precision(dtype, widen=False):  # the loader reads bytes as float32, which must stay what it is
        loaded: Any = AutoModelForCausalLM.from_pretrained(args.ref, config=config, dtype=dtype, **how)
    model, info = loaded
    bad = {k: sorted(map(str, v))[:5] for k, v in info.items() if v}
    if bad:
        raise Refused(f"{args.ref} does not fit {type(model).__name__}: {bad}")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    if dtype is torch.float64:
        _exact_constants(model, config)
    return model.eval().to(args.device)


# --- inputs, runs, the file ------------------------------------------------------------------------------------------


def random_inputs(vocab: int, batch: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeded ids [batch, tokens] and a right-padding mask of uneven lengths (tokens, then 3/4, 5/8 .. of it)."""
    ids = torch.randint(0, vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, max(1, tokens // 2 + tokens // 2 ** (row + 1)) :] = 0
    return ids, mask


def _padded(rows: list[list[int]], vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not rows or not all(rows) or any(not isinstance(i, int) or not 0 <= i < vocab for row in rows for i in row):
        raise Refused(f"the ids must be non-empty rows of integers in 0..{vocab - 1}")
    ids, mask = random_inputs(vocab, len(rows), max(map(len, rows)), seed)
    for r, row in enumerate(rows):
        ids[r, : len(row)] = torch.tensor(row)
        mask[r] = (torch.arange(ids.shape[1]) < len(row)).long()
    return ids, mask


def inputs_of(
    vocab: int, ids: str | Path | None = None, tokens: int = 512, batch: int = 2, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, attention_mask) of a file of ids (JSON rows, or safetensors), or seeded random ones."""
    if ids is None:
        return random_inputs(vocab, batch, tokens, seed)
    if Path(ids).suffix != ".safetensors":
        try:
            return _padded(json.loads(Path(ids).read_text()), vocab, seed)
        except (OSError, ValueError, TypeError) as e:
            raise Refused(f"{ids} is not JSON rows of ids: {e}") from e
    from safetensors.torch import load_file

    held = load_file(ids)
    if "input_ids" not in held:
        raise Refused(f"{ids} holds no input_ids")
    return held["input_ids"].long(), held.get("attention_mask", torch.ones_like(held["input_ids"])).long()


def inputs(args: argparse.Namespace, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, attention_mask) from --text (a prompt a paragraph), or as `inputs_of`."""
    if args.text:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.ref, trust_remote_code=args.trust_remote_code)
        prompts = [p for p in re.split(r"\n\s*\n", args.text.read_text()) if p.strip()]
        return _padded([tokenizer.encode(p)[: args.tokens] for p in prompts], vocab, args.seed)
    return inputs_of(vocab, args.ids, args.tokens, args.batch, args.seed)


def run(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Logits [B, T, vocab] of one pass without a cache."""
    device = next(model.parameters()).device
    mask = None if mask is None else mask.to(device)
    with precision(dtype):
        return model(input_ids=ids.to(device), attention_mask=mask, use_cache=False).logits


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def entries_of(
    model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, run: Callable[..., torch.Tensor], sketch: int | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Entries of a golden file and the order of its points; `run(mask)` makes the logits, with a mask or with None."""
    shape = tuple(ids.shape)
    with Recorder(model, k=sketch or 0, points=sketch is not None) as seen:
        out = {"logits": run(None)}
    out["logits_padded"] = run(mask)
    out |= {f"hidden_states.{i}": h for i, h in seen.hidden.items()}
    out |= {f"modules.{n}": x.view(*shape, -1) for n, x in seen.points.items()}
    for layer, (experts, weights) in seen.routing.items():
        out[f"routing.{layer}.experts"] = experts.to(torch.int16).view(*shape, -1)
        out[f"routing.{layer}.weights"] = weights.view(*shape, -1)
    return out, list(seen.points)


def described(args: argparse.Namespace, model: nn.Module, order: list[str]) -> dict[str, Any]:
    """What the golden file says about where it comes from."""
    import transformers

    return {
        "format": FORMAT, "reference": type(model).__name__, "source": args.ref.resolve().name, "dtype": args.dtype,
        "config_sha256": hashlib.sha256((args.ref / "config.json").read_bytes()).hexdigest(), "attention": "eager",
        "operators": args.operators if args.trust_remote_code else "transformers", "device": args.device,
        "torch": torch.__version__, "transformers": transformers.__version__, "seed": args.seed,
        "sketch": args.sketch, "points": order,
    }  # fmt: skip


def capture(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run the reference in every precision asked for, write the file, and return what was done."""
    from safetensors.torch import save_file

    load = (lambda d: load_remote(args, d, work)) if args.trust_remote_code else (lambda d: load_native(args, d))
    config = read_config(args.ref)
    ids, mask = inputs(args, (config.get("text_config") or config)["vocab_size"])
    dtype = getattr(torch, args.dtype)
    model = load(dtype)
    entries, order = entries_of(model, ids, mask, lambda m: run(model, ids, m, dtype), args.sketch)
    meta = described(args, model, order)
    for name in args.also:
        del model
        model = load(getattr(torch, name))
        entries[f"logits_{SHORT[name]}"] = run(model, ids, None, getattr(torch, name))
    kept = {n: (t.float() if t.is_floating_point() else t).cpu().contiguous() for n, t in entries.items()}
    kept |= {"input_ids": ids, "attention_mask": mask}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = args.out.with_name(f".{args.out.name}.{os.getpid()}")  # nobody else's, unlike a fixed name
    try:
        save_file(kept, temporary, metadata={"kconv_golden": json.dumps(meta)})
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, args.out)
    finally:
        temporary.unlink(missing_ok=True)
    return {"golden": str(args.out), "tokens": int(mask.sum()), "entries": len(kept), "points": len(order)} | {
        k: meta[k] for k in ("reference", "dtype", "device", "operators", "transformers", "torch")
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line -> options."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    p.add_argument("ref", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--trust-remote-code", action="store_true")
    p.add_argument("--code", type=Path, help="folder with the reference's .py files, when REF does not hold them")
    p.add_argument("--dtype", default="float64", choices=list(SHORT))
    p.add_argument("--also", default="float32", help="lower precisions to run as well, by commas")
    p.add_argument("--device", default="cpu")
    p.add_argument("--operators", default=None, choices=["torch", "fla"], help="default: fla on a GPU, torch elsewhere")
    p.add_argument("--modules", default="sketch:4", help="none, full, or sketch:K")
    p.add_argument("--ids", type=Path)
    p.add_argument("--text", type=Path)
    p.add_argument("--tokens", type=int, default=512)
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    args.also = [d for d in args.also.split(",") if d and d != args.dtype]
    if unknown := [d for d in args.also if d not in SHORT]:
        p.error(f"--also: unknown {unknown}")
    found = re.fullmatch(r"(none)|(full)|sketch:(\d+)", args.modules) or p.error("--modules is none, full or sketch:K")
    args.sketch = None if found[1] else int(found[3] or 0)
    args.operators = args.operators or ("torch" if args.device == "cpu" else "fla")
    if args.operators == "fla" and "float64" in [args.dtype, *args.also]:
        p.error("fla's kernels do not compute in float64; use --operators torch or another --dtype")
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, 2 (bad input) or 3 (the environment lacks something); one JSON object on stdout."""
    args = parse(argv)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(HF_MODULES_CACHE=f"{scratch}/modules", HF_HUB_OFFLINE="1", TORCH_COMPILE_DISABLE="1")
        work = Path(scratch) / "reference"
        work.mkdir()
        try:
            Operators.install(args.operators, args.device, args.trust_remote_code)
            if args.trust_remote_code:
                _shims()
            print(json.dumps(capture(args, work)))
        except Refused as e:
            print(json.dumps({"error": str(e)}))
            return e.code
        except ImportError as e:
            print(json.dumps({"error": f"this environment lacks {e.name or e}; see --reference-python"}))
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
