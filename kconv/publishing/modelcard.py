"""Model cards: valid metadata, whose draft it is, what was verified with which command, how to load it in each runtime.

| field | drafts | converted checkpoints |
|---|---|---|
| `base_model` | the target | the source |
| `base_model_relation` | left out: the Hub has none for drafts (it would show them as fine-tunes) | `quantized`, its word for the same weights in another form |
| `license` | the draft's own card's, or what was given, else `unknown` | the source's name under `other` |

Commands that nobody ran here are marked so.
"""  # noqa: E501

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kconv.checkpoint.manifest import checked
from kconv.errors import KconvError
from kconv.publishing import modelcard_rules
from kconv.storage import json_text
from kconv.text.printable import printable

UNKNOWN = "unknown"
DIGESTED = ("config", "index", "tokenizer", "weights")
LICENCE_KEYS = ("license", "license_name", "license_link")
SERVE = {
    "vllm": "vllm serve {target}{at} --speculative-config "
    "'{{\"method\": \"{method}\", \"model\": \"{repo}\", \"num_speculative_tokens\": {drafted}}}'",
    "sglang": "python -m sglang.launch_server --model-path {target}{at} --speculative-algorithm {METHOD} "
    "--speculative-draft-model-path {repo} --speculative-num-draft-tokens {block}",
    "trtllm": "# speculative_config of the LLM API: decoding_type {Method}, speculative_model {repo}, max_draft_len {drafted}",
    "max": "max serve --model-path {target} --draft-model-path {repo} --speculative-method {method}",
    "mlx": "# dflash-mlx: load the folder as the draft of {target}",
    "transformers": "from dflash.model import DFlashDraftModel\ndraft = DFlashDraftModel.from_pretrained(\"{repo}\")",
    "speculators": "from speculators import SpeculatorModel\ndraft = SpeculatorModel.from_pretrained(\"{repo}\")",
    "nemo": "# NeMo AutoModel: the draft checkpoint of the dflash recipe for {target}",
}  # fmt: skip
RAN_HERE = ("transformers", "speculators", "nemo")
METHODS = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "kimi_k3_dflash": "DFlash", "eagle3": "EAGLE3"}


def draft_card(
    name: str, provenance: Mapping[str, Any], runtimes: Iterable[tuple[str, str]], *, licence: Mapping[str, str] | None = None,
    notes: Iterable[str] = (), results: Iterable[tuple[str, str]] = (),
) -> str:  # fmt: skip
    """README.md of a packaged draft.

    Args:
        name: its title.
        provenance: its provenance block.
        runtimes: (runtime, config file) pairs that the folder serves.
        licence: `license`, `license_name`, `license_link` of the weights.
        notes: what a user should know.
        results: (what was found, the command that shows it) pairs: parity, acceptance, check.
    """
    from huggingface_hub import ModelCard, ModelCardData

    target, draft = provenance["target"], provenance["draft"]
    family = draft["family"].removesuffix("_kimi_k25")
    data = ModelCardData(
        base_model=target["repo"] if target["repo"] != UNKNOWN else None,
        library_name="kconv",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft", family.replace("_", "-"), "kconv"],
        **_licence(licence),
    )
    parts = [
        f"# {inert(name)}",
        f"A {METHODS.get(family, family)} draft for {_target_name(target)}. It proposes tokens that the target verifies, so the "
        "output stays the target's; how many are accepted depends on its being used with exactly the target it was made for.",
        "## The target it belongs to",
        _table(target_rows(target)),
        "Check it before serving (ranges only; shapes cannot tell sister models apart):",
        _code(f"kconv check . --target {_source(target)}", "bash"),
        "## The draft",
        _table(draft_rows(draft, provenance["training"])),
        "## Loading",
        *_loading(target, draft, runtimes, family),
        "## What was verified",
        _table([(f"`{command}`", found) for found, command in results], ("command", "found"))
        if results
        else "Nothing is recorded yet.",
    ]
    if notes:
        parts += ["## Notes", "\n".join(f"* {inert(note)}" for note in notes)]
    parts += [
        f"Packaged by kconv {provenance['made_by']['kconv']}. The same facts lie in `config.json` under `kconv_provenance`."
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))


