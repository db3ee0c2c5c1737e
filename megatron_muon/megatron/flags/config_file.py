"""YAML experiment files in the form of Megatron-LM's functional tests, turned into Megatron's own flags.

    ENV_VARS:
      NCCL_ALGO: Ring
    MODEL_ARGS:
      --num-layers: 12
      --bf16: true                     # a flag without a value
      --recompute-modules: [moe_act, layernorm]
      --data-path: ${DATA_PATH}/text   # from the environment

A value reaches Megatron as it is written (`1e-4` stays `1e-4`); `true` gives the bare flag, `false`
and null leave the flag out. A bracketed string, `"[384 384 976]"`, is a list, as for upstream's
launch script. `$$` stands for a dollar sign. A file may rest on others, named relative to it:

    BASE: [model.yaml, optimizer.yaml]
    MODEL_ARGS:
      --lr: 2e-3                       # instead of the bases'
      --clip-grad: null                # takes the bases' away

ENV_VARS and MODEL_ARGS are merged key by key, the file itself last. Placeholders of overridden
flags may stay unset.
"""

import os
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from megatron_muon import shipped
from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.flag_names import did_you_mean

ENV_KEY, ARGS_KEY, BASE_KEY = OURS = ("ENV_VARS", "MODEL_ARGS", "BASE")

UNSET_FLAG = "--unset"
"""Takes a flag of the file back: `--unset bf16`. The way to undo a bare flag that has no `--no-` twin."""

_PLACEHOLDER = re.compile(r"\$(?:(\$)|\{([^}]*)\}|([A-Za-z_]\w*))")
_BRACKETED = re.compile(r"\[([^\[\],]+)\]\Z")


@dataclass(frozen=True)
class ExperimentConfig:
    """What an experiment file says."""

    path: Path
    env: Mapping[str, str]
    # in the file's order, with their values; none for a bare flag
    flags: tuple[tuple[str, tuple[str, ...]], ...]
    # keys without a meaning here, such as those of upstream's test harness
    ignored: tuple[str, ...]
    files: tuple[Path, ...]  # all files read, bases before those that rest on them
    origins: Mapping[str, Path]  # the file of each flag
    # flags of the file, left out of `flags` as the user gives or unsets them
    overridden: frozenset[str]


def load_config(
    path: str | Path, environ: Mapping[str, str] | None = None, *, overridden: Container[str] = ()
) -> ExperimentConfig:
    """Read an experiment file and the files that it rests on; a mistake is a UserError with the file.

    One of configs/ that is not here is taken from those of the package (`shipped.find`).
    Placeholders are looked up in `environ`, by default `os.environ`. Flags that are `overridden` by
    the user are left out.
    """
    path, environ = Path(path), os.environ if environ is None else environ
    layers = list(_layers(shipped.find(path), ()))
    if not any(ARGS_KEY in sections for _, sections in layers):
        raise UserError(
            f"{path}: has no {ARGS_KEY}; the flags of the run belong there, such as"
            " '--num-layers: 12'"
        )
    variables: dict[str, tuple[Path, Any]] = {}
    found: dict[str, tuple[Path, Any]] = {}
    for file, sections in layers:
        variables |= {name: (file, value) for name, value in sections.get(ENV_KEY, {}).items()}
        for flag, value in sections.get(ARGS_KEY, {}).items():
            # an overriding flag takes its place behind the bases', as on a command line
            found.pop(flag, None)
            found[flag] = file, value
    taken = {flag: _values(*found[flag], flag, environ) for flag in found if flag not in overridden}
    flags = tuple((flag, given) for flag, given in taken.items() if given is not None)
    return ExperimentConfig(
        path=path,
        env={
            name: _text(file, value, name, environ)
            for name, (file, value) in variables.items()
            if value is not None
        },
        flags=flags,
        ignored=tuple(
            dict.fromkeys(key for _, sections in layers for key in sections if key not in OURS)
        ),
        files=tuple(dict.fromkeys(file for file, _ in layers)),
        origins={flag: found[flag][0] for flag, _ in flags},
        overridden=frozenset(flag for flag in found if flag in overridden),
    )


def merge(config: ExperimentConfig, user_argv: Sequence[str]) -> list[str]:
    """The file's flags and behind them the user's, which win in argparse; `--unset FLAG` takes one of the file back."""
    rest, unset = _without_unset(user_argv)
    return [*as_argv(item for item in config.flags if item[0] not in unset), *rest]


def check_flags(config: ExperimentConfig, known: Collection[str]) -> None:
    """Refuse flags of a file that are not `known`, those of the installed megatron-core and of this package."""
    if unknown := [flag for flag, _ in config.flags if flag not in known]:
        hint = did_you_mean(unknown[0], known) if len(unknown) == 1 else ""
        hint = hint or f"; leave out what is not needed with {UNSET_FLAG} FLAG"
        software = f"megatron-core {metadata.version('megatron-core')}"
        raise UserError(
            f"{config.origins[unknown[0]]}: {software} does not know {', '.join(unknown)}{hint}"
        )


def refuse_unknown_flags(argv: Sequence[str], known: Collection[str]) -> None:
    """Refuse a flag of a command line that is not known, with the nearest one, and a value without a flag."""
    for flag in (token.partition("=")[0] for token in argv if token.startswith("--")):
        if flag not in known:
            raise UserError(
                f"unknown flag {flag}{did_you_mean(flag, known) or '; see pretrain_gpt.py --help'}"
            )
    if argv and not argv[0].startswith("--"):
        raise UserError(f"unexpected argument {argv[0]!r}: flags begin with --")


