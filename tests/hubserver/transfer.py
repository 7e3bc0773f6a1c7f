"""Uploads and downloads of the test Hub: preupload, LFS batch, basic and multipart objects, commits, ranges.

| step | request |
|---|---|
| which files are LFS, what is there already | POST `/api/models/{repo}/preupload/{rev}` |
| where to send objects; none for those that are complete | POST `/{repo}.git/info/lfs/objects/batch` |
| the bytes, whole or in parts, at another origin | PUT `{store}/objects/{sha256}` or `{store}/parts/{sha256}/{n}` |
| parts to object; object to LFS | POST `/lfs/complete/{sha256}`, POST `/{repo}.git/lfs/verify` |
| a commit as ndjson | POST `/api/models/{repo}/commit/{rev}` |
| a file: a relative redirect; an LFS file: a signed link to the other origin | GET `/{repo}/resolve/{rev}/{path}` |
"""

from __future__ import annotations

import base64
import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import yaml

from tests.hubserver.api import MODELS, REPO, Refused, commit_of, open_pull_request, repo_of, user_of
from tests.hubserver.store import Entry, Repo, upload_mode
from tests.hubserver.wire import Request, Response

if TYPE_CHECKING:
    from tests.hubserver.server import HubServer

LICENSES = {"mit", "apache-2.0", "other", "llama3", "cc-by-4.0", "bsd-3-clause", "unknown"}
SHA = r"(?P<sha>[0-9a-f]{64})"


def yaml_errors(readme: str) -> list[str]:
    """What the Hub would say about the metadata of a README."""
    match = re.match(r"---\r?\n(.*?)\r?\n---(\r?\n|$)", readme, re.S)
    if not match:
        return ["The metadata block is not closed"] if readme.startswith("---\n") else []
    try:
        data = yaml.safe_load(match[1])
    except yaml.YAMLError as e:
        return [f"YAML: {e}"]
    if not isinstance(data, dict):
        return ["The metadata must be a mapping"]
    errors = []
    if "license" in data and data["license"] not in LICENSES:
        errors.append('"license" must be one of the known identifiers')
    models = data.get("base_model", [])
    for model in models if isinstance(models, list) else [models]:
        if not isinstance(model, str) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
            errors.append('"base_model" with value is not valid: use a model id from the Hub')
    return errors


def validate_yaml(app: HubServer, request: Request) -> Response:
    """POST /api/validate-yaml."""
    errors = [{"message": e} for e in yaml_errors(request.json()["content"])]
    return Response.json({"errors": errors, "warnings": []}, 400 if errors else 200)


def preupload(app: HubServer, request: Request) -> Response:
    """POST /api/models/{repo}/preupload/{rev}: upload modes and the ids of what the revision holds."""
    rev = unquote(request.groups["rev"])
    repo = repo_of(app, request, write=not request.query.get("create_pr"), rev=rev)
    commit = commit_of(repo, rev)
    files = []
    for file in request.json()["files"]:
        entry = commit.tree.get(file["path"])
        mode = upload_mode(file["path"], file["size"])
        known = {} if entry is None else {"oid": entry.sha256 if entry.lfs else entry.sha1}
        files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, **known})
    return Response.json({"files": files, "commitOid": commit.oid})


def lfs_batch(app: HubServer, request: Request) -> Response:
    """POST /{repo}.git/info/lfs/objects/batch."""
    data = request.json()
    repo = repo_of(app, request, write=True, rev=data.get("ref", {}).get("name", ""))
    objects = [_lfs_object(app, repo, o["oid"], o["size"], "multipart" in data["transfers"]) for o in data["objects"]]
    chosen = "multipart" if any("chunk_size" in str(o) for o in objects) else "basic"
    return Response.json({"transfer": chosen, "objects": objects, "hash_algo": "sha256"})


