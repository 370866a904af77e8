# ruff: noqa: E501 (a short task reads as a row of a table)
"""Tasks of the corpus: what is to be written, a right and a wrong solution, and inputs or tests."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Function:
    """A function of plain values: its signature, two bodies, and arguments to call it with."""

    signature: str
    right: str
    wrong: str
    arguments: list[tuple[Any, ...]]

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return self.signature.split("(")[0]


@dataclass(frozen=True)
class Tested:
    """A right program, a piece of it and the slip in its place, and the tests that decide; each test is a case."""

    shape: str
    right: str
    piece: str
    slip: str
    tests: list[str]

    @property
    def wrong(self) -> str:
        """Return the program with the slip."""
        return self.right.replace(self.piece, self.slip)


# fmt: off
FUNCTIONS = [
    Function("clamp(xs, low, high)", "return [min(max(x, low), high) for x in xs]", "return [max(x, low) for x in xs]", [([1, 5, 9], 2, 6), ([], 0, 1), ([-3], -1, 1)]),
    Function("count_vowels(text)", "return sum(letter in 'aeiou' for letter in text.lower())", "return sum(letter in 'aeiou' for letter in text)", [("Apple",), ("rhythm",), ("OUI",)]),
    Function("second_largest(xs)", "return sorted(set(xs))[-2]", "return sorted(xs)[-2]", [([3, 1, 3],), ([1, 2],), ([5, 5, 4, 5],)]),
    Function("rotate(xs, k)", """
k %= len(xs)
return xs[len(xs) - k:] + xs[:len(xs) - k]
""", "return xs[k:] + xs[:k]", [([1, 2, 3, 4], 1), ([1, 2, 3], 5), ([7], 0)]),
    Function("run_lengths(text)", """
from itertools import groupby
return [[letter, len(list(group))] for letter, group in groupby(text)]
""", "return [[letter, text.count(letter)] for letter in dict.fromkeys(text)]", [("aabca",), ("",), ("zzz",)]),
    Function("digit_sum(n)", "return sum(map(int, str(abs(n))))", "return abs(n) % 9", [(99,), (-123,), (0,)]),
    Function("reads_both_ways(text)", """
letters = [each.lower() for each in text if each.isalpha()]
return letters == letters[::-1]
""", "return text == text[::-1]", [("Never odd or even",), ("abc",), ("",)]),
    Function("merge_counts(one, other)", "return {key: one.get(key, 0) + other.get(key, 0) for key in [*one, *other]}", "return {**one, **other}", [({"a": 1}, {"a": 2, "b": 3}), ({}, {}), ({"x": 1}, {})]),
    Function("transpose(rows)", "return [list(column) for column in zip(*rows)]", "return [row[::-1] for row in rows]", [([[1, 2], [3, 4]],), ([[1, 2, 3]],), ([],)]),
    Function("to_base_two(n)", "return format(n, 'b')", "return bin(n)", [(5,), (0,), (1023,)]),
    Function("common_divisor(xs)", """
from math import gcd
best = 0
for x in xs:
    best = gcd(best, x)
return best
""", "return min(xs)", [([12, 18],), ([7],), ([5, 9, 10],)]),
    Function("primes_below(n)", "return [p for p in range(2, n) if all(p % d for d in range(2, int(p ** 0.5) + 1))]", "return [p for p in range(2, n) if all(p % d for d in range(2, int(p ** 0.5)))]", [(20,), (2,), (50,)]),
    Function("flatten(nested)", """
out = []
for each in nested:
    out += flatten(each) if isinstance(each, list) else [each]
return out
""", """
out = []
for each in nested:
    out += each if isinstance(each, list) else [each]
return out
""", [([1, [2, [3, []]]],), ([],), ([[[[4]]]],)]),
    Function("word_lengths(text)", "return {word: len(word) for word in text.split()}", "return {word: len(text) for word in text.split()}", [("to be or",), ("",), ("alone here",)]),
    Function("common_prefix(words)", """
import os
return os.path.commonprefix(words)
""", "return min(words, key=len)", [(["flow", "flower", "flood"],), (["a"],), (["x", "y"],)]),
    Function("balanced(text)", """
