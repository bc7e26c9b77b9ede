"""What pyproject.toml cannot say: the package page's links, and the kernels where a C++ compiler is."""

import runpy
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

root = Path(__file__).parent
project = runpy.run_path(str(root / "triptych" / "base" / "project.py"))
kernels = runpy.run_path(str(root / "triptych" / "kernels" / "library.py"))


class BuildWithKernels(build_py):
    """The package's files, and the library beside its sources. An editable install compiles on first use."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        try:
            kernels["compile_library"](Path(self.build_lib) / "triptych" / "kernels")
        except kernels["BuildError"] as error:
            self.warn(f"the wheel has no compiled kernels: {error}")


class WheelOfAnyPython(bdist_wheel):
    """A library without Python's ABI fits every Python of one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class DistributionWithKernels(Distribution):
    """Of one platform where the kernels are compiled."""

    def has_ext_modules(self) -> bool:
        return kernels["compiler"]() is not None


setup(
    distclass=DistributionWithKernels,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython},
    long_description=project["with_absolute_links"]((root / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    project_urls=project["links"](),
)
