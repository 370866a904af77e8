"""Hide secrets in a run's output: values whose key names a secret, secrets of the environment, and texts by shape."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, overload

from verl.utils import envs
from verl.utils.json_types import Json

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
    r"|(?<=://)[^\s/:@]*:[^\s/]+(?=@)"  # user and password in a URL
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
_SECRET_VARIABLE = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|AUTH", re.IGNORECASE)
_PLAIN_VARIABLE = re.compile("TOKENIZERS_PARALLELISM|AUTHOR|AUTH_MODE|AUTH_SOCK|XAUTHORITY|KEYBOARD", re.IGNORECASE)
"""Variables whose names only sound secret."""
_LEAST_VALUE = 6
"""Characters of the shortest value of the environment that is looked for: shorter ones are words of other texts."""
_REFERENCE = re.compile(r"\$\{oc\.env:\w+\}")
_OVERRIDE = re.compile(r"[+~]*(?P<key>[\w.@/-]+)=")
_ASSIGNMENT = re.compile(
    r"(?P<key>[A-Za-z_][\w.]*)(?P<sign>['\"]?\s*[=:]\s*['\"]?)(?P<value>(?!\$\{oc\.env:)[^\s'\",;&{}\[\]()]+)"
)


def names_secret(key: str, in_environment: bool = False) -> bool:
    """Whether the value of a key, of a configuration or of the environment, is secret."""
    name = key.rpartition(".")[2]
    if _OF_TOKENIZER.search(name):
        return False
    return bool((_IN_ENVIRONMENT if in_environment or name.isupper() else _IN_CONFIG).search(name))


class MaskedError(Exception):
    """An exception whose message shows no secret; a second base class of errors that name an address."""

    def __init__(self, message: str) -> None:
        super().__init__(masked_text(message))


@overload
def masked(tree: Mapping[str, Json], key: str = "", in_environment: bool = False) -> dict[str, Json]: ...


@overload
def masked(tree: Json, key: str = "", in_environment: bool = False) -> Json: ...


def masked(tree: Json, key: str = "", in_environment: bool = False) -> Json:
    """Return a copy of plain mappings and lists without secrets; ``key`` is the dotted key of the tree.

    ``***`` takes the place of secrets, and ``${oc.env:NAME}`` that of the value of a secret variable of this process.
    """
    return _Hider().masked(tree, key, in_environment)


def masked_text(text: str) -> str:
    """Return a text without secrets, such as in ``HF_TOKEN=...``; see ``masked``."""
    return _Hider().masked_text(text)


class _Hider:
    """Hides secrets; ``variables`` are the values of secret variables and their names, the longest value first."""

    def __init__(self) -> None:
        found = {
            value: name
            for name, value in envs.mapping().items()
            if len(value) >= _LEAST_VALUE and _SECRET_VARIABLE.search(name) and not _PLAIN_VARIABLE.search(name)
        }
        self.variables = sorted(found.items(), key=lambda item: len(item[0]), reverse=True)

    def masked(self, tree: Json, key: str, in_environment: bool) -> Json:
        if isinstance(tree, Mapping):
            inside = in_environment or key == ENVIRONMENT
            return {name: self.masked(value, str(name), inside) for name, value in tree.items()}
        if isinstance(tree, list | tuple):
            return [self.masked(value, key, in_environment) for value in tree]
        if not isinstance(tree, str) or not tree:
            return tree
        text = self._without_variables(tree)
        if names_secret(key, in_environment) or (in_environment and _RANDOM.fullmatch(text)):
            return text if _REFERENCE.fullmatch(text) else MASK
        override = _OVERRIDE.match(text)
        if override is None:
            return _SHAPES.sub(MASK, text)
        if names_secret(override["key"], f".{ENVIRONMENT}." in override["key"]):
            rest = text[override.end() :]
            return text if _REFERENCE.fullmatch(rest) else f"{override.group()}{MASK}"  # a secret may hold anything
        return self.masked_text(text)

    def masked_text(self, text: str) -> str:
        return _ASSIGNMENT.sub(_masked_assignment, _SHAPES.sub(MASK, self._without_variables(text)))

    def _without_variables(self, text: str) -> str:
        for value, name in self.variables:
            text = text.replace(value, f"${{oc.env:{name}}}")
        return text


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
    elif hidden == MASK or (hidden != tree and isinstance(hidden, str) and _REFERENCE.fullmatch(hidden)):
        yield tree