depth = 0
for each in text:
    depth += {'(': 1, ')': -1}.get(each, 0)
    if depth < 0:
        return False
return depth == 0
""", "return text.count('(') == text.count(')')", [("(()())",), (")(",), ("a(b",)]),
    Function("best_gain(prices)", """
best, low = 0, float('inf')
for price in prices:
    low = min(low, price)
    best = max(best, price - low)
return best
""", "return max(prices) - min(prices)", [([5, 1, 4],), ([3, 2, 1],), ([1, 9],)]),
    Function("roman(n)", """
out = ''
for value, sign in [(10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I')]:
    while n >= value:
        out += sign
        n -= value
return out
""", """
out = ''
for value, sign in [(10, 'X'), (5, 'V'), (1, 'I')]:
    while n >= value:
        out += sign
        n -= value
return out
""", [(9,), (14,), (3,)]),
    Function("fibonacci(n)", """
a, b = 0, 1
for _ in range(n):
    a, b = b, a + b
return a
""", """
a, b = 0, 1
for _ in range(n):
    a, b = b, a + b
return b
""", [(0,), (10,), (90,)]),
    Function("without_repeats(xs)", "return list(dict.fromkeys(xs))", "return sorted(set(xs))", [([3, 1, 3, 2],), ([],), ([2, 1],)]),
    Function("chunks(xs, n)", "return [xs[i:i + n] for i in range(0, len(xs), n)]", "return [xs[i:i + n] for i in range(0, len(xs) - n + 1, n)]", [([1, 2, 3, 4, 5], 2), ([], 3), ([1], 4)]),
    Function("shift_letters(text, k)", "return ''.join(chr((ord(c) - 97 + k) % 26 + 97) if c.islower() else c for c in text)", "return ''.join(chr(ord(c) + k) if c.islower() else c for c in text)", [("xyz", 3), ("a b", 1), ("Z", 5)]),
    Function("median(xs)", """
xs = sorted(xs)
half = len(xs) // 2
return xs[half] if len(xs) % 2 else (xs[half - 1] + xs[half]) / 2
""", "return sorted(xs)[len(xs) // 2]", [([3, 1, 2],), ([4, 1, 3, 2],), ([0.5, 1.0],)]),
    Function("even_squares(xs)", "return sum(x * x for x in xs if x % 2 == 0)", "return sum(x * x for x in xs)", [([1, 2, 3, 4],), ([],), ([-2],)]),
    Function("halving_steps(n)", """
steps = 0
while n != 1:
    n = n // 2 if n % 2 == 0 else 3 * n + 1
    steps += 1
return steps
""", """
steps = 0
while n > 1:
    n //= 2
    steps += 1
return steps
""", [(6,), (1,), (27,)]),
    Function("capitals(text)", "return ' '.join(word[:1].upper() + word[1:] for word in text.split(' '))", "return text.capitalize()", [("one two",), ("",), ("mcDonald farm",)]),
    Function("inverted(pairs)", "return {value: key for key, value in pairs.items()}", "return dict(pairs)", [({"a": "x", "b": "y"},), ({},), ({"k": "v"},)]),
    Function("pairs_of_sum(xs, total)", "return [[a, b] for i, a in enumerate(xs) for b in xs[i + 1:] if a + b == total]", "return [[a, b] for a in xs for b in xs if a + b == total]", [([1, 2, 3, 4], 5), ([1], 2), ([0, 0, 0], 0)]),
    Function("both_diagonals(grid)", """
n = len(grid)
return sum(grid[i][i] + (grid[i][-1 - i] if 2 * i != n - 1 else 0) for i in range(n))
""", "return sum(row[i] for i, row in enumerate(grid))", [([[1, 2], [3, 4]],), ([[5]],), ([[1, 0, 1], [0, 9, 0], [1, 0, 1]],)]),
    Function("longest_word(text)", "return max(text.split(), key=len)", "return max(text.split())", [("a longer word",), ("one",), ("zz yyyy x",)]),
    Function("union_of(intervals)", """
out = []
for low, high in sorted(intervals):
    if out and low <= out[-1][1]:
        out[-1][1] = max(out[-1][1], high)
    else:
        out.append([low, high])
return out
""", "return sorted(intervals)", [([[1, 3], [2, 5], [7, 8]],), ([],), ([[4, 6], [1, 9]],)]),
    Function("is_rising(xs)", "return all(a < b for a, b in zip(xs, xs[1:]))", "return sum(a < b for a, b in zip(xs, xs[1:]))", [([1, 2, 3],), ([1, 1],), ([],)]),
    Function("differences(one, other)", "return sum(a != b for a, b in zip(one, other))", "return len(set(one) ^ set(other))", [("karol", "kathr"), ("", ""), ("ab", "ba")]),
    Function("power_modulo(base, exponent, modulus)", "return pow(base, exponent, modulus)", "return base ** exponent", [(2, 10, 1000), (3, 0, 7), (10, 200, 97)]),
    Function("fewest_coins(coins, amount)", """
best = [0] + [10 ** 9] * amount
for a in range(1, amount + 1):
    for coin in coins:
        if coin <= a:
            best[a] = min(best[a], best[a - coin] + 1)
return best[amount] if best[amount] < 10 ** 9 else -1
""", """
used = 0
for coin in sorted(coins, reverse=True):
    used += amount // coin
    amount %= coin
return used if amount == 0 else -1
""", [([1, 3, 4], 6), ([2], 3), ([5, 1], 11)]),
    Function("edits(one, other)", """
row = list(range(len(other) + 1))
for i, a in enumerate(one, 1):
    last, row[0] = row[0], i
    for j, b in enumerate(other, 1):
        last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
return row[-1]
""", "return sum(a != b for a, b in zip(one, other)) + abs(len(one) - len(other))", [("kitten", "sitting"), ("abc", "xabc"), ("", "ab")]),
    Function("ways_through(rows, columns)", """
from math import comb
return comb(rows + columns - 2, rows - 1)
""", "return rows * columns", [(3, 7), (1, 1), (2, 2)]),
    Function("islands(grid)", """
grid = [list(row) for row in grid]

def sink(i, j):
    if 0 <= i < len(grid) and 0 <= j < len(grid[0]) and grid[i][j]:
        grid[i][j] = 0
        for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            sink(i + a, j + b)
        return 1
    return 0

return sum(sink(i, j) for i in range(len(grid)) for j in range(len(grid[0])))
""", "return sum(map(sum, grid))", [([[1, 1, 0], [0, 0, 1]],), ([[0]],), ([[1, 0, 1]],)]),
    Function("smallest_and_largest(xs)", "return min(xs), max(xs)", "return max(xs), min(xs)", [([3, 1, 2],), ([1],), ([-1, 5],)]),
    Function("divisors(n)", "return {d for d in range(1, n + 1) if n % d == 0}", "return {d for d in range(1, n) if n % d == 0}", [(12,), (1,), (7,)]),
]

ROOT = """
def root(x):
    if x < 0:
        raise ValueError('negative')
    return x ** 0.5
"""
NODE = """
class Node:
    def __init__(self, value, next=None):
        self.value = value
        self.next = next

"""
TREE = """
class Tree:
    def __init__(self, value, left=None, right=None):
        self.value, self.left, self.right = value, left, right

"""

TESTED = [
    Tested("mutated arguments", """
def order(xs):
    xs.sort()
""", "xs.sort()", "xs = sorted(xs)", ["""
xs = [3, 1, 2]
order(xs)
assert xs == [1, 2, 3]
"""]),
    Tested("mutated arguments", """
def drop_zeros(xs):
    xs[:] = [x for x in xs if x]
    return len(xs)
""", "xs[:] = [x for x in xs if x]\n    return len(xs)", "return len([x for x in xs if x])", ["""
xs = [0, 1, 0, 2]
assert drop_zeros(xs) == 2
assert xs == [1, 2]
"""]),
    Tested("mutated arguments", """
def count(words, into):
    for word in words:
        into[word] = into.get(word, 0) + 1
""", "into[word] = into.get(word, 0) + 1", "into[word] = 1", ["""
into = {'a': 1}
count(['a', 'b'], into)
assert into == {'a': 2, 'b': 1}
"""]),
    Tested("mutated arguments", """
def mirror(grid):
    for row in grid:
        row.reverse()
""", "for row in grid:\n        row.reverse()", "grid.reverse()", ["""
grid = [[1, 2], [3, 4]]
mirror(grid)
assert grid == [[2, 1], [4, 3]]
"""]),
    Tested("mutated arguments", """
def swap_ends(xs):
    xs[0], xs[-1] = xs[-1], xs[0]
""", "xs[0], xs[-1] = xs[-1], xs[0]", "return [xs[-1], *xs[1:-1], xs[0]]", ["""
xs = [1, 2, 3]
assert swap_ends(xs) is None and xs == [3, 2, 1]
"""]),
    Tested("mutated arguments", """
def doubled(xs):
    return [2 * x for x in xs]
""", "return [2 * x for x in xs]", "for i in range(len(xs)):\n        xs[i] *= 2\n    return xs", ["""
xs = [1, 2]
assert doubled(xs) == [2, 4]
assert xs == [1, 2]
"""]),
    Tested("mutated arguments", """
def forget(names, gone):
    names -= gone
""", "names -= gone", "names = names - gone", ["""
names = {'a', 'b'}
forget(names, {'b'})
assert names == {'a'}
"""]),
    Tested("expected exceptions", ROOT, "if x < 0:\n        raise ValueError('negative')\n    return x ** 0.5", "return abs(x) ** 0.5", ["assert root(4) == 2.0", """
try:
    root(-1)
except ValueError:
    pass
else:
    assert False
"""]),
    Tested("expected exceptions", ROOT, "raise ValueError('negative')", "raise ValueError('bad')", ["""
try:
    root(-1)
    assert False, 'no error'
except ValueError as error:
    assert 'negative' in str(error)
"""]),
    Tested("expected exceptions", """
def price(prices, name):
    return prices[name]
""", "return prices[name]", "return prices.get(name)", ["""
raised = False
try:
    price({'a': 1}, 'b')
except KeyError:
    raised = True
assert raised
"""]),
    Tested("expected exceptions", """
def ratio(a, b):
    return a / b
""", "return a / b", "return a / b if b else 0", ["assert ratio(6, 3) == 2", """
try:
    ratio(1, 0)
    assert False
except ZeroDivisionError:
    pass
"""]),
    Tested("expected exceptions", """
class TooSmall(Exception):
    pass

def need(n):
    if n < 3:
        raise TooSmall(n)
    return n
""", "if n < 3:\n        raise TooSmall(n)\n    return n", "return n", ["assert need(3) == 3", """
try:
    need(2)
except TooSmall:
    pass
else:
    raise AssertionError
"""]),
    Tested("expected exceptions", """
def join(words):
    if isinstance(words, str):
        raise TypeError('words')
    return ' '.join(words)
""", "if isinstance(words, str):\n        raise TypeError('words')\n    return ' '.join(words)", "return ' '.join(words)", ["""
def fails(*given):
    try:
        join(*given)
    except TypeError:
        return True
    return False
assert fails('ab') and not fails(['a'])
"""]),
    Tested("float tolerance", """
def mean(xs):
    return sum(xs) / len(xs)
""", "return sum(xs) / len(xs)", "return sum(xs) // len(xs)", ["assert abs(mean([0.1, 0.2]) - 0.15) < 1e-6", "assert abs(mean([1, 2]) - 1.5) < 1e-6"]),
    Tested("float tolerance", """
def area(r):
    return 3.141592653589793 * r * r
""", "return 3.141592653589793 * r * r", "return 3.14 * r * r", ["""
import math
assert math.isclose(area(2), 12.566370614359172)
"""]),
    Tested("float tolerance", """
def celsius(f):
    return (f - 32) * 5 / 9
""", "return (f - 32) * 5 / 9", "return (f - 30) / 2", ["assert round(celsius(100), 2) == 37.78", "assert round(celsius(32), 2) == 0"]),
    Tested("float tolerance", """
def shares(xs):
    return [x / sum(xs) for x in xs]
""", "return [x / sum(xs) for x in xs]", "return [round(x / sum(xs), 1) for x in xs]", ["""
expected = [1 / 3, 2 / 3]
assert all(abs(a - b) < 1e-9 for a, b in zip(shares([1, 2]), expected))
"""]),
    Tested("float tolerance", """
def distance(a, b):
    return ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5
""", "return ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5", "return abs(a[0] - b[0]) + abs(a[1] - b[1])", ["assert distance((0, 0), (3, 4)) == 5.0", "assert abs(distance((0, 0), (1, 1)) - 2 ** 0.5) <= 1e-12"]),
    Tested("NaN", """
def mean(xs):
    return sum(xs) / len(xs) if xs else float('nan')
""", "return sum(xs) / len(xs) if xs else float('nan')", "return sum(xs) / len(xs) if xs else 0.0", ["""
import math
assert math.isnan(mean([]))
""", "assert mean([1, 3]) == 2"]),
    Tested("NaN", """
def quotient(a, b):
    return a / b if b else float('nan')
""", "return a / b if b else float('nan')", "return a / b if b else None", ["""
result = quotient(1, 0)
assert result != result and isinstance(result, float)
"""]),
    Tested("NaN", """
def lowest(xs):
    return min(xs, default=float('inf'))
""", "return min(xs, default=float('inf'))", "return min(xs, default=float('-inf'))", ["assert lowest([]) == float('inf')", "assert lowest([2, 1]) == 1"]),
    Tested("NaN", """
def filled(xs, value):
    return [value if x != x else x for x in xs]
""", "return [value if x != x else x for x in xs]", "return [value if x == float('nan') else x for x in xs]", ["assert filled([1.0, float('nan')], 0.0) == [1.0, 0.0]"]),
    Tested("custom nodes", NODE + """def turned(node):
    last = None
    while node:
        node.next, last, node = last, node, node.next
    return last
""", "last = None\n    while node:\n        node.next, last, node = last, node, node.next\n    return last", "return node", ["""
node = turned(Node(1, Node(2, Node(3))))
values = []
while node:
    values.append(node.value)
    node = node.next
assert values == [3, 2, 1]
"""]),
    Tested("custom nodes", NODE + """def length(node):
    return 1 + length(node.next) if node else 0
""", "return 1 + length(node.next) if node else 0", "return 1 + length(node.next) if node.next else 0", ["assert length(Node(1, Node(2))) == 2", "assert length(None) == 0"]),
    Tested("custom nodes", TREE + """def depth(tree):
    return 1 + max(depth(tree.left), depth(tree.right)) if tree else 0
""", "return 1 + max(depth(tree.left), depth(tree.right)) if tree else 0", "return 1 + depth(tree.left) if tree else 0", ["assert depth(Tree(1, None, Tree(2, Tree(3)))) == 3", "assert depth(None) == 0"]),
    Tested("custom nodes", TREE + """def mirrored(tree):
    return tree and Tree(tree.value, mirrored(tree.right), mirrored(tree.left))
""", "return tree and Tree(tree.value, mirrored(tree.right), mirrored(tree.left))", "return tree and Tree(tree.value, tree.left, tree.right)", ["""
tree = mirrored(Tree(1, Tree(2), Tree(3)))
assert tree.left.value == 3 and tree.right.value == 2
assert tree.left.left is None
"""]),
    Tested("custom nodes", NODE + """def built(xs):
    node = None
    for x in reversed(xs):
        node = Node(x, node)
    return node
""", "for x in reversed(xs):", "for x in xs:", ["assert built([]) is None", """
node = built([4, 5])
assert (node.value, node.next.value) == (4, 5)
assert node.next.next is None
"""]),
    Tested("custom nodes", """
from collections import namedtuple
Point = namedtuple('Point', 'x y')

def moved(point, by):
    return Point(point.x + by, point.y + by)
""", "return Point(point.x + by, point.y + by)", "return Point(point.x + by, point.y)", ["""
point = moved(Point(1, 2), 3)
assert point.x == 4 and point.y == 5
"""]),
    Tested("generators", """
def down(n):
    while n:
        yield n
        n -= 1
""", "while n:", "while n >= 0:", ["assert list(down(3)) == [3, 2, 1]", "assert list(down(0)) == []"]),
    Tested("generators", """
def squares():
    n = 0
    while True:
        yield n * n
        n += 1
""", "n = 0", "n = 1", ["""
from itertools import islice
assert list(islice(squares(), 4)) == [0, 1, 4, 9]
"""]),
    Tested("generators", """
def windows(xs, n):
    for i in range(len(xs) - n + 1):
        yield tuple(xs[i:i + n])
""", "for i in range(len(xs) - n + 1):", "for i in range(len(xs)):", ["assert list(windows([1, 2, 3], 2)) == [(1, 2), (2, 3)]", "assert sum(1 for _ in windows('abcd', 3)) == 2"]),
    Tested("generators", """
def total():
    value = 0
    while True:
        value += yield value
""", "value += yield value", "value = yield value", ["""
running = total()
next(running)
running.send(2)
assert running.send(3) == 5
"""]),
    Tested("generators", """
def evens(xs):
    return (x for x in xs if x % 2 == 0)
""", "return (x for x in xs if x % 2 == 0)", "return (x for x in xs if x % 2)", ["""
even = evens([1, 2, 4])
assert next(even) == 2
assert next(even) == 4
assert next(even, None) is None
"""]),
    Tested("class designs", """
class Stack:
    def __init__(self):
        self.items = []

    def push(self, x):
        self.items.append(x)

    def pop(self):
        return self.items.pop()
""", "return self.items.pop()", "return self.items.pop(0)", ["""
stack = Stack()
stack.push(1)
stack.push(2)
assert stack.pop() == 2
assert stack.pop() == 1
"""]),
    Tested("class designs", """
class Cache:
    def __init__(self, size):
        self.size, self.kept = size, {}

    def get(self, key):
        if key not in self.kept:
            return -1
        self.kept[key] = self.kept.pop(key)
        return self.kept[key]

    def put(self, key, value):
        self.kept.pop(key, None)
        self.kept[key] = value
        if len(self.kept) > self.size:
            del self.kept[next(iter(self.kept))]
""", "if key not in self.kept:\n            return -1\n        self.kept[key] = self.kept.pop(key)\n        return self.kept[key]\n\n    def put(self, key, value):\n        self.kept.pop(key, None)", "return self.kept.get(key, -1)\n\n    def put(self, key, value):", ["""
cache = Cache(2)
cache.put(1, 1)
cache.put(2, 2)
assert cache.get(1) == 1
cache.put(3, 3)
assert cache.get(2) == -1
assert cache.get(1) == 1
"""]),
    Tested("class designs", """
class Account:
    def __init__(self):
        self.balance = 0

    def deposit(self, amount):
        self.balance += amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError('not enough')
        self.balance -= amount
""", "if amount > self.balance:\n            raise ValueError('not enough')\n        self.balance -= amount", "self.balance -= amount", ["""
account = Account()
account.deposit(5)
account.withdraw(2)
assert account.balance == 3
""", """
account = Account()
try:
    account.withdraw(1)
except ValueError:
    pass
else:
    assert False
"""]),
    Tested("class designs", """
class Vector:
    def __init__(self, *xs):
        self.xs = xs

    def __add__(self, other):
        return Vector(*(a + b for a, b in zip(self.xs, other.xs)))

    def __eq__(self, other):
        return self.xs == other.xs

    def __len__(self):
        return len(self.xs)
""", "return Vector(*(a + b for a, b in zip(self.xs, other.xs)))", "return Vector(*self.xs, *other.xs)", ["assert len(Vector(1, 2) + Vector(3, 4)) == 2", "assert (Vector(1, 2) + Vector(3, 4)).xs == (4, 6)"]),
    Tested("class designs", """
class Median:
    def __init__(self):
        self.xs = []

    def add(self, x):
        self.xs.append(x)
        self.xs.sort()

    def find(self):
        n = len(self.xs)
        return (self.xs[n // 2] + self.xs[(n - 1) // 2]) / 2
""", "        self.xs.sort()\n\n    def find(self):", "    def find(self):", ["""
median = Median()
for x in [5, 1, 2]:
    median.add(x)
assert median.find() == 2.0
"""]),
    Tested("class designs", """
class Bag:
    def __init__(self, xs):
        self.xs = list(xs)

    def __contains__(self, x):
        return x in self.xs

    def __getitem__(self, i):
        return self.xs[i]

    def __iter__(self):
        return iter(self.xs)

    def __str__(self):
        return f'Bag{self.xs}'
""", "self.xs = list(xs)", "self.xs = sorted(xs)", ["""
bag = Bag([2, 1])
assert 1 in bag and 3 not in bag
assert bag[0] == 2
""", "assert str(Bag([2, 1])) == 'Bag[2, 1]'", "assert [x + 1 for x in Bag([2, 1])] == [3, 2]"]),
    Tested("class designs", """
class Shape:
    sides = 0

    @classmethod
    def named(cls, name):
        shape = cls()
        shape.name = name
        return shape

    @property
    def label(self):
        return f'{self.name}:{self.sides}'

class Square(Shape):
    sides = 4
""", "shape = cls()", "shape = Shape()", ["assert Square.named('box').label == 'box:4'", "assert isinstance(Square.named('a'), Square)"]),
    Tested("class designs", """
class Log:
    def __init__(self):
        self.lines = []

    def __enter__(self):
        self.lines.append('in')
        return self

    def __exit__(self, *error):
        self.lines.append('out')
        return True
""", "self.lines.append('out')\n        return True", "return True", ["""
log = Log()
with log as entered:
    entered.lines.append('work')
assert log.lines == ['in', 'work', 'out']
"""]),
    Tested("changed attributes", """
class Basket:
    def __init__(self):
        self.items = []

    def total(self):
        return sum(self.items)
""", "return sum(self.items)", "return len(self.items)", ["""
basket = Basket()
basket.items.append(3)
basket.items += [4, 5]
assert basket.total() == 12
"""]),
    Tested("changed attributes", """
class Table:
    def __init__(self):
        self.cells = {}

    def read(self, name):
        return self.cells.get(name, 0)
""", "return self.cells.get(name, 0)", "return 0", ["""
table = Table()
table.cells['x'] = 1
assert table.read('x') == 1
del table.cells['x']
assert table.read('x') == 0
"""]),
    Tested("changed attributes", """
class Graph:
    def __init__(self):
        self.edges = {'a': set(), 'b': set()}

    def reached(self, start):
        found, waiting = set(), [start]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting.extend(self.edges[node])
        return found
""", "waiting.extend(self.edges[node])", "break", ["""
graph = Graph()
edges = graph.edges
edges['a'].add('b')
assert graph.reached('a') == {'a', 'b'}
edges['c'] = set()
edges['b'].add('c')
assert graph.reached('a') == {'a', 'b', 'c'}
"""]),
    Tested("changed attributes", """
class View:
    def __init__(self, xs):
        self.xs = xs

    def last(self):
        return self.xs[-1]
""", "self.xs = xs", "self.xs = list(xs)", ["""
xs = [1]
view = View(xs)
xs.append(2)
assert view.last() == 2
view.xs.append(3)
assert xs == [1, 2, 3]
"""]),
    Tested("changed attributes", """
class Ring:
    def __init__(self):
        self.xs = []

    def all(self):
        return self.xs

    def push(self, x):
        self.xs.append(x)
""", "return self.xs", "return self.xs[:]", ["""
ring = Ring()
seen = ring.all()
ring.push(1)
assert seen == [1]
seen.clear()
assert ring.all() == []
"""]),
    Tested("identity", """
class Builder:
    def __init__(self):
        self.parts = []

    def add(self, part):
        self.parts.append(part)
        return self
""", "return self", "return Builder()", ["""
builder = Builder()
assert builder.add(1) is builder
assert builder.add(2).add(3) is builder and builder is not Builder()
"""]),
    Tested("identity", """
class Leaf:
    pass

class Branch(Leaf):
    def __init__(self, leaf):
        self.leaf = leaf

def grown(leaf):
    return Branch(leaf)
""", "return Branch(leaf)", "return leaf", ["""
leaf = Leaf()
tree = grown(leaf)
assert type(tree) is Branch and type(tree).__name__ == 'Branch'
assert tree.leaf is leaf
"""]),
]
# fmt: on
