"""No process outlives the test that has started it, nor its limit."""

from __future__ import annotations

import signal
import subprocess

from tests.processes import ends_its_processes, outliving


def test_what_is_started_is_killed_with_its_own_children():
    with ends_its_processes():
        words = ["sh", "-c", "sleep 98 & echo; wait"]
        started = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
        assert started.stdout is not None and started.stdout.readline() == b"\n"
    assert started.stdout.read() == b"" and started.wait() == -signal.SIGKILL


def test_what_hangs_is_killed_at_the_limit():
    with ends_its_processes(limit_s=0.1):
        assert subprocess.run(["sleep", "98"]).returncode == -signal.SIGKILL


def test_what_is_for_later_tests_is_left_alone():
    with ends_its_processes(), outliving():
        left = subprocess.Popen(["sleep", "98"])
    assert left.poll() is None
    left.kill()
