"""Which library a machine gets, and what happens where there is none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from kernels import choice, cpu_build
from kernels.choice import choose_kernels
from kernels.cpu_build import (
    COMPILERS,
    FLAGS,
    SOURCE_DIR,
    X86_VARIANTS,
    BuildError,
    Variant,
    bits_name,
    build,
    cpu_flags,
    cpu_kind,
    library_path,
    usable_variants,
    variants,
    variants_for,
)
from tests.kernels.back_ends import COMPILED, REFERENCE

CPUINFO = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma\nflags\t\t: other\n"


def test_the_flags_of_the_first_cpu_are_read() -> None:
    assert cpu_flags(CPUINFO) == {"fpu", "avx2", "fma"}
    assert cpu_flags("Features : neon") == frozenset()


@pytest.mark.covers("M04")
def test_cpus_on_which_a_library_may_choose_unlike_products_have_unlike_kinds() -> None:
    """Their bits differ, as oneDNN's do between AVX-512 and AVX2: nodes on them must not take over each other's sequences."""
    kind = cpu_kind(CPUINFO)
    assert kind == cpu_kind(CPUINFO.replace("fpu", "fpu hypervisor")), "what multiplies nothing makes no difference"
    others = {kind, *(cpu_kind(CPUINFO.replace("avx2", more)) for more in ("avx2 avx512_bf16", "sse4_1"))}
    assert len(others) == 3 and cpu_kind("model : 2\n" + CPUINFO) not in others
    assert cpu_kind("CPU part : 1") != cpu_kind("CPU part : 2")


@pytest.mark.covers("M04")
def test_each_maker_s_cpus_get_what_is_fastest_on_them_first() -> None:
    def names(vendor: str, without: str = "") -> list[str]:
        flags = sorted(X86_VARIANTS[0].cpu_flags - {without})
        return [each.name for each in variants_for(f"vendor_id\t: {vendor}\nflags\t\t: {' '.join(flags)}\n")]

    assert names("AuthenticAMD", without="amx_tile") == ["avx512bf16", "avx512", "avx2"]
    assert names("GenuineIntel") == ["amx", "avx512", "avx512bf16", "avx2"]
    assert names("GenuineIntel", without="avx512_bf16") == ["avx512", "avx2"]
    assert names("AuthenticAMD", without="avx512f") == names("GenuineIntel", without="avx512f") == ["avx2"]


@pytest.mark.covers("M04")
def test_the_best_variant_that_was_built_computes() -> None:
    found = choose_kernels("cpu")
    assert (found.kernels.name, found.shortfall) == (COMPILED[0].name, "")
    assert library_path(usable_variants()[0]).stem.startswith(found.kernels.name.replace("cpu", "baton", 1)), (
        "its sources are told"
    )
    assert choose_kernels("torch").kernels.name == REFERENCE.name


def test_a_variant_that_was_not_built_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    best, *others = usable_variants()
    if not others:
        pytest.skip("this CPU runs one variant only")
    monkeypatch.setattr(choice, "library_path", lambda each: tmp_path / "none" if each == best else library_path(each))
    assert choose_kernels("cpu").kernels.name == f"cpu-{bits_name(others[0])}"


_WITHOUT_ROOM_FOR_TILES: Final = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(8192)  # for signals: too little for tiles, which Linux then does not let it use
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, len(memory))), None) == 0
from kernels.choice import choose_kernels
print(choose_kernels("cpu").kernels.name)
"""


@pytest.mark.covers("M04")
def test_a_process_that_may_not_use_tiles_computes_without_them() -> None:
    tiles = [each for each in usable_variants() if "amx_tile" in each.cpu_flags]
    if not tiles:
        pytest.skip("this CPU has no tiles")
    found = subprocess.run([sys.executable, "-c", _WITHOUT_ROOM_FOR_TILES], capture_output=True, text=True, timeout=240)
    assert found.stdout.strip() == f"cpu-{bits_name(usable_variants()[len(tiles)])}", found.stderr


@pytest.mark.covers("M04")
def test_without_a_library_torch_computes_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choice, "has_numba", lambda: False)
    monkeypatch.setattr(choice, "library_path", lambda _: tmp_path / "none")
    found = choose_kernels("cpu")
    assert found.kernels.name.startswith("torch-")
    assert "make setup" in found.shortfall
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(choice, "library_path", lambda _: broken)
    found = choose_kernels("cpu")
    assert found.kernels.name.startswith("torch-")
    assert "broken.so cannot be loaded" in found.shortfall


