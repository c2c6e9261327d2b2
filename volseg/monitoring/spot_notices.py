"""Ask the machine whether it will be taken away, and stop the training in time.

A spot instance of AWS is told two minutes ahead, by an address that only the instance reaches (its metadata service,
version 2: a token first, then the question). 404 is the answer of a machine that may stay.

Not asked for is the recommendation to rebalance, which may come hours ahead or for nothing.
"""

import http.client
import json
import logging
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from volseg.errors import ConfigError
from volseg.parallel.devices import read_local_rank
from volseg.workflow.checks import request_stop

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Where the SDKs of AWS look for the service too."""

ENDPOINT = "http://169.254.169.254"
TOKEN_SECONDS = 21600
ANSWER_BYTES = 65536
"""More than any answer has."""


FAULTS = (OSError, http.client.HTTPException, ValueError)
"""Of a service that gives no answer, or one that is none; every error of urllib is an OSError."""


class SpotNotices:
    """The metadata service of an instance of AWS.

    Parameters
    ----------
    endpoint : str, optional
        Of the service; what ``AWS_EC2_METADATA_SERVICE_ENDPOINT`` says, or the address that every instance knows.
    timeout : float
        Seconds to wait for an answer, which takes milliseconds where there is a service.

    Raises
    ------
    ConfigError
        If the endpoint is no address of a web server.
    """

    def __init__(self, endpoint: str | None = None, *, timeout: float = 1.0) -> None:
        self.endpoint = (endpoint or os.environ.get(ENDPOINT_VARIABLE) or ENDPOINT).rstrip("/")
        if not _is_web_address(self.endpoint):
            raise ConfigError(f"{ENDPOINT_VARIABLE} is no address such as {ENDPOINT}, got {self.endpoint!r}")
        self.timeout = timeout
        self._token: str | None = None
        # A proxy would be asked about itself.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self) -> str | None:
        """Return the action announced for this machine and its time; None without a notice.

        Raises
        ------
        OSError, http.client.HTTPException, ValueError
            If the service does not answer.
        """
        if self._token is None:
            self._token = self._call("PUT", "api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)})
        try:
            answer = self._call("GET", "meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token})
        except urllib.error.HTTPError as refusal:
            if refusal.code == http.client.NOT_FOUND:
                return None
            self._token = None  # it may have run out: the next time asks for a new one
            raise
        return _describe(answer)

    def _call(self, method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(f"{self.endpoint}/latest/{path}", method=method, headers=headers)  # noqa: S310 (http only: looked at above)
        with self._opener.open(request, timeout=self.timeout) as answer:
            return answer.read(ANSWER_BYTES).decode("utf-8", "replace")


def _is_web_address(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, a port that is none
        return False


def _describe(answer: str) -> str:
    """Return ``terminate at 2026-11-22T10:00:00Z`` of the service's JSON; whatever else it is, it is a notice."""
    try:
        said = json.loads(answer)
        return f"{said['action']} at {said['time']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return repr(answer[:200])


@contextmanager
def heeding_spot_notices(
    spot: str, *, every_seconds: float = 5.0, stop: Callable[[], object] = request_stop
) -> Iterator[None]:
    """Watch for notices in a thread while the block runs; stop it when one comes, as SIGTERM would.

    Parameters
    ----------
    spot : str
        ``training.spot`` of the config: ``none`` or ``aws``. Of a machine's processes one asks; it tells the others
        when all of them look at their signals.
    every_seconds : float
        Between two questions.
    stop : callable
        What to do at a notice.
    """
    if spot == "none" or read_local_rank() != 0:
        yield
        return
    service, ended = SpotNotices(), threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(service, ended, every_seconds, stop), name="spot notices", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()  # no longer than an answer may take


def _watch(service: SpotNotices, ended: threading.Event, every_seconds: float, stop: Callable[[], Any]) -> None:
    is_told = False
    while True:
        try:
            notice = service.ask()
        except FAULTS as fault:
            notice = None
            if not is_told:
                logger.warning("no spot notices of %s: %s; the training asks again", service.endpoint, fault)
                is_told = True
        if notice is not None:
            logger.warning("this machine will be taken away (%s): saving, and out", notice)
            stop()
            return
        if ended.wait(every_seconds):
            return
