"""YAML experiment files in the form of Megatron-LM's functional tests, turned into Megatron's own flags.

    ENV_VARS:
      NCCL_ALGO: Ring
    MODEL_ARGS:
      --num-layers: 12
      --bf16: true                     # a flag without a value
      --recompute-modules: [moe_act, layernorm]
      --data-path: ${DATA_PATH}/text   # from the environment

A value reaches Megatron as it is written in the file (`1e-4` stays `1e-4`); `true` gives the bare flag,
`false` and null leave the flag out. A bracketed string, `"[384 384 976]"`, is a list, as upstream's launch
script reads it. Nothing here knows which flags exist, except `check_flags`, which is given a parser.
"""

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_muon.errors import UserError

ENV_KEY, ARGS_KEY = "ENV_VARS", "MODEL_ARGS"

UPSTREAM_TEST_KEYS = frozenset(
    {
        "AFTER_SCRIPT",
        "BEFORE_SCRIPT",
        "LAUNCHER",
        "METRICS",
        "MODE",
        "MODEL_ENV_VARS",
        "TEST_EVALUATION",
        "TEST_TYPE",
        "THROUGHPUT_TEST_PARAMS",
    }
)
"""Keys that only upstream's test harness reads; accepted, and listed in `ExperimentConfig.ignored`.

Source: tests/functional_tests/shell_test_utils/{run_ci_test,_run_training}.sh and python_test_utils of
https://github.com/NVIDIA/Megatron-LM, and its test_cases/**/model_config.yaml.
"""

UNSET_FLAG = "--unset"
"""Takes a flag of the file back: `--unset bf16`. The way to undo a bare flag that has no `--no-` twin."""

