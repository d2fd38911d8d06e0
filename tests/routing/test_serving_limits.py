"""The server against slow, silent, rude and numerous clients, and at its end."""

import asyncio
import json
import logging
import math
import socket
import threading
import time

import httpx
import pytest
import torch

from merganser.errors import InputError
from merganser.routing import AdaptiveModel, Limits, create_app, create_server, listening
from merganser.routing.listening import Connections
from support.expert_nets import WIDTH, heads_of, small_library
from support.servers import Running

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

TASKS = ("a", "b")
BODY = json.dumps({"inputs": torch.zeros(1, 2, WIDTH).tolist()}).encode()
HEADERS = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(BODY)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    base, library = small_library(tmp_path_factory.mktemp("limits"), TASKS)
    return AdaptiveModel(base, library, heads_of(TASKS), layer="blocks.1.up")


@pytest.fixture
def errors():
    """What the loggers of the server say from warnings up."""
    found = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = found.append
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio", "merganser.serve")]
    for logger in loggers:
        logger.addHandler(handler)
    yield found
    for logger in loggers:
        logger.removeHandler(handler)


def asked(running):
    """Whether a newcomer is answered at once, in health and in work."""
    began = time.monotonic()
    with httpx.Client(base_url=running.url, timeout=5) as client:
        health, found = client.get("/healthz"), client.post("/predict", content=BODY)
    assert (health.status_code, found.status_code) == (200, 200), (health.text, found.text)
    return time.monotonic() - began


def ended(connection, within=5.0):
    """Whether the other side has closed."""
    connection.settimeout(within)
    try:
        while connection.recv(4096):
            pass
    except (ConnectionResetError, BrokenPipeError):
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /predict HTTP/1.1\r\nhost: x\r\n", HEADERS + b"\r\n" + BODY[:5]],
    ids=["silent", "headers", "bodies"],
)
def test_half_open_requests_starve_nobody(model, errors, sent):
    limits = Limits(connections=32, header_seconds=60, timeout=60)
    with Running(create_app(model, limits=limits), limits) as running:
        opened = [running.connect(sent) for _ in range(150)]
        assert asked(running) < 5
        assert sum(ended(connection, 0.001) for connection in opened) >= 150 - 32
        for connection in opened:
            connection.close()
        assert asked(running) < 5
    assert not [record for record in errors if record.exc_info]


def test_headers_and_bodies_have_a_deadline(model):
    limits = Limits(header_seconds=0.3, timeout=0.5)
    with Running(create_app(model, limits=limits), limits) as running:
        silent, slow = running.connect(), running.connect(b"GET /healthz HT")
        for _ in range(20):  # a byte now and then is not enough
            time.sleep(0.05)
            try:
                slow.sendall(b"T")
            except OSError:
                break
        assert ended(silent, 2)
        assert ended(slow, 2)
        body = running.connect(HEADERS + b"\r\n" + BODY[:5])
        body.settimeout(5)
        assert b" 408 " in body.recv(4096)
        for _ in range(30):  # nor is the rest of a body that was refused
            time.sleep(0.05)
            try:
                body.sendall(b" ")
            except OSError:
                break
        assert ended(body, 2)
        kept = running.connect(HEADERS + b"\r\n" + BODY)
        kept.settimeout(5)
        assert b" 200 " in kept.recv(65536)
        kept.sendall(b"GET /heal")  # the deadline holds for the second request too
        assert ended(kept, 2)


def test_clients_that_go_away_leave_no_traceback(model, errors):
    limits = Limits()
    with Running(create_app(model, limits=limits), limits) as running:
        for index in range(51):
            connection = running.connect(HEADERS + b"\r\n" + (BODY if index % 3 == 0 else BODY[:5]))
            if index % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # with a reset
            connection.close()
        assert asked(running) < 5
        metrics = httpx.get(f"{running.url}/metrics").text
    assert 'merganser_requests_total{path="/predict",status="499"}' in metrics
    assert errors == []


def test_an_answer_that_is_no_number_is_an_error(model):
    def head(z):
        return torch.where(z.sum(1, keepdim=True) > 0, torch.nan, 1.0) * torch.ones(len(z), 2)

    bare = AdaptiveModel(model.module, model.library, layer="blocks.1.up", features=lambda y, inputs: y * torch.nan)
    x = torch.zeros(1, 2, WIDTH)
    for served in (model.with_heads(dict.fromkeys(TASKS, head)), bare):
        with Running(create_app(served)) as running:
            answers = [
                httpx.post(f"{running.url}/predict", json={"inputs": (x + shift).tolist()}) for shift in (40, -40)
            ]
        statuses = [answer.status_code for answer in answers]
        assert 500 in statuses, [answer.text for answer in answers]
        wrong = answers[statuses.index(500)]
        assert "not a number (NaN)" in wrong.json()["error"]


