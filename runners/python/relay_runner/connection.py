"""Address and key of a broker."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Connection:
    url: str
    api_key: str = field(repr=False)


def connection_file(directory: str | os.PathLike[str] = ".") -> Path:
    """Place of the file that a broker writes: `AGENT_RELAY_STATE_DIR`, else below the directory."""
    state_dir = os.environ.get("AGENT_RELAY_STATE_DIR")
    folder = Path(state_dir) if state_dir else Path(directory) / ".agentworkforce" / "relay"
    return folder / "connection.json"


def read_connection(file: str | os.PathLike[str] | None = None) -> Connection:
    """Reads a broker's connection file."""
    path = Path(file) if file else connection_file()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileNotFoundError(f"no broker runs: {path} cannot be read") from error
    found = json.loads(text)
    url, api_key = found.get("url"), found.get("api_key")
    if not isinstance(url, str) or not isinstance(api_key, str):
        raise ValueError(f"{path} is not a connection file: url and api_key are needed")
    return Connection(url, api_key)
