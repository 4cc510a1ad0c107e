from __future__ import annotations

import pytest

from accumlint.source.reading.sieve import concerns

LOOP = b"""
for step, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    loss.backward()
    if (step + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "backward",
    [
        b"loss.backward()",
        b"scaler.scale(loss / 4).backward()",
        b"self.accelerator.backward(loss)",
        b"torch.autograd.backward([a, b])",
        b"self.manual_backward(loss)",
        b"backward(loss, scaler)",
        b"run = loss.backward",
        b"loss_scaler(loss, optimizer, update_grad=last)",
        b"with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()",
        b"(criterion(model(x), y)\n    .backward())",
    ],
)
def test_every_way_to_call_a_backward_passes(backward: bytes) -> None:
    assert concerns(LOOP.replace(b"loss.backward()", backward))


@pytest.mark.parametrize(
    "update",
    [
        b"optimizer.step()",
        b"scaler.step(optimizer)",
        b"self.optimizer_step()",
        b"model.zero_grad()",
        b"with model.no_sync(): pass",
        b"model.require_backward_grad_sync = last",
        b"model.set_requires_gradient_sync(last)",
        b"update = optimizer.step",
    ],
)
def test_every_way_to_update_passes(update: bytes) -> None:
    assert concerns(b"def train(batch):\n    loss(batch).backward()\n    " + update + b"\n")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"import os\nprint(os.name)\n",
        b"def f(loss):\n    loss.backward()\n",  # no update
        b"def f(opt):\n    opt.step()\n    opt.zero_grad()\n",  # no backward
        b"class F(Function):\n    def backward(ctx, g):\n        return g\n\ndef f(opt):\n    opt.step()\n",
        b'def f(opt):\n    """Example::\n\n    >>> loss.backward()\n    """\n    opt.step()\n',
        b"def f(opt):\n    # loss.backward() comes first\n    opt.step()\n",
        b"for s in ('loss.backward()', \"it's\"):\n    opt.step()\n",
        b"def go_backward(x): ...\ndef f(opt):\n    go_backward(x)\n    opt.step()\n",
    ],
)
def test_what_cannot_train_does_not_pass(data: bytes) -> None:
    assert not concerns(data)


@pytest.mark.parametrize(
    "comment",
    [b"# noqa: ACC101", b"# NOQA:F401,ACC202", b"# accumlint: ignore[ACC101]", b"#accumlint:ignore", b"# accumlint: file-ignore[ACC101]"],
)
def test_a_suppression_passes_so_that_a_useless_one_is_seen(comment: bytes) -> None:
    assert concerns(b"x = 1  " + comment + b"\n")


@pytest.mark.parametrize("comment", [b"# noqa", b"# noqa: E501", b"# see ACC101", b"# accumlint is fine with this"])
def test_other_comments_do_not_pass(comment: bytes) -> None:
    assert not concerns(b"x = 1  " + comment + b"\n")


def test_quotes_of_every_kind_do_not_hide_code() -> None:
    noise = rb"""
a = 'it\'s'; b = "\\"; c = r'\d'; d = '''x'y''z'''; e = f"{a['k']}"  # don't
"""
    assert concerns(noise + LOOP + noise)


def test_line_ends_do_not_matter() -> None:
    assert concerns(LOOP.replace(b"\n", b"\r\n"))
    assert concerns(b"# don't\r" + LOOP.replace(b"\n", b"\r"))


def test_a_utf_16_training_script_passes_to_be_refused_by_name() -> None:
    assert concerns(LOOP.decode().encode("utf-16"))
    assert not concerns("import os".encode("utf-16"))


@pytest.mark.parametrize(
    "piece", [b'"""', b"'''", b'"', b"\\", b'"\\', b"backward ", b".step ", b"backward(.step", b"# noqa: ", b"accumlint", b"def backward("]
)
@pytest.mark.usefixtures("patience")
def test_no_piece_makes_a_large_file_hang(piece: bytes) -> None:
    assert concerns(piece * (2_000_000 // len(piece)) + LOOP) is (piece != b'"\\')  # which leaves a string open
