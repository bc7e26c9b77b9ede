import os
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

folder = Path(os.environ["FOLDER"])
complete, wanted = folder / ".complete", f"{os.environ['MODEL_ID']}@{os.environ['MODEL_REVISION']}"
if not complete.is_file():
    snapshot_download(
        os.environ["MODEL_ID"],
        revision=os.environ["MODEL_REVISION"],
        local_dir=folder,
        allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"],
    )
    complete.write_text(wanted)
elif (found := complete.read_text()) not in ("", wanted):  # one of an older chart is empty
    sys.exit(f"{folder} has {found}, and {wanted} is wanted: leave model.path out, or name another folder")
