"""Prints what a vLLM wheel requires in this environment, without extras and the packages of torch."""

import sys
import zipfile

from packaging.metadata import Metadata

_TORCH = {"torch", "torchaudio", "torchvision", "torchcodec"}

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Metadata.from_email(wheel.read(name), validate=False)
for requirement in metadata.requires_dist or []:
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name.lower() not in _TORCH:
        requirement.marker = None
        print(requirement)
