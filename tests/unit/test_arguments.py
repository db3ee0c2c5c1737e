"""Defaults that are filled in, errors of the parser, and what is checked before torch.distributed starts."""

import argparse
import os
import struct

import pytest

from megatron_muon.data import vocabulary
from megatron_muon.errors import UserError
from megatron_muon.megatron.flags import arguments
from megatron_muon.megatron.flags.arguments import check_settings, missing_defaults, parse
from megatron_muon.megatron.flags.path_checks import check_writable
from megatron_muon.megatron.flags.refusals import ADAPTIVE as ADAPTIVE_SETTINGS


def defaults(parser, *argv: str, device: str = "cpu") -> list[str]:
    return missing_defaults(parser, argv, device=device)


# ------------------------------------------------------------------------------------------------ defaults


def test_a_cpu_run_gets_what_the_cpu_needs(parser):
    filled = " ".join(defaults(parser))
    for flag in ("--distributed-backend gloo", "--num-workers 0", "--transformer-impl local"):
        assert flag in filled
    assert "fsdp_dtensor" not in filled


def test_fsdp_gets_its_checkpoints_and_distributed_optimizer(parser):
    filled = " ".join(defaults(parser, "--use-megatron-fsdp"))
    assert "--ckpt-format fsdp_dtensor --use-distributed-optimizer" in filled


def test_defaults_are_what_can_be_typed(parser):
    """They are shown to the user, put before the user's flags, and parsed."""
    filled = defaults(parser, "--use-megatron-fsdp")
    args = parse(parser, filled)
    assert (args.ckpt_format, args.distributed_backend, args.transformer_impl) == ("fsdp_dtensor", "gloo", "local")
    assert args.use_distributed_optimizer
    assert not args.gradient_accumulation_fusion
    assert defaults(parser, "--use-megatron-fsdp", *filled) == []


@pytest.mark.parametrize(
    "chosen",
    [
        ["--ckpt-format", "torch_dist"],
        ["--ckpt-format=torch_dist"],
        ["--distributed-backend", "nccl"],
        ["--num-workers=4"],
        ["--transformer-impl", "transformer_engine"],
        ["--no-persist-layer-norm"],
        ["--use-distributed-optimizer"],
    ],
)
def test_what_the_user_chose_is_not_filled_in(parser, chosen):
    flag = chosen[0].split("=")[0]
    assert flag in defaults(parser, "--use-megatron-fsdp")
    assert flag not in defaults(parser, "--use-megatron-fsdp", *chosen)


def test_the_other_half_of_a_pair_counts_as_chosen(parser):
    """A flag and its --no- twin set one value: whoever types one has settled both."""
    pairs = {}
    for flag, action in parser._option_string_actions.items():
        if flag in ("--no-rope-fusion", "--no-persist-layer-norm", "--no-masked-softmax-fusion"):
            pairs[flag] = [other for other, twin in parser._option_string_actions.items() if twin.dest == action.dest]
    assert len(pairs) == 3
    for flag, same in pairs.items():
        assert flag in defaults(parser)
        for other in same:
            assert flag not in defaults(parser, other)


def test_a_gpu_with_transformer_engine_gets_no_defaults_of_the_cpu(parser, monkeypatch):
    monkeypatch.setattr(arguments, "has_transformer_engine", lambda: True)
    # Only the gradient fusion of megatron-core's own output layer comes from Apex and not from Transformer Engine.
    without_apex = "--no-gradient-accumulation-fusion"
    assert defaults(parser, "--eval-interval", "10", device="cuda") == [without_apex]
    assert defaults(parser, "--eval-interval", "10", without_apex, device="cuda") == []
    assert "--ckpt-format" in defaults(parser, "--use-megatron-fsdp", device="cuda")


def test_a_run_without_an_eval_interval_gets_one(parser):
    """megatron-core 0.19 divides by it, has no default, and ended in a TypeError after all set-up."""
    assert parse(parser, []).eval_interval is None
    assert parse(parser, defaults(parser)).eval_interval == 1000
    assert "--eval-interval" not in defaults(parser, "--eval-interval=10")


def test_a_gpu_without_transformer_engine_gets_the_local_model(parser, monkeypatch):
    monkeypatch.setattr(arguments, "has_transformer_engine", lambda: False)
    filled = " ".join(defaults(parser, device="cuda"))
    assert "--transformer-impl local" in filled
    assert "gloo" not in filled


