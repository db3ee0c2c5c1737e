"""The flags that say where momentum lives: what is out of range, missing, or combined with what it does not fit."""

from __future__ import annotations

import re

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


ADAPTIVE = ("--optimizer", "adaptive_muon")
NO_SHARD = ("--data-parallel-sharding-strategy", "no_shard", "--muon-share-replicated")
HASH = "--check-weight-hash-across-dp-replicas-interval"


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (("--muon-offload", "disk"), "invalid choice: 'disk'"),
        (("--muon-momentum-dtype", "fp8"), "invalid choice: 'fp8'"),
        (("--muon-offload", "nvme"), "--muon-offload nvme needs --muon-offload-dir DIR"),
        (("--muon-offload", "cpu", "--muon-offload-dir", "x"), "--muon-offload-dir needs --muon-offload nvme"),
        (("--muon-offload-fraction", "0.5"), "--muon-offload-fraction needs --muon-offload cpu or nvme"),
        ((*NVME, "--muon-ns-device", "accelerator"), "this run has none"),
        (("--muon-ns-device", "cpu"), "--muon-ns-device needs --muon-offload cpu or nvme"),
        (("--muon-offload-state", "all"), "--muon-offload-state needs --muon-offload cpu or nvme, and it is none"),
        *(
            ((*ALL, *flags), f"{' '.join(flags[:shown])} does not work with --muon-offload-state all")
            for flags, shown in (
                (("--log-params-norm",), 1),
                (("--save-params-interval", "5"), 1),
                ((HASH, "5"), 1),
                (("--muon-ns-device", "cpu"), 2),
                (ADAPTIVE, 2),
                (("--fp8-format", "hybrid"), 1),
                (("--fp4-format", "e2m1"), 1),
                (("--qk-clip",), 1),
                (("--muon-hyperball", "--weight-decay", "0"), 1),
                (("--async-save",), 1),
            )
        ),
        ((*ALL, *NO_SHARD), "no_shard does not work with --muon-offload-state all"),
    ],
)
def test_what_does_not_fit_is_refused(parser, flags, refusal):
    with pytest.raises(UserError, match=re.escape(refusal)):
        check(parser, *SHARDED, *flags)


@pytest.mark.parametrize("flags", [("--muon-offload", "cpu"), NVME, ("--muon-momentum-dtype", "int8")])
def test_replicas_need_shared_work(parser, flags):
    plain = (*MUON, "--data-parallel-sharding-strategy", "no_shard")
    with pytest.raises(UserError) as refusal:
        check(parser, *plain, *flags)
    assert f"{flags[0]} has no effect here" in str(refusal.value)
    assert "--muon-share-replicated" in str(refusal.value)
    check(parser, *plain, "--muon-share-replicated", *flags)


@pytest.mark.parametrize("flags", [("--muon-offload", "cpu"), NVME, ("--muon-momentum-dtype", "bf16")])
@pytest.mark.parametrize("others", [("--optimizer", "adam", "--use-megatron-fsdp"), ("--optimizer", "muon")])
def test_other_optimizers_keep_their_own_momentum(parser, others, flags):
    with pytest.raises(UserError, match=f"{flags[0]} needs --optimizer muon --use-megatron-fsdp"):
        check(parser, *others, "--mock-data", "--micro-batch-size", "1", *flags)
