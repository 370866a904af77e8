"""Tests run apart from the program: verdicts are those of plain execution, and no object of the program decides one."""

import ast
import json
import math
import os
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from verl.utils.reward_score.prime_code import check_correctness
from verl.utils.sandbox import exchange, wrapper
from verl.utils.sandbox.exchange.checker import Checker
from verl.utils.sandbox.exchange.program import Program
from verl.utils.sandbox.exchange.wire import Unreadable

NODES = """
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next
def turn(head):
    before = None
    while head:
        head.next, before, head = before, head, head.next
    return before
"""
STACK = """
class Empty(LookupError):
    def __init__(self, size):
        super().__init__(f"holds {size}")
        self.size = size
class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items:
            raise Empty(0)
        return self.items.pop()
    def __len__(self):
        return len(self.items)
"""
VECTOR = """
class Vector:
    def __init__(self, x):
        self.x = x
    def __add__(self, other):
        return Vector(self.x + other.x)
    def __mul__(self, number):
        return Vector(self.x * number)
    def __eq__(self, other):
        return self.x == other.x
"""
SHELF = """
class Shelf:
    def __init__(self, items=()):
        self.items, self.table, self.rows = items, {}, [[1], [2]]
    def seen(self): return [*self.items], dict(self.table), sum(map(sum, self.rows))
    def me(self): return self
    def add(self, item):
        self.items.append(item)
        return self
    def all(self): return self.items
    def put(self, item): self.items.append(item)
    def __len__(self): return len(self.items)
store = []
def stored(): return len(store)
"""
FUNCTIONS = """
from collections import Counter, defaultdict
class Pair(tuple):
    pass
def sort(items): items.sort()
def same(items): return items
def fail(text): raise ValueError("bad " + text)
def steps(n):
    for i in range(n): yield i
def apply(function, value): return function(value)
def show(value): print(value)
def count(text): return Counter(text)
def places(text):
    found = defaultdict(list)
    for place, letter in enumerate(text): found[letter].append(place)
    return found
def pair(): return Pair((1, 2))
def large(): return 10 ** 5000
async def later(value): return value
def nested(): return {(1, "a"): [None, {2.5, 1j}, b"x", ({},)]}
"""

TESTS = [
    (FUNCTIONS, "items = [3, 1]\nsort(items)\nassert items == [1, 3]"),
    (FUNCTIONS, "rows = [[3, 1], 2]\nsort(rows[0])\nassert rows == [[1, 3], 2]\nassert same(rows) is rows"),
    (FUNCTIONS, "try:\n    fail('x')\n    assert 0\nexcept ValueError as error:\n    assert str(error) == 'bad x'"),
    (FUNCTIONS, "assert list(steps(3)) == [0, 1, 2] and next(steps(1)) == 0"),
    (FUNCTIONS, "one = 1\nassert apply(lambda value: value + one, 3) == 4 and apply(len, [0]) == 1"),
    (FUNCTIONS, "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    show(3)\n"
                "assert out.getvalue() == '3\\n'"),
    (FUNCTIONS, "assert count('aab') == {'a': 2, 'b': 1} == Counter('aab')"),
    (FUNCTIONS, "assert pair() == (1, 2) and pair()[0] == 1 and large() == 10 ** 5000"),
    (FUNCTIONS, "assert isinstance(pair(), tuple) and not isinstance(pair(), list) and isinstance(pair(), Pair)"),
    (FUNCTIONS, "assert places('aba') == {'a': [0, 2], 'b': [1]} and places('a')['z'] == []"),
    (FUNCTIONS, "import asyncio\nassert asyncio.run(later(2)) == 2"),
    (FUNCTIONS, "assert nested() == {(1, 'a'): [None, {2.5, 1j}, b'x', ({},)]}"),
    ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
    ("def add(a, b): return a + b", "def check(candidate):\n    assert math.isclose(candidate(1, 2), 3)\ncheck(add)"),
    (NODES, "node = turn(Node(1, Node(2)))\nassert (node.value, node.next.value, node.next.next) == (2, 1, None)"),
    (STACK, "stack = Stack()\nassert stack.push(1).push(2).pop() == 2\nassert isinstance(stack, Stack)"),
    (STACK, "try:\n    Stack().pop()\nexcept Empty as error:\n    assert error.size == 0 and str(error) == 'holds 0'"),
    (SHELF, "shelf = Shelf([])\nshelf.items.append(3)\nshelf.table['x'] = 1\nshelf.rows[0][0] = 4\n"
            "assert shelf.seen() == ([3], {'x': 1}, 6)"),
    (SHELF, "items = []\nshelf = Shelf(items)\nitems.append(1)\nshelf.put(2)\nshelf.all().append(shelf.seen())\n"
            "assert items == [1, 2, ([1, 2], {}, 3)] and shelf.items is items and len(shelf) == 3"),
    (SHELF, "shelf = Shelf([])\nitems = shelf.items\nassert len(shelf) == 0\nitems += [1]\nassert len(shelf) == 1"),
    (SHELF, "shelf = Shelf()\nassert shelf.me() is shelf.me().me() is shelf is not Shelf()"),
    (SHELF, "shelf = Shelf()\nassert type(shelf) is Shelf and type(shelf) == Shelf != type(3)"),
    (SHELF, "shelf = Shelf([])\nassert shelf.add(1).add(2).me().add(3) is shelf and shelf.items == [1, 2, 3]"),
    (SHELF, "store.append(1)\nstore.append(store)\nassert stored() == 2"),
    (VECTOR, "assert Vector(1) + Vector(2) == Vector(3) and (Vector(2) * 3).x == 6 and Vector(1) != Vector(2)"),
]  # fmt: skip


