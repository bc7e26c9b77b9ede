"""The package page: the README with links that lead into the project, once it has an address."""

import runpy
from pathlib import Path

from setuptools import setup

root = Path(__file__).parent
project = runpy.run_path(str(root / "triptych" / "base" / "project.py"))
setup(
    long_description=project["with_absolute_links"]((root / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    project_urls=project["links"](),
)
