"""The main job, as the command runs it: two processes and the small random model."""

import json
import os
import subprocess
import sys

import pytest

from shmkv_tools import emulated
from shmkv_tools.team import DemoFailed

PATHS = {"local": "local", "cuda_ipc": "cuda_ipc", "cuda_peer": "cuda_peer", "staging": "staging", "nccl": "nccl",
         "in_place": "cuda_ipc"}
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


def demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "shmkv_tools.cli", "demo", "--model", "tiny", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **environment})


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


@pytest.mark.parametrize("run", ["finished", "by_each_path"])
def test_nothing_is_left_in_shared_memory(run, request):
    said = request.getfixturevalue(run).stderr.splitlines()
    [name] = [line.split()[2] for line in said if line.startswith("demo: segment ")]
    assert not [left for left in os.listdir("/dev/shm") if name.strip("/") in left]


# ---------------------------------------------------------------- by each path to device memory

@pytest.fixture(scope="module")
def by_each_path() -> subprocess.CompletedProcess:
    return demo("--emulated-gpu", "--json", "--prompts", "4", "--new-tokens", "16")


def test_by_each_path_to_device_memory_every_prompt_generates_the_same(by_each_path):
    assert by_each_path.returncode == 0, by_each_path.stderr
    report = json.loads(by_each_path.stdout)
    assert {line["path"]: line["came_by"] for line in report["paths"]} == {way: [by] for way, by in PATHS.items()}
    for line in report["paths"]:
        assert (line["identical"], line["prompts"], line["entries"]) == (4, 4, 3), line
        assert line["as_asked"] is True and line["bytes"] > 0 and line["handoff_us"] > 0
    assert report["all_identical"] is report["all_as_asked"] is True
    refused = {line["path"]: line["refused"] for line in report["paths"]}
    assert refused["local"] == {} and refused["in_place"] == {"local": "other process"}
    assert refused["cuda_peer"] == {"local": "other process", "cuda_ipc": "other device"}
    assert set(refused["nccl"]) == {"local", "cuda_ipc", "cuda_peer", "staging"}


def test_the_emulated_driver_is_called_what_it_is(by_each_path):
    assert "emulated driver: timings mean nothing" in by_each_path.stderr and "GPU" not in by_each_path.stderr
    assert json.loads(by_each_path.stdout)["warning"] == "emulated driver: timings mean nothing"
    assert "GPU" not in by_each_path.stdout


def test_corrupted_kv_changes_the_tokens_by_each_path():
    control = demo("--emulated-gpu", "--corrupt", "--prompts", "2", "--new-tokens", "16")
    assert control.returncode == 1, control.stderr
    assert "as expected" in control.stderr and "emulated driver: timings mean nothing" in control.stdout
    lines = {line.split()[0]: line for line in control.stdout.splitlines() if line.split()[0] in PATHS}
    assert set(lines) == set(PATHS) and all("0 of 2" in line for line in lines.values()), control.stdout


def test_a_path_that_was_not_the_one_asked_for_fails_the_run():
    strayed = demo("--emulated-gpu", "--prompts", "1", "--new-tokens", "2", EMUCUDA_P2P="0")
    assert strayed.returncode == 1, strayed.stderr
    [line] = [line for line in strayed.stdout.splitlines() if line.startswith("cuda_peer")]
    assert "1 of 1" in line and "cuda_peer: no peer access" in line and "NOT THE PATH ASKED FOR" in line
    assert strayed.stdout.count("NOT THE PATH") == 1 and "asked for: cuda_peer" in strayed.stderr


def test_without_gcc_or_a_checkout_the_emulated_driver_is_a_clear_error(tmp_path, monkeypatch):
    refused = demo("--emulated-gpu", PATH=str(tmp_path), TMPDIR=str(tmp_path))
    assert refused.returncode == 2 and refused.stdout == ""
    [line] = refused.stderr.splitlines()
    assert line.startswith("demo: FAILED: --emulated-gpu: ") and "install gcc" in line
    monkeypatch.setattr(emulated, "BUILDER", tmp_path / "build.py")
    with pytest.raises(DemoFailed, match="source checkout"):
        emulated.emulation()


# ---------------------------------------------------------------- the command

def test_the_command_starts_without_torch_and_refuses_unknown_verbs():
    probe = """if True:
        import sys
        from shmkv_tools.cli import main
        try:
            main(["--version"])
        except SystemExit as end:
            assert not end.code
        sys.exit("torch" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0
    refused = subprocess.run([sys.executable, "-m", "shmkv_tools.cli", "fly"], capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stdout == ""
    assert len(refused.stderr.splitlines()) == 1 and "'fly'" in refused.stderr
