from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from accumlint.source.reading.newer import MAX_LINES, TooLargeError, lower
from accumlint.source.reading.parse import Problem, Source, parse

NEWER = {
    "nested quotes": 'name = f"{x["a"]} of {"n".upper()}"',
    "f-string over lines": 'print(f"{\n    x["a"]\n}", end)',
    "backslash in an f-string": 'name = f"{"\\n".join(x)}"',
    "comment in an f-string": 'name = f"""{\n    x  # the name\n}"""',
    "type parameters": "def first[T](items: list[T]) -> T:\n    return items[0]",
    "type parameters over lines": "class Pair[\n    A,  # first\n    B: (int, str) = int,\n](Base):\n    pass",
    "type alias": "type Batch[T] = dict[str, T]",
    "type alias over lines": "if True:\n    type Batch = (\n        dict[str, int]\n        | None\n    )\n    x = 1",
    "except without parentheses": "try:\n    f()\nexcept ValueError, KeyError:\n    pass",
    "except star without parentheses": "try:\n    f()\nexcept* ValueError, KeyError:\n    pass",
    "t-string": 'query = t"{x} of {y["n"]}"',
    "except star": "try:\n    f()\nexcept* ValueError as group:\n    pass",
    "starred index": "x = a[*b, 1]",
    "starred annotation": "def f(*args: *Ts) -> None: ...",
}


def read(text: str) -> Source:
    outcome = parse(text.encode(), "train.py")
    assert isinstance(outcome, Source), outcome
    return outcome


@pytest.mark.parametrize("code", NEWER.values(), ids=NEWER)
def test_the_newer_piece_is_lowered_and_lines_stay(code: str) -> None:
    source = read(f"import torch\n{code}\nloss.backward(); optimizer.step()\n")
    backward, step = source.tree.body[-2:]
    assert ast.unparse(backward) == "loss.backward()"
    assert (backward.lineno, backward.col_offset) == (2 + len(code.split("\n")), 0)
    assert step.col_offset == len("loss.backward(); ")
    assert source.lines[1] == code.split("\n")[0]


@pytest.mark.parametrize("code", [NEWER["nested quotes"], NEWER["t-string"], 'é = f"ü{x["é"]}ß"'])
def test_columns_stay_behind_a_lowered_string(code: str) -> None:
    source = read(f"{code}; loss.backward()\n")
    assert source.tree.body[-1].col_offset == len(f"{code}; ".encode())


def test_what_this_python_parses_stays_as_it_is() -> None:
    text = (
        'type X = int\nname = f"{x}" + f"{y!r:>{width}}"\n\n@decorated\n# why\n@twice\ndef f(a):\n    """Doc."""\n    return {"a": [a]}\n'
    )
    lowered = lower(text)
    assert lowered is not None
    assert lowered.split("\n")[1:] == text.split("\n")[1:]


def test_a_decorated_function_goes_with_its_decorators() -> None:
    read("@outer\n# why\n@inner(\n    1\n)\ndef f[T](a: T):\n    return a\n\n\n@last\nclass A[T]: ...\n")


@pytest.mark.parametrize(
    "code", ["type X = (", "def f[T(x): pass", 'name = f"{x["a"]"', "except A, B:\n    pass", "print 'a'\ntype X = int"]
)
def test_what_libcst_refuses_too_is_a_syntax_error(code: str) -> None:
    outcome = parse(code.encode(), "train.py")
    assert isinstance(outcome, Problem)
    assert "syntax error" in outcome.message or "Python 2" in outcome.message


@pytest.mark.parametrize(
    "piece",
    [
        "x = " + "f(" * 190 + "a" + ")" * 190,
        "x = " + "[" * 190 + "a" + "]" * 190,
        "x = " + "f(" * 3_000 + "a" + ")" * 3_000,
        "def f[T]():\n    x = " + " + ".join(["a"] * 5_000),
        "def f[T]():\n    x = " + "not " * 5_000 + "a",
        "def f[T]():\n    x = a" + ".b" * 2_900,
        "def f[T]():\n    if a: b\n" + "    elif a: b\n" * 3_500,
        "def f[T]():\n" + "    x = 1\n" * (MAX_LINES + 1),
    ],
    ids=["calls", "lists", "3000 calls", "sum", "not", "attributes", "elif", "long"],
)
@pytest.mark.usefixtures("patience")
def test_caps_stand_before_libcst(piece: str) -> None:
    outcome = parse(f"type X = int\n{piece}\n".encode(), "train.py")
    assert isinstance(outcome, Source | Problem)


def test_too_much_for_libcst_says_so() -> None:
    with pytest.raises(TooLargeError, match="nested too deeply"):
        lower("type X = int\nx = " + "f(" * 100 + ")" * 100)
    if sys.version_info < (3, 12):
        outcome = parse(("type X = int\nx = " + "f(" * 100 + ")" * 100).encode(), "train.py")
        assert isinstance(outcome, Problem)
        assert outcome.message.endswith("(as newer syntax the file is nested too deeply to be read)")


def test_libcst_is_imported_only_where_it_is_needed() -> None:
    code = (
        "import sys\nfrom accumlint.source.reading.parse import parse\n"
        "parse(b'def f(x):\\n    return x\\n', 'a.py'); parse(b'def f(:', 'a.py'); parse(b'print 1', 'a.py')\n"
        "print('libcst' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