def test_a_change_of_sources_or_flags_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert len({library_path(variant) for variant in X86_VARIANTS}) == len(X86_VARIANTS)
    monkeypatch.setattr(cpu_build, "SOURCE_DIR", tmp_path)
    (tmp_path / "library.cpp").write_text("int one;")
    before = library_path(X86_VARIANTS[0])
    assert library_path(X86_VARIANTS[0]) == before
    (tmp_path / "library.cpp").write_text("int two;")
    assert library_path(X86_VARIANTS[0]) != before


def test_building_says_in_one_sentence_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_build, "BUILD_DIR", tmp_path)
    monkeypatch.setattr(cpu_build, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler on the PATH"):
        build(X86_VARIANTS[0])
    if cpu_build.variants():
        assert cpu_build.main([]) == 0
        said = capsys.readouterr().out.splitlines()
        assert len(said) == 2 and "no C++ compiler" in said[0] and "numba or torch" in said[1]


def test_a_variant_that_does_not_compile_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "library.cpp").write_text("int one;")
    best, usable = X86_VARIANTS[0]._replace(flags=("-march=no-such-cpu",)), X86_VARIANTS[-1]
    monkeypatch.setattr(cpu_build, "SOURCE_DIR", tmp_path / "sources")
    monkeypatch.setattr(cpu_build, "BUILD_DIR", tmp_path / "built")
    monkeypatch.setattr(cpu_build, "variants", lambda: (best, usable))
    monkeypatch.setattr(cpu_build, "usable_variants", lambda: (best, usable))
    assert cpu_build.main([]) == 0
    assert [path.name for path in (tmp_path / "built").iterdir()] == [library_path(usable).name]
    said = capsys.readouterr().out
    assert f"does not compile the {best.name} kernels: " in said and said.endswith(
        f"kernels: built for {usable.name}\n"
    )


def test_here_only_what_this_cpu_runs_best_is_compiled_and_what_is_next_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the rest `make up` has no use, and a user would wait for it."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "library.cpp").write_text("int one;")
    of_any_cpu = [each._replace(name=name, flags=()) for name, each in zip("abcd", X86_VARIANTS, strict=True)]
    monkeypatch.setattr(cpu_build, "SOURCE_DIR", tmp_path / "sources")
    monkeypatch.setattr(cpu_build, "BUILD_DIR", tmp_path / "built")
    monkeypatch.setattr(cpu_build, "variants", lambda: of_any_cpu)
    monkeypatch.setattr(cpu_build, "usable_variants", lambda: of_any_cpu[1:])
    assert cpu_build.main(["--here"]) == 0
    assert {path.name[:8] for path in (tmp_path / "built").iterdir()} == {"baton-b-", "baton-c-"}
    assert capsys.readouterr().out.endswith("kernels: built for b, c\n")
    assert cpu_build.main(["--usable"]) == 0
    assert {path.name[:8] for path in (tmp_path / "built").iterdir()} == {f"baton-{name}-" for name in "bcd"}
    assert cpu_build.main([]) == 0
    assert {path.name[:8] for path in (tmp_path / "built").iterdir()} == {f"baton-{name}-" for name in "abcd"}


@pytest.mark.covers("M04")
@pytest.mark.parametrize(
    "variant", [each for each in X86_VARIANTS if each not in usable_variants()], ids=lambda each: each.name
)
def test_what_this_cpu_cannot_run_compiles(variant: Variant) -> None:
    """Its names, types and templates, in two seconds. A minute more would make code of it, as where it runs."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None or not variants():
        pytest.skip("no C++ compiler, or none of these CPUs")
    flags = [each for each in FLAGS if each not in ("-O3", "-shared")]
    command = [compiler, *flags, *variant.flags, "-Werror", "-fsyntax-only", str(SOURCE_DIR / "library.cpp")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not result.returncode, result.stderr[:4000]


def test_code_that_does_not_compile_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "library.cpp").write_text("this is not C++")
    monkeypatch.setattr(cpu_build, "SOURCE_DIR", tmp_path / "sources")
    monkeypatch.setattr(cpu_build, "BUILD_DIR", tmp_path / "built")
    with pytest.raises(BuildError, match=rf"does not compile the {X86_VARIANTS[0].name} kernels: .*error"):
        build(X86_VARIANTS[0])
    assert list((tmp_path / "built").iterdir()) == []
