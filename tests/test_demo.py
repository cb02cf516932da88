"""The main job, as the command runs it: two processes and the small random model."""

import json
import os
import subprocess
import sys

import pytest

FIELDS = {
    "prompt_tokens": int,
    "matched_tokens": int,
    "bytes": int,
    "handoff_us": float,
    "ttft_handoff_ms": float,
    "ttft_recompute_ms": float,
    "identical": bool,
}
pytest.importorskip("transformers", reason="needs the extra 'hf'")


def demo(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "shmkv_tools.cli", "demo", "--model", "tiny", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def finished() -> subprocess.CompletedProcess:
    return demo("--json", "--prompts", "6")


@pytest.fixture
def report(finished) -> dict:
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_every_prompt_generates_what_a_single_process_generates(report):
    assert report["all_identical"] is True
    assert [prompt["identical"] for prompt in report["prompts"]] == [True] * 6


def test_the_report_has_its_fields(report):
    for prompt in report["prompts"]:
        assert {name: type(prompt[name]) for name in FIELDS} == FIELDS
        assert 0 < prompt["matched_tokens"] < prompt["prompt_tokens"]
        assert prompt["bytes"] > 0 and prompt["ttft_handoff_ms"] > 0 and prompt["ttft_recompute_ms"] > 0


def test_full_prompts_and_shared_prefixes_are_both_served(report):
    missing = [prompt["prompt_tokens"] - prompt["matched_tokens"] for prompt in report["prompts"]]
    assert 1 in missing and max(missing) > 1
    shared = {prompt["matched_tokens"] for prompt, n in zip(report["prompts"], missing, strict=True) if n > 1}
    assert len(shared) == 1  # the document's length


def test_progress_is_not_mixed_into_the_report(finished):
    assert "demo: " in finished.stderr and "demo: " not in finished.stdout


def test_corrupted_kv_changes_the_tokens_and_fails_the_run():
    control = demo("--json", "--corrupt", "--prompts", "2")
    assert control.returncode == 1, control.stderr
    report = json.loads(control.stdout)
    assert report["all_identical"] is False
    assert [prompt["identical"] for prompt in report["prompts"]] == [False, False]
    assert "as expected" in control.stderr


def test_nothing_is_left_in_shared_memory(finished):
    [name] = [line.split()[2] for line in finished.stderr.splitlines() if line.startswith("demo: segment ")]
    assert not [left for left in os.listdir("/dev/shm") if name.strip("/") in left]


def test_the_command_starts_without_torch_and_refuses_unknown_verbs():
    probe = "import sys, shmkv_tools.cli; shmkv_tools.cli.parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0
    refused = subprocess.run([sys.executable, "-m", "shmkv_tools.cli", "fly"], capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stdout == ""
    assert len(refused.stderr.splitlines()) == 1 and "'fly'" in refused.stderr
