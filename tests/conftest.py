"""What every test runs under."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # small models: threads cost more than they give, and results repeat exactly


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    """Run folders and other output land in the test's own folder."""
    monkeypatch.chdir(tmp_path)
