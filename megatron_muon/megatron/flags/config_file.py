"""YAML experiment files in the form of Megatron-LM's functional tests, turned into Megatron's own flags.

    ENV_VARS:
      NCCL_ALGO: Ring
    MODEL_ARGS:
      --num-layers: 12
      --bf16: true                     # a flag without a value
      --recompute-modules: [moe_act, layernorm]
      --data-path: ${DATA_PATH}/text   # from the environment

A value reaches Megatron as it is written (`1e-4` stays `1e-4`); `true` gives the bare flag, `false` and null
leave the flag out. A bracketed string, `"[384 384 976]"`, is a list, as for upstream's launch script. `$$` stands for a
dollar sign. A file may rest on others, named relative to it:

    BASE: [model.yaml, optimizer.yaml]
    MODEL_ARGS:
      --lr: 2e-3                       # instead of the bases'
      --clip-grad: null                # takes the bases' away

ENV_VARS and MODEL_ARGS are merged key by key, the file itself last. Placeholders of overridden flags may stay unset.
"""

import argparse
import os
import re
import string
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from megatron_muon import shipped
from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.suggest import did_you_mean

ENV_KEY, ARGS_KEY, BASE_KEY = OURS = ("ENV_VARS", "MODEL_ARGS", "BASE")

UPSTREAM_TEST_KEYS = re.compile(
    "AFTER_SCRIPT|BEFORE_SCRIPT|LAUNCHER|METRICS|MODE|MODEL_ENV_VARS|TEST_EVALUATION|TEST_TYPE|THROUGHPUT_TEST_PARAMS"
    "|MODEL_ARGS_[0-9]+"  # flags of a test's second run
)
"""Keys that only upstream's test harness reads (Megatron-LM: tests/functional_tests/shell_test_utils/*.sh)."""

UNSET_FLAG = "--unset"
"""Takes a flag of the file back: `--unset bf16`. The way to undo a bare flag that has no `--no-` twin."""

_ANY, _FLAG, _NAME = re.compile(r".*", re.DOTALL), re.compile(r"--.+"), re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACKETED = re.compile(r"\[([^\[\],]+)\]\Z")


@dataclass(frozen=True)
class ExperimentConfig:
    """What an experiment file says."""

    path: Path
    env: Mapping[str, str]
    flags: tuple[tuple[str, tuple[str, ...]], ...]  # in the file's order, with their values; none for a bare flag
    ignored: tuple[str, ...] = ()  # keys that only upstream's test harness reads
    files: tuple[Path, ...] = ()  # all files read, bases before those that rest on them
    origins: Mapping[str, Path] = field(default_factory=dict)  # the file of each flag
    overridden: frozenset[str] = frozenset()  # flags of the file, left out of `flags` as the user gives or unsets them


def load_config(
    path: str | Path, environ: Mapping[str, str] | None = None, *, overridden: Container[str] = ()
) -> ExperimentConfig:
    """Read an experiment file and the files that it rests on; a mistake is a UserError with file and line.

    One of configs/ that is not here is taken from those of the package (`shipped.find`). Placeholders are looked up in
    `environ`, by default `os.environ`. Flags that are `overridden` by the user are left out.
    """
    path = Path(path)
    layers = list(_layers(shipped.find(path), ()))
    if not any(ARGS_KEY in sections for _, sections in layers):
        raise UserError(f"{path}: has no {ARGS_KEY}; the flags of the run belong there, such as '--num-layers: 12'")
    variables: dict[str, tuple[Path, yaml.Node]] = {}
    found: dict[str, tuple[Path, yaml.Node]] = {}
    for file, sections in layers:
        variables |= {key: (file, node) for key, node in sections.get(ENV_KEY, {}).items()}
        for flag, node in sections.get(ARGS_KEY, {}).items():
            found.pop(flag, None)  # an overriding flag takes its place behind the bases', as on a command line
            found[flag] = file, node
    values = _Values(os.environ if environ is None else environ)
    taken = {flag: values.of_flag(file, flag, node) for flag, (file, node) in found.items() if flag not in overridden}
    flags = tuple((flag, given) for flag, given in taken.items() if given is not None)
    return ExperimentConfig(
        path=path,
        env={name: values.text(file, name, node) for name, (file, node) in variables.items() if not _is_null(node)},
        flags=flags,
        ignored=tuple(dict.fromkeys(key for _, sections in layers for key in sections if key not in OURS)),
        files=tuple(dict.fromkeys(file for file, _ in layers)),
        origins={flag: found[flag][0] for flag, _ in flags},
        overridden=frozenset(flag for flag in found if flag in overridden),
    )


