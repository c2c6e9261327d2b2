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
TOKEN_SECONDS = 300
ANSWER_BYTES = 65536
"""More than any answer has."""


FAULTS = (OSError, http.client.HTTPException, ValueError)
"""Of a service that gives no answer, or one that is none; every error of urllib is an OSError."""


def read_endpoint() -> str:
    """Return the address of the metadata service.

    Raises
    ------
    ConfigError
        If ``AWS_EC2_METADATA_SERVICE_ENDPOINT`` is not an address of a web server.
    """
    endpoint = (os.environ.get(ENDPOINT_VARIABLE) or ENDPOINT).rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"{ENDPOINT_VARIABLE} is not an address such as {ENDPOINT}, got {endpoint!r}")
    return endpoint


def ask_for_notice(endpoint: str, *, timeout: float = 1.0) -> str | None:
    """Return the action announced for this machine and its time; None without a notice.

    Parameters
    ----------
    endpoint : str
        Address of the service.
    timeout : float
        Seconds to wait for an answer, which takes milliseconds where there is a service.

    Raises
    ------
    OSError, http.client.HTTPException, ValueError
        If the service does not answer.
    """
    # A proxy would answer for its own machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def call(method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(f"{endpoint}/latest/{path}", method=method, headers=headers)  # noqa: S310 (http or https: see read_endpoint)
        with opener.open(request, timeout=timeout) as answer:
            return answer.read(ANSWER_BYTES).decode("utf-8", "replace")

    token = call("PUT", "api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)})
    try:
        return _describe(call("GET", "meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))
    except urllib.error.HTTPError as refusal:
        if refusal.code == http.client.NOT_FOUND:
            return None
        raise


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
    endpoint, ended = read_endpoint(), threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(endpoint, ended, every_seconds, stop), name="spot notices", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()  # no longer than an answer may take


def _watch(endpoint: str, ended: threading.Event, every_seconds: float, stop: Callable[[], Any]) -> None:
    is_told = False
    while True:
        try:
            notice = ask_for_notice(endpoint)
        except FAULTS as fault:
            notice = None
            if not is_told:
                logger.warning("no spot notices of %s: %s; the training asks again", endpoint, fault)
                is_told = True
        if notice is not None:
            logger.warning("this machine will be taken away (%s): saving, and out", notice)
            stop()
            return
        if ended.wait(every_seconds):
            return
