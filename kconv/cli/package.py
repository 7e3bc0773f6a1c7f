"""`kconv package`: a publishable draft."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from kconv.cli.common import Outcome, outcome_command

NAMES = "vllm, sglang, trtllm, max, mlx, speculators, transformers, nemo"


@outcome_command(epilog="Example:  kconv package draft/ --target hf://moonshotai/Kimi-K3 out/ --declare block_size=8")
@click.argument("draft")
@click.option("--target", required=True, help="Exactly what it was trained on: a folder or hf://owner/name[@revision].")
@click.argument("out", type=click.Path(file_okay=False))
@click.option("--runtime", help=f"Comma-separated: {NAMES}.  [default: all that can read the draft]")
@click.option(
    "--tables", type=click.Choice(("drop", "keep")), default="drop", show_default=True, help="Copies of the target's tables."
)
@click.option("--declare", multiple=True, metavar="KEY=VALUE", help="What its config leaves open, e.g. block_size=8.")
@click.option("--training", multiple=True, metavar="KEY=VALUE", help="dataset, dataset_revision, trainer, trainer_version.")
@click.option("--license", "license_id", metavar="ID", help="Licence for the card.  [default: the draft's own card's]")
@click.option("--license-name", help="Its name, for --license other.")
@click.option("--license-link", help="Its text, for --license other.")
@click.option("--title", help="Heading of the card.")
@click.option("--allow", multiple=True, metavar="KIND", help="Accept e.g. mask-is-pad.")
@click.option("--target-repo", metavar="OWNER/NAME", help="What a local target folder is a copy of.")
@click.option("--target-revision", metavar="COMMIT", help="The commit of that copy.")
@click.option("--no-tables", "read_tables", is_flag=True, flag_value=False, default=True, help="Do not read the target's tables.")
@click.option("--quick", is_flag=True, help="Do not read a local target's weights in full; `check` never says `exact` then.")
@click.option("--result", "results", multiple=True, type=click.Path(exists=True, dir_okay=False), help="A result for the card.")
@click.option("--overwrite", is_flag=True, help="Replace a folder that kconv made.")
def command(draft: str, target: str, out: str, runtime: str | None, declare: tuple[str, ...], training: tuple[str, ...],
            license_id: str | None, license_name: str | None, license_link: str | None, **options: Any) -> Outcome:  # fmt: skip
    """Write DRAFT as the folder OUT: configs for its runtimes, provenance of its target, licence, card."""
    from kconv.console import alive, human
    from kconv.packaging.package import package

    given = {"license": license_id, "license_name": license_name, "license_link": license_link}
    with alive(f"package: reading {target}"):
        data = package(
            draft, target, out, runtime=runtime.split(",") if runtime else None, declared=declared(declare),
            training=pairs(training), quiet=False, licence={k: v for k, v in given.items() if v} or None, **options,
        )  # fmt: skip

    def show(console: Console) -> None:
        for note in data["notes"]:
            console.print(f"note: {note}", markup=False)
        for name, file in data["runtimes"].items():
            console.print(f"{name}: {file}", markup=False)
        console.print(
            f"{out}: {data['family']} draft of {data['target']}@{data['target_revision']}, {data['tensors']} tensors, "
            f"{human(data['bytes'])}; embed_tokens {data['tables']['embed_tokens']}, lm_head {data['tables']['lm_head']}",
            markup=False,
        )
        console.print(f"next: kconv check {out} --target {target}  and  kconv publish {out} OWNER/NAME --dry-run", markup=False)

    return Outcome(data, show=show)


def pairs(given: tuple[str, ...]) -> dict[str, str]:
    """KEY=VALUE options as a dict."""
    split = [text.partition("=") for text in given]
    if wrong := ["".join(parts) for parts in split if not parts[1] or not parts[0]]:
        raise click.UsageError(f"write KEY=VALUE, not {', '.join(wrong)}")
    return {key: value for key, _, value in split}


def declared(given: tuple[str, ...]) -> dict[str, Any]:
    """Declared values with their types: integers, numbers, lists of integers, words."""
    found: dict[str, Any] = {}
    for key, text in pairs(given).items():
        if key == "target_layer_ids":
            found[key] = (
                [int(part) for part in text.strip("[]").split(",")] if text.strip("[]").replace(",", "").isdigit() else text
            )
        elif key in ("mla_norm_eps", "attention_factor"):
            try:
                found[key] = float(text)
            except ValueError as e:
                raise click.UsageError(f"{key} must be a number, not {text}") from e
        else:
            found[key] = int(text) if text.isdigit() else text
    return found