@pytest.mark.parametrize("bf16", [True, False])
def test_the_iteration_is_fp32_where_the_cpu_lacks_bf16(parser, monkeypatch, bf16):
    """bf16 Newton-Schulz without hardware bf16 is up to 800 times slower than fp32."""
    monkeypatch.setattr(arguments, "cpu_has_bf16", lambda: bf16)
    filled = " ".join(defaults(parser))
    assert ("--muon-fp32-matmul-prec highest" in filled) is not bf16
    assert parse(parser, defaults(parser)).muon_fp32_matmul_prec == ("medium" if bf16 else "highest")


# ------------------------------------------------------------------------------------------------ parsing


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hidden-sise", "64"], "unknown flag --hidden-sise; did you mean --hidden-size?"),
        (["--hidden-sise=64"], "unknown flag --hidden-sise; did you mean --hidden-size?"),
        (["--muon-momentun", "0.9"], "unknown flag --muon-momentun; did you mean --muon-momentum?"),
        (["--qqqqzzzz"], "unknown flag --qqqqzzzz; see pretrain_gpt.py --help"),
        (["--num-layers", "2", "muon"], "unexpected argument 'muon': flags begin with --"),
        (["--num-layers", "two"], "argument --num-layers: invalid int value: 'two'"),
        (["--muon-exchange", "pigeon"], "argument --muon-exchange: invalid choice: 'pigeon'"),
        (["--adaptive-muon-moment2-method", "namo"], "invalid choice: 'namo'"),
        (["--num-layers", "2", "--help"], "type: python -m megatron_muon.pretrain_gpt --help"),
        (["--num-lay", "2"], "unknown flag --num-lay; did you mean --num-layers?"),  # no abbreviations
    ],
)
def test_a_mistake_is_a_user_error_with_the_nearest_flag(parser, argv, message):
    with pytest.raises(UserError) as caught:
        parse(parser, argv)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_last_of_a_repeated_flag_wins(parser):
    assert parse(parser, ["--num-layers", "2", "--num-layers", "3"]).num_layers == 3


def test_muons_flags_keep_upstreams_defaults(parser):
    args = parse(parser, [])
    assert (args.muon_momentum, args.muon_num_ns_steps, args.muon_scale_mode) == (0.9, 5, "spectral")
    assert (args.muon_lr, args.muon_min_lr, args.muon_exchange, args.device) == (None, None, "owner", "auto")
    assert args.muon_log_params is False


# ------------------------------------------------------------------------------------------------ checks


def check(parser, *argv: str, ranks: int = 2, device: str = "cpu", env: dict[str, str] | None = None) -> None:
    args = parse(parser, ["--transformer-impl", "local", "--mock-data", *argv])
    check_settings(args, device=device, environ={"WORLD_SIZE": str(ranks), **(env or {})})


