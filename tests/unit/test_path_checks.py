"""What flags name on disk is looked at before anything starts: data, checkpoints to load, places to
write.
"""

import contextlib
import struct

import pytest

from megatron_muon.errors import UserError
from megatron_muon.megatron.data.corpus import prepare
from megatron_muon.megatron.flags.command_line import check_settings, parse


def check(parser, line: str, refused: str | None = None) -> None:
    """Checks a command line, which is to be refused in these words, or to pass."""
    args = parse(parser, ["--transformer-impl", "local", *line.split()])
    with pytest.raises(UserError, match=refused) if refused else contextlib.nullcontext():
        check_settings(args, device="cpu")


def test_a_folder_without_a_checkpoint_is_not_loaded(parser, tmp_path):
    """Story: a fine-tuning with a mistyped folder trained from scratch, and its figures looked
    plausible.
    """
    load = f"--mock-data --load {tmp_path}"
    lacks = r"--load .* has no checkpoint: latest_checkpointed_iteration\.txt is missing"
    check(parser, load, lacks)
    # the first start of one that resumes
    check(parser, f"{load} --save {tmp_path}/ --save-interval 5")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    check(parser, load)


def write_index(prefix, documents: int) -> str:
    prefix.with_suffix(".bin").write_bytes(b"")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1)
    prefix.with_suffix(".idx").write_bytes(head + bytes(12 * documents + 8 * (documents + 1)))
    return str(prefix)


def test_every_prefix_has_to_exist(parser, tmp_path):
    check(parser, "", r"no training data: give --data-path PREFIX .* or --mock-data")
    there, absent = write_index(tmp_path / "there", 1000), tmp_path / "absent"
    check(parser, f"--data-path 0.3 {there} 0.7 {there}")
    lacks = r"absent\.bin does not exist; .* megatron-muon data prepare"
    check(parser, f"--data-path 0.3 {there} 0.7 {absent}", lacks)
    check(parser, f"--train-data-path {there} --valid-data-path {absent}", lacks)
    (tmp_path / "there.idx").unlink()
    check(parser, f"--data-path {there}", r"there\.idx does not exist; .* data prepare")


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
    flags = [f"--{kind}-path {prefix}" for kind in ("data", "train-data", "test-data")]
    for flag in flags:
        check(parser, flag)
    if DAMAGED[damage] is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(DAMAGED[damage](file.read_bytes()))
    for flag in flags:
        check(
            parser, flag, r"text\.idx is not an index of Megatron's data, or is .*; type: [^\n]*$"
        )


@pytest.mark.parametrize(
    ("documents", "flags", "lacks"),
    [
        (1, "", "validation"),
        (1, "--split 100,0,0", None),
        (1, "--split 50,50,0", "training"),  # Python rounds 0.5 to 0, and so does megatron-core
        (10, "--split 98,2,0", "validation"),
        (100, "--split 98,2,0", None),
        (100, "", "test"),
        (0, "--split 100,0,0", "training"),
        (100, "--split 0,100,0", "training"),  # it "finished" with status 0
    ],
)
def test_a_set_without_documents_is_refused(parser, tmp_path, documents, flags, lacks):
    """megatron-core counts epochs until there are tokens enough; of no documents that never
    ends.
    """
    prefix = write_index(tmp_path / "text", documents)
    refused = f"leaves no document of .* for {lacks}: it has {documents} in all"
    line = f"--data-path {prefix} --eval-iters 0 {flags}"
    check(parser, line, refused if lacks else None)


@pytest.mark.parametrize("split", ["1e2,2,0", "98,-2,0", "98,2,0,5", "nan,1,1"])
def test_a_split_is_of_three_numbers(parser, tmp_path, split):
    prefix = write_index(tmp_path / "text", 1000)
    wrong = f"--split {split}: write three numbers"
    check(parser, f"--data-path {prefix} --split {split}", wrong)


def test_data_that_is_cut_short_is_refused(parser, tmp_path):
    """It was a traceback after 100 of 400 iterations, with nothing saved."""
    texts = [tmp_path / f"{number}.txt" for number in range(20)]
    for text in texts:
        text.write_text("text" * 99)
    prepare(texts, tmp_path / "made")
    line = f"--data-path {tmp_path}/made --split 50,50,0"
    check(parser, line)
    file = tmp_path / "made.bin"
    file.write_bytes(file.read_bytes()[:-1])
    check(parser, line, r"made\.bin is cut short: .* of")


def test_a_run_that_evaluates_needs_a_part_for_validation(parser, tmp_path):
    """It was a TypeError after the training."""
    prefix = write_index(tmp_path / "text", 100)
    lacks = "leaves no document of .* for validation"
    check(parser, f"--data-path {prefix} --split 100,0,0", lacks)
