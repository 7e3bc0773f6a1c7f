"""The Hub's rules for a model card's metadata, checked before a byte is uploaded.

The Hub validates the YAML block of README.md when the commit arrives, that is, after hours of uploading weights.
The rules below are those of its documentation (hub-docs `modelcard.md`, `model-cards.md`, `repositories-licenses.md`).

| field | must be |
|---|---|
| block | opened and closed by a line `---`, valid YAML, a mapping, no key twice |
| license | one of the Hub's identifiers; `other` needs `license_name` and `license_link` (or a LICENSE file) |
| language | a code of two or three letters (or `code`, `multilingual`), or a list of such |
| base_model, new_version | a Hub id `name` or `owner/name`; base_model also a list of them; no revision, no path |
| base_model_relation | adapter, finetune, merge or quantized; the Hub has none for drafts |
| datasets, metrics, tags | lists of non-empty strings (datasets: Hub ids) |
| pipeline_tag, library_name, license_name | strings |
| widget | a list of mappings; model-index a list of mappings with `name` and `results`, each with task, dataset, metrics |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kconv.storage import yaml_text

_LICENSES = """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
    lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl openmdw-1.0
    openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
    fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown other
"""
LICENSES = frozenset(_LICENSES.split())
RELATIONS = ("adapter", "finetune", "merge", "quantized")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|code|multilingual")
BLOCK = re.compile(r"\A---[ \t]*\r?\n(?P<yaml>.*?)(?:^---[ \t]*\r?$)", re.S | re.M)


def metadata(readme: str) -> tuple[dict[str, Any], list[str]]:
    """The metadata of a README and what keeps it from being read."""
    text = readme.removeprefix("\ufeff")
    if not text.startswith("---"):
        return {}, ["README.md has no metadata block: its first line must be ---"]
    match = BLOCK.match(text)
    if not match:
        return {}, ["README.md: the metadata block is not closed by a line ---"]
    try:
        data = yaml_text.parse(match["yaml"], first_line=2)
    except ValueError as e:
        return {}, [f"README.md metadata is {e}"]
    if not isinstance(data, dict):
        return {}, ["README.md: the metadata must be a mapping of names to values"]
    return data, []


def problems(readme: str, *, has_license_file: bool = False) -> list[str]:
    """Everything the Hub would refuse in a README, one line a field."""
    data, found = metadata(readme)
    if found:
        return found
    for field, rule in RULES.items():
        if field in data and (said := rule(data[field])):
            found.append(f"README.md metadata, {field}: {said}")
    if "license" not in data:
        found.append("README.md metadata, license: missing; say `license: other` if it is not one of the Hub's")
    if data.get("license") == "other":
        if not data.get("license_name"):
            found.append("README.md metadata, license_name: missing, and `license: other` needs it")
        if not data.get("license_link") and not has_license_file:
            found.append("README.md metadata, license_link: missing, and there is no LICENSE file either")
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _license(value: Any) -> str | None:
    bad = [v for v in _listed(value) if v not in LICENSES] if not isinstance(value, dict) else [value]
    return f"{bad[0]!r} is not an identifier of the Hub; use `license: other` with license_name and license_link" if bad else None


def _language(value: Any) -> str | None:
    bad = [v for v in _listed(value) if not (isinstance(v, str) and LANGUAGE.fullmatch(v))]
    hint = " (YAML reads a bare no as false: write 'no' in quotes)" if bad and bad[0] is False else ""
    return f"{bad[0]!r} is not a language code{hint}" if bad else None


def _ids(value: Any) -> str | None:
    bad = [v for v in _listed(value) if not (isinstance(v, str) and HUB_ID.fullmatch(v) and ".." not in v and "--" not in v)]
    return f"{bad[0]!r} is not a Hub id like owner/name" if bad else None


def _id(value: Any) -> str | None:
    return f"{value!r} must be one Hub id" if isinstance(value, list) else _ids(value)


def _id_list(value: Any) -> str | None:
    return _ids(value) if isinstance(value, list) else f"{value!r} must be a list"


def _strings(value: Any) -> str | None:
    if not isinstance(value, list):
        return f"{value!r} must be a list"
    bad = [v for v in value if not (isinstance(v, str) and v.strip())]
    return f"{bad[0]!r} must be a non-empty string" if bad else None


def _string(value: Any) -> str | None:
    return None if isinstance(value, str) and value.strip() else f"{value!r} must be a non-empty string"


def _relation(value: Any) -> str | None:
    return None if value in RELATIONS else f"{value!r} is none of {', '.join(RELATIONS)}"


def _widget(value: Any) -> str | None:
    ok = isinstance(value, list) and all(isinstance(v, dict) for v in value)
    return None if ok else f"{value!r} must be a list of examples"


def _model_index(value: Any) -> str | None:
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        return "must be a list of mappings with name and results"
    for model in value:
        results = model.get("results")
        if not isinstance(model.get("name"), str) or not isinstance(results, list):
            return "each entry needs a name and a list of results"
        for result in results:
            lacking = [k for k in ("task", "dataset", "metrics") if not (isinstance(result, dict) and result.get(k))]
            if lacking:
                return f"a result of {model['name']} lacks {', '.join(lacking)}"
    return None


RULES: dict[str, Callable[[Any], str | None]] = {
    "license": _license, "license_name": _string, "license_link": _string, "language": _language,
    "base_model": _ids, "new_version": _id, "base_model_relation": _relation, "datasets": _id_list,
    "metrics": _strings, "tags": _strings, "pipeline_tag": _string, "library_name": _string, "widget": _widget,
    "model-index": _model_index,
}  # fmt: skip
