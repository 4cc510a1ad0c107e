from __future__ import annotations

import ast
import gc
import warnings

import pytest

from accumlint.source.reading.depth import MAX_BLOCKS, MAX_EXPRESSION
from accumlint.source.reading.nodes import walk
from accumlint.source.reading.parse import Problem, Source, parse


def read(data: bytes | str) -> Source:
    outcome = parse(data.encode() if isinstance(data, str) else data, "train.py")
    assert isinstance(outcome, Source), outcome
    return outcome


def refuse(data: bytes | str) -> Problem:
    outcome = parse(data.encode() if isinstance(data, str) else data, "train.py")
    assert isinstance(outcome, Problem)
    assert "\n" not in outcome.message
    assert outcome.line >= 1
    assert outcome.column >= 1
    return outcome


def depth(node: ast.AST) -> int:
    deepest, level = 0, [node]
    while level:
        deepest, level = deepest + 1, [child for each in level for child in ast.iter_child_nodes(each)]
    return deepest


class TestText:
    @pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf", b"\n", b"# only a comment"])
    def test_empty_files_parse(self, data: bytes) -> None:
        assert read(data).tree.body == []

    def test_a_mark_is_no_part_of_the_text(self) -> None:
        source = read(b"\xef\xbb\xbfx = 1\n")
        assert source.text == "x = 1\n"
        assert source.tree.body[0].col_offset == 0

    @pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
    def test_lines_end_as_python_ends_them(self, end: str) -> None:
        source = read(end.join(["a = 1", "", "b = '\x0b\x1c\u2028'", "\x0c", "c = 3"]))
        assert [node.lineno for node in source.tree.body] == [1, 3, 5]
        assert [source.lines[node.lineno - 1][0] for node in source.tree.body] == ["a", "b", "c"]

    def test_declared_encodings_are_read(self) -> None:
        assert read("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1")).lines[1] == "name = 'é'"
        assert read("#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\nname = '€'\n".encode("cp1252")).lines[2] == "name = '€'"
        assert read("# coding: utf-8\nname = 'é'\n").lines[1] == "name = 'é'"

    @pytest.mark.parametrize(
        ("data", "message", "line"),
        [
            (b"a = 1\nb = '\xe9'\n", "not UTF-8 (byte 0xe9), and no other encoding is declared", 2),
            (b"\n\n# coding: latin-1\n\xe9\n", "not UTF-8 (byte 0xe9), and no other encoding is declared", 4),
            (b"# coding: ascii\na = '\xe9'\n", "not ascii (byte 0xe9), which is the declared encoding", 2),
            (b"# coding: klingon\n", "unknown encoding: klingon", 1),
            (b"#!/bin/python\n# coding: rot13\n", "unknown encoding: rot13", 2),
            (b"# coding: punycode\n", "unknown encoding: punycode", 1),
            (b"\xef\xbb\xbf# coding: latin-1\n", "the file begins with a UTF-8 mark but declares the encoding latin-1", 1),
            (b"a = 1\r\nb = \0\r\n", "not Python source: the file contains null bytes", 2),
            ("a = 1".encode("utf-16"), "not UTF-8: the file is UTF-16, which Python does not read", 1),
        ],
    )
    def test_what_cannot_be_decoded_is_said_in_one_line(self, data: bytes, message: str, line: int) -> None:
        problem = refuse(data)
        assert (problem.message, problem.line) == (message, line)

    @pytest.mark.parametrize("data", [b"#" * 5_000_001, b"x\n" * 200_001, b"x = [" + b"1," * 400_001 + b"]"])
    def test_size_is_capped(self, data: bytes) -> None:
        assert refuse(data).message.startswith("too large: ")


