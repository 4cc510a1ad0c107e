"""What the controller of an observed run tells its ranks, through one environment variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

ENV = "ACCUMLINT_VERIFY"
REFERENCES = ("auto", "exact", "sketch", "off")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run is observed.

    `token` marks every process of the run; `folder`, on the host `host`, is where the ranks write; `controller` is the
    process there that watches them. `steps` counts updates, `timeout` seconds without progress.
    """

    token: str
    folder: str
    steps: int = 2
    timeout: float = 300.0
    reference: str = "auto"
    graceful: bool = False  # let `finally` blocks of the script run
    keep_going: bool = False  # let the whole script run, unobserved after its last update
    objective: str = "token"
    controller: int = 0
    host: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Raises ValueError or TypeError where the text is not what `to_json` wrote; keys of newer versions are passed over."""
        table: dict[str, Any] = json.loads(text)
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in table.items() if key in known})
