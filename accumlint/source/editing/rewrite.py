"""Changes a file whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable


def rewrite(path: str, change: Callable[[bytes], bytes]) -> None:
    """Replaces a file by its changed content; its mode stays, and a link keeps pointing to it."""
    target = os.path.realpath(path)
    with open(target, "rb") as file:
        before = file.read()
    after = change(before)
    if after == before:
        return
    draft = f"{target}.{os.getpid()}.tmp"
    try:
        with open(draft, "wb") as file:
            file.write(after)
        shutil.copymode(target, draft)
        os.replace(draft, target)
    except OSError:
        if os.path.exists(draft):
            os.unlink(draft)
        raise