@pytest.mark.parametrize(
    ("tensor", "pipeline", "context", "ranks", "fits"),
    [
        (1, 1, 1, 1, True),
        (2, 1, 1, 2, True),
        (2, 1, 1, 4, True),
        (2, 1, 2, 4, True),
        (2, 2, 2, 8, True),
        (4, 1, 1, 2, False),
        (2, 1, 1, 3, False),
        (2, 1, 2, 2, False),
        (2, 2, 1, 2, False),
        (1, 1, 3, 4, False),
    ],
)
def test_parallel_sizes_have_to_fit_the_ranks(parser, tensor, pipeline, context, ranks, fits):
    argv = ("--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline))
    argv = (*argv, "--context-parallel-size", str(context))
    if fits and context > 1:
        with pytest.raises(UserError, match=rf"--context-parallel-size {context} needs Transformer Engine's attention"):
            check(parser, *argv, ranks=ranks)
    elif fits:
        check(parser, *argv, ranks=ranks)
    else:
        with pytest.raises(UserError, match=rf"does not fit {ranks} ranks.*--nproc-per-node"):
            check(parser, *argv, ranks=ranks)


def test_pipelines_are_refused_with_fsdp_only(parser):
    check(parser, "--pipeline-model-parallel-size", "2")
    with pytest.raises(UserError, match="--pipeline-model-parallel-size 2 does not work with --use-megatron-fsdp"):
        check(parser, "--pipeline-model-parallel-size", "2", "--use-megatron-fsdp")


@pytest.mark.parametrize(("optimizer", "refused"), [("muon", True), ("adaptive_muon", True), ("adam", False)])
def test_fp16_is_refused_with_muon_only(parser, optimizer, refused):
    if not refused:
        check(parser, "--optimizer", optimizer, "--fp16")
        return
    with pytest.raises(UserError, match=rf"--fp16 is not supported with --optimizer {optimizer}; use --bf16"):
        check(parser, "--optimizer", optimizer, "--fp16")


@pytest.mark.parametrize(
    ("connections", "fsdp", "refused"), [("1", True, True), ("1", False, False), ("32", True, False)]
)
def test_cuda_connections_matter_to_fsdp_only(parser, connections, fsdp, refused):
    argv = ["--use-megatron-fsdp"] if fsdp else []
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    if refused:
        with pytest.raises(UserError, match="unset CUDA_DEVICE_MAX_CONNECTIONS"):
            check(parser, *argv, env=env)
    else:
        check(parser, *argv, env=env)


def test_transformer_engine_has_to_be_installed(parser, monkeypatch):
    monkeypatch.setattr(arguments, "has_transformer_engine", lambda: False)
    with pytest.raises(UserError, match=r"not installed; type pip install 'megatron-muon\[te\]'"):
        check(parser, "--transformer-impl", "transformer_engine", device="cuda")


def test_transformer_engine_needs_a_gpu(parser, monkeypatch):
    monkeypatch.setattr(arguments, "has_transformer_engine", lambda: True)
    check(parser, "--transformer-impl", "transformer_engine", device="cuda")
    with pytest.raises(UserError, match="needs a GPU"):
        check(parser, "--transformer-impl", "transformer_engine", device="cpu")


def test_a_folder_without_a_checkpoint_is_not_loaded(parser, tmp_path):
    """Story: a fine-tuning with a mistyped folder trained from scratch, and its figures looked plausible."""
    here = str(tmp_path)
    with pytest.raises(UserError, match=r"--load .* holds no checkpoint: it has no latest_checkpointed_iteration\.txt"):
        check(parser, "--load", here)
    check(parser, "--load", here, "--save", here + "/", "--save-interval", "5")  # the first start of a run that resumes
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    check(parser, "--load", here)


def check_data(parser, *argv: str) -> None:
    check_settings(parse(parser, ["--transformer-impl", "local", *argv]), device="cpu", environ={"WORLD_SIZE": "1"})


def write_index(prefix, documents: int) -> str:
    prefix.with_suffix(".bin").write_bytes(b"")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1)
    prefix.with_suffix(".idx").write_bytes(head + bytes(12 * documents + 8 * (documents + 1)))
    return str(prefix)


def test_data_has_to_be_named(parser):
    with pytest.raises(UserError, match=r"no training data: give --data-path PREFIX .* or --mock-data"):
        check_data(parser)
    check_data(parser, "--mock-data")


def test_every_prefix_of_a_blend_has_to_exist(parser, tmp_path):
    there = write_index(tmp_path / "there", 1000)
    check_data(parser, "--data-path", "0.3", there, "0.7", there)
    with pytest.raises(UserError, match=r"absent\.bin does not exist; .* megatron-muon data prepare"):
        check_data(parser, "--data-path", "0.3", there, "0.7", str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"valid\.bin does not exist"):
        check_data(parser, "--train-data-path", there, "--valid-data-path", str(tmp_path / "valid"))


