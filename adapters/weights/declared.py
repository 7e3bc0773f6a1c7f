"""What the quantisation blocks of a config say of a module, to be held against the tensors; the tensors decide.

| block | read from |
|---|---|
| compressed-tensors | `config_groups` (targets: a name, `re:` expression or class; weights), `ignore` |
| fp8 (DeepSeek, Kimi K2) | `weight_block_size`, `fmt`, `modules_to_not_convert` or `ignored_layers` |
| modelopt, modelopt_mixed | `quantized_layers` {module: {quant_algo, group_size}}, or one `quant_algo` and `exclude_modules` |
| hf_quant_config.json | the same under `quantization`; counts where config.json has no block of its own |
| quark | `layer_quant_config` {glob: ..}, `global_quant_config`, `exclude` |

A module that two groups of one rank claim in different ways, or of which a block cannot be understood, is refused only
where the tensors alone do not decide; another method (`quant_method`) says nothing here.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from kconv.adapters.weights.forms import Declared
from kconv.errors import KconvError

Config = dict[str, Any]
Says = Callable[[str], Declared | None]
HF_QUANT = "hf_quant_config.json"
HINT = "give the checkpoint's own config.json"
FMT = {"e4m3": "F8_E4M3", "e4m3fn": "F8_E4M3", "e5m2": "F8_E5M2", "e4m3fnuz": "F8_E4M3FNUZ", "e5m2fnuz": "F8_E5M2FNUZ"}
ALGOS = {"NVFP4": "nvfp4", "MXFP4": "mxfp4", "MXFP8": "fp8", "W4A16_NVFP4": "nvfp4", "W4A8_NVFP4_FP8": "nvfp4"}
CLASSES = ("Linear",)
NOT_LINEAR = ("embed_tokens", "gate")  # an embedding, and a router that is no nn.Linear


def says(block: Config | None, hf_quant: Config | None) -> Says:
    """Module name -> what the blocks say of it, None where they say nothing that can be understood."""
    modelopt = (hf_quant or {}).get("quantization")
    if block is None:
        return _modelopt(modelopt, HF_QUANT) if isinstance(modelopt, dict) else lambda module: None
    method = str(block.get("quant_method") or ("modelopt" if "quant_algo" in block else "compressed-tensors")).lower()
    if method == "compressed-tensors" or "config_groups" in block:
        return _compressed_tensors(block)
    if method.startswith("modelopt"):
        return _modelopt(block if "quant_algo" in block or not isinstance(modelopt, dict) else modelopt, "quantization_config")
    readers = {"fp8": _fp8, "quark": _quark}
    return readers[method](block) if method in readers else lambda module: None


def disagreement(block: Config | None, hf_quant: Config | None) -> str:
    """Modules of which config.json and hf_quant_config.json say different things; empty where there are none."""
    theirs = (hf_quant or {}).get("quantization")
    if not block or not isinstance(theirs, dict):
        return ""
    ours = says(block, None)
    other = _modelopt(theirs, HF_QUANT)
    named = [*_mapping(block, "quantized_layers"), *_mapping(theirs, "quantized_layers")]
    differ = [m for m in dict.fromkeys(named) if _kind(ours(m)) != _kind(other(m))]
    if not differ:
        return ""
    many = f"{len(differ)} modules, {differ[0]} first"
    return f"hf_quant_config.json and config.json say different things of {many}: config.json counts"


def _kind(said: Declared | None) -> str:
    return said.kind if said else "plain"


def _compressed_tensors(block: Config) -> Says:
    groups = [(name, _group(name, g)) for name, g in _mapping(block, "config_groups").items()]
    targets = [(str(t), said) for (name, said) in groups for t in _list(block["config_groups"][name], "targets")]
    ignored = _matcher(_list(block, "ignore"))

    def of(module: str) -> Declared | None:
        if ignored(module):
            return Declared("plain")
        for rank in (_by_name, _by_expression, _by_class):
            found = list(dict.fromkeys(said for target, said in targets if rank(target, module)))
            if len(found) > 1:
                raise KconvError(f"{module} belongs to {len(found)} groups of the config that differ: "
                                 f"{' and '.join(s.where for s in found)}", hint=HINT)  # fmt: skip
            if found:
                return found[0]
        return Declared("plain")

    return of


def _by_name(target: str, module: str) -> bool:
    return target == module


def _by_expression(target: str, module: str) -> bool:
    return target.startswith("re:") and bool(_compiled(target[3:]).match(module))


def _by_class(target: str, module: str) -> bool:
    return target in CLASSES and module.rpartition(".")[2] not in NOT_LINEAR


def _group(name: str, group: Any) -> Declared:
    weights = group.get("weights") if isinstance(group, dict) else None
    where = f"config_groups.{name}"
    if not isinstance(weights, dict):
        return Declared("plain", where)
    bits, kind, size = weights.get("num_bits"), weights.get("type"), _number(weights, "group_size")
    symmetric = weights.get("symmetric") is not False
    if bits == 4 and kind == "float":
        return Declared("nvfp4" if size == 16 else "mxfp4", where, group=size)
    if bits == 8 and kind == "float":
        microscaled = size == 32 and weights.get("strategy") == "group"
        return Declared("fp8", where, (1, 32) if microscaled else _pair(weights.get("block_structure"), where))
    return Declared("int4" if (bits, kind) == (4, "int") else f"{kind}{bits}", where, group=size, symmetric=symmetric)


def _fp8(block: Config) -> Says:
    left_out = _matcher([*_list(block, "modules_to_not_convert"), *_list(block, "ignored_layers")], parts=True)
    fmt = str(block.get("fmt") or "").lower()
    size = _pair(block.get("weight_block_size"), "weight_block_size")
    said = Declared("fp8", block=size, code=FMT.get(fmt, fmt))

    def of(module: str) -> Declared | None:
        if left_out(module):
            return Declared("plain")
        return None if module.rpartition(".")[2] in (*NOT_LINEAR, "lm_head") else said  # left out without a word

    return of


def _modelopt(block: Config, where: str) -> Says:
    layers, excluded = _mapping(block, "quantized_layers"), _matcher(
        [*_list(block, "exclude_modules"), *_list(block, "ignore")], globs=True
    )  # fmt: skip
    own = block.get("quant_algo")

    def of(module: str) -> Declared | None:
        said = layers.get(module)
        algo = said.get("quant_algo") if isinstance(said, dict) else None if layers else own
        if algo is None or excluded(module):
            return Declared("plain", where)
        size = _number(said if isinstance(said, dict) else block, "group_size")
        return _algo(str(algo).upper(), size, where)

    return of


def _algo(algo: str, size: int, where: str) -> Declared:
    if algo in ALGOS:
        return Declared(ALGOS[algo], where, (1, 32) if algo == "MXFP8" else None, size)
    if algo.startswith("FP8_PB"):
        return Declared("fp8", where, (128, 128))  # ModelOpt's per-block recipes know no other size
    return Declared("fp8" if algo.startswith("FP8") else "int4" if algo.startswith("W4") else algo.lower(), where)


def _quark(block: Config) -> Says:
    excluded = _matcher(_list(block, "exclude"), globs=True)
    layers = {k: _quark_weight(v, f"layer_quant_config.{k}") for k, v in _mapping(block, "layer_quant_config").items()}
    everywhere = _quark_weight(block.get("global_quant_config"), "global_quant_config")

    def of(module: str) -> Declared | None:
        if excluded(module):
            return Declared("plain")
        return next((said for glob, said in layers.items() if fnmatch.fnmatchcase(module, glob)), everywhere)

    return of


def _quark_weight(value: Any, where: str) -> Declared:
    weight = value.get("weight") if isinstance(value, dict) else None
    weight = weight[0] if isinstance(weight, list) and weight else weight
    if not isinstance(weight, dict):
        return Declared("plain", where)
    dtype, size = str(weight.get("dtype") or "").lower(), _number(weight, "group_size")
    if dtype.startswith("fp8_"):
        return Declared("fp8", where, code=FMT.get(dtype.removeprefix("fp8_"), dtype))
    return Declared({"fp4": "mxfp4", "mx": "mxfp4", "int4": "int4"}.get(dtype, dtype), where, group=size)


def _matcher(names: Iterable[str], *, globs: bool = False, parts: bool = False) -> Callable[[str], bool]:
    """Whether a module is one of `names`: exact, `re:`, with `globs` a pattern, with `parts` a dotted part or a prefix."""
    names = [str(n) for n in names]
    exact = {n for n in names if not n.startswith("re:")}
    expressions = [_compiled(n[3:]) for n in names if n.startswith("re:")]
    patterns = [re.compile(fnmatch.translate(n)) for n in exact if globs and any(c in n for c in "*?[")]

    @functools.cache
    def matches(module: str) -> bool:
        if module in exact or any(e.match(module) for e in (*expressions, *patterns)):
            return True
        return parts and any(module.startswith(n + ".") or f".{n}." in f".{module}." for n in exact)

    return matches


@functools.cache
def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as e:
        raise KconvError(f"config.json: the quantisation block has the expression {expression!r}: {e}", hint=HINT) from e


def _number(block: Config, key: str) -> int:
    value = block.get(key)
    return value if type(value) is int and value > 0 else 0


def _mapping(block: Config, key: str) -> Config:
    value = block.get(key) or {}
    if not isinstance(value, dict):
        raise KconvError(f"config.json: the quantisation block's {key} is {value!r}, which is no object", hint=HINT)
    return value


def _list(block: Any, key: str) -> list[Any]:
    value = (block.get(key) if isinstance(block, dict) else None) or []
    if not isinstance(value, list):
        raise KconvError(f"config.json: the quantisation block's {key} is {value!r}, which is no list", hint=HINT)
    return value


def _pair(value: Any, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise KconvError(f"config.json: the block size in {where} is {value!r}, expected two positive numbers", hint=HINT)
