"""Notices of a metadata service that is a real server on this machine."""

import json
import threading
import time

import pytest
from ready_python import wait_until
from spot_service import serving

from volseg.errors import ConfigError
from volseg.monitoring.spot_notices import ENDPOINT_VARIABLE, SpotNotices, heeding_spot_notices

NOTICE = {"action": "terminate", "time": "2026-11-22T12:00:00Z"}


@pytest.fixture
def service(monkeypatch):
    with serving() as service:
        monkeypatch.setenv(ENDPOINT_VARIABLE, service.endpoint)
        yield service


def test_nothing_then_a_notice(service):
    asking = SpotNotices()
    assert asking.ask() is None
    service.notice = json.dumps(NOTICE)
    assert asking.ask() == "terminate at 2026-11-22T12:00:00Z"
    assert service.asked == ["/latest/meta-data/spot/instance-action"] * 2
    assert len(service.tokens) == 1


def test_a_token_that_has_run_out_is_asked_for_again(service):
    asking = SpotNotices()
    assert asking.ask() is None
    service.tokens.append("another")
    with pytest.raises(OSError, match="401"):
        asking.ask()
    assert asking.ask() is None


@pytest.mark.parametrize("odd", ["soon", "[]", '{"action": "stop"}', "null"])
def test_a_notice_in_an_unknown_form_is_one(service, odd):
    service.notice = odd
    assert SpotNotices().ask() == repr(odd)


def test_a_proxy_is_not_asked(service, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert SpotNotices().ask() is None


def test_a_service_that_does_not_answer_in_time_is_none(service):
    service.delay = 1.0
    with pytest.raises(OSError, match="timed out"):
        SpotNotices(timeout=0.1).ask()


@pytest.mark.parametrize("address", ["file:///etc/passwd", "http://", "http://[::1", "http://localhost:99999"])
def test_an_endpoint_that_is_no_address_is_refused(address, monkeypatch):
    """A half IPv6 address ended the watching thread with a traceback, and the training went on unwatched."""
    monkeypatch.setenv(ENDPOINT_VARIABLE, address)
    with pytest.raises(ConfigError, match=r"AWS_EC2_METADATA_SERVICE_ENDPOINT is no address .*" + address[:5]):
        SpotNotices()


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
    assert "this machine will be taken away (terminate at 2026-11-22T12:00:00Z)" in caplog.text
    assert not [thread for thread in threading.enumerate() if thread.name == "spot notices"]


def test_without_a_service_the_training_goes_on_and_that_is_said_once(monkeypatch, caplog):
    monkeypatch.setenv(ENDPOINT_VARIABLE, "http://127.0.0.1:1")  # where nobody listens
    with heeding_spot_notices("aws", every_seconds=0.01, stop=pytest.fail):
        wait_until(lambda: "no spot notices" in caplog.text, 60)
        time.sleep(0.3)
    assert caplog.text.count("no spot notices") == 1


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
