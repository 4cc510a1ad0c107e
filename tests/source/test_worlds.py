"""Which open conditions get a world of their own."""

from __future__ import annotations

import pytest

from accumlint.source.rehearsal.worlds import Answer


@pytest.mark.parametrize(
    ("text", "weight", "incidental"),
    [
        ("isinstance(cfg.module, dict)", 0, True),
        ("not isinstance(model, DDP)", -1, True),
        ('os.path.exists(f"{path}.pt")', 0, True),
        ("resolution.endswith('px')", 0, True),
        ("abs(h * w - pixels) < least", 0, True),
        ("isinstance(model, DDP)", 1, False),  # an event hangs on it
        ("cfg.get('lora_config') is None", 0, False),
        ("args.use_ema", -1, False),
        ("args.resume_exists", 0, False),
    ],
)
def test_tests_of_types_and_files_are_no_choice_of_the_user(text: str, weight: int, incidental: bool) -> None:
    assert Answer((), text, True, True, weight).is_incidental is incidental