def verdicts(code: str, tests: list[str]) -> list[str]:
    _, metadata = check_correctness({"assert_case": tests}, code, timeout=5)
    return [each["status"] for each in metadata]


@pytest.mark.parametrize("code", [FUNCTIONS, NODES, STACK, SHELF, VECTOR])
def test_verdicts_are_those_of_plain_execution(code):
    """The last part of a test negated makes it a wrong one."""
    tests = [test for program, test in TESTS if program == code]
    assert verdicts(code, tests) == ["success"] * len(tests)
    wrong = [test.replace(" == ", " != ", 1) for test in tests if " == " in test]
    assert verdicts(code, wrong) == ["runtime error"] * len(wrong)


def test_names_of_python_are_the_test_s_own():
    for code, test in TESTS[10:12]:
        assert verdicts(code, [test]) == ["success"]
    cheat = "class math: isclose = lambda *given: True\ndef abs(x): return 0\nall = len = abs\ndef f(x): return 9"
    tests = ["assert math.isclose(f(1), 3)", "assert abs(f(1) - 3) < 1e-6", "assert len([f(1)]) == 0"]
    assert verdicts(cheat, tests) == ["runtime error"] * 3


EQUAL_TO_ALL = """
class Any(BASE):
    def __init__(self, *given): pass
    __eq__ = __ge__ = __le__ = __lt__ = __gt__ = __contains__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __sub__ = __rsub__ = __abs__ = __round__ = lambda self, *given: self
    __hash__ = lambda self: 0
    startswith = lambda self, text: True
def f(x): return Any()
"""


@pytest.mark.parametrize("base", ["object", "int", "str", "list", "dict"])
def test_an_object_equal_to_everything_is_equal_to_nothing(base):
    tests = ["assert f(1) == 3", "assert [f(1)] == [3]", "assert f(1) in (3, 4)", "assert abs(f(1) - 3) < 1e-6",
             "assert f(1) <= 3 <= f(1) < 3", "assert 3 in f(1)", "assert f(1).startswith('a')"]  # fmt: skip
    assert "success" not in verdicts(EQUAL_TO_ALL.replace("BASE", base), tests)
    as_class = EQUAL_TO_ALL.replace("BASE", base).replace("def f(x): return Any()", "f = Any")
    assert "success" not in verdicts(as_class, tests)


