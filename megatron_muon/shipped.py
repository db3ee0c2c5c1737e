"""Files of the repository that ship with the package: configs/ and the SLURM scripts.

A wheel holds copies of them (`setup.py: BuildPy`), a checkout has them at its root.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_COPIES = _PACKAGE / "shipped"

FOLDER = _COPIES if _COPIES.is_dir() else _PACKAGE.parent
"""Where they lie, under the names that they have in the repository."""

QUICKSTART, QUICKSTART_DATA = Path("configs/quickstart.yaml"), Path("data/stdlib")
"""The experiment file of the quickstart, and the prefix of its data."""


def find(file: Path) -> Path:
    """The file itself, or the package's copy of a missing configs/NAME.yaml."""
    theirs = FOLDER / file
    is_config = file.parts[:1] == QUICKSTART.parts[:1] and ".." not in file.parts
    return theirs if is_config and not file.exists() and theirs.is_file() else file


def note(file: Path) -> str:
    """A note for a user whose file comes from the package; empty for other files."""
    found = find(file)
    return (
        "" if found == file else f"{file} is not in this folder: taking the package's own, {found}"
    )