DAMAGED = {
    "empty": lambda whole: b"",
    "zeroed": lambda whole: bytes(len(whole)),
    "short head": lambda whole: whole[:7],
    "short": lambda whole: whole[:-1],
    "of another type": lambda whole: whole[:17] + b"\x09" + whole[18:],
    "of fractions": lambda whole: whole[:17] + b"\x06" + whole[18:],
    "of another version": lambda whole: whole[:9] + b"\x02" + whole[10:],
    "something else": lambda whole: b"not an index, but quite long enough",
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("flag", ["data", "train-data", "valid-data", "test-data"])
def test_a_damaged_index_is_refused(parser, tmp_path, flag, damage):
    """Under any flag but --data-path it was a traceback, in the dry run too."""
    prefix = write_index(tmp_path / "text", 1000)
    check_data(parser, f"--{flag}-path", prefix)
    file = tmp_path / "text.idx"
    file.write_bytes(DAMAGED[damage](file.read_bytes()))
    with pytest.raises(UserError, match=r"text\.idx is not an index of Megatron's data, or is damaged; type: [^\n]*$"):
        check_data(parser, f"--{flag}-path", prefix)
    with pytest.raises(UserError, match=r"text\.idx is not an index"):
        vocabulary.check_vocabulary(prefix, argparse.Namespace(padded_vocab_size=1000))


def test_an_index_that_cannot_be_read_is_refused(parser, tmp_path):
    prefix = write_index(tmp_path / "text", 1000)
    (tmp_path / "text.idx").unlink()
    (tmp_path / "text.idx").mkdir()
    with pytest.raises(UserError, match=r"text\.idx cannot be read \(Is a directory\)"):
        check_data(parser, "--train-data-path", prefix)


@pytest.mark.parametrize(
    ("documents", "split", "lacks"),
    [
        (1, None, "validation"),
        (1, "100,0,0", None),
        (1, "50,50,0", "training"),  # Python rounds 0.5 to 0, and so does megatron-core
        (10, "90,10,0", None),
        (10, "98,2,0", "validation"),
        (100, "98,2,0", None),
        (100, None, "test"),
        (1000, None, None),
        (0, "100,0,0", "training"),
    ],
)
def test_a_set_without_documents_is_refused(parser, tmp_path, documents, split, lacks):
    """megatron-core counts epochs until there are tokens enough; of no documents that never ends."""
    prefix = write_index(tmp_path / "text", documents)
    argv = ["--data-path", prefix, *(["--split", split] if split else [])]
    if lacks is None:
        check_data(parser, *argv)
        return
    with pytest.raises(UserError, match=rf"leaves no document of .* for {lacks}: it has {documents} in all") as caught:
        check_data(parser, *argv)
    assert (split or "969, 30, 1") in str(caught.value)


def test_the_header_is_read_as_megatron_writes_it(parser, tmp_path):
    from megatron_muon.data import prepare

    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("text")
    prepared = prepare([tmp_path], tmp_path / "out")
    with pytest.raises(UserError, match="it has 3 in all"):
        check_data(parser, "--data-path", str(prepared.prefix))


def test_the_save_directory_is_made_and_tried(tmp_path):
    check_writable(tmp_path / "new" / "deep", "--save")
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--save .*file/below: cannot write there \(Not a directory\)"):
        check_writable(tmp_path / "file" / "below", "--save")


def test_mistakes_that_do_not_depend_on_each_other_are_told_at_once(parser, tmp_path):
    """Each of Megatron-LM's functional tests had several reasons, of which one was told at a time."""
    with pytest.raises(UserError) as caught:
        check(parser, *MUON, "--fp16", "--save", str(tmp_path / "new"), "--tensor-model-parallel-size", "4")
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["--tensor-model-parallel-size", "--fp16", "--save"]
    assert not (tmp_path / "new").exists()


def test_saving_needs_an_interval(parser, tmp_path):
    with pytest.raises(UserError, match=r"--save .* needs --save-interval N"):
        check(parser, "--save", str(tmp_path))


def test_async_save_is_refused_where_it_would_not_be_asynchronous(parser):
    """megatron-core turned it off with a warning."""
    check(parser, "--async-save", "--use-persistent-ckpt-worker", device="cuda")
    with pytest.raises(UserError, match="does nothing without --use-persistent-ckpt-worker"):
        check(parser, "--async-save", device="cuda")
    with pytest.raises(UserError, match="does not work on the CPU"):
        check(parser, "--async-save", "--use-persistent-ckpt-worker")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_write_permission_is_refused(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UserError, match="Permission denied"):
        check_writable(tmp_path / "locked", "--save")


MUON = ("--optimizer", "muon", "--use-megatron-fsdp")
SHARDED = (*MUON, "--data-parallel-sharding-strategy", "optim_grads_params")


def test_a_layout_needs_a_place(parser, tmp_path):
    (tmp_path / "there.json").write_text("before")
    for name in ("new.json", "there.json"):
        check(parser, *SHARDED, "--muon-dump-layout", str(tmp_path / name))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("there.json", "before")]
    with pytest.raises(UserError, match=r"--muon-dump-layout .*no folder .*absent'; type mkdir -p .*absent$"):
        check(parser, *SHARDED, "--muon-dump-layout", str(tmp_path / "absent" / "layout.json"))
    for folder in (str(tmp_path), ""):
        with pytest.raises(UserError, match=r"is a folder; name a file, for instance .*layout\.json"):
            check(parser, *SHARDED, "--muon-dump-layout", folder)
    # The first rank writes; the other nodes need not have its folder.
    check(parser, *SHARDED, "--muon-dump-layout", str(tmp_path / "absent" / "layout.json"), env={"RANK": "1"})


