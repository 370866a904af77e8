"""Helpers on plain values, addresses, ports and imports."""

import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl.single_controller.base.decorator import Dispatch
from verl.utils.import_utils import deprecated, import_external_libs, installed_file, load_extern_type
from verl.utils.net_utils import get_free_port, is_ipv4, is_ipv6
from verl.utils.py_functional import (
    DynamicEnum,
    NestedNamespace,
    append_to_dict,
    convert_to_regular_types,
    deep_equal,
    temp_env_var,
    timeout_limit,
    union_two_dict,
)


@pytest.mark.parametrize(
    "a, b, equal",
    [
        ({"a": [1, (2, 3)]}, {"a": [1, (2, 3)]}, True),
        ([1, 2], (1, 2), False),
        (np.array([1, 2]), np.array([1, 2], dtype=np.int32), False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (float("nan"), float("nan"), True),
        ({"a": np.zeros(2)}, {"a": np.ones(2)}, False),
        (None, 0, False),
    ],
)
def test_deep_equal(a: object, b: object, equal: bool) -> None:
    assert deep_equal(a, b) is equal


def test_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert union_two_dict({"a": 1}, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(AssertionError, match="'a'"):
        union_two_dict({"a": 1}, {"a": 2})
    data: dict[str, list[int]] = {"x": [1]}
    append_to_dict(data, {"x": 2, "y": [3, 4]})
    append_to_dict(data, {"x": 5}, prefix="p/")
    assert data == {"x": [1, 2], "y": [3, 4], "p/x": [5]}
    assert NestedNamespace({"a": {"b": 1}}, c=2).a.b == 1
    plain = convert_to_regular_types({"a": OmegaConf.create({"b": [1, {"c": 2}]})})
    assert plain == {"a": {"b": [1, {"c": 2}]}} and type(plain["a"]["b"]) is list
    monkeypatch.setenv("VERL_TEST_KEY", "before")
    with temp_env_var("VERL_TEST_KEY", "inside"):
        assert os.environ["VERL_TEST_KEY"] == "inside"
    assert os.environ["VERL_TEST_KEY"] == "before"


@pytest.mark.parametrize("use_signals", [True, False])
def test_timeout_limit(use_signals: bool) -> None:
    limit = timeout_limit(0.3, use_signals)
    assert limit(lambda x: x + 1)(1) == 2
    with pytest.raises(TimeoutError, match="longer than 0.3 s"):
        limit(time.sleep)(1) if use_signals else limit(lambda: time.sleep(1))()
    with pytest.raises(ZeroDivisionError):
        limit(lambda: 1 / 0)()


def test_dynamic_enum() -> None:
    class Color(DynamicEnum):
        pass

    red = Color.register("red")
    assert Color["RED"] is red and Color.from_name("Red") is red and list(Color) == [red] and Color.RED is red
    with pytest.raises(ValueError, match="already registered"):
        Color.register("RED")
    assert Color.remove("red") is red and len(Color) == 0 and Color.from_name("red") is None
    assert pickle.loads(pickle.dumps(Dispatch.DP_COMPUTE)) is Dispatch.DP_COMPUTE


def test_addresses_and_ports() -> None:
    assert is_ipv4("10.0.0.1") and not is_ipv4("::1") and is_ipv6("::1") and not is_ipv6("10.0.0.1")
    ports = {get_free_port() for _ in range(20)}
    assert len(ports) == 20
    for port in ports:
        with socket.socket() as server:
            server.bind(("", port))


def test_ports_of_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    first = get_free_port()
    monkeypatch.setenv("VERL_PORT_RANGE", f"{first + 1}-{first + 40}")
    assert get_free_port() in range(first + 1, first + 41)
    monkeypatch.setenv("VERL_PORT_RANGE", f"{first}-{first}")  # it has been given
    with pytest.raises(RuntimeError, match=f"no free port among 1 tried in {first}-{first}"):
        get_free_port()
    for wrong in ("20000", "20100-20000", "80-90", "20000-70000", "a-b"):
        monkeypatch.setenv("VERL_PORT_RANGE", wrong)
        with pytest.raises(ValueError, match=f"VERL_PORT_RANGE='{wrong}' must be FIRST-LAST, in 1024 to 65535"):
            get_free_port()


def test_the_source_of_an_installed_module_is_found_without_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outer_of_mine" / "inner").mkdir(parents=True)
    for file in ("outer_of_mine/__init__.py", "outer_of_mine/inner/score.py"):  # the folder between has none
        (tmp_path / file).write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_file("pkg://outer_of_mine.inner.score") == tmp_path / "outer_of_mine/inner/score.py"
    assert installed_file("pkg://outer_of_mine/inner/score") == tmp_path / "outer_of_mine/inner/score.py"
    assert installed_file("pkg://outer_of_mine") == tmp_path / "outer_of_mine/__init__.py"
    for absent in ("outer_of_mine.inner", "outer_of_mine.absent", "absent", ".absent", "math"):
        assert installed_file(f"pkg://{absent}") is None


def test_load_extern_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "mine.py"
    file.write_text("count = 0\ncount += 1\ndef score():\n    return 7\n")
    for path in (str(file), f"file://{file}", "~/mine.py"):
        assert load_extern_type(path, "score")() == 7
    assert load_extern_type(None, "score") is None
    assert load_extern_type("pkg://json", "loads")("1") == 1
    with pytest.raises(FileNotFoundError, match="absent.py"):
        load_extern_type(str(tmp_path / "absent.py"), "score")
    with pytest.raises(AttributeError, match="score"):
        load_extern_type(str(file), "missing")
    file2 = tmp_path / "broken.py"
    file2.write_text("1 / 0")
    with pytest.raises(RuntimeError, match=r"broken.py.*ZeroDivisionError"):
        load_extern_type(str(file2), "score")
    with pytest.raises(ImportError, match="no_such_library"):
        import_external_libs("no_such_library")


def test_deprecated_warns() -> None:
    with pytest.warns(FutureWarning, match="use other"):
        assert deprecated("other")(lambda: 3)() == 3


def test_import_is_light_and_loads_external_modules(tmp_path: Path) -> None:
    (tmp_path / "my_extension.py").write_text("")
    code = (
        "import sys, verl; print(verl.__version__, *(name in sys.modules for name in ('torch', 'ray', 'my_extension')))"
    )
    env = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}", "VERL_USE_EXTERNAL_MODULES": "my_extension"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.split()[1:] == ["False", "False", "True"]
