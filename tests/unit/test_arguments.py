"""Defaults that are filled in, errors of the parser, and what is checked before torch.distributed starts."""

import contextlib

import pytest

from megatron_muon.errors import UserError
from megatron_muon.megatron.flags import arguments
from megatron_muon.megatron.flags.arguments import check_settings, missing_defaults, parse
from megatron_muon.megatron.flags.refusals import ADAPTIVE as ADAPTIVE_SETTINGS
from megatron_muon.megatron.settings import MuonOptimizerConfig

FSDP = "--use-megatron-fsdp"
MUON, ADAPTIVE, ADAM = (f"--optimizer {name} {FSDP}" for name in ("muon", "adaptive_muon", "adam"))
NO_SHARD = f"{MUON} --data-parallel-sharding-strategy no_shard"
SHARED = f"{NO_SHARD} --muon-share-replicated"
TP2 = "--tensor-model-parallel-size 2"
NO_FUSED_GRADIENTS = "--no-gradient-accumulation-fusion"


def defaults(parser, line: str = "", device: str = "cpu") -> list[str]:
    return missing_defaults(parser, line.split(), device=device)


@pytest.mark.parametrize(
    ("line", "device", "has_te", "filled", "absent"),
    [
        ("", "cpu", False, "--distributed-backend gloo --num-workers 0", "fsdp_dtensor"),
        ("", "cpu", True, "--transformer-impl local", "fsdp_dtensor"),
        (FSDP, "cpu", False, "--ckpt-format fsdp_dtensor --use-distributed-optimizer", "--muon-tp-mode"),
        ("", "cuda", False, "--transformer-impl local", "gloo"),
        ("", "cuda", True, NO_FUSED_GRADIENTS, "--transformer-impl"),  # Apex's, and not Transformer Engine's
        # megatron-core 0.19 divides by it, has no default, and ended in a TypeError after all set-up
        ("", "cuda", True, "--eval-interval 1000", "gloo"),
        ("--eval-interval=10", "cuda", True, NO_FUSED_GRADIENTS, "--eval-interval"),
    ],
)
def test_a_run_gets_what_its_device_and_fsdp_need(parser, monkeypatch, line, device, has_te, filled, absent):
    monkeypatch.setattr(arguments, "has_transformer_engine", lambda: has_te)
    found = " ".join(defaults(parser, line, device))
    assert filled in found
    assert absent not in found


def test_defaults_are_what_can_be_typed(parser):
    """They are shown to the user, put before the user's flags, and parsed."""
    filled = defaults(parser, FSDP)
    args = parse(parser, filled)
    assert (args.ckpt_format, args.distributed_backend, args.transformer_impl) == ("fsdp_dtensor", "gloo", "local")
    assert args.use_distributed_optimizer
    assert defaults(parser, " ".join([FSDP, *filled])) == []


@pytest.mark.parametrize(
    "chosen",
    ["--ckpt-format torch_dist", "--ckpt-format=torch_dist", "--num-workers=4", "--transformer-impl transformer_engine",
     "--no-persist-layer-norm", "--use-distributed-optimizer"],
)  # fmt: skip
def test_what_the_user_chose_is_not_filled_in(parser, chosen):
    flag = chosen.replace("=", " ").split()[0]
    assert flag in defaults(parser, FSDP)
    assert flag not in defaults(parser, f"{FSDP} {chosen}")


@pytest.mark.parametrize("flag", ["--no-rope-fusion", "--no-persist-layer-norm", "--no-masked-softmax-fusion"])
def test_the_other_half_of_a_pair_counts_as_chosen(parser, flag):
    """A flag and its --no- twin set one value: whoever types one has settled both."""
    actions = parser._option_string_actions
    for other in (name for name, twin in actions.items() if twin.dest == actions[flag].dest):
        assert flag not in defaults(parser, other)


def test_tensor_parallel_matrices_are_orthogonalised_whole_unless_a_run_says_otherwise(parser):
    """Megatron-core 0.19 has blockwise, whose training depends on the tensor parallel size; its main branch has not."""
    for muon in (MUON, ADAPTIVE):
        for cut in ("--tensor-model-parallel-size=2", "--expert-tensor-parallel-size=2", "--use-checkpoint-args"):
            assert "--muon-tp-mode duplicated" in " ".join(defaults(parser, f"{muon} {cut}"))
            assert "--muon-tp-mode" not in defaults(parser, f"{muon} {cut} --muon-tp-mode blockwise")
        assert "--muon-tp-mode" not in defaults(parser, f"{muon} --tensor-model-parallel-size 1")
    for others in (ADAM, "--optimizer muon"):
        assert "--muon-tp-mode" not in defaults(parser, f"{others} {TP2}")
    assert MuonOptimizerConfig().muon_tp_mode == parse(parser, defaults(parser, f"{MUON} {TP2}")).muon_tp_mode


