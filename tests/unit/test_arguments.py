"""Defaults that are filled in, errors of the parser, and help; test_refusals.py has what is checked
of flags.
"""

import pytest

from megatron_muon.errors import UserError
from megatron_muon.megatron.flags import command_line as arguments
from megatron_muon.megatron.flags.command_line import missing_defaults, parse
from megatron_muon.megatron.flags.refusals import ADAPTIVE as ADAPTIVE_SETTINGS
from megatron_muon.megatron.muon_config import MuonOptimizerConfig

FSDP = "--use-megatron-fsdp"
MUON, ADAPTIVE, ADAM = (
    f"--optimizer {name} {FSDP}"
    for name in (
        "muon",
        "adaptive_muon",
        "adam",
    )
)
TP2 = "--tensor-model-parallel-size 2"
NO_FUSED_GRADIENTS = "--no-gradient-accumulation-fusion"


def defaults(parser, line: str = "", device: str = "cpu") -> list[str]:
    return missing_defaults(parser, line.split(), device=device)


@pytest.mark.parametrize(
    ("line", "device", "has_te", "filled", "absent"),
    [
        ("", "cpu", False, "--distributed-backend gloo --num-workers 0", "fsdp_dtensor"),
        ("", "cpu", True, "--transformer-impl local", "fsdp_dtensor"),
        (
            FSDP,
            "cpu",
            False,
            "--ckpt-format fsdp_dtensor --use-distributed-optimizer",
            "--muon-tp-mode",
        ),
        ("", "cuda", False, "--transformer-impl local", "gloo"),
        # Apex's, and not Transformer Engine's
        ("", "cuda", True, NO_FUSED_GRADIENTS, "--transformer-impl"),
        # megatron-core 0.19 divides by it, has no default, and ended in a TypeError after all
        # set-up
        ("", "cuda", True, "--eval-interval 1000", "gloo"),
        ("--eval-interval=10", "cuda", True, NO_FUSED_GRADIENTS, "--eval-interval"),
    ],
)
def test_a_run_gets_what_its_device_and_fsdp_need(
    parser, monkeypatch, line, device, has_te, filled, absent
):
    monkeypatch.setattr(arguments, "has_transformer_engine", lambda: has_te)
    found = " ".join(defaults(parser, line, device))
    assert filled in found
    assert absent not in found


def test_defaults_are_what_can_be_typed(parser):
    """They are shown to the user, put before the user's flags, and parsed."""
    filled = defaults(parser, FSDP)
    args = parse(parser, filled)
    assert (args.ckpt_format, args.distributed_backend, args.transformer_impl) == (
        "fsdp_dtensor",
        "gloo",
        "local",
    )
    assert args.use_distributed_optimizer
    assert defaults(parser, " ".join([FSDP, *filled])) == []


@pytest.mark.parametrize(
    "chosen",
    [
        "--ckpt-format torch_dist",
        "--num-workers=4",
        "--use-distributed-optimizer",
    ],
)
def test_what_the_user_chose_is_not_filled_in(parser, chosen):
    flag = chosen.replace("=", " ").split()[0]
    assert flag in defaults(parser, FSDP)
    assert flag not in defaults(parser, f"{FSDP} {chosen}")


def test_tensor_parallel_matrices_are_orthogonalised_whole_unless_a_run_says_otherwise(parser):
    """Megatron-core 0.19 has blockwise, whose training depends on the tensor parallel size; its
    main branch has not.
    """
    for muon in (MUON, ADAPTIVE):
        for cut in (
            "--tensor-model-parallel-size=2",
            "--expert-tensor-parallel-size=2",
            "--use-checkpoint-args",
        ):
            assert "--muon-tp-mode duplicated" in " ".join(defaults(parser, f"{muon} {cut}"))
            assert "--muon-tp-mode" not in defaults(
                parser, f"{muon} {cut} --muon-tp-mode blockwise"
            )
        assert "--muon-tp-mode" not in defaults(parser, f"{muon} --tensor-model-parallel-size 1")
    for others in (ADAM, "--optimizer muon"):
        assert "--muon-tp-mode" not in defaults(parser, f"{others} {TP2}")
    assert (
        MuonOptimizerConfig().muon_tp_mode
        == parse(parser, defaults(parser, f"{MUON} {TP2}")).muon_tp_mode
    )


@pytest.mark.parametrize("bf16", [True, False])
def test_the_iteration_is_fp32_where_the_cpu_lacks_bf16(parser, monkeypatch, bf16):
    """bf16 Newton-Schulz without hardware bf16 is up to 800 times slower than fp32."""
    monkeypatch.setattr(arguments, "cpu_has_bf16", lambda: bf16)
    assert parse(parser, defaults(parser)).muon_fp32_matmul_prec == (
        "medium" if bf16 else "highest"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--hidden-sise=64", "unknown flag --hidden-sise; did you mean --hidden-size?"),
        ("--qqqqzzzz", "unknown flag --qqqqzzzz; see pretrain_gpt.py --help"),
        (
            "--num-layers 2 -train-iters 5",
            "unexpected argument '-train-iters': flags begin with --",
        ),
        ("--num-layers two", "argument --num-layers: invalid int value: 'two'"),
        ("--muon-exchange pigeon", "argument --muon-exchange: invalid choice: 'pigeon'"),
        ("--num-lay 2", "unknown flag --num-lay; did you mean --num-layers?"),  # no abbreviations
    ],
)
def test_a_mistake_is_a_user_error_with_the_nearest_flag(parser, line, message):
    with pytest.raises(UserError) as caught:
        parse(parser, line.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_adaptive_muon_has_the_defaults_of_megatrons_config(parser):
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    config = OptimizerConfig()
    for name in ADAPTIVE_SETTINGS:
        assert getattr(config, name) == getattr(parse(parser, []), name)


def test_help_can_be_shown_and_lists_our_flags_last(parser):
    """A help text of megatron-core 0.19 holds a bare percent sign, and argparse cannot format
    it.
    """
    options = parser.format_help()
    ours = options.index("muon under megatron-fsdp:")
    assert options.index("\n  --muon-momentum ") < ours < options.index("\n  --muon-lr ")
    assert "10%)" in options
