import os
from pathlib import Path

from huggingface_hub import snapshot_download

folder = Path(os.environ["FOLDER"])
if not (folder / ".complete").is_file():
    snapshot_download(
        os.environ["MODEL_ID"],
        revision=os.environ["MODEL_REVISION"],
        local_dir=folder,
        allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"],
    )
    (folder / ".complete").touch()
