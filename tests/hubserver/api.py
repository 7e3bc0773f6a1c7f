"""The Hub's API for repositories: creation, information, trees, refs, branches, pull requests, access.

| case | answer, as the Hub gives it |
|---|---|
| no such repository, or private without a token | 401 without a token, 404 with one; `X-Error-Code: RepoNotFound` |
| unknown token | 401, "Invalid credentials in Authorization header" |
| no such revision, file | 404, `RevisionNotFound`, `EntryNotFound` |
| gated without a grant | 403, `GatedRepo` |
| a token that may only read | 403 on every write |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlencode

from tests.hubserver.store import Commit, Discussion, Repo
from tests.hubserver.wire import Request, Response

if TYPE_CHECKING:
    from tests.hubserver.server import HubServer

DATE = "2026-11-01T00:00:00.000Z"
REPO = r"(?P<repo>[^/]+/[^/]+)"
MODELS = rf"/api/models/{REPO}"


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


def user_of(app: HubServer, request: Request) -> dict[str, Any] | None:
    """The owner of the request's token; None without one."""
    header = request.headers.get("Authorization")
    if header is None:
        return None
    user = app.tokens.get(header.removeprefix("Bearer "))
    if user is None:
        raise Refused(Response.error(401, "Invalid credentials in Authorization header"))
    return user


def writer_of(app: HubServer, request: Request, namespace: str) -> dict[str, Any]:
    """The user, who must be allowed to write in `namespace`."""
    user = user_of(app, request)
    if user is None:
        raise Refused(Response.error(401, "Invalid username or password."))
    if user["role"] != "write" or namespace not in [user["name"], *user["orgs"]]:
        raise Refused(Response.error(403, f"Forbidden: you don't have the required permissions in {namespace}"))
    return user


def repo_of(app: HubServer, request: Request, *, write: bool = False, content: bool = False, rev: str = "") -> Repo:
    """The repository in the request's path, if the user may see it, write to it (or to its own pull request `rev`)."""
    user = user_of(app, request)
    repo = app.store.repos.get(request.groups["repo"])
    namespace = request.groups["repo"].split("/")[0]
    member = user is not None and namespace in [user["name"], *user["orgs"]]
    if repo is None or (repo.private and not member):
        raise Refused(Response.error(404 if user else 401, "Repository not found", "RepoNotFound"))
    own = user is not None and [d for d in repo.discussions if f"refs/pr/{d.num}" == rev and d.author == user["name"]]
    if write and not own:
        writer_of(app, request, namespace)
    if content and repo.gated and not member:
        raise Refused(Response.error(403 if user else 401, f"Access to model {repo.id} is restricted.", "GatedRepo"))
    return repo


def commit_of(repo: Repo, revision: str) -> Commit:
    """The commit of a (quoted) revision."""
    commit = repo.resolve(unquote(revision))
    if commit is None:
        raise Refused(Response.error(404, f"Invalid rev id: {unquote(revision)}", "RevisionNotFound"))
    return commit


def whoami(app: HubServer, request: Request) -> Response:
    """GET /api/whoami-v2."""
    user = user_of(app, request)
    if user is None:
        return Response.error(401, "Invalid username or password.")
    orgs = [{"name": name, "type": "org"} for name in user["orgs"]]
    access = {"accessToken": {"displayName": "test", "role": user["role"]}, "type": "access_token"}
    return Response.json({"type": "user", "name": user["name"], "orgs": orgs, "auth": access})


def create_repo(app: HubServer, request: Request) -> Response:
    """POST /api/repos/create."""
    data = request.json()
    user = user_of(app, request)
    namespace = data.get("organization") or (user["name"] if user else "")
    writer_of(app, request, namespace)
    repo_id = f"{namespace}/{data['name']}"
    url = f"{app.url}/{repo_id}"
    if repo_id in app.store.repos:
        return Response.json({"error": "You already created this model repo", "url": url}, 409)
    private = data.get("private") or data.get("visibility") == "private"
    app.store.create(repo_id, private=bool(private))
    return Response.json({"url": url, "name": repo_id, "id": repo_id})


def info(app: HubServer, request: Request) -> Response:
    """GET /api/models/{repo}[/revision/{rev}]."""
    repo = repo_of(app, request)
    commit = commit_of(repo, request.groups.get("rev") or "main")
    siblings = [{"rfilename": path} for path in sorted(commit.tree)]
    data = {
        "id": repo.id,
        "modelId": repo.id,
        "sha": commit.oid,
        "private": repo.private,
        "tags": [],
        "siblings": siblings,
    }
    return Response.json(data | {"gated": "manual" if repo.gated else False, "lastModified": DATE, "createdAt": DATE})


def _item(path: str, commit: Commit) -> dict[str, Any]:
    entry = commit.tree[path]
    item: dict[str, Any] = {"type": "file", "path": path, "size": entry.size, "oid": entry.sha1}
    if entry.lfs:
        item["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": 130}
    return item


