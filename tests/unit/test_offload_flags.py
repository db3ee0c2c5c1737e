"""The flags that say where momentum lives: what is out of range, missing, or combined with what it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.arguments import check_settings, parse

MUON = ("--optimizer", "muon", "--use-megatron-fsdp", "--mock-data", "--micro-batch-size", "1")
SHARDED = (*MUON, "--data-parallel-sharding-strategy", "optim")
NVME = ("--muon-offload", "nvme", "--muon-offload-dir", ".")
ALL = ("--muon-offload", "cpu", "--muon-offload-state", "all")


def check(parser, *argv: str) -> None:
    check_settings(parse(parser, ["--transformer-impl", "local", *argv]), device="cpu")


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--muon-offload", "cpu"),
        ("--muon-offload", "cpu", "--muon-offload-fraction", "0.5", "--muon-ns-device", "cpu"),
        (*NVME, "--muon-offload-buffer-mb", "1", "--muon-momentum-dtype", "int8"),
        ("--muon-momentum-dtype", "bf16"),
        (*NVME, "--muon-offload-state", "all", "--muon-offload-fraction", "0.5", "--muon-momentum-dtype", "int8"),
        ("--muon-offload", "cpu", "--muon-offload-state", "all"),
    ],
)
def test_what_fits_passes_and_writes_nothing(parser, flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(parser, *SHARDED, *flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (("--muon-offload", "disk"), ("argument --muon-offload: invalid choice: 'disk'", "none", "cpu", "nvme")),
        (("--muon-momentum-dtype", "fp8"), ("-dtype: invalid choice: 'fp8'", "fp32", "bf16", "int8")),
        (("--muon-ns-device", "gpu"), ("-device: invalid choice: 'gpu'", "auto", "accelerator", "cpu")),
        ((*NVME, "--muon-offload-fraction", "0"), ("--muon-offload-fraction 0 is out of range", "at most 1")),
        ((*NVME, "--muon-offload-fraction", "1.01"), ("--muon-offload-fraction 1.01 is out of range",)),
        ((*NVME, "--muon-offload-fraction", "nan"), ("--muon-offload-fraction nan is not finite",)),
        ((*NVME, "--muon-offload-buffer-mb", "0"), ("-buffer-mb 0 is out of range; choose at least 0.001",)),
        ((*NVME, "--muon-offload-buffer-mb", "inf"), ("--muon-offload-buffer-mb inf is not finite",)),
        (("--muon-offload", "nvme"), ("--muon-offload nvme needs --muon-offload-dir DIR",)),
        (("--muon-offload-dir", "x"), ("--muon-offload-dir needs --muon-offload nvme, and it is none",)),
        (("--muon-offload", "cpu", "--muon-offload-dir", "x"), ("--muon-offload-dir needs --muon-offload nvme",)),
        (("--muon-offload-fraction", "0.5"), ("--muon-offload-fraction needs --muon-offload cpu or nvme",)),
        (("--muon-offload-buffer-mb", "8"), ("--muon-offload-buffer-mb needs --muon-offload cpu or nvme",)),
        (("--muon-ns-device", "cpu"), ("--muon-ns-device needs --muon-offload cpu or nvme",)),
        ((*NVME, "--muon-ns-device", "accelerator"), ("--muon-ns-device accelerator", "this run has none")),
        (("--muon-offload-state", "adam"), ("-state: invalid choice: 'adam'", "momentum", "all")),
        (("--muon-offload-state", "all"), ("--muon-offload-state needs --muon-offload cpu or nvme, and it is none",)),
        ((*ALL, "--log-params-norm"), ("--log-params-norm is not supported with", "reads the main weights")),
        ((*ALL, "--save-params-interval", "5"), ("--save-params-interval is not supported with", "a skipped step")),
        (
            (*ALL, "--check-weight-hash-across-dp-replicas-interval", "5"),
            ("--check-weight-hash-across-dp-replicas-interval is not supported with --muon-offload-state all",),
        ),
        ((*ALL, "--muon-ns-device", "cpu"), ("--muon-ns-device cpu is not supported with --muon-offload-state all",)),
        ((*ALL, "--optimizer", "adaptive_muon"), ("--optimizer adaptive_muon is not supported", "use --muon-offload-")),
        ((*ALL, "--fp8-format", "hybrid"), ("--fp8-format is not supported with --muon-offload-state all",)),
        ((*ALL, "--fp4-format", "e2m1"), ("--fp4-format is not supported with --muon-offload-state all",)),
        ((*ALL, "--qk-clip"), ("--qk-clip is not supported with --muon-offload-state all: it scales main weights",)),
        (
            (*ALL, "--muon-hyperball", "--weight-decay", "0"),
            ("--muon-hyperball is not supported with --muon-offload-",),
        ),
        ((*ALL, "--async-save"), ("--async-save is not supported with --muon-offload-state all",)),
        (
            (*ALL, "--data-parallel-sharding-strategy", "no_shard", "--muon-share-replicated"),
            ("no_shard is not supported with --muon-offload-state all: it keeps every weight on every rank",),
        ),
    ],
)
def test_what_does_not_fit_is_refused(parser, flags, fragments):
    with pytest.raises(UserError) as refusal:
        check(parser, *SHARDED, *flags)
    for fragment in fragments:
        assert fragment in str(refusal.value)


@pytest.mark.parametrize("flags", [("--muon-offload", "cpu"), NVME, ("--muon-momentum-dtype", "int8")])
def test_replicas_need_shared_work(parser, flags):
    plain = (*MUON, "--data-parallel-sharding-strategy", "no_shard")
    with pytest.raises(UserError) as refusal:
        check(parser, *plain, *flags)
    assert f"{flags[0]} needs momentum that this package keeps" in str(refusal.value)
    assert "--muon-share-replicated" in str(refusal.value)
    check(parser, *plain, "--muon-share-replicated", *flags)


@pytest.mark.parametrize("flags", [("--muon-offload", "cpu"), NVME, ("--muon-momentum-dtype", "bf16")])
@pytest.mark.parametrize("others", [("--optimizer", "adam", "--use-megatron-fsdp"), ("--optimizer", "muon")])
def test_other_optimizers_keep_their_own_momentum(parser, others, flags):
    with pytest.raises(UserError, match=f"{flags[0]} needs --optimizer muon --use-megatron-fsdp"):
        check(parser, *others, "--mock-data", "--micro-batch-size", "1", *flags)


def test_a_directory_is_looked_at_before_anything_starts(parser, tmp_path: Path):
    with pytest.raises(UserError, match=r"absent: cannot write there .*; make it"):
        check(parser, *SHARDED, "--muon-offload", "nvme", "--muon-offload-dir", str(tmp_path / "absent"))
