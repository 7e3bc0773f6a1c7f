"""How the Hub is spoken to: which failures are repeated and for how long, and what its refusals mean for the user."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from time import sleep
from typing import Any, TypeVar

from kconv.errors import EnvironmentLacks, KconvError

T = TypeVar("T")
RETRIES = 8
LONGEST_PAUSE = 30.0
LONGEST_RATE_LIMIT = 900.0
TIMEOUT = 60.0
RETRY_STATUS = {408, 429, 500, 502, 503, 504}
NO_TOKEN = "set HF_TOKEN or run `hf auth login` with a token that may see it"


class Again(Exception):
    """A request that may succeed if repeated after `pause` seconds (None: our own choice)."""

    def __init__(self, status: int, pause: float | None) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.pause = status, pause


def transport_error() -> type[Exception]:
    """The HTTP library's base class of network failures: httpx in huggingface_hub 1, httpx2 in 2."""
    from huggingface_hub.utils import get_session

    return sys.modules[type(get_session()).__module__.split(".")[0]].TransportError


def stated_pause(headers: Any) -> float | None:
    """Seconds that the server asks to wait, by `RateLimit` or `Retry-After`; None if it says nothing."""
    limit = re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)", headers.get("RateLimit", ""))
    stated = limit[1] if limit else headers.get("Retry-After", "").strip()
    return float(stated) + 1 if stated.isdigit() else None


def pause(error: Exception, failures: int, name: str) -> None:
    """Wait before another attempt, or give up."""
    wait = getattr(error, "pause", None)
    if failures > RETRIES:
        raise EnvironmentLacks(
            f"{name}: gave up after {RETRIES} attempts without progress ({str(error) or type(error).__name__})",
            hint="check the network and HF_ENDPOINT, then run the same command again",
        ) from error
    if wait is not None and wait > LONGEST_RATE_LIMIT:
        raise EnvironmentLacks(f"{name}: rate limited for {wait:.0f} s", hint="run the same command again later") from error
    sleep(min(LONGEST_PAUSE, 2.0 ** (failures - 1)) if wait is None else wait)


def patiently(call: Callable[[], T], name: str, *, on_wait: Callable[[Exception], None] | None = None) -> T:
    """`call()`, repeated while the Hub is busy or unreachable; its refusals become KconvErrors that name `name`.

    Only for calls that may be repeated. `on_wait` hears of every failed attempt.
    """
    from huggingface_hub.errors import HfHubHTTPError

    failures = 0
    while True:
        try:
            return call()
        except Exception as e:
            cause = _about_the_hub(e)
            response = getattr(cause, "response", None)
            if cause is None or (isinstance(cause, HfHubHTTPError) and getattr(response, "status_code", 0) not in RETRY_STATUS):
                said = explain(cause or e, name)
                if said is e:
                    raise
                raise said from e
            failures += 1
            again = cause if response is None else Again(response.status_code, stated_pause(response.headers))
            pause(again, failures, name)
            if on_wait:
                on_wait(cause)


def _about_the_hub(error: BaseException | None) -> Exception | None:
    """The HTTP or network error behind an exception; huggingface_hub wraps those of uploads in RuntimeError."""
    from huggingface_hub.errors import HfHubHTTPError

    while error is not None:
        if isinstance(error, (HfHubHTTPError, transport_error())):
            return error
        error = error.__cause__
    return None


def explain(error: Exception, name: str) -> Exception:
    """What an error of huggingface_hub means for the user; errors that are not about the Hub are returned unchanged."""
    from huggingface_hub import errors as hub_errors
    from huggingface_hub import get_token

    status = getattr(getattr(error, "response", None), "status_code", None)
    said = getattr(error, "server_message", None) or ""
    if isinstance(error, hub_errors.GatedRepoError):
        return KconvError(f"{name} is gated: {said}", hint="accept its terms on its page, then " + NO_TOKEN)
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        if get_token() is None:
            return KconvError(f"{name} does not exist, or is private and no token is set", hint=NO_TOKEN)
        return KconvError(f"{name} does not exist, or your token may not see it", hint="check the name and the token")
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return KconvError(f"{name}: no such branch, tag or commit", hint="the repository's page lists its branches and tags")
    if isinstance(error, hub_errors.EntryNotFoundError):
        return KconvError(f"{name} does not exist at this revision")
    if isinstance(error, hub_errors.HFValidationError):
        return KconvError(f"{name}: {error}")
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        return EnvironmentLacks(f"{name}: HF_HUB_OFFLINE is set", hint="unset it, or give a local folder")
    if status in (401, 403):
        hint = "no token is set: " + NO_TOKEN if get_token() is None else "the token lacks the permission, or is wrong"
        return KconvError(f"{name}: the Hub refused ({status}): {said or error}", hint=hint)
    if isinstance(error, hub_errors.HfHubHTTPError):
        return KconvError(f"{name}: the Hub answered {status}: {said or error}")
    if isinstance(error, ValueError) and str(error).startswith(("LFS batch API returned errors", "Invalid metadata")):
        return KconvError(f"{name}: the Hub refused: {' '.join(str(error).split())}")
    return error
