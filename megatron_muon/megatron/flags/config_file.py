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
script reads it. `$$` stands for a dollar sign. Nothing here knows which flags exist, except `check_flags` and
`nearest_flag`, which are given a parser's.

A file may rest on others, named relative to it:

    BASE: [model.yaml, optimizer.yaml]
    MODEL_ARGS:
      --lr: 2e-3                       # instead of the bases'
      --clip-grad: null                # takes the bases' away

Bases count in their order, the file itself last; ENV_VARS and MODEL_ARGS are merged key by key. A placeholder matters
only where its value is used, so one of an overridden flag may stay unset.
"""

import argparse
import itertools
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import yaml

from megatron_muon.errors import UserError
from megatron_muon.suggest import did_you_mean

ENV_KEY, ARGS_KEY, BASE_KEY = "ENV_VARS", "MODEL_ARGS", "BASE"

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

_PLACEHOLDER = re.compile(r"\$(?:(\$)|\{([^}]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
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
        files: All files read, bases before those that rest on them.
        origins: The file that each flag stands in.
        overridden: Flags that the file has and that were left out of `flags` because the user gives or unsets them.
    """

    path: Path
    env: Mapping[str, str]
    flags: tuple[tuple[str, tuple[str, ...]], ...]
    ignored: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    origins: Mapping[str, Path] = field(default_factory=dict)
    overridden: frozenset[str] = frozenset()

    @property
    def argv(self) -> tuple[str, ...]:
        """The flags as a command line."""
        return tuple(as_argv(self.flags))


@dataclass(frozen=True)
class AppliedEnv:
    """What `apply_env` did: variables that it set, and variables that kept the value they had."""

    applied: Mapping[str, str]
    kept: Mapping[str, str]


def load_config(
    path: str | Path, environ: Mapping[str, str] | None = None, *, overridden: Container[str] = ()
) -> ExperimentConfig:
    """Reads an experiment file and the files that it rests on.

    Args:
        path: The YAML file.
        environ: Where `${NAME}` and `$NAME` are looked up; `os.environ` by default.
        overridden: Flags to leave out because the user gives them otherwise; their placeholders may stay unset.

    Raises:
        UserError: A file is missing or no YAML, has unknown or duplicate keys, a key that is not a flag, a
            value that is neither a scalar nor a list of scalars, or a placeholder that the environment lacks;
            or files rest on each other.
    """
    path = Path(path)
    environ = os.environ if environ is None else environ
    found = _Found()
    _collect(path, (), found)
    if not found.has_args:
        raise UserError(f"{path}: has no {ARGS_KEY}; the flags of the run belong there, such as '--num-layers: 12'")
    missing: dict[str, list[str]] = {}
    env = {}
    for key, (file, node) in found.env.items():
        if not isinstance(node, yaml.ScalarNode):
            raise UserError(f"{_at(file, node)}: {ENV_KEY} {key} must be a string or a number")
        if not _is_null(node):
            env[key] = _expanded(file, key, node, environ, missing)
    flags = []
    for key, (file, node) in found.flags.items():
        if key in overridden:
            continue
        values = _values(file, key, node, environ, missing)
        if values is not None:
            flags.append((key, values))
    if missing:
        _refuse_missing(missing)
    return ExperimentConfig(
        path=path,
        env=env,
        flags=tuple(flags),
        ignored=tuple(found.ignored),
        files=tuple(found.files),
        origins={flag: found.flags[flag][0] for flag, _ in flags},
        overridden=frozenset(flag for flag in found.flags if flag in overridden),
    )


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
    known = [*(flag for flag, _ in config.flags), *config.overridden]
    tokens = iter(user_argv)
    for token in tokens:
        if token != UNSET_FLAG and not token.startswith(UNSET_FLAG + "="):
            rest.append(token)
            continue
        name = token[len(UNSET_FLAG) + 1 :] if "=" in token else next(tokens, "")
        flag = "--" + name.lstrip("-")
        if flag not in known:
            raise UserError(f"{UNSET_FLAG} {name}: {config.path} does not set {flag}{did_you_mean(flag, known)}")
        unset.add(flag)
    return [*as_argv(item for item in config.flags if item[0] not in unset), *rest]


