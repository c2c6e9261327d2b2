"""Spot notices from a real metadata server on this machine."""

import json
import threading
import time

import pytest
from ready_python import wait_until
from spot_service import serving

from volseg.errors import ConfigError
from volseg.monitoring.spot_notices import ENDPOINT_VARIABLE, ask_for_notice, heeding_spot_notices

NOTICE = {"action": "terminate", "time": "2026-11-22T12:00:00Z"}


@pytest.fixture
def service(monkeypatch):
    with serving() as service:
        monkeypatch.setenv(ENDPOINT_VARIABLE, service.endpoint)
        yield service


def test_nothing_then_a_notice_and_no_proxy_is_asked(service, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert ask_for_notice(service.endpoint) is None
    service.notice = json.dumps(NOTICE)
    assert ask_for_notice(service.endpoint) == "terminate at 2026-11-22T12:00:00Z"
    assert service.asked == ["/latest/meta-data/spot/instance-action"] * 2


@pytest.mark.parametrize("odd", ["soon", "[]", '{"action": "stop"}', "null"])
def test_a_notice_in_an_unknown_form_is_one(service, odd):
    service.notice = odd
    assert ask_for_notice(service.endpoint) == repr(odd)


def test_a_service_that_does_not_answer_in_time_is_none(service):
    service.delay = 1.0
    with pytest.raises(OSError, match="timed out"):
        ask_for_notice(service.endpoint, timeout=0.1)


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://[::1"])
def test_without_a_service_the_training_goes_on_and_that_is_said_once(address, monkeypatch, caplog):
    """Half an IPv6 address ended the watching thread with a traceback, and spot notices were missed."""
    monkeypatch.setenv(ENDPOINT_VARIABLE, address)
    with heeding_spot_notices("aws", every_seconds=0.01, stop=pytest.fail):
        wait_until(lambda: "cannot read spot notices" in caplog.text, 60)
        time.sleep(0.1)
    assert caplog.text.count("cannot read spot notices") == 1


def test_an_endpoint_that_is_no_web_server_is_refused(monkeypatch):
    monkeypatch.setenv(ENDPOINT_VARIABLE, "file:///etc/passwd")
    with pytest.raises(ConfigError, match=r"AWS_EC2_METADATA_SERVICE_ENDPOINT must be an address .*file:"):
        heeding_spot_notices("aws").__enter__()


def test_a_notice_stops_once_and_the_thread_ends(service, caplog):
    stopped = threading.Event()
    calls = []
    with heeding_spot_notices("aws", every_seconds=0.02, stop=lambda: (calls.append(1), stopped.set())):
        wait_until(lambda: len(service.asked) > 2, 60)
        assert not calls
        service.notice = json.dumps(NOTICE)
        assert stopped.wait(60)
        time.sleep(0.1)
    assert len(calls) == 1
    assert "the provider will reclaim this machine (terminate at 2026-11-22T12:00:00Z)" in caplog.text
    assert not [thread for thread in threading.enumerate() if thread.name == "spot notices"]


def test_nobody_is_asked_unless_the_config_says_so_and_one_process_of_a_machine_asks(service, monkeypatch):
    with heeding_spot_notices("none", every_seconds=0.01):
        time.sleep(0.05)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with heeding_spot_notices("aws", every_seconds=0.01):
        time.sleep(0.05)
    assert not service.asked
    monkeypatch.setenv("LOCAL_RANK", "0")
    with heeding_spot_notices("aws", every_seconds=0.01):
        wait_until(lambda: service.asked, 60)
