"""The benchmark of many ranks, with few."""

import json
import re
import subprocess
import sys

import pytest
from processes import ROOT

from common.errors import UserError
from tools.bench import ranks


@pytest.mark.slow
def test_votes_and_06_are_measured_and_recorded(tmp_path):
    command = [sys.executable, "tools/bench/ranks.py", "--votes", "3", "--ranks", "4"]
    command += ["--step-ms", "5", "--log-file"]
    end = subprocess.run([*command, tmp_path / "log"], cwd=ROOT, capture_output=True, text=True)
    assert end.returncode == 0, end.stderr
    votes, script = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert (
        votes["what"] == "votes"
        and votes["ranks"] == 3
        and votes["vote_seconds"] > 0
        and votes["every"] >= 1
    )
    assert script["what"] == "06" and script["ranks"] == 4
    assert (
        all(script[f"{name}_seconds"] > 0 for name in ("start", "stop", "resume"))
        and script["memory_mib"] > 1
    )
    assert re.search(r"^ +3 +[\d.]+ ms .* %$", end.stdout, re.M) and re.search(
        r"^ +4 .* MiB .* s$", end.stdout, re.M
    )


def test_a_rank_that_fails_or_does_not_exit_ends_the_benchmark(monkeypatch, capfd):
    with pytest.raises(UserError, match="a rank exited with code 1: expected 0"):
        ranks.exit_codes(ranks.fork(2, lambda rank: 1 / rank), expected=0)
    assert "rank 0: ZeroDivisionError" in capfd.readouterr().err
    monkeypatch.setattr(ranks, "PATIENCE", 1)
    with pytest.raises(UserError, match="1 of 2 ranks have not exited within 1 s"):
        ranks.exit_codes(ranks.fork(2, lambda rank: rank and ranks.time.sleep(60)), expected=0)