def test_experts_have_a_layout_of_their_own(parser, tmp_path):
    (tmp_path / "layout.experts.json").mkdir()
    argv = (*SHARDED, "--muon-dump-layout", str(tmp_path / "layout.json"))
    check(parser, *argv)
    with pytest.raises(UserError, match=r"layout\.experts\.json' is a folder"):
        check(parser, *argv, "--num-experts", "4")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_layout_that_cannot_be_written_is_refused(parser, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    (tmp_path / "locked.json").write_text("")
    (tmp_path / "locked.json").chmod(0o400)
    for name in ("locked/layout.json", "locked.json"):
        with pytest.raises(UserError, match=r"cannot write .*Permission denied.*choose a file"):
            check(parser, *SHARDED, "--muon-dump-layout", str(tmp_path / name))


NO_SHARD = (*MUON, "--data-parallel-sharding-strategy", "no_shard")
ADAPTIVE = ("--optimizer", "adaptive_muon", "--use-megatron-fsdp")
ADAM = ("--optimizer", "adam", "--use-megatron-fsdp")
UPSTREAMS = ("--optimizer", "muon")
TP2 = ("--tensor-model-parallel-size", "2")

OF_MUON = (
    ("--muon-lr", "0.1"),
    ("--muon-ns", "gram"),
    ("--muon-split-gated-mlp", "--swiglu"),
    ("--muon-split-heads",),
    ("--muon-exclude", "router", "linear_fc?"),
    ("--muon-dump-layout", "layout.json"),
    ("--muon-share-replicated",),
)

REFUSED = [  # beside what test_refusals.py asks a script too
    (("--optimizer", "adaptive_muon"), "--optimizer adaptive_muon needs --use-megatron-fsdp"),
    ((*NO_SHARD, "--muon-dump-layout", "x.json"), r"nothing to write with .* no_shard: .* whole matrices; use optim"),
    ((*NO_SHARD, "--muon-ns", "gram"), "--muon-ns has no effect here"),
    ((*NO_SHARD, "--num-distributed-optimizer-instances", "2"), "2 has nothing to shard with .* no_shard"),
    (
        (*MUON, "--muon-share-replicated"),
        r"--muon-share-replicated is for .* no_shard: optim.* shares the work already",
    ),
    (
        (*NO_SHARD, "--muon-share-replicated", "--muon-exchange", "allgather"),
        "--muon-exchange allgather has no rows to exchange with --muon-share-replicated",
    ),
    (
        (*NO_SHARD, "--muon-share-replicated", "--muon-tp-mode", "distributed", *TP2),
        r"--muon-tp-mode distributed is not supported .* 2; use --muon-tp-mode blockw",
    ),
    (
        (*NO_SHARD, "--muon-share-replicated", "--muon-tp-mode", "distributed", "--expert-tensor-parallel-size", "2"),
        r"--muon-tp-mode distributed is not supported .* 2; use --muon-tp-mode blockw",
    ),
    ((*MUON, "--muon-exchange", "allgather", "--muon-exchange-buffer-mb", "8"), "gathers fp32, matrix by matrix"),
    ((*MUON, "--muon-split-heads", "--muon-no-split-qkv"), "-heads and --muon-no-split-qkv contradict each other"),
    (
        (*NO_SHARD, "--muon-split-heads", *TP2, "--muon-tp-mode", "duplicated"),
        r"--muon-tp-mode duplicated is not supported with --muon-split-heads.* 2: eve",
    ),
    ((*MUON, "--adaptive-muon-eps", "1e-6"), "-eps needs --optimizer adaptive_muon; add it or leave --adaptive"),
    (
        (*ADAPTIVE, *TP2, "--muon-tp-mode", "duplicated", "--data-parallel-sharding-strategy", "no_shard"),
        "--muon-tp-mode duplicated is not supported with --optimizer adaptive_muon",
    ),
]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        *REFUSED,
        *(
            ((*others, *flags), f"{flags[0]} needs --optimizer muon --use-megatron-fsdp; add them or")
            for others in (ADAM, UPSTREAMS)
            for flags in OF_MUON
        ),
    ],
)
def test_what_does_not_go_together_is_refused(parser, argv, message):
    with pytest.raises(UserError, match=message):
        check(parser, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ("--optimizer", "dist_muon"),
        (*NO_SHARD, "--muon-share-replicated"),
        (*NO_SHARD, "--muon-share-replicated", "--muon-tp-mode", "blockwise", *TP2),
        (*NO_SHARD, "--muon-share-replicated", "--muon-tp-mode", "duplicated"),
        (*NO_SHARD, "--muon-split-heads", *TP2),
        (*ADAPTIVE, "--adaptive-muon-moment2-method", "normuon", "--adaptive-muon-beta2", "0.9"),
        (*ADAPTIVE, "--muon-tp-mode", "duplicated", *TP2),
        *((*muon, *flags) for muon in (MUON, ADAPTIVE) for flags in OF_MUON[:5]),
    ],
)
def test_what_goes_together_is_not_refused(parser, argv):
    check(parser, *argv)


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
    options = parser.format_help().split("\noptions:\n", 1)[1]
    assert options.index("--muon-momentum ") < options.index("muon under megatron-fsdp:") < options.index("--muon-lr ")
    assert "10%)" in options
