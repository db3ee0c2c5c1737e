"""What flags name on disk is looked at before anything starts: data, checkpoints to load, places to
write.
"""

import contextlib
import struct

import pytest

from megatron_muon.errors import UserError
from megatron_muon.megatron.data.corpus import prepare
from megatron_muon.megatron.flags.command_line import check_settings, parse


def check(parser, *argv: str, refused: str | None = None) -> None:
    """Checks a command line, which is to be refused in these words, or to pass."""
    args = parse(parser, ["--transformer-impl", "local", *argv])
    with pytest.raises(UserError, match=refused) if refused else contextlib.nullcontext():
        check_settings(args, device="cpu")


def test_a_folder_without_a_checkpoint_is_not_loaded(parser, tmp_path):
    """Story: a fine-tuning with a mistyped folder trained from scratch, and its figures looked
    plausible.
    """
    load = ("--mock-data", "--load", str(tmp_path))
    check(
        parser,
        *load,
        refused=r"--load .* holds no checkpoint, as it has no latest_checkpointed_iteration\.txt",
    )
    # the first start of one that resumes
    check(parser, *load, "--save", f"{tmp_path}/", "--save-interval", "5")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    check(parser, *load)


def write_index(prefix, documents: int) -> str:
    prefix.with_suffix(".bin").write_bytes(b"")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1)
    prefix.with_suffix(".idx").write_bytes(head + bytes(12 * documents + 8 * (documents + 1)))
    return str(prefix)


def test_every_prefix_has_to_exist(parser, tmp_path):
    check(parser, refused=r"no training data: give --data-path PREFIX .* or --mock-data")
    there, absent = write_index(tmp_path / "there", 1000), str(tmp_path / "absent")
    check(parser, "--data-path", "0.3", there, "0.7", there)
    lacks = r"absent\.bin does not exist; .* megatron-muon data prepare"
    check(parser, "--data-path", "0.3", there, "0.7", absent, refused=lacks)
    check(parser, "--train-data-path", there, "--valid-data-path", absent, refused=lacks)
    (tmp_path / "there.idx").unlink()
    check(
        parser,
        "--data-path",
        there,
        refused=r"there\.idx does not exist; .* megatron-muon data prepare",
    )


DAMAGED = {
    "empty": lambda whole: b"",
    "zeroed": lambda whole: bytes(len(whole)),
    "short head": lambda whole: whole[:7],
    "short": lambda whole: whole[:-1],
    "of another type": lambda whole: whole[:17] + b"\x09" + whole[18:],
    "of fractions": lambda whole: whole[:17] + b"\x06" + whole[18:],
    "of another version": lambda whole: whole[:9] + b"\x02" + whole[10:],
    "something else": lambda whole: b"not an index, but quite long enough",
    "a folder": None,
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_index_is_refused(parser, tmp_path, damage):
    """Under any flag but --data-path it was a traceback, in the dry run too."""
    prefix, file = write_index(tmp_path / "text", 1000), tmp_path / "text.idx"
    flags = [f"--{kind}-path" for kind in ("data", "train-data", "valid-data", "test-data")]
    for flag in flags:
        check(parser, flag, prefix)
    if DAMAGED[damage] is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(DAMAGED[damage](file.read_bytes()))
    for flag in flags:
        check(
            parser,
            flag,
            prefix,
            refused=r"text\.idx is not an index of Megatron's data, or is .*; type: [^\n]*$",
        )


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
        (100, "0,100,0", "training"),  # it "finished" with status 0
    ],
)
def test_a_set_without_documents_is_refused(parser, tmp_path, documents, split, lacks):
    """megatron-core counts epochs until there are tokens enough; of no documents that never
    ends.
    """
    prefix = write_index(tmp_path / "text", documents)
    refused = (
        f"--split {split or '969, 30, 1'} leaves no document of .* for {lacks}: it has {documents}"
        " in all"
    )
    argv = ["--eval-iters", "0", *(["--split", split] if split else [])]
    check(parser, "--data-path", prefix, *argv, refused=refused if lacks else None)


@pytest.mark.parametrize("split", ["1e2,2,0", "98,-2,0", "98,2,0,5", "1,2,x", "nan,1,1"])
def test_a_split_is_of_three_numbers(parser, tmp_path, split):
    prefix = write_index(tmp_path / "text", 1000)
    check(
        parser,
        "--data-path",
        prefix,
        "--split",
        split,
        refused=f"--split {split}: write three numbers",
    )


def test_data_that_is_cut_short_is_refused(parser, tmp_path):
    """It was a traceback after 100 of 400 iterations, with nothing saved."""
    texts = [tmp_path / f"{number}.txt" for number in range(20)]
    for text in texts:
        text.write_text("text" * 99)
    prepare(texts, tmp_path / "made")
    check(parser, "--data-path", str(tmp_path / "made"), "--split", "50,50,0")
    file = tmp_path / "made.bin"
    file.write_bytes(file.read_bytes()[:-1])
    check(
        parser,
        "--data-path",
        str(tmp_path / "made"),
        "--split",
        "50,50,0",
        refused=r"made\.bin is cut short: .* of",
    )


def test_a_run_that_evaluates_needs_a_part_for_validation(parser, tmp_path):
    """It was a TypeError after the training."""
    prefix = write_index(tmp_path / "text", 100)
    check(
        parser,
        "--data-path",
        prefix,
        "--split",
        "100,0,0",
        refused="leaves no document of .* for validation",
    )
