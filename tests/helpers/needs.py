"""What a test needs, and how it is skipped where that is missing."""

import contextlib
import importlib.util
import os
import shutil

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def need(missing):
    """Skip a test for what is missing, except where all tests must run."""
    if missing and os.environ.get("RUN_ALL_TESTS"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


@contextlib.contextmanager
def browser(**options):
    """Yield an empty page of Chromium. The options are those of playwright's new_page()."""
    absent = [name for name in ("playwright", "sphinx") if importlib.util.find_spec(name) is None]
    need(f"not installed: {', '.join(absent)} (make .venv/ready-site)" if absent else None)
    chromium = shutil.which("chromium")
    need(None if chromium else "not installed: chromium (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running.new_page(**options)
        running.close()
