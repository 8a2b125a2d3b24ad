"""What a wheel holds beside Python: all that a process reads of its rooms at run time."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Final

from tests.architecture.source_tree import ROOT, project_files

# What nobody reads at run time: for who builds images, or has a checkout.
OF_THE_CHECKOUT: Final = (
    "bench/results/", "deploy/grafana/", "deploy/helm/", "deploy/systemd/", "deploy/Dockerfile", "deploy/baton.env",
    "deploy/compose", "deploy/container_entry", "deploy/haproxy", "deploy/prometheus",
)  # fmt: skip


def is_shipped(path: str, packages: list[str], data: dict[str, list[str]]) -> bool:
    """Whether setuptools' package-data takes it: by the package that it lies in, and the path from there."""
    package = max((each for each in packages if path.startswith(each.replace(".", "/") + "/")), key=len)
    inside = path.removeprefix(package.replace(".", "/") + "/")
    patterns = [*data["*"], *data.get(package, [])]
    alike = (each for each in patterns if each.count("/") == inside.count("/"))
    return any(all(map(fnmatchcase, PurePosixPath(inside).parts, PurePosixPath(each).parts)) for each in alike)


def test_a_wheel_has_all_files_that_are_read_at_run_time_the_kernels_sources_too() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages, data = told["packages"], told["package-data"]
    rooms = [each for each in packages if "." not in each]
    ours = [path for path in project_files() if path.split("/")[0] in rooms]
    others = [path for path in ours if not path.endswith(".py")]
    left_out = [path for path in others if not is_shipped(path, packages, data)]
    assert [path for path in left_out if not path.startswith(OF_THE_CHECKOUT)] == []
    for path in (
        "kernels/cpu/library.cpp",
        "kernels/cpu/step.h",
        "kernels/triton_table.json",
        "deploy/demo_model/config.json",
    ):
        assert path in others and path not in left_out
    assert {str(PurePosixPath(path).parent).replace("/", ".") for path in ours if path.endswith("/__init__.py")} == {
        *packages
    }