@pytest.mark.parametrize("bf16", [True, False])
def test_the_iteration_is_fp32_where_the_cpu_lacks_bf16(parser, monkeypatch, bf16):
    """bf16 Newton-Schulz without hardware bf16 is up to 800 times slower than fp32."""
    monkeypatch.setattr(arguments, "cpu_has_bf16", lambda: bf16)
    assert parse(parser, defaults(parser)).muon_fp32_matmul_prec == ("medium" if bf16 else "highest")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--hidden-sise 64", "unknown flag --hidden-sise; did you mean --hidden-size?"),
        ("--hidden-sise=64", "unknown flag --hidden-sise; did you mean --hidden-size?"),
        ("--qqqqzzzz", "unknown flag --qqqqzzzz; see pretrain_gpt.py --help"),
        ("--num-layers 2 muon", "unexpected argument 'muon': flags begin with --"),
        ("--num-layers 2 -train-iters 5", "unexpected argument '-train-iters': flags begin with --"),
        ("-lr 0.1", "unexpected argument '-lr': flags begin with --"),
        ("--num-layers two", "argument --num-layers: invalid int value: 'two'"),
        ("--muon-exchange pigeon", "argument --muon-exchange: invalid choice: 'pigeon'"),
        ("--num-layers 2 --help", "unknown flag --help; see pretrain_gpt.py --help"),
        ("--num-lay 2", "unknown flag --num-lay; did you mean --num-layers?"),  # no abbreviations
    ],
)
def test_a_mistake_is_a_user_error_with_the_nearest_flag(parser, line, message):
    with pytest.raises(UserError) as caught:
        parse(parser, line.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_muons_flags_keep_upstreams_defaults(parser):
    args = parse(parser, [])
    assert (args.muon_momentum, args.muon_num_ns_steps, args.muon_scale_mode) == (0.9, 5, "spectral")
    assert (args.muon_lr, args.muon_min_lr, args.muon_exchange, args.device) == (None, None, "owner", "auto")
    assert parse(parser, ["--num-layers", "2", "--num-layers", "3"]).num_layers == 3


def check(parser, line: str, refused: str | None = None, *, device: str = "cpu", ranks: int = 2, **env: str) -> None:
    """Checks a command line, which is to be refused in these words, or to pass."""
    args = parse(parser, ["--transformer-impl", "local", "--mock-data", *line.split()])
    with pytest.raises(UserError, match=refused) if refused else contextlib.nullcontext():
        check_settings(args, device=device, environ={"WORLD_SIZE": str(ranks), **env})


PROFILE = "--profile --use-pytorch-profiler --tensorboard-dir x --train-iters 20"


@pytest.mark.parametrize(
    ("line", "about", "refused"),
    [
        ("--pipeline-model-parallel-size 2", {}, None),
        (f"--pipeline-model-parallel-size 2 {FSDP}", {}, "-size 2 does not work with --use-megatron-fsdp"),
        ("--optimizer adam --fp16", {}, None),
        ("--optimizer muon --fp16", {}, "--fp16 is not supported with --optimizer muon; use --bf16"),
        ("--async-save --use-persistent-ckpt-worker", {"device": "cuda"}, None),
        ("--async-save", {"device": "cuda"}, "needs --use-persistent-ckpt-worker"),
        ("--async-save", {}, "does not work on the CPU"),
        (PROFILE, {}, None),
        ("--profile", {"device": "cuda"}, None),  # for nsys
        ("--profile", {}, "no profile would be written"),
        ("--use-pytorch-profiler", {}, "no profile would be written"),
        ("--profile --use-pytorch-profiler", {}, "no profile would be written"),
        (f"{PROFILE} --train-iters 5", {}, "no profile would be written"),
        (f"{PROFILE} --profile-step-start 5 --profile-step-end 5", {}, "no profile would be written"),
        ("--hybrid-layer-pattern M*", {}, "makes a hybrid model"),
        ("--num-attention-heads 4 --group-query-attention --num-query-groups 3", {}, "-heads 4 is no multiple of"),
        ("--num-experts 2 --moe-router-topk 3 --swiglu", {}, "--moe-router-topk 3 is more than --num-experts 2"),
        ("--num-experts 2", {}, "no fused GELU for the experts"),
        ("--num-experts 2 --disable-bias-linear", {}, None),
        ("--optimizer adam --muon-allow-missing-state", {}, "-state needs --use-megatron-fsdp; add it or leave"),
        ("--transformer-impl transformer_engine", {}, r"needs a GPU and Transformer Engine; .*'\.\[te\]'"),
    ],
)
def test_flags_are_refused_where_they_do_not_work(parser, line, about, refused):
    check(parser, line, refused, **about)


def test_mistakes_that_do_not_depend_on_each_other_are_told_at_once(parser):
    """Each of Megatron-LM's functional tests had several reasons, of which one was told at a time."""
    refused = r"^--async-save [^\n]*\n--fp16 [^\n]*\n--optimizer-cuda-graph [^\n]*$"
    check(parser, f"{MUON} --fp16 --async-save --optimizer-cuda-graph", refused)


OF_MUON = (
    *("--muon-lr 0.1", "--muon-ns gram", "--muon-split-gated-mlp --swiglu", "--muon-split-heads"),
    *("--muon-exclude router linear_fc?", "--muon-share-replicated"),
)
IN_PARTS = r"--muon-tp-mode (distributed|duplicated) is not supported with {}, .* 2; use --muon-tp-mode blockwise"

REFUSED = [  # beside what test_refusals.py asks a script too
    ("--optimizer adaptive_muon", "--optimizer adaptive_muon needs --use-megatron-fsdp"),
    (f"{NO_SHARD} --muon-ns gram", "--muon-ns has no effect here"),
    (f"{NO_SHARD} --num-distributed-optimizer-instances 2", "-instances does not work with .* no_shard"),
    (f"{MUON} --muon-share-replicated", "--muon-share-replicated has no effect here: it is for no_shard"),
    (f"{SHARED} --muon-exchange allgather", "--muon-exchange has no effect here"),
    (f"{SHARED} --muon-tp-mode distributed {TP2}", IN_PARTS.format("--muon-share-replicated")),
    (
        f"{SHARED} --muon-tp-mode distributed --expert-tensor-parallel-size 2",
        IN_PARTS.format("--muon-share-replicated"),
    ),
    (f"{MUON} --muon-exchange allgather --muon-exchange-buffer-mb 8", "gathers fp32, matrix by matrix"),
    (f"{MUON} --muon-split-heads --muon-no-split-qkv", "--muon-no-split-qkv does not work with --muon-split-heads"),
    (f"{NO_SHARD} --muon-split-heads {TP2} --muon-tp-mode duplicated", IN_PARTS.format("--muon-split-heads")),
    (f"{MUON} --adaptive-muon-eps 1e-6", "-eps needs --optimizer adaptive_muon; add it or leave --adaptive"),
    (
        f"{NO_SHARD} --optimizer adaptive_muon {TP2} --muon-tp-mode duplicated",
        IN_PARTS.format("--optimizer adaptive_muon"),
    ),
    *(
        (f"{others} {flags}", f"{flags.split()[0]} needs --optimizer muon --use-megatron-fsdp; add them or")
        for others in (ADAM, "--optimizer muon")
        for flags in OF_MUON
    ),
    ("--optimizer dist_muon", None),
    (SHARED, None),
    (f"{SHARED} --muon-tp-mode blockwise {TP2}", None),
    (f"{SHARED} --muon-tp-mode duplicated", None),
    (f"{NO_SHARD} --muon-split-heads {TP2}", None),
    (f"{ADAPTIVE} --adaptive-muon-moment2-method normuon --adaptive-muon-beta2 0.9", None),
    (f"{ADAPTIVE} --muon-tp-mode duplicated {TP2}", None),
    *((f"{muon} {flags}", None) for muon in (MUON, ADAPTIVE) for flags in OF_MUON[:5]),
]


@pytest.mark.parametrize(("line", "refused"), REFUSED)
def test_flags_of_muon_are_refused_where_they_would_be_ignored(parser, line, refused):
    check(parser, line, refused)


def test_adaptive_muon_has_the_defaults_of_megatrons_config(parser):
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    config = OptimizerConfig()
    for name in ADAPTIVE_SETTINGS:
        assert getattr(config, name) == getattr(parse(parser, []), name)


def test_megatrons_own_adaptive_muon_still_fails():
    """The reason why runs without Megatron-FSDP are refused; when this passes, they need not be."""
    import torch
    from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon

    parameter = torch.nn.Parameter(torch.ones(4, 2))
    parameter.grad = torch.ones(4, 2)
    with pytest.raises(AttributeError, match="scale_mode"):
        TensorParallelAdaptiveMuon([parameter]).step()


def test_help_can_be_shown_and_lists_our_flags_last(parser):
    """A help text of megatron-core 0.19 holds a bare percent sign, and argparse cannot format it."""
    options = parser.format_help()
    ours = options.index("muon under megatron-fsdp:")
    assert options.index("\n  --muon-momentum ") < ours < options.index("\n  --muon-lr ")
    assert "10%)" in options
