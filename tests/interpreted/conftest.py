"""The pool of worker processes, which interpret as this process does."""

from __future__ import annotations

from tests.functional.conftest import pytest_sessionfinish, pytest_sessionstart, ranks

__all__ = ["pytest_sessionfinish", "pytest_sessionstart", "ranks"]