def check_flags(config: ExperimentConfig, parser: argparse.ArgumentParser, *, software: str = "") -> None:
    """Refuses flags that `parser` does not have, and values where the flag takes none or the reverse.

    Args:
        config: The file.
        parser: What knows the flags.
        software: Whose flags they are, such as "megatron-core 0.19.2", for the message.

    Raises:
        UserError: Names the file, the flag, and the nearest flag that exists.
    """
    actions = parser._option_string_actions
    unknown = [flag for flag, _ in config.flags if flag not in actions]
    if unknown:
        hint = did_you_mean(unknown[0], actions) if len(unknown) == 1 else ""
        whose = f"{software} does not know " if software else "unknown flag" + "s" * (len(unknown) > 1) + " "
        remedy = hint or (f"; leave out what is not needed with {UNSET_FLAG} FLAG" if software else "")
        raise UserError(f"{config.origins.get(unknown[0], config.path)}: {whose}{', '.join(unknown)}{remedy}")
    for flag, values in config.flags:
        file = config.origins.get(flag, config.path)
        takes = actions[flag].nargs
        if takes == 0 and values:
            given = " ".join(values)
            raise UserError(f"{file}: {flag} takes no value, found {given!r}; write '{flag}: true' or leave it out")
        if takes in (None, "+") and not values:
            raise UserError(f"{file}: {flag} needs a value, found true or an empty list")


def given_flags(user_argv: Sequence[str]) -> frozenset[str]:
    """The flags that a command line gives or, with `--unset`, takes back."""
    flags = {token.partition("=")[0] for token in user_argv if token.startswith("--")}
    for token, following in itertools.pairwise([*user_argv, ""]):
        if token == UNSET_FLAG or token.startswith(UNSET_FLAG + "="):
            flags.add("--" + (following if token == UNSET_FLAG else token.partition("=")[2]).lstrip("-"))
    return frozenset(flags)


def apply_env(config: ExperimentConfig, environ: MutableMapping[str, str]) -> AppliedEnv:
    """Sets the file's variables in `environ`, except those that the user has set already.

    Returns:
        Those applied, and those kept with the value that they had.
    """
    kept = {name: environ[name] for name in config.env if name in environ}
    applied = {name: value for name, value in config.env.items() if name not in kept}
    environ.update(applied)
    return AppliedEnv(applied=applied, kept=kept)


@dataclass
class _Found:
    """What a file and its bases say so far: values by key with the file that they stand in, as nodes."""

    env: dict[str, tuple[Path, yaml.Node]] = field(default_factory=dict)
    flags: dict[str, tuple[Path, yaml.Node]] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)
    files: dict[Path, None] = field(default_factory=dict)
    has_args: bool = False


def _collect(path: Path, above: tuple[Path, ...], found: _Found) -> None:
    """Adds a file to `found`, its bases first. `above` are the files that led here."""
    if path.resolve() in [file.resolve() for file in above]:
        ring = " -> ".join(str(file) for file in (*above, path))
        raise UserError(f"{above[-1]}: {BASE_KEY} goes round in a circle: {ring}; take one of them out")
    sections = _sections(path, above)
    for base in _bases(path, sections.get(BASE_KEY)):
        _collect(base, (*above, path), found)
    found.files[path] = None
    for key, value in _items(path, ENV_KEY, sections.get(ENV_KEY)):
        if not _NAME.match(key):
            raise UserError(f"{_at(path, value)}: {ENV_KEY} key {key!r} is no name of an environment variable")
        found.env[key] = (path, value)
    for key, value in _items(path, ARGS_KEY, sections.get(ARGS_KEY)) if ARGS_KEY in sections else ():
        if not key.startswith("--"):
            raise UserError(f"{_at(path, value)}: {ARGS_KEY} key {key!r} is not a flag; write '--{key.lstrip('-')}:'")
        found.flags.pop(key, None)  # an overriding flag takes its place behind the bases', as on a command line
        found.flags[key] = (path, value)
    found.has_args |= ARGS_KEY in sections
    found.ignored |= dict.fromkeys(key for key in sections if key not in (ENV_KEY, ARGS_KEY, BASE_KEY))


