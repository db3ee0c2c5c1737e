"""Package metadata with version ranges; requirements/lock.txt has the tested versions."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
SHIPPED = ["configs", "scripts/slurm/pretrain.sbatch", "scripts/slurm/sweep.sbatch"]
"""Files of the repository's root that a wheel contains; megatron_muon/shipped.py finds them."""


def read_version() -> str:
    """Return the version from megatron_muon/version.py without importing the package."""
    text = (HERE / "megatron_muon" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise ValueError('megatron_muon/version.py has no line of the form __version__ = "1.2.3"')
    return match.group(1)


class BuildPy(build_py):
    """Copies `SHIPPED` into the wheel, without leftovers of an earlier build."""

    def run(self) -> None:
        """Build, then copy."""
        package = Path(self.build_lib, "megatron_muon")
        if not self.editable_mode:  # pip install -e finds the files at the root
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            for name in SHIPPED:
                for file in sorted(
                    path for path in (HERE / name, *(HERE / name).rglob("*")) if path.is_file()
                ):
                    target = package / "shipped" / file.relative_to(HERE)
                    self.mkpath(str(target.parent))
                    self.copy_file(str(file), str(target))


setup(
    name="megatron-muon",
    version=read_version(),
    description="Muon under Megatron-FSDP: an extension of megatron-core",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["muon", "optimizer", "megatron", "fsdp", "zero", "distributed training"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_muon", "megatron_muon.*"]),
    package_data={"megatron_muon": ["py.typed", "megatron/upstream/table.yaml"]},
    zip_safe=False,
    install_requires=[
        "torch>=2.11",
        "emerging-optimizers>=0.3",
        "filelock>=3.30",  # which has fallback_to_soft
        "msgspec>=0.19",
        "numpy>=1.26",
        "packaging>=24.2",
        "psutil>=5.9",
        "pyyaml>=6.0",
        "rich>=13.7",
    ],
    extras_require={
        "megatron": [
            # its internals are patched by version: see megatron_muon/megatron
            "megatron-core>=0.19,<0.21",
            "einops>=0.8",  # Megatron-FSDP imports it, megatron-core does not declare it
            "tensorboard>=2.16",
        ],
        "hf": ["transformers>=4.50"],
        "te": ["transformer-engine[pytorch]>=2.9"],
        "quack": ["quack-kernels>=0.6.5"],  # see core/methods/symmetric.py
        "plots": ["matplotlib>=3.8"],
        "wandb": ["wandb>=0.18"],
        "trainers": ["accelerate>=1.10", "pytorch-lightning>=2.5", "transformers>=5.0", "trl>=1.0"],
        "bench": ["deepspeed==0.19.8", "muon-fsdp2==0.3.0"],
        "dev": [
            "hypothesis>=6.100",
            "mypy>=1.15",
            "pdoc>=16",
            "pytest>=8.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.8",
            "ruff>=0.12",
            "setuptools>=77",
            # the library of megatron-core's wheel as a package of its own
            "megatron-fsdp>=0.6,<0.7",
            "types-PyYAML>=6.0",
        ],
    },
    cmdclass={"build_py": BuildPy},
    entry_points={"console_scripts": ["megatron-muon = megatron_muon.cli:main"]},
)
