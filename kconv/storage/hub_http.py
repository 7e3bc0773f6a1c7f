"""How the Hub is spoken to: which failures are repeated and for how long, and what its refusals mean for the user."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from time import sleep, time
from typing import Any, TypeVar

from kconv.errors import EnvironmentLacks, KconvError
from kconv.text.printable import printable
from kconv.text.redaction import redacted

T = TypeVar("T")
RETRIES = 8
LONGEST_PAUSE = 30.0
LONGEST_RATE_LIMIT = 900.0
WORTH_SAYING = 8.0
MOST_SAID = 500
TIMEOUT = 60.0
RETRY_STATUS = {408, 429, 500, 502, 503, 504}
NO_TOKEN = "set HF_TOKEN or run `hf auth login` with a token that may see it"


class Again(Exception):
    """A request that may succeed if repeated after `pause` seconds (None: our own choice)."""

    def __init__(self, status: int, pause: float | None) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.pause = status, pause


def _http_library() -> Any:
    """The module behind huggingface_hub's sessions: httpx in version 1, httpx2 in 2."""
    from huggingface_hub.utils import get_session

    return sys.modules[type(get_session()).__module__.split(".")[0]]


def transport_error() -> type[Exception]:
    """The HTTP library's base class of network failures."""
    return _http_library().TransportError


def hopeless(error: BaseException) -> str | None:
    """What is wrong with an answer that would be the same if asked for again; None for everything else."""
    library = _http_library()
    if isinstance(error, library.TooManyRedirects):
        return "it redirects without end"
    if isinstance(error, library.UnsupportedProtocol | library.InvalidURL):
        return "it redirects to what is no web address, or HF_ENDPOINT is none"
    if isinstance(error, library.DecodingError):
        return "its answer is not packed as it says"
    if isinstance(error, library.RemoteProtocolError) and "redirect" in str(error).lower():
        return "it redirects to what is no web address"
    return None


def stated_pause(headers: Any) -> float | None:
    """Seconds that the server asks to wait, by `RateLimit` or `Retry-After`; None if it says nothing."""
    limit = re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*([0-9]+)", headers.get("RateLimit", ""))
    stated = limit[1] if limit else headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,300}(\.[0-9]{1,9})?", stated):
        return float(stated) + 1
    try:
        return max(0.0, parsedate_to_datetime(stated).timestamp() - time()) + 1
    except (ValueError, OverflowError):
        return None


def pause(error: Exception, failures: int, name: str) -> None:
    """Wait before another attempt, or give up."""
    wait = getattr(error, "pause", None)
    if failures > RETRIES:
        raise EnvironmentLacks(
            f"{name}: gave up after {RETRIES} attempts without progress ({printable(error) or type(error).__name__})",
            hint="check the network and HF_ENDPOINT, then run the same command again",
        ) from None
    if wait is not None and wait > LONGEST_RATE_LIMIT:
        raise EnvironmentLacks(f"{name}: rate limited for {wait:.0f} s", hint="run the same command again later") from None
    chosen = min(LONGEST_PAUSE, 2.0 ** (failures - 1)) if wait is None else wait
    if chosen >= WORTH_SAYING:
        why = redacted(printable(error) or type(error).__name__)
        print(f"{name}: waiting {chosen:.0f} s ({why})", file=sys.stderr, flush=True)
    sleep(chosen)


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
                raise said from None  # the client's own text may hold a signed link
            failures += 1
            again = cause if response is None else Again(response.status_code, stated_pause(response.headers))
            pause(again, failures, name)
            if on_wait:
                on_wait(cause)


def _about_the_hub(error: BaseException | None) -> Exception | None:
    """The HTTP or network error behind an exception; huggingface_hub wraps those of uploads in RuntimeError."""
    from huggingface_hub.errors import HfHubHTTPError

    while error is not None:
        if isinstance(error, HfHubHTTPError | transport_error()) and not hopeless(error):
            return error
        error = error.__cause__
    return None


def _wrong_answer(error: BaseException) -> str | None:
    """What is wrong with an answer that the client could not make sense of; None where that is not the matter."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = str(at.tb_frame.f_globals.get("__name__", "")) if at else ""
    shape = isinstance(error, ValueError | TypeError | AttributeError | LookupError | RecursionError)
    if shape and where.split(".")[0] in ("huggingface_hub", "json") and "LFS batch" not in str(error):
        from huggingface_hub.errors import HFValidationError

        return None if isinstance(error, HFValidationError) else "its answer is not what was asked for"
    return hopeless(error)


def explain(error: Exception, name: str) -> Exception:
    """What an error of huggingface_hub means for the user; errors that are not about the Hub are returned unchanged."""
    from huggingface_hub import errors as hub_errors
    from huggingface_hub import get_token

    status = getattr(getattr(error, "response", None), "status_code", None)
    said = printable(getattr(error, "server_message", None) or "")[:MOST_SAID]
    if wrong := _wrong_answer(error):
        return KconvError(f"{name}: the Hub cannot be used, {wrong}", hint="check HF_ENDPOINT and proxies")
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
        return KconvError(f"{name}: {printable(error)}")
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        return EnvironmentLacks(f"{name}: HF_HUB_OFFLINE is set", hint="unset it, or give a local folder")
    if status in (401, 403):
        hint = "no token is set: " + NO_TOKEN if get_token() is None else "the token lacks the permission, or is wrong"
        return KconvError(f"{name}: the Hub refused ({status}): {said or printable(error)}", hint=hint)
    if isinstance(error, hub_errors.HfHubHTTPError):
        return KconvError(f"{name}: the Hub answered {status}: {said or printable(error)}")
    if isinstance(error, ValueError) and str(error).startswith(("LFS batch API returned errors", "Invalid metadata")):
        return KconvError(f"{name}: the Hub refused: {printable(' '.join(str(error).split()))}")
    return error
