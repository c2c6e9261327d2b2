"""Ask the machine whether its provider will reclaim it, and stop the training in time.

AWS announces the end of a spot instance two minutes ahead, at an address that only the instance reaches (its metadata
service, version 2: it needs a token first). The answer 404 means that there is no notice.

Rebalance recommendations are ignored, as they may come hours ahead or without a following notice.
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
"""Variable with the address of the service, as in the SDKs of AWS."""

ENDPOINT = "http://169.254.169.254"
TOKEN_SECONDS = 300
ANSWER_BYTES = 65536
"""Limit of an answer; real answers are far shorter."""


FAULTS = (OSError, http.client.HTTPException, ValueError)
"""Errors of a service that does not answer, or not as specified; every error of urllib is an OSError."""


def read_endpoint() -> str:
    """Return the address of the metadata service.

    Raises
    ------
    ConfigError
        If ``AWS_EC2_METADATA_SERVICE_ENDPOINT`` is not an address of a web server.
    """
    endpoint = (os.environ.get(ENDPOINT_VARIABLE) or ENDPOINT).rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"{ENDPOINT_VARIABLE} must be an address such as {ENDPOINT}, got {endpoint!r}")
    return endpoint


def ask_for_notice(endpoint: str, *, timeout: float = 1.0) -> str | None:
    """Return the action announced for this machine and its time; None without a notice.

    Parameters
    ----------
    endpoint : str
        Address of the service.
    timeout : float
        Seconds to wait for an answer; the service answers within milliseconds.

    Raises
    ------
    OSError, http.client.HTTPException, ValueError
        If the service does not answer.
    """
    # Without proxies: a proxy would answer for its own machine.
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
    """Return the service's JSON as ``terminate at 2026-11-22T10:00:00Z``; any other answer is a notice too."""
    try:
        said = json.loads(answer)
        return f"{said['action']} at {said['time']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return repr(answer[:200])


@contextmanager
def heeding_spot_notices(
    spot: str, *, every_seconds: float = 5.0, stop: Callable[[], object] = request_stop
) -> Iterator[None]:
    """Watch for notices in a thread while the block runs; a notice stops the training, as SIGTERM does.

    Parameters
    ----------
    spot : str
        ``training.spot`` of the config: ``none`` or ``aws``. One process per machine asks; the others learn of a
        notice when all processes exchange their signals.
    every_seconds : float
        Seconds between two requests.
    stop : callable
        Called at a notice.
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
        watcher.join()  # waits at most for the timeout of a request


def _watch(endpoint: str, ended: threading.Event, every_seconds: float, stop: Callable[[], Any]) -> None:
    is_told = False
    while True:
        try:
            notice = ask_for_notice(endpoint)
        except FAULTS as fault:
            notice = None
            if not is_told:
                logger.warning("cannot read spot notices from %s (%s); the training keeps trying", endpoint, fault)
                is_told = True
        if notice is not None:
            logger.warning("the provider will reclaim this machine (%s): saving the training and stopping", notice)
            stop()
            return
        if ended.wait(every_seconds):
            return
