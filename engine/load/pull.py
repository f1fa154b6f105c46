"""Bring one file here: resumable, checked against its digest, in place only when whole.

Knows URLs, digests and archives; nothing of models. Blocking: callers are on their way to start, not serving.
"""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import filelock
import httpx

from ..errors import ModelError

SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"
CHUNK_BYTES = 1 << 20
ATTEMPTS = 5
TIMEOUT = httpx.Timeout(30.0)
"""Per read, not per file: a stalled connection is given up and resumed."""

Progress = Callable[[str, int, int], None]
"""Called with (label, bytes done, bytes in all)."""


def quiet(label: str, done_bytes: int, total_bytes: int) -> None:
    """Report nothing."""


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Hold the lock that all processes which produce `target` share."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(target.with_name(target.name + ".lock")):
        yield


def find_wheel(index_url: str, package: str, filename: str) -> str:
    """Return the URL of a package's file from a simple index (PEP 691 JSON or PEP 503 HTML).

    Raises:
        ModelError: the index cannot be reached, or does not have the file.
    """
    page = f"{index_url.rstrip('/')}/{package}/"
    try:
        answer = httpx.get(
            page,
            headers={"Accept": f"{SIMPLE_JSON}, text/html;q=0.1"},
            follow_redirects=True,
            timeout=TIMEOUT,
        )
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as err:
        raise ModelError(f"cannot ask the package index for {package}: {_reason(err)}") from err
    if answer.headers.get("content-type", "").startswith(SIMPLE_JSON):
        links: dict[str, str] = {file["filename"]: file["url"] for file in answer.json()["files"]}
    else:
        links = _links(answer.text)
    if filename not in links:
        raise ModelError(f"the package index has no file {filename} (it has: {', '.join(links) or 'none'})")
    return urljoin(str(answer.url), links[filename].partition("#")[0])


def download(
    url: str,
    target: Path,
    *,
    sha256: str,
    progress: Progress = quiet,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Download `url` to `target`, going on from an earlier attempt's `.part` file where the server can.

    Raises:
        ModelError: no connection, an HTTP error, or the bytes' digest is not `sha256` (they are removed).
    """
    part = target.with_name(target.name + ".part")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _append(url, part, target.name, progress)
            break
        except httpx.TransportError as err:
            if attempt == ATTEMPTS:
                raise ModelError(
                    f"cannot download {target.name}: {_reason(err)}; run again to resume"
                ) from err
            sleep(0.5 * 2**attempt)
        except httpx.HTTPError as err:
            raise ModelError(f"cannot download {target.name}: {_reason(err)}") from err
    found = file_sha256(part)
    if found != sha256:
        _discard(part)
        raise ModelError(
            f"the download of {target.name} is corrupt and was removed: sha256 {found}, expected {sha256}"
        )
    os.replace(part, target)
    _validator(part).unlink(missing_ok=True)


def extract(archive: Path, member: str, target: Path, *, sha256: str, progress: Progress = quiet) -> None:
    """Extract one file of a zip archive to `target`, atomically.

    Raises:
        ModelError: the archive lacks the member or cannot be read, or the member's digest is not `sha256`.
    """
    partial = target.with_name(target.name + ".tmp")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as files, files.open(member) as source, partial.open("wb") as sink:
            total, done = files.getinfo(member).file_size, 0
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
                done += len(chunk)
                progress(target.name, done, total)
            sink.flush()
            os.fsync(sink.fileno())
        if digest.hexdigest() != sha256:
            raise ModelError(f"{member} in {archive.name} has sha256 {digest.hexdigest()}, expected {sha256}")
        os.replace(partial, target)
    except (KeyError, zipfile.BadZipFile) as err:
        raise ModelError(f"cannot extract {member} from {archive.name}: {err}") from err
    finally:
        partial.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    """Return a file's sha256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _append(url: str, part: Path, label: str, progress: Progress) -> None:
    """Add to `part` what it lacks of `url`; start over if the server cannot resume or the file changed."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if _validator(part).exists():
            headers["If-Range"] = _validator(part).read_text()
    with httpx.stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT) as answer:
        if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is missing: the digest decides whether what is here is right
        answer.raise_for_status()
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            have = 0
        if validator := answer.headers.get("etag", answer.headers.get("last-modified")):
            _validator(part).write_text(validator)
        total = have + int(answer.headers.get("content-length", 0))
        with part.open("ab" if have else "wb") as sink:
            for chunk in answer.iter_raw():  # as it comes: a broken connection loses no byte
                sink.write(chunk)
                have += len(chunk)
                progress(label, have, total)


def _validator(part: Path) -> Path:
    """Where the entity tag lies that makes a resumed range safe."""
    return part.with_name(part.name + ".etag")


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _validator(part).unlink(missing_ok=True)


def _reason(err: Exception) -> str:
    if isinstance(err, httpx.HTTPStatusError):
        return f"the server answered {err.response.status_code} {err.response.reason_phrase}"
    return f"{err or type(err).__name__}"


def _links(page: str) -> dict[str, str]:
    """The files that a PEP 503 page links to: name -> href."""
    found: dict[str, str] = {}

    class Anchors(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            href = dict(attrs).get("href") if tag == "a" else None
            if href:
                found[href.partition("#")[0].rpartition("/")[2]] = href

    Anchors().feed(page)
    return found