class TestSyntax:
    @pytest.mark.parametrize(
        ("text", "line", "column"),
        [("x = 1\ndef f(:\n    pass\n", 2, 7), ("x = (1,\n\ny = 2\n", 1, 5), ("if x:\npass\n", 2, 1), ("x = 'a\n", 1, 5)],
    )
    def test_a_syntax_error_gives_place_and_reason(self, text: str, line: int, column: int) -> None:
        problem = refuse(text)
        assert problem.message.startswith("syntax error: ")
        assert (problem.line, problem.column) == (line, column)

    @pytest.mark.parametrize(
        ("line", "sign"),
        [
            ("print 'loss', loss", "print statement"),
            ("print loss", "print statement"),
            ("print >>log, loss", None),  # an expression in Python 3
            ("print >>log, 'loss %f' % loss; print", None),
            ("exec 'x = 1'", "exec statement"),
            ("raise ValueError, 'no loss'", "raise with a comma"),
            ("if a <> b: pass", "<> operator"),
            ("x = `loss`", "backquotes"),
            ("mode = 0777", "octal or long literal"),
            ("n = 10L", "octal or long literal"),
            ("s = ur'x'", "ur string"),
        ],
    )
    def test_python_2_is_named(self, line: str, sign: str | None) -> None:
        text = f"import torch\nfor x in loader:\n    {line}\n"
        if sign is None:
            read(text)
        else:
            problem = refuse(text)
            assert (problem.message, problem.line) == (f"looks like Python 2: {sign}", 3)

    def test_python_2_is_named_where_its_except_looks_like_newer_syntax(self) -> None:
        assert "Python 2" in refuse("try:\n    f()\nexcept ValueError, e:\n    print e\n").message

    def test_warnings_stay_quiet(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read("x = '\\d'\nassert (x, 'always')\nx is 1\n")

    def test_the_collector_is_left_as_it_was(self) -> None:
        assert gc.isenabled()
        parse(b"x = 1", "train.py")
        parse(b"x = (", "train.py")
        assert gc.isenabled()

    def test_source_is_never_executed(self) -> None:
        read("raise SystemExit(3)\nimport does_not_exist\n1 / 0\n")

    @pytest.mark.parametrize("text", ["x = '\\ud800'\n", "x = " + "1" * 10_000 + "\n", "\x1a", "x = 1\\", "\x00", "x = '\u200b\u202e'\n"])
    def test_oddities_never_raise(self, text: str) -> None:
        assert isinstance(parse(text.encode(), "train.py"), Source | Problem)


class TestDepth:
    @pytest.mark.filterwarnings("ignore::SyntaxWarning")
    @pytest.mark.parametrize("terms", [200, 1_000, 2_500])
    @pytest.mark.parametrize(
        "expression",
        [
            lambda n: " + ".join(["a"] * n),
            lambda n: "\n + ".join(["(a"] + ["a"] * (n - 1)) + ")",
            lambda n: "a" + ".b(c)" * (n // 2),
            lambda n: "a" + "[0]" * n,
            lambda n: "not " * n + "a",
            lambda n: "lambda: " * n + "a",
            lambda n: "a if b else " * n + "c",
            lambda n: " ** ".join(["a"] * n),
        ],
    )
    def test_long_chains_are_cut_and_the_file_is_read(self, expression: object, terms: int) -> None:
        assert callable(expression)
        source = read(f"x = {expression(terms)}\nloss.backward()\n")
        assert depth(source.tree) <= MAX_BLOCKS + MAX_EXPRESSION + 8
        compile(source.tree, "train.py", "exec")  # still a well-formed tree
        assert ast.unparse(source.tree.body[-1]) == "loss.backward()"

    def test_a_long_elif_is_cut(self) -> None:
        source = read("if a == 0: b\n" + "".join(f"elif a == {i}: b\n" for i in range(1_000)) + "loss.backward()\n")
        assert depth(source.tree) <= MAX_BLOCKS + MAX_EXPRESSION
        assert len(source.tree.body) == 2

    @pytest.mark.parametrize(
        "text",
        [
            "x = " + "(" * 3_000 + "a" + ")" * 3_000,
            "x = " + "f(" * 1_000 + "a" + ")" * 1_000,
            "x = " + "[" * 300 + "]" * 300,
            "".join(" " * i + "if a:\n" for i in range(1_000)) + " " * 1_001 + "b\n",
            "x = " + " + ".join(["a"] * 50_000),
            "x = " + "-" * 50_000 + "a",
            "if a: b\n" + "elif a: b\n" * 20_000,
            "x = a" + ".step()" * 200,
            "if a: b\n" + "elif a: b\n" * 200 + "else: loss.backward()\n",
        ],
    )
    def test_what_cannot_be_cut_is_said_in_one_line(self, text: str) -> None:
        assert refuse(text).message.startswith("nested too deeply to follow")

    def test_ordinary_code_is_not_touched(self) -> None:
        text = "x = {'a': [f(b, c=(d, [e for e in range(3) if e]))], **g}\n"
        text += "if a:\n    while b:\n        with c as d:\n            e = lambda: (f,)"
        assert ast.unparse(read(text).tree) == ast.unparse(ast.parse(text))

    @pytest.mark.parametrize(
        "text",
        ["x = f(a, b)\nif x:\n    y = 1\n" * 33_000, "x = [" + "1," * 399_000 + "]", "def f():\n" + "    x = a + b * (c - d)\n" * 99_000],
        ids=["statements", "table", "one function"],
    )
    @pytest.mark.usefixtures("patience")
    def test_no_large_file_hangs(self, text: str) -> None:
        assert read(text).tree.body


def test_class_patterns_with_keywords_are_walked_over() -> None:
    tree = ast.parse("match point:\n    case Point(x=0, y=other):\n        train(other)\n")
    assert [node.func.id for node in walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)] == ["train"]
