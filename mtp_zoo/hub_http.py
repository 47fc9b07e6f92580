"""Requests to the Hub: which failures are tried again and when, and what the others mean to a reader.

Everything goes through huggingface_hub's own client, so its token, endpoint, proxies and offline switch hold. Its httpx is
`huggingface_hub.utils.httpx`, which is httpx 2 since version 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from threading import Event
from typing import NoReturn, TypeVar

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx

from mtp_zoo.errors import HubReadError, SourceNotFoundError

TRIES = 6
"""Failures in a row after which a request is given up; progress starts the count anew."""

FIRST_WAIT = 0.5
"""Seconds before the second try; each further wait is twice as long."""

LONGEST_WAIT = 8.0
LONGEST_ASKED_WAIT = 310.0
"""Seconds: the Hub's rate limits are windows of five minutes, and a server that asks for more is not waited for."""

BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses that say nothing of the thing asked for."""

UNUSABLE = (httpx.HTTPError, OSError, ValueError, LookupError, TypeError, AttributeError)
"""What huggingface_hub raises for a name that can't be one, an answer that is not the Hub's, or a cache it can't write."""

RETRY = "Try again; what has arrived is kept, and a rerun reads only the rest."

Result = TypeVar("Result")


class TryAgain(Exception):
    """One attempt failed and another may not; `wait` is how many seconds the server asks for."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class Patience:
    """Counts the failures in a row of one piece of work, and waits between them.

    Args:
        act: what is being done, as an error shall begin.
        stop: ends a wait early; the caller then gives up.
        tries: failures in a row that are too many.
    """

    def __init__(self, act: str, stop: Event | None = None, *, tries: int | None = None) -> None:
        self._act = act
        self._stop = stop or Event()
        self._tries = tries or TRIES
        self._failures = 0

    def reset(self) -> None:
        """There was progress."""
        self._failures = 0

    def wait(self, error: Exception) -> None:
        """Count a failure and sleep.

        Raises:
            HubReadError: it was one too many, or the server asks for a longer wait than anybody would sit through.
        """
        self._failures += 1
        asked = error.wait if isinstance(error, TryAgain) else None
        if self._failures >= self._tries or (asked or 0.0) > LONGEST_ASKED_WAIT:
            after = f", {self._failures} failures in a row" if self._failures > 1 else ""
            raise HubReadError(f"{self._act}: {_reason(error)}{after}.", remedy=RETRY) from error
        own = min(FIRST_WAIT * 2 ** (self._failures - 1), LONGEST_WAIT)
        self._stop.wait(own if asked is None else asked)


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that a busy server asks for: until its window of requests is over, or `Retry-After`; None where it doesn't say.

    `RateLimit: "api";r=0;t=55` means that no request is left for 55 seconds.
    """
    window = re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)", headers.get("RateLimit", ""))
    if window:
        return float(window[1])
    after = headers.get("Retry-After", "").strip()
    if after.isdigit():
        return float(after)
    try:
        until = parsedate_to_datetime(after)
    except (TypeError, ValueError):
        return None
    zoned = until if until.tzinfo else until.replace(tzinfo=timezone.utc)
    return max((zoned - datetime.now(timezone.utc)).total_seconds(), 0.0)


def patiently(act: str, work: Callable[[], Result], *, source: str, tries: int | None = None) -> Result:
    """`work()`, tried again while the connection or the server fails.

    Args:
        act: what is being done, as an error shall begin.
        work: calls one function of huggingface_hub.
        source: the repository, for errors.
        tries: see `Patience`.

    Raises:
        HubReadError, SourceNotFoundError: see `refuse`.
    """
    patience = Patience(act, tries=tries)
    while True:
        try:
            return work()
        except Exception as error:
            patience.wait(again(error, act, source))


def again(error: Exception, act: str, source: str) -> Exception:
    """The failure, if it may pass.

    Raises:
        HubReadError, SourceNotFoundError: it won't, see `refuse`.
    """
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # huggingface_hub's way of saying that it neither reached the Hub nor has the file
    if isinstance(error, (httpx.RequestError, TryAgain)):
        return error
    if not isinstance(error, HfHubHTTPError) or error.response.status_code not in BUSY:
        refuse(error, act, source)
    return TryAgain(_reason(error), asked_wait(error.response.headers))


def refuse(error: Exception, act: str, source: str) -> NoReturn:
    """Raise what a failure of huggingface_hub means to a reader; other errors, ours included, are raised as they are.

    Raises:
        SourceNotFoundError: there is no such repository or revision, or no access to it.
        HubReadError: anything else that the Hub or the way to it answers.
    """
    login = "Correct it; for a private or gated repository ask for access and run `hf auth login`."
    if isinstance(error, GatedRepoError):
        raise SourceNotFoundError(
            f"{act}: '{source}' is gated, and the token in use has no access.", remedy=login
        ) from error
    if isinstance(error, RepositoryNotFoundError):
        raise SourceNotFoundError(
            f"{act}: no such directory, and no repository '{source}' on the Hub that the token in use may read.",
            remedy=login,
        ) from error
    if isinstance(error, RevisionNotFoundError):
        raise SourceNotFoundError(
            f"{act}: '{source}' has no such revision.", remedy="Name a branch, a tag or a commit that it has."
        ) from error
    if isinstance(error, OfflineModeIsEnabled):
        remedy = "Unset HF_HUB_OFFLINE, or read it once while online; what was read is kept."
        raise HubReadError(f"{act}: huggingface_hub is offline (HF_HUB_OFFLINE).", remedy=remedy) from error
    if isinstance(error, (HfHubHTTPError, LocalEntryNotFoundError)):
        raise HubReadError(f"{act}: {_reason(error)}.", remedy="See what the Hub says of the repository.") from error
    if isinstance(error, UNUSABLE):
        raise HubReadError(
            f"{act}: {type(error).__name__}: {_reason(error)}.",
            remedy="Check the name, HF_ENDPOINT and the disk of HF_HOME: the server must answer as the Hugging Face Hub does.",
        ) from error
    raise error


def _reason(error: Exception) -> str:
    if isinstance(error, HfHubHTTPError):
        return f"the Hub answers {error.response.status_code} ({error.server_message or 'it does not say why'})"
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