FORGERIES = [
    "import builtins; builtins.exec = lambda *given: None",
    "import sys; sys._getframe(1).f_globals['exec'] = sys._getframe(1).f_globals['check'] = lambda *given: None",
    "import gc, mmap, os\nfor each in gc.get_objects():\n    if isinstance(each, mmap.mmap): each[0] = 1\nos._exit(0)",
    "import os\nfor number in range(3, 64):\n    try: os.write(number, b'\\0\\0\\0\\1' * 99)\n    except OSError: pass",
    "import os\nf = lambda x: os._exit(0)",
    "import sys\nf = lambda x: sys.exit(0)",
]


def test_no_verdict_is_forged_and_no_test_code_is_seen():
    for code in FORGERIES:
        assert verdicts(code, ["try:\n    assert f(1) == 3\nexcept Exception:\n    raise"]) == ["runtime error"]
    shows = """
import gc, linecache, sys
def f(x):
    frame, seen = sys._getframe(), [repr(linecache.cache), repr(gc.get_objects())]
    while frame:
        seen.append(repr((frame.f_locals, frame.f_globals)))
        frame = frame.f_back
    return "aggauq"[::-1] in "".join(seen)
"""
    assert verdicts(shows, ["quagga = f(1)\nassert quagga is False"]) == ["success"]


def test_a_function_of_the_test_does_not_lead_to_the_test():
    code = """
import operator
def f(function):
    for name in ("__globals__", "__code__", "__closure__", "func_globals"):
        try:
            return getattr(function, name)
        except Exception:
            pass
    try:
        return function._remote_peer.ask("call", operator.attrgetter("__globals__"), (function,), {})
    except Exception:
        return "refused"
"""
    assert verdicts(code, ["secret = 1\nassert f(lambda: secret) == 'refused'"]) == ["success"]


@pytest.mark.parametrize(
    ("code", "test", "reason"),
    [
        ("class A: pass", "class B(A): pass", "derives a class"),
        ("def f(): pass", "from unittest.mock import patch\nf()", "uses unittest.mock"),
        ("class A(list): pass\ndef f(): return A()", "f().append(1)", "not a plain value"),
        ("import zlib", "assert zlib.crc32(b'') == 0", "module zlib"),
        ("class A:\n    def __eq__(self, other): return True\n    def __init__(self, x): self.x = x",
         "assert A(1) == A(2)", "equal to the program only"),
        ("def f(): pass", "import threading\nt = threading.Thread(target=f)\nt.start()\nt.join()", "several threads"),
        ("def f(): pass", "assert f( is None", "does not compile"),
    ],
)  # fmt: skip
def test_what_cannot_be_decided_apart_is_refused_by_name(code, test, reason):
    results, (said,) = check_correctness({"assert_case": test}, code)
    assert (results, said["status"]) == ([-1], "refused") and reason in said["stderr"]


def test_a_function_cannot_end_an_iteration_of_the_test():
    code = """
def f(x):
    raise StopIteration
def steps():
    received = yield 1
    yield received
"""
    ended = "assert all(a == b for a, b in zip(map(f, [1]), [2]))"
    expected = "try:\n    f(1)\nexcept StopIteration:\n    pass\nelse:\n    assert False"
    sends = "it = steps()\nnext(it)\nassert it.send(2) == 2\ntry:\n    it.send(3)\nexcept Exception as e:"
    sends += "\n    assert type(e).__name__[:4] == 'Stop' and list(it) == []"
    assert verdicts(code, [ended, expected, sends]) == ["runtime error", "success", "success"]


def test_long_and_cyclic_objects_are_compared_by_their_attributes():
    code = """
class Node:
    def __init__(self, value, before=None):
        self.value, self.before, self.after = value, before, None
        if before:
            before.after = self
    def __eq__(self, other):
        return self.value == other.value
def chain(n):
    first = node = Node(0)
    for i in range(1, n):
        node = Node(i, node)
    return first
"""
    tests = ["assert chain(3000) == chain(3000)", "assert chain(2) == chain(3)", "assert chain(2) != Node(1)"]
    assert verdicts(code, tests) == ["success", "refused", "success"]


# ---- loading without the package


