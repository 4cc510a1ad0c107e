"""Tells from a file's bytes whether it can hold a training loop that a rule could speak of.

Nearly every file of a tree falls through here, so the tests go from the cheapest to the dearest: words anywhere in the
bytes, then the same words as calls in what is left once strings and comments are gone.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Iterator

_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# Plain words first: finding one costs a tenth of what a pattern does. Each pattern begins with its word for the same reason.
_BACKWARD_WORDS = (b"loss_scaler(", b"train_batch(")
_BACKWARD_CALL = re.compile(rb"backward\b(?:(?<=\.backward)|(?<=\bmanual_backward)\s*\(|(?<!\wbackward)(?<!\bdef backward)\s*\()")
_UPDATE_WORDS = (b"zero_grad", b"no_sync", b"GradScaler", b"grad_sync", b"gradient_sync", b"train_batch(")
_UPDATE_CALL = re.compile(rb"step\b(?:(?<=\.step)|(?<=_step)\s*\()")
_REPEATED = re.compile(rb"\b(?:for|while|def|lambda)\b")

# What the frameworks call without a backward of the file's own, with the words that show the framework: SIEVE of each vocabulary.
FRAMEWORK_ENTRIES: tuple[tuple[bytes, bytes], ...] = (
    (b"create_supervised_trainer", b"ignite"),
    (b"supervised_training_step", b"ignite"),
    (b".update_params(", b"optim_"),
    (b"accumulative_counts", b"Runner("),
    (b"OptimizerCallback", b"catalyst"),
    (b"GradientAccumulation", b"fastai"),
    (b"def compute_loss", b"Trainer"),
    (b"def training_step", b"num_items_in_batch"),
    (b"compute_loss_func", b"Trainer"),
    (b"gradient_accumulation_steps=", b"def forward("),
    (b"def get_batch_samples", b"num_batches"),
    (b"def training_step", b"accumulate_grad_batches"),
    (b"def training_step", b"LightningModule"),
    (b"def forward_step", b"megatron"),
    (b"device_train_microbatch_size", b"composer"),
    (b"grad_accum=", b"composer"),
)
_SIGNS_OF = {entry: [sign for each, sign in FRAMEWORK_ENTRIES if each == entry] for entry, _ in FRAMEWORK_ENTRIES}  # each is sought once

# Each alternative begins with a plain character, which lets the matcher leap from one to the next.
_QUOTED = re.compile(
    rb"""
      \#[^\r\n]*
    | ""\" [^"\\]* (?: (?: \\. | "(?!"") ) [^"\\]* )* (?: ""\" | \Z )
    | ''' [^'\\]* (?: (?: \\. | '(?!'') ) [^'\\]* )* (?: ''' | \Z )
    | "     [^"\\\r\n]* (?: \\. [^"\\\r\n]* )* "?
    | '     [^'\\\r\n]* (?: \\. [^'\\\r\n]* )* '?
    """,
    re.DOTALL | re.VERBOSE,
)

# Tests do odd things on purpose, and nobody trains with them.
TEST_NAME = r"^_?tests?_|^_?test$"
TEST_CLASS = r"Test(Case|Base|s)?$|^Test|TestCase"
_DEFINITION = re.compile(rb"^(?P<indent>[ \t]*)(?:async[ \t]+)?(?P<kind>def|class)[ \t]+(?P<name>\w+)", re.MULTILINE)

_SUPPRESSION = re.compile(rb"#.*?(?:accumlint:\s*(?:file-)?ignore|noqa\b[^#\r\n]*\bACC\d)", re.IGNORECASE)


def concerns(data: bytes) -> bool:
    """Whether a rule could find something in the file: it calls a backward and an update, or carries a suppression of ours."""
    if data[:2] in _WIDE_MARKS:
        data = data.replace(b"\0", b"")  # so that a UTF-16 training script is named as unreadable rather than passed over
    return _trains(data) or _suppresses(data)


def may_concern_notebook(data: bytes, signs: tuple[bytes, ...] = ()) -> bool:
    """Whether the JSON of a notebook is worth reading: the words are there, in whatever form its strings are written."""
    trains = (b"backward" in data or any(word in data for word in _BACKWARD_WORDS)) and (
        b"step" in data or any(word in data for word in _UPDATE_WORDS)
    )
    return trains or _is_framework_entry(data) or any(sign in data for sign in signs) or _suppresses(data)


def names_framework_entry(text: str) -> bool:
    """Whether a file holds what a framework calls in its own loop."""
    return _is_framework_entry(text.encode("utf-8", "surrogatepass"))


def holds_sign(data: bytes, signs: tuple[bytes, ...]) -> bool:
    """Whether a file names one of a project's own wrappers, and does something more than once."""
    return any(sign in data for sign in signs) and _REPEATED.search(data) is not None


def calls_backward(data: bytes) -> bool:
    """Whether something is called that does a backward."""
    return _is_framework_entry(data) or (_reaches_backward(data) and _reaches_backward(_QUOTED.sub(b"''", data)))


def calls_update(data: bytes) -> bool:
    """Whether an update is called, or something that belongs to one."""
    return _updates(data)


def _is_framework_entry(data: bytes) -> bool:
    return any(entry in data and any(sign in data for sign in signs) for entry, signs in _SIGNS_OF.items())


def _trains(data: bytes) -> bool:
    if _is_framework_entry(data):
        return True
    if not (_reaches_backward(data) and _updates(data)):
        return False
    code = _QUOTED.sub(b"''", data)
    if not (_reaches_backward(code) and _updates(code) and _REPEATED.search(code) is not None):
        return False
    return b"est" not in code or not _only_tests(code)


def _only_tests(code: bytes) -> bool:
    """Whether every backward stands in a test, going by the indentation of what is defined around it."""
    heads = [(match.start(), len(match["indent"]), _is_test(match)) for match in _DEFINITION.finditer(code)]
    if not any(test for _, _, test in heads):
        return False
    starts = [start for start, _, _ in heads]
    return all(_stands_in_test(at, code, heads, starts) for at in _backwards(code))


def _backwards(code: bytes) -> Iterator[int]:
    """Where something is called that does a backward."""
    yield from (match.start() for match in _BACKWARD_CALL.finditer(code))
    for word in _BACKWARD_WORDS:
        at = code.find(word)
        while at >= 0:
            yield at
            at = code.find(word, at + 1)


def _is_test(match: re.Match[bytes]) -> bool:
    if match["kind"] == b"class":
        return re.search(TEST_CLASS.encode(), match["name"]) is not None
    return re.search(TEST_NAME.encode(), match["name"]) is not None


def _stands_in_test(at: int, code: bytes, heads: list[tuple[int, int, bool]], starts: list[int]) -> bool:
    line = code.rfind(b"\n", 0, at) + 1
    indent = len(code[line:at]) - len(code[line:at].lstrip())
    for position in range(bisect_right(starts, at) - 1, -1, -1):
        _, depth, test = heads[position]
        if depth < indent:
            if test:
                return True
            indent = depth
            if depth == 0:
                break
    return False


def _reaches_backward(code: bytes) -> bool:
    if b"backward" in code and _BACKWARD_CALL.search(code):
        return True
    return any(word in code for word in _BACKWARD_WORDS)


def _updates(code: bytes) -> bool:
    return any(word in code for word in _UPDATE_WORDS) or _UPDATE_CALL.search(code) is not None


def _suppresses(data: bytes) -> bool:
    marked = b"accumlint" in data or (b"ACC" in data and (b"noqa" in data or b"NOQA" in data))
    return marked and _SUPPRESSION.search(data) is not None