def _lfs_object(app: HubServer, repo: Repo, oid: str, size: int, multipart: bool) -> dict[str, Any]:
    if size > app.max_file_size:
        message = f"You need to configure your repository to enable upload of files > {app.max_file_size} bytes"
        return {"oid": oid, "size": size, "error": {"code": 422, "message": message}}
    if app.store.has(oid):
        return {"oid": oid, "size": size}
    verify = {"href": f"{app.url}/{repo.id}.git/lfs/verify"}
    upload: dict[str, Any] = {"href": f"{app.cdn.url}/objects/{oid}?signature={app.sign(oid)}"}
    if multipart and size > app.part_size:
        count = -(-size // app.part_size)
        parts = {f"{n:05d}": f"{app.cdn.url}/parts/{oid}/{n}?signature={app.sign(oid)}" for n in range(1, count + 1)}
        upload = {"href": f"{app.url}/lfs/complete/{oid}", "header": {"chunk_size": str(app.part_size), **parts}}
    return {"oid": oid, "size": size, "authenticated": True, "actions": {"upload": upload, "verify": verify}}


def _receive(app: HubServer, request: Request) -> Path:
    if request.query.get("signature") != app.sign(request.groups["sha"]):
        raise Refused(Response(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>"))
    with tempfile.NamedTemporaryFile(dir=app.store.folder, prefix="put-", delete=False) as f:
        path = Path(f.name)
    request.save(path)
    return path


def put_object(app: HubServer, request: Request) -> Response:
    """PUT {store}/objects/{sha}: like S3, whole or not at all."""
    app.store.adopt(_receive(app, request))
    return Response(200, headers={"ETag": f'"{request.groups["sha"][:32]}"'})


def put_part(app: HubServer, request: Request) -> Response:
    """PUT {store}/parts/{sha}/{n}."""
    number = int(request.groups["n"])
    app.parts.setdefault(request.groups["sha"], {})[number] = _receive(app, request)
    return Response(200, headers={"ETag": f'"part{number}"'})


def complete(app: HubServer, request: Request) -> Response:
    """POST /lfs/complete/{sha}: joins the parts that the client names."""
    sha = request.groups["sha"]
    parts = app.parts.get(sha, {})
    named = request.json()["parts"]
    if any(part["etag"] != f'"part{part["partNumber"]}"' or part["partNumber"] not in parts for part in named):
        return Response.error(400, "One or more of the specified parts could not be found")
    with tempfile.NamedTemporaryFile(dir=app.store.folder, prefix="join-", delete=False) as out:
        for part in named:
            out.write(parts[part["partNumber"]].read_bytes())
    app.store.adopt(Path(out.name))
    return Response.json({})


def verify(app: HubServer, request: Request) -> Response:
    """POST /{repo}.git/lfs/verify."""
    repo_of(app, request)
    data = request.json()
    if not app.store.has(data["oid"]) or app.store.path(data["oid"]).stat().st_size != data["size"]:
        return Response.error(404, "Object does not exist")
    return Response.json({})


def commit(app: HubServer, request: Request) -> Response:
    """POST /api/models/{repo}/commit/{rev}: header, files, LFS files and deletions as ndjson."""
    new_pr = bool(request.query.get("create_pr"))
    repo = repo_of(app, request, write=not new_pr, rev=unquote(request.groups["rev"]))
    base = commit_of(repo, request.groups["rev"])
    lines = [json.loads(line) for line in request.body().splitlines()]
    header, changes = _changes(app, base.tree, lines)
    with app.store.lock:
        ref = repo.branch_of(unquote(request.groups["rev"]))
        if new_pr:
            user = user_of(app, request) or {"name": "anonymous"}
            ref = f"refs/pr/{open_pull_request(repo, header['summary'], user['name']).num}"
        if ref is None:
            return Response.error(400, f"Cannot push to {unquote(request.groups['rev'])}: not a branch")
        if header.get("parentCommit") not in (None, repo.refs[ref]):
            return Response.error(412, "A commit has happened since. Please refresh and try again.")
        new = repo.commit(ref, header["summary"], changes)
    data = {
        "success": True,
        "commitOid": new.oid,
        "commitUrl": f"{app.url}/{repo.id}/commit/{new.oid}",
        "hookOutput": "",
    }
    return Response.json(
        data | ({"pullRequestUrl": f"{app.url}/{repo.id}/discussions/{len(repo.discussions)}"} if new_pr else {})
    )


def _changes(app: HubServer, tree: Any, lines: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Entry | None]]:
    header: dict[str, Any] = {}
    changes: dict[str, Entry | None] = {}
    for line in lines:
        key, value = line["key"], line["value"]
        if key == "header":
            header = value
        elif key == "file":
            content = base64.b64decode(value["content"])
            if value["path"] == "README.md" and (errors := yaml_errors(content.decode())):
                raise Refused(Response.error(400, f"Invalid metadata in README.md: {'; '.join(errors)}"))
            changes[value["path"]] = app.store.entry(value["path"], app.store.put(content), lfs=False)
        elif key == "lfsFile":
            if not app.store.has(value["oid"]) and not (app.xet and app.xet.fetch(value["oid"], app.store.path(value["oid"]))):
                raise Refused(Response.error(400, f'LFS pointer pointed to a file that does not exist: "{value["path"]}"'))
            changes[value["path"]] = app.store.entry(value["path"], value["oid"], lfs=True)
        elif key == "deletedFile" and value["path"] in tree:
            changes[value["path"]] = None
        elif key == "deletedFolder":
            changes.update({p: None for p in tree if p.startswith(value["path"].rstrip("/") + "/")})
        else:
            raise Refused(Response.error(404, "A file with this name doesn't exist", "EntryNotFound"))
    return header, changes


def resolve(app: HubServer, request: Request) -> Response:
    """GET or HEAD /{repo}/resolve/{rev}/{path}."""
    repo = repo_of(app, request, content=True)
    commit = commit_of(repo, request.groups["rev"])
    path = unquote(request.groups["path"])
    entry = commit.tree.get(path)
    if entry is None:
        response = Response.error(404, "Entry not found", "EntryNotFound")
        response.headers["X-Repo-Commit"] = commit.oid
        return response
    headers = {"X-Repo-Commit": commit.oid, "X-Linked-Size": str(entry.size)}
    if not entry.lfs:
        headers |= {"ETag": f'"{entry.sha1}"', "X-Linked-Etag": f'"{entry.sha1}"'}
        return Response(307, headers=headers | {"Location": f"/api/resolve-cache/models/{repo.id}/{commit.oid}/{quote(path)}"})
    headers |= {"X-Linked-Etag": f'"{entry.sha256}"', "ETag": f'"{entry.sha256[:32]}"'}
    if app.xet and (known := app.xet.find(entry.sha256)):
        route = f"{app.url}/api/models/{repo.id}/xet-read-token/{commit.oid}"
        headers |= {"X-Xet-Hash": known[0], "X-Xet-Refresh-Route": route, "Link": f'<{route}>; rel="xet-auth"'}
    app.links += 1
    location = f"{app.cdn.url}/objects/{entry.sha256}?signature={app.sign(entry.sha256)}&link={app.links}"
    return Response(302, headers=headers | {"Location": location})


def resolve_cache(app: HubServer, request: Request) -> Response:
    """The target of the relative redirect of a regular file."""
    repo = repo_of(app, request, content=True)
    commit = commit_of(repo, request.groups["rev"])
    entry = commit.tree[unquote(request.groups["path"])]
    headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{entry.sha1}"', "Content-Type": "text/plain; charset=utf-8"}
    return Response(200, headers=headers, file=app.store.path(entry.sha256))


def get_object(app: HubServer, request: Request) -> Response:
    """GET {store}/objects/{sha}: signed for one link; links below `app.expired` have run out."""
    signed = request.query.get("signature") == app.sign(request.groups["sha"])
    if not signed or int(request.query.get("link") or 0) <= app.expired:
        return Response(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
    return Response(200, headers={"ETag": f'"{request.groups["sha"][:32]}"'}, file=app.store.path(request.groups["sha"]))


HUB_ROUTES = [
    ("POST", r"/api/validate-yaml", validate_yaml),
    ("POST", rf"{MODELS}/preupload/(?P<rev>[^/]+)", preupload),
    ("POST", rf"{MODELS}/commit/(?P<rev>[^/]+)", commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", lfs_batch),
    ("POST", rf"/{REPO}\.git/lfs/verify", verify),
    ("POST", rf"/lfs/complete/{SHA}", complete),
    ("GET|HEAD", rf"/api/resolve-cache/models/{REPO}/(?P<rev>[^/]+)/(?P<path>.+)", resolve_cache),
    ("GET|HEAD", rf"/{REPO}/resolve/(?P<rev>[^/]+)/(?P<path>.+)", resolve),
]
STORE_ROUTES = [
    ("PUT", rf"/objects/{SHA}", put_object),
    ("PUT", rf"/parts/{SHA}/(?P<n>\d+)", put_part),
    ("GET|HEAD", rf"/objects/{SHA}", get_object),
]