def converted_card(name: str, manifest: Mapping[str, Any], *, results: Iterable[tuple[str, str]] = ()) -> str:
    """README.md of a checkpoint that `kconv convert` made, from its manifest."""
    from huggingface_hub import ModelCard, ModelCardData

    source = manifest["source"]
    repo = str(source.get("name") or "").removeprefix("hf://").split("@")[0]
    on_hub = str(source.get("name") or "").startswith("hf://")
    data = ModelCardData(
        base_model=repo if on_hub else None,
        base_model_relation="quantized" if on_hub else None,
        library_name="kconv",
        pipeline_tag="text-generation",
        tags=["kconv", str(manifest.get("family", "kimi")).lower().replace(" ", "-")],
        license="other",
        license_name="as-the-source",
        license_link="LICENSE" if "LICENSE" in manifest.get("files", {}) else f"https://huggingface.co/{repo}",
    )
    rows = [
        ("source", f"`{source.get('name')}`"), ("revision", f"`{source.get('revision') or UNKNOWN}`"),
        ("tensors of the source", f"{source.get('tensors', 0):,}"), ("layout", f"{manifest.get('from')} -> {manifest.get('to')}"),
        ("options", f"`{json.dumps(manifest.get('options', {}))}`"), ("grade", str(manifest.get("grade"))),
        ("plan digest", f"`{manifest.get('plan_digest')}`"),
    ]  # fmt: skip
    dropped = [f"{row['count']} tensors left out: {row['reason']}" for row in manifest.get("dropped", [])]
    parts = [
        f"# {inert(name)}",
        inert(f"{manifest.get('family')} converted by kconv from `{source.get('name')}`. Grade **{manifest.get('grade')}**: ")
        + GRADES.get(str(manifest.get("grade")), "see the table."),
        "## What it is",
        _table(rows),
        *(["\n".join(f"* {inert(line)}" for line in dropped)] if dropped else []),
        "## Loading",
        _code('import kconv\nmodel = kconv.load("REPO_OR_FOLDER")', "python"),
        _code(AUTO_MODEL, "python"),
        "Back to the published layout, bit for bit where the grade says exact:",
        _code("kconv convert FOLDER published/ --to hf", "bash"),
        "## What was verified",
        _results(results),
        "`kconv.json` holds the sha256 of every file.",
    ]  # fmt: skip
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))


AUTO_MODEL = """import kconv.modeling
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("REPO_OR_FOLDER")"""
GRADES = {
    "exact": "every tensor's bytes are the source's.",
    "exact-with-sidecar": "the sidecar files carry what makes the way back exact.",
    "value-exact": "every number is the source's, in other bytes.",
    "lossy": "numbers were rounded.",
}


def write_missing_card(folder: Path, *, dry_run: bool = False) -> bool:
    """Write README.md for a folder with a manifest and no card; whether one was (or would be) written."""
    path, manifest = folder / "README.md", folder / "kconv.json"
    if path.exists() or not manifest.is_file():
        return False
    data = checked(json_text.read_path(manifest, "the manifest", hint="convert again"), str(manifest))
    if not data.get("source", {}).get("config"):
        return False
    if not dry_run:
        path.write_text(converted_card(folder.resolve().name, data, results=recorded_results(folder)), encoding="utf-8")
    return True


def recorded_results(folder: Path) -> list[tuple[str, str]]:
    """(found, command) of the results that lie in a folder and are about it."""
    from kconv.checkpoint import evidence

    commands = {
        "kconv.verify.json": "kconv verify . --source SOURCE",
        "kconv.parity.json": "kconv verify-parity . --reference REFERENCE",
        "kconv.check.json": "kconv check . --target TARGET",
    }
    found = []
    for name, command in commands.items():
        if (folder / name).is_file():
            result = evidence.load(folder / name)
            if result.get("subject") == evidence.subject(folder):
                found.append((evidence.judge(result)[1], command))
    return found


def result_row(path: Path) -> tuple[str, str]:
    """(found, command) of a result file: what `verify-parity --json` prints, or an object with `command` and `found`."""
    from kconv.checkpoint import evidence

    result = evidence.load(path)
    if result.get("command") and result.get("found"):
        return str(result["found"]), str(result["command"])
    passed, said = evidence.judge(result)
    return said if passed else f"{said}: FAILED", str(result.get("command") or said.split(":")[0].split(" ")[0])