_PLACEHOLDER = re.compile(r"\$(?:\{([^}]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_OTHER_RUN = re.compile(r"MODEL_ARGS_[0-9]+\Z")  # upstream's flags of a test's second run
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_BRACKETED = re.compile(r"\[([^\[\],]+)\]\Z")


@dataclass(frozen=True)
class ExperimentConfig:
    """What an experiment file says.

    Attributes:
        path: The file.
        env: Environment variables that the run wants.
        flags: (flag, its values) in the file's order; no values for a bare flag.
        ignored: Top-level keys that have no meaning here, see `UPSTREAM_TEST_KEYS`.
    """

    path: Path
    env: Mapping[str, str]
    flags: tuple[tuple[str, tuple[str, ...]], ...]
    ignored: tuple[str, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        """The flags as a command line."""
        return tuple(_as_argv(self.flags))


@dataclass(frozen=True)
class AppliedEnv:
    """What `apply_env` did: variables that it set, and variables that kept the value they had."""

    applied: Mapping[str, str]
    kept: Mapping[str, str]


def load_config(path: str | Path, environ: Mapping[str, str] | None = None) -> ExperimentConfig:
    """Reads an experiment file.

    Args:
        path: The YAML file.
        environ: Where `${NAME}` and `$NAME` are looked up; `os.environ` by default.

    Raises:
        UserError: The file is missing or no YAML, has unknown or duplicate keys, a key that is no flag, a
            value that is neither a scalar nor a list of scalars, or a placeholder that the environment lacks.
    """
    path = Path(path)
    environ = os.environ if environ is None else environ
    sections = _sections(path)
    env: dict[str, str] = {}
    for key, value in _items(path, ENV_KEY, sections.get(ENV_KEY)):
        if not _NAME.match(key):
            raise UserError(f"{_at(path, value)}: {ENV_KEY} key {key!r} is no name of an environment variable")
        if not isinstance(value, yaml.ScalarNode):
            raise UserError(f"{_at(path, value)}: {ENV_KEY} {key} must be a string or a number")
        env[key] = _expanded(path, key, value, environ)
    if ARGS_KEY not in sections:
        raise UserError(f"{path}: has no {ARGS_KEY}; the flags of the run belong there, such as '--num-layers: 12'")
    flags = []
    for key, value in _items(path, ARGS_KEY, sections[ARGS_KEY]):
        if not key.startswith("--"):
            raise UserError(f"{_at(path, value)}: {ARGS_KEY} key {key!r} is no flag; write '--{key.lstrip('-')}:'")
        values = _values(path, key, value, environ)
        if values is not None:
            flags.append((key, values))
    ignored = tuple(key for key in sections if key not in (ENV_KEY, ARGS_KEY))
    return ExperimentConfig(path=path, env=env, flags=tuple(flags), ignored=ignored)


def merge(config: ExperimentConfig, user_argv: Sequence[str]) -> list[str]:
    """Returns a command line on which the user's flags override the file's.

    The file's flags come first; argparse takes the last of a repeated flag, and of a repeated flag with
    several values the last one's values alone. A bare flag of the file is undone by its `--no-` twin where
    Megatron has one, and always by `--unset FLAG`, which works for any flag of the file and may be repeated.

    Args:
        config: The file.
        user_argv: What the user typed, without `--config`.

    Raises:
        UserError: `--unset` names nothing, or a flag that the file does not have.
    """
    rest: list[str] = []
    unset: set[str] = set()
    known = [flag for flag, _ in config.flags]
    tokens = iter(user_argv)
    for token in tokens:
        if token != UNSET_FLAG and not token.startswith(UNSET_FLAG + "="):
            rest.append(token)
            continue
        name = token[len(UNSET_FLAG) + 1 :] if "=" in token else next(tokens, "")
        flag = "--" + name.lstrip("-")
        if flag not in known:
            raise UserError(f"{UNSET_FLAG} {name}: {config.path} does not set {flag}{_did_you_mean(flag, known)}")
        unset.add(flag)
    return [*_as_argv(item for item in config.flags if item[0] not in unset), *rest]


def check_flags(config: ExperimentConfig, parser: argparse.ArgumentParser) -> None:
    """Refuses flags that `parser` does not have, and values where the flag takes none or the reverse.

    Raises:
        UserError: Names the file, the flag, and the nearest flag that exists.
    """
    actions = parser._option_string_actions
    for flag, values in config.flags:
        if flag not in actions:
            raise UserError(f"{config.path}: unknown flag {flag}{_did_you_mean(flag, actions)}")
        takes = actions[flag].nargs
        if takes == 0 and values:
            given = " ".join(values)
            raise UserError(
                f"{config.path}: {flag} takes no value, found {given!r}; write '{flag}: true' or leave it out"
            )
        if takes in (None, "+") and not values:
            raise UserError(f"{config.path}: {flag} needs a value, found true or an empty list")


def apply_env(config: ExperimentConfig, environ: MutableMapping[str, str]) -> AppliedEnv:
    """Sets the file's variables in `environ`, except those that the user has set already.

    Returns:
        Those applied, and those kept with the value that they had.
    """
    kept = {name: environ[name] for name in config.env if name in environ}
    applied = {name: value for name, value in config.env.items() if name not in kept}
    environ.update(applied)
    return AppliedEnv(applied=applied, kept=kept)


def _sections(path: Path) -> dict[str, yaml.Node]:
    """Returns the top-level values by key, as nodes: these keep the spelling and duplicate keys."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read configuration {str(path)!r}: {reason}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    sections = {}
    known = {ENV_KEY, ARGS_KEY} | UPSTREAM_TEST_KEYS
    for key, value in _items(path, "the file", root):
        if key not in known and not _OTHER_RUN.match(key):
            hint = _did_you_mean(key, (ENV_KEY, ARGS_KEY)) or f"; a file holds {ENV_KEY} and {ARGS_KEY}"
            raise UserError(f"{_at(path, value)}: unknown key {key!r}{hint}")
        sections[key] = value
    return sections


def _items(path: Path, what: str, node: yaml.Node | None) -> Iterator[tuple[str, yaml.Node]]:
    """Yields a mapping's keys and values, refusing keys that are given twice."""
    if node is None and what == ENV_KEY:
        return
    if what == ENV_KEY and isinstance(node, yaml.ScalarNode) and _is_null(node):
        return
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}: {what} must be a mapping, such as '{ARGS_KEY}:' with '--num-layers: 12' below")
    seen = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{_at(path, key)}: a key must be a plain word")
        if key.value in seen:
            raise UserError(f"{_at(path, key)}: {key.value!r} is given twice; keep one of them")
        seen.add(key.value)
        yield key.value, value


def _values(path: Path, flag: str, node: yaml.Node, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Returns a flag's values; none for a bare flag, None for a flag that is to be left out."""
    if isinstance(node, yaml.SequenceNode):
        values: list[str] = []
        for item in node.value:
            if not isinstance(item, yaml.ScalarNode):
                raise UserError(f"{_at(path, item)}: {flag} holds a list or mapping within its list")
            text = _expanded(path, flag, item, environ)
            values += text.split() if item.style is None else [text]  # [384 384 976] without commas, as upstream
        return tuple(values)
    if not isinstance(node, yaml.ScalarNode):
        raise UserError(f"{_at(path, node)}: {flag} must be a value or a list, not a mapping")
    if _is_null(node):
        return None
    text = _expanded(path, flag, node, environ)
    if text.lower() in ("true", "false"):
        return () if text.lower() == "true" else None
    bracketed = _BRACKETED.match(text)
    return tuple(bracketed[1].split()) if bracketed else (text,)


def _expanded(path: Path, key: str, node: yaml.ScalarNode, environ: Mapping[str, str]) -> str:
    """Returns the scalar as written, with `${NAME}` and `$NAME` replaced, as envsubst does for upstream."""

    def replace(match: re.Match[str]) -> str:
        name = match[1] if match[1] is not None else match[2]
        if not _NAME.match(name):
            raise UserError(f"{_at(path, node)}: {key}: {match[0]} is no placeholder; write ${{NAME}}")
        if name not in environ:
            raise UserError(
                f"{_at(path, node)}: {key} needs the environment variable {name}, which is not set; "
                f"type 'export {name}=...' first, or give {key} on the command line and remove it here"
            )
        return environ[name]

    return _PLACEHOLDER.sub(replace, node.value)


def _is_null(node: yaml.ScalarNode) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _as_argv(flags: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
    for flag, values in flags:
        if len(values) == 1 and values[0].startswith("-"):
            yield f"{flag}={values[0]}"  # by itself, argparse would take it for a flag
        else:
            yield flag
            yield from values


def _did_you_mean(wrong: str, right: Iterable[str]) -> str:
    near = difflib.get_close_matches(wrong, list(right), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _at(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"