def test_a_token_is_asked_for(model):
    with Running(create_app(model, token="s3cret")) as running, httpx.Client(base_url=running.url) as client:
        for path in ("/predict", "/route"):
            refused = client.post(path, content=BODY)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert "token" in refused.json()["error"]
            for wrong in ("Bearer s3cre", "Basic s3cret", "s3cret", "Bearer \u00e9".encode("latin-1")):
                assert client.post(path, content=BODY, headers={"authorization": wrong}).status_code == 401
            right = {"authorization": "Bearer s3cret"}
            assert client.post(path, content=BODY, headers=right).status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers=right).status_code == 200
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/healthz", headers=right).json()["experts"] == list(TASKS)
        assert client.get("/docs").status_code == client.get("/openapi.json").status_code == 404
    for wrong in ("", "two words", "naïve"):
        with pytest.raises(InputError, match="token"):
            create_app(model, token=wrong)


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_the_end_answers_those_who_wait_to_be_accepted(model, errors, turns):
    limits = Limits()
    running = Running(create_app(model, limits=limits), limits)
    end, waiting = threading.Event(), []

    async def end_with_a_queue(counter):
        if not end.is_set():
            return False
        waiting.extend(running.connect(HEADERS + b"\r\n" + BODY) for _ in range(5))  # while the loop stands still
        for _ in range(turns):
            await asyncio.sleep(0)
        return True

    running.server.on_tick = end_with_a_queue
    with running:
        end.set()
        running.thread.join(30)
        for connection in waiting:
            connection.settimeout(5)
            assert b" 200 " in connection.recv(65536)
            assert ended(connection)
    assert len(waiting) == 5
    assert errors == []


@pytest.mark.parametrize("kept_alive", [False, True])
def test_the_end_resets_nobody(model, errors, kept_alive, monkeypatch):
    monkeypatch.setattr(listening, "LINGER", 10.0)  # a busy machine may stop a client for more than a second
    limits = Limits()
    running = Running(create_app(model, limits=limits), limits).__enter__()
    broken, answered, stop = [], [], threading.Event()

    def hammer():
        headers = {} if kept_alive else {"connection": "close"}
        client = httpx.Client(base_url=running.url, timeout=10, headers=headers, verify=False)
        for _ in range(2000):
            if stop.is_set():
                break
            try:
                answered.append(client.post("/predict", content=BODY).status_code)
            except httpx.ConnectError:
                break  # nobody listens any more, which is said at once
            except httpx.TransportError as error:
                broken.append(error)
                break

    threads = [threading.Thread(target=hammer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        if len(answered) > 40:
            break
        time.sleep(0.05)
    late = running.connect()
    running.server.should_exit = True
    time.sleep(0.15)
    late.sendall(HEADERS + b"\r\n" + BODY)  # connected before the end, heard after it began
    late.settimeout(5)
    found = late.recv(65536)
    running.stop()
    stop.set()
    for thread in threads:
        thread.join(20)
    assert b" 200 " in found
    assert b"connection: close" in found.lower() or ended(late)
    assert broken == []
    assert set(answered) == {200}
    assert [record for record in errors if record.exc_info] == []


def test_the_oldest_that_is_waited_for_makes_room():
    class Connection:
        def __init__(self, state):
            self.state, self.transport, self.closed = state, self, False

        def is_waiting(self):
            return self.state == "waiting"

        def is_receiving(self):
            return self.state == "receiving"

        def abort(self):
            self.closed = True

    connections = Connections(3)
    busy, receiving, waiting, newcomer, last = map(Connection, ("busy", "receiving", "waiting", "busy", "busy"))
    for each in (busy, receiving, waiting, newcomer):
        connections.add(each)
    assert (waiting.closed, receiving.closed, len(connections)) == (True, False, 3)
    connections.add(last)
    assert (receiving.closed, busy.closed, newcomer.closed) == (True, False, False)
    another = Connection("waiting")
    connections.add(another)
    assert another.closed, "who is answered is not sent away"


def test_limits_are_checked(model):
    for bad in ({"connections": 0}, {"header_seconds": 0.0}, {"timeout": math.inf}, {"wait": math.nan}):
        with pytest.raises(InputError):
            Limits(**bad)
    assert create_server(create_app(model)).config.ws == "none"