def given_flags(user_argv: Sequence[str]) -> frozenset[str]:
    """The flags that a command line gives or, with `--unset`, takes back."""
    flags = {token.partition("=")[0] for token in user_argv if token.startswith("--")}
    return frozenset(flags | _without_unset(user_argv)[1])


def pairs(argv: Sequence[str], actions: Container[str]) -> list[tuple[str, tuple[str, ...]]]:
    """The flags of a command line with their values; a value may begin with dashes if no flag is named so."""
    found: list[tuple[str, list[str]]] = []
    for token in _without_unset(argv)[0]:
        flag, equals, value = token.partition("=")
        if flag in actions and token.startswith("--"):
            found.append((flag, [value] if equals else []))
        elif found:
            found[-1][1].append(token)
    return [(flag, tuple(values)) for flag, values in found]


def _without_unset(argv: Sequence[str]) -> tuple[list[str], set[str]]:
    """A command line without `--unset`, and the flags that `--unset` names."""
    rest, unset = [], set()
    tokens = iter(argv)
    for token in tokens:
        flag, equals, name = token.partition("=")
        if flag == UNSET_FLAG:
            unset.add("--" + (name if equals else next(tokens, "")).lstrip("-"))
        else:
            rest.append(token)
    return rest, unset


def as_argv(flags: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
    """Flags with their values as a command line."""
    for flag, values in flags:
        if len(values) == 1 and values[0].startswith("-"):
            yield f"{flag}={values[0]}"  # by itself, argparse would take it for a flag
        else:
            yield flag
            yield from values


class _Plain(str):
    """An item of a list without quotes, whose words are values of their own."""


class _Loader(yaml.BaseLoader):
    """Leaves values as they are written: strings, null, lists, and mappings without a key that is given twice."""

    def construct_scalar(self, node: Any) -> Any:
        value: str = super().construct_scalar(node)
        return None if node.style is None and value.lower() in ("", "~", "null") else value

    def construct_sequence(self, node: Any, deep: bool = False) -> list[Any]:
        items: list[Any] = []
        # [384 384 976] without commas is a list, as for upstream's launch script
        for item in node.value:
            plain = isinstance(item, yaml.ScalarNode) and item.style is None
            items += map(_Plain, item.value.split()) if plain else [self.construct_object(item)]
        return items

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"{twice[0]!r} is given twice; keep one of them")
        return super().construct_mapping(node, deep=deep)


def _layers(path: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A file's sections by key, after those of its bases. `above` are the files that led here."""
    if os.path.realpath(path) in map(os.path.realpath, above):
        ring = " -> ".join(str(file) for file in (*above, path))
        raise UserError(
            f"{above[-1]}: {BASE_KEY} goes round in a circle: {ring}; take one of them out"
        )
    try:
        sections = yaml.load(path.read_text("utf-8"), Loader=_Loader)
    except OSError as error:
        where = f", the {BASE_KEY} of {above[-1]}" if above else ""
        raise UserError(
            f"cannot read configuration {str(path)!r}{where}: {error.strerror}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    for key in (ENV_KEY, ARGS_KEY):
        if not isinstance(sections, dict) or not isinstance(sections.get(key) or {}, dict):
            raise UserError(
                f"{path}: must have {ARGS_KEY}, with such lines as '--num-layers: 12', and"
                f" {ENV_KEY} alike"
            )
        sections |= {key: sections[key] or {}} if key in sections else {}
    if wrong := [flag for flag in sections.get(ARGS_KEY, {}) if not str(flag).startswith("--")]:
        raise UserError(
            f"{path}: {ARGS_KEY} key {wrong[0]!r} is not a flag; write it with two dashes"
        )
    bases = sections.get(BASE_KEY) or []
    for base in bases if isinstance(bases, list) else [bases]:
        yield from _layers(path.parent / str(base), (*above, path))
    yield path, sections


def _text(file: Path, value: Any, key: str, environ: Mapping[str, str]) -> str:
    """A value with `${NAME}` and `$NAME` replaced from the environment, as envsubst does it, and `$$` by a dollar."""
    if not isinstance(value, str):
        raise UserError(f"{file}: {key} must be a value, or a list of them for a flag")

    def replaced(found: re.Match[str]) -> str:
        name = found[3] if found[2] is None else found[2]
        if name is not None and not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(
                f"{file}: {key}: {found[0]} is no placeholder; write ${{NAME}}, or $$ for a dollar"
                " sign"
            )
        if name is not None and name not in environ:
            unset = f"{key} needs the environment variable {name}, which is not set"
            raise UserError(
                f"{file}: {unset}; type export {name}=..., or give {key} on the command line"
            )
        return environ[name] if name is not None else "$"

    return _PLACEHOLDER.sub(replaced, value)


def _values(
    file: Path, value: Any, flag: str, environ: Mapping[str, str]
) -> tuple[str, ...] | None:
    """A flag's values: none for a bare flag, None for a flag that is to be left out."""
    if value is None:
        return None
    if isinstance(value, list):
        items = [(item, _text(file, item, flag, environ)) for item in value]
        return tuple(
            word
            for item, text in items
            for word in (text.split() if isinstance(item, _Plain) else [text])
        )
    text = _text(file, value, flag, environ)
    if text.lower() in ("true", "false"):
        return () if text.lower() == "true" else None
    bracketed = _BRACKETED.match(text)
    return tuple(bracketed[1].split()) if bracketed else (text,)
