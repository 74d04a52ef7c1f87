"""What Python declares of the C library is what its headers say: constants, structs, functions."""

from __future__ import annotations

import ctypes
import enum
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pycparser import c_ast, c_parser

from tensorbus import _c, _errors

INCLUDE = Path(__file__).parents[2] / "include"
NUMBERS = {
    "_Bool": ctypes.c_bool,
    "char": ctypes.c_char,
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "unsigned int": ctypes.c_uint,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
}


class Header(c_ast.NodeVisitor):
    """All of ours in the headers, as ctypes would declare it."""

    def __init__(self) -> None:
        self.constants: dict[str, int] = {}
        self.structs: dict[str, list[tuple[str, Any]]] = {}
        self.enums: dict[str, list[str]] = {}
        self.functions: dict[str, tuple[Any, ...]] = {}

    def visit_Enum(self, node: c_ast.Enum) -> None:
        if node.name and node.values:
            self.enums[node.name] = [item.name for item in node.values.enumerators]
        value = -1
        for item in node.values.enumerators if node.values else ():
            value = value + 1 if item.value is None else self.number(item.value)
            self.constants[item.name] = value

    def number(self, node: c_ast.Node) -> int:
        if isinstance(node, c_ast.Constant):
            return int(node.value, 0)
        if isinstance(node, c_ast.ID):
            return self.constants[node.name]
        if isinstance(node, c_ast.UnaryOp) and node.op == "-":
            return -self.number(node.expr)
        assert isinstance(node, c_ast.BinaryOp), node
        left, right = self.number(node.left), self.number(node.right)
        return left << right if node.op == "<<" else eval(f"{left} {node.op} {right}")

    def visit_Struct(self, node: c_ast.Struct) -> None:
        if node.name and node.decls:
            self.structs[node.name] = [(d.name, self.type_of(d.type)) for d in node.decls]
            self.generic_visit(node)

    def visit_Decl(self, node: c_ast.Decl) -> None:
        if isinstance(node.type, c_ast.FuncDecl) and node.name.startswith("tb_"):
            parameters = [self.type_of(p.type) for p in node.type.args.params]
            self.functions[node.name] = (self.type_of(node.type.type), *[p for p in parameters if p is not None])
        self.generic_visit(node)

    def type_of(self, node: c_ast.Node) -> Any:
        """A ctypes type; the name of a struct or enum; ("pointer", type); ("array", type, length); None: void."""
        if isinstance(node, c_ast.ArrayDecl):
            return "array", self.type_of(node.type), self.number(node.dim)
        if isinstance(node, c_ast.PtrDecl):
            is_function = isinstance(node.type, c_ast.FuncDecl)
            return "pointer", "function" if is_function else self.type_of(node.type)
        assert isinstance(node, c_ast.TypeDecl), node
        name = getattr(node.type, "name", None) or " ".join(getattr(node.type, "names", ["?"]))
        return None if name == "void" else NUMBERS.get(name, name)


@pytest.fixture(scope="session")
def header() -> Header:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if not compiler:
        pytest.skip("there is no C compiler to read the headers with")
    flags = ["-E", "-P", f"-I{INCLUDE}", "-D__attribute__(x)=", "-D__extension__=", "-D__float128=double"]
    text = '#include "tensorbus/plan.h"\n'
    done = subprocess.run([compiler, *flags, "-x", "c", "-"], input=text, capture_output=True, text=True, check=True)
    found = Header()
    found.visit(c_parser.CParser().parse(done.stdout))
    assert "tb_world_join" in found.functions
    return found


def is_same(header: Header, ours: Any, theirs: Any) -> bool:
    """Whether a ctypes type is what C says. Handles and other pointers may be c_void_p, strings c_char_p."""
    if isinstance(theirs, tuple) and theirs[0] == "array":
        is_array = isinstance(ours, type) and issubclass(ours, ctypes.Array)
        return is_array and ours._length_ == theirs[2] and is_same(header, ours._type_, theirs[1])
    if isinstance(theirs, tuple):
        inner = theirs[1]
        if ours is ctypes.c_void_p:
            return True
        if inner == "function":
            return isinstance(ours, type) and issubclass(ours, ctypes._CFuncPtr)
        if inner is ctypes.c_char:
            return ours is ctypes.c_char_p
        return hasattr(ours, "_type_") and is_same(header, ours._type_, inner)
    if isinstance(theirs, str) and theirs in header.enums:
        return ours is ctypes.c_int or (isinstance(ours, type) and issubclass(ours, enum.IntEnum))
    if isinstance(theirs, str):
        return isinstance(ours, type) and ours.__name__ == theirs
    return ours is theirs


def test_constants(header: Header) -> None:
    ours = {name: value for name, value in vars(_c).items() if name.startswith("TB_")}
    for kind in vars(_c).values():
        if isinstance(kind, type) and issubclass(kind, enum.IntEnum) and kind.__module__ == _c.__name__:
            ours |= {item.name: item.value for item in kind}
            assert header.enums[kind.__name__] == list(kind.__members__)
    assert len(ours) >= 30
    for name, value in ours.items():
        assert header.constants.get(name) == value, name


def test_every_status_has_an_exception() -> None:
    assert set(_errors._BY_STATUS) == {status.value for status in _c.tb_status if status.value}


def test_structs(header: Header) -> None:
    structs = {n: k for n, k in vars(_c).items() if isinstance(k, type) and issubclass(k, ctypes.Structure)}
    ours = {name: kind for name, kind in structs.items() if name.startswith("tb_")}
    assert len(ours) >= 15
    for name, kind in ours.items():
        fields: Any = kind._fields_
        assert [f for f, _ in fields] == [f for f, _ in header.structs[name]], name
        for (field, type_), (_, theirs) in zip(fields, header.structs[name], strict=True):
            assert is_same(header, type_, theirs), f"{name}.{field} is {type_}, and {theirs} in the header"


def test_functions(header: Header) -> None:
    for name, (result, *parameters) in _c.FUNCTIONS.items():
        theirs = header.functions[name]
        assert is_same(header, result, theirs[0]), f"the result of {name}"
        assert len(parameters) == len(theirs) - 1, name
        for i, (ours, expected) in enumerate(zip(parameters, theirs[1:], strict=True)):
            assert is_same(header, ours, expected), f"parameter {i} of {name} is {ours}, and {expected} in the header"


def test_every_function_is_declared_or_the_documentation_says_why_not(header: Header) -> None:
    page = (INCLUDE.parent / "docs/python.md").read_text()
    table = page.split("### What Python does not have of C\n")[1].split("\n#")[0]
    left_out = set(re.findall(r"`(tb_\w+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
    assert left_out == {name for name in header.functions if name not in _c.FUNCTIONS}