def tree(app: HubServer, request: Request) -> Response:
    """GET /api/models/{repo}/tree/{rev}[/{path}], paginated by Link headers."""
    commit = commit_of(repo_of(app, request), request.groups["rev"])
    prefix = unquote(request.groups.get("path") or "")
    prefix = f"{prefix}/" if prefix else ""
    files = [p for p in sorted(commit.tree) if p.startswith(prefix)]
    items = [_item(p, commit) for p in files if "/" not in p.removeprefix(prefix) or request.query.get("recursive") == "true"]
    folders = sorted({prefix + p.removeprefix(prefix).split("/")[0] for p in files if "/" in p.removeprefix(prefix)})
    items = [{"type": "directory", "path": f, "size": 0, "oid": "0" * 40} for f in folders] + items
    start = int(request.query.get("cursor") or 0)
    response = Response.json(items[start : start + app.page_size])
    if start + app.page_size < len(items):
        query = urlencode({**request.query, "cursor": start + app.page_size})
        response.headers["Link"] = f'<{app.url}{request.path}?{query}>; rel="next"'
    return response


def paths_info(app: HubServer, request: Request) -> Response:
    """POST /api/models/{repo}/paths-info/{rev} (form or JSON)."""
    commit = commit_of(repo_of(app, request), request.groups["rev"])
    from urllib.parse import parse_qs

    paths = parse_qs(request.body().decode()).get("paths", [])
    return Response.json([_item(path, commit) for path in paths if path in commit.tree])


def refs(app: HubServer, request: Request) -> Response:
    """GET /api/models/{repo}/refs."""
    repo = repo_of(app, request)

    def rows(prefix: str) -> list[dict[str, str]]:
        found = [(ref, oid) for ref, oid in sorted(repo.refs.items()) if ref.startswith(prefix)]
        return [{"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": oid} for ref, oid in found]

    data = {"branches": rows("refs/heads/"), "tags": rows("refs/tags/"), "converts": []}
    return Response.json(data | ({"pullRequests": rows("refs/pr/")} if request.query.get("include_prs") else {}))


def create_branch(app: HubServer, request: Request) -> Response:
    """POST /api/models/{repo}/branch/{name}."""
    repo = repo_of(app, request, write=True)
    name = unquote(request.groups["name"])
    if name.startswith("refs/"):
        return Response.error(400, f"Invalid branch name: {name}")
    if f"refs/heads/{name}" in repo.refs:
        return Response.error(409, f"Reference already exists: refs/heads/{name}")
    repo.refs[f"refs/heads/{name}"] = commit_of(repo, (request.json() or {}).get("startingPoint") or "main").oid
    return Response(201)


def create_tag(app: HubServer, request: Request) -> Response:
    """POST /api/models/{repo}/tag/{rev}."""
    repo = repo_of(app, request, write=True)
    commit = commit_of(repo, request.groups["rev"])
    repo.refs[f"refs/tags/{request.json()['tag']}"] = commit.oid
    return Response(201)


def open_pull_request(repo: Repo, title: str, author: str) -> Discussion:
    """A new pull request from `main`."""
    discussion = Discussion(len(repo.discussions) + 1, title, author)
    repo.discussions.append(discussion)
    repo.refs[f"refs/pr/{discussion.num}"] = repo.refs["refs/heads/main"]
    return discussion


def _discussion(repo: Repo, d: Discussion) -> dict[str, Any]:
    return {
        "num": d.num, "title": d.title, "status": d.status, "author": {"name": d.author}, "createdAt": DATE,
        "isPullRequest": True, "repo": {"name": repo.id, "type": "model"}, "events": [], "diff": "",
        "changes": {"base": "refs/heads/main"}, "filesWithConflicts": [],
    }  # fmt: skip


def discussions(app: HubServer, request: Request) -> Response:
    """GET /api/models/{repo}/discussions: all open ones fit on a page here."""
    repo = repo_of(app, request)
    author = request.query.get("author")
    status = {"open": ("open", "draft"), "closed": ("closed", "merged")}.get(request.query.get("status", "all"))
    rows = [d for d in repo.discussions if (not author or d.author == author) and (not status or d.status in status)]
    return Response.json({"count": len(rows), "start": 0, "discussions": [_discussion(repo, d) for d in rows]})


def create_discussion(app: HubServer, request: Request) -> Response:
    """POST /api/models/{repo}/discussions: anyone with a token may open one."""
    repo = repo_of(app, request)
    user = user_of(app, request)
    if user is None:
        return Response.error(401, "Invalid username or password.")
    return Response.json({"num": open_pull_request(repo, request.json()["title"], user["name"]).num})


def discussion(app: HubServer, request: Request) -> Response:
    """GET /api/models/{repo}/discussions/{num}."""
    repo = repo_of(app, request)
    return Response.json(_discussion(repo, repo.discussions[int(request.groups["num"]) - 1]))


ROUTES = [
    ("GET", r"/api/whoami-v2", whoami),
    ("POST", r"/api/repos/create", create_repo),
    ("GET", MODELS, info),
    ("GET", rf"{MODELS}/revision/(?P<rev>[^/]+)", info),
    ("GET", rf"{MODELS}/tree/(?P<rev>[^/]+)(?:/(?P<path>.+))?", tree),
    ("POST", rf"{MODELS}/paths-info/(?P<rev>[^/]+)", paths_info),
    ("GET", rf"{MODELS}/refs", refs),
    ("POST", rf"{MODELS}/branch/(?P<name>[^/]+)", create_branch),
    ("POST", rf"{MODELS}/tag/(?P<rev>[^/]+)", create_tag),
    ("GET", rf"{MODELS}/discussions", discussions),
    ("POST", rf"{MODELS}/discussions", create_discussion),
    ("GET", rf"{MODELS}/discussions/(?P<num>\d+)", discussion),
]
