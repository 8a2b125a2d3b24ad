"""What asks for KV before it is read, in C++ of its own: a wrong address, which is only asked for, shows in no result."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu_build import COMPILERS, SOURCE_DIR, usable_variants


def test_every_place_of_a_stream_lies_in_kv_however_few_chunks_are_fresh(tmp_path: Path) -> None:
    """A row's last tile has fewer chunks than a pass of all heads asks for: the rest are old ones, not what lies before them."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None or not usable_variants():
        pytest.skip("no C++ compiler, or no variant that this CPU runs")
    made = tmp_path / "stream_places"
    source = Path(__file__).with_name("stream_places.cpp")
    options = ("-std=c++17", "-Wno-psabi", "-D_GLIBCXX_ASSERTIONS", *usable_variants()[-1].flags, f"-I{SOURCE_DIR}")
    subprocess.run([compiler, *options, str(source), "-o", str(made)], check=True, timeout=100)
    ran = subprocess.run([made], capture_output=True, text=True, check=False, timeout=20)
    assert (ran.returncode, ran.stdout) == (0, "")
