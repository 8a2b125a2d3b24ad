"""What a result says of its machine, and that no benchmark measures kernels that nobody meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.engine import EngineConfig
from bench.frame import check_model
from bench.machine import in_words, machine
from bench.peers import PeersConfig
from kernels import cpu_build
from kernels.choice import choose_kernels
from kernels.cpu_build import usable_variants

pytestmark = pytest.mark.skipif(not usable_variants(), reason="no kernels are compiled for this CPU")


@pytest.fixture
def changed_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an edit of kernels/cpu: no library is of these."""
    (tmp_path / "library.cpp").write_text("int changed;")
    monkeypatch.setattr(cpu_build, "SOURCE_DIR", tmp_path)


def model_in(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    return folder


def test_a_result_names_the_kernels_that_a_node_here_computes_with() -> None:
    told = machine()
    assert choose_kernels("cpu").kernels.name == f"cpu-{told['kernels']}"
    assert in_words(told).endswith(f", kernels {told['kernels']}")
    assert "kernels" not in in_words(told | {"kernels": None})


@pytest.mark.usefixtures("changed_sources")
def test_what_was_changed_and_not_compiled_is_not_measured(tmp_path: Path) -> None:
    """Nodes fall back to numba, several times slower, and say so in their logs, which a benchmark does not show."""
    model = model_in(tmp_path)
    assert machine()["kernels"] is None
    for start in (
        lambda: check_model(model),
        lambda: EngineConfig(model=model),
        lambda: PeersConfig(envs=tmp_path, model=model),
    ):
        with pytest.raises(ValueError, match=r"kernels/cpu is not compiled as it is now, .* run `make setup` first"):
            start()
    EngineConfig(model=model, kernels="torch")  # measures none of them


@pytest.mark.usefixtures("changed_sources")
def test_where_there_is_no_compiler_the_fallback_is_what_this_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_build, "COMPILERS", ("no-such-compiler",))
    check_model(model_in(tmp_path))