def test_each_module_of_the_exchange_imports_earlier_ones_only():
    folder = Path(exchange.__file__).parent
    assert sorted((*exchange.MODULES, "__init__")) == sorted(path.stem for path in folder.glob("*.py"))
    for number, name in enumerate(exchange.MODULES):
        tree = ast.parse((folder / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                used = [node.module] if node.module else [alias.name for alias in node.names]
                assert set(used) <= set(exchange.MODULES[:number]), name
                assert node in tree.body, f"{name} imports {used} when it is no longer in sys.modules"
            elif isinstance(node, ast.Import | ast.ImportFrom):
                modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names


def test_a_program_finds_no_module_of_the_exchange():
    code = "import sys\ndef f(): return [n for n in sys.modules if 'exchange' in n or n in ('folder', 'isolation')]"
    assert verdicts(code, ["assert f() == []"]) == ["success"]


def test_a_remote_program_plants_no_module_for_its_test(tmp_path):
    """The service may start the script from a file in the folder in which the program runs."""
    code = "open('statistics.py', 'w').write('import os; os._exit(100)')\ndef f(x): return x"
    script = tmp_path / "script.py"
    script.write_text(wrapper.script(code, None, [], "", 5.0, True))
    for test, mark in (("assert f(1) == 1", "<>null<>"), ("assert f(1) == 2", "")):
        given = json.dumps(["<>", f"f(1)\nimport statistics\nassert statistics.mean([1]) == 1\n{test}"])
        command = [sys.executable, script.name]
        result = subprocess.run(command, cwd=tmp_path, input=given, capture_output=True, text=True)
        assert (tmp_path / "statistics.py").exists() and result.stdout == mark


# ---- messages


def pair_of_peers() -> tuple[Checker, Program]:
    to_program, to_checker = os.pipe(), os.pipe()
    return Checker(to_checker[0], to_program[1]), Program(to_program[0], to_checker[1])


def sent(sender, receiver, *values):
    """Send values in a message and return what arrives."""
    message = sender.wire.write("value", *values)
    sender.wire.sent()
    return receiver.wire.read(message, receiver.begin)[1]


def test_values_keep_type_value_and_identity():
    checker, program = pair_of_peers()
    shared = [1]
    value = [shared, shared, (1, [2]), {"a": {1, 2}}, -0.0, math.inf, 1 << 90, "\ud800", range(3), bytearray(b"x")]
    value += [deque([1], 3), Counter("aab"), OrderedDict(b=1, a=2), defaultdict(int, {1: 2}), Decimal("1.50")]
    value += [Fraction(1, 3), datetime(2024, 2, 29, 1, 2, 3, 4, UTC), date(1, 1, 1), timedelta(1, 2, 3), 2j]
    value.append(value)
    (read,) = sent(program, checker, value)
    assert read[0] is read[1] and read[-1] is read
    assert repr(read[:-1]) == repr(value[:-1])
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert isinstance(sent(program, checker, deep)[0], list)


def test_a_container_is_shared_while_both_processes_hold_it():
    checker, program = pair_of_peers()
    kept, passing = [1, [2]], [3]
    (theirs, _) = sent(program, checker, kept, passing)
    kept[1].append(kept)
    assert sent(program, checker) == [] and theirs[1] == [2, theirs]  # a change comes with the next message
    theirs.clear()
    assert sent(checker, program, theirs)[0] is kept and kept == []
    del passing, theirs, _
    for _ in range(2):
        sent(checker, program)
        sent(program, checker)
    assert checker.wire.shared.size() == program.wire.shared.size() == 0


def test_a_value_that_is_too_large_is_not_shared():
    checker, program = pair_of_peers()
    value = [["x" * (17 << 20)]]
    with pytest.raises(ValueError, match="more than 16 MiB"):
        program.wire.write("value", value)
    value[0][0] = "x"
    assert sent(program, checker, value) == [[["x"]]]


MESSAGES = [
    "[0]", "[[0], []]", '[[0], [["exit"]]]', '[[0], [["tuple", [0]]]]', '[[0], [["own", 0]]]', '[[0], [["shared", 9]]]',
    '[[0], [["builtin", "eval"]]]', '[[0], [["library", "os", "system"]]]', '[[0], [["library", "statistics", "sys"]]]',
    '[[0], [["new", "subprocess.run", "ls"]]]', '[[0], [["exception", 1, "E", [1]], ["builtin", "int"]]]',
    '[[0], [["exception", 1, "", [1]], ["builtin", "ValueError"]]]', '[[0], [["set", 0, [1]], ["list", 1]]]',
    '[[0], [["int", "x"]]]', '[[0], [["int", 5]]]', '[[0], [["list", -1]]]', '[[0], [["list", true]]]',
    '[[0], [["tuple", [1], [2]], ["list", 0], ["list", 0]]]', "[{}, []]", '[[0], [["tuple", {}]]]', '[[0], [{}]]',
    '[[0], [["list", 0, 1]]]', '[[-1], [["tuple"]]]', '[[true], [["tuple"], ["tuple"]]]', '[[1e999], [["tuple"]]]',
    '[[0], [["remote", -1, "object", false]]]', '[[0], [["remote", 1e300, "object", false]]]',
    '[[0], [["remote", 1, ["object"], false]]]', '[[0], [["new", "decimal.Decimal", "x"]]]',
    '[[0], [["new", "decimal.Decimal", [1]], ["remote", 1, "object", false]]]', '[[0], [["complex", "1", 2]]]',
    '[[0], [["new", "datetime.datetime", 1]]]', '[[0], [["dict", 0, 1]]]', '[[0], [["dict", 0, [0], 1]]]',
    '[[0], [["defaultdict", 0, "eval"]]]', '[[0], [["defaultdict", 0, [1]], ["builtin", "eval"]]]',
    '[[0], [["same", [0]]]]', '[[0], [["deque", 0, -5]]]', '[[0], [["same", [1]], ["frozenset", [0]]]]',
]  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        b"", b"[", b"1", b"[" * 100_000, b"\xff", b'["value", [], [], [0], [["tuple"]]', b'["value", [], [], 1, []]',
        b'["value", [0], [], [0], [["tuple"]]]', b'["value", [], [[0, 1]], [0], [["tuple"]]]', b"[[], [], [], 1, []]",
        b'["value", [], [["x"]], [0], [["tuple"]]]', b'["value", 5, [], [0], [["tuple"]]]', b"9" * 5000,
        *(f'["value", [], [], {message[1:]}'.encode() for message in MESSAGES),
    ],
)  # fmt: skip
def test_messages_that_break_the_protocol_are_refused(message):
    checker, _ = pair_of_peers()
    with pytest.raises(Unreadable):
        checker.wire.read(message, checker.begin)


