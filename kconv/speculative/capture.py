"""The target states that a draft reads: outputs of chosen layers, in the draft's order, concatenated.

| stream | what is taken at layer i |
|---|---|
| `output` | the layer's output; on Kimi K3 this is refused, because two streams carry that name |
| `prefix` (Kimi K3) | the running prefix after the layer, what the layer returns |
| `attn_res` (Kimi K3) | the mixture of blocks and prefix that layer i + 1 reads; after the last layer the final one, unnormed |

The prefix restarts at every block's first layer, so a tap at `i % attn_res_block_size == 0` holds that one layer's contribution.

Ids are 0-based outputs: id i is Transformers' `hidden_states[i + 1]`. For the last layer the two differ: that entry is after
the final norm, a hook on the layer is before it. Trainers that hook (NeMo) tap the latter, code that reads `hidden_states`
(z-lab) the former; `last_normed` says which.

    with capture_hidden(model, taps=[1, 4, 7], stream="prefix") as captured:
        model(input_ids)
    captured.hidden          # [batch, length, 3 * hidden]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kconv.errors import KconvError
from kconv.modeling.drafts.config import STREAMS, check_taps


class Captured:
    """The states of the latest forward pass inside `capture_hidden`."""

    def __init__(self, taps: Sequence[int]) -> None:
        self.taps = tuple(taps)
        self._states: dict[int, Tensor] = {}

    @property
    def hidden(self) -> Tensor:
        """All taps, concatenated in the draft's order: [B, S, taps * hidden]."""
        missing = [i for i in self.taps if i not in self._states]
        if missing:
            raise KconvError(f"no state of layer {missing[0]} was seen: the model was not run inside capture_hidden")
        return torch.cat([self._states[i] for i in self.taps], -1)

    def state(self, layer: int) -> Tensor:
        """One tap, [B, S, hidden]."""
        return self._states[layer]

    def put(self, layer: int, state: Tensor) -> None:
        """Keep the state of one layer."""
        self._states[layer] = state


def decoder_of(model: nn.Module) -> Any:
    """The module that owns `layers`: the model itself, its text decoder, or what `get_decoder` names."""
    seen: list[Any] = [model]
    get = getattr(model, "get_decoder", None)
    if callable(get):
        seen.append(get())
    seen += [getattr(model, name, None) for name in ("model", "language_model", "transformer")]
    for module in seen:
        for inner in (module, getattr(module, "language_model", None), getattr(module, "model", None)):
            if isinstance(getattr(inner, "layers", None), nn.ModuleList):
                return inner
    raise KconvError(
        f"{type(model).__name__} has no list of layers to tap", hint="pass the text model, with a ModuleList named layers"
    )


def is_k3(decoder: Any) -> bool:
    """Whether the layers return a running prefix and finished blocks (attention residuals)."""
    return getattr(getattr(decoder, "config", None), "attn_res_block_size", None) is not None


def resolve_stream(decoder: Any, stream: str | None) -> str:
    """The stream to take: `output` for ordinary models; on Kimi K3 it must be named."""
    if stream is not None and stream not in STREAMS:
        raise KconvError(f"stream {stream!r} is none of {', '.join(STREAMS)}")
    if is_k3(decoder):
        if stream in (None, "output"):
            raise KconvError(
                "Kimi K3 has two streams, and the draft was trained on one of them",
                hint="stream='prefix' (NeMo, Inferact) or 'attn_res' (lightseek, RadixArk): the wrong one only lowers acceptance",
            )
        return stream or ""
    if stream == "attn_res":
        raise KconvError(f"stream 'attn_res' needs attention residuals; {type(decoder).__name__} has none")
    return "output"


@contextmanager
def capture_hidden(
    model: nn.Module, taps: Sequence[int], stream: str | None = None, *, last_normed: bool = False
) -> Iterator[Captured]:
    """Capture layer states of every forward pass inside the block; see the module's table.

    Args:
        model: a native Kimi K3 model, or any Transformers decoder.
        taps: 0-based ids of layers, in the order in which the draft concatenates them.
        stream: `prefix`, `attn_res` (Kimi K3), or `output`.
        last_normed: take the last layer's tap behind the final norm.

    Raises:
        KconvError: for taps that the model does not have, or a stream that does not fit it.
    """
    decoder = decoder_of(model)
    check_taps(list(taps), len(decoder.layers))
    captured = Captured(taps)
    stream, last = resolve_stream(decoder, stream), len(decoder.layers) - 1
    handles = [
        _norm_hook(decoder, i, captured) if last_normed and i == last else _hook(decoder, i, stream, captured) for i in set(taps)
    ]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def _hook(decoder: Any, layer: int, stream: str, captured: Captured) -> Any:
    mixed = _mixer(decoder, layer) if stream == "attn_res" else None

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        captured.put(layer, mixed(module, inputs, state) if mixed else state)

    return decoder.layers[layer].register_forward_hook(after)


def _norm_hook(decoder: Any, layer: int, captured: Captured) -> Any:
    return decoder.norm.register_forward_hook(lambda module, inputs, output: captured.put(layer, output))


def _mixer(decoder: Any, layer: int) -> Callable[[Any, Any, Tensor], Tensor]:
    """What reads the stream behind a layer: the next layer's attention mixture, or the final one.

    A native layer is called with the running prefix, its layout, and the blocks finished so far; where it starts a block
    the prefix it was given is one more.
    """
    from kconv.modeling.residual import mix

    last = layer + 1 == len(decoder.layers)
    reader = decoder if last else decoder.layers[layer + 1]
    name = "output_attn_res" if last else "self_attention_res"

    def read(module: Any, inputs: Any, prefix: Tensor) -> Tensor:
        blocks = (*inputs[2:], inputs[0]) if module.starts_block else inputs[2:]
        return mix(prefix, blocks, getattr(reader, f"{name}_norm"), getattr(reader, f"{name}_proj")) if blocks else prefix

    return read


def tap_findings(taps: Sequence[int], depth: int, block: int | None, stream: str | None) -> list[str]:
    """What is doubtful about taps on a target of `depth` layers with attention-residual blocks of `block` layers."""
    said = []
    if block and stream == "prefix":
        fresh = [i for i in taps if i % block == 0]
        if fresh:
            said.append(
                f"taps {fresh} are first layers of blocks of {block}: there the prefix holds only that layer's contribution"
            )
    if depth - 1 in taps:
        said.append(
            f"tap {depth - 1} is the last layer: a hook sees it before the final norm, Transformers' hidden_states[-1] after it, "
            "and some runtimes cannot capture it"
        )
    return said
