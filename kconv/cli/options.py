"""Options that several commands share, so that they are spelled and checked once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from kconv.options import DTYPES, EXPERTS, TARGETS, VISION, WEIGHTS

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
GRADES = ("exact", "exact-with-sidecar", "value-exact", "lossy")


class Size(click.ParamType):
    """Bytes with a unit: `5GB`, `800MB`, `1GiB`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", str(value), re.IGNORECASE)
        if not match or not float(match[1]) > 0 or match[2].upper() not in UNITS:
            self.fail(f"{value!r} is no size; write for example 5GB or 800MB", param, ctx)
        return int(float(match[1]) * UNITS[match[2].upper()])


class Span(click.ParamType):
    """A range of layers, both ends included: `0-3`, or one layer: `7`."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(value))
        if not match or int(match[2] or match[1]) < int(match[1]):
            self.fail(f"{value!r} is no range of layers; write for example 0-3", param, ctx)
        return int(match[1]), int(match[2] or match[1])


class Share(click.ParamType):
    """One of several equal shares of the work: `2/8`."""

    name = "i/n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = re.fullmatch(r"(\d+)/(\d+)", str(value))
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            self.fail(f"{value!r} is no share; write for example 2/8 for the second of eight", param, ctx)
        return int(match[1]), int(match[2])


class Block(click.ParamType):
    """A block size, rows x columns: `128x128`."""

    name = "rows x columns"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", "x".join(map(str, value)) if isinstance(value, tuple) else str(value))
        if not match:
            self.fail(f"{value!r} is no block size; write for example 128x128", param, ctx)
        return int(match[1]), int(match[2])


def conversion_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What decides a plan: target, experts, vision, dtype, sidecar, layers."""
    options = (
        click.option("--to", type=click.Choice(TARGETS), default="native", show_default=True, help="Target layout."),
        click.option("--experts", type=click.Choice(EXPERTS), help="Routed experts: as stored (default), decoded, re-encoded."),
        click.option("--weights", type=click.Choice(WEIGHTS), help="Re-encode shared experts, latent projections, dense MLPs."),
        click.option("--block", type=Block(), help="Block size of FP8 scales where the config names none."),
        click.option("--vision", type=click.Choice(VISION), help="Vision tower and projector; by default kept only for hf."),
        click.option("--dtype", type=click.Choice(DTYPES), help="Cast or decode the other weights; the fp32 set stays fp32."),
        click.option("--no-sidecar", "sidecar", is_flag=True, flag_value=False, default=True,
                     help="Leave the scales of decoded weights out; the way back is then value-exact (MXFP4) or lossy."),
        click.option("--layers", type=Span(), help="Only these decoder layers, for example 0-3."),
        click.option("--dsa-topk", type=click.IntRange(1),
                     help="Kimi K3.1: keys that a query reads, where config.json does not say."),
        click.option("--indexer-eps", type=click.FloatRange(0, 1, min_open=True, max_open=True),
                     help="Kimi K3.1: eps of the indexer's k_norm, where config.json does not say."),
        click.option("--tie", is_flag=True, help="The head is the embedding although config.json does not say so."),
        click.option("--follow-index", is_flag=True, help="Read a tensor that lies in two shards from the one its index names."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function