def merge(config: ExperimentConfig, user_argv: Sequence[str]) -> list[str]:
    """The file's flags and behind them the user's, which win in argparse; `--unset FLAG` takes one of the file back."""
    check_unset(config, user_argv)
    rest, unset = _without_unset(user_argv)
    left_out = set(map(_flag, unset))
    return [*as_argv(item for item in config.flags if item[0] not in left_out), *rest]


def check_unset(config: ExperimentConfig, user_argv: Sequence[str]) -> None:
    """Refuse an `--unset` of a flag that the file does not have."""
    known = [*(flag for flag, _ in config.flags), *config.overridden]
    for name in _without_unset(user_argv)[1]:
        if _flag(name) not in known:
            hint = did_you_mean(_flag(name), known)
            raise UserError(f"{UNSET_FLAG} {name}: {config.path} does not set {_flag(name)}{hint}")


def check_flags(config: ExperimentConfig, parser: argparse.ArgumentParser, *, software: str = "") -> None:
    """Refuse flags that the parser of `software` does not have, and values where a flag takes none or the reverse."""
    actions = parser._option_string_actions
    refuse_unknown(config, actions, software=software)
    for flag, values in config.flags:
        file, takes = config.origins.get(flag, config.path), actions[flag].nargs
        if takes == 0 and values:
            raise UserError(f"{file}: {flag} takes no value, found {' '.join(values)!r}; write '{flag}: true'")
        if takes in (None, "+") and not values:
            raise UserError(f"{file}: {flag} needs a value, found true or an empty list")


def refuse_unknown(config: ExperimentConfig, known: Collection[str], *, software: str = "") -> None:
    """Refuse flags of a file that are not among those of `software`."""
    if unknown := [flag for flag, _ in config.flags if flag not in known]:
        hint = did_you_mean(unknown[0], known) if len(unknown) == 1 else ""
        hint = hint or f"; leave out what is not needed with {UNSET_FLAG} FLAG"
        file = config.origins.get(unknown[0], config.path)
        raise UserError(f"{file}: {software or 'pretrain_gpt.py'} does not know {', '.join(unknown)}{hint}")


def refuse_unknown_flags(argv: Sequence[str], known: Collection[str]) -> None:
    """Refuse a flag of a command line that is not known, with the nearest one, and a value without a flag."""
    for flag in (token.partition("=")[0] for token in argv if token.startswith("--")):
        if flag not in known:
            raise UserError(f"unknown flag {flag}{did_you_mean(flag, known) or '; see pretrain_gpt.py --help'}")
    if argv and not argv[0].startswith("--"):
        raise UserError(f"unexpected argument {argv[0]!r}: flags begin with --")


def given_flags(user_argv: Sequence[str]) -> frozenset[str]:
    """The flags that a command line gives or, with `--unset`, takes back."""
    flags = {token.partition("=")[0] for token in user_argv if token.startswith("--")}
    return frozenset(flags.union(map(_flag, _without_unset(user_argv)[1])))


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