def test_values_of_functions():
    """Nodes are dicts of their attributes, iterators are listed up to a bound, NaN equals NaN."""
    code = f"{NODES}\nimport itertools\nF = {{}}\ndef f(x): return eval(x)"
    pairs = {
        '"Node(1, Node(2))"': {"value": 1, "next": {"value": 2, "next": None}},
        '"(i for i in range(3))"': [0, 1, 2],
        "\"float('nan')\"": math.nan,
        '"itertools.repeat(1)"': [1],
    }
    cases = {"fn_name": "f", "inputs": list(pairs), "outputs": list(pairs.values())}
    assert check_correctness(cases, code)[0] == [True, True, True, -2]


def test_an_object_that_the_program_returned_answers_no_question_about_a_plain_value():
    """Not even if it is of a class that the test names."""
    code = """
class Solution:
    def f(self, x): return self
    push = f
    startswith = __contains__ = lambda self, word: True
    pop = lambda self: 2
"""
    tests = ["assert Solution().f(1).startswith('a')", "assert 'a' in Solution().f(1)"]
    assert verdicts(code, tests) == ["refused"] * 2
    allowed = [
        "assert Solution().startswith('a') and 'a' in Solution()",
        "assert Solution().push(1).push(2).pop() == 2",
    ]
    assert verdicts(code, allowed) == ["success"] * 2
