"""Compare site-packages with a lock file; print the names of missing or broken packages.

A distribution is complete if its version is the locked one and every file of its RECORD exists with
its size. pip considers one installed once its METADATA exists, so an interrupted installation would
stay broken: --repair removes the metadata of broken distributions, and pip installs them again.
"""

import csv
import re
import shutil
import sys
import sysconfig
from pathlib import Path


def normalized(name: str) -> str:
    """The name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_whole(metadata: Path) -> bool:
    """Return if all recorded files of a distribution exist with their recorded sizes.

    importlib.metadata's `files` leaves out those that are missing.
    """
    try:
        record = (metadata / "RECORD").read_text(encoding="utf-8")
        (metadata / "METADATA").stat()
        for name, _, size in csv.reader(record.splitlines()):
            if not name.endswith(".pyc"):
                actual = (metadata.parent / name).stat().st_size
                if size and actual != int(size):
                    return False
    except OSError:
        return False
    return bool(record)


def main(arguments: list[str]) -> None:
    """Print the broken names on one line, an empty line where all is well."""
    repair = "--repair" in arguments
    lines = (
        line.split("#")[0].strip()
        for line in Path(arguments[-1]).read_text(encoding="utf-8").splitlines()
    )
    pins = {
        normalized(name): version
        for name, _, version in (line.partition("==") for line in lines if line)
    }
    site_packages = Path(sysconfig.get_path("purelib"))
    whole = set()
    for metadata in site_packages.glob("*.dist-info"):
        name, _, version = metadata.name.removesuffix(".dist-info").partition("-")
        name = normalized(name)
        if name not in pins:
            continue
        if not is_whole(metadata):
            if repair:
                shutil.rmtree(metadata)
        elif version == pins[name]:
            whole.add(name)
    if repair:
        for leftover in site_packages.glob("~*"):  # pip's name for what it was about to remove
            shutil.rmtree(leftover, ignore_errors=True)
    print(*sorted(pins.keys() - whole))


if __name__ == "__main__":
    main(sys.argv[1:])
