"""The vocabulary and the chat templates of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from ..errors import ModelError
from .fields import Fields
from .record import VocabRecord

_object = msgspec.json.Decoder(dict[str, Any])


def read_json(path: Path) -> Fields:
    """Read a JSON object; a file that is not there is an empty one.

    Raises:
        ModelError: the file is not a JSON object.
    """
    try:
        return Fields(str(path), _object.decode(path.read_bytes()))
    except FileNotFoundError:
        return Fields(str(path), {})
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise ModelError(f"{path}: not a JSON object: {err}") from err
    except OSError as err:
        raise ModelError(f"{path}: cannot be read: {err.strerror}") from err


def vocab_from_folder(folder: Path, config: Fields) -> VocabRecord:
    """Read tokenizer.json, and the special ids from every file that states one.

    Raises:
        ModelError: there is no tokenizer.json, or a file is not what it should be.
    """
    path = folder / "tokenizer.json"
    try:
        content = path.read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
    except FileNotFoundError as err:
        raise ModelError(
            f"{folder}: no tokenizer.json (a tokenizer.model alone is not supported; convert it with "
            "transformers' AutoTokenizer(...).save_pretrained)"
        ) from err
    except Exception as err:  # the package raises plain Exception for whatever it dislikes
        raise ModelError(f"{path}: the tokenizer cannot be built: {err}") from err
    settings = read_json(folder / "tokenizer_config.json")
    generation = read_json(folder / "generation_config.json")
    bos = _named(settings, "bos_token", tokenizer)
    if bos is None:
        bos = next(iter(config.token_ids("bos_token_id")), None)
    eos = _named(settings, "eos_token", tokenizer)
    ends = generation.token_ids("eos_token_id") + config.token_ids("eos_token_id")
    ends += () if eos is None else (eos,)
    prefixed, suffixed = _wraps(tokenizer, bos, ends)
    return VocabRecord(
        tokenizer_json=content,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        pad_token_id=_named(settings, "pad_token", tokenizer),
        add_bos=bos is not None and settings.flag("add_bos_token", prefixed),
        add_eos=bool(ends) and settings.flag("add_eos_token", suffixed),
        special_ids=tuple(
            sorted(number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        ),
    )


def templates_from_folder(folder: Path) -> dict[str, str]:
    """Return the chat templates by name: of chat_template.jinja, additional_chat_templates/ and
    tokenizer_config.json, the files before the field.

    Raises:
        ModelError: a template is not text.
    """
    settings = read_json(folder / "tokenizer_config.json")
    templates: dict[str, str] = {}
    value = settings.raw("chat_template")
    if isinstance(value, list):
        for number, entry in enumerate(value):
            named = Fields(settings.file, entry if isinstance(entry, dict) else {}, "")
            if not (named.has("name") and named.has("template")):
                settings.refuse("chat_template", f"entry {number} must have a name and a template")
            templates[named.text("name")] = named.text("template")
    elif value is not None:
        templates["default"] = settings.text("chat_template")
    try:
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[extra.stem] = extra.read_text("utf-8")
        main = folder / "chat_template.jinja"
        if main.exists():
            templates["default"] = main.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ModelError(f"{folder}: a chat template cannot be read: {err}") from err
    return templates


def _named(settings: Fields, name: str, tokenizer: Tokenizer) -> int | None:
    """The id of a token given as text or, in older files, as an object with its content."""
    value = settings.raw(name)
    if isinstance(value, dict):
        value = value.get("content")
    return tokenizer.token_to_id(value) if isinstance(value, str) else None


def _wraps(tokenizer: Tokenizer, bos: int | None, ends: tuple[int, ...]) -> tuple[bool, bool]:
    """Whether the file's post-processor puts bos before a text and an end after it."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    wrapped = tokenizer.encode("a", add_special_tokens=True).ids
    if len(wrapped) == len(plain):
        return False, False
    return wrapped[0] == bos, wrapped[-1] in ends
