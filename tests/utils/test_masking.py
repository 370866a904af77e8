"""Secrets are recognised by name and by shape, and nothing else is."""

import pytest

from verl.tools.search_tool import RetrievalError
from verl.tools.utils.mcp_client import McpError
from verl.utils.chat_endpoint import EndpointError
from verl.utils.http_client import NoReply
from verl.utils.masking import MASK, masked, masked_text, names_secret, secrets_in
from verl.utils.sandbox.remote import RemoteSandboxError
from verl.utils.vision.images import MediaError


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_KEY_2", "PGPASS_FILE_PWD", "auth_token", "api_key"],
)
def test_names_of_secrets(name):
    assert names_secret(name, in_environment=name.isupper()) and names_secret(f"a.env_vars.{name}")


@pytest.mark.parametrize(
    "name",
    ["prompt_key", "reward_fn_key", "eos_token", "pad_token_id", "max_token_len_per_gpu", "tokenizer_path", "monkey"]
    + ["TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "PYTHONPATH", "VLLM_KEYS", "author"],
)
def test_other_names(name):
    assert not names_secret(name, in_environment=name.isupper())


@pytest.mark.parametrize(
    "text",
    [
        "hf_abcdefghijklmnopqrstuvwxyz012345",
        "sk-proj-abcdefghijklmnop1234",
        "ghp_0123456789abcdefghij0123456789abcdef",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def_123",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nxyz\n-----END RSA PRIVATE KEY-----",
        "0123456789abcdef0123456789abcdef01234567",  # only a variable of the environment may hold such a word
    ],
)
def test_shapes_of_secrets(text):
    assert masked({"env_vars": {"PLAIN": text}}) == {"env_vars": {"PLAIN": MASK}}
    if "-" in text or "_" in text or text.startswith("AKIA"):
        assert masked_text(f"it is {text}") == f"it is {MASK}"


def test_a_tree_keeps_everything_else():
    tree = {
        "trainer": {"wandb_proxy": "http://me:s3cret@proxy:80", "total_epochs": 3, "logger": ["console"]},
        "data": {"prompt_key": "prompt", "custom_chat_template": "{{ bos_token }}: {% if token = 'x' %}"},
        "ray_init": {"runtime_env": {"env_vars": {"HF_TOKEN": "abc", "NCCL_DEBUG": "WARN", "N_KEY": 3}}},
        "overrides": ["+ray_init.runtime_env.env_vars.A_KEY=x y, z", "data.prompt_key=prompt", "a={B_TOKEN: c, d: 1}"],
        "empty": {"password": "", "token": None},
    }
    hidden = masked(tree)
    assert hidden["trainer"] == {**tree["trainer"], "wandb_proxy": f"http://{MASK}@proxy:80"}
    assert hidden["data"] == tree["data"] and hidden["empty"] == tree["empty"]
    assert hidden["ray_init"]["runtime_env"]["env_vars"] == {"HF_TOKEN": MASK, "NCCL_DEBUG": "WARN", "N_KEY": 3}
    assert hidden["overrides"][0] == f"+ray_init.runtime_env.env_vars.A_KEY={MASK}"
    assert hidden["overrides"][1:] == ["data.prompt_key=prompt", f"a={{B_TOKEN: {MASK}, d: 1}}"]
    assert list(secrets_in(tree, hidden)) == ["abc"]
    assert masked_text("KeyError: 'x' at step: 3, WANDB_API_KEY='a/b+c' left") == (
        f"KeyError: 'x' at step: 3, WANDB_API_KEY='{MASK}' left"
    )


@pytest.mark.parametrize(
    "name",
    ["DB_PASSWORD", "HF_TOKEN", "MYAPIKEY", "client_secret", "GIT_CREDENTIALS", "PROXY_AUTH", "SERVICE_KEY_FILE"],
)
def test_values_of_secret_variables_are_shown_by_name(monkeypatch, name):
    value, shown = "correct horse/7", f"${{oc.env:{name}}}"
    monkeypatch.setenv(name, value)
    tree = {
        "tool": {"header": f"X-Key: {value}!", "alone": value, "api_key": value},
        "overrides": [f"a.hf_token={value}"],
    }
    hidden = masked(tree)
    assert hidden["tool"] == {"header": f"X-Key: {shown}!", "alone": shown, "api_key": shown}
    assert hidden["overrides"] == [f"a.hf_token={shown}"]
    assert {*secrets_in(tree, hidden)} == {value}
    assert masked_text(f"refused {value} of API_KEY={value}.") == f"refused {shown} of API_KEY={shown}."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("GIT_AUTHOR_NAME", "A. Smith"),
        ("PIN_TOKEN", "1234"),
        ("MY_PLACE", "/srv/data"),
    ],
)
def test_values_of_other_variables_stay(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert masked_text(f"it is {value}") == f"it is {value}" and masked({"a": value}) == {"a": value}


@pytest.mark.parametrize("user", ["me", "", "me%40x"])
@pytest.mark.parametrize("password", ["s3cret", "p@ss", "a:b", "%2F", "ß#1"])
def test_passwords_of_addresses_are_masked(user, password):
    url = f"https://{user}:{password}@host:8000/path?x=1"
    assert masked_text(f"cannot reach {url}!") == f"cannot reach https://{MASK}@host:8000/path?x=1!"
    assert masked({"url": url}) == {"url": f"https://{MASK}@host:8000/path?x=1"}


@pytest.mark.parametrize("error", [NoReply, EndpointError, RetrievalError, McpError, RemoteSandboxError, MediaError])
def test_errors_of_services_show_no_password(error):
    assert str(error("http://me:s3cret@host: no reply")) == f"http://{MASK}@host: no reply"
