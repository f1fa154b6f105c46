"""What the command line takes from its surroundings: the cache folder and the package index.

The only reader of environment variables besides `server.config`; paths only, never behaviour.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# pip's own answer, after its environment, configuration files and default.
ASK_PIP = (
    "from pip._internal.commands import create_command;"
    "print(create_command('download').parse_args([])[0].index_url)"
)


def home() -> Path:
    """Return the folder of what Artesian keeps: ARTESIAN_HOME, else one in the user's cache folder."""
    if chosen := os.environ.get("ARTESIAN_HOME"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "artesian"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "artesian"


def models_dir() -> Path:
    """Return the default folder of downloaded models."""
    return home() / "models"


def prompts_dir() -> Path:
    """Return the default folder of the disk cache."""
    return home() / "prompts"


def index_url() -> str:
    """Return the base URL of the package index that this interpreter's pip is configured for.

    Raises:
        OSError: there is no pip to ask.
    """
    asked = subprocess.run([sys.executable, "-P", "-c", ASK_PIP], capture_output=True, text=True, timeout=60)
    if asked.returncode:
        raise OSError("no pip in this environment to ask for the package index: name one with --index-url")
    return asked.stdout.strip()
