"""Nobody but the page speaks to the studio, and the page sees nothing but the folder."""

from __future__ import annotations

import os

import pytest

from merganser.errors import CheckpointError
from merganser.studio.roots import Outside, Roots


@pytest.mark.parametrize("given", ["", "Bearer wrong", "Bearer ", "Basic secret-of-the-tests", "secret-of-the-tests"])
@pytest.mark.parametrize("path", ["/api/home", "/api/jobs", "/api/checkpoint?path=base", "/api/nothing"])
def test_the_api_needs_the_token(client, path, given):
    found = client.get(path, headers={"authorization": given})
    assert found.status_code == 401
    assert "token is missing or wrong" in found.json()["error"]


def test_the_page_itself_is_no_secret(client):
    found = client.get("/", headers={"authorization": ""})
    assert found.status_code == 200
    assert "script-src 'self'" in found.headers["content-security-policy"]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:8765"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/home"])
def test_other_pages_are_refused_even_with_the_token(client, path, headers):
    assert client.get(path, headers=headers).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:9000", "[::1]:8765", "localhost"])
def test_this_machine_by_any_name_and_port_is_let_in(client, host):
    headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert client.get("/api/home", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "path", ["../secret", "/etc", "base/../../secret", "/etc/passwd", "~", "link", "linked/x.safetensors"]
)
def test_paths_outside_are_refused(client, folder, path):
    secret = folder.parent / "secret"
    secret.mkdir()
    (secret / "x.safetensors").write_bytes(b"")
    os.symlink(secret / "x.safetensors", folder / "link")
    os.symlink(secret, folder / "linked")
    for request in (
        client.get("/api/checkpoint", params={"path": path}),
        client.get("/api/recipe", params={"path": path}),
        client.get("/api/library", params={"path": path}),
        client.get("/api/study", params={"path": path}),
        client.post("/api/recipe/save", json={"path": f"{path}/r.yml", "text": "x"}),
        client.post("/api/jobs", json={"kind": "check", "values": {"path": path}}),
        client.post(
            "/api/jobs", json={"kind": "merge", "values": {"text": "method: linear\nmodels: [math]\n", "out": path}}
        ),
    ):
        assert request.status_code == 403, request.text
        assert "outside of" in request.json()["error"]
    assert client.get("/api/jobs").json() == []


def test_a_recipe_cannot_name_a_model_outside(client, folder):
    (folder / "base").rename(folder.parent / "moved")
    text = f"method: linear\nmodels: [math, {folder.parent / 'moved'}]\n"
    found = client.post("/api/recipe", json={"text": text}).json()
    assert "outside of" in found["problems"][0]["message"]
    values = {"text": text, "out": "merged"}
    assert client.post("/api/jobs", json={"kind": "merge", "values": values}).status_code == 403
    inner = folder.parent / "inner.yml"
    inner.write_text(f"method: linear\nmodels: [{folder / 'math'}]\n")
    nested = f"method: linear\nmodels: [math, {{recipe: {inner}}}]\n"
    assert "outside of" in client.post("/api/recipe", json={"text": nested}).json()["problems"][0]["message"]


def test_a_link_into_the_folder_is_no_way_out_of_it(folder):
    os.symlink(folder / "base", folder / "again")
    roots = Roots([folder])
    assert roots.find("again") == (folder / "base").resolve()
    assert roots.find(str(folder)) == folder.resolve()
    with pytest.raises(Outside):
        roots.find(str(folder.parent))


def test_several_roots(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    roots = Roots([folder, other])
    assert roots.find(str(other / "new")) == other.resolve() / "new"
    assert roots.show(other / "new") == str(other / "new")


def test_a_checkpoint_is_opened_again_once_its_files_change(folder):
    roots = Roots([folder])
    first = roots.open("base")
    assert roots.open("base") is first
    weights = folder / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    second = roots.open("base")
    assert second is not first
    assert roots.open("base") is second
    (folder / "base" / "more.json").write_text("{}")
    assert roots.open("base") is not second


def test_a_link_that_turns_outside_is_refused(folder, tmp_path):
    roots = Roots([folder])
    weights = folder / "base" / "model.safetensors"
    roots.open("base")
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises((Outside, CheckpointError)):
        roots.open("base")


def test_the_static_files_are_a_closed_list(client):
    for path in ("/../gate.py", "/..%2fgate.py", "/static/studio.js", "/nothing"):
        assert client.get(path).status_code in (403, 404), path
    for name in ("index.html", "studio.js", "studio.css", "icon.svg"):
        assert client.get(f"/{name}").status_code == 200