def target_rows(target: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The target part of a provenance block for people."""
    tables = {
        k: v if isinstance(v, str) else f"`{v['sha256'][:16]}`, {v['dtype']} {v['shape']}" for k, v in target["tensors"].items()
    }
    return [
        ("repository", f"`{target['repo']}`"), ("revision", f"`{target['revision']}`"),
        ("architecture", f"{target['architecture']} ({target['model_type']})"),
        ("shape", f"{target['num_hidden_layers']} layers, hidden {target['hidden_size']}, vocabulary {target['vocab_size']}"),
        ("stored as", f"{target['dtype']}, {target['quantization']}"),
        *((part, f"`{target[part]['sha256'][:16]}` ({target[part]['form']})") for part in DIGESTED),
        *tables.items(),
    ]  # fmt: skip


def draft_rows(draft: Mapping[str, Any], training: Mapping[str, str]) -> list[tuple[str, str]]:
    """The draft part of a provenance block for people."""
    rope = draft["rope"]
    spoken = rope if isinstance(rope, str) else ", ".join(f"{k} {v}" for k, v in rope.items())
    mask, block, taps = draft["mask_token"], draft["block"], draft["taps"]
    return [
        ("network", f"{draft['architecture']} ({draft['family']}, {draft['dialect']})"),
        ("tapped layers", f"{taps['layers']}: outputs of 0-based layers, in this order, stream {taps['stream']}"),
        ("mask token", f"{mask['id']} (`{mask['string']}`)"),
        ("block", f"{block['size']} positions, the anchor included; {block['drafted']} tokens drafted"),
        ("RoPE", spoken), ("eps of norms", ", ".join(f"{k} {v}" for k, v in draft["norm_eps"].items())),
        ("causal in the block", ", ".join(str(x).lower() for x in draft["causality"]["is_causal"])),
        ("windows", f"{draft['causality']['sliding_window']}"),
        ("embed_tokens", draft["embed_tokens"]), ("lm_head", draft["lm_head"]),
        ("weights", f"`{draft['weights']['sha256']}` ({draft['weights']['form']})"),
        *((key.replace("_", " "), value) for key, value in training.items()),
    ]  # fmt: skip


def licence_of(readme: str | None) -> dict[str, str]:
    """The licence fields of a card's metadata, if it has valid ones."""
    data, wrong = modelcard_rules.metadata(readme) if readme else ({}, [])
    return {} if wrong else {k: str(data[k]) for k in LICENCE_KEYS if data.get(k)}


def _licence(licence: Mapping[str, str] | None) -> dict[str, Any]:
    found = dict(licence or {})
    if unknown := set(found) - set(LICENCE_KEYS):
        raise KconvError(f"licence has no {', '.join(unknown)}", hint=f"it has {', '.join(LICENCE_KEYS)}")
    return found or {"license": UNKNOWN}


def _target_name(target: Mapping[str, Any]) -> str:
    if target["repo"] == UNKNOWN:
        return "a target whose repository is not recorded"
    tree = f"/tree/{target['revision']}" if target["revision"] != UNKNOWN else ""
    return f"[{target['repo']}](https://huggingface.co/{target['repo']}{tree})"


def _source(target: Mapping[str, Any]) -> str:
    if target["repo"] == UNKNOWN:
        return "TARGET"
    return f"hf://{target['repo']}" + (f"@{target['revision']}" if target["revision"] != UNKNOWN else "")


def _results(results: Iterable[tuple[str, str]]) -> str:
    rows = [(f"`{command}`", found) for found, command in results]
    return _table(rows, ("command", "found")) if rows else "Nothing is recorded yet."


def _loading(target: Mapping[str, Any], draft: Mapping[str, Any], runtimes: Iterable[tuple[str, str]], family: str) -> list[str]:
    method = METHODS.get(family, family)
    drafted, size = draft["block"]["drafted"], draft["block"]["size"]
    at = f" --revision {target['revision']}" if target["revision"] != UNKNOWN else ""
    values = {
        "target": target["repo"] if target["repo"] != UNKNOWN else "TARGET", "at": at, "repo": "REPO_OR_FOLDER",
        "method": method.lower(), "METHOD": method.upper(), "Method": method, "drafted": drafted, "block": size,
    }  # fmt: skip
    parts = ["Native, on any machine:", _code('import kconv\ndraft = kconv.load("REPO_OR_FOLDER")', "python")]
    for name, file in runtimes:
        where = "" if file == "config.json" else f" Its config differs: copy `{file}` over `config.json` first."
        ran = "" if name in RAN_HERE else " (by its documentation; not run by the packager)"
        parts += [f"**{name}**{ran}.{where}", _code(SERVE[name].format_map(values), "python" if name in RAN_HERE else "bash")]
    return parts


def _table(rows: Iterable[tuple[str, str]], head: tuple[str, str] = ("", "")) -> str:
    lines = [f"| {inert(a)} | {inert(b)} |" for a, b in rows]
    return "\n".join([f"| {head[0]} | {head[1]} |", "|---|---|", *lines])


def inert(text: object) -> str:
    """Text from a checkpoint as it may stand in a card: on one line, without a tag, a link, an image or a new cell of its own."""
    return printable(text).replace("<", "&lt;").replace("](", "]\\(").replace("|", "\\|")


def _code(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```"