def _bases(path: Path, node: yaml.Node | None) -> list[Path]:
    """The files that BASE names."""
    if node is None or (isinstance(node, yaml.ScalarNode) and _is_null(node)):
        return []
    items = node.value if isinstance(node, yaml.SequenceNode) else [node]
    for item in items:
        if not isinstance(item, yaml.ScalarNode) or not item.value:
            raise UserError(f"{_at(path, node)}: {BASE_KEY} must be a file or a list of files, such as 'model.yaml'")
    return [path.parent / item.value for item in items]


def _sections(path: Path, above: tuple[Path, ...] = ()) -> dict[str, yaml.Node]:
    """Returns the top-level values by key, as nodes: these keep the spelling and duplicate keys."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        where = f", the {BASE_KEY} of {above[-1]}" if above else ""
        raise UserError(f"cannot read configuration {str(path)!r}{where}: {reason}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply; a file holds {ENV_KEY} and {ARGS_KEY} with their keys") from None
    sections = {}
    known = {ENV_KEY, ARGS_KEY, BASE_KEY} | UPSTREAM_TEST_KEYS
    for key, value in _items(path, "the file", root):
        if key not in known and not _OTHER_RUN.match(key):
            hint = did_you_mean(key, (ENV_KEY, ARGS_KEY, BASE_KEY)) or f"; a file holds {ENV_KEY} and {ARGS_KEY}"
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


def _values(
    path: Path, flag: str, node: yaml.Node, environ: Mapping[str, str], missing: dict[str, list[str]]
) -> tuple[str, ...] | None:
    """Returns a flag's values; none for a bare flag, None for a flag that is to be left out."""
    if isinstance(node, yaml.SequenceNode):
        values: list[str] = []
        for item in node.value:
            if not isinstance(item, yaml.ScalarNode):
                raise UserError(f"{_at(path, item)}: {flag} holds a list or mapping within its list")
            text = _expanded(path, flag, item, environ, missing)
            values += text.split() if item.style is None else [text]  # [384 384 976] without commas, as upstream
        return tuple(values)
    if not isinstance(node, yaml.ScalarNode):
        raise UserError(f"{_at(path, node)}: {flag} must be a value or a list, not a mapping")
    if _is_null(node):
        return None
    text = _expanded(path, flag, node, environ, missing)
    if text.lower() in ("true", "false"):
        return () if text.lower() == "true" else None
    bracketed = _BRACKETED.match(text)
    return tuple(bracketed[1].split()) if bracketed else (text,)


def _expanded(
    path: Path, key: str, node: yaml.ScalarNode, environ: Mapping[str, str], missing: dict[str, list[str]]
) -> str:
    """Returns the scalar as written, with `${NAME}` and `$NAME` replaced, as envsubst does for upstream.

    A name that the environment lacks is added to `missing`, with the place that needs it.
    """

    def replace(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name: str = match[2] if match[2] is not None else match[3]
        if not _NAME.match(name):
            raise UserError(f"{_at(path, node)}: {key}: {match[0]} is no placeholder; write ${{NAME}}")
        if name not in environ:
            missing.setdefault(name, []).append(f"{_at(path, node)}: {key}")
            return ""
        return environ[name]

    return _PLACEHOLDER.sub(replace, node.value)


def _refuse_missing(missing: Mapping[str, list[str]]) -> NoReturn:
    name, places = next(iter(missing.items()))
    key = places[0].rpartition(" ")[2]
    others = f" (so are {', '.join(list(missing)[1:])})" if len(missing) > 1 else ""
    raise UserError(
        f"{places[0]} needs the environment variable {name}, which is not set{others}; "
        f"type 'export {name}=...' first, or give {key} on the command line"
    )


def _is_null(node: yaml.ScalarNode) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def as_argv(flags: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
    """Flags with their values as a command line."""
    for flag, values in flags:
        if len(values) == 1 and values[0].startswith("-"):
            yield f"{flag}={values[0]}"  # by itself, argparse would take it for a flag
        else:
            yield flag
            yield from values


def _at(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"
