"""Hide secrets in what a run writes: values whose key names a secret, and texts that have the shape of one."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"
ENVIRONMENT = "env_vars"
"""Key of the mappings that hold environment variables."""

_WORDS = "TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY"
_KEYS = "API|ACCESS|SECRET|PRIVATE|AUTH|ACCOUNT|SIGNING|ENCRYPTION"
_IN_CONFIG = re.compile(rf"(?:^|_)(?:{_WORDS}|(?:{_KEYS})_KEY(?:_ID)?)$", re.IGNORECASE)
_IN_ENVIRONMENT = re.compile(rf"(?:^|_)(?:{_WORDS}|KEY|PASS|PWD|PAT|AUTH|DSN|COOKIE)(?:_|$)", re.IGNORECASE)
_OF_TOKENIZER = re.compile(r"(?:^|_)(?:eos|bos|pad|unk|sep|cls|mask|image|video|audio|stop|special)_token$", re.I)

_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<=://)[^\s/:@]*:[^\s/@]+(?=@)"  # user and password in a URL
    r"|(?<=Bearer )[\w.~+/=-]{8,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
    r"|\b(?:hf|gh[pousr]|github_pat|npm|r8|dckr_pat|wandb_v1)_[A-Za-z0-9_]{16,}"
    r"|\b(?:sk|glpat|nvapi|pypi|xox[abeprs])-[\w-]{10,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bAIza[\w-]{30,}",
    re.DOTALL,
)
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+=-]{32,}")
"""A variable of the environment that is nothing but one long random word."""
_OVERRIDE = re.compile(r"[+~]*(?P<key>[\w.@/-]+)=")
_ASSIGNMENT = re.compile(r"(?P<key>[A-Za-z_][\w.]*)(?P<sign>['\"]?\s*[=:]\s*['\"]?)(?P<value>[^\s'\",;&{}\[\]()]+)")


def names_secret(key: str, in_environment: bool = False) -> bool:
    """Whether the value of a key, of a configuration or of the environment, is secret."""
    name = key.rpartition(".")[2]
    if _OF_TOKENIZER.search(name):
        return False
    return bool((_IN_ENVIRONMENT if in_environment or name.isupper() else _IN_CONFIG).search(name))


def masked(tree: Any, key: str = "", in_environment: bool = False) -> Any:
    """Return a copy of plain mappings and lists with ``***`` in the place of secrets; ``key`` is that of the tree."""
    if isinstance(tree, Mapping):
        inside = in_environment or key == ENVIRONMENT
        return {name: masked(value, str(name), inside) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [masked(value, key, in_environment) for value in tree]
    if not isinstance(tree, str) or not tree:
        return tree
    if names_secret(key, in_environment) or (in_environment and _RANDOM.fullmatch(tree)):
        return MASK
    override = _OVERRIDE.match(tree)
    if override is None:
        return _SHAPES.sub(MASK, tree)
    if names_secret(override["key"], f".{ENVIRONMENT}." in override["key"]):
        return f"{override.group()}{MASK}"  # its value may hold any character
    return masked_text(tree)


def masked_text(text: str) -> str:
    """Return a text with ``***`` in the place of secrets, such as in ``HF_TOKEN=...``."""
    return _ASSIGNMENT.sub(_masked_assignment, _SHAPES.sub(MASK, text))


def _masked_assignment(match: re.Match[str]) -> str:
    if not names_secret(match["key"], f".{ENVIRONMENT}." in match["key"]):
        return match.group()
    return f"{match['key']}{match['sign']}{MASK}"


def secrets_in(tree: Any, hidden: Any) -> Iterator[str]:
    """Yield the texts of a tree that its masked copy hides as a whole."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from secrets_in(value, hidden[name])
    elif isinstance(tree, list | tuple):
        for value, copy in zip(tree, hidden, strict=True):
            yield from secrets_in(value, copy)
    elif hidden == MASK:
        yield tree