def _without_unset(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line without `--unset`, and what `--unset` names."""
    rest, unset = [], []
    tokens = iter(argv)
    for token in tokens:
        flag, equals, name = token.partition("=")
        if flag == UNSET_FLAG:
            unset.append(name if equals else next(tokens, ""))
        else:
            rest.append(token)
    return rest, unset


def _flag(name: str) -> str:
    return "--" + name.lstrip("-")


def as_argv(flags: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
    """Flags with their values as a command line."""
    for flag, values in flags:
        if len(values) == 1 and values[0].startswith("-"):
            yield f"{flag}={values[0]}"  # by itself, argparse would take it for a flag
        else:
            yield flag
            yield from values


type _Items = dict[str, yaml.Node]


def _layers(path: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, dict[str, _Items]]]:
    """A file's sections by key, after those of its bases. `above` are the files that led here."""
    if os.path.realpath(path) in map(os.path.realpath, above):
        ring = " -> ".join(str(file) for file in (*above, path))
        raise UserError(f"{above[-1]}: {BASE_KEY} goes round in a circle: {ring}; take one of them out")
    sections = _items(path, "the file", _root(path, above))
    for key, node in sections.items():
        if key not in OURS and not UPSTREAM_TEST_KEYS.fullmatch(key):
            hint = did_you_mean(key, OURS) or f"; a file holds {ENV_KEY} and {ARGS_KEY}"
            raise UserError(f"{_at(path, node)}: unknown key {key!r}{hint}")
    if (bases := sections.get(BASE_KEY)) is not None and not _is_null(bases):
        items = bases.value if isinstance(bases, yaml.SequenceNode) else [bases]
        if not all(isinstance(item, yaml.ScalarNode) and item.value for item in items):
            raise UserError(f"{path}: {BASE_KEY} must be a file or a list of files, such as 'model.yaml'")
        for item in items:
            yield from _layers(path.parent / item.value, (*above, path))
    read: dict[str, _Items] = {key: {} for key in sections}
    if not _is_null(env := sections.get(ENV_KEY)):
        read[ENV_KEY] = _items(path, ENV_KEY, env, _NAME, "the name of an environment variable")
    if ARGS_KEY in sections:
        read[ARGS_KEY] = _items(path, ARGS_KEY, sections[ARGS_KEY], _FLAG, "a flag; write it with two dashes")
    yield path, read


def _root(path: Path, above: tuple[Path, ...]) -> yaml.Node | None:
    """A file as nodes: these keep the spelling and duplicate keys."""
    try:
        return yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        where = f", the {BASE_KEY} of {above[-1]}" if above else ""
        raise UserError(f"cannot read configuration {str(path)!r}{where}: {reason}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def _items(
    path: Path, what: str, node: yaml.Node | None, form: re.Pattern[str] = _ANY, must_be: str = ""
) -> dict[str, yaml.Node]:
    """A mapping's keys and values; refuses keys that are given twice, or that are not of the `form`."""
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}: {what} must be a mapping, such as '{ARGS_KEY}:' with '--num-layers: 12' below")
    items: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or not form.fullmatch(key.value):
            name = repr(key.value) if isinstance(key, yaml.ScalarNode) else "of several values"
            raise UserError(f"{_at(path, key)}: {what} key {name} is not {must_be or 'a plain word'}")
        if key.value in items:
            raise UserError(f"{_at(path, key)}: {key.value!r} is given twice; keep one of them")
        items[key.value] = value
    return items


class _Placeholders(string.Template):
    """`${NAME}`, `$NAME` and `$$`; any other dollar sign stands for itself."""

    pattern = r"\$(?:(?P<escaped>\$)|\{(?P<braced>[^}]*)\}|(?P<named>[A-Za-z_][A-Za-z0-9_]*)|(?P<invalid>(?!)))"  # type: ignore[assignment]


@dataclass(frozen=True)
class _Values:
    """Nodes as values, with placeholders replaced from the environment as envsubst does it."""

    environ: Mapping[str, str]

    def text(self, file: Path, key: str, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise UserError(f"{_at(file, node)}: {key} must be a value, or a list of them for a flag")
        template = _Placeholders(node.value)
        for name in template.get_identifiers():
            if not _NAME.fullmatch(name):
                raise UserError(f"{_at(file, node)}: {key}: ${{{name}}} is no placeholder; write ${{NAME}}")
            if name not in self.environ:
                unset = f"{key} needs the environment variable {name}, which is not set"
                raise UserError(
                    f"{_at(file, node)}: {unset}; type export {name}=..., or give {key} on the command line"
                )
        return template.safe_substitute(self.environ)

    def of_flag(self, file: Path, flag: str, node: yaml.Node) -> tuple[str, ...] | None:
        """A flag's values: none for a bare flag, None for a flag that is to be left out."""
        if isinstance(node, yaml.SequenceNode):
            values: list[str] = []
            for item in node.value:
                text = self.text(file, flag, item)
                values += text.split() if item.style is None else [text]  # [384 384 976] without commas, as upstream
            return tuple(values)
        if _is_null(node):
            return None
        text = self.text(file, flag, node)
        if text.lower() in ("true", "false"):
            return () if text.lower() == "true" else None
        bracketed = _BRACKETED.match(text)
        return tuple(bracketed[1].split()) if bracketed else (text,)


def _is_null(node: yaml.Node | None) -> bool:
    return node is None or bool(node.tag == "tag:yaml.org,2002:null")


def _at(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"
