"""The code that README.md shows, so that it can be run as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
SHOWN_URL = "http://127.0.0.1:8000"


def code_block(language: str, url: str) -> str:
    """Return the one block of this language, with the server's real address."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1 and SHOWN_URL in blocks[0], f"README.md should show one {language} block"
    block: str = blocks[0]
    return block.replace(SHOWN_URL, url)


def code_blocks(readme: Path, language: str, url: str) -> dict[str, str]:
    """Return a document's blocks of this language by their heading, with the server's real address."""
    blocks: dict[str, str] = {}
    for section in re.split(r"^## ", readme.read_text(), flags=re.MULTILINE)[1:]:
        found = re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        for block in found:
            assert SHOWN_URL in block
            blocks[section.partition("\n")[0]] = block.replace(SHOWN_URL, url)
    return blocks


def curl_session(url: str) -> tuple[list[str], str]:
    """Return the curl command's words, with the server's real address, and the answer that is shown."""
    found = re.search(r"^```\n\$ (curl .*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert found and SHOWN_URL in found[1], "README.md should show a curl command"
    lines = found[1].splitlines()
    for count in range(1, len(lines)):
        try:
            words = shlex.split("\n".join(lines[:count]).replace(SHOWN_URL, url))
        except ValueError:
            continue  # a quote is still open
        return words, "".join(lines[count:])
    raise AssertionError("the curl command does not end")
