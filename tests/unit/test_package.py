"""What packaging needs: the explicit list of packages is the tree, and nothing shadows a well-known module."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("configs", "data", "kernels", "model", "scripts", "training")


def test_listed_packages_are_those_of_the_tree():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"msa_pretrain"} | {
        ".".join(["msa_pretrain", *path.parent.relative_to(ROOT).parts])
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(settings["packages"]) == found


def test_every_folder_with_code_is_a_package():
    missing = {
        path.parent
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert missing == set()
