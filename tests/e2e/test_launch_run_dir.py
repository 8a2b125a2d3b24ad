"""`baton up` whose run directory takes no file, or not the one that is to be written there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.cluster import BATON, START_BOUND_S, started_launcher
from tests.e2e.test_launch import error_in, loading_nodes, processes_of, run_to_the_end


@pytest.mark.parametrize("run_dir", ["/proc", "/dev/null", "/proc/none"])
def test_a_run_directory_that_cannot_be_written_is_one_line_and_exit_code_2(
    tiny_model: Path, tmp_path: Path, run_dir: str
) -> None:
    code, output = run_to_the_end(tiny_model, tmp_path, "--run-dir", run_dir)
    assert code == 2, output
    (line,) = output.splitlines()
    assert line.startswith(f"baton up: --run-dir {run_dir}: ")


def test_a_disk_that_takes_files_and_nothing_in_them_is_one_line_and_exit_code_2(
    tiny_model: Path, tmp_path: Path
) -> None:
    """As a full one does: no log would have said what was wrong."""
    command = [BATON, "up", "--model", str(tiny_model), "--port", "0", "--run-dir", str(tmp_path / "run")]
    full = ["bash", "-c", 'ulimit -f 0; exec "$@"', "-", *command]
    result = subprocess.run(full, capture_output=True, text=True, timeout=START_BOUND_S, check=False)
    assert (result.returncode, result.stdout) == (2, ""), result
    assert result.stderr == f"baton up: --run-dir {tmp_path / 'run'}: cannot be written: File too large\n"
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("name", ["router.log", "decode-0.log", "cluster.json"])
def test_what_stands_where_a_file_of_a_run_should_be_is_one_line_and_exit_code_2(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    code, output = run_to_the_end(tiny_model, tmp_path)
    assert code == 2, output
    line = error_in(output)
    assert line.startswith(f"baton up: --run-dir {tmp_path / 'run'}: ") and "Is a directory" in line


def test_a_cluster_json_that_cannot_be_written_in_the_end_is_one_line_and_exit_code_1(
    tiny_model: Path, tmp_path: Path
) -> None:
    with started_launcher(tiny_model, tmp_path) as launcher:
        loading_nodes(launcher)
        (tmp_path / "run" / "cluster.json").mkdir()
        output, _ = launcher.communicate(timeout=START_BOUND_S)
    assert launcher.returncode == 1, output
    line = error_in(output)
    assert line == f"baton up: --run-dir {tmp_path / 'run'}: cluster.json cannot be written: Is a directory", (
        "of the disk that is full"
    )
    assert processes_of(tmp_path) == []
