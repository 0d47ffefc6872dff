"""The live page: new figures while a run goes on, for who knows the key and nobody else."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from realrl.errors import UsageError
from realrl.report import live
from realrl.report.live import Figures, open_server
from tests.report.folders import sample, steps, write_lines, write_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "a", steps(3, reward__mean=float), [sample(1)])


@pytest.fixture
def server(folder):
    found, address = open_server([str(folder)], 0)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found, address
    found.shutdown()
    thread.join()
    found.server_close()


def ask(server, path, *, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server[0].server_port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def path_of(server):
    return "/" + server[1].split("/", 3)[3]


def test_the_page_and_newer_figures(server, folder, monkeypatch):
    monkeypatch.setattr(live, "_MOST_SHARE", 1e9)  # no pause between two readings
    status, headers, page = ask(server, path_of(server))
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])["live"]
    status, headers, text = ask(server, path_of(server) + "data.json")
    assert status == 200
    assert headers["Cache-Control"] == "no-store"
    assert json.loads(text)["runs"][0]["done"] == 3
    write_lines(folder / "metrics.jsonl", steps(5, reward__mean=float))
    assert json.loads(ask(server, path_of(server) + "data.json")[2])["runs"][0]["done"] == 5


def test_strangers_learn_nothing(server):
    path = path_of(server)
    port = server[0].server_port
    assert server[0].server_address[0] == "127.0.0.1"
    assert ask(server, "/")[0] == 404
    assert ask(server, "/x" + path[1:])[0] == 404
    assert ask(server, path + "../../etc/passwd")[0] == 404
    assert ask(server, path, Host="evil.example")[0] == 403
    assert ask(server, path, Host=f"evil.example:{port}")[0] == 403
    assert ask(server, path, Host=f"localhost:{port}")[0] == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, path, method=method)[0] == 501
    status, _, body = ask(server, path, method="HEAD")
    assert (status, body) == (200, "")
    for _, _, body in (ask(server, "/"), ask(server, path, Host="evil.example")):
        assert "reward" not in body


def test_figures_are_not_read_again_too_often(folder, monkeypatch):
    read = []
    real = live.read_run
    monkeypatch.setattr(live, "read_run", lambda path: read.append(path) or real(path))
    monkeypatch.setattr(live, "_MOST_SHARE", 1e-9)
    figures = Figures([str(folder)])
    first = figures.text()
    write_lines(folder / "metrics.jsonl", steps(9, x=1.0))
    assert figures.text() == first
    assert len(read) == 1
    monkeypatch.setattr(live, "_MOST_SHARE", 1e9)
    figures = Figures([str(folder)])
    assert figures.text() == figures.text()
    assert len(read) == 2, "nothing has changed"


def test_a_run_that_is_removed_is_told(server, folder):
    folder.rename(folder.with_name("b"))
    status, _, body = ask(server, path_of(server) + "data.json")
    assert status == 503
    assert "is no run folder" in body


def test_a_port_that_is_taken(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="cannot be had: Address already in use"):
            open_server([str(folder)], taken.getsockname()[1])


def test_ctrl_c_ends_it(folder):
    command = [sys.executable, "-m", "realrl", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().strip()
        port = int(re.match(r"http://127\.0\.0\.1:(\d+)/[\w-]{20,}/$", address)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/" + address.split("/", 3)[3])
        assert connection.getresponse().status == 200
        connection.close()
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
